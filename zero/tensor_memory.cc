#include "zero/tensor_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <sys/mman.h>
#include <torch/version.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace penstock::zero {
namespace {

constexpr int64_t kHeader = 64;  // before every buffer; keeps the 64-byte alignment that LibTorch expects
constexpr int64_t kKeepFrom = 64 << 10;  // smaller buffers are malloc's business
constexpr int64_t kGranule = 16 << 10;   // sizes of kept buffers, so that near sizes share
constexpr int64_t kHugeFrom = 8 << 20;   // worth huge pages
constexpr int64_t kHugePage = 2 << 20;
constexpr uint64_t kMagic = 0x70656e73746f636b;

struct Header {
  uint64_t magic;
  int64_t bytes;  // with the header: what is counted
};
static_assert(sizeof(Header) <= kHeader);

class Pool {
 public:
  void* Allocate(int64_t asked) {
    int64_t bytes = asked + kHeader;
    if (bytes >= kKeepFrom) bytes = (bytes + kGranule - 1) / kGranule * kGranule;
    std::lock_guard lock(mutex_);
    void* base = nullptr;
    if (auto it = kept_.find(bytes); it != kept_.end() && !it->second.empty()) {
      base = it->second.back();
      it->second.pop_back();
      stats_.kept_bytes -= bytes;
    } else {
      if (limit_ > 0 && stats_.live_bytes + stats_.kept_bytes + bytes > limit_) ReleaseKept(bytes);
      if (limit_ > 0 && stats_.live_bytes + bytes > limit_) {
        C10_THROW_ERROR(Error, "tensor memory budget: " + std::to_string(asked) + " bytes asked, " +
                                   std::to_string(stats_.live_bytes) + " of " + std::to_string(limit_) +
                                   " bytes in use");
      }
      const bool huge = bytes >= kHugeFrom;
      if (posix_memalign(&base, huge ? kHugePage : 64, static_cast<size_t>(bytes)) != 0) {
        C10_THROW_ERROR(Error, "out of memory: " + std::to_string(asked) + " bytes for a tensor");
      }
      if (huge) madvise(base, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    }
    const Header header{kMagic, bytes};
    std::memcpy(base, &header, sizeof(header));
    stats_.live_bytes += bytes;
    stats_.peak_live_bytes = std::max(stats_.peak_live_bytes, stats_.live_bytes);
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.live_bytes + stats_.kept_bytes);
    return static_cast<char*>(base) + kHeader;
  }

  void Free(void* data) {
    void* base = static_cast<char*>(data) - kHeader;
    Header header;
    std::memcpy(&header, base, sizeof(header));
    TORCH_INTERNAL_ASSERT(header.magic == kMagic, "a tensor's memory was overwritten from below");
    std::lock_guard lock(mutex_);
    stats_.live_bytes -= header.bytes;
    if (header.bytes < kKeepFrom ||
        (limit_ > 0 && stats_.live_bytes + stats_.kept_bytes + header.bytes > limit_)) {
      std::free(base);
      return;
    }
    kept_[header.bytes].push_back(base);
    stats_.kept_bytes += header.bytes;
  }

  void SetLimit(int64_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
    if (limit_ > 0 && stats_.live_bytes + stats_.kept_bytes > limit_) ReleaseKept(0);
  }

  void ResetPeak() {
    std::lock_guard lock(mutex_);
    stats_.peak_bytes = stats_.live_bytes + stats_.kept_bytes;
  }

  void ResetLivePeak() {
    std::lock_guard lock(mutex_);
    stats_.peak_live_bytes = stats_.live_bytes;
  }

  void Trim() {
    std::lock_guard lock(mutex_);
    for (auto& [bytes, buffers] : kept_) {
      for (void* base : buffers) std::free(base);
    }
    kept_.clear();
    stats_.kept_bytes = 0;
  }

  TensorMemoryStats Stats() {
    std::lock_guard lock(mutex_);
    return stats_;
  }

 private:
  // Gives back kept buffers, largest first, until `bytes` more fit or none is left.
  void ReleaseKept(int64_t bytes) {
    for (auto it = kept_.rbegin(); it != kept_.rend(); ++it) {
      while (!it->second.empty() && stats_.live_bytes + stats_.kept_bytes + bytes > limit_) {
        std::free(it->second.back());
        it->second.pop_back();
        stats_.kept_bytes -= it->first;
      }
    }
  }

  std::mutex mutex_;
  std::map<int64_t, std::vector<void*>> kept_;
  TensorMemoryStats stats_;
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
void TensorMemory::ResetPeak() { ThePool().ResetPeak(); }
void TensorMemory::ResetLivePeak() { ThePool().ResetLivePeak(); }
void TensorMemory::Trim() {
  ThePool().Trim();
  malloc_trim(0);
}
TensorMemoryStats TensorMemory::Stats() { return ThePool().Stats(); }

}  // namespace penstock::zero
