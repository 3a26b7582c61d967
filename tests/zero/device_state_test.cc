// Optimizer state that lives on a device with its own memory, in part or as a whole: the processor's bits,
// within the device's budget, and nothing of it lost between the tiers.
#include "zero/compute/device_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>

#include "models/families/stages.h"
#include "swap/checkpoint.h"
#include "tests/soak.h"
#include "tests/zero/ranks.h"
#include "tests/zero/training.h"
#include "zero/compute/test_device.h"
#include "zero/engine/engine.h"
#include "zero/engine/restore.h"

namespace penstock::zero::device_state_test {
namespace {

using testing_support::MakeTestDevice;
using testing_support::RunOptions;
using testing_support::TrainedLosses;
using testing_support::TrainGpt;

constexpr int64_t kMiB = int64_t{1} << 20;

// Where state is beside the device: nowhere, on a drive from checkpoint to checkpoint, or after every step.
enum class Home { kMemory, kPersisted, kDurable };
constexpr Home kHomes[] = {Home::kMemory, Home::kPersisted, Home::kDurable};

class DeviceStateTest : public testing_support::ScratchTest {
 protected:
  // With as much as the ratio leaves on the device.
  static void Put(RunOptions* run, Home home, std::optional<double> ratio) {
    run->offload = home == Home::kMemory ? OffloadDevice::kCpu : OffloadDevice::kNvme;
    run->adjust = [home, ratio](EngineOptions& options) {
      options.storage.durability = home == Home::kDurable ? Durability::kStep : Durability::kCheckpoint;
      options.memory.bounds.processor_share = ratio;
    };
  }
  // The least device memory that works for the run.
  static int64_t LeastDeviceMemory(RunOptions run) {
    run.device = MakeTestDevice();
    run.device_memory_budget_bytes = 1;
    return TrainGpt(run).least_host_memory_bytes;
  }
  static double ShareOnDevice(const tiering::Plan& plan) {
    int64_t elements = 0;
    for (const tiering::BlockPlan& block : plan.blocks) elements += block.elements;
    return static_cast<double>(plan.device.resident_elements) / static_cast<double>(elements);
  }
  static void ExpectSame(const TrainedLosses& trained, const TrainedLosses& plain) {
    ASSERT_TRUE(trained.status.ok()) << trained.status;
    EXPECT_EQ(trained.losses, plain.losses);
    EXPECT_EQ(trained.norms, plain.norms);
    EXPECT_EQ(trained.evaluations, plain.evaluations);
    EXPECT_EQ(trained.skipped, plain.skipped);
    EXPECT_EQ(trained.loss_scales, plain.loss_scales);
  }
};

TEST_F(DeviceStateTest, EveryShareGivesTheBitsOfTheProcessor) {
  int none = 0, some = 0, all = 0;
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    for (const int micro_batches : {1, 3}) {
      // One of the two tells of the types whose paths bf16 has gone already; `make soak` has all.
      if (tests::Soak() == 1 && dtype == (micro_batches == 1 ? kernels::DType::kFp16 : kernels::DType::kFp32))
        continue;
      RunOptions run;
      run.dtype = dtype;
      run.micro_batches = micro_batches;
      run.clip = micro_batches == 1 ? 0.3 : 0;
      run.steps = 6;
      run.poison_step = 3;
      run.evaluate_every = 2;
      run.shuffles = micro_batches == 3;
      run.announce_always = true;  // and so some steps are called off
      run.model.dropout = run.model.embedding_dropout = run.model.attention_dropout = 0.1;
      run.tile_bytes = 64 << 10;
      const TrainedLosses plain = TrainGpt(run);
      ASSERT_TRUE(plain.status.ok()) << plain.status;
      ASSERT_FALSE(plain.skipped.empty());
      const int64_t least = LeastDeviceMemory(run);
      for (const Home home : kHomes) {
        for (const int64_t more : {int64_t{0}, int64_t{500} << 10, int64_t{1500} << 10, 64 * kMiB}) {
          if (tests::Soak() == 1 && dtype != kernels::DType::kBf16 && more > 0 && more < 64 * kMiB) continue;
          SCOPED_TRACE(testing::Message()
                       << dtype << ", " << micro_batches << " micro-batches, home " << static_cast<int>(home)
                       << ", " << more << " more than the least");
          Put(&run, home, more == 0 ? 1.0 : 0.0);
          run.device = MakeTestDevice({.latency_seconds = more == 0 ? 1e-4 : 0});
          run.device_memory_budget_bytes = least + more;
          run.host_memory_budget_bytes = 0;
          if (home != Home::kMemory) {
            run.host_memory_budget_bytes = 1;
            run.host_memory_budget_bytes = TrainGpt(run).least_host_memory_bytes + more / 2;
          }
          const TrainedLosses trained = TrainGpt(run);
          ExpectSame(trained, plain);
          EXPECT_LE(trained.peak_device_bytes, run.device_memory_budget_bytes);
          if (run.host_memory_budget_bytes > 0) {
            EXPECT_LE(trained.peak_managed_bytes, run.host_memory_budget_bytes);
          }
          const double share = ShareOnDevice(trained.plan);
          (share == 0 ? none : share < 1 ? some : all) += 1;
          if (more == 64 * kMiB) {
            EXPECT_EQ(share, 1);
          }
        }
      }
    }
  }
  EXPECT_GT(none, 0);
  EXPECT_GT(some, 2);
  EXPECT_GE(all, 8);
}

TEST_F(DeviceStateTest, EveryTypeOfStateAndOptimizer) {
  const OptimizerOptions optimizers[] = {kernels::AdamOptions{}, kernels::LionOptions{},
                                         kernels::SgdOptions{}, kernels::SgdOptions{.momentum = 0.9},
                                         kernels::AdagradOptions{}};
  for (const kernels::StateType states :
       {kernels::StateType::kFp32, kernels::StateType::kBf16, kernels::StateType::k8Bit}) {
    for (const OptimizerOptions& optimizer : optimizers) {
      RunOptions run;
      run.optimizer = optimizer;
      run.optimizer_states = states;
      run.dtype = states == kernels::StateType::kFp32 ? kernels::DType::kFp32 : kernels::DType::kBf16;
      run.steps = 4;
      run.tile_bytes = 64 << 10;
      const TrainedLosses plain = TrainGpt(run);
      for (const Home home : kHomes) {
        for (const double ratio : {0.0, 0.5}) {
          // Each kind of state is under both; `make soak` has every pair.
          const auto which = (&optimizer - optimizers) + static_cast<int>(states) + static_cast<int>(home);
          if (tests::Soak() == 1 && which % 2 != (ratio == 0 ? 0 : 1)) continue;
          Put(&run, home, ratio);
          run.device = MakeTestDevice();
          const TrainedLosses trained = TrainGpt(run);
          ExpectSame(trained, plain);
          EXPECT_GT(ShareOnDevice(trained.plan), 0);
          EXPECT_LE(ShareOnDevice(trained.plan), 1 - ratio);
        }
        run.device = HostDevice();
        run.adjust = nullptr;
      }
    }
  }
}

// What is copied is what the plan says, and the batches: with everything on the device 8 bytes for 4096
// elements of gradient.
TEST_F(DeviceStateTest, BytesCopiedAreThePlans) {
  for (const Home home : kHomes) {
    for (const double ratio : {0.0, 0.5, 1.0}) {
      SCOPED_TRACE(testing::Message() << "home " << static_cast<int>(home) << ", ratio " << ratio);
      RunOptions run;
      run.micro_batches = 2;
      Put(&run, home, ratio);
      int64_t h2d[2], d2h[2];
      TrainedLosses trained;
      for (const int more : {0, 1}) {
        run.device = MakeTestDevice();
        run.steps = 3 + more;
        trained = TrainGpt(run);
        ASSERT_TRUE(trained.status.ok()) << trained.status;
        h2d[more] = run.device->traffic().h2d_bytes;
        d2h[more] = run.device->traffic().d2h_bytes;
      }
      const TensorBatch batch = testing_support::MakeBatch(run, 1, 0);
      const auto batches = static_cast<int64_t>(2 * (batch.inputs.nbytes() + batch.targets.nbytes()));
      const tiering::DevicePlan& plan = trained.plan.device;
      EXPECT_EQ(h2d[1] - h2d[0], plan.h2d_bytes + batches);
      EXPECT_EQ(d2h[1] - d2h[0], plan.d2h_bytes);
      int64_t sums = 0, weights = 0, everything = 0;
      for (const tiering::BlockPlan& block : trained.plan.blocks) {
        sums += tiering::PartialSumBytes(block.elements);
        weights += block.elements * 2;
        everything += trained.plan.precision.UnpaddedBytes(block.elements);
      }
      if (ratio == 0) {
        EXPECT_EQ(plan.h2d_bytes, 0);
        EXPECT_EQ(plan.d2h_bytes, sums + (home == Home::kDurable ? everything : 0));
        EXPECT_EQ(trained.plan.nvme_read_bytes, 0);
        EXPECT_EQ(trained.plan.nvme_write_bytes > 0, home == Home::kDurable);
      } else {
        EXPECT_GT(plan.h2d_bytes, 0);
        EXPECT_GE(plan.d2h_bytes, ratio * static_cast<double>(weights));
      }
      EXPECT_EQ(plan.resident_elements == 0, ratio == 1);
    }
  }
}

// From any share to any other, and to none: the processor alone.
TEST_F(DeviceStateTest, CheckpointsGoOnWithAnyOtherShare) {
  RunOptions run;
  run.dtype = kernels::DType::kFp16;  // its loss scale is part of a checkpoint
  run.loss_scale = {.dynamic = true, .initial_scale = 0x1p26, .window = 3, .hysteresis = 1};
  run.steps = 9;
  run.tile_bytes = 64 << 10;
  run.model.dropout = run.model.embedding_dropout = run.model.attention_dropout = 0.1;
  const TrainedLosses plain = TrainGpt(run);
  ASSERT_FALSE(plain.skipped.empty());
  const std::vector<double> rest(plain.losses.begin() + 6, plain.losses.end());
  for (const Home from : kHomes) {
    for (const double ratio : {0.0, 0.6}) {
      SCOPED_TRACE(testing::Message() << "home " << static_cast<int>(from) << ", ratio " << ratio);
      RunOptions first = run;
      Put(&first, from, ratio);
      first.device = MakeTestDevice({.bytes_per_s = 2e8});  // copies take a while
      first.checkpoints = {scratch_ + "/kept", 2, 0};
      const TrainedLosses trained = TrainGpt(first);
      ExpectSame(trained, plain);
      EXPECT_GT(ShareOnDevice(trained.plan), 0);
      ASSERT_EQ(trained.checkpoints.size(), 4u);
      for (const TrainedLosses::Checkpoint& checkpoint : trained.checkpoints)
        ASSERT_TRUE(checkpoint.status.ok()) << checkpoint.status;
      int pair = 0;
      for (const Home to : kHomes) {
        for (const std::optional<double> other : {std::optional<double>(), {1.0}, {0.4}, {0.0}}) {
          // Half of them under each ratio; `make soak` has all under both.
          if (++pair % 2 == (ratio == 0 ? 0 : 1) && tests::Soak() == 1) continue;
          RunOptions second = run;
          Put(&second, to, other);
          if (other) second.device = MakeTestDevice();
          if (to != Home::kMemory) {
            second.state_dir = scratch_ + "/restored";
            second.resume = true;
            const absl::Status restored =
                RestoreRun(trained.checkpoints[2].path, testing_support::OptionsOf(second));
            ASSERT_TRUE(restored.ok()) << restored;
          } else {
            second.resume_from = trained.checkpoints[2].path;
          }
          const TrainedLosses again = TrainGpt(second);
          ASSERT_TRUE(again.status.ok()) << again.status;
          EXPECT_EQ(again.resumed_from, 6);
          EXPECT_EQ(again.losses, rest);
        }
      }
      std::filesystem::remove_all(scratch_ + "/kept");
    }
  }
}

// A run on a drive goes on where it ended, each time with another share on the device.
TEST_F(DeviceStateTest, ARunOnADriveGoesOnWithAnotherShare) {
  RunOptions run;
  run.steps = 8;
  run.tile_bytes = 64 << 10;
  const TrainedLosses plain = TrainGpt(run);
  std::vector<double> losses;
  run.state_dir = scratch_ + "/state";
  run.keep_state = true;
  const std::optional<double> ratios[] = {0.0, 0.5, {}, 0.3};
  for (int part = 0; part < 4; ++part) {
    Put(&run, part % 3 == 0 ? Home::kPersisted : Home::kDurable, ratios[part]);
    run.device = ratios[part] ? MakeTestDevice() : HostDevice();
    run.stop_after = 2 * (part + 1);
    run.resume = part > 0;
    const TrainedLosses trained = TrainGpt(run);
    ASSERT_TRUE(trained.status.ok()) << trained.status;
    losses.insert(losses.end(), trained.losses.begin(), trained.losses.end());
  }
  EXPECT_EQ(losses, plain.losses);
}

// A run whose every step is durable, killed at any operation, goes on from the last step that was reported.
TEST_F(DeviceStateTest, AKillLosesNoStepThatWasReported) {
  RunOptions run;
  run.steps = 8;
  run.tile_bytes = 64 << 10;
  const std::vector<double> plain = testing_support::Alone(run)["losses"];
  std::mt19937 random(3);
  for (const double ratio : {0.0, 0.5}) {
    run.state_dir = scratch_ + "/state";
    run.keep_state = true;
    const std::string reported = scratch_ + "/reported";
    int killed = 0;
    bool done = false;
    for (int life = 0; life < 8 && !done; ++life) {
      const int operations = life == 7 ? -1 : 60 + static_cast<int>(random() % 500);
      int64_t before = 0;  // the last step that any life so far was told is durable
      std::ifstream(reported) >> before;
      const testing_support::RankOutcome outcome =
          testing_support::RunProcesses(1, [&](int, int) {
            RunOptions own = run;
            Put(&own, Home::kDurable, ratio);
            own.device = MakeTestDevice();
            own.resume = life > 0;
            own.adjust = [&, adjust = own.adjust](EngineOptions& options) {
              adjust(options);
              options.hooks.observer = [&, count = operations](tiering::OpId, const tiering::Op& op, double,
                                                               double) mutable {
                if (op.kind == tiering::OpKind::kCommit) std::ofstream(reported) << op.step;
                if (count-- == 0) kill(getpid(), SIGKILL);
              };
            };
            return ToJson(TrainGpt(own));
          }).front();
      killed += outcome.exit_code == -1 ? 1 : 0;
      if (outcome.exit_code == -1) continue;
      ASSERT_EQ(outcome.text(), "");
      done = true;
      const int64_t from = std::max<int64_t>(0, outcome.report["resumed_from"].get<int64_t>());
      EXPECT_GE(from, before);
      EXPECT_EQ(outcome.report["losses"].get<std::vector<double>>(),
                std::vector<double>(plain.begin() + from, plain.end()));
    }
    EXPECT_TRUE(done);
    EXPECT_GT(killed, 0);
    std::filesystem::remove_all(run.state_dir);
    std::filesystem::remove(reported);
  }
}

// Where every step is durable, what lives on the device is only written to the drive; without a drive host
// memory gets smaller by it.
TEST_F(DeviceStateTest, ThePlanSaysWhatLivesThere) {
  RunOptions run;
  run.steps = 1;
  Put(&run, Home::kDurable, 0.0);
  run.device = MakeTestDevice();
  const tiering::Plan durable = TrainGpt(run).plan;
  EXPECT_EQ(ShareOnDevice(durable), 1);
  EXPECT_THAT(durable.reasons.back(), testing::HasSubstr("ratio 0 leaves it 100%"));
  int64_t host[2];
  for (const double ratio : {0.0, 1.0}) {
    Put(&run, Home::kMemory, ratio);
    run.device = MakeTestDevice();
    const tiering::Plan plan = TrainGpt(run).plan;
    host[static_cast<int>(ratio)] = plan.slot_bytes;
    EXPECT_EQ(plan.ledger().total(), plan.host_bytes());
    const std::string ledger = plan.device.ledger().Listed();
    EXPECT_EQ(ledger.find("optimizer state on the device") != std::string::npos, ratio == 0) << ledger;
  }
  EXPECT_LT(host[0], 64 << 10);
  EXPECT_GT(host[1], kMiB);
}

TEST_F(DeviceStateTest, StateIsReadAndWrittenByName) {
  for (const Home beside : kHomes) {
    for (const kernels::StateType states : {kernels::StateType::kFp32, kernels::StateType::k8Bit}) {
      std::vector<torch::Tensor> read[3];
      std::vector<double> losses[3];
      for (int home = 0; home < 3; ++home) {  // the processor's, all and half on the device
        RunOptions run;
        run.optimizer_states = states;
        run.tile_bytes = 64 << 10;
        if (home > 0) {
          Put(&run, beside, home == 1 ? 0.0 : 0.5);
          run.device = MakeTestDevice();
          if (beside != Home::kMemory) run.state_dir = scratch_ + "/state" + std::to_string(home);
        }
        EngineOptions options = testing_support::OptionsOf(run);
        if (run.adjust) run.adjust(options);
        options.storage.overwrite = true;
        absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(models::MakeGpt(run.model), options);
        ASSERT_TRUE(engine.ok()) << engine.status();
        auto step = [&] {
          absl::StatusOr<StepResult> result =
              (*engine)->Step({testing_support::MakeBatch(run, (*engine)->step() + 1, 0)}, Next::kTrain);
          ASSERT_TRUE(result.ok()) << result.status();
          losses[home].push_back(result->loss);
        };
        step();
        step();
        const std::vector<std::string> names = (*engine)->ParameterNames();
        for (size_t i = 0; i < names.size(); i += 5) {
          for (const StateKind kind : {StateKind::kGradient, StateKind::kParameter, StateKind::kFirstMoment,
                                       StateKind::kSecondMoment}) {
            absl::StatusOr<torch::Tensor> values = ReadStateTensor(**engine, names[i], kind);
            ASSERT_TRUE(values.ok()) << values.status();
            read[home].push_back(*values);
            if (kind == StateKind::kGradient) continue;
            const absl::Status written = WriteStateTensor(**engine, names[i], kind, *values * 1.25);
            ASSERT_TRUE(written.ok()) << written;
            read[home].push_back(*ReadStateTensor(**engine, names[i], kind));
          }
        }
        step();
        // With nothing to update in between.
        for (const double factor : {1.0, -1.0}) {
          absl::StatusOr<double> loss = (*engine)->Evaluate({testing_support::MakeBatch(run, -1, 0)});
          ASSERT_TRUE(loss.ok()) << loss.status();
          losses[home].push_back(*loss);
          const torch::Tensor value = *ReadStateTensor(**engine, names.back(), StateKind::kParameter);
          ASSERT_TRUE(WriteStateTensor(**engine, names.back(), StateKind::kParameter, value * factor).ok());
        }
        losses[home].push_back(*(*engine)->Evaluate({testing_support::MakeBatch(run, -1, 0)}));
        EXPECT_NE(losses[home].back(), losses[home][losses[home].size() - 2]);
        step();
      }
      for (int home = 1; home < 3; ++home) {
        EXPECT_EQ(losses[home], losses[0]);
        ASSERT_EQ(read[home].size(), read[0].size());
        for (size_t i = 0; i < read[0].size(); ++i) EXPECT_TRUE(torch::equal(read[home][i], read[0][i])) << i;
      }
    }
  }
}

TEST_F(DeviceStateTest, ACopyOfStateThatFailsEndsTheRunInWords) {
  for (const Home home : kHomes) {
    for (const int64_t copy : {2, 20, 40, 60}) {
      RunOptions run;
      Put(&run, home, 0);
      run.checkpoints = {scratch_ + "/kept", 2, 0};
      run.device = MakeTestDevice({.fail_copy = copy});
      const TrainedLosses trained = TrainGpt(run);
      EXPECT_EQ(trained.status.code(), absl::StatusCode::kInternal) << copy << ": " << trained.status;
      EXPECT_THAT(std::string(trained.status.message()), testing::HasSubstr("was made to fail"));
      std::filesystem::remove_all(scratch_ + "/kept");
    }
  }
}

}  // namespace
}  // namespace penstock::zero::device_state_test
