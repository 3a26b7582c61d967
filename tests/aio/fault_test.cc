// Everything that can go wrong between engine and kernel, put there by hand: on a backend that fails as it is
// told, and on the real ones with limits and filters set. Never a false success, an abort, a hang or a leak.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <thread>

#include "aio/backend.h"
#include "aio/io_error.h"
#include "aio/program.h"
#include "tests/aio/refusing_kernel.h"
#include "tests/aio/test_support.h"

namespace penstock::aio::fault_test {
namespace {

using State = Request::State;
using testing::HasSubstr;

// What becomes of a transfer: an error, or at most so many bytes.
struct Fate {
  int error = 0;
  uint64_t bytes_max = UINT64_MAX;
};

struct Script {
  std::function<Fate(const Piece&)> decide = [](const Piece&) { return Fate(); };
  std::function<void()> forget;    // runs on the queue's thread when a file is closed
  std::atomic<bool> hold{false};   // completions are kept back
  std::atomic<int> break_down{0};  // errno that Run answers from now on
  std::atomic<uint64_t> transfers{0};
  std::atomic<uint64_t> runs{0};
};

// pread and pwrite on the queue's thread, as the script decides.
class ScriptedBackend final : public Backend {
 public:
  explicit ScriptedBackend(Script* script) : script_(script) {}
  std::string_view name() const override { return "scripted"; }
  absl::Status Start(const BackendConfig&) override { return absl::OkStatus(); }

  void Queue(Piece& piece) override {
    ++script_->transfers;
    const Fate fate = script_->decide(piece);
    if (fate.error != 0) {
      done_.push_back({&piece, -fate.error});
      return;
    }
    const uint64_t bytes = std::min(piece.device_bytes(), fate.bytes_max);
    const auto offset = static_cast<off_t>(piece.device_offset());
    ssize_t moved = 0;
    if (piece.op == Op::kRead) {
      moved = pread(piece.fd(), piece.device_data(), bytes, offset);
    } else if (piece.op == Op::kWrite) {
      moved = pwrite(piece.fd(), piece.device_data(), bytes, offset);
    }
    done_.push_back({&piece, moved >= 0 ? moved : -errno});
  }

  int64_t Run(std::span<Completion> out, uint32_t, int64_t timeout_ns) override {
    ++script_->runs;
    if (const int error = script_->break_down; error != 0) return -error;
    if ((done_.empty() || script_->hold) && timeout_ns != 0) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns < 0 ? 1'000'000'000 : timeout_ns),
                        [&] { return woken_ || script_->break_down != 0; });
      woken_ = false;
    }
    if (script_->hold) return 0;
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
    changed_.notify_one();
  }

  void ForgetFile(int) override {
    if (auto forget = std::exchange(script_->forget, nullptr)) forget();
  }

 private:
  Script* const script_;
  std::vector<Completion> done_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

// A file opened through the cache, so that transfers of any length can be made; the engine still keeps to its
// sectors.
struct Faulty {
  Script script;
  World world;
  std::unique_ptr<File> file;
  Region region;

