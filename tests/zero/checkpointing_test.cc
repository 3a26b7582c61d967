// Checkpoints of whole trainings: true to their step while training goes on, and good for going on from in
// every mode.
#include "zero/engine/checkpointing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tests/leaks.h"
#include "tests/zero/training.h"
#include "zero/engine/restore.h"

namespace penstock::zero::checkpointing_test {
namespace {

using testing_support::RunOptions;
using testing_support::TrainedLosses;
using testing_support::TrainGpt;

class CheckpointingTest : public testing_support::ScratchTest {
 protected:
  CheckpointingTest() {
    run_.model.dropout = run_.model.embedding_dropout = run_.model.attention_dropout = 0.1;
    run_.steps = 8;
    run_.tile_bytes = 128 << 10;
    plain_ = TrainGpt(run_);
    EXPECT_TRUE(plain_.status.ok()) << plain_.status;
  }

  // The rest of the run, from a checkpoint.
  TrainedLosses GoOn(const std::string& checkpoint, OffloadDevice offload, int64_t budget = 0) {
    RunOptions rest = run_;
    rest.checkpoints = {};
    rest.stop_after = 0;
    rest.offload = offload;
    rest.host_memory_budget_bytes = budget;
    rest.update_workers = 2;
    if (offload != OffloadDevice::kNvme) {
      rest.state_dir.clear();
      rest.resume_from = checkpoint;
      return TrainGpt(rest);
    }
    rest.state_dir = scratch_ + "/restored";
    rest.resume = true;
    TrainedLosses trained;
    trained.status = RestoreRun(checkpoint, testing_support::OptionsOf(rest));
    return trained.status.ok() ? TrainGpt(rest) : trained;
  }
  void ExpectRest(const TrainedLosses& rest, int64_t from) {
    ASSERT_TRUE(rest.status.ok()) << rest.status;
    EXPECT_EQ(rest.resumed_from, from);
    EXPECT_EQ(rest.losses, std::vector<double>(plain_.losses.begin() + from, plain_.losses.end()));
    EXPECT_EQ(rest.norms, std::vector<double>(plain_.norms.begin() + from, plain_.norms.end()));
  }

