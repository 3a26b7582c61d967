// Every byte that LibTorch's CPU tensors take, counted, bounded and pooled.
//
// LibTorch has one CPU allocator for the process; Install() puts this one in its place. It counts what is
// handed out and what is kept for reuse, and refuses (a c10::Error, which the engine turns into a status)
// what would exceed the limit: so "managed memory never exceeds the budget" is a property of the allocator,
// not a hope. The memory of freed buffers of 64 KiB and more is kept for the next, whatever their sizes
// (tensor_region.h): a fresh 24 MB buffer costs 10 ms of page faults, a kept one nothing. What is kept counts
// as managed and is given back first when the limit is near.
//
// Thread-safe. Not counted, because LibTorch does not allocate it here: scratch inside oneDNN and OpenBLAS,
// autograd's graph nodes, code.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_TENSOR_MEMORY_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_TENSOR_MEMORY_H_

#include <cstdint>

namespace penstock::zero {

struct TensorMemoryStats {
  int64_t live_bytes = 0;       // handed out
  int64_t kept_bytes = 0;       // free, kept for reuse
  int64_t peak_live_bytes = 0;  // most that was handed out at once, since ResetLivePeak
  int64_t peak_bytes = 0;       // most that was live or kept at once, since ResetPeak
};

class TensorMemory {
 public:
  // Idempotent. Tensors made before keep their memory and are not counted.
  static void Install();
  // 0: no limit. What exceeds a new limit already is not taken back, but what is kept is.
  static void SetLimit(int64_t bytes);
  static int64_t Limit();
  static void ResetPeak();
  static void ResetLivePeak();
  static TensorMemoryStats Stats();
  // Gives what is kept back to the system. Huge pages are used again after the next SetLimit.
  static void Trim();
};

// Limits tensor memory for a scope; 0: there is no limit in it. Whatever bounded it before does so again
// after it: an engine may train meanwhile.
class TensorMemoryLimit {
 public:
  explicit TensorMemoryLimit(int64_t bytes) : before_(TensorMemory::Limit()) {
    TensorMemory::SetLimit(bytes);
  }
  ~TensorMemoryLimit() { TensorMemory::SetLimit(before_); }
  TensorMemoryLimit(const TensorMemoryLimit&) = delete;
  TensorMemoryLimit& operator=(const TensorMemoryLimit&) = delete;

 private:
  const int64_t before_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_TENSOR_MEMORY_H_
