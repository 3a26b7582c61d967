#include "zero/memory/tensor_region.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <tuple>

namespace penstock::zero {
namespace {

constexpr int64_t kHugePage = (int64_t{2} << 20) / TensorRegion::kGranule;  // granules
constexpr int64_t kStride =
    (int64_t{64} << 20) / TensorRegion::kGranule;  // at once, when more addresses are needed
constexpr int64_t kMost = int64_t{1} << 40, kEnough = int64_t{1} << 36, kLeast = int64_t{1} << 30;

size_t Bytes(int64_t granules) { return static_cast<size_t>(granules * TensorRegion::kGranule); }

// Some times the machine's memory: fragments need addresses. Not all that there are: others have regions too.
int64_t MostBytes() {
  const int64_t memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return std::clamp(
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(memory, 1)))) * 8, kEnough,
      kMost);
}

}  // namespace

TensorRegion::TensorRegion() {
  // Others need addresses too, where they are counted (ulimit -v).
  rlimit limit{};
  const bool limited = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  const int64_t most =
      limited ? std::min(MostBytes(), static_cast<int64_t>(std::bit_floor(limit.rlim_cur / 4))) : MostBytes();
  for (int64_t bytes = most; bytes >= kLeast && base_ == nullptr; bytes /= 2) {
    // Without access nothing is charged to anybody, however the system counts what it has promised.
    void* mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) continue;
    base_ = static_cast<char*>(mapped);
    size_ = bytes / kGranule;
  }
  if (base_ == nullptr) return;
  // Huge pages begin at their own multiples.
  const auto odd = reinterpret_cast<uintptr_t>(base_) % Bytes(kHugePage);
  if (odd != 0) {
    const size_t skipped = Bytes(kHugePage) - odd;
    (void)munmap(base_, skipped);
    base_ += skipped;
    size_ -= static_cast<int64_t>((skipped + Bytes(1) - 1) / Bytes(1));
  }
  free_[0] = size_;
}

TensorRegion::~TensorRegion() {
  if (base_ == nullptr) return;
  ASAN_UNPOISON_MEMORY_REGION(base_, Bytes(usable_));
  (void)munmap(base_, Bytes(size_));
}

bool TensorRegion::Touched(int64_t granule) const {
  const auto word = static_cast<size_t>(granule / 64);
  return word < touched_.size() && (touched_[word] >> (granule % 64) & 1) != 0;
}

int64_t TensorRegion::CountTouched(int64_t from, int64_t to) const {
  to = std::min(to, static_cast<int64_t>(touched_.size()) * 64);
  int64_t count = 0;
  while (from < to) {
    const int64_t end = std::min(to, (from / 64 + 1) * 64);
    const uint64_t bits = end - from == 64 ? ~uint64_t{0} : ((uint64_t{1} << (end - from)) - 1) << from % 64;
    count += std::popcount(touched_[static_cast<size_t>(from / 64)] & bits);
    from = end;
  }
  return count;
}

void TensorRegion::Mark(int64_t from, int64_t to, bool touched) {
  if (touched_.size() * 64 < static_cast<size_t>(to)) touched_.resize(static_cast<size_t>(to + 63) / 64);
  for (int64_t g = from; g < to; ++g) {
    const uint64_t bit = uint64_t{1} << g % 64;
    uint64_t& word = touched_[static_cast<size_t>(g / 64)];
    word = touched ? word | bit : word & ~bit;
  }
}

template <typename Visit>
void TensorRegion::ForSpill(int64_t at, int64_t granules, Visit&& visit) const {
  const int64_t end = at + granules;
  for (int64_t page = at / kHugePage; page * kHugePage < end; ++page) {
    const int64_t from = page * kHugePage, to = from + kHugePage;
    const bool inside = from >= at && to <= end;
    // The kernel makes a page huge where nothing of it is there yet.
    if (inside || to > huge_end_ || CountTouched(from, to) > 0) {
      if (inside) page = std::max(page, end / kHugePage - 1);  // straight to the last
      continue;
    }
    if (from < at) visit(from, at);
    if (to > end) visit(end, to);
  }
}

TensorRegion::Place TensorRegion::Consider(int64_t at, int64_t granules) const {
  Place place{at, granules, granules - CountTouched(at, at + granules)};
  if (place.fresh > 0) {
    ForSpill(at, granules, [&](int64_t from, int64_t to) { place.fresh += to - from; });
  }
  return place;
}

