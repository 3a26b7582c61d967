#include "tools/machine/env_probe.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "aio/arena.h"
#include "aio/cufile.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/loaded_library.h"
#include "aio/probe.h"
#include "base/status_macros.h"
#include "kernels/cpu_features.h"
#include "tools/base/size.h"
#include "tools/machine/nvme_health.h"

namespace penstock::tools {
namespace {

std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return text;
}

// One line of /proc or /sys, without its newline; "" where there is none.
std::string ReadLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return std::string(absl::StripAsciiWhitespace(line));
}

class Report {
 public:
  void Section(std::string_view section) { section_ = section; }
  void Ok(std::string_view name, std::string value) { Add(name, std::move(value), EnvState::kOk, ""); }
  void Limited(std::string_view name, std::string value, std::string_view cost) {
    Add(name, std::move(value), EnvState::kLimited, cost);
  }
  void Missing(std::string_view name, std::string value, std::string_view cost) {
    Add(name, std::move(value), EnvState::kMissing, cost);
  }
  std::vector<EnvItem> Take() { return std::move(items_); }

 private:
  void Add(std::string_view name, std::string value, EnvState state, std::string_view cost) {
    for (char& c : value) {
      if (static_cast<unsigned char>(c) < 0x20) c = ' ';
    }
    items_.push_back({section_, std::string(name), std::move(value), state, std::string(cost)});
  }
  std::string section_;
  std::vector<EnvItem> items_;
};

void Kernel(Report& r) {
  r.Section("kernel");
  struct utsname name {};
  if (::uname(&name) == 0) r.Ok("release", absl::StrCat(name.sysname, " ", name.release, " ", name.machine));
}

void Cpu(Report& r) {
  r.Section("cpu");
  std::istringstream info(ReadText("/proc/cpuinfo"));
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (!line.starts_with("model name") || colon == std::string::npos) continue;
    r.Ok("model", line.substr(colon + 2));
    break;
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  const int usable = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
  r.Ok("usable_cpus", absl::StrCat(usable > 0 ? usable : static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN))));
  if (const std::string nodes = ReadLine("/sys/devices/system/node/online"); !nodes.empty())
    r.Ok("numa_nodes", nodes);
  if (kernels::BestSimdLevel() == kernels::SimdLevel::kPortable) {
    r.Limited("simd", kernels::DescribeCpu(),
              "optimizer and checksums run without vector instructions, several times slower");
  } else if (kernels::ActiveSimdLevel() != kernels::BestSimdLevel()) {
    r.Limited("simd", kernels::DescribeCpu(), "PENSTOCK_SIMD lowers it; unset it for the best that is here");
  } else {
    r.Ok("simd", kernels::DescribeCpu());
  }
  if (kernels::GetCpuFeatures().avx512_bf16) {
    r.Ok("bf16_compute", "in hardware");
  } else {
    r.Limited("bf16_compute", "emulated",
              "bf16 matrix products are slow on this processor; --dtype fp32 may be faster");
  }
}

std::string Limit(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : FormatBytes(static_cast<int64_t>(limit));
}

