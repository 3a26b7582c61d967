// Completes every transfer at once and moves nothing: what is left is what the engine itself costs.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "aio/backend.h"

namespace penstock::aio {
namespace {

class NilBackend final : public Backend {
 public:
  std::string_view name() const override { return "nil"; }

  absl::Status Start(const BackendConfig& config) override {
    done_.reserve(config.options->max_blocks_in_flight);
    return absl::OkStatus();
  }

  void Queue(Piece& piece) override {
    done_.push_back({&piece, piece.op == Op::kSync ? 0 : static_cast<int64_t>(piece.device_bytes())});
  }

  int64_t Run(std::span<Completion> out, uint32_t /*want*/, int64_t timeout_ns) override {
    if (done_.empty() && timeout_ns != 0) {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto ready = [&] { return woken_; };
      if (timeout_ns < 0) {
        wake_.wait(lock, ready);
      } else {
        wake_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), ready);
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
      const std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    wake_.notify_one();
  }

 private:
  std::vector<Completion> done_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Backend> MakeNilBackend() { return std::make_unique<NilBackend>(); }

}  // namespace penstock::aio
