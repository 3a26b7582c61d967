#include "aio/probe.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "aio/bytes.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/io_error.h"
#include "aio/numa.h"
#include "aio/ring_memory.h"
#include "base/status_macros.h"

#ifdef PENSTOCK_HAVE_URING
#include <liburing.h>
#endif

namespace penstock::aio {
namespace {

uint64_t ReadNumber(const std::string& path, uint64_t otherwise) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : otherwise;
}

Feature Works(std::string_view name, const absl::Status& status, std::string_view seen) {
  return {std::string(name), status.ok(), status.ok() ? std::string(seen) : std::string(status.message())};
}

// The backend's own start-up proves itself with a real transfer.
Feature TryBackend(BackendKind kind) {
  EngineOptions options;
  options.backend = kind;
  options.allow_fallback = false;
  options.log = [](std::string_view) {};
  const auto engine = Engine::Create(options);
  return Works(BackendName(kind), engine.status(), "a probe transfer succeeded");
}

#ifdef PENSTOCK_HAVE_URING

Feature TryRing(std::string_view name, unsigned flags) {
  io_uring ring{};
  const int error = -io_uring_queue_init(8, &ring, flags);
  if (error != 0) return {std::string(name), false, ErrnoText(error)};
  io_uring_queue_exit(&ring);
  return {std::string(name), true, ""};
}

// Polled rings set up anywhere; whether the device polls is known only from a read. Direct I/O is required
// too, so the read is of a scratch file in the current directory.
Feature TryPolledRead() {
  Feature feature{"polled I/O (IOPOLL)", false, ""};
  io_uring ring{};
  if (const int error = -io_uring_queue_init(8, &ring, IORING_SETUP_IOPOLL); error != 0) {
    feature.detail = ErrnoText(error);
    return feature;
  }
  AfterRingMapped();
  const int fd = open(".", O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
  void* const page = mmap(nullptr, kSectorBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fd < 0 || page == MAP_FAILED ||
      pwrite(fd, page, kSectorBytes, 0) != static_cast<ssize_t>(kSectorBytes)) {
    feature.detail = absl::StrCat("not tried, no scratch file here: ", ErrnoText(errno));
  } else {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring);
    io_uring_prep_read(entry, fd, page, kSectorBytes, 0);
    io_uring_cqe* done = nullptr;
    const int submitted = io_uring_submit_and_wait(&ring, 1);
    const int peeked = submitted < 0 ? submitted : io_uring_peek_cqe(&ring, &done);
    const int result = peeked < 0 ? peeked : done->res;
    feature.available = result == static_cast<int>(kSectorBytes);
    feature.detail = feature.available ? "a read succeeded"
                                       : absl::StrCat("set up, but a read fails: ", ErrnoText(-result));
  }
  if (page != MAP_FAILED) munmap(page, kSectorBytes);
  if (fd >= 0) close(fd);
  BeforeRingUnmapped();
  io_uring_queue_exit(&ring);
  return feature;
}

std::vector<Feature> ProbeRings() {
  std::vector<Feature> features;
  features.push_back(TryRing("single issuer, deferred completions",
                             IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN));
  features.push_back(TryRing("cooperative completions", IORING_SETUP_COOP_TASKRUN));
  features.push_back(TryPolledRead());
  io_uring ring{};
  if (io_uring_queue_init(8, &ring, 0) != 0) return features;
  Feature files{"registered files", io_uring_register_files_sparse(&ring, 8) == 0, ""};
  features.push_back(files);
  void* const pages =
      mmap(nullptr, kHugePageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages != MAP_FAILED) {
    const iovec buffer{pages, kHugePageBytes};
    const int error = -io_uring_register_buffers(&ring, &buffer, 1);
    features.push_back(
        {"registered buffers", error == 0,
         error == 0 ? "" : absl::StrCat(ErrnoText(error), "; costs four to five times the CPU per GiB")});
    munmap(pages, kHugePageBytes);
  }
  io_uring_queue_exit(&ring);
  return features;
}

#else

std::vector<Feature> ProbeRings() { return {}; }

#endif

std::vector<Feature> ProbeMemory() {
  std::vector<Feature> features;
  ArenaOptions options;
  options.bytes = kHugePageBytes;
  const auto try_pages = [&](std::string_view name, bool hugetlb, bool transparent, PageKind wanted) {
    options.try_hugetlb = hugetlb;
    options.try_transparent = transparent;
    const auto arena = Arena::Create(options);
    if (!arena.ok()) {
      features.push_back(Works(name, arena.status(), ""));
      return;
    }
    const bool there = (*arena)->page_kind() == wanted;
    features.push_back(
        {std::string(name), there, there || (*arena)->notes().empty() ? "" : (*arena)->notes()[0]});
  };
  try_pages("reserved huge pages", true, false, PageKind::kHugetlb);
  try_pages("transparent huge pages", false, true, PageKind::kTransparent);
  options.try_hugetlb = false;
  options.try_transparent = false;
  options.bytes = 16 * kMiB;
  const auto locked = Arena::Create(options);
  if (!locked.ok()) return features;
  features.push_back({"locking 16 MiB of memory", (*locked)->locked(),
                      (*locked)->notes().empty() ? "" : (*locked)->notes().back()});
  return features;
}

}  // namespace

