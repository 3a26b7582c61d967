// What is stuck is named and, if it must be, ends the process; what only takes its time is left alone. In
// virtual time, and in trainings on a drive one of whose transfers hangs in the kernel.
#include "zero/lanes/watchdog.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "aio/backend.h"
#include "aio/inline_backend.h"
#include "plain_compute.h"
#include "tests/zero/plain_batch.h"
#include "zero/engine/engine.h"

namespace penstock::zero::watchdog_test {
namespace {

using News = StuckOperation::News;
using testing::AllOf;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing_support::PlainBatch;
using tiering::Lane;
using tiering::Op;
using tiering::OpKind;

Op OpOf(OpKind kind, Lane lane, double planned_seconds = 0) {
  Op op{};
  op.kind = kind;
  op.lane = lane;
  op.seconds = planned_seconds;
  return op;
}

// A watchdog that is asked every second of virtual time.
class VirtualWatch : public testing::Test {
 protected:
  VirtualWatch()
      : watchdog_({.stuck_seconds = 60, .hopeless_seconds = 600},
                  {.what = [](const Op& op) { return std::string(tiering::OpKindName(op.kind)); },
                   .where = [](const Op&) { return std::string("the drive"); },
                   .drive_bytes = [this] { return bytes_; }}) {
    watchdog_.Attend(now_);
  }

  // What is told in that time; `moving`: bytes go by meanwhile.
  std::vector<StuckOperation> Pass(double seconds, bool moving = false) {
    std::vector<StuckOperation> told;
    for (; seconds > 0; --seconds) {
      now_ += 1;
      bytes_ += moving ? 1 : 0;
      for (const News news : {News::kStuck, News::kHopeless}) {
        const std::vector<StuckOperation> found = watchdog_.Look(news, now_);
        told.insert(told.end(), found.begin(), found.end());
      }
    }
    return told;
  }
  void Begin(tiering::OpId id, const Op& op) { watchdog_.Began(id, op, now_); }
  std::vector<StuckOperation> End(tiering::OpId id) {
    return watchdog_.Ended({{.id = id, .status = absl::OkStatus()}}, now_);
  }

