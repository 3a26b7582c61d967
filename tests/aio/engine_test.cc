// The battery that every backend must pass: one body, five backends.
#include "aio/engine.h"

#include <sys/mman.h>

#include <atomic>
#include <random>
#include <thread>

#include "tests/aio/test_support.h"

namespace penstock::aio::engine_test {
namespace {

using State = Request::State;

class EngineTest : public testing::TestWithParam<BackendKind> {
 protected:
  // False, and the test is marked skipped, where the kernel lacks the backend.
  bool Start(EngineOptions options = {}) {
    world_ = std::make_unique<World>(GetParam(), options);
    return world_->skip.empty();
  }
  bool MovesData() const { return GetParam() != BackendKind::kNil; }
  World& w() { return *world_; }

  std::unique_ptr<World> world_;
};

// For what nil, which moves no data and knows no files, has no answer to.
class EngineDataTest : public EngineTest {};

#define START(...) \
  if (!Start(__VA_ARGS__)) GTEST_SKIP() << world_->skip

TEST_P(EngineTest, WritesAndReadsBackInBlocks) {
  START();
  auto file = w().Open("a", 10 * kMiB);
  Region out = w().Allocate(10 * kMiB), in = w().Allocate(10 * kMiB);
  FillPattern(1, 0, out.data(), out.bytes());
  ASSERT_OK(w().Write(*file, 0, out.data(), out.bytes()));
  ASSERT_OK(w().Read(*file, 0, in.data(), in.bytes()));
  if (MovesData()) {
    EXPECT_EQ(Mismatch(1, 0, in.data(), in.bytes()), in.bytes());
  }
  const EngineStats stats = w().engine->stats();
  ASSERT_EQ(stats.devices.size(), 1u);
  EXPECT_EQ(stats.devices[0].pieces, 20u);
  EXPECT_EQ(stats.devices[0].bounced_pieces, 0u);
  EXPECT_EQ(stats.Total(Op::kRead).bytes, 10 * kMiB);
  EXPECT_EQ(stats.Total(Op::kWrite).bytes, 10 * kMiB);
  EXPECT_EQ(stats.DeviceWriteBytes(), 10 * kMiB);
  EXPECT_EQ(stats.Total(Op::kRead).latency.count(), 1u);
  EXPECT_EQ(stats.devices[0].in_flight_bytes, 0u);
}

TEST_P(EngineTest, SizesAndStampsOfAFinishedRequest) {
  START();
  auto file = w().Open("a", kMiB);
  Region region = w().Allocate(kMiB);
  Request request;
  EXPECT_EQ(request.state(), State::kIdle);
  request.PrepareRead(*file, 0, region.data(), kMiB);
  request.set_priority(Priority::kPrefetch);
  ASSERT_OK(w().engine->Submit(&request));
  ASSERT_OK(w().engine->Wait(&request));
  EXPECT_EQ(request.state(), State::kDone);
  EXPECT_EQ(request.done_bytes(), kMiB);
  EXPECT_LE(request.submit_ns(), request.start_ns());
  EXPECT_LE(request.start_ns(), request.complete_ns());
  EXPECT_EQ(w().engine->stats().devices[0].Of(Op::kRead, Priority::kPrefetch).requests, 1u);
}

// Any offset, length and address, against a copy kept in memory. The file must end exactly where the last
// write did.
TEST_P(EngineDataTest, RaggedTransfersMatchAnOracle) {
  START();
  auto file = w().Open("ragged");
  Region memory = w().Allocate(2 * kMiB);
  std::vector<std::byte> oracle;
  std::mt19937_64 random(7);
  for (int i = 0; i < 150; ++i) {
    const uint64_t scale = uint64_t{1} << (random() % 20);
    const uint64_t bytes = 1 + random() % scale;
    const uint64_t offset = random() % 2 == 0 ? random() % 9000 : random() % kMiB;
    std::byte* const data = memory.data() + random() % 5000;
    SCOPED_TRACE(testing::Message() << "step " << i << ": offset " << offset << ", " << bytes << " bytes");
    if (random() % 3 != 0) {
      FillPattern(100 + static_cast<uint64_t>(i), offset, data, bytes);
      if (oracle.size() < offset + bytes) oracle.resize(offset + bytes);
      std::copy_n(data, bytes, oracle.begin() + static_cast<ptrdiff_t>(offset));
      ASSERT_OK(w().Write(*file, offset, data, bytes));
      ASSERT_EQ(*file->Size(), oracle.size());
    } else if (offset + bytes <= oracle.size()) {
      std::memset(data, 0xee, bytes + 1);
      ASSERT_OK(w().Read(*file, offset, data, bytes));
      ASSERT_EQ(std::memcmp(data, oracle.data() + offset, bytes), 0);
      ASSERT_EQ(data[bytes], std::byte{0xee}) << "wrote beyond the caller's memory";
    }
  }
  EXPECT_GT(w().engine->stats().devices[0].read_modify_writes, 0u);
}

// Many ragged writes at once that meet in the same sectors and all lengthen the file.
TEST_P(EngineDataTest, NeighbouringRaggedWritesDoNotLoseEachOther) {
  START();
  for (int round = 0; round < 5; ++round) {
    auto file = w().Open("neighbours" + std::to_string(round));
    constexpr uint64_t kStep = 1000;
    constexpr size_t kCount = 200;
    std::vector<std::byte> data(kStep * kCount), back(kStep * kCount);
    FillPattern(3, 0, data.data(), data.size());
    std::vector<Request> requests(kCount);
    std::vector<Request*> pointers;
    for (size_t i = 0; i < kCount; ++i) {
      const size_t place = (i * 37) % kCount;
      requests[i].PrepareWrite(*file, place * kStep, data.data() + place * kStep, kStep);
      pointers.push_back(&requests[i]);
    }
    ASSERT_OK(w().engine->Submit(pointers));
    ASSERT_OK(w().engine->WaitAll(pointers));
    ASSERT_EQ(*file->Size(), data.size());
    ASSERT_OK(w().Read(*file, 0, back.data(), back.size()));
    ASSERT_EQ(Mismatch(3, 0, back.data(), back.size()), back.size());
  }
}

TEST_P(EngineTest, ScattersAndGathers) {
  START();
  auto file = w().Open("segments", 4 * kMiB);
  Region memory = w().Allocate(8 * kMiB);
  std::mt19937_64 random(11);
  for (int round = 0; round < 20; ++round) {
    // Segments of all kinds: empty, tiny, ragged, whole sectors, long and aligned.
    std::vector<Segment> segments;
    uint64_t at = 0, total = 0;
    const uint64_t offset = round % 2 == 0 ? 0 : random() % 10000;
    while (total < 2 * kMiB && segments.size() < 40) {
      uint64_t bytes = 0;
      switch (random() % 4) {
        case 0:
          bytes = random() % 100;
          break;
        case 1:
          bytes = 4096 * (random() % 8);
          break;
        case 2:
          bytes = 128 * kKiB;
          break;
        default:
          bytes = random() % 300000;
          break;
      }
      if (random() % 2 == 0) at = AlignUp(at, 4096);
      if (at + bytes > memory.bytes()) break;
      segments.push_back({memory.data() + at, bytes});
      at += bytes;
      total += bytes;
    }
    uint64_t position = offset;
    for (const Segment& segment : segments) {
      FillPattern(50, position, static_cast<std::byte*>(segment.data), segment.bytes);
      position += segment.bytes;
    }
    Request write;
    write.PrepareWrite(*file, offset, segments);
    ASSERT_EQ(write.bytes(), total);
    ASSERT_OK(w().engine->Submit(&write));
    ASSERT_OK(w().engine->Wait(&write));
    if (!MovesData()) continue;
    for (const Segment& segment : segments) std::memset(segment.data, 0, segment.bytes);
    Request read;
    read.PrepareRead(*file, offset, segments);
    ASSERT_OK(w().engine->Submit(&read));
    ASSERT_OK(w().engine->Wait(&read));
    position = offset;
    for (const Segment& segment : segments) {
      ASSERT_EQ(Mismatch(50, position, static_cast<std::byte*>(segment.data), segment.bytes), segment.bytes);
      position += segment.bytes;
    }
  }
}

TEST_P(EngineTest, ManyRequestsWithCallbacks) {
  START();
  auto file = w().Open("many", 16 * kMiB);
  Region memory = w().Allocate(16 * kMiB);
  std::atomic<int> completed{0};
  std::vector<Request> requests(512);
  std::vector<Request*> pointers;
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].PrepareWrite(*file, i * 32 * kKiB, memory.data() + i * 32 * kKiB, 32 * kKiB);
    requests[i].set_priority(static_cast<Priority>(i % 3));
    requests[i].set_on_complete([](Request&, void* count) { ++*static_cast<std::atomic<int>*>(count); },
                                &completed);
    pointers.push_back(&requests[i]);
  }
  ASSERT_OK(w().engine->Submit(pointers));
  ASSERT_OK(w().engine->WaitAll(pointers));
  EXPECT_EQ(completed, 512);
  EXPECT_EQ(w().engine->stats().Total(Op::kWrite).requests, 512u);
}

