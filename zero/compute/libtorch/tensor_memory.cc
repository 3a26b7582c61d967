#include "zero/compute/libtorch/tensor_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <torch/version.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>

#include "zero/memory/tensor_region.h"

namespace penstock::zero {
namespace {

constexpr int64_t kHeader = 64;  // before every buffer; keeps the 64-byte alignment that LibTorch expects
constexpr int64_t kRegionFrom = 64 << 10;  // smaller buffers are malloc's business
constexpr int64_t kGranule = TensorRegion::kGranule;
constexpr uint64_t kMagic = 0x70656e73746f636b;

struct Header {
  uint64_t magic;
  int64_t bytes;  // with the header: what is counted
};
static_assert(sizeof(Header) <= kHeader);

class Pool {
 public:
  Pool() { SetLimit(0); }

  void* Allocate(int64_t asked) {
    const bool small = asked + kHeader < kRegionFrom;
    const int64_t granules = (asked + kHeader + kGranule - 1) / kGranule;
    const int64_t bytes = small ? asked + kHeader : granules * kGranule;
    std::lock_guard lock(mutex_);
    if (limit_ > 0 && live_ + bytes > limit_) {
      C10_THROW_ERROR(Error, "tensor memory budget: " + std::to_string(asked) + " bytes asked, " +
                                 std::to_string(live_) + " of " + std::to_string(limit_) + " bytes in use");
    }
    void* base = nullptr;
    if (TensorRegion::Place place; !small && (place = region_.Find(granules)).at >= 0) {
      if (limit_ > 0) region_.Fit((limit_ - live_) / kGranule, &place);
      base = region_.Take(place);
    }
    if (base == nullptr) {
      if (limit_ > 0) ReleaseOver(limit_ - live_ - bytes);
      if (posix_memalign(&base, kHeader, static_cast<size_t>(bytes)) != 0) {
        C10_THROW_ERROR(Error, "out of memory: " + std::to_string(asked) + " bytes for a tensor");
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
    TORCH_INTERNAL_ASSERT(header.magic == kMagic, "a tensor's memory was overwritten from below");
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

// Lives as long as the process: LibTorch's own statics may free tensors after ours are gone.
Pool& ThePool() {
  static Pool* pool = new Pool;  // NOLINT(cppcoreguidelines-owning-memory)
  return *pool;
}

// LibTorch's users of raw allocations free null as well.
void Delete(void* data) {
  if (data != nullptr) ThePool().Free(data);
}

class Allocator final : public at::Allocator {
 public:
#if TORCH_VERSION_MAJOR >= 2 && (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 1)
  at::DataPtr allocate(size_t n) override { return Make(n); }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
#else
  at::DataPtr allocate(size_t n) const override { return Make(n); }
#endif
  at::DeleterFnPtr raw_deleter() const override { return &Delete; }

 private:
  static at::DataPtr Make(size_t n) {
    if (n == 0) return {nullptr, nullptr, &Delete, at::Device(at::DeviceType::CPU)};
    void* data = ThePool().Allocate(static_cast<int64_t>(n));
    return {data, data, &Delete, at::Device(at::DeviceType::CPU)};
  }
};

}  // namespace

void TensorMemory::Install() {
  static Allocator* allocator = [] {
    // Buffers go back to the system when they are freed. By default glibc raises this threshold to the size
    // of what is freed, and keeps the next buffers of that size in a heap that never shrinks.
    mallopt(M_MMAP_THRESHOLD, 256 << 10);
    auto* made = new Allocator;  // NOLINT(cppcoreguidelines-owning-memory): as long as the process
    c10::SetCPUAllocator(made, /*priority=*/255);
    return made;
  }();
  (void)allocator;
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

}  // namespace penstock::zero
