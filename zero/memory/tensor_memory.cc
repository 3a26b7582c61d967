#include "zero/memory/tensor_memory.h"

#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <list>
#include <mutex>
#include <utility>

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
  int64_t bytes;     // with the header: what is counted
  TensorPool* pool;  // that it is counted in
};
static_assert(sizeof(Header) <= kHeader);

// Smaller buffers are malloc's business, and exact.
bool IsSmall(int64_t asked) { return asked + kHeader < kRegionFrom; }
int64_t GranulesOf(int64_t asked) { return (asked + kHeader + kGranule - 1) / kGranule; }

// All pools, which a fork holds.
class Pools {
 public:
  Pools() {
    const bool heard =
        pthread_atfork([] { The().Hold(); }, [] { The().LetGo(); }, [] { The().LetGo(); }) == 0;
    PENSTOCK_CHECK(heard, "there is no memory to hear of forks");
  }
  // Lives as long as the process: others' statics may free tensors after ours are gone.
  static Pools& The() {
    static Pools* pools = new Pools;  // NOLINT(cppcoreguidelines-owning-memory)
    return *pools;
  }

  void Add(TensorPool* pool) {
    std::lock_guard lock(mutex_);
    all_.push_back(pool);
  }
  void Remove(TensorPool* pool) {
    std::lock_guard lock(mutex_);
    all_.remove(pool);
  }

 private:
  // A child that is forked while another thread allocates would wait for that one for ever.
  void Hold();
  void LetGo();

  std::mutex mutex_;
  std::list<TensorPool*> all_;
};

}  // namespace

class TensorPool {
 public:
  TensorPool() {
    SetLimit(0);
    Pools::The().Add(this);
  }
  ~TensorPool() { Pools::The().Remove(this); }
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;

  // Its owner is gone: it goes with the last of its buffers.
  static void Close(TensorPool* pool) {
    bool over = false;
    {
      std::lock_guard lock(pool->mutex_);
      pool->closed_ = true;
      pool->limit_ = 0;
      pool->region_.Release(pool->region_.kept());
      over = pool->buffers_ == 0;
    }
    if (over) delete pool;  // NOLINT(cppcoreguidelines-owning-memory)
  }

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
    if (!small) {
      TensorRegion::Place place = region_.Find(granules);
      if (place.at >= 0) {
        if (limit_ > 0) region_.Fit((limit_ - live_) / kGranule, &place);
        base = region_.Take(place);
      }
    }
    if (base == nullptr) {
      if (limit_ > 0) ReleaseOver(limit_ - live_ - bytes);
      if (posix_memalign(&base, kHeader, static_cast<size_t>(bytes)) != 0) {
        return absl::ResourceExhaustedError(absl::StrCat("out of memory: ", asked, " bytes for a tensor"));
      }
    }
    const Header header{kMagic, bytes, this};
    std::memcpy(base, &header, sizeof(header));
    ++buffers_;
    live_ += bytes;
    peak_live_ = std::max(peak_live_, live_);
    peak_ = std::max(peak_, live_ + kept());
    return static_cast<char*>(base) + kHeader;
  }

  // In whichever pool it is.
  static void Free(void* data) {
    void* base = static_cast<char*>(data) - kHeader;
    Header header;
    std::memcpy(&header, base, sizeof(header));
    PENSTOCK_CHECK(header.magic == kMagic, "a tensor's memory was overwritten from below");
    if (header.pool->GiveBack(base, header.bytes)) delete header.pool;  // NOLINT
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
  // True: it was the last of a closed pool.
  bool GiveBack(void* base, int64_t bytes) {
    std::lock_guard lock(mutex_);
    live_ -= bytes;
    --buffers_;
    if (!region_.Owns(base)) {
      std::free(base);
      return closed_ && buffers_ == 0;
    }
    region_.GiveBack(base, bytes / kGranule);
    if (closed_) {
      region_.Release(region_.kept());
    } else if (limit_ > 0) {
      ReleaseOver(limit_ - live_);  // which may be lower than it was
    }
    return closed_ && buffers_ == 0;
  }
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
  int64_t buffers_ = 0;
  bool closed_ = false;
};

namespace {

void Pools::Hold() {
  mutex_.lock();
  for (TensorPool* pool : all_) pool->Hold();
}
void Pools::LetGo() {
  for (TensorPool* pool : all_) pool->LetGo();
  mutex_.unlock();
}

thread_local TensorPool* pool_of_scope = nullptr;

}  // namespace

TensorPool* TensorMemory::Here() {
  static TensorPool* of_process = new TensorPool;  // NOLINT(cppcoreguidelines-owning-memory)
  return pool_of_scope != nullptr ? pool_of_scope : of_process;
}

TensorScope::TensorScope(TensorPool* pool) : before_(std::exchange(pool_of_scope, pool)) {}
TensorScope::~TensorScope() { pool_of_scope = before_; }

TensorAccount::TensorAccount() : pool_(new TensorPool) {}
TensorAccount::~TensorAccount() { TensorPool::Close(pool_); }
TensorMemoryStats TensorAccount::Stats() const { return pool_->Stats(); }

int64_t TensorMemory::Counted(int64_t bytes) {
  return IsSmall(bytes) ? bytes + kHeader : GranulesOf(bytes) * kGranule;
}
absl::StatusOr<void*> TensorMemory::Allocate(int64_t bytes) { return Here()->Allocate(bytes); }
void TensorMemory::Free(void* data) {
  if (data != nullptr) TensorPool::Free(data);
}
void TensorMemory::SetLimit(int64_t bytes) { Here()->SetLimit(bytes); }
int64_t TensorMemory::Limit() { return Here()->Limit(); }
void TensorMemory::ResetPeak() { Here()->ResetPeak(); }
void TensorMemory::ResetLivePeak() { Here()->ResetLivePeak(); }
void TensorMemory::Trim() {
  Here()->Trim();
  malloc_trim(0);
}
TensorMemoryStats TensorMemory::Stats() { return Here()->Stats(); }

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