TEST_P(EngineTest, ACallbackMaySubmitItsRequestAgain) {
  START();
  struct Chain {
    Engine* engine;
    File* file;
    std::byte* data;
    std::atomic<int> left{20};
    static void Next(Request& request, void* context) {
      auto* chain = static_cast<Chain*>(context);
      if (!request.ok() || --chain->left == 0) return;
      request.PrepareWrite(*chain->file, 0, chain->data, 4096);
      EXPECT_OK(chain->engine->Submit(&request));
    }
  };
  auto file = w().Open("chain", kMiB);
  Region region = w().Allocate(4096);
  Chain chain{w().engine.get(), file.get(), region.data()};
  Request request;
  request.PrepareWrite(*file, 0, region.data(), 4096);
  request.set_on_complete(&Chain::Next, &chain);
  ASSERT_OK(w().engine->Submit(&request));
  ASSERT_OK(w().engine->Drain());
  EXPECT_EQ(chain.left, 0);
}

TEST_P(EngineTest, ACallbackMayDestroyItsRequest) {
  START();
  auto file = w().Open("gone", kMiB);
  Region region = w().Allocate(50 * 4096);
  static std::atomic<int> destroyed;
  destroyed = 0;
  for (uint64_t i = 0; i < 50; ++i) {
    auto* request = new Request();
    request->PrepareRead(*file, 0, region.data() + i * 4096, 4096);
    request->set_on_complete(
        [](Request& done, void*) {
          delete &done;
          ++destroyed;
        },
        nullptr);
    ASSERT_OK(w().engine->Submit(request));
  }
  ASSERT_OK(w().engine->Drain());
  EXPECT_EQ(destroyed, 50);
}

