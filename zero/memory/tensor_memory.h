// Every byte that computing takes in host memory beside the arena, counted, bounded and pooled.
//
// It counts what is handed out and what is kept for reuse, and refuses what would exceed the limit: so
// "managed memory never exceeds the budget" is a property of the allocator, not a hope. The memory of freed
// buffers of 64 KiB and more is kept for the next, whatever their sizes (tensor_region.h): a fresh 24 MB
// buffer costs 10 ms of page faults, a kept one nothing. What is kept counts as managed and is given back
// first when the limit is near.
//
// The engine's own buffers come from here (HostBuffer), and LibTorch's CPU tensors where its allocator is
// this one (zero/compute/libtorch/tensor_allocator.h).
//
// There is a pool for the process, and one for each TensorAccount: every engine has one, with a limit and a
// peak of its own, so that engines in one process do not meet. A thread allocates, and is bounded and
// counted, in the pool of the scope that it is in (TensorScope); what is freed goes back to its pool, by
// whichever thread. Thread-safe; a forked child goes on with copies of its own.
#ifndef PENSTOCK_ZERO_MEMORY_TENSOR_MEMORY_H_
#define PENSTOCK_ZERO_MEMORY_TENSOR_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::zero {

struct TensorMemoryStats {
  int64_t live_bytes = 0;       // handed out
  int64_t kept_bytes = 0;       // free, kept for reuse
  int64_t peak_live_bytes = 0;  // most that was handed out at once, since ResetLivePeak
  int64_t peak_bytes = 0;       // most that was live or kept at once, since ResetPeak
};

class TensorPool;

// Each of these is about the pool of the calling thread's scope.
class TensorMemory {
 public:
  // Returns `bytes` at a multiple of 64. kResourceExhausted: beyond the limit, or the system has no more.
  static absl::StatusOr<void*> Allocate(int64_t bytes);
  // As which so many bytes count: what a Compute says of its memory is the sum of these.
  static int64_t Counted(int64_t bytes);
  // What Allocate gave; nothing for null.
  static void Free(void* data);
  // 0: no limit. What exceeds a new limit already is not taken back, but what is kept is.
  static void SetLimit(int64_t bytes);
  static int64_t Limit();
  static void ResetPeak();
  static void ResetLivePeak();
  static TensorMemoryStats Stats();
  // Gives what is kept back to the system. Huge pages are used again after the next SetLimit.
  static void Trim();
  // That pool, for a TensorScope on another thread. It lives as long as its account.
  static TensorPool* Here();
};

// A pool of its own. What was allocated in it may be freed later than it.
class TensorAccount {
 public:
  TensorAccount();
  ~TensorAccount();
  TensorAccount(const TensorAccount&) = delete;
  TensorAccount& operator=(const TensorAccount&) = delete;
  TensorPool* pool() const { return pool_; }
  TensorMemoryStats Stats() const;

 private:
  TensorPool* const pool_;
};

// What this thread allocates is the pool's from here to the end of the scope. Scopes nest.
class TensorScope {
 public:
  explicit TensorScope(TensorPool* pool);
  ~TensorScope();
  TensorScope(const TensorScope&) = delete;
  TensorScope& operator=(const TensorScope&) = delete;

 private:
  TensorPool* const before_;
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

// A piece of it, given back at its end. The bytes are what they were before.
class HostBuffer {
 public:
  HostBuffer() = default;
  // kResourceExhausted begins with `what`, that the memory is for.
  static absl::StatusOr<HostBuffer> Of(int64_t bytes, absl::string_view what);
  ~HostBuffer() { TensorMemory::Free(data_); }
  HostBuffer(HostBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_TENSOR_MEMORY_H_
