// The pinned arena: one mapping, 2 MiB aligned, on huge pages where the machine has them, locked, handed out
// in regions cut to the byte. It is registered once with the I/O engine (EngineOptions::arenas) and, by
// the code that computes on a GPU, once with CUDA (data(), bytes()): what lives in it is transferred without
// pinning pages for every request, which on 1 MiB direct reads is the difference between 4-6 and 40-44 ms of
// CPU per GiB.
//
//   ArenaOptions options;
//   options.bytes = 512 * kMiB;
//   absl::StatusOr<std::unique_ptr<Arena>> arena = Arena::Create(options);
//   absl::StatusOr<Region> region = (*arena)->Allocate(10 * kMiB);
//   if (absl::IsResourceExhausted(region.status())) { /* wait for other regions to be released, then try
//   again */ }
//
// The size is a hard limit: the arena never grows. Threads: everything is thread-safe. Ownership: a Region
// gives its bytes back when it is destroyed and must not outlive its arena. A forked child has none of its
// memory (MADV_DONTFORK), so that a fork neither copies it nor moves it away from a transfer in flight: to
// touch it there ends the child.
#ifndef PENSTOCK_AIO_ARENA_H_
#define PENSTOCK_AIO_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/bytes.h"
#include "base/process_mark.h"

namespace penstock::aio {

class Arena;

enum class PageKind : uint8_t {
  kHugetlb,      // reserved huge pages (vm.nr_hugepages)
  kTransparent,  // transparent huge pages, asked for with madvise and collapsed when touched
  kSmall,        // 4 KiB pages: works everywhere, costs up to ten times the CPU per GiB of I/O
};
std::string_view PageKindName(PageKind kind);  // "hugetlb", "thp", "4k"

struct ArenaOptions {
  uint64_t bytes = 0;  // rounded up to 2 MiB; must not be 0
  bool lock = true;    // mlock; where the limit forbids it the arena works unlocked and notes() says so
  bool touch = true;   // fault every page in at creation, so that the first pass is as fast as the others
  bool try_hugetlb = true;  // each may be switched off, to measure what it is worth
  bool try_transparent = true;
  int numa_node = -1;  // bind to this node; -1: no preference (and always right on machines with one node)
};

struct ArenaStats {
  uint64_t bytes = 0;       // size of the arena
  uint64_t used_bytes = 0;  // handed out now, padding included
  uint64_t peak_bytes = 0;  // the most that was ever handed out at once
  uint64_t waste_bytes =
      0;  // part of used_bytes that nobody asked for: padding to whole granules of 64 bytes, alignment
  uint64_t largest_free_bytes =
      0;                  // the longest contiguous run; far below the free total means fragmentation
  uint64_t regions = 0;   // live regions
  uint64_t refusals = 0;  // Allocate calls answered with kResourceExhausted
};

// A piece of an arena. Move-only; the destructor gives the bytes back. A default-constructed or moved-from
// region is empty.
class Region {
 public:
  Region() = default;
  ~Region() { Release(); }
  Region(Region&& other) noexcept { *this = static_cast<Region&&>(other); }
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }  // as asked for, without padding
  bool empty() const { return data_ == nullptr; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

  // Gives the bytes back now.
  void Release();

 private:
  friend class Arena;
  Arena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t held_bytes_ = 0;
};

class Arena {
 public:
  // Maps, places, touches and locks. Errors: kInvalidArgument (0 bytes), kResourceExhausted (the kernel has
  // no such memory). Everything short of that is a fallback, told by page_kind(), locked() and notes().
  static absl::StatusOr<std::unique_ptr<Arena>> Create(const ArenaOptions& options);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A region of exactly `bytes` (more than 0) at a multiple of `alignment` (a power of two up to 2 MiB; the
  // default is what direct I/O wants). Best fit; O(number of free runs), no heap allocation once the free
  // list has grown to its working size. kResourceExhausted is back-pressure: it says how much was asked, is
  // free, and is free in one piece. kInvalidArgument: more than the whole arena, 0 bytes or a bad alignment;
  // waiting would never help. kFailedPrecondition: in a forked child.
  absl::StatusOr<Region> Allocate(uint64_t bytes, uint64_t alignment = kSectorBytes);

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  bool Contains(const void* pointer, uint64_t bytes) const;

  PageKind page_kind() const { return page_kind_; }
  bool locked() const { return locked_; }
  // One line for every step down from what was asked for (hugetlb refused, lock limit reached, ...), with its
  // reason.
  const std::vector<std::string>& notes() const { return notes_; }
  ArenaStats stats() const;

 private:
  friend class Region;
  struct FreeRun {
    uint64_t offset;
    uint64_t bytes;
  };

  Arena() = default;
  absl::Status Map(const ArenaOptions& options);
  void Lock();
  void CheckHugePages();
  void Free(uint64_t offset, uint64_t held_bytes, uint64_t asked_bytes);

  const ProcessMark made_in_;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  std::byte* mapping_ = nullptr;  // data_ is the first 2 MiB boundary within the mapping
  uint64_t mapping_bytes_ = 0;
  PageKind page_kind_ = PageKind::kSmall;
  bool locked_ = false;
  std::vector<std::string> notes_;

  mutable std::mutex mutex_;
  std::vector<FreeRun> free_;  // sorted by offset, neighbours merged
  uint64_t used_bytes_ = 0;
  uint64_t asked_bytes_ = 0;
  uint64_t peak_bytes_ = 0;
  uint64_t regions_ = 0;
  uint64_t refusals_ = 0;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_ARENA_H_