TEST_P(EngineTest, WaitReturnsOnlyAfterTheCallback) {
  START();
  auto file = w().Open("slowcallback", kMiB);
  Region region = w().Allocate(4096);
  for (int i = 0; i < 5; ++i) {
    std::atomic<bool> returned{false};
    Request request;
    request.PrepareRead(*file, 0, region.data(), 4096);
    request.set_on_complete(
        [](Request&, void* flag) {
          std::this_thread::sleep_for(std::chrono::milliseconds(3));
          static_cast<std::atomic<bool>*>(flag)->store(true);
        },
        &returned);
    ASSERT_OK(w().engine->Submit(&request));
    ASSERT_OK(w().engine->Wait(&request));
    EXPECT_TRUE(returned);
  }
}

TEST_P(EngineTest, WaitingInsideACallbackIsRefused) {
  START();
  auto file = w().Open("inside", kMiB);
  Region region = w().Allocate(4096);
  struct Seen {
    Engine* engine;
    absl::Status wait, drain;
  } seen{w().engine.get(), {}, {}};
  Request request;
  request.PrepareRead(*file, 0, region.data(), 4096);
  request.set_on_complete(
      [](Request& self, void* context) {
        auto* s = static_cast<Seen*>(context);
        s->wait = s->engine->Wait(&self);
        s->drain = s->engine->Drain();
      },
      &seen);
  ASSERT_OK(w().engine->Submit(&request));
  ASSERT_OK(w().engine->Wait(&request));
  EXPECT_TRUE(absl::IsFailedPrecondition(seen.wait)) << seen.wait;
  EXPECT_TRUE(absl::IsFailedPrecondition(seen.drain)) << seen.drain;
}