void Memory(Report& r) {
  r.Section("memory");
  const std::string info = ReadText("/proc/meminfo");
  r.Ok("total", FormatBytes(MemInfoValue(info, "MemTotal")));
  r.Ok("available", FormatBytes(MemInfoValue(info, "MemAvailable")));
  r.Ok("hugetlb",
       absl::StrCat(MemInfoValue(info, "HugePages_Free"), " free of ", MemInfoValue(info, "HugePages_Total"),
                    " pages of ", FormatBytes(MemInfoValue(info, "Hugepagesize"))));
  const std::string thp = BracketedChoice(ReadLine("/sys/kernel/mm/transparent_hugepage/enabled"));
  if (thp.empty() || thp == "never") {
    r.Limited(
        "transparent_huge", thp.empty() ? "not there" : thp,
        "without reserved huge pages the arena has pages of 4 KiB: up to ten times the CPU per GiB of I/O; "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
  } else {
    r.Ok("transparent_huge", thp);
  }
  struct rlimit lock {};
  if (::getrlimit(RLIMIT_MEMLOCK, &lock) == 0) {
    const std::string value = absl::StrCat(Limit(lock.rlim_cur), " (hard ", Limit(lock.rlim_max), ")");
    const auto total = static_cast<uint64_t>(std::max<int64_t>(0, MemInfoValue(info, "MemTotal")));
    // A process with CAP_IPC_LOCK is not bound by it; whether that holds is what the arena below shows.
    if (lock.rlim_cur != RLIM_INFINITY && lock.rlim_cur < total / 2 && ::geteuid() != 0) {
      r.Limited("memlock", value,
                "an arena beyond it is neither locked nor registered, which costs CPU; ulimit -l unlimited");
    } else {
      r.Ok("memlock", value);
    }
  }
  aio::ArenaOptions options;
  options.bytes = 8 * aio::kMiB;
  const auto arena = aio::Arena::Create(options);
  if (!arena.ok()) {
    r.Missing("arena", "refused", std::string(arena.status().message()));
    return;
  }
  const std::string value = absl::StrCat(std::string(aio::PageKindName((*arena)->page_kind())), " pages, ",
                                         (*arena)->locked() ? "locked" : "not locked");
  const std::string notes = absl::StrJoin((*arena)->notes(), "; ");
  if ((*arena)->page_kind() == aio::PageKind::kSmall || !(*arena)->locked()) {
    r.Limited("arena", value, notes);
  } else {
    r.Ok("arena", value);
  }
}

// ---- I/O.
// -------------------------------------------------------------------------------------------------------------

// "single issuer, deferred completions" as a name: "single_issuer_deferred_completions".
std::string SnakeCase(std::string_view text) {
  std::string name;
  for (const char c : text) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c))) {
      name += absl::ascii_tolower(static_cast<unsigned char>(c));
    } else if (!name.empty() && name.back() != '_') {
      name += '_';
    }
  }
  while (!name.empty() && name.back() == '_') name.pop_back();
  return name;
}

void Rings(Report& r, const aio::IoFeatures& features) {
  if (!features.io_uring_works.available) {
    const std::string disabled = ReadLine("/proc/sys/kernel/io_uring_disabled");
    const char* way_out = disabled.empty() || disabled == "0" ? "a container's seccomp profile may forbid it"
                                                              : "sysctl kernel.io_uring_disabled=0";
    r.Missing("io_uring_rings", features.io_uring_works.detail,
              absl::StrCat("libaio or threads do the I/O instead, at more CPU per GiB; ", way_out));
    return;
  }
  for (const aio::Feature& feature : features.io_uring) {
    const std::string name = SnakeCase(feature.name);
    if (feature.available) {
      r.Ok(name, "yes");
    } else if (name.starts_with("polled")) {
      // Nothing of ours needs it: worth knowing, not worth a warning.
      r.Ok(name, absl::StrCat("no (", feature.detail, ")"));
    } else if (name.starts_with("registered_buffers")) {
      r.Limited(name, "no", feature.detail);
    } else {
      r.Limited(name, feature.detail.empty() ? "no" : absl::StrCat("no (", feature.detail, ")"),
                "some more CPU per request; newer kernels have it");
    }
  }
}

// A real transfer: 1 MiB written and read back through the one backend, no stepping down. Also says which
// step down happened within it (registered buffers, say).
absl::StatusOr<std::string> TryBackend(aio::BackendKind kind, aio::File& file, const aio::Arena& arena,
                                       std::byte* memory, uint64_t bytes) {
  aio::EngineOptions options;
  options.backend = kind;
  options.allow_fallback = false;
  options.arenas = {&arena};
  options.log = [](std::string_view) {};
  ASSIGN_OR_RETURN(auto engine, aio::Engine::Create(options));
  const auto fill = static_cast<unsigned char>(0x40 + static_cast<int>(kind));
  std::memset(memory, fill, bytes);
  aio::Request write;
  write.PrepareWrite(file, 0, memory, bytes);
  absl::Status status = engine->Submit(&write);
  if (status.ok()) status = engine->Wait(&write);
  RETURN_IF_ERROR(status);
  std::memset(memory, 0, bytes);
  aio::Request read;
  read.PrepareRead(file, 0, memory, bytes);
  status = engine->Submit(&read);
  if (status.ok()) status = engine->Wait(&read);
  RETURN_IF_ERROR(status);
  for (uint64_t i = 0; i < bytes; ++i) {
    if (memory[i] != std::byte{fill})
      return absl::DataLossError("what was read back is not what was written");
  }
  return absl::StrJoin(engine->stats().fallbacks, "; ");
}

