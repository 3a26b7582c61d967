#include "zero/compute/test_device.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
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

TestDevice::TestDevice(const TestDeviceOptions& options) : options_(options) {
  if (options_.gds) storage_ = std::make_shared<Storage>(options_);
  for (const int direction : {kIn, kOut}) {
    engines_[static_cast<size_t>(direction)].thread = std::thread([this, direction] { Work(direction); });
  }
}

TestDevice::~TestDevice() {
  if (storage_ != nullptr) storage_->Cover(nullptr, 0);
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
  // compute with its former owner. Here nothing is enqueued, and no other bits would tell.
  const std::less<const std::byte*> before;
  const auto* const target = static_cast<const std::byte*>(to);
  const bool in_arena = !before(target, arena_.data()) && before(target, arena_.data() + arena_.size());
  if (!in_arena && !after_compute) {
    done(absl::InternalError("test device: a copy into a tensor does not wait for what is being computed"));
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

}  // namespace penstock::zero