  RunOptions run_;
  TrainedLosses plain_;
};

TEST_F(CheckpointingTest, EveryModeGoesOnFromTheCheckpointsOfEveryMode) {
  for (const OffloadDevice from : {OffloadDevice::kNone, OffloadDevice::kCpu, OffloadDevice::kNvme}) {
    run_.offload = from;
    run_.stop_after = 5;
    run_.checkpoints = {scratch_ + "/kept-" + std::string(Name(from)), 2, 1};
    const TrainedLosses first = TrainGpt(run_);
    ASSERT_TRUE(first.status.ok()) << first.status;
    EXPECT_EQ(first.losses, std::vector<double>(plain_.losses.begin(), plain_.losses.begin() + 5));
    ASSERT_EQ(first.checkpoints.size(), 2u);
    for (const TrainedLosses::Checkpoint& checkpoint : first.checkpoints)
      EXPECT_TRUE(checkpoint.status.ok()) << checkpoint.status;
    ASSERT_EQ(swap::ListCheckpoints(run_.checkpoints.parent)->size(), 1u);
    const std::string checkpoint = *swap::FindCheckpoint(run_.checkpoints.parent);
    for (const OffloadDevice to : {OffloadDevice::kNone, OffloadDevice::kCpu, OffloadDevice::kNvme}) {
      SCOPED_TRACE(testing::Message() << Name(from) << " to " << Name(to));
      ExpectRest(GoOn(checkpoint, to, to == OffloadDevice::kNvme ? 24 << 20 : 0), 4);
    }
  }
}

TEST_F(CheckpointingTest, OfAStoreWithRoomForItIsSpreadOverTheStepsAndHoldsItsOwn) {
  run_.steps = 14;
  plain_ = TrainGpt(run_);
  run_.offload = OffloadDevice::kNvme;
  run_.state_dir = scratch_ + "/state";
  run_.keep_state = true;
  run_.checkpoints = {scratch_ + "/kept", 6, 0};
  const TrainedLosses trained = TrainGpt(run_);
  ASSERT_TRUE(trained.status.ok()) << trained.status;
  EXPECT_EQ(trained.losses, plain_.losses);
  EXPECT_EQ(swap::Inspect({run_.state_dir})->shape.slots, 3u);
  ASSERT_EQ(trained.checkpoints.size(), 2u);
  for (const TrainedLosses::Checkpoint& checkpoint : trained.checkpoints) {
    EXPECT_TRUE(checkpoint.status.ok()) << checkpoint.status;
    ExpectRest(GoOn(checkpoint.path, OffloadDevice::kNone), checkpoint.step);
  }
  // Its commit came during step 7, and five steps are there for it.
  EXPECT_EQ(trained.checkpoints[0].step, 6);
  EXPECT_GE(trained.checkpoints[0].at, 9);
  EXPECT_LE(trained.checkpoints[0].at, 13);
}

// What might have to be made again is part of every pass, and mostly skipped.
TEST_F(CheckpointingTest, OfAStoreKeepsItsPaceWhereMostOperationsHaveNothingToDo) {
  run_.clip = 1e9;
  run_.update_order = tiering::UpdateOrder::kInBackward;
  run_.offload = OffloadDevice::kNvme;
  run_.state_dir = scratch_ + "/state";
  run_.steps = 80;
  run_.checkpoints = {scratch_ + "/kept", 40, 0};
  const TrainedLosses trained = TrainGpt(run_);
  ASSERT_TRUE(trained.status.ok()) << trained.status;
  ASSERT_GE(trained.checkpoints.size(), 1u);
  EXPECT_TRUE(trained.checkpoints[0].status.ok()) << trained.checkpoints[0].status;
  EXPECT_GE(trained.checkpoints[0].at, 40 + kSpreadSteps / 2);
  // Its last sync has a thread of its own, which a busy machine lets wait for some steps.
  EXPECT_LE(trained.checkpoints[0].at, 40 + kSpreadSteps + 12);
}

TEST_F(CheckpointingTest, OfAStoreWithoutRoomForItEndsBeforeItsSlotIsNeeded) {
  run_.offload = OffloadDevice::kNvme;
  run_.state_dir = scratch_ + "/state";
  run_.keep_state = true;
  run_.stop_after = 1;
  ASSERT_TRUE(TrainGpt(run_).status.ok());
  EXPECT_EQ(swap::Inspect({run_.state_dir})->shape.slots, 2u);
  run_.resume = true;
  run_.stop_after = 0;
  run_.checkpoints = {scratch_ + "/kept", 1, 0};
  const TrainedLosses trained = TrainGpt(run_);
  ExpectRest(trained, 1);
  ASSERT_EQ(trained.checkpoints.size(), 8u) << "of the step that it went on from, too";
  for (const TrainedLosses::Checkpoint& checkpoint : trained.checkpoints) {
    EXPECT_TRUE(checkpoint.status.ok()) << checkpoint.status;
    EXPECT_LE(checkpoint.at, checkpoint.step + 2);
  }
  ExpectRest(GoOn(trained.checkpoints[0].path, OffloadDevice::kCpu), 1);
  ExpectRest(GoOn(trained.checkpoints[3].path, OffloadDevice::kCpu), 4);
  ExpectRest(GoOn(trained.checkpoints[6].path, OffloadDevice::kNone), 7);
}

// A run that was killed after a step and before its checkpoint was whole goes on from that very step.
TEST_F(CheckpointingTest, OneThatAKillCutShortIsMadeUpForWhereTheRunGoesOn) {
  for (const int versions : {1, 2, 3}) {
    SCOPED_TRACE(versions);
    run_.offload = OffloadDevice::kNvme;
    run_.state_dir = scratch_ + "/state";
    run_.keep_state = true;
    run_.adjust = [&](EngineOptions& options) {
      options.storage.versions = versions;
      if (versions == 1) options.storage.durability = Durability::kCheckpoint;
      options.storage.overwrite = !run_.resume;
    };
    run_.resume = false;
    run_.stop_after = 4;
    run_.checkpoints = {};
    ASSERT_TRUE(TrainGpt(run_).status.ok());
    run_.resume = true;
    run_.checkpoints = {scratch_ + "/kept", 4, 0};
    std::filesystem::remove_all(scratch_ + "/kept");
    // There is nothing else to do; and there is.
    for (const int64_t stop_after : {4, 0}) {
      run_.stop_after = stop_after;
      const TrainedLosses rest = TrainGpt(run_);
      if (stop_after == 0) ExpectRest(rest, 4);
      ASSERT_EQ(rest.checkpoints.size(), 1u) << "the first is there when the run goes on again";
      EXPECT_TRUE(rest.checkpoints[0].status.ok()) << rest.checkpoints[0].status;
      EXPECT_EQ(rest.checkpoints[0].step, stop_after == 4 ? 4 : 8);
      ExpectRest(GoOn(scratch_ + "/kept/step-00000004", OffloadDevice::kNone), 4);
    }
  }
}

// Every 512th byte of the second half of a store's file, where tiles lie.
void DamageTiles(const std::string& directory) {
  const std::string path = directory + "/penstock.store";
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path));
  for (int64_t at = bytes / 2; at < bytes; at += 512) {
    file.seekp(at);
    file.put('\x5a');
  }
  ASSERT_TRUE(file.good());
}