TEST_P(EngineTest, WaitingForNothing) {
  START();
  EXPECT_OK(w().engine->WaitAll({}));
  EXPECT_EQ(w().engine->WaitSome({}, 3), 0u);
  EXPECT_OK(w().engine->Drain());
  EXPECT_OK(w().engine->Submit(std::span<Request* const>()));
  Request never;
  EXPECT_TRUE(absl::IsFailedPrecondition(w().engine->Wait(&never)));
  auto file = w().Open("idle", kMiB);
  Region region = w().Allocate(4096);
  never.PrepareRead(*file, 0, region.data(), 4096);
  EXPECT_TRUE(absl::IsFailedPrecondition(w().engine->Wait(&never)));
  w().engine->Cancel(&never);
  EXPECT_EQ(never.state(), State::kIdle);
}

TEST_P(EngineTest, WaitSome) {
  START();
  auto file = w().Open("some", 16 * kMiB);
  Region memory = w().Allocate(16 * kMiB);
  std::vector<Request> requests(16);
  std::vector<Request*> pointers;
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].PrepareRead(*file, i * kMiB, memory.data() + i * kMiB, kMiB);
    pointers.push_back(&requests[i]);
  }
  ASSERT_OK(w().engine->Submit(pointers));
  EXPECT_GE(w().engine->WaitSome(pointers, 4), 4u);
  EXPECT_EQ(w().engine->WaitSome(pointers, 1000), 16u);
}

TEST_P(EngineTest, ZeroBytesAreDoneAtOnce) {
  START();
  auto file = w().Open("zero", kMiB);
  EXPECT_OK(w().Read(*file, 123, nullptr, 0));
  EXPECT_OK(w().Write(*file, uint64_t{1} << 40, nullptr, 0));
  Request request;
  request.PrepareRead(*file, 0, std::span<const Segment>());
  ASSERT_OK(w().engine->Submit(&request));
  EXPECT_OK(w().engine->Wait(&request));
}

TEST_P(EngineTest, RefusesWhatCouldNeverWork) {
  START();
  auto file = w().Open("refused", kMiB);
  FileOptions options = w().NewFile("refused");
  options.read_only = true;
  auto read_only = File::Open(options);
  ASSERT_OK(read_only.status());
  Region region = w().Allocate(4096);
  Request request;
  EXPECT_TRUE(absl::IsInvalidArgument(w().engine->Submit(&request)));
  EXPECT_TRUE(absl::IsInvalidArgument(w().engine->Submit(nullptr)));
  request.PrepareRead(*file, 0, nullptr, 4096);
  EXPECT_TRUE(absl::IsInvalidArgument(w().engine->Submit(&request)));
  request.PrepareRead(*file, uint64_t{1} << 63, region.data(), 4096);
  EXPECT_TRUE(absl::IsInvalidArgument(w().engine->Submit(&request)));
  request.PrepareRead(*file, INT64_MAX - 100, region.data(), 4096);
  EXPECT_TRUE(absl::IsInvalidArgument(w().engine->Submit(&request)));
  request.PrepareWrite(**read_only, 0, region.data(), 4096);
  EXPECT_TRUE(absl::IsInvalidArgument(w().engine->Submit(&request)));
  EXPECT_EQ(request.state(), State::kIdle);
  // All or none: the good one is not submitted beside a bad one, and a request cannot be named twice.
  Request good;
  good.PrepareRead(*file, 0, region.data(), 4096);
  Request* const mixed[] = {&good, &request};
  EXPECT_TRUE(absl::IsInvalidArgument(w().engine->Submit(mixed)));
  EXPECT_EQ(good.state(), State::kIdle);
  Request* const twice[] = {&good, &good};
  EXPECT_TRUE(absl::IsInvalidArgument(w().engine->Submit(twice)));
  EXPECT_OK(w().engine->Drain());
  EXPECT_EQ(w().engine->stats().Total(Op::kRead).requests, 0u);
}