  double now_ = 1000;
  uint64_t bytes_ = 0;
  Watchdog watchdog_;
  const Op read_ = OpOf(OpKind::kReadWeights, Lane::kRead);
  const Op update_ = OpOf(OpKind::kUpdate, Lane::kUpdate);
};

TEST_F(VirtualWatch, WhatHangsIsToldOnceThenHopelessOnceAndThenThatItEnded) {
  Begin(1, read_);
  EXPECT_THAT(Pass(59), IsEmpty());
  const std::vector<StuckOperation> told = Pass(100);
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(StuckText(told[0]), "stuck: read weights: 60 s on the drive without a sign of life");
  const std::vector<StuckOperation> hopeless = Pass(1000);
  ASSERT_THAT(hopeless, SizeIs(1));
  EXPECT_EQ(hopeless[0].news, News::kHopeless);
  EXPECT_EQ(hopeless[0].seconds, 600);
  const std::vector<StuckOperation> ended = End(1);
  ASSERT_THAT(ended, SizeIs(1));
  EXPECT_EQ(StuckText(ended[0]), "no longer stuck: read weights ended after 1.16e+03 s");
  EXPECT_THAT(Pass(1000), IsEmpty());
}

TEST_F(VirtualWatch, ADriveThatIsSlowButMovesIsNotToldHoweverLongItTakes) {
  Begin(1, read_);
  EXPECT_THAT(Pass(5000, /*moving=*/true), IsEmpty());
  EXPECT_THAT(Pass(59), IsEmpty());
  EXPECT_THAT(Pass(1), SizeIs(1)) << "a minute after the last byte";
}

TEST_F(VirtualWatch, WhatWaitsBehindWorkThatGoesOnIsNotTold) {
  for (tiering::OpId id = 0; id < 100; ++id) Begin(id, update_);
  for (tiering::OpId id = 0; id < 100; ++id) {
    EXPECT_THAT(Pass(50), IsEmpty()) << id;
    EXPECT_THAT(End(id), IsEmpty());
  }
}

TEST_F(VirtualWatch, OfALaneThatHangsTheOldestIsToldForAll) {
  Begin(1, read_);
  Begin(2, update_);
  EXPECT_THAT(Pass(30), IsEmpty());
  // New work behind it, and another lane that lives, do not hide it.
  Begin(3, read_);
  Begin(4, read_);
  EXPECT_THAT(End(2), IsEmpty());
  const std::vector<StuckOperation> told = Pass(60);
  ASSERT_THAT(told, SizeIs(1));
  EXPECT_EQ(told[0].others, 2);
  EXPECT_EQ(told[0].seconds, 60);
}

TEST_F(VirtualWatch, BytesOfTheDriveAreNoSignOfLifeOfTheProcessor) {
  Begin(1, update_);
  EXPECT_THAT(Pass(60, /*moving=*/true), SizeIs(1));
}

TEST_F(VirtualWatch, WhatIsPlannedToTakeLongHasTenTimesThat) {
  const Op forward = OpOf(OpKind::kForward, Lane::kCompute, 100);
  Begin(1, forward);
  EXPECT_THAT(Pass(999), IsEmpty());
  EXPECT_THAT(Pass(1), SizeIs(2)) << "stuck, and by now hopeless too";
}

TEST_F(VirtualWatch, TheCallersTimeAndThatOfAStoppedProcessDoNotCount) {
  Begin(1, read_);
  EXPECT_THAT(Pass(50), IsEmpty());
  watchdog_.Leave(now_);
  EXPECT_THAT(Pass(1000), IsEmpty()) << "nobody waits, and it may have ended long ago";
  watchdog_.Attend(now_);
  EXPECT_THAT(Pass(50), IsEmpty());
  now_ += 10'000;  // SIGSTOP
  EXPECT_THAT(Pass(50), IsEmpty());
  EXPECT_THAT(Pass(20), SizeIs(1));
}

TEST_F(VirtualWatch, ShortAbsencesDoNotHideWhatHangs) {
  Begin(1, read_);
  std::vector<StuckOperation> told;
  for (int i = 0; i < 70; ++i) {
    watchdog_.Leave(now_);
    watchdog_.Attend(now_);
    const std::vector<StuckOperation> found = Pass(1);
    told.insert(told.end(), found.begin(), found.end());
  }
  EXPECT_THAT(told, SizeIs(1));
}

TEST_F(VirtualWatch, ExchangesWithOtherRanksHaveTheirOwnBound) {
  const Op gather = OpOf(OpKind::kAllGather, Lane::kAllGather);
  const Op agree = OpOf(OpKind::kAgree, Lane::kCommit);
  Begin(1, gather);
  Begin(2, agree);
  EXPECT_THAT(Pass(5000), IsEmpty());
  EXPECT_THAT(End(1), IsEmpty());
}

// pread and pwrite, but for one transfer, which hangs in read(2) of an empty pipe until somebody writes to
// it.
class HangingBackend final : public aio::InlineBackend {
 public:
  struct Plan {
    std::atomic<int64_t> until{-1};  // transfers before it; -1: none hangs
    std::atomic<int> hung{0};
    int pipe[2] = {-1, -1};
    Plan() { EXPECT_EQ(pipe2(pipe, O_CLOEXEC), 0); }
    ~Plan() {
      close(pipe[0]);
      close(pipe[1]);
    }
    void LetGo() const { EXPECT_EQ(write(pipe[1], "x", 1), 1); }
  };
  explicit HangingBackend(Plan* plan) : plan_(*plan) {}
  std::string_view name() const override { return "hanging"; }

 private:
  int64_t Transfer(aio::Piece& piece) override {
    if (plan_.until >= 0 && plan_.until-- == 0) {
      ++plan_.hung;
      char byte = 0;
      (void)!read(plan_.pipe[0], &byte, 1);
    }
    return Whole(piece);
  }

  Plan& plan_;
};

class WatchedTraining : public testing::Test {
 protected:
  WatchedTraining() {
    std::string name = (std::filesystem::current_path() / "watchdog_test.XXXXXX").string();
    directory_ = mkdtemp(name.data());
  }
  ~WatchedTraining() override { std::filesystem::remove_all(directory_); }

  EngineOptions Options(HangingBackend::Plan* plan) const {
    EngineOptions options;
    options.dtype = kernels::DType::kFp32;
    options.example = PlainBatch(shape_, 0);
    options.optimizer.algorithm = kernels::AdamOptions{.lr = 1e-3};
    options.storage.state_dirs = {directory_ + "/state"};
    options.memory.tile_bytes = 16 << 10;
    options.storage.io.backend_factory = [plan] { return std::make_unique<HangingBackend>(plan); };
    return options;
  }
  // The losses of the steps from where the run stands to `last`.
  static absl::StatusOr<std::vector<double>> Train(Engine& engine, const plain::Shape& shape, int64_t last) {
    std::vector<double> losses;
    while (engine.step() < last) {
      const int64_t step = engine.step() + 1;
      const auto result = engine.Step({PlainBatch(shape, step)}, step < last ? Next::kTrain : Next::kUnknown);
      if (!result.ok()) return result.status();
      losses.push_back(result->loss);
    }
    if (absl::Status status = engine.Flush(); !status.ok()) return status;
    return losses;
  }

