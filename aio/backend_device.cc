// A backend in front of another: transfers whose memory is a device's go to threads of its own, which wait
// for them (cuFile has no queue), all others to the backend behind.
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/backend.h"
#include "base/status_macros.h"

namespace penstock::aio {
namespace {

constexpr uint64_t kWorkersMax = 32;

class DeviceBackend final : public Backend {
 public:
  DeviceBackend(std::unique_ptr<Backend> behind, std::shared_ptr<DeviceTransfers> transfers)
      : behind_(std::move(behind)), transfers_(std::move(transfers)) {}

  ~DeviceBackend() override { StopWorkers(); }

  std::string_view name() const override { return behind_->name(); }

  absl::Status Start(const BackendConfig& config) override {
    RETURN_IF_ERROR(behind_->Start(config));
    note_ = config.note;
    // As many as may be in flight: what waits for a thread would be taken for being at the drive.
    const uint64_t blocks = config.options->max_read_bytes_in_flight / config.options->block_bytes;
    workers_wanted_ = static_cast<size_t>(std::max<uint64_t>(
        static_cast<uint64_t>(std::max(1, config.options->worker_threads)), std::min(blocks, kWorkersMax)));
    return absl::OkStatus();
  }

  void Finish() override {
    StopWorkers();
    behind_->Finish();
  }

  void Queue(Piece& piece) override {
    if (piece.op == Op::kSync || !transfers_->Has(piece.device_data(), piece.device_bytes())) {
      return behind_->Queue(piece);
    }
    if (!StartWorkers()) return refused_.push_back({&piece, -EAGAIN, nullptr});
    ++in_flight_;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      work_.push_back(&piece);
    }
    there_.notify_one();
  }

  int64_t Run(std::span<Completion> out, uint32_t want, int64_t timeout_ns) override {
    if (broken_ != 0) return broken_;
    size_t count = Take(&refused_, out);
    count += TakeDone(out.subspan(count));
    // Those behind may be few, and whoever is done here wakes them only once.
    if (count > 0) timeout_ns = 0;
    if (in_flight_ > 0) want = std::min(want, 1u);
    const int64_t behind = behind_->Run(out.subspan(count), want, timeout_ns);
    syscalls_ = behind_->syscalls();
    if (behind < 0) {
      BreakDown(behind);
      return behind;
    }
    count += static_cast<size_t>(behind);
    return static_cast<int64_t>(count + TakeDone(out.subspan(count)));
  }

  void Wake() override { behind_->Wake(); }

  int RegisterFile(int fd) override { return behind_->RegisterFile(fd); }
  void UnregisterFile(int index) override { behind_->UnregisterFile(index); }
  void ForgetFile(int fd) override { transfers_->Forget(fd); }
  int FixedBuffer(const void* data, uint64_t bytes) const override {
    return behind_->FixedBuffer(data, bytes);
  }
  int64_t NextEventNs() const override { return behind_->NextEventNs(); }
  int64_t WorkerCpuNs() const override { return behind_->WorkerCpuNs(); }
  const DeviceTransfers* device_transfers() const override { return transfers_.get(); }

 private:
  // With the first transfer: most queues never have one. Fewer than wanted will do.
  bool StartWorkers() {
    while (workers_.size() < workers_wanted_) {
      try {
        workers_.emplace_back([this] { Work(); });
      } catch (const std::system_error& error) {
        note_(absl::StrCat("only ", workers_.size(), " of ", workers_wanted_, " threads for ",
                           std::string(transfers_->name()), " could be started: ", error.what()));
        workers_wanted_ = std::max<size_t>(1, workers_.size());
        break;
      }
    }
    return !workers_.empty();
  }

  // The queue fails all that is in flight: nothing of it may come back later.
  void BreakDown(int64_t error) {
    broken_ = error;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      work_.clear();
    }
    StopWorkers();
    done_.clear();
    refused_.clear();
    in_flight_ = 0;
  }

  void StopWorkers() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    there_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  static size_t Take(std::deque<Completion>* from, std::span<Completion> out) {
    const size_t count = std::min(from->size(), out.size());
    std::copy_n(from->begin(), count, out.begin());
    from->erase(from->begin(), from->begin() + static_cast<ptrdiff_t>(count));
    return count;
  }

  size_t TakeDone(std::span<Completion> out) {
    if (in_flight_ == 0) return 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t count = Take(&done_, out);
    in_flight_ -= count;
    return count;
  }

  void Work() {
    pthread_setname_np(pthread_self(), "penstock-gds");
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      there_.wait(lock, [&] { return !work_.empty() || stopping_; });
      if (work_.empty()) return;
      Piece* const piece = work_.front();
      work_.pop_front();
      lock.unlock();
      std::string why;
      const int64_t result = transfers_->Transfer(piece->op, *piece->slot->file, piece->device_offset(),
                                                  piece->device_data(), piece->device_bytes(), &why);
      lock.lock();
      done_.push_back({piece, result});
      if (!why.empty()) done_.back().why = std::make_shared<const std::string>(std::move(why));
      // One that is not taken yet has woken whoever takes this as well.
      if (done_.size() == 1) behind_->Wake();
    }
  }

  const std::unique_ptr<Backend> behind_;
  const std::shared_ptr<DeviceTransfers> transfers_;
  std::function<void(std::string_view)> note_;

  // The queue's thread.
  size_t workers_wanted_ = 0;
  std::vector<std::thread> workers_;
  std::deque<Completion> refused_;
  size_t in_flight_ = 0;  // in work_, with a worker, or in done_
  int64_t broken_ = 0;    // -errno: for good

  std::mutex mutex_;
  std::condition_variable there_;
  std::deque<Piece*> work_;
  std::deque<Completion> done_;
  bool stopping_ = false;
};

}  // namespace

std::unique_ptr<Backend> MakeDeviceBackend(std::unique_ptr<Backend> behind,
                                           std::shared_ptr<DeviceTransfers> transfers) {
  return std::make_unique<DeviceBackend>(std::move(behind), std::move(transfers));
}

}  // namespace penstock::aio
