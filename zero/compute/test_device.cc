#include "zero/compute/test_device.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "aio/bytes.h"
#include "tiering/plan/byte_size.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {
namespace {

constexpr int kIn = 0, kOut = 1;

// The device's memory is the host's, so that the host's comm can do it.
class LinkedDevices final : public Comm {
 public:
  explicit LinkedDevices(std::shared_ptr<Comm> host) : Comm(host->environment()), host_(std::move(host)) {}
  std::string name() const override { return "test devices, linked"; }
  absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel channel, const What& what,
                                                  std::span<const void* const> send,
                                                  std::span<void* const> receive, size_t bytes) override {
    return host_->Begin(channel, what, send, receive, bytes);
  }
  void Abort(const absl::Status& why) override { host_->Abort(why); }
  absl::Status failure() override { return host_->failure(); }

 private:
  const std::shared_ptr<Comm> host_;
};

}  // namespace

// Knows the arena, not the device, which it may outlive.
class TestDevice::Storage final : public aio::DeviceTransfers {
 public:
  explicit Storage(const TestDeviceOptions& options) : options_(options) {}
  std::string_view name() const override { return "test"; }
  int64_t Transfer(aio::Op op, const aio::File& file, uint64_t offset, void* data, uint64_t bytes,
                   std::string* why) override {
    if (op != aio::Op::kRead) return -EOPNOTSUPP;
    const int64_t number = ++reads_;
    if (options_.fail_read > 0 && number >= options_.fail_read) {
      *why = absl::StrCat("test device: read ", number, " of ", bytes, " bytes was made to fail");
      return -EIO;
    }
    const ssize_t moved = pread(file.fd(), data, bytes, static_cast<off_t>(offset));
    if (number == options_.damage_read) *static_cast<std::byte*>(data) ^= std::byte{1};
    return moved < 0 ? -errno : moved;
  }

 private:
  const TestDeviceOptions options_;
  std::atomic<int64_t> reads_{0};
};

class TestDevice::Stream {
 public:
  explicit Stream(uint64_t number) : random_(number), thread_([this] { Work(); }) {}
  // Runs what it was given, and ends.
  void Finish() {
    Enqueue(nullptr);
    thread_.join();
  }

  void Enqueue(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
      ++enqueued_;
    }
    changed_.notify_all();
  }
  // What is enqueued from here on runs behind all that `other` has been given.
  void WaitFor(Stream& other) {
    if (&other == this) return;
    uint64_t number = 0;
    {
      const std::lock_guard lock(other.mutex_);
      number = other.enqueued_;
    }
    Enqueue([&other, number] {
      std::unique_lock lock(other.mutex_);
      other.changed_.wait(lock, [&] { return other.done_ >= number; });
    });
  }

 private:
  void Work() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (!work) return;
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
      work();
      {
        const std::lock_guard lock(mutex_);
        ++done_;
      }
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t enqueued_ = 0, done_ = 0;
  std::minstd_rand random_;  // of the stream's thread
  std::thread thread_;
};

TestDevice::TestDevice(const TestDeviceOptions& options) : options_(options) {
  if (options_.late) compute_ = static_cast<Stream*>(NewStream());
  if (options_.gds) storage_ = std::make_shared<Storage>(options_);
  for (const int direction : {kIn, kOut}) {
    engines_[static_cast<size_t>(direction)].thread = std::thread([this, direction] { Work(direction); });
  }
}

TestDevice::~TestDevice() {
  if (storage_ != nullptr) storage_->Cover(nullptr, 0);
  for (const std::unique_ptr<Stream>& each : streams_) each->Finish();  // one may wait for another until then
  for (Engine& engine : engines_) {
    {
      std::lock_guard lock(engine.mutex);
      engine.stopping = true;
    }
    engine.there.notify_all();
    engine.thread.join();
  }
}

absl::StatusOr<std::shared_ptr<Device>> TestDevice::Parse(const std::string& given) {
  TestDeviceOptions options;
  for (const absl::string_view word : absl::StrSplit(given, ',', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(word, absl::MaxSplits('=', 1));
    double number = 0;
    bool known = absl::SimpleAtod(pair.second, &number) && number >= 0;
    if (pair.first == "capacity") {
      const absl::StatusOr<int64_t> bytes = tiering::ParseSize(pair.second);
      known = bytes.ok();
      if (known) options.capacity_bytes = *bytes;
    } else if (pair.first == "bandwidth") {
      options.bytes_per_s = number;
    } else if (pair.first == "latency") {
      options.latency_seconds = number;
    } else if (pair.first == "gds") {
      options.gds = number != 0;
    } else if (pair.first == "fail_read") {
      options.fail_read = static_cast<int64_t>(number);
    } else if (pair.first == "damage_read") {
      options.damage_read = static_cast<int64_t>(number);
    } else if (pair.first == "linked") {
      options.linked = number != 0;
    } else if (pair.first == "late") {
      options.late = number != 0;
    } else {
      known = false;
    }
    if (!known) return absl::InvalidArgumentError(absl::StrCat("test device: ", word, " is not understood"));
  }
  return std::make_shared<TestDevice>(options);
}

std::string TestDevice::Describe() const {
  return absl::StrCat("a device for tests on the processor, ", options_.capacity_bytes, " bytes");
}

absl::StatusOr<std::byte*> TestDevice::AllocateArena(int64_t bytes) {
  if (bytes > options_.capacity_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("test device: an arena of ", bytes, " bytes asked, ",
                                                     options_.capacity_bytes, " there"));
  }
  // Every 16-bit and 32-bit float in it is a NaN.
  memory_.assign(static_cast<size_t>(bytes) + aio::kSectorBytes, std::byte{0xff});
  const auto at = reinterpret_cast<uintptr_t>(memory_.data());
  arena_ = std::span(memory_).subspan(aio::AlignUp(at, aio::kSectorBytes) - at, static_cast<size_t>(bytes));
  if (storage_ != nullptr) storage_->Cover(arena_.data(), arena_.size());
  return arena_.data();
}

absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> TestDevice::OpenStorage() {
  if (storage_ != nullptr) return storage_;
  return absl::FailedPreconditionError("the test device has none");
}

absl::Status TestDevice::LimitTensors(int64_t bytes) {
  const auto arena = static_cast<int64_t>(arena_.size());
  if (bytes > 0 && arena + bytes > options_.capacity_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("test device: tensors of ", bytes,
                                                     " bytes beside an arena of ", arena, " asked, ",
                                                     options_.capacity_bytes, " there"));
  }
  TensorMemory::SetLimit(bytes > 0 ? bytes : options_.capacity_bytes - arena);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Comm>> TestDevice::Connect(const std::shared_ptr<Comm>& host) {
  return std::make_shared<LinkedDevices>(host);
}

void TestDevice::CopyIn(void* to, const void* from, int64_t bytes, bool after_compute, Done done) {
  // Outside of the arena it is a tensor's memory: on a GPU the copy would overtake what is enqueued to
  // compute with its former owner. Here it may not be, and no other bits would tell.
  const std::less<const std::byte*> before;
  const auto* const target = static_cast<const std::byte*>(to);
  const bool in_arena = !before(target, arena_.data()) && before(target, arena_.data() + arena_.size());
  if (!in_arena && !after_compute) {
    done(absl::InternalError("test device: a copy into a tensor does not wait for what is being computed"));
    return;
  }
  if (after_compute) {
    Compute([this, copy = Copy{to, from, bytes, std::move(done)}]() mutable { Start(kIn, std::move(copy)); });
    return;
  }
  Start(kIn, {to, from, bytes, std::move(done)});
}

void TestDevice::CopyOut(void* to, const void* from, int64_t bytes, Done done) {
  Start(kOut, {to, from, bytes, std::move(done)});
}

void TestDevice::Start(int direction, Copy copy) {
  Engine& engine = engines_[static_cast<size_t>(direction)];
  {
    std::lock_guard lock(engine.mutex);
    engine.copies.push_back(std::move(copy));
  }
  engine.there.notify_one();
}

void TestDevice::Work(int direction) {
  using Clock = std::chrono::steady_clock;
  Engine& engine = engines_[static_cast<size_t>(direction)];
  for (;;) {
    Copy copy;
    {
      std::unique_lock lock(engine.mutex);
      engine.there.wait(lock, [&] { return engine.stopping || !engine.copies.empty(); });
      if (engine.copies.empty()) return;
      copy = std::move(engine.copies.front());
      engine.copies.pop_front();
    }
    double seconds = options_.latency_seconds;
    if (options_.bytes_per_s > 0) seconds += static_cast<double>(copy.bytes) / options_.bytes_per_s;
    const auto end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    const int64_t number = ++copies_;
    if (number == options_.fail_copy) {
      copy.done(absl::InternalError(
          absl::StrCat("test device: copy ", number, " of ", copy.bytes, " bytes was made to fail")));
      continue;
    }
    std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    bytes_[static_cast<size_t>(direction)] += copy.bytes;
    if (seconds > 0) std::this_thread::sleep_until(end);
    copy.done(absl::OkStatus());
  }
}

void* TestDevice::NewStream() {
  const std::lock_guard lock(streams_mutex_);
  streams_.push_back(std::make_unique<Stream>(1 + streams_.size()));
  return streams_.back().get();
}

void TestDevice::Enqueue(void* stream, std::function<void()> work) {
  static_cast<Stream*>(stream)->Enqueue(std::move(work));
}

void TestDevice::Compute(std::function<void()> work) {
  if (compute_ == nullptr) return work();
  compute_->Enqueue(std::move(work));
}

void TestDevice::AfterCompute(Done done) {
  Compute([done = std::move(done)] { done(absl::OkStatus()); });
}

absl::Status TestDevice::ComputeOn(void* stream, std::span<void* const> after) {
  if (compute_ == nullptr) return absl::OkStatus();
  auto* const next = static_cast<Stream*>(stream);
  next->WaitFor(*std::exchange(compute_, next));
  for (void* each : after) next->WaitFor(*static_cast<Stream*>(each));
  return absl::OkStatus();
}

void TestDevice::Convert(kernels::DType from, const void* in, kernels::DType to, void* out, size_t n) {
  Compute([=, this] { CpuDevice::Convert(from, in, to, out, n); });
}

void TestDevice::Accumulate(kernels::DType type, const void* in, float* sums, size_t n) {
  Compute([=, this] { CpuDevice::Accumulate(type, in, sums, n); });
}

void TestDevice::SquarePartials(kernels::DType type, const void* in, size_t n, double* partials) {
  Compute([=, this] { CpuDevice::SquarePartials(type, in, n, partials); });
}

void TestDevice::Update(const OptimizerStep& step, const std::vector<kernels::UpdateArrays>& arrays) {
  Compute([=, this] { CpuDevice::Update(step, arrays); });
}

void TestDevice::Zero(void* memory, size_t bytes) {
  Compute([=, this] { CpuDevice::Zero(memory, bytes); });
}

}  // namespace penstock::zero
