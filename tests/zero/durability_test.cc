// Runs whose steps are not all durable, and runs that keep one version: the same bits as any other, fewer
// bytes written, and after their end what was said at the start. Kills are in kill_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tests/soak.h"
#include "tests/zero/training.h"
#include "zero/engine/engine.h"

namespace penstock::zero::durability_test {
namespace {

using testing_support::RunOptions;
using testing_support::TrainedLosses;
using testing_support::TrainGpt;

class DurabilityTest : public testing_support::ScratchTest {
 protected:
  DurabilityTest() {
    run_.model.dropout = run_.model.embedding_dropout = run_.model.attention_dropout = 0.1;
    run_.steps = 8;
    run_.tile_bytes = 128 << 10;
  }

  // The run on a drive, its steps durable as said, within the least memory and so much more.
  TrainedLosses OnDrive(Durability durability, int versions, int64_t more) {
    RunOptions run = run_;
    run.offload = OffloadDevice::kNvme;
    run.state_dir = scratch_ + "/state";
    run.keep_state = true;
    run.adjust = [&, durability, versions](EngineOptions& options) {
      options.storage.durability = durability;
      options.storage.versions = versions;
      options.storage.overwrite = !run_.resume;
      options.hooks.planned = [&](const EnginePlan& plan) {
        plan_ = plan;
        return absl::OkStatus();
      };
    };
    if (more >= 0) {
      run.host_memory_budget_bytes = 1;
      run.host_memory_budget_bytes = TrainGpt(run).least_host_memory_bytes + more;
    }
    return TrainGpt(run);
  }