void Backends(Report& r, aio::File& file) {
  constexpr uint64_t kBytes = 1 * aio::kMiB;
  aio::ArenaOptions options;
  options.bytes = 2 * aio::kMiB;
  auto arena = aio::Arena::Create(options);
  if (!arena.ok()) return;  // said in the memory section
  auto region = (*arena)->Allocate(kBytes);
  if (!region.ok()) return;
  struct Candidate {
    aio::BackendKind kind;
    const char* cost;
  };
  for (const Candidate& c :
       {Candidate{aio::BackendKind::kIoUring, "libaio or threads do the I/O instead, at more CPU per GiB"},
        Candidate{aio::BackendKind::kLibaio, "only matters where io_uring is not there"},
        Candidate{aio::BackendKind::kThreads, "only matters where nothing else is there"}}) {
    const std::string name(aio::BackendName(c.kind));
    const auto tried = TryBackend(c.kind, file, **arena, region->data(), kBytes);
    if (!tried.ok()) {
      r.Missing(name, std::string(tried.status().message()), c.cost);
    } else if (!tried->empty()) {
      r.Limited(name, "works: written and read back", *tried);
    } else {
      r.Ok(name, "works: written and read back");
    }
  }
}

void Io(Report& r, aio::File* file) {
  r.Section("io");
  const aio::IoFeatures features = aio::ProbeIo();
  Rings(r, features);
  if (file != nullptr) Backends(r, *file);
  r.Ok("best_backend", features.best_backend);
  const std::string in_use =
      absl::StrCat(features.aio_used_requests, " of ", features.aio_max_requests, " in use");
  // A libaio context of ours takes up to 256.
  if (features.aio_used_requests + 1024 > features.aio_max_requests) {
    r.Limited("aio_max_nr", in_use, "libaio contexts may be refused; sysctl fs.aio-max-nr=1048576");
  } else {
    r.Ok("aio_max_nr", in_use);
  }
}

absl::Status Directory(Report& r, const std::string& directory) {
  ASSIGN_OR_RETURN(const auto d, aio::ProbeDirectory(directory));
  r.Section("directory");
  const std::unique_ptr<char, decltype(&::free)> real(::realpath(directory.c_str(), nullptr), ::free);
  r.Ok("path", real != nullptr ? real.get() : directory);
  if (d.copy_on_write) {
    r.Limited("file_system", d.file_system,
              "overwriting in place is not in place here: more writes, more fragments; use ext4 or xfs");
  } else {
    r.Ok("file_system", d.file_system);
  }
  r.Ok("free", absl::StrCat(FormatBytes(static_cast<int64_t>(d.free_bytes)), " of ",
                            FormatBytes(static_cast<int64_t>(d.total_bytes))));
  if (d.direct_io.available) {
    r.Ok("direct_io", d.direct_io.detail);
  } else {
    r.Missing("direct_io", d.direct_io.detail,
              "no run with --offload nvme can keep its state here; choose a directory on an NVMe drive");
  }
  if (d.preallocation) {
    r.Ok("preallocation", "yes");
  } else {
    r.Limited("preallocation", "no",
              "a disk may fill up in the middle of a run, and first writes are slower");
  }
  r.Ok("device", d.device);
  if (d.logical_sector_bytes == 0) return absl::OkStatus();  // no queue of its own: network, memory
  r.Ok("sectors",
       absl::StrCat("logical ", d.logical_sector_bytes, " B, physical ", d.physical_sector_bytes, " B"));
  r.Ok("queue", absl::StrCat(d.queue_requests, " requests of at most ",
                             FormatBytes(static_cast<int64_t>(d.max_transfer_bytes))));
  if (d.rotational) {
    r.Limited("rotational", "yes, says the kernel",
              "a disk that seeks is far slower than NVMe (virtual disks may claim it wrongly)");
  }
  if (d.numa_node >= 0) r.Ok("numa_node", absl::StrCat(d.numa_node));
  return absl::OkStatus();
}

// ---- Libraries.
// -------------------------------------------------------------------------------------------------------