  explicit Faulty(EngineOptions options = {}) : world(BackendKind::kThreads, WithScript(options, script)) {
    FileOptions file_options = world.NewFile("file");
    file_options.direct = false;
    file_options.offset_alignment = 4096;
    file_options.memory_alignment = 512;
    file_options.size = 4 * kMiB;
    file = *File::Open(file_options);
    region = world.Allocate(4 * kMiB);
    FillPattern(1, 0, region.data(), 4 * kMiB);
    EXPECT_OK(world.Write(*file, 0, region.data(), 4 * kMiB));
    script.transfers = 0;
  }
  static EngineOptions WithScript(EngineOptions options, Script& script) {
    options.backend_factory = [&script] { return std::make_unique<ScriptedBackend>(&script); };
    return options;
  }
};

TEST(FaultTest, EveryErrnoOfATransferIsReported) {
  Faulty f;
  for (const bool write : {false, true}) {
    for (int error = 1; error <= 133; ++error) {
      f.script.decide = [&](const Piece&) { return Fate{error}; };
      Request request;
      write ? request.PrepareWrite(*f.file, 8192, f.region.data(), kMiB)
            : request.PrepareRead(*f.file, 8192, f.region.data(), kMiB);
      ASSERT_OK(f.world.engine->Submit(&request));
      const absl::Status status = f.world.engine->Wait(&request);
      ASSERT_EQ(status.code(), IoErrorCode(error)) << status;
      ASSERT_EQ(request.error_number(), error);
      ASSERT_EQ(request.state(), State::kFailed);
      ASSERT_EQ(request.done_bytes(), 0u);
      ASSERT_THAT(std::string(status.message()), HasSubstr("errno " + std::to_string(error)));
      ASSERT_THAT(std::string(status.message()), HasSubstr("offset 8192, 1048576 bytes"));
    }
  }
  // The engine is as good as new.
  f.script.decide = [](const Piece&) { return Fate(); };
  EXPECT_OK(f.world.Read(*f.file, 0, f.region.data(), 4 * kMiB));
  EXPECT_EQ(f.world.engine->stats().Total(Op::kRead).failed, 133u);
  EXPECT_EQ(f.world.engine->stats().devices[0].in_flight_bytes, 0u);
  EXPECT_LT(f.world.log.lines().size(), 400u);
}

TEST(FaultTest, TransientErrorsAreRetriedWithinABound) {
  Faulty f;
  for (const int error : {EINTR, EAGAIN, EBUSY, ENOMEM}) {
    int left = 10;
    f.script.decide = [&](const Piece&) { return left-- > 0 ? Fate{error} : Fate(); };
    ASSERT_OK(f.world.Read(*f.file, 0, f.region.data(), 64 * kKiB));
    f.script.transfers = 0;
    left = 1 << 30;
    EXPECT_EQ(f.world.Read(*f.file, 0, f.region.data(), 64 * kKiB).code(), IoErrorCode(error));
    EXPECT_EQ(f.script.transfers, 65u);
  }
}

TEST(FaultTest, DeviceErrorsAreRetriedAsOftenAsAsked) {
  EngineOptions options;
  options.io_error_retries = 3;
  Faulty f(options);
  int left = 3;
  f.script.decide = [&](const Piece&) { return left-- > 0 ? Fate{EIO} : Fate(); };
  EXPECT_OK(f.world.Read(*f.file, 0, f.region.data(), 64 * kKiB));
  left = 4;
  EXPECT_TRUE(absl::IsDataLoss(f.world.Read(*f.file, 0, f.region.data(), 64 * kKiB)));
  EXPECT_EQ(f.world.engine->stats().IoErrorsRetried(), 6u);
}

// The kernel forgets what it could not write when it says so: a second sync would succeed and mean nothing.
TEST(FaultTest, AFailedSyncIsNeverTriedAgain) {
  EngineOptions options;
  options.io_error_retries = 3;
  Faulty f(options);
  for (int error = 1; error <= 133; ++error) {
    if (error == EINTR) continue;
    int left = 1;
    f.script.decide = [&](const Piece&) { return left-- > 0 ? Fate{error} : Fate(); };
    f.script.transfers = 0;
    Request sync;
    sync.PrepareSync(*f.file);
    ASSERT_OK(f.world.engine->Submit(&sync));
    ASSERT_EQ(f.world.engine->Wait(&sync).code(), IoErrorCode(error)) << ErrnoText(error);
    ASSERT_EQ(sync.error_number(), error);
    ASSERT_EQ(f.script.transfers, 1u) << ErrnoText(error);
  }
  EXPECT_EQ(f.world.engine->stats().IoErrorsRetried(), 0u);
  EXPECT_FALSE(f.world.log.Has("trying again"));
  // One that was broken off has not failed.
  int left = 3;
  f.script.decide = [&](const Piece&) { return left-- > 0 ? Fate{EINTR} : Fate(); };
  Request sync;
  sync.PrepareSync(*f.file);
  ASSERT_OK(f.world.engine->Submit(&sync));
  EXPECT_OK(f.world.engine->Wait(&sync));
}

TEST(FaultTest, ShortTransfersAreContinuedAtEveryBoundary) {
  Faulty f;
  constexpr uint64_t kBytes = 16 * kKiB;
  for (uint64_t cut = 1; cut < kBytes; cut += cut % 512 == 0 ? 1 : cut % 512 == 1 ? 510 : 1) {
    SCOPED_TRACE(cut);
    bool first = true;
    f.script.decide = [&](const Piece&) { return std::exchange(first, false) ? Fate{0, cut} : Fate(); };
    FillPattern(cut, 0, f.region.data(), kBytes);
    ASSERT_OK(f.world.Write(*f.file, 4096, f.region.data(), kBytes));
    std::memset(f.region.data(), 0, kBytes);
    first = true;
    ASSERT_OK(f.world.Read(*f.file, 4096, f.region.data(), kBytes));
    ASSERT_EQ(Mismatch(cut, 0, f.region.data(), kBytes), kBytes);
  }
  EXPECT_GT(f.world.engine->stats().devices[0].short_transfers, 150u);
}

TEST(FaultTest, OneSectorAtATimeStillEnds) {
  Faulty f;
  f.script.decide = [](const Piece&) { return Fate{0, 4096}; };
  FillPattern(9, 0, f.region.data(), kMiB);
  ASSERT_OK(f.world.Write(*f.file, 0, f.region.data(), kMiB));
  std::memset(f.region.data(), 0, kMiB);
  ASSERT_OK(f.world.Read(*f.file, 0, f.region.data(), kMiB));
  EXPECT_EQ(Mismatch(9, 0, f.region.data(), kMiB), kMiB);
}

TEST(FaultTest, AWriteThatWritesNothingIsNoSuccess) {
  Faulty f;
  f.script.decide = [](const Piece& piece) { return piece.op == Op::kWrite ? Fate{0, 0} : Fate(); };
  EXPECT_TRUE(absl::IsUnavailable(f.world.Write(*f.file, 0, f.region.data(), 4096)));
  EXPECT_TRUE(absl::IsUnavailable(f.world.Write(*f.file, 100, f.region.data(), 50)));
}

TEST(FaultTest, AReadThatMakesNoProgressIsTheEndOfTheFile) {
  Faulty f;
  f.script.decide = [](const Piece&) { return Fate{0, 100}; };  // for ever less than a sector
  EXPECT_TRUE(absl::IsOutOfRange(f.world.Read(*f.file, 0, f.region.data(), 8192)));
}

TEST(FaultTest, NoSpaceInTheMiddleStopsTheRest) {
  EngineOptions options;
  options.max_write_bytes_in_flight = kMiB;
  Faulty f(options);
  f.script.decide = [](const Piece& piece) { return piece.offset >= 2 * kMiB ? Fate{ENOSPC} : Fate(); };
  Request request;
  request.PrepareWrite(*f.file, 0, f.region.data(), 4 * kMiB);
  ASSERT_OK(f.world.engine->Submit(&request));
  EXPECT_TRUE(absl::IsResourceExhausted(f.world.engine->Wait(&request)));
  EXPECT_EQ(request.done_bytes(), 2 * kMiB);
  EXPECT_EQ(f.script.transfers, 3u) << "no block is started after the failure";
}

TEST(FaultTest, FailuresInEveryStageOfAReadModifyWrite) {
  Faulty f;
  for (const Op stage : {Op::kRead, Op::kWrite}) {
    f.script.decide = [&](const Piece& piece) { return piece.op == stage ? Fate{EIO} : Fate(); };
    EXPECT_TRUE(absl::IsDataLoss(f.world.Write(*f.file, 100, f.region.data(), 50)));
  }
  // Neither a bounce buffer nor the sector stayed taken.
  f.script.decide = [](const Piece&) { return Fate(); };
  for (int i = 0; i < 20; ++i) ASSERT_OK(f.world.Write(*f.file, 100, f.region.data(), 50));
}

TEST(FaultTest, ABackendThatBreaksDownFailsEverythingAndHangsNothing) {
  Faulty f;
  f.script.hold = true;
  std::vector<Request> requests(20);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].PrepareRead(*f.file, 0, f.region.data(), 2 * kMiB);
    ASSERT_OK(f.world.engine->Submit(&requests[i]));
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(f.world.engine->Drain(30)));
  f.script.break_down = ENXIO;
  Request late;
  late.PrepareRead(*f.file, 0, f.region.data(), 4096);
  ASSERT_OK(f.world.engine->Submit(&late));
  ASSERT_OK(f.world.engine->Drain());
  for (const Request& request : requests) EXPECT_EQ(request.error_number(), ENXIO);
  EXPECT_TRUE(absl::IsDataLoss(late.status()));
  EXPECT_TRUE(absl::IsDataLoss(f.world.Read(*f.file, 0, f.region.data(), 4096)));
  EXPECT_TRUE(f.world.log.Has("broke down"));
  // It is left alone, even if it would work again: what it then hands back was failed long ago.
  const uint64_t runs = f.script.runs;
  const size_t lines = f.world.log.lines().size();
  f.script.hold = false;
  f.script.break_down = 0;
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(absl::IsDataLoss(f.world.Read(*f.file, 0, f.region.data(), 4096)));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(f.script.runs, runs);
  EXPECT_EQ(f.world.log.lines().size(), lines);
}