TEST_F(CheckpointingTest, ADamagedOneLeavesTheRunThatItWouldReplaceAsItWas) {
  run_.offload = OffloadDevice::kNvme;
  run_.state_dir = scratch_ + "/state";
  run_.keep_state = true;
  run_.stop_after = 4;
  run_.checkpoints = {scratch_ + "/kept", 2, 0};
  ASSERT_TRUE(TrainGpt(run_).status.ok());
  const std::string damaged = scratch_ + "/kept/step-00000002", whole = scratch_ + "/kept/step-00000004";
  ASSERT_NO_FATAL_FAILURE(DamageTiles(damaged));
  const EngineOptions options = testing_support::OptionsOf(run_);
  const std::vector<swap::CommitSeen> before = swap::SeeCommits({run_.state_dir});
  ASSERT_EQ(before.size(), 1u);
  const absl::Status refused = RestoreRun(damaged, options);
  EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr(damaged + "/penstock.store"));
  EXPECT_EQ(swap::SeeCommits({run_.state_dir}), before);
  EXPECT_TRUE(absl::IsDataLoss(VerifyCheckpoint(damaged, 0, 1)));
  EXPECT_TRUE(VerifyCheckpoint(whole, 0, 1).ok());
  run_.checkpoints = {};
  run_.resume = true;
  run_.stop_after = 0;
  ExpectRest(TrainGpt(run_), 4);
  // A whole one takes its place.
  ASSERT_TRUE(RestoreRun(whole, options).ok());
  ExpectRest(TrainGpt(run_), 4);
}

TEST_F(CheckpointingTest, InitialValuesThatCannotBeReadLeaveTheRunThatTheyWouldReplace) {
  run_.offload = OffloadDevice::kNvme;
  run_.state_dir = scratch_ + "/state";
  run_.keep_state = true;
  run_.stop_after = 3;
  ASSERT_TRUE(TrainGpt(run_).status.ok());
  const std::vector<swap::CommitSeen> before = swap::SeeCommits({run_.state_dir});
  int64_t asked = 0;
  run_.adjust = [&](EngineOptions& options) {
    options.storage.overwrite = true;
    options.initial_values = [&asked](int block, int64_t, int64_t elements, float* to) {
      if (block == 3) return absl::DataLossError("weights.safetensors: Input/output error");
      std::fill(to, to + elements, 0.01F);
      asked += elements;
      return absl::OkStatus();
    };
  };
  const TrainedLosses refused = TrainGpt(run_);
  EXPECT_TRUE(absl::IsDataLoss(refused.status)) << refused.status;
  EXPECT_GT(asked, 0);
  EXPECT_EQ(swap::SeeCommits({run_.state_dir}), before);
  run_.adjust = nullptr;
  run_.resume = true;
  run_.stop_after = 0;
  ExpectRest(TrainGpt(run_), 3);
}