void Torch(Report& r) {
  r.Section("torch");
  const std::string maps = ReadText("/proc/self/maps");
#ifdef PENSTOCK_TORCH_VERSION
  r.Ok("libtorch", absl::StrCat(PENSTOCK_TORCH_VERSION, " ", MappedFile(maps, "libtorch_cpu")));
#else
  r.Missing("libtorch", "not built in",
            "penstock train, sample and export are not there; install libtorch-dev and build again");
#endif
  // What is mapped is what runs: the alternatives system decides at load time.
  for (const char* fast : {"openblas", "mkl_rt", "mkl_core", "blis", "armpl"}) {
    if (const std::string path = MappedFile(maps, fast); !path.empty()) return r.Ok("blas", path);
  }
  for (const char* slow : {"libblas", "libatlas", "libcblas"}) {
    if (const std::string path = MappedFile(maps, slow); !path.empty()) {
      return r.Limited("blas", path, "matrix products are up to 20x slower; install libopenblas0-pthread");
    }
  }
  // LibTorch from PyPI has its own inside.
  Dl_info where{};
  if (void* product = ::dlsym(RTLD_DEFAULT, "sgemm_"); product != nullptr && ::dladdr(product, &where) != 0) {
    return r.Ok("blas", absl::StrCat("inside ", where.dli_fname));
  }
#ifdef PENSTOCK_TORCH_VERSION
  r.Missing("blas", "none is loaded in this program",
            "nothing multiplies matrices in this program; `penstock env` tells what penstock train has");
#else
  r.Missing("blas", "none is loaded in this program",
            "nothing multiplies matrices in this program: it cannot train");
#endif
}

// "MAJOR.MINOR" of the numbers that CUDA gives: 12040.
std::string CudaVersion(int number) { return absl::StrCat(number / 1000, ".", number % 1000 / 10); }

void Gpus(Report& r) {
  r.Section("cuda");
#ifdef PENSTOCK_HAVE_CUDA
  r.Ok("kernels", "built in");
#else
  r.Missing("kernels", "not built in", "--device cuda is not there; build where nvcc is");
#endif
  const aio::LoadedLibrary driver({"libcuda.so.1"});
  const auto init = driver.Get<int(unsigned)>("cuInit");
  const auto version = driver.Get<int(int*)>("cuDriverGetVersion");
  const auto count = driver.Get<int(int*)>("cuDeviceGetCount");
  const auto get = driver.Get<int(int*, int)>("cuDeviceGet");
  const auto name = driver.Get<int(char*, int, int)>("cuDeviceGetName");
  const auto memory = driver.Get<int(size_t*, int)>("cuDeviceTotalMem_v2");
  const auto attribute = driver.Get<int(int*, int, int)>("cuDeviceGetAttribute");
  if (!init || !version || !count || !get || !name || !memory || !attribute) {
    r.Missing("driver", "no libcuda.so.1", "compute stays on the processor");
  } else if (const int error = init(0); error != 0) {
    r.Missing("driver", absl::StrCat("cuInit failed with ", error), "compute stays on the processor");
  } else {
    int number = 0;
    int devices = 0;
    version(&number);
    count(&devices);
    r.Ok("driver", absl::StrCat("CUDA ", CudaVersion(number)));
    if (devices == 0) r.Missing("devices", "none", "compute stays on the processor");
    for (int i = 0; i < devices; ++i) {
      int device = 0;
      std::array<char, 256> text{};
      size_t bytes = 0;
      int major_version = 0;
      int minor_version = 0;
      // 75 and 76: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
      if (get(&device, i) != 0 || name(text.data(), static_cast<int>(text.size()) - 1, device) != 0 ||
          memory(&bytes, device) != 0 || attribute(&major_version, 75, device) != 0 ||
          attribute(&minor_version, 76, device) != 0) {
        r.Limited(absl::StrCat("device_", i), "does not answer", "it cannot be used; see nvidia-smi");
        continue;
      }
      r.Ok(absl::StrCat("device_", i),
           absl::StrCat(text.data(), ", ", FormatBytes(static_cast<int64_t>(bytes)), ", sm_", major_version,
                        minor_version));
    }
  }
  const aio::LoadedLibrary nccl({"libnccl.so.2"});
  const auto nccl_version = nccl.Get<int(int*)>("ncclGetVersion");
  int number = 0;
  if (nccl_version != nullptr && nccl_version(&number) == 0) {
    // From 2.9 on: major * 10000 + minor * 100 + patch.
    r.Ok("nccl", absl::StrCat(number / 10000, ".", number / 100 % 100, ".", number % 100));
  } else {
    r.Missing("nccl", "no libnccl.so.2",
              "ranks with a CUDA device each: without it they exchange through host memory");
  }
  if (aio::CuFile::IsInstalled()) {
    r.Ok("gds", "libcufile (a run with aio.use_gds tries whether it goes past host memory here)");
  } else {
    r.Missing(
        "gds", "no libcufile.so",
        "GPUDirect Storage: without it weights go from the drive to a device by way of pinned host memory");
  }
}

}  // namespace