TEST(FaultTest, CancelWhileTheDeviceHoldsOn) {
  EngineOptions options;
  options.max_read_bytes_in_flight = kMiB;
  Faulty f(options);
  f.script.hold = true;
  Request request;
  request.PrepareRead(*f.file, 0, f.region.data(), 4 * kMiB);
  request.set_priority(Priority::kPrefetch);
  ASSERT_OK(f.world.engine->Submit(&request));
  while (request.state() != State::kActive) std::this_thread::yield();
  f.world.engine->Cancel(&request);
  EXPECT_TRUE(
      absl::IsDeadlineExceeded(f.world.engine->Wait(&request, 20)));  // memory still in the device's hands
  f.script.hold = false;
  EXPECT_TRUE(absl::IsCancelled(f.world.engine->Wait(&request)));
  EXPECT_EQ(request.done_bytes(), kMiB);
}

// The cancel comes when the queue has looked for new requests, and before it looks for cancelled ones.
TEST(FaultTest, ACancelBetweenTwoLooksOfTheQueueIsNotLost) {
  Faulty f;
  Request request;
  request.PrepareRead(*f.file, 0, f.region.data(), kMiB);
  auto other = f.world.Open("other", 4096);
  ASSERT_OK(f.world.Read(*other, 0, f.region.data() + kMiB, 4096));
  f.script.transfers = 0;
  f.script.forget = [&] {
    EXPECT_OK(f.world.engine->Submit(&request));
    f.world.engine->Cancel(&request);
  };
  other.reset();
  EXPECT_TRUE(absl::IsCancelled(f.world.engine->Wait(&request)));
  EXPECT_EQ(f.script.transfers, 0u);
}

