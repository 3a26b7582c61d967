// The engine on real file systems of its own: drives with large and small sectors, full, read-only, and gone
// in the middle of the work. Never a false success, an abort or a hang.
#include <sys/syscall.h>

#include <cerrno>
#include <chrono>
#include <random>
#include <thread>

#include "tests/aio/loop_device.h"
#include "tests/aio/refusing_kernel.h"
#include "tests/aio/test_support.h"

namespace penstock::aio::loop_test {
namespace {

using testing::HasSubstr;

constexpr int64_t kPatienceMs = 20'000;

class LoopTest : public testing::TestWithParam<BackendKind> {
 protected:
  // Null, with `world` saying why, where the backend is not here.
  std::unique_ptr<File> Open(const LoopDevice& loop, const std::string& name, uint64_t size = 0,
                             bool read_only = false) {
    FileOptions options;
    options.path = loop.directory() + "/" + name;
    options.create = !read_only;
    options.read_only = read_only;
    options.size = size;
    auto file = File::Open(options);
    EXPECT_TRUE(file.ok()) << file.status();
    return file.ok() ? *std::move(file) : nullptr;
  }
};

#define SKIP_WHERE_NOT_POSSIBLE(loop, world)                 \
  if (!(loop).skip().empty()) GTEST_SKIP() << (loop).skip(); \
  if (!(world).skip.empty()) GTEST_SKIP() << (world).skip

TEST_P(LoopTest, SectorsOfBothSizesTakeAnyOffsetAndLength) {
  for (const int sector : {512, 4096}) {
    SCOPED_TRACE(sector);
    LoopDevice loop({.sector_bytes = sector});
    World w(GetParam());
    SKIP_WHERE_NOT_POSSIBLE(loop, w);
    auto file = Open(loop, "ragged", 4 * kMiB);
    ASSERT_NE(file, nullptr);
    Region region = w.Allocate(4 * kMiB);
    std::vector<std::byte> oracle(4 * kMiB);
    std::memset(region.data(), 0, 4 * kMiB);
    ASSERT_OK(w.Write(*file, 0, region.data(), 4 * kMiB));
    std::mt19937_64 random(static_cast<uint64_t>(sector));
    for (uint64_t i = 0; i < 150; ++i) {
      const uint64_t offset = random() % (3 * kMiB);
      const uint64_t bytes = 1 + random() % (i % 3 == 0 ? 600 * kKiB : 9000);
      std::byte* const data = region.data() + random() % 4096;
      FillPattern(i, 0, data, bytes);
      std::memcpy(oracle.data() + offset, data, bytes);
      ASSERT_OK(w.Write(*file, offset, data, bytes));
      const uint64_t from = offset - std::min<uint64_t>(offset, random() % 5000);
      std::byte* const to = region.data() + random() % 4096;
      const uint64_t length = std::min<uint64_t>(bytes + 5000, 4 * kMiB - from - 4096);
      ASSERT_OK(w.Read(*file, from, to, length));
      ASSERT_EQ(std::memcmp(to, oracle.data() + from, length), 0) << "offset " << from << ", " << length;
    }
    EXPECT_GT(w.engine->stats().devices[0].read_modify_writes, 50u);
    file.reset();
  }
}

TEST_P(LoopTest, AFullFileSystemIsNamedAndWhatIsThereStays) {
  LoopDevice loop({.bytes = 24 << 20});
  World w(GetParam());
  SKIP_WHERE_NOT_POSSIBLE(loop, w);
  // In advance, by asking for too much.
  FileOptions too_long;
  too_long.path = loop.directory() + "/long";
  too_long.create = true;
  too_long.size = kGiB;
  const auto refused = File::Open(too_long);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  // In the middle, by writing on.
  auto file = Open(loop, "growing");
  ASSERT_NE(file, nullptr);
  Region region = w.Allocate(32 * kMiB);
  FillPattern(1, 0, region.data(), 32 * kMiB);
  ASSERT_OK(w.Write(*file, 0, region.data(), 4 * kMiB));
  Request request;
  request.PrepareWrite(*file, 4 * kMiB, region.data() + 4 * kMiB, 28 * kMiB);
  ASSERT_OK(w.engine->Submit(&request));
  const absl::Status status = w.engine->Wait(&request, kPatienceMs);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(request.error_number(), ENOSPC);
  EXPECT_THAT(std::string(status.message()), HasSubstr(file->path()));
  EXPECT_LT(request.done_bytes(), 28 * kMiB);
  std::memset(region.data(), 0, 4 * kMiB);
  ASSERT_OK(w.Read(*file, 0, region.data(), 4 * kMiB));
  EXPECT_EQ(Mismatch(1, 0, region.data(), 4 * kMiB), 4 * kMiB);
}

TEST_P(LoopTest, AReadOnlyFileSystemIsReadAndNotWritten) {
  LoopDevice loop({});
  World w(GetParam());
  SKIP_WHERE_NOT_POSSIBLE(loop, w);
  Region region = w.Allocate(kMiB);
  FillPattern(4, 0, region.data(), kMiB);
  auto file = Open(loop, "old", kMiB);
  ASSERT_NE(file, nullptr);
  ASSERT_OK(w.Write(*file, 0, region.data(), kMiB));
  file.reset();
  ASSERT_TRUE(loop.Unmount());
  loop.Mount(MS_RDONLY);
  ASSERT_EQ(loop.skip(), "");
  FileOptions options;
  options.path = loop.directory() + "/old";
  const auto refused = File::Open(options);
  EXPECT_TRUE(absl::IsPermissionDenied(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("read-only"));
  file = Open(loop, "old", 0, /*read_only=*/true);
  ASSERT_NE(file, nullptr);
  std::memset(region.data(), 0, kMiB);
  ASSERT_OK(w.Read(*file, 0, region.data(), kMiB));
  EXPECT_EQ(Mismatch(4, 0, region.data(), kMiB), kMiB);
}

// The cable is pulled with many transfers under way: each ends, and none that was begun afterwards is done.
TEST_P(LoopTest, ADeviceThatGoesAwayUnderWork) {
  for (const bool write : {false, true}) {
    SCOPED_TRACE(write);
    LoopDevice loop({});
    EngineOptions engine_options;
    engine_options.max_read_bytes_in_flight = engine_options.max_write_bytes_in_flight = 2 * kMiB;
    World w(GetParam(), engine_options);
    SKIP_WHERE_NOT_POSSIBLE(loop, w);
    auto file = Open(loop, "file", 32 * kMiB);
    ASSERT_NE(file, nullptr);
    Region region = w.Allocate(32 * kMiB);
    ASSERT_OK(w.Write(*file, 0, region.data(), 32 * kMiB));
    std::vector<Request> requests(200);
    std::vector<Request*> pointers;
    for (Request& request : requests) {
      write ? request.PrepareWrite(*file, 0, region.data(), 32 * kMiB)
            : request.PrepareRead(*file, 0, region.data(), 32 * kMiB);
      pointers.push_back(&request);
    }
    ASSERT_OK(w.engine->Submit(pointers));
    ASSERT_GE(w.engine->WaitSome(pointers, 1, kPatienceMs), 1u);
    if (!loop.GoAway()) {
      ASSERT_OK(w.engine->Drain());
      GTEST_SKIP() << "this file system cannot be shut down";
    }
    Request late;
    write ? late.PrepareWrite(*file, 0, region.data(), kMiB)
          : late.PrepareRead(*file, 0, region.data(), kMiB);
    late.set_priority(Priority::kDemand);
    ASSERT_OK(w.engine->Submit(&late));
    ASSERT_OK(w.engine->Drain(kPatienceMs));
    EXPECT_EQ(late.error_number(), EIO) << late.status();
    size_t failed = 0;
    for (const Request& request : requests) {
      ASSERT_TRUE(request.finished());
      if (request.ok()) {
        EXPECT_EQ(request.done_bytes(), 32 * kMiB);
        continue;
      }
      ++failed;
      EXPECT_EQ(request.error_number(), EIO) << request.status();
      EXPECT_LT(request.done_bytes(), 32 * kMiB);
    }
    EXPECT_GT(failed, 0u);
    EXPECT_TRUE(w.log.Has("device loop")) << "the device is told by name";
    EXPECT_FALSE(w.Write(*file, 100, region.data(), 50).ok());  // a ragged one reads first
    EXPECT_FALSE(file->SyncData().ok());
    EXPECT_EQ(w.engine->stats().devices[0].in_flight_bytes, 0u);
    file.reset();
  }
}

// A part of the device is lost: what lies there cannot be read, what lies elsewhere can.
TEST_P(LoopTest, ADeviceThatLosesItsTail) {
  LoopDevice loop({});
  World w(GetParam());
  SKIP_WHERE_NOT_POSSIBLE(loop, w);
  auto file = Open(loop, "file", 40 * kMiB);
  ASSERT_NE(file, nullptr);
  Region region = w.Allocate(40 * kMiB);
  ASSERT_OK(w.Write(*file, 0, region.data(), 40 * kMiB));
  ASSERT_OK(file->SyncData());
  ASSERT_TRUE(loop.LoseTail(24 * kMiB));
  Request request;
  request.PrepareRead(*file, 0, region.data(), 40 * kMiB);
  ASSERT_OK(w.engine->Submit(&request));
  const absl::Status status = w.engine->Wait(&request, kPatienceMs);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_EQ(request.error_number(), EIO);
  EXPECT_LT(request.done_bytes(), 40 * kMiB);
  uint64_t good = 0;
  for (uint64_t at = 0; at < 40 * kMiB; at += kMiB) good += w.Read(*file, at, region.data(), kMiB).ok();
  EXPECT_GT(good, 8u);
  EXPECT_LT(good, 30u);
}

// A thinly provisioned device promises more than it has: writes to blocks that are reserved fail, and each of
// them is reported. What was reported as done is there, but for the last one before the first failure: the
// kernel's loop driver says that a write of which only a part found room was done. Only checksums find that
// (swap/).
TEST_P(LoopTest, ADeviceThatRunsOutUnderAReservedFile) {
  LoopDevice loop({.bytes = 96 << 20, .backing_bytes = 24 << 20});
  EngineOptions engine_options;
  engine_options.io_error_retries = 0;
  World w(GetParam(), engine_options);
  SKIP_WHERE_NOT_POSSIBLE(loop, w);
  auto file = Open(loop, "file", 60 * kMiB);
  ASSERT_NE(file, nullptr);
  Region region = w.Allocate(2 * kMiB);
  uint64_t failed = 0, first_failure = 0;
  std::vector<uint64_t> done;
  for (uint64_t at = 0; at < 60 * kMiB; at += kMiB) {
    FillPattern(at, 0, region.data(), kMiB);
    const absl::Status status = w.Write(*file, at, region.data(), kMiB);
    if (status.ok()) {
      done.push_back(at);
      continue;
    }
    if (failed++ == 0) first_failure = at;
    EXPECT_TRUE(absl::IsDataLoss(status) || absl::IsResourceExhausted(status) ||
                absl::IsPermissionDenied(status))
        << status;
  }
  EXPECT_GT(failed, 20u);
  EXPECT_GT(done.size(), 5u);
  for (const uint64_t at : done) {
    if (at + kMiB == first_failure) continue;
    ASSERT_OK(w.Read(*file, at, region.data(), kMiB));
    EXPECT_EQ(Mismatch(at, 0, region.data(), kMiB), kMiB) << at;
  }
}

// A file system whose writes the device takes and does not finish, until it is thawed.
struct Holding {
  LoopDevice below{{.bytes = 128 << 20}};
  LoopDevice loop{{.directory = below.skip().empty() ? below.directory() : ".", .bytes = 64 << 20}};
  ~Holding() { below.Thaw(); }
  std::string skip() const { return below.skip() + loop.skip(); }
};

// Five of sixteen blocks are waited for at once, and the device finishes none of them: a demand gets to it
// all the same.
TEST_P(LoopTest, ADemandIsNotKeptWaitingByABatchThatIs) {
  Holding holding;
  EngineOptions options;
  options.stuck_after_ms = 0;  // which would look around from time to time
  World w(GetParam(), options);
  if (!holding.skip().empty()) GTEST_SKIP() << holding.skip();
  if (!w.skip.empty()) GTEST_SKIP() << w.skip;
  auto file = Open(holding.loop, "file", 40 * kMiB);
  ASSERT_NE(file, nullptr);
  Region region = w.Allocate(40 * kMiB);
  ASSERT_OK(w.Write(*file, 0, region.data(), 40 * kMiB));
  if (!holding.below.Freeze()) GTEST_SKIP() << "no freezing here";
  Request behind, demand;
  behind.PrepareWrite(*file, 0, region.data(), 32 * kMiB);
  behind.set_priority(Priority::kWriteBehind);
  ASSERT_OK(w.engine->Submit(&behind));
  while (w.engine->stats().devices[0].in_flight_bytes < 16 * kMiB) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until the queue sleeps
  demand.PrepareRead(*file, 32 * kMiB, region.data() + 32 * kMiB, kMiB);
  ASSERT_OK(w.engine->Submit(&demand));
  for (int i = 0; i < 2000 && demand.start_ns() == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_NE(demand.start_ns(), 0);
  EXPECT_TRUE(behind.pending());
  holding.below.Thaw();
  EXPECT_OK(w.engine->Wait(&demand));
  EXPECT_OK(w.engine->Wait(&behind));
}

// The kernel takes nothing more, and the device holds on to what it has: that fails when the device lets go,
// since until then it may use the memory.
class KernelQueueTest : public LoopTest {};

TEST_P(KernelQueueTest, WhatTheDeviceHasFailsOnlyWhenItLetsGo) {
  Holding holding;
  if (!holding.skip().empty()) GTEST_SKIP() << holding.skip();
  const int result = InChild([&] {
    SyscallGate gate({SYS_io_uring_enter, SYS_io_getevents});
    World w(GetParam());
    if (!w.skip.empty()) return 77;
    auto file = Open(holding.loop, "file", 32 * kMiB);
    Region region = w.Allocate(32 * kMiB);
    if (!w.Write(*file, 0, region.data(), 32 * kMiB).ok()) return 2;
    if (!holding.below.Freeze()) return 77;
    Request write;
    write.PrepareWrite(*file, 0, region.data(), 32 * kMiB);
    if (!w.engine->Submit(&write).ok()) return 3;
    while (w.engine->stats().devices[0].in_flight_bytes < 16 * kMiB) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    gate.Refuse(EPERM);
    Request late;
    late.PrepareRead(*file, 0, region.data(), kMiB);
    if (!w.engine->Submit(&late).ok()) return 4;
    const bool early = !absl::IsDeadlineExceeded(w.engine->Wait(&write, 500));
    holding.below.Thaw();
    if (early) return 5;
    if (w.engine->Wait(&write, kPatienceMs).ok() || write.error_number() != EPERM) return 6;
    if (w.engine->Wait(&late, kPatienceMs).ok()) return 7;
    if (!w.log.Has("broke down")) return 8;
    return 0;
  });
  holding.below.Thaw();
  if (result == 77) GTEST_SKIP() << "no seccomp, freezing or such backend here";
  EXPECT_EQ(result, 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, LoopTest,
                         testing::Values(BackendKind::kIoUring, BackendKind::kLibaio, BackendKind::kThreads),
                         [](const auto& suite) { return std::string(BackendName(suite.param)); });
// Threads have no queue in the kernel.
INSTANTIATE_TEST_SUITE_P(Backends, KernelQueueTest,
                         testing::Values(BackendKind::kIoUring, BackendKind::kLibaio),
                         [](const auto& suite) { return std::string(BackendName(suite.param)); });

}  // namespace
}  // namespace penstock::aio::loop_test