TEST_P(EngineDataTest, ReadingPastTheEndSaysSo) {
  START();
  auto file = w().Open("end");
  Region region = w().Allocate(2 * kMiB);
  FillPattern(5, 0, region.data(), kMiB);
  ASSERT_OK(w().Write(*file, 0, region.data(), kMiB - 100));
  Request request;
  request.PrepareRead(*file, kMiB - 8192, region.data(), 2 * 8192);
  ASSERT_OK(w().engine->Submit(&request));
  const absl::Status status = w().engine->Wait(&request);
  EXPECT_TRUE(absl::IsOutOfRange(status)) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(std::to_string(kMiB - 100)));
  EXPECT_EQ(request.state(), State::kFailed);
  EXPECT_EQ(request.done_bytes(), 8192u - 100);
  // Exactly up to the end is fine, ragged as it is.
  ASSERT_OK(w().Read(*file, kMiB - 8192, region.data(), 8192 - 100));
  EXPECT_EQ(Mismatch(5, kMiB - 8192, region.data(), 8192 - 100), 8192u - 100);
}

TEST_P(EngineDataTest, OffsetsBeyondFourGiB) {
  START();
  auto file = w().Open("far");
  const uint64_t far = 5 * kGiB + 12345;
  Region region = w().Allocate(3 * kMiB);
  FillPattern(9, far, region.data(), 2 * kMiB + 77);
  ASSERT_OK(w().Write(*file, far, region.data(), 2 * kMiB + 77));
  EXPECT_EQ(*file->Size(), far + 2 * kMiB + 77);
  std::memset(region.data(), 0, region.bytes());
  ASSERT_OK(w().Read(*file, far, region.data(), 2 * kMiB + 77));
  EXPECT_EQ(Mismatch(9, far, region.data(), 2 * kMiB + 77), 2 * kMiB + 77);
}

TEST_P(EngineTest, SyncIsARequestToo) {
  START();
  auto file = w().Open("sync", kMiB);
  Region region = w().Allocate(kMiB);
  ASSERT_OK(w().Write(*file, 0, region.data(), kMiB));
  Request sync;
  sync.PrepareSync(*file);
  ASSERT_OK(w().engine->Submit(&sync));
  ASSERT_OK(w().engine->Wait(&sync));
  EXPECT_EQ(w().engine->stats().Total(Op::kSync).requests, 1u);
}

TEST_P(EngineTest, CancelDropsWhatHasNotReachedTheDevice) {
  EngineOptions options;
  options.max_read_bytes_in_flight = kMiB;
  START(options);
  auto file = w().Open("cancel", 32 * kMiB);
  Region memory = w().Allocate(32 * kMiB);
  std::vector<Request> requests(16);
  std::vector<Request*> pointers;
  std::atomic<int> completed{0};
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].PrepareRead(*file, i * 2 * kMiB, memory.data() + i * 2 * kMiB, 2 * kMiB);
    requests[i].set_on_complete([](Request&, void* count) { ++*static_cast<std::atomic<int>*>(count); },
                                &completed);
    pointers.push_back(&requests[i]);
  }
  ASSERT_OK(w().engine->Submit(pointers));
  for (Request* request : pointers) w().engine->Cancel(request);
  w().engine->WaitSome(pointers, pointers.size());
  EXPECT_EQ(completed, 16);
  uint64_t cancelled = 0;
  for (const Request& request : requests) {
    ASSERT_TRUE(request.finished());
    if (request.state() == State::kCancelled) {
      ++cancelled;
      EXPECT_TRUE(absl::IsCancelled(request.status()));
      EXPECT_LT(request.done_bytes(), request.bytes());
    } else {
      EXPECT_OK(request.status());
    }
  }
  if (GetParam() == BackendKind::kSim) {
    EXPECT_EQ(cancelled, 16u);
  }
  EXPECT_EQ(w().engine->stats().Total(Op::kRead).cancelled, cancelled);
  // The engine goes on as if nothing had been.
  ASSERT_OK(w().Read(*file, 0, memory.data(), kMiB));
}

