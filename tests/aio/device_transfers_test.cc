// Transfers with memory of a device, through a stand-in whose memory no program can touch by mistake: its
// addresses are none of this process.
#include "aio/device_transfers.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "aio/bytes.h"
#include "tests/aio/test_support.h"

namespace penstock::aio::device_transfers_test {
namespace {

constexpr uintptr_t kElsewhere = uintptr_t{1} << 56;

class StandIn final : public DeviceTransfers {
 public:
  explicit StandIn(std::byte* real, uint64_t bytes) : real_(real) { Cover(At(0), bytes); }

  std::byte* At(uint64_t offset) const {
    return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(real_) + kElsewhere + offset);
  }
  std::string_view name() const override { return "stand-in"; }
  int64_t Transfer(Op op, const File& file, uint64_t offset, void* data, uint64_t bytes,
                   std::string* why) override {
    const int64_t number = ++transfers;
    if (number <= failures) {
      *why = "the stand-in was made to fail";
      return -EIO;
    }
    if (shorts > 0 && bytes > 4096 && --shorts >= 0) bytes = 4096;
    void* const real = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) - kElsewhere);
    const ssize_t moved = op == Op::kRead ? pread(file.fd(), real, bytes, static_cast<off_t>(offset))
                                          : pwrite(file.fd(), real, bytes, static_cast<off_t>(offset));
    return moved < 0 ? -errno : moved;
  }
  void Forget(int fd) override { ++forgotten[fd]; }

  std::atomic<int64_t> transfers{0};
  std::atomic<int> shorts{0};
  int64_t failures = 0;
  std::map<int, int> forgotten;  // on the queue's thread, which the file's closing waits for

 private:
  std::byte* const real_;
};

class DeviceTransfersTest : public testing::TestWithParam<BackendKind> {
 protected:
  static constexpr uint64_t kBytes = 16 * kMiB;

  void Start(EngineOptions options = {}) {
    ArenaOptions arena_options;
    arena_options.bytes = kBytes;
    auto arena = Arena::Create(arena_options);
    ASSERT_OK(arena.status());
    memory_ = *std::move(arena);
    device_ = std::make_shared<StandIn>(static_cast<std::byte*>(memory_->data()), kBytes);
    options.device_transfers = device_;
    options.block_bytes = 256 * kKiB;
    world_ = std::make_unique<World>(GetParam(), options);
    if (!world_->skip.empty()) GTEST_SKIP() << world_->skip;
  }
  std::byte* real(uint64_t offset) const { return static_cast<std::byte*>(memory_->data()) + offset; }

  std::unique_ptr<Arena> memory_;
  std::shared_ptr<StandIn> device_;
  std::unique_ptr<World> world_;
};

TEST_P(DeviceTransfersTest, MemoryOfTheHostAndOfTheDeviceSideBySide) {
  Start();
  if (IsSkipped()) return;
  auto file = world_->Open("tiles", kBytes);
  Region host = world_->Allocate(kBytes);
  for (uint64_t i = 0; i < kBytes / 8; ++i) {
    const uint64_t word = i * 0x9E3779B97F4A7C15u;
    std::memcpy(host.data() + i * 8, &word, 8);
  }
  ASSERT_OK(world_->Write(*file, 0, host.data(), kBytes));
  EXPECT_EQ(device_->transfers, 0);
  // Sixteen reads, every other one to the device; two of them with memory of both.
  std::vector<Request> requests(16);
  std::vector<std::byte> seen(kBytes);
  Region back = world_->Allocate(kBytes);
  std::vector<Request*> pointers;
  std::vector<std::array<Segment, 2>> both(requests.size());
  device_->shorts = 5;
  for (size_t i = 0; i < requests.size(); ++i) {
    const uint64_t offset = i * kMiB;
    if (i % 8 == 3) {
      both[i] = {Segment{device_->At(offset), kMiB / 2}, Segment{back.data() + offset + kMiB / 2, kMiB / 2}};
      requests[i].PrepareRead(*file, offset, both[i]);
    } else {
      void* const to = i % 2 == 0 ? static_cast<void*>(device_->At(offset)) : back.data() + offset;
      requests[i].PrepareRead(*file, offset, to, kMiB);
    }
    requests[i].set_priority(i % 3 == 0 ? Priority::kDemand : Priority::kPrefetch);
    pointers.push_back(&requests[i]);
  }
  ASSERT_OK(world_->engine->Submit(pointers));
  ASSERT_OK(world_->engine->WaitAll(pointers));
  for (size_t i = 0; i < requests.size(); ++i) {
    const uint64_t offset = i * kMiB;
    for (const uint64_t half : {uint64_t{0}, kMiB / 2}) {
      const bool there = i % 8 == 3 ? half == 0 : i % 2 == 0;
      const std::byte* const got = there ? real(offset + half) : back.data() + offset + half;
      EXPECT_EQ(std::memcmp(got, host.data() + offset + half, kMiB / 2), 0) << i << " " << half;
    }
  }
  EXPECT_GE(device_->transfers, 9 * 4 + 5);
  const EngineStats stats = world_->engine->stats();
  EXPECT_GE(stats.DeviceReadBytes(), kBytes);
  EXPECT_GE(stats.devices[0].short_transfers, 5u);

  // And out again.
  ASSERT_OK(world_->Write(*file, 4 * kMiB, device_->At(2 * kMiB), kMiB));
  ASSERT_OK(world_->Read(*file, 4 * kMiB, back.data(), kMiB));
  EXPECT_EQ(std::memcmp(back.data(), real(2 * kMiB), kMiB), 0);
  const int fd = file->fd();
  file.reset();
  EXPECT_EQ(device_->forgotten[fd], 1) << "before it is closed, and another file has its number";
}

