// An I/O backend that makes each transfer at once, on the lane's thread, by what a test says of it.
#ifndef PENSTOCK_TESTS_ZERO_INLINE_BACKEND_H_
#define PENSTOCK_TESTS_ZERO_INLINE_BACKEND_H_

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "aio/backend.h"

namespace penstock::zero {

class InlineBackend : public aio::Backend {
 public:
  absl::Status Start(const aio::BackendConfig&) override { return absl::OkStatus(); }
  void Queue(aio::Piece& piece) override { done_.push_back({&piece, Transfer(piece)}); }

  int64_t Run(std::span<aio::Completion> out, uint32_t, int64_t timeout_ns) override {
    if (done_.empty() && timeout_ns != 0) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns < 0 ? 1'000'000'000 : timeout_ns),
                        [&] { return woken_; });
      woken_ = false;
    }
    const size_t count = std::min(out.size(), done_.size());
    std::copy_n(done_.begin(), count, out.begin());
    done_.erase(done_.begin(), done_.begin() + static_cast<ptrdiff_t>(count));
    return static_cast<int64_t>(count);
  }

  void Wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    changed_.notify_one();
  }

 protected:
  // Bytes moved, or minus an errno.
  virtual int64_t Transfer(aio::Piece& piece) = 0;

  static int64_t Result(ssize_t moved) { return moved >= 0 ? moved : -errno; }
  // As it was asked for.
  static int64_t Whole(aio::Piece& piece) {
    if (piece.op == aio::Op::kSync) return fdatasync(piece.fd()) == 0 ? 0 : -errno;
    const auto offset = static_cast<off_t>(piece.device_offset());
    return Result(piece.op == aio::Op::kRead
                      ? pread(piece.fd(), piece.device_data(), piece.device_bytes(), offset)
                      : pwrite(piece.fd(), piece.device_data(), piece.device_bytes(), offset));
  }

 private:
  std::vector<aio::Completion> done_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_TESTS_ZERO_INLINE_BACKEND_H_