  const plain::Shape shape_{.layers = 3, .width = 64};
  std::string directory_;
};

TEST_F(WatchedTraining, ATransferThatHangsIsNamedAndTheRunGoesOnWhenItEnds) {
  HangingBackend::Plan plan;
  EngineOptions options = Options(&plan);
  options.watch.stuck_seconds = 0.2;
  std::mutex mutex;
  std::vector<StuckOperation> told;
  options.hooks.stuck = [&](const StuckOperation& operation) {
    {
      const std::lock_guard lock(mutex);
      told.push_back(operation);
    }
    // A slow machine may have named others, which ended by themselves.
    if (operation.news == News::kStuck && plan.hung.exchange(0) > 0) plan.LetGo();
  };
  auto engine = Engine::Create(std::make_shared<plain::PlainCompute>(shape_), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  plan.until = 20;
  const auto losses = Train(**engine, shape_, 4);
  ASSERT_TRUE(losses.ok()) << losses.status();
  engine->reset();
  ASSERT_EQ(plan.until, -1) << "it must have hung";
  const auto is = [this](News news) {
    return AllOf(Field(&StuckOperation::news, news),
                 Field(&StuckOperation::what, testing::ContainsRegex("^(read|write|commit).*step [1-4]$")),
                 Field(&StuckOperation::where, HasSubstr(directory_ + "/state")));
  };
  EXPECT_THAT(told, testing::Contains(is(News::kStuck)));
  EXPECT_THAT(told, testing::Contains(is(News::kEnded)));
  // The bits are those of a run that nobody watches.
  HangingBackend::Plan quiet;
  EngineOptions plain = Options(&quiet);
  plain.storage.overwrite = true;
  auto other = Engine::Create(std::make_shared<plain::PlainCompute>(shape_), plain);
  ASSERT_TRUE(other.ok()) << other.status();
  const auto expected = Train(**other, shape_, 4);
  ASSERT_TRUE(expected.ok());
  EXPECT_EQ(*losses, *expected);
}

TEST_F(WatchedTraining, ARunCanEndItselfAndItsLastCommitStands) {
  constexpr int kEnds = 17;
  const pid_t child = fork();
  if (child == 0) {
    HangingBackend::Plan plan;
    EngineOptions options = Options(&plan);
    options.watch.hopeless_seconds = 0.5;
    options.hooks.stuck = [&plan](const StuckOperation&) {
      if (plan.hung > 0) _exit(kEnds);
    };
    auto engine = Engine::Create(std::make_shared<plain::PlainCompute>(shape_), options);
    if (!engine.ok() || !Train(**engine, shape_, 3).ok()) _exit(1);
    plan.until = 3;
    (void)Train(**engine, shape_, 9);
    _exit(2);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  ASSERT_EQ(WEXITSTATUS(status), kEnds);
  HangingBackend::Plan quiet;
  EngineOptions options = Options(&quiet);
  options.resume.enabled = true;
  auto engine = Engine::Create(std::make_shared<plain::PlainCompute>(shape_), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_GE((*engine)->step(), 3);
  EXPECT_TRUE(Train(**engine, shape_, 9).ok());
}

TEST_F(WatchedTraining, OneThatIsLeftAloneByItsCallerIsNotToldToBeStuck) {
  HangingBackend::Plan plan;
  EngineOptions options = Options(&plan);
  options.watch.stuck_seconds = 0.2;
  std::atomic<int> told{0};
  // What began before the pause is told when it has been in flight all the time.
  options.hooks.stuck = [&](const StuckOperation& one) { told += one.seconds >= 0.6 ? 1 : 0; };
  auto engine = Engine::Create(std::make_shared<plain::PlainCompute>(shape_), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  ASSERT_TRUE((*engine)->Step({PlainBatch(shape_, 1)}, Next::kTrain).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(600));  // reads of the next step are done meanwhile
  EXPECT_EQ(told, 0);
  EXPECT_TRUE(Train(**engine, shape_, 3).ok());
}

}  // namespace
}  // namespace penstock::zero::watchdog_test