  RunOptions run_;
  EnginePlan plan_;
};

TEST_F(DurabilityTest, TheBitsAreTheSameWhateverIsWrittenWhen) {
  for (int round = 0; round < 2 * tests::Soak(); ++round) {
    const int micro_batches = 1 + round % 2;
    run_.micro_batches = micro_batches;
    run_.seed = 7 + static_cast<uint64_t>(round / 2);
    run_.evaluate_every = 3;
    run_.shuffles = micro_batches == 2;         // steps that were announced in another order are called off
    run_.announce_always = micro_batches == 1;  // and so are those before an evaluation
    run_.offload = OffloadDevice::kNone;
    run_.checkpoints = {};
    const TrainedLosses plain = TrainGpt(run_);
    ASSERT_TRUE(plain.status.ok()) << plain.status;
    int late = 0, streams = 0;
    for (const int versions : {1, 2, 3}) {
      for (const int64_t more : {0, 3, 40}) {
        SCOPED_TRACE(testing::Message() << versions << " versions, " << more << " MiB more than the least");
        run_.checkpoints = {scratch_ + "/kept", more == 3 ? 3 : 0, 0};
        std::filesystem::remove_all(scratch_ + "/kept");
        const TrainedLosses trained = OnDrive(Durability::kCheckpoint, versions, more << 20);
        ASSERT_TRUE(trained.status.ok()) << trained.status;
        EXPECT_EQ(trained.losses, plain.losses);
        EXPECT_EQ(trained.norms, plain.norms);
        EXPECT_EQ(trained.evaluations, plain.evaluations);
        EXPECT_EQ(trained.committed.size(), 8u);
        EXPECT_FALSE(plan_.plan.commits_every_step);
        late += plan_.plan.late_write_bytes > 0 ? 1 : 0;
        streams += plan_.plan.late_write_bytes < plan_.state_bytes ? 1 : 0;
        // Flushed, it is whole, at its last step.
        const absl::StatusOr<swap::Inspection> there = swap::Inspect({scratch_ + "/state"});
        ASSERT_TRUE(there.ok()) << there.status();
        EXPECT_EQ(there->record.step, 8u);
        EXPECT_FALSE(there->record.overwriting);
        EXPECT_EQ(there->shape.slots, static_cast<uint32_t>(versions));
        for (const TrainedLosses::Checkpoint& checkpoint : trained.checkpoints)
          EXPECT_TRUE(checkpoint.status.ok()) << checkpoint.status;
        EXPECT_EQ(trained.checkpoints.size(), more == 3 ? 2u : 0u);
      }
    }
    EXPECT_GE(late, 3);
    EXPECT_GE(streams, 3);
  }
}

TEST_F(DurabilityTest, SkippedStepsAndEveryTypeOfStateToo) {
  run_.dtype = kernels::DType::kFp16;
  run_.loss_scale = {.dynamic = true, .initial_scale = 0x1p26, .window = 3, .hysteresis = 1};
  run_.steps = 12;
  for (const kernels::StateType states : {kernels::StateType::kFp32, kernels::StateType::k8Bit}) {
    run_.optimizer_states = states;
    run_.offload = OffloadDevice::kNone;
    run_.checkpoints = {};
    const TrainedLosses plain = TrainGpt(run_);
    ASSERT_TRUE(plain.status.ok()) << plain.status;
    ASSERT_FALSE(plain.skipped.empty());
    for (const int versions : {1, 2}) {
      // Kept at steps that are skipped, when tiles still have to be written.
      run_.checkpoints = {scratch_ + "/kept", 1, 2};
      const TrainedLosses trained = OnDrive(Durability::kCheckpoint, versions, 8 << 20);
      ASSERT_TRUE(trained.status.ok()) << trained.status;
      EXPECT_EQ(trained.losses, plain.losses);
      EXPECT_EQ(trained.skipped, plain.skipped);
      EXPECT_GT(plan_.plan.late_write_bytes, 0);
    }
  }
}

TEST_F(DurabilityTest, AStepWritesLessByWhatStaysInMemory) {
  const auto written = [&](Durability durability) {
    run_.steps = 3;
    const TrainedLosses trained = OnDrive(durability, 2, 4 << 20);
    EXPECT_TRUE(trained.status.ok()) << trained.status;
    return plan_.plan.nvme_write_bytes;
  };
  const int64_t every_step = written(Durability::kStep);
  EXPECT_EQ(plan_.plan.late_write_bytes, 0);
  const int64_t at_checkpoints = written(Durability::kCheckpoint);
  EXPECT_GT(plan_.plan.late_write_bytes, plan_.state_bytes / 4);
  // Gradients may wait elsewhere; of tiles, all are written every step in one, and these not in the other.
  EXPECT_LE(at_checkpoints, every_step - plan_.plan.late_write_bytes / 2);
}

TEST_F(DurabilityTest, ARunGoesOnFromItsLastFlushInEitherWay) {
  const TrainedLosses plain = TrainGpt(run_);
  for (const int versions : {1, 2}) {
    for (const Durability then : {Durability::kStep, Durability::kCheckpoint}) {
      run_.resume = false;
      run_.stop_after = 3;
      ASSERT_TRUE(OnDrive(Durability::kCheckpoint, versions, 3 << 20).status.ok());
      run_.resume = true;
      run_.stop_after = 0;
      const TrainedLosses rest = OnDrive(then, versions, 3 << 20);
      ASSERT_TRUE(rest.status.ok()) << rest.status;
      EXPECT_EQ(rest.resumed_from, 3);
      EXPECT_EQ(rest.losses, std::vector<double>(plain.losses.begin() + 3, plain.losses.end()));
      // A run of one version cannot but write it over.
      EXPECT_EQ(plan_.plan.commits_every_step, then == Durability::kStep && versions == 2);
      EXPECT_EQ(plan_.versions, versions);
    }
  }
}

TEST_F(DurabilityTest, OneVersionTakesHalfTheSpace) {
  run_.steps = 1;
  ASSERT_TRUE(OnDrive(Durability::kCheckpoint, 1, 0).status.ok());
  const int64_t one = plan_.disk_bytes;
  ASSERT_TRUE(OnDrive(Durability::kCheckpoint, 2, 0).status.ok());
  EXPECT_GE(plan_.disk_bytes - one, plan_.state_bytes);
}

}  // namespace
}  // namespace penstock::zero::durability_test