IoFeatures ProbeIo() {
  IoFeatures features;
  utsname name{};
  if (uname(&name) == 0) features.kernel = name.release;
  features.io_uring = ProbeRings();
  features.io_uring_works = TryBackend(BackendKind::kIoUring);
  features.libaio_works = TryBackend(BackendKind::kLibaio);
  features.memory = ProbeMemory();
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    features.memlock_limit_bytes = limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur;
  }
  features.aio_max_requests = ReadNumber("/proc/sys/fs/aio-max-nr", 0);
  features.aio_used_requests = ReadNumber("/proc/sys/fs/aio-nr", 0);
  features.numa_nodes = NumaNodes();
  features.best_backend = std::string(BackendName(features.io_uring_works.available ? BackendKind::kIoUring
                                                  : features.libaio_works.available ? BackendKind::kLibaio
                                                                                    : BackendKind::kThreads));
  return features;
}

absl::StatusOr<DirectoryFeatures> ProbeDirectory(const std::string& directory) {
  ASSIGN_OR_RETURN(const auto space, QueryFileSystem(directory));
  DirectoryFeatures features;
  features.directory = directory;
  features.file_system = space.type;
  features.free_bytes = space.free_bytes;
  features.total_bytes = space.total_bytes;
  features.copy_on_write = space.copy_on_write;

  FileOptions options;
  options.path = absl::StrCat(directory, "/.penstock-probe");
  options.nameless = true;
  auto file = File::Open(options);
  if (!file.ok() && absl::IsFailedPrecondition(file.status())) {
    features.direct_io = {"direct I/O", false, std::string(file.status().message())};
    options.direct = false;
    file = File::Open(options);
  } else if (file.ok()) {
    const Alignment& alignment = (*file)->alignment();
    features.memory_alignment = alignment.memory;
    features.offset_alignment = alignment.offset;
    features.direct_io = {"direct I/O", true,
                          absl::StrCat("memory aligned to ", alignment.memory, ", offsets and lengths to ",
                                       alignment.offset, " (", alignment.source, ")")};
  }
  RETURN_IF_ERROR(file.status());
  features.device = (*file)->device_name();
  features.preallocation = (*file)->Preallocate(kMiB).ok() && (*file)->preallocated();
  file->reset();

  // A partition has its queue in the directory of its disk.
  std::string queue = absl::StrCat("/sys/class/block/", features.device, "/queue/");
  std::error_code error;
  if (!std::filesystem::exists(queue, error))
    queue = absl::StrCat("/sys/class/block/", features.device, "/../queue/");
  features.logical_sector_bytes = static_cast<uint32_t>(ReadNumber(queue + "logical_block_size", 0));
  features.physical_sector_bytes = static_cast<uint32_t>(ReadNumber(queue + "physical_block_size", 0));
  features.max_transfer_bytes = ReadNumber(queue + "max_sectors_kb", 0) * kKiB;
  features.queue_requests = static_cast<uint32_t>(ReadNumber(queue + "nr_requests", 0));
  features.rotational = ReadNumber(queue + "rotational", 0) != 0;
  features.numa_node = NodeOfDevice(features.device);
  return features;
}

}  // namespace penstock::aio