class RealFaultTest : public testing::TestWithParam<BackendKind> {};

TEST_P(RealFaultTest, AFileTruncatedUnderneath) {
  World w(GetParam());
  if (!w.skip.empty()) GTEST_SKIP() << w.skip;
  auto file = w.Open("cut", 8 * kMiB);
  Region region = w.Allocate(8 * kMiB);
  ASSERT_OK(w.Read(*file, 0, region.data(), 8 * kMiB));
  ASSERT_OK(file->Resize(3 * kMiB + 5000));
  Request request;
  request.PrepareRead(*file, 0, region.data(), 8 * kMiB);
  ASSERT_OK(w.engine->Submit(&request));
  const absl::Status status = w.engine->Wait(&request);
  EXPECT_TRUE(absl::IsOutOfRange(status)) << status;
  EXPECT_EQ(request.done_bytes(), 3 * kMiB + 5000);
}

TEST_P(RealFaultTest, ADescriptorThatGoesBad) {
  EngineOptions options;
  options.register_files = false;  // a registered one would go on working
  World w(GetParam(), options);
  if (!w.skip.empty()) GTEST_SKIP() << w.skip;
  auto file = w.Open("bad", kMiB);
  Region region = w.Allocate(kMiB);
  ASSERT_OK(w.Write(*file, 0, region.data(), kMiB));
  // Another description, open for reading only, takes the number's place.
  const int other = open(file->path().c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  ASSERT_EQ(dup3(other, file->fd(), O_CLOEXEC), file->fd());
  close(other);
  const absl::Status status = w.Write(*file, 0, region.data(), kMiB);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("errno 9"));
  EXPECT_OK(w.Read(*file, 0, region.data(), kMiB));
}

