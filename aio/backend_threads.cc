// A pool of threads that call pread and pwrite: works everywhere, at two to three times the CPU of io_uring.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/backend.h"

namespace penstock::aio {
namespace {

class ThreadsBackend final : public Backend {
 public:
  ~ThreadsBackend() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  std::string_view name() const override { return "threads"; }

  absl::Status Start(const BackendConfig& config) override {
    waiting_.reserve(config.options->max_blocks_in_flight);
    work_items_.resize(config.options->max_blocks_in_flight);
    done_.reserve(config.options->max_blocks_in_flight);
    const int count = std::max(1, config.options->worker_threads);
    for (int i = 0; i < count; ++i) {
      try {
        workers_.emplace_back([this] { Work(); });
      } catch (const std::system_error& error) {
        if (i == 0) return absl::UnavailableError(absl::StrCat("no thread could be started: ", error.what()));
        config.note(
            absl::StrCat("only ", i, " of ", count, " worker threads could be started: ", error.what()));
        break;
      }
    }
    return absl::OkStatus();
  }

  void Queue(Piece& piece) override { waiting_.push_back(&piece); }

  int64_t Run(std::span<Completion> out, uint32_t want, int64_t timeout_ns) override {
    std::unique_lock<std::mutex> lock(mutex_);
    for (Piece* piece : waiting_) {
      work_items_[work_tail_++ % work_items_.size()] = piece;
    }
    const size_t fresh = waiting_.size();
    waiting_.clear();
    if (fresh == 1) {
      work_.notify_one();
    } else if (fresh > 1) {
      work_.notify_all();
    }
    const auto ready = [&] { return done_.size() >= std::max(1u, want) || woken_; };
    want_ = std::max(1u, want);
    if (timeout_ns < 0) {
      finished_.wait(lock, ready);
    } else if (timeout_ns > 0) {
      finished_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), ready);
    }
    woken_ = false;
    const size_t count = std::min(out.size(), done_.size());
    std::copy_n(done_.begin(), count, out.begin());
    done_.erase(done_.begin(), done_.begin() + static_cast<ptrdiff_t>(count));
    syscalls_ = transfers_;
    return static_cast<int64_t>(count);
  }

  void Wake() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    finished_.notify_one();
  }

  int64_t WorkerCpuNs() const override { return cpu_ns_.load(std::memory_order_relaxed); }

 private:
  static int64_t Transfer(const Piece& piece) {
    ssize_t result = 0;
    if (piece.op == Op::kSync) {
      result = fdatasync(piece.fd());
    } else if (piece.op == Op::kRead) {
      result = pread(piece.fd(), piece.device_data(), piece.device_bytes(),
                     static_cast<off_t>(piece.device_offset()));
    } else {
      result = pwrite(piece.fd(), piece.device_data(), piece.device_bytes(),
                      static_cast<off_t>(piece.device_offset()));
    }
    return result >= 0 ? result : -errno;
  }

  static int64_t ThreadCpuNs() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  }

  void Work() {
    pthread_setname_np(pthread_self(), "penstock-io");
    int64_t cpu_before = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return work_head_ != work_tail_ || stopping_; });
      if (work_head_ == work_tail_) return;
      Piece* const piece = work_items_[work_head_++ % work_items_.size()];
      lock.unlock();
      const int64_t result = Transfer(*piece);
      const int64_t cpu_now = ThreadCpuNs();
      cpu_ns_.fetch_add(cpu_now - cpu_before, std::memory_order_relaxed);
      cpu_before = cpu_now;
      lock.lock();
      done_.push_back({piece, result});
      ++transfers_;
      if (done_.size() >= want_) finished_.notify_one();
    }
  }

  std::vector<std::thread> workers_;
  std::vector<Piece*> waiting_;  // queued, not yet handed to the workers; the queue's thread only
  std::atomic<int64_t> cpu_ns_{0};

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable finished_;
  std::vector<Piece*> work_items_;  // a ring: [work_head_, work_tail_)
  size_t work_head_ = 0;
  size_t work_tail_ = 0;
  std::vector<Completion> done_;
  size_t want_ = 1;
  uint64_t transfers_ = 0;
  bool woken_ = false;
  bool stopping_ = false;
};

}  // namespace

std::unique_ptr<Backend> MakeThreadsBackend() { return std::make_unique<ThreadsBackend>(); }

}  // namespace penstock::aio