std::string BracketedChoice(std::string_view setting) {
  const size_t open = setting.find('[');
  const size_t close = setting.find(']', open);
  if (open == std::string_view::npos || close == std::string_view::npos) return "";
  return std::string(setting.substr(open + 1, close - open - 1));
}

int64_t MemInfoValue(std::string_view meminfo, std::string_view key) {
  while (!meminfo.empty()) {
    const std::string_view line = meminfo.substr(0, meminfo.find('\n'));
    meminfo.remove_prefix(std::min(meminfo.size(), line.size() + 1));
    if (line.size() <= key.size() || !line.starts_with(key) || line[key.size()] != ':') continue;
    std::string_view rest = line.substr(key.size() + 1);
    while (rest.starts_with(' ')) rest.remove_prefix(1);
    int64_t value = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    if (error != std::errc()) return -1;
    return std::string_view(end, static_cast<size_t>(rest.data() + rest.size() - end)) == " kB" ? value * 1024
                                                                                                : value;
  }
  return -1;
}

std::string MappedFile(std::string_view maps, std::string_view part) {
  while (!maps.empty()) {
    const std::string_view line = maps.substr(0, maps.find('\n'));
    maps.remove_prefix(std::min(maps.size(), line.size() + 1));
    const size_t slash = line.find('/');
    if (slash == std::string_view::npos) continue;
    if (line.find(part, slash) != std::string_view::npos) return std::string(line.substr(slash));
  }
  return "";
}

namespace {

// What the drives themselves count. A machine without them, or a user without the right, lacks nothing else.
void Wear(Report& r) {
  const std::vector<std::string> controllers = NvmeControllers();
  if (controllers.empty()) r.Ok("nvme_wear", "not known: no NVMe controller is seen here");
  for (const std::string& controller : controllers) {
    const std::string name = controller.substr(controller.rfind('/') + 1) + "_wear";
    const absl::StatusOr<NvmeHealth> health = ReadNvmeHealth(controller);
    r.Ok(name, health.ok() ? WearText(*health)
                           : absl::StrCat("not known: ", std::string(health.status().message())));
  }
}

}  // namespace

absl::StatusOr<std::vector<EnvItem>> ProbeEnvironment(const std::string& directory) {
  const auto wrong = [&directory](std::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("directory ", directory, ": ", std::string(what)));
  };
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0)
    return wrong(absl::StrCat(std::strerror(errno), "; give one that exists"));
  if (!S_ISDIR(info.st_mode)) return wrong("is not a directory");
  if (::access(directory.c_str(), W_OK | X_OK) != 0) {
    return wrong(absl::StrCat("cannot be written: ", std::strerror(errno), "; give one that can"));
  }
  // A file of our own name, exclusive, and gone when this returns, whatever happens in between.
  struct Remover {
    std::string path;
    ~Remover() { ::unlink(path.c_str()); }
  };
  const Remover probe{absl::StrCat(directory, "/.penstock-env.", ::getpid())};
  aio::FileOptions options;
  options.path = probe.path;
  options.create = true;
  options.exclusive = true;
  options.size = 1 * aio::kMiB;
  const auto file = aio::File::Open(options);

  Report report;
  Kernel(report);
  Cpu(report);
  Memory(report);
  Io(report, file.ok() ? file->get() : nullptr);
  Wear(report);
  if (absl::Status status = Directory(report, directory); !status.ok())
    return wrong(std::string(status.message()));
  Torch(report);
  Gpus(report);
  return report.Take();
}

}  // namespace penstock::tools