// Fewer are to be kept from now on, and the newest, which the run would go on from, is damaged.
TEST_F(CheckpointingTest, OlderOnesStayWhereTheNewestCannotBeGoneOnFrom) {
  run_.offload = OffloadDevice::kCpu;
  run_.stop_after = 6;
  run_.checkpoints = {scratch_ + "/kept", 2, 0};
  ASSERT_TRUE(TrainGpt(run_).status.ok());
  const std::string newest = scratch_ + "/kept/step-00000006";
  ASSERT_NO_FATAL_FAILURE(DamageTiles(newest));
  run_.stop_after = 0;
  run_.checkpoints.keep = 1;
  run_.resume_from = newest;
  const TrainedLosses refused = TrainGpt(run_);
  EXPECT_TRUE(absl::IsDataLoss(refused.status)) << refused.status;
  EXPECT_EQ(swap::ListCheckpoints(run_.checkpoints.parent)->size(), 3u);
  run_.resume_from = scratch_ + "/kept/step-00000004";
  std::filesystem::rename(newest, scratch_ + "/damaged");
  ExpectRest(TrainGpt(run_), 4);
  EXPECT_EQ(swap::ListCheckpoints(run_.checkpoints.parent)->size(), 1u);
}

TEST_F(CheckpointingTest, TheCopysMemoryIsPartOfTheBudget) {
  run_.offload = OffloadDevice::kNvme;
  run_.checkpoints = {scratch_ + "/kept", 3, 0};
  run_.host_memory_budget_bytes = 1;
  const TrainedLosses refused = TrainGpt(run_);
  ASSERT_GT(refused.least_host_memory_bytes, 0) << refused.status;
  run_.host_memory_budget_bytes = refused.least_host_memory_bytes;
  const TrainedLosses trained = TrainGpt(run_);
  ASSERT_TRUE(trained.status.ok()) << trained.status;
  EXPECT_EQ(trained.losses, plain_.losses);
  EXPECT_LE(trained.peak_managed_bytes, run_.host_memory_budget_bytes);
  EXPECT_EQ(trained.checkpoints.size(), 2u);
}

// A checkpoint of every step, from a drive with room for it, from one without, and from memory.
TEST_F(CheckpointingTest, HundredsLeaveNoDescriptorMemoryOrFile) {
  run_.model = {1, 32, 2, 16, 256, 0};
  run_.batch = 1;
  run_.seq = 16;
  run_.keep_state = true;
  run_.checkpoints = {scratch_ + "/kept", 1, 2};
  for (const int versions : {0, 2, 3}) {
    SCOPED_TRACE(versions);
    run_.offload = versions == 0 ? OffloadDevice::kCpu : OffloadDevice::kNvme;
    run_.state_dir = versions == 0 ? "" : scratch_ + "/state";
    run_.steps = 100;
    tests::Held before;
    run_.adjust = [&](EngineOptions& options) {
      options.storage.versions = versions;
      options.storage.overwrite = true;
      options.hooks.describe = [&](const StepResult& result) {
        if (result.step == 20) before = {};
        if (result.step == 99) {
          const tests::Held now;
          // One checkpoint is on its way or none: its file, its directory.
          EXPECT_LE(std::abs(now.descriptors - before.descriptors), 3);
          EXPECT_LE(std::abs(now.threads - before.threads), 1);
          EXPECT_LT(now.resident_bytes, before.resident_bytes + (3 << 20));
        }
        return nlohmann::json();
      };
    };
    const tests::Held outside;
    const TrainedLosses trained = TrainGpt(run_);
    ASSERT_TRUE(trained.status.ok()) << trained.status;
    ASSERT_EQ(trained.checkpoints.size(), 100u);
    for (const TrainedLosses::Checkpoint& checkpoint : trained.checkpoints)
      EXPECT_TRUE(checkpoint.status.ok()) << checkpoint.status;
    EXPECT_EQ(tests::Held().descriptors, outside.descriptors);
    EXPECT_EQ(tests::Entries((scratch_ + "/kept").c_str()), 3) << "two, and which is the latest";
    if (versions > 0) {
      EXPECT_EQ(tests::Entries(run_.state_dir.c_str()), 1);
    }
  }
}