TEST_P(EngineTest, DestructionFinishesEveryRequest) {
  START();
  auto file = w().Open("shutdown", 48 * kMiB);
  Region memory = w().Allocate(48 * kMiB);
  std::vector<Request> requests(48);
  std::atomic<int> completed{0};
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].PrepareRead(*file, i * kMiB, memory.data() + i * kMiB, kMiB);
    requests[i].set_on_complete([](Request&, void* count) { ++*static_cast<std::atomic<int>*>(count); },
                                &completed);
    ASSERT_OK(w().engine->Submit(&requests[i]));
  }
  w().engine.reset();
  EXPECT_EQ(completed, 48);
  for (const Request& request : requests) {
    EXPECT_TRUE(request.state() == State::kDone || request.state() == State::kCancelled);
  }
}

TEST_P(EngineTest, SubmittingDuringShutdownIsRefused) {
  START();
  auto file = w().Open("late", 4 * kMiB);
  Region memory = w().Allocate(64 * 4096);
  struct Seen {
    Engine* engine;
    std::atomic<int> refused{0};
  } seen{w().engine.get()};
  std::vector<Request> requests(64);
  for (size_t i = 0; i < requests.size(); ++i) {
    Request& request = requests[i];
    request.PrepareRead(*file, 0, memory.data() + i * 4096, 4096);
    request.set_on_complete(
        [](Request& self, void* context) {
          auto* s = static_cast<Seen*>(context);
          if (!s->engine->Submit(&self).ok()) ++s->refused;
        },
        &seen);
    ASSERT_OK(w().engine->Submit(&request));
  }
  w().engine.reset();  // every request goes round until the engine refuses it
  EXPECT_EQ(seen.refused, 64);
}

TEST_P(EngineTest, FilesComeAndGo) {
  START();
  Region region = w().Allocate(64 * kKiB);
  for (int i = 0; i < 600; ++i) {  // more than the ring's file table holds
    auto file = w().Open("file" + std::to_string(i % 3), 64 * kKiB);
    FillPattern(static_cast<uint64_t>(i), 0, region.data(), region.bytes());
    ASSERT_OK(w().Write(*file, 0, region.data(), region.bytes()));
    std::memset(region.data(), 0, region.bytes());
    ASSERT_OK(w().Read(*file, 0, region.data(), region.bytes()));
    if (MovesData()) {
      ASSERT_EQ(Mismatch(static_cast<uint64_t>(i), 0, region.data(), region.bytes()), region.bytes());
    }
  }
}

TEST_P(EngineTest, ALockIsGoneWhenTheFileIs) {
  START();
  Region region = w().Allocate(4096);
  for (int i = 0; i < 20; ++i) {
    auto file = w().Open("locked", 4096);
    ASSERT_OK(file->Lock(0));
    ASSERT_OK(w().Write(*file, 0, region.data(), 4096));
    auto other = w().Open("locked");
    EXPECT_TRUE(absl::IsFailedPrecondition(other->Lock(0)));
    file.reset();
    ASSERT_OK(other->Lock(0));  // at once: no ring keeps the description alive
  }
}

TEST_P(EngineTest, SubmitsFromManyThreads) {
  START();
  auto file = w().Open("threads", 16 * kMiB);
  Region memory = w().Allocate(16 * kMiB);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 40; ++i) {
        std::byte* const data = memory.data() + t * 4 * kMiB;
        const uint64_t bytes = 4096 * (1 + (i * 7) % 64), offset = t * 4 * kMiB + 4096 * i;
        FillPattern(t, offset, data, bytes);
        if (!w().Write(*file, offset, data, bytes).ok()) ++failures;
        std::memset(data, 0, bytes);
        if (!w().Read(*file, offset, data, bytes).ok()) ++failures;
        if (MovesData() && Mismatch(t, offset, data, bytes) != bytes) ++failures;
        if (i % 8 == 0) (void)w().engine->stats();
        if (i % 16 == 0) (void)w().engine->DescribePending();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(w().engine->stats().Total(Op::kRead).requests, 160u);
}