TEST_P(DeviceTransfersTest, FailuresAreRetriedThenToldWithTheirReason) {
  EngineOptions options;
  options.io_error_retries = 2;
  Start(options);
  if (IsSkipped()) return;
  auto file = world_->Open("tiles", kMiB);
  device_->failures = 2;
  ASSERT_OK(world_->Read(*file, 0, device_->At(0), 4096));
  EXPECT_EQ(world_->engine->stats().IoErrorsRetried(), 2u);
  device_->failures = device_->transfers + 3;
  const absl::Status status = world_->Read(*file, 0, device_->At(0), 4096);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_TRUE(world_->log.Has("the stand-in was made to fail"));
  ASSERT_OK(world_->Read(*file, 0, device_->At(0), 4096));
}

TEST_P(DeviceTransfersTest, RaggedOnesAreRefused) {
  Start();
  if (IsSkipped()) return;
  auto file = world_->Open("tiles", kMiB);
  for (const auto& [offset, at, bytes] :
       std::vector<std::array<uint64_t, 3>>{{1, 0, 4096}, {0, 0, 100}, {0, 1, 4096}, {100, 0, 10}}) {
    EXPECT_FALSE(world_->Read(*file, offset, device_->At(at), bytes).ok());
    EXPECT_FALSE(world_->Write(*file, offset, device_->At(at), bytes).ok());
  }
  // Short segments are gathered in host memory, wherever the device's is among them.
  Region host = world_->Allocate(3 * 4096);
  std::byte* const here = host.data();
  for (const auto& segments : std::vector<std::vector<Segment>>{
           {{here, 4096}, {device_->At(0), 4096}},
           {{device_->At(0), 4096}, {here, 4096}},
           {{here, 4096}, {here + 4096, 4096}, {device_->At(0), 4096}, {here + 8192, 4096}}}) {
    for (const bool reads : {true, false}) {
      Request request;
      if (reads) {
        request.PrepareRead(*file, 0, segments);
      } else {
        request.PrepareWrite(*file, 0, segments);
      }
      ASSERT_OK(world_->engine->Submit(&request));
      EXPECT_FALSE(world_->engine->Wait(&request).ok());
    }
  }
  EXPECT_EQ(device_->transfers, 0);
  ASSERT_OK(world_->Read(*file, 0, device_->At(0), 4096));
}

// An engine that goes while transfers are on their way waits for them, and lets go of the files.
TEST_P(DeviceTransfersTest, EngineMayGoInTheMidst) {
  for (int round = 0; round < 20; ++round) {
    Start();
    if (IsSkipped()) return;
    auto file = world_->Open("tiles", kBytes);
    std::vector<Request> requests(8);
    std::vector<Request*> pointers;
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i].PrepareRead(*file, i * kMiB, device_->At(i * kMiB), kMiB);
      pointers.push_back(&requests[i]);
    }
    ASSERT_OK(world_->engine->Submit(pointers));
    world_->engine.reset();
    for (const Request& request : requests) EXPECT_TRUE(request.finished());
    EXPECT_EQ(device_->forgotten[file->fd()], 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceTransfersTest,
                         testing::Values(BackendKind::kIoUring, BackendKind::kLibaio, BackendKind::kThreads),
                         [](const auto& of) { return std::string(BackendName(of.param)); });

}  // namespace
}  // namespace penstock::aio::device_transfers_test
