// A kernel that takes no transfers for a while, or for ever, or not in the way it is asked: io_uring and
// libaio below an engine whose calls are refused. What was failed stays failed, and nothing of it happens
// afterwards.
#include <fcntl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <thread>

#include "aio/backend.h"
#include "tests/aio/refusing_kernel.h"
#include "tests/aio/test_support.h"

namespace penstock::aio::refusal_test {
namespace {

constexpr uint64_t kBytes = 8 * kMiB;
constexpr int64_t kPatienceMs = 60'000;

struct Refusal {
  BackendKind backend;
  uint32_t syscall;
  int error;
  const char* name;
};
void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

void Pause(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// An engine in a child behind a gate, and a file with pattern 1.
struct GatedWorld {
  explicit GatedWorld(const Refusal& refusal)
      : gate({refusal.syscall}), world(refusal.backend), file(world.Open("file", kBytes)) {
    if (!world.skip.empty()) _exit(77);
    read_to = world.Allocate(kBytes);
    write_from = world.Allocate(kBytes);
    FillPattern(1, 0, write_from.data(), kBytes);
    if (!world.Write(*file, 0, write_from.data(), kBytes).ok()) _exit(70);
    FillPattern(2, 0, write_from.data(), kBytes);
  }

  // What is on the disk, asked past the engine.
  std::vector<std::byte> FileNow() const {
    std::vector<std::byte> there(kBytes);
    const int fd = open(file->path().c_str(), O_RDONLY | O_CLOEXEC);
    if (pread(fd, there.data(), kBytes, 0) != static_cast<ssize_t>(kBytes)) _exit(71);
    close(fd);
    return there;
  }

  SyscallGate gate;
  World world;
  std::unique_ptr<File> file;
  Region read_to, write_from;
};

#define CHILD_EXPECT(condition)                                       \
  do {                                                                \
    if (!(condition)) return Complain(w.world, __LINE__, #condition); \
  } while (false)

int Complain(const World& world, int line, const char* what) {
  std::fprintf(stderr, "line %d: not so: %s\n", line, what);
  const std::vector<std::string> lines = world.log.lines();
  for (size_t i = 0; i < std::min<size_t>(lines.size(), 10); ++i) {
    std::fprintf(stderr, "  log: %s\n", lines[i].c_str());
  }
  std::fprintf(stderr, "  of %zu lines\n", lines.size());
  return 1;
}

class ForAWhileTest : public testing::TestWithParam<Refusal> {};

TEST_P(ForAWhileTest, EverythingIsDoneWhenTheKernelTakesItAgain) {
  const int result = InChild([] {
    GatedWorld w(GetParam());
    Engine& engine = *w.world.engine;
    w.gate.Refuse(GetParam().error);
    Request read, write, sync;
    read.PrepareRead(*w.file, 0, w.read_to.data(), kBytes / 2);
    write.PrepareWrite(*w.file, kBytes / 2, w.write_from.data() + kBytes / 2, kBytes / 2);
    sync.PrepareSync(*w.file);
    for (Request* request : {&read, &write, &sync}) CHILD_EXPECT(engine.Submit(request).ok());
    for (int i = 0; i < kPatienceMs && w.gate.refused() < 20; ++i) Pause(1);
    CHILD_EXPECT(w.gate.refused() >= 20);
    for (const Request* request : {&read, &write, &sync}) CHILD_EXPECT(request->pending());
    w.gate.LetThrough();
    for (Request* request : {&read, &write, &sync}) CHILD_EXPECT(engine.Wait(request, kPatienceMs).ok());
    CHILD_EXPECT(Mismatch(1, 0, w.read_to.data(), kBytes / 2) == kBytes / 2);
    CHILD_EXPECT(w.world.Read(*w.file, 0, w.read_to.data(), kBytes).ok());
    CHILD_EXPECT(Mismatch(2, kBytes / 2, w.read_to.data() + kBytes / 2, kBytes / 2) == kBytes / 2);
    CHILD_EXPECT(w.world.log.lines().size() <= 2);
    w.world.engine.reset();
    return 0;
  });
  if (result == 77) GTEST_SKIP() << "no seccomp or no such backend here";
  EXPECT_EQ(result, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, ForAWhileTest,
    testing::Values(Refusal{BackendKind::kIoUring, SYS_io_uring_enter, EAGAIN, "io_uring_EAGAIN"},
                    Refusal{BackendKind::kIoUring, SYS_io_uring_enter, ENOMEM, "io_uring_ENOMEM"},
                    Refusal{BackendKind::kIoUring, SYS_io_uring_enter, EINTR, "io_uring_EINTR"},
                    Refusal{BackendKind::kLibaio, SYS_io_submit, EAGAIN, "libaio_EAGAIN"},
                    Refusal{BackendKind::kLibaio, SYS_io_submit, ENOMEM, "libaio_ENOMEM"}),
    [](const auto& suite) { return suite.param.name; });

class ForEverTest : public testing::TestWithParam<Refusal> {};

TEST_P(ForEverTest, RequestsFailAndNothingOfThemHappensLater) {
  const int result = InChild([] {
    GatedWorld w(GetParam());
    Engine& engine = *w.world.engine;
    w.gate.Refuse(GetParam().error);
    Request read, write, sync;
    read.PrepareRead(*w.file, 0, w.read_to.data(), kBytes);
    write.PrepareWrite(*w.file, 0, w.write_from.data(), kBytes);
    sync.PrepareSync(*w.file);
    for (Request* request : {&read, &write, &sync}) CHILD_EXPECT(engine.Submit(request).ok());
    const std::byte canary{0x5a};
    for (Request* request : {&read, &write, &sync}) {
      engine.Wait(request, kPatienceMs).IgnoreError();
      CHILD_EXPECT(request->state() == Request::State::kFailed);
      CHILD_EXPECT(request->error_number() > 0);
    }
    std::memset(w.read_to.data(), static_cast<int>(canary), kBytes);
    const std::vector<std::byte> file = w.FileNow();
    CHILD_EXPECT(GetParam().syscall == SYS_io_getevents || Mismatch(1, 0, file.data(), kBytes) == kBytes);
    // Later ones fail too, one at a time and from idle, and end.
    for (int i = 0; i < 3; ++i) {
      const absl::Status late = w.world.Write(*w.file, 0, w.write_from.data(), kMiB);
      CHILD_EXPECT(!late.ok() && !absl::IsDeadlineExceeded(late));
      Pause(20);
    }
    // And when the kernel has come to itself, nothing that was failed gets to it.
    w.gate.LetThrough();
    for (int i = 0; i < 3; ++i) {
      CHILD_EXPECT(!w.world.Write(*w.file, 0, w.write_from.data(), kMiB).ok());
      Pause(50);
    }
    for (uint64_t at = 0; at < kBytes; ++at) CHILD_EXPECT(w.read_to.data()[at] == canary);
    CHILD_EXPECT(w.FileNow() == file);
    // Nobody is asked and nothing is said without end, and files and engine go away as always.
    const uint64_t seen = w.gate.seen();
    const size_t lines = w.world.log.lines().size();
    Pause(100);
    CHILD_EXPECT(w.gate.seen() == seen);
    CHILD_EXPECT(w.world.log.lines().size() == lines && lines <= 12);
    CHILD_EXPECT(w.world.log.Has("broke down"));
    w.file.reset();
    auto other = w.world.Open("other", kMiB);
    CHILD_EXPECT(!w.world.Write(*other, 0, w.write_from.data(), kMiB).ok());
    other.reset();
    w.world.engine.reset();
    return 0;
  });
  if (result == 77) GTEST_SKIP() << "no seccomp or no such backend here";
  EXPECT_EQ(result, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, ForEverTest,
    testing::Values(Refusal{BackendKind::kIoUring, SYS_io_uring_enter, EAGAIN, "io_uring_EAGAIN"},
                    Refusal{BackendKind::kIoUring, SYS_io_uring_enter, EPERM, "io_uring_EPERM"},
                    Refusal{BackendKind::kLibaio, SYS_io_submit, EAGAIN, "libaio_EAGAIN"},
                    Refusal{BackendKind::kLibaio, SYS_io_submit, EPERM, "libaio_EPERM"},
                    Refusal{BackendKind::kLibaio, SYS_io_getevents, EPERM, "libaio_getevents_EPERM"}),
    [](const auto& suite) { return suite.param.name; });

}  // namespace
}  // namespace penstock::aio::refusal_test