TEST_P(EngineTest, CapsHold) {
  EngineOptions options;
  options.block_bytes = 256 * kKiB;
  options.max_read_bytes_in_flight = 2 * kMiB;
  options.max_write_bytes_in_flight = kMiB;
  START(options);
  auto file = w().Open("caps", 32 * kMiB);
  Region memory = w().Allocate(32 * kMiB);
  Request read, write;
  read.PrepareRead(*file, 0, memory.data(), 16 * kMiB);
  read.set_priority(Priority::kPrefetch);
  write.PrepareWrite(*file, 16 * kMiB, memory.data() + 16 * kMiB, 16 * kMiB);
  Request* const both[] = {&read, &write};
  ASSERT_OK(w().engine->Submit(both));
  ASSERT_OK(w().engine->WaitAll(both));
  EXPECT_LE(w().engine->stats().devices[0].peak_in_flight_bytes, 3 * kMiB);
  EXPECT_GT(w().engine->stats().devices[0].peak_in_flight_bytes, kMiB);
}

TEST_P(EngineTest, BadOptionsAreNamed) {
  const auto refused = [&](auto change) {
    VirtualClock clock;
    SimDiskOptions sim;
    sim.clock = &clock;
    SimDisk disk(sim);
    EngineOptions options;
    options.backend = GetParam();
    if (GetParam() == BackendKind::kSim) options.sim = &disk;
    change(options);
    return std::string(Engine::Create(options).status().message());
  };
  EXPECT_THAT(refused([](auto& o) { o.block_bytes = 1000; }), testing::HasSubstr("block_bytes"));
  EXPECT_THAT(refused([](auto& o) { o.block_bytes = 4097; }), testing::HasSubstr("block_bytes"));
  EXPECT_THAT(refused([](auto& o) { o.max_blocks_in_flight = 0; }),
              testing::HasSubstr("max_blocks_in_flight"));
  EXPECT_THAT(refused([](auto& o) { o.bounce_buffers = 0; }), testing::HasSubstr("bounce_buffers"));
  EXPECT_THAT(refused([](auto& o) { o.worker_threads = -1; }), testing::HasSubstr("worker_threads"));
  EXPECT_THAT(refused([](auto& o) { o.arenas = {nullptr}; }), testing::HasSubstr("arena"));
}

INSTANTIATE_TEST_SUITE_P(Backends, EngineTest,
                         testing::Values(BackendKind::kIoUring, BackendKind::kLibaio, BackendKind::kThreads,
                                         BackendKind::kNil, BackendKind::kSim),
                         [](const auto& suite) { return std::string(BackendName(suite.param)); });

INSTANTIATE_TEST_SUITE_P(Backends, EngineDataTest,
                         testing::Values(BackendKind::kIoUring, BackendKind::kLibaio, BackendKind::kThreads,
                                         BackendKind::kSim),
                         [](const auto& suite) { return std::string(BackendName(suite.param)); });

TEST(EngineNilTest, OneRequestOfMoreThanFourGiB) {
  World w(BackendKind::kNil);
  ASSERT_EQ(w.skip, "");
  auto file = w.Open("huge");
  const uint64_t bytes = 5 * kGiB + 3 * 4096;
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Request request;
  request.PrepareWrite(*file, kGiB, memory, bytes);
  ASSERT_OK(w.engine->Submit(&request));
  ASSERT_OK(w.engine->Wait(&request));
  EXPECT_EQ(request.done_bytes(), bytes);
  EXPECT_EQ(w.engine->stats().devices[0].pieces, 5 * 1024 + 1u);
  munmap(memory, bytes);
}

}  // namespace
}  // namespace penstock::aio::engine_test