TensorRegion::Place TensorRegion::Find(int64_t granules) const {
  Place best;
  int64_t best_run = 0;
  for (const auto& [start, length] : free_) {
    if (length < granules) continue;
    for (const int64_t at : {start, start + length - granules}) {
      if (at != start && start + length == size_) break;  // the end of the world is far
      const Place place = Consider(at, granules);
      // The smallest run that will do, and the first of those.
      if (best.at < 0 || std::tie(place.fresh, length) < std::tie(best.fresh, best_run)) {
        best = place;
        best_run = length;
      }
    }
  }
  return best;
}

void TensorRegion::Fit(int64_t most, Place* place) {
  if (kept_ + place->fresh <= most) return;
  // Exact from here on: a huge page that is partly returned would come back as a whole.
  UseHugePages(0);
  *place = Consider(place->at, place->granules);
  Release(kept_ + place->fresh - most, *place);
}

void* TensorRegion::Take(const Place& place) {
  const int64_t end = place.at + place.granules;
  if (end > usable_) {
    const int64_t to = std::min((end + kStride - 1) / kStride * kStride, size_);
    if (mprotect(base_ + Bytes(usable_), Bytes(to - usable_), PROT_READ | PROT_WRITE) != 0) return nullptr;
    usable_ = to;
  }
  const int64_t had = CountTouched(place.at, end);
  if (had < place.granules) {
    ForSpill(place.at, place.granules, [&](int64_t from, int64_t to) {
      Mark(from, to, true);
      kept_ += to - from;
    });
    Mark(place.at, end, true);
  }
  kept_ -= had;
  auto run = std::prev(free_.upper_bound(place.at));
  const int64_t start = run->first, run_end = start + run->second;
  if (start == place.at) {
    free_.erase(run);
  } else {
    run->second = place.at - start;
  }
  if (run_end > end) free_[end] = run_end - end;
  char* base = base_ + Bytes(place.at);
  ASAN_UNPOISON_MEMORY_REGION(base, Bytes(place.granules));
  return base;
}

bool TensorRegion::Owns(const void* base) const {
  return base_ != nullptr && base >= base_ && base < base_ + Bytes(size_);
}

void TensorRegion::GiveBack(void* base, int64_t granules) {
  ASAN_POISON_MEMORY_REGION(base, Bytes(granules));
  int64_t at = (static_cast<char*>(base) - base_) / kGranule;
  kept_ += granules;
  auto next = free_.lower_bound(at);
  if (next != free_.end() && next->first == at + granules) {
    granules += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == at) {
      before->second += granules;
      return;
    }
  }
  free_[at] = granules;
}

void TensorRegion::Release(int64_t granules, const Place& spare) {
  if (granules <= 0) return;
  UseHugePages(0);
  const auto gone = [&](int64_t g) {
    return !Touched(g) || (g >= spare.at && g < spare.at + spare.granules);
  };
  // From the end: what is in use gathers at the beginning.
  for (auto run = free_.rbegin(); run != free_.rend() && granules > 0; ++run) {
    int64_t to = std::min(run->first + run->second, static_cast<int64_t>(touched_.size()) * 64);
    while (to > run->first && granules > 0) {
      if (touched_[static_cast<size_t>((to - 1) / 64)] == 0) {
        to = (to - 1) / 64 * 64;
        continue;
      }
      if (gone(to - 1)) {
        --to;
        continue;
      }
      int64_t from = to - 1;
      while (from > run->first && to - from < granules && !gone(from - 1)) --from;
      (void)madvise(base_ + Bytes(from), Bytes(to - from), MADV_DONTNEED);
      Mark(from, to, false);
      kept_ -= to - from;
      granules -= to - from;
      to = from;
    }
  }
  while (!touched_.empty() && touched_.back() == 0) touched_.pop_back();
}

void TensorRegion::UseHugePages(int64_t bytes) {
  const int64_t end = std::min(bytes / kGranule, size_) / kHugePage * kHugePage;
  if (end == huge_end_) return;
  if (huge_end_ > end) (void)madvise(base_ + Bytes(end), Bytes(huge_end_ - end), MADV_NOHUGEPAGE);
  if (end > huge_end_) (void)madvise(base_ + Bytes(huge_end_), Bytes(end - huge_end_), MADV_HUGEPAGE);
  huge_end_ = end;
  // The kernel may make whole pages of those that are there in part.
  const int64_t high = std::min(end, static_cast<int64_t>(touched_.size()) * 64);
  for (int64_t page = 0; page < high; page += kHugePage) {
    const int64_t there = CountTouched(page, page + kHugePage);
    if (there == 0 || there == kHugePage) continue;
    Mark(page, page + kHugePage, true);
    kept_ += kHugePage - there;
  }
}

}  // namespace penstock::zero
