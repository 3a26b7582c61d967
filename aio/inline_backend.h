// A backend that makes each transfer at once, on the queue's thread, as what is derived from it says: for
// measuring what the engine itself costs, and for tests.
#ifndef PENSTOCK_AIO_INLINE_BACKEND_H_
#define PENSTOCK_AIO_INLINE_BACKEND_H_

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
#include "aio/engine.h"

namespace penstock::aio {

class InlineBackend : public Backend {
 public:
  absl::Status Start(const BackendConfig& config) override {
    done_.reserve(config.options->max_blocks_in_flight);
    return absl::OkStatus();
  }

  void Queue(Piece& piece) override { done_.push_back({&piece, Transfer(piece)}); }

  int64_t Run(std::span<Completion> out, uint32_t /*want*/, int64_t timeout_ns) override {
    if (done_.empty() && timeout_ns != 0) {
      std::unique_lock lock(mutex_);
      const auto woken = [&] { return woken_; };
      if (timeout_ns < 0) {
        wake_.wait(lock, woken);
      } else {
        wake_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), woken);
      }
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
    wake_.notify_one();
  }

 protected:
  // Bytes moved, or minus an errno.
  virtual int64_t Transfer(Piece& piece) = 0;

  static int64_t Result(ssize_t moved) { return moved >= 0 ? moved : -errno; }
  // As it was asked for.
  static int64_t Whole(Piece& piece) {
    if (piece.op == Op::kSync) return Result(fdatasync(piece.fd()));
    const auto offset = static_cast<off_t>(piece.device_offset());
    return Result(piece.op == Op::kRead
                      ? pread(piece.fd(), piece.device_data(), piece.device_bytes(), offset)
                      : pwrite(piece.fd(), piece.device_data(), piece.device_bytes(), offset));
  }

 private:
  std::vector<Completion> done_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool woken_ = false;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_INLINE_BACKEND_H_
