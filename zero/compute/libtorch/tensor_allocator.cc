#include "zero/compute/libtorch/tensor_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <torch/version.h>

#include <cstring>

#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

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
  at::DeleterFnPtr raw_deleter() const override { return &TensorMemory::Free; }

 private:
  static at::DataPtr Make(size_t n) {
    if (n == 0) return {nullptr, nullptr, &TensorMemory::Free, at::Device(at::DeviceType::CPU)};
    const absl::StatusOr<void*> data = TensorMemory::Allocate(static_cast<int64_t>(n));
    if (!data.ok()) C10_THROW_ERROR(Error, std::string(data.status().message()));
    return {*data, *data, &TensorMemory::Free, at::Device(at::DeviceType::CPU)};
  }
};

}  // namespace

void InstallTensorAllocator() {
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

}  // namespace penstock::zero
