// A process that is forked while transfers are in flight.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

#include "tests/aio/test_support.h"

namespace penstock::aio::fork_test {
namespace {

class ForkTest : public testing::TestWithParam<BackendKind> {};

TEST_P(ForkTest, AChildHasNeitherTheArenaNorTheEngineAndTheParentsTransfersEndWell) {
  const ScratchDirectory directory;
  ArenaOptions arena_options;
  arena_options.bytes = 16 * kMiB;
  auto arena = *Arena::Create(arena_options);
  EngineOptions options;
  options.backend = GetParam();
  options.arenas = {arena.get()};
  auto engine = *Engine::Create(options);
  FileOptions file_options;
  file_options.path = directory / "file";
  file_options.create = true;
  file_options.size = 8 * kMiB;
  auto file = *File::Open(file_options);
  ASSERT_OK(file->Lock());
  Region written = *arena->Allocate(8 * kMiB), read = *arena->Allocate(8 * kMiB);
  for (int round = 0; round < 6; ++round) {
    const auto seed = static_cast<uint64_t>(round);
    for (uint64_t i = 0; i < written.bytes(); ++i) written.data()[i] = PatternAt(seed, i);
    Request request;
    request.PrepareWrite(*file, 0, written.data(), written.bytes());
    ASSERT_OK(engine->Submit(&request));
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);
      unsigned char there = 0;
      if (mincore(arena->data(), kSectorBytes, &there) == 0) _exit(1);
      Request own;
      own.PrepareRead(*file, 0, read.data(), read.bytes());
      if (!absl::IsFailedPrecondition(engine->Submit(&own))) _exit(2);
      if (!absl::IsFailedPrecondition(engine->Wait(&request))) _exit(3);
      if (!absl::IsFailedPrecondition(engine->Drain())) _exit(4);
      if (!absl::IsFailedPrecondition(arena->Allocate(kMiB).status())) _exit(5);
      if (!absl::IsFailedPrecondition(file->Resize(0))) _exit(6);
      (void)engine->stats();
      written.Release();
      engine.reset();
      file.reset();
      arena.reset();
      _exit(0);
    }
    int how = 0;
    ASSERT_EQ(waitpid(child, &how, 0), child);
    ASSERT_TRUE(WIFEXITED(how)) << how;
    EXPECT_EQ(WEXITSTATUS(how), 0);
    ASSERT_OK(engine->Wait(&request));
    request.PrepareRead(*file, 0, read.data(), read.bytes());
    ASSERT_OK(engine->Submit(&request));
    ASSERT_OK(engine->Wait(&request));
    for (uint64_t i = 0; i < read.bytes(); ++i) ASSERT_EQ(read.data()[i], PatternAt(seed, i)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ForkTest,
                         testing::Values(BackendKind::kIoUring, BackendKind::kLibaio, BackendKind::kThreads),
                         [](const auto& kind) { return std::string(BackendName(kind.param)); });

}  // namespace
}  // namespace penstock::aio::fork_test