TEST_F(CheckpointingTest, OneThatIsThereAlreadyIsToldAndTrainingGoesOn) {
  run_.checkpoints = {scratch_ + "/kept", 4, 0};
  ASSERT_TRUE(TrainGpt(run_).status.ok());
  const TrainedLosses again = TrainGpt(run_);
  ASSERT_TRUE(again.status.ok()) << again.status;
  EXPECT_EQ(again.losses, plain_.losses);
  ASSERT_EQ(again.checkpoints.size(), 2u);
  EXPECT_TRUE(absl::IsAlreadyExists(again.checkpoints[0].status)) << again.checkpoints[0].status;
}

// Somebody moves the directory away and makes another in its place, perhaps for a run of theirs: nothing is
// written or removed there. Moved back, it is used again.
TEST_F(CheckpointingTest, ADirectoryInThePlaceOfTheRunsOwnIsLeftAlone) {
  namespace fs = std::filesystem;
  const std::string kept = scratch_ + "/kept", away = scratch_ + "/away";
  const std::string theirs = kept + "/" + swap::CheckpointName(1), half = kept + "/.step-00000003.partial";
  run_.checkpoints = {kept, 2, 1};
  run_.after_step = [&](Engine& engine) {
    if (engine.step() != 3 && engine.step() != 7) return absl::OkStatus();
    absl::Status over = engine.Flush();
    if (engine.step() == 3) {
      fs::rename(kept, away);
      fs::create_directories(half);
      fs::copy(away + "/" + swap::CheckpointName(2), theirs);
    } else {
      EXPECT_TRUE(fs::exists(half));
      EXPECT_EQ(std::distance(fs::directory_iterator(kept), fs::directory_iterator()), 2);
      EXPECT_TRUE(swap::Inspect({theirs}).ok());
      fs::remove_all(kept);
      fs::rename(away, kept);
    }
    return over;
  };
  const TrainedLosses trained = TrainGpt(run_);
  ASSERT_TRUE(trained.status.ok()) << trained.status;
  EXPECT_EQ(trained.losses, plain_.losses);
  ASSERT_EQ(trained.checkpoints.size(), 4u);
  for (const size_t i : {0u, 3u})
    EXPECT_TRUE(trained.checkpoints[i].status.ok()) << trained.checkpoints[i].status;
  for (const size_t i : {1u, 2u}) {
    EXPECT_THAT(std::string(trained.checkpoints[i].status.message()),
                testing::AllOf(testing::HasSubstr(kept), testing::HasSubstr("moved away"),
                               testing::HasSubstr("bring it back")));
  }
  const auto all = *swap::ListCheckpoints(kept);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all.front().step, 8u);
}

TEST_F(CheckpointingTest, AnotherRunsCheckpointIsRefused) {
  run_.checkpoints = {scratch_ + "/kept", 4, 0};
  ASSERT_TRUE(TrainGpt(run_).status.ok());
  run_.checkpoints = {};
  run_.seed = 8;
  run_.resume_from = *swap::FindCheckpoint(scratch_ + "/kept");
  const TrainedLosses other = TrainGpt(run_);
  EXPECT_TRUE(absl::IsFailedPrecondition(other.status)) << other.status;
  EXPECT_THAT(std::string(other.status.message()), testing::HasSubstr("seed"));
}

}  // namespace
}  // namespace penstock::zero::checkpointing_test
