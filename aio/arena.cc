#include "aio/arena.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/io_error.h"
#include "base/status_macros.h"

namespace penstock::aio {
namespace {

// Regions start and end on cache lines, so that two of them never share one.
constexpr uint64_t kGranule = 64;

std::string LockLimitText() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return absl::StrCat(" (limit ", FormatBytes(limit.rlim_cur), ": raise `ulimit -l`)");
}

}  // namespace

std::string_view PageKindName(PageKind kind) {
  switch (kind) {
    case PageKind::kHugetlb:
      return "hugetlb";
    case PageKind::kTransparent:
      return "thp";
    case PageKind::kSmall:
      return "4k";
  }
  return "unknown";
}

Region& Region::operator=(Region&& other) noexcept {
  if (this == &other) return *this;
  Release();
  arena_ = std::exchange(other.arena_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  held_bytes_ = std::exchange(other.held_bytes_, 0);
  return *this;
}

void Region::Release() {
  if (arena_ == nullptr) return;
  arena_->Free(static_cast<uint64_t>(data_ - arena_->data()), held_bytes_, bytes_);
  arena_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
  held_bytes_ = 0;
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(const ArenaOptions& options) {
  if (options.bytes == 0) return absl::InvalidArgumentError("arena: 0 bytes asked for");
  if (options.bytes > (uint64_t{1} << 50)) {
    return absl::InvalidArgumentError(
        absl::StrCat("arena: ", options.bytes, " bytes asked for, more than 1 PiB"));
  }
  std::unique_ptr<Arena> arena(new Arena());
  arena->bytes_ = AlignUp(options.bytes, kHugePageBytes);
  RETURN_IF_ERROR(arena->Map(options));
  if (options.lock) arena->Lock();
  if (options.touch || arena->locked_) {
    // One write a page is enough; a huge page is faulted in by its first.
    const uint64_t step = arena->page_kind_ == PageKind::kHugetlb ? kHugePageBytes : kSectorBytes;
    for (uint64_t at = 0; at < arena->bytes_; at += step) {
      *reinterpret_cast<volatile char*>(arena->data_ + at) = 0;
    }
  }
  if (options.touch) arena->CheckHugePages();
  arena->free_.reserve(1024);
  arena->free_.push_back({0, arena->bytes_});
  return arena;
}

absl::Status Arena::Map(const ArenaOptions& options) {
  constexpr int kProtection = PROT_READ | PROT_WRITE;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* mapped = MAP_FAILED;
  if (options.try_hugetlb) {
    mapped = mmap(nullptr, bytes_, kProtection, kFlags | MAP_HUGETLB | (21 << MAP_HUGE_SHIFT), -1, 0);
    if (mapped != MAP_FAILED) {
      page_kind_ = PageKind::kHugetlb;
      mapping_bytes_ = bytes_;
    } else {
      notes_.push_back(absl::StrCat("no reserved huge pages for ", FormatBytes(bytes_), ": ",
                                    ErrnoText(errno), "; `sysctl vm.nr_hugepages=", bytes_ / kHugePageBytes,
                                    "` reserves them"));
    }
  }
  if (mapped == MAP_FAILED) {
    // One huge page more than needed, to find a 2 MiB boundary inside.
    mapping_bytes_ = bytes_ + kHugePageBytes;
    mapped = mmap(nullptr, mapping_bytes_, kProtection, kFlags, -1, 0);
    if (mapped == MAP_FAILED) {
      return absl::ResourceExhaustedError(
          absl::StrCat("arena: mmap of ", FormatBytes(bytes_), ": ", ErrnoText(errno)));
    }
  }
  mapping_ = static_cast<std::byte*>(mapped);
  if (madvise(mapped, mapping_bytes_, MADV_DONTFORK) != 0)
    notes_.push_back(absl::StrCat("forked children share the arena's memory: ", ErrnoText(errno)));
  const auto address = reinterpret_cast<uint64_t>(mapping_);
  data_ = mapping_ + (AlignUp(address, kHugePageBytes) - address);
  if (options.numa_node >= 0) {
    const unsigned long mask = options.numa_node < 64 ? 1ul << options.numa_node : 0;
    if (mask == 0 || syscall(SYS_mbind, data_, bytes_, MPOL_PREFERRED, &mask, sizeof(mask) * 8, 0) != 0) {
      notes_.push_back(absl::StrCat("not bound to NUMA node ", options.numa_node, ": ", ErrnoText(errno)));
    }
  }
  if (page_kind_ == PageKind::kHugetlb) return absl::OkStatus();
  if (options.try_transparent) {
    if (madvise(data_, bytes_, MADV_HUGEPAGE) == 0) {
      page_kind_ = PageKind::kTransparent;
    } else {
      notes_.push_back(absl::StrCat("no transparent huge pages: ", ErrnoText(errno),
                                    "; see /sys/kernel/mm/transparent_hugepage/enabled"));
    }
  } else {
    // Where the machine's default is `always`, small pages have to be asked for.
    madvise(data_, bytes_, MADV_NOHUGEPAGE);
  }
  return absl::OkStatus();
}

void Arena::Lock() {
  if (mlock(data_, bytes_) == 0) {
    locked_ = true;
    return;
  }
  notes_.push_back(absl::StrCat("not locked in memory: ", ErrnoText(errno), LockLimitText()));
}

void Arena::CheckHugePages() {
  if (page_kind_ != PageKind::kTransparent) return;
  // The kernel takes the wish and may not grant it: memory too fragmented, or transparent huge pages switched
  // off.
  std::ifstream smaps("/proc/self/smaps");
  const uint64_t begin = reinterpret_cast<uint64_t>(data_);
  uint64_t huge_bytes = 0;
  bool inside = false, passed = false;
  for (std::string line; !passed && std::getline(smaps, line);) {
    unsigned long long from = 0, to = 0, kib = 0;
    if (sscanf(line.c_str(), "%llx-%llx ", &from, &to) == 2) {
      // In the order of addresses, and the kernel looks at every page of what is read: a process with
      // gigabytes would pay for all of them.
      passed = from >= begin + bytes_;
      inside = from < begin + bytes_ && to > begin;
    } else if (inside && sscanf(line.c_str(), "AnonHugePages: %llu kB", &kib) == 1) {
      huge_bytes += kib * kKiB;
    }
  }
  if ((!passed && !smaps.eof()) || huge_bytes >= bytes_) return;
  if (huge_bytes < bytes_ / 2) page_kind_ = PageKind::kSmall;
  notes_.push_back(absl::StrCat("transparent huge pages back ", FormatBytes(huge_bytes), " of ",
                                FormatBytes(bytes_),
                                "; see /sys/kernel/mm/transparent_hugepage/enabled and free memory"));
}

Arena::~Arena() {
  // In a forked child the addresses may be those of something else by now.
  if (mapping_ != nullptr && made_in_.here()) munmap(mapping_, mapping_bytes_);
}

bool Arena::Contains(const void* pointer, uint64_t bytes) const {
  const auto* at = static_cast<const std::byte*>(pointer);
  return at >= data_ && at <= data_ + bytes_ && bytes <= static_cast<uint64_t>(data_ + bytes_ - at);
}

absl::StatusOr<Region> Arena::Allocate(uint64_t bytes, uint64_t alignment) {
  RETURN_IF_ERROR(made_in_.Check("this arena"));
  if (bytes == 0) return absl::InvalidArgumentError("arena: a region of 0 bytes asked for");
  if (!IsPowerOfTwo(alignment) || alignment > kHugePageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("arena: alignment ", alignment, " is not a power of two up to 2097152"));
  }
  if (bytes > bytes_) {
    return absl::InvalidArgumentError(absl::StrCat("arena: a region of ", FormatBytes(bytes),
                                                   " asked for, the whole arena has ", FormatBytes(bytes_)));
  }
  alignment = std::max(alignment, kGranule);
  const uint64_t length = AlignUp(bytes, kGranule);

  const std::lock_guard<std::mutex> lock(mutex_);
  // Best fit: the smallest free run that holds it, so that long runs stay long.
  size_t best = free_.size();
  for (size_t i = 0; i < free_.size(); ++i) {
    const uint64_t start = AlignUp(free_[i].offset, alignment);
    if (start + length > free_[i].offset + free_[i].bytes) continue;
    if (best == free_.size() || free_[i].bytes < free_[best].bytes) best = i;
  }
  if (best == free_.size()) {
    ++refusals_;
    uint64_t longest = 0;
    for (const FreeRun& run : free_) longest = std::max(longest, run.bytes);
    return absl::ResourceExhaustedError(
        absl::StrCat("arena: no room for ", FormatBytes(bytes), " now: ", FormatBytes(bytes_ - used_bytes_),
                     " of ", FormatBytes(bytes_), " free, ", FormatBytes(longest), " in one piece"));
  }
  const FreeRun run = free_[best];
  const uint64_t start = AlignUp(run.offset, alignment);
  const uint64_t end = start + length;
  const FreeRun before{run.offset, start - run.offset};
  const FreeRun after{end, run.offset + run.bytes - end};
  if (before.bytes != 0) {
    free_[best] = before;
    if (after.bytes != 0) free_.insert(free_.begin() + static_cast<ptrdiff_t>(best) + 1, after);
  } else if (after.bytes != 0) {
    free_[best] = after;
  } else {
    free_.erase(free_.begin() + static_cast<ptrdiff_t>(best));
  }
  used_bytes_ += length;
  asked_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  ++regions_;

  Region region;
  region.arena_ = this;
  region.data_ = data_ + start;
  region.bytes_ = bytes;
  region.held_bytes_ = length;
  return region;
}

void Arena::Free(uint64_t offset, uint64_t held_bytes, uint64_t asked_bytes) {
  if (!made_in_.here()) return;  // a thread that the child does not have may hold the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  auto next = std::lower_bound(free_.begin(), free_.end(), offset,
                               [](const FreeRun& run, uint64_t at) { return run.offset < at; });
  const bool joins_next = next != free_.end() && offset + held_bytes == next->offset;
  const bool joins_previous =
      next != free_.begin() && std::prev(next)->offset + std::prev(next)->bytes == offset;
  if (joins_previous && joins_next) {
    std::prev(next)->bytes += held_bytes + next->bytes;
    free_.erase(next);
  } else if (joins_previous) {
    std::prev(next)->bytes += held_bytes;
  } else if (joins_next) {
    next->offset = offset;
    next->bytes += held_bytes;
  } else {
    free_.insert(next, {offset, held_bytes});
  }
  used_bytes_ -= held_bytes;
  asked_bytes_ -= asked_bytes;
  --regions_;
}

ArenaStats Arena::stats() const {
  if (!made_in_.here()) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  ArenaStats stats;
  stats.bytes = bytes_;
  stats.used_bytes = used_bytes_;
  stats.peak_bytes = peak_bytes_;
  stats.waste_bytes = used_bytes_ - asked_bytes_;
  for (const FreeRun& run : free_) stats.largest_free_bytes = std::max(stats.largest_free_bytes, run.bytes);
  stats.regions = regions_;
  stats.refusals = refusals_;
  return stats;
}

}  // namespace penstock::aio