TEST_P(RealFaultTest, AFileSizeLimitIsAFullDisk) {
  // In a child, since the limit is the process's, and so is what programs do in their main.
  const pid_t child = fork();
  if (child == 0) {
    IgnoreFileSizeSignal();
    const rlimit limit{2 * kMiB, 2 * kMiB};
    setrlimit(RLIMIT_FSIZE, &limit);
    World w(GetParam());
    if (!w.skip.empty()) _exit(77);
    auto file = w.Open("limited");
    Region region = w.Allocate(4 * kMiB);
    const bool refused = absl::IsResourceExhausted(w.Write(*file, 0, region.data(), 4 * kMiB));
    w.engine.reset();
    std::filesystem::remove_all(w.directory.path());
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "backend not available";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, RealFaultTest,
                         testing::Values(BackendKind::kIoUring, BackendKind::kLibaio, BackendKind::kThreads),
                         [](const auto& suite) { return std::string(BackendName(suite.param)); });

// --- A kernel that refuses
// -----------------------------------------------------------------------------------------------

// Writes and reads through an engine on the best backend; 0 if it is the expected one and says why.
int UseEngine(const std::string& directory, const std::string& backend, const std::string& reason) {
  Log log;
  ArenaOptions arena_options;
  arena_options.bytes = 16 * kMiB;
  auto arena = Arena::Create(arena_options);
  if (!arena.ok()) return 10;
  EngineOptions options;
  options.arenas = {arena->get()};
  options.log = log.Sink();
  auto engine = Engine::Create(options);
  if (!engine.ok()) return 11;
  if ((*engine)->backend_name() != backend) return 12;
  if (!log.Has(reason)) return 13;
  if ((*engine)->stats().fallbacks.empty()) return 14;
  FileOptions file_options;
  file_options.path = directory + "/child";
  file_options.create = true;
  auto file = File::Open(file_options);
  if (!file.ok()) return 15;
  FillPattern(2, 0, (*arena)->data(), kMiB);
  Request request;
  request.PrepareWrite(**file, 0, (*arena)->data(), kMiB);
  if (!(*engine)->Submit(&request).ok() || !(*engine)->Wait(&request).ok()) return 16;
  std::memset((*arena)->data(), 0, kMiB);
  request.PrepareRead(**file, 0, (*arena)->data(), kMiB);
  if (!(*engine)->Submit(&request).ok() || !(*engine)->Wait(&request).ok()) return 17;
  return Mismatch(2, 0, (*arena)->data(), kMiB) == kMiB ? 0 : 18;
}

TEST(LadderTest, SeccompWithoutIoUringFallsToLibaio) {
  ScratchDirectory directory;
  const int result = InChild([&] {
    ForbidSyscalls({SYS_io_uring_setup});
    return UseEngine(directory.path(), "libaio", "seccomp");
  });
  if (result == 77) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(result, 0);
}

TEST(LadderTest, SeccompWithoutBothFallsToThreads) {
  ScratchDirectory directory;
  const int result = InChild([&] {
    ForbidSyscalls({SYS_io_uring_setup, SYS_io_setup});
    return UseEngine(directory.path(), "threads", "libaio is not available");
  });
  if (result == 77) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(result, 0);
}

// As an ordinary user with a limit on locked memory; 77 where that cannot be had.
int UnderLockLimit(const ScratchDirectory& directory, uint64_t bytes, const std::function<int()>& body) {
  std::filesystem::permissions(directory.path(), std::filesystem::perms::all);
  return InChild([&] {
    const rlimit limit{bytes, bytes};
    if (geteuid() != 0 || setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || chdir(directory.path().c_str()) != 0 ||
        setgid(65534) != 0 || setuid(65534) != 0) {
      return 77;
    }
    EngineOptions strict;
    strict.backend = BackendKind::kIoUring;
    strict.allow_fallback = false;
    strict.log = [](std::string_view) {};
    return Engine::Create(strict).ok() ? body() : 77;
  });
}

TEST(LadderTest, ALowLockLimitCostsOnlyTheRegisteredBuffers) {
  ScratchDirectory directory;
  const int result =
      UnderLockLimit(directory, kMiB, [] { return UseEngine(".", "io_uring", "buffers not registered"); });
  if (result == 77) GTEST_SKIP() << "needs root to become an ordinary user with a limit, and io_uring";
  EXPECT_EQ(result, 0);
}

// What fits below the limit is registered, and transfers at either side of the border, and across it, are
// right.
TEST(LadderTest, AMiddlingLockLimitRegistersWhatFits) {
  ScratchDirectory directory;
  const int result = UnderLockLimit(directory, 7 * kMiB, [] {
    Log log;
    ArenaOptions arena_options;
    arena_options.bytes = 16 * kMiB;
    auto arena = Arena::Create(arena_options);
    if (!arena.ok()) return 10;
    EngineOptions options;
    options.arenas = {arena->get()};
    options.log = log.Sink();
    auto engine = Engine::Create(options);
    if (!engine.ok() || (*engine)->backend_name() != "io_uring") return 11;
    if (!log.Has("only the first ") || !log.Has("ulimit -l")) return 12;
    FileOptions file_options;
    file_options.path = "child";
    file_options.create = true;
    auto file = File::Open(file_options);
    if (!file.ok()) return 13;
    FillPattern(3, 0, (*arena)->data(), 16 * kMiB);
    Request request;
    request.PrepareWrite(**file, 0, (*arena)->data(), 16 * kMiB);
    if (!(*engine)->Submit(&request).ok() || !(*engine)->Wait(&request).ok()) return 14;
    std::memset((*arena)->data(), 0, 16 * kMiB);
    // From half a block on, so that one transfer spans any border at a whole MiB.
    request.PrepareRead(**file, 512 * kKiB, (*arena)->data() + 512 * kKiB, 15 * kMiB);
    if (!(*engine)->Submit(&request).ok() || !(*engine)->Wait(&request).ok()) return 15;
    if (Mismatch(3, 512 * kKiB, (*arena)->data() + 512 * kKiB, 15 * kMiB) != 15 * kMiB) return 16;
    const DeviceStats device = (*engine)->stats().devices[0];
    return device.fixed_pieces > 4 && device.fixed_pieces < device.pieces ? 0 : 17;
  });
  if (result == 77) GTEST_SKIP() << "needs root to become an ordinary user with a limit, and io_uring";
  EXPECT_EQ(result, 0);
}

TEST(LadderTest, NoAioContextsLeftFallsToThreads) {
  ScratchDirectory directory;
  const int result = InChild([&] {
    ForbidSyscalls({SYS_io_uring_setup});
    // Take all of fs.aio-max-nr.
    for (unsigned events = 1u << 20; events != 0; events /= 2) {
      for (unsigned long context = 0; syscall(SYS_io_setup, events, &context) == 0; context = 0) {
      }
    }
    return UseEngine(directory.path(), "threads", "aio-max-nr");
  });
  if (result == 77) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(result, 0);
}

TEST(LadderTest, AForcedBackendThatIsNotThereIsAnError) {
  const int result = InChild([&] {
    ForbidSyscalls({SYS_io_uring_setup});
    EngineOptions options;
    options.backend = BackendKind::kIoUring;
    options.allow_fallback = false;
    const auto engine = Engine::Create(options);
    if (!absl::IsUnavailable(engine.status())) return 1;
    return std::string(engine.status().message()).find("io_uring") != std::string::npos ? 0 : 2;
  });
  if (result == 77) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace penstock::aio::fault_test
