#include "zero/memory/tensor_memory.h"

#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "zero/memory/tensor_region.h"

namespace penstock::zero {
namespace {

constexpr int64_t kHeader = 64;  // before every buffer; keeps the alignment of 64 bytes that LibTorch expects
constexpr int64_t kRegionFrom = 64 << 10;
constexpr int64_t kGranule = TensorRegion::kGranule;
constexpr uint64_t kMagic = 0x70656e73746f636b;

struct Header {
  uint64_t magic;
  int64_t bytes;  // with the header: what is counted
};
static_assert(sizeof(Header) <= kHeader);

// Smaller buffers are malloc's business, and exact.
bool IsSmall(int64_t asked) { return asked + kHeader < kRegionFrom; }
int64_t GranulesOf(int64_t asked) { return (asked + kHeader + kGranule - 1) / kGranule; }

class Pool {
 public:
  Pool() { SetLimit(0); }

  absl::StatusOr<void*> Allocate(int64_t asked) {
    const bool small = IsSmall(asked);
    const int64_t granules = GranulesOf(asked);
    const int64_t bytes = TensorMemory::Counted(asked);
    std::lock_guard lock(mutex_);
    if (limit_ > 0 && live_ + bytes > limit_) {
      return absl::ResourceExhaustedError(absl::StrCat("tensor memory budget: ", asked, " bytes asked, ",
                                                       live_, " of ", limit_, " bytes in use"));
    }
    void* base = nullptr;
    if (TensorRegion::Place place; !small && (place = region_.Find(granules)).at >= 0) {
      if (limit_ > 0) region_.Fit((limit_ - live_) / kGranule, &place);
      base = region_.Take(place);
    }
    if (base == nullptr) {
      if (limit_ > 0) ReleaseOver(limit_ - live_ - bytes);
      if (posix_memalign(&base, kHeader, static_cast<size_t>(bytes)) != 0) {
        return absl::ResourceExhaustedError(absl::StrCat("out of memory: ", asked, " bytes for a tensor"));
      }
    }
    const Header header{kMagic, bytes};
    std::memcpy(base, &header, sizeof(header));
    live_ += bytes;
    peak_live_ = std::max(peak_live_, live_);
    peak_ = std::max(peak_, live_ + kept());
    return static_cast<char*>(base) + kHeader;
  }

  void Free(void* data) {
    void* base = static_cast<char*>(data) - kHeader;
    Header header;
    std::memcpy(&header, base, sizeof(header));
    PENSTOCK_CHECK(header.magic == kMagic, "a tensor's memory was overwritten from below");
    std::lock_guard lock(mutex_);
    live_ -= header.bytes;
    if (!region_.Owns(base)) {
      std::free(base);
      return;
    }
    region_.GiveBack(base, header.bytes / kGranule);
    if (limit_ > 0) ReleaseOver(limit_ - live_);  // which may be lower than it was
  }

  void SetLimit(int64_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
    region_.UseHugePages(bytes > 0 ? bytes : std::numeric_limits<int64_t>::max());
    if (limit_ > 0) ReleaseOver(limit_ - live_);
  }

  int64_t Limit() {
    std::lock_guard lock(mutex_);
    return limit_;
  }

  void ResetPeak() {
    std::lock_guard lock(mutex_);
    peak_ = live_ + kept();
  }

  void ResetLivePeak() {
    std::lock_guard lock(mutex_);
    peak_live_ = live_;
  }

  void Trim() {
    std::lock_guard lock(mutex_);
    region_.Release(region_.kept());
  }

  void Hold() { mutex_.lock(); }
  void LetGo() { mutex_.unlock(); }

  TensorMemoryStats Stats() {
    std::lock_guard lock(mutex_);
    return {live_, kept(), peak_live_, peak_};
  }

 private:
  int64_t kept() const { return region_.kept() * kGranule; }
  // Leaves no more than so many bytes of kept memory.
  void ReleaseOver(int64_t bytes) {
    const int64_t over = kept() - std::max<int64_t>(bytes, 0);
    if (over > 0) region_.Release((over + kGranule - 1) / kGranule);
  }

  std::mutex mutex_;
  TensorRegion region_;
  int64_t live_ = 0, peak_live_ = 0, peak_ = 0;  // TensorMemoryStats
  int64_t limit_ = 0;
};

Pool& ThePool();

// A child that is forked while another thread allocates would wait for that one for ever.
void HoldForFork() { ThePool().Hold(); }
void LetGoAfterFork() { ThePool().LetGo(); }

// Lives as long as the process: others' statics may free tensors after ours are gone.
Pool& ThePool() {
  static Pool* pool = new Pool;  // NOLINT(cppcoreguidelines-owning-memory)
  static const bool heard = pthread_atfork(&HoldForFork, &LetGoAfterFork, &LetGoAfterFork) == 0;
  PENSTOCK_CHECK(heard, "there is no memory to hear of forks");
  return *pool;
}

}  // namespace

int64_t TensorMemory::Counted(int64_t bytes) {
  return IsSmall(bytes) ? bytes + kHeader : GranulesOf(bytes) * kGranule;
}
absl::StatusOr<void*> TensorMemory::Allocate(int64_t bytes) { return ThePool().Allocate(bytes); }
void TensorMemory::Free(void* data) {
  if (data != nullptr) ThePool().Free(data);
}
void TensorMemory::SetLimit(int64_t bytes) { ThePool().SetLimit(bytes); }
int64_t TensorMemory::Limit() { return ThePool().Limit(); }
void TensorMemory::ResetPeak() { ThePool().ResetPeak(); }
void TensorMemory::ResetLivePeak() { ThePool().ResetLivePeak(); }
void TensorMemory::Trim() {
  ThePool().Trim();
  malloc_trim(0);
}
TensorMemoryStats TensorMemory::Stats() { return ThePool().Stats(); }

absl::StatusOr<HostBuffer> HostBuffer::Of(int64_t bytes, absl::string_view what) {
  HostBuffer buffer;
  if (bytes == 0) return buffer;
  absl::StatusOr<void*> data = TensorMemory::Allocate(bytes);
  if (!data.ok()) {
    return absl::Status(data.status().code(), absl::StrCat(what, ": ", data.status().message()));
  }
  buffer.data_ = *data;
  buffer.bytes_ = bytes;
  return buffer;
}

}  // namespace penstock::zero
