// The engine against plain LibTorch, and against itself in every mode.
#include "zero/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/families/causal_attention.h"
#include "models/families/gpt.h"
#include "models/families/stages.h"
#include "tests/soak.h"
#include "tests/zero/plain_model.h"
#include "tests/zero/training.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/tensor_allocator.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero::engine_test {
namespace {

using testing_support::RunOptions;
using testing_support::TrainedLosses;
using testing_support::TrainGpt;

// The same model whole in memory, with LibTorch's own autograd, clipping and AdamW.
std::vector<double> PlainLosses(const RunOptions& run) {
  testing_support::PlainModel plain(run);
  torch::optim::AdamW optimizer(
      plain.parameters,
      torch::optim::AdamWOptions(run.lr).betas({0.9, 0.999}).eps(1e-8).weight_decay(run.weight_decay));
  std::vector<double> losses;
  for (int64_t step = 1; step <= run.steps; ++step) {
    losses.push_back(plain.Backward(run, step, /*scale=*/1));
    if (run.clip > 0) torch::nn::utils::clip_grad_norm_(plain.parameters, run.clip);
    optimizer.step();
  }
  return losses;
}

TEST(Engine, LossesInFp32AgreeWithPlainLibTorchOverTwentySteps) {
  for (const int micro_batches : {1, 2}) {
    RunOptions run;
    run.dtype = kernels::DType::kFp32;
    run.batch = 4;
    run.seq = 32;
    run.micro_batches = micro_batches;
    run.steps = 20;
    run.clip = 0.5;
    run.weight_decay = 0.1;
    run.lr = 1e-3;
    const std::vector<double> plain = PlainLosses(run);
    const TrainedLosses ours = TrainGpt(run);
    ASSERT_TRUE(ours.status.ok()) << ours.status;
    ASSERT_EQ(ours.losses.size(), plain.size());
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_NEAR(ours.losses[i], plain[i], 1e-5 * std::abs(plain[i])) << "step " << i + 1;
    }
    EXPECT_LT(plain.back(), plain.front());
  }
}

// Attention by blocks, also where a batch of one makes its inputs strided views.
TEST(Engine, LongSequencesAgreeWithPlainLibTorchAndHaveTheSameBitsInTheLeastMemory) {
  for (const kernels::DType dtype : {kernels::DType::kFp32, kernels::DType::kBf16, kernels::DType::kFp16}) {
    for (const int64_t batch : {1, 2}) {
      RunOptions run;
      run.model = {2, 64, 4, 300, 256, 0.1};
      ASSERT_GT(run.model.context, models::kWholeLength);
      run.dtype = dtype;
      run.batch = batch;
      run.seq = run.model.context;
      run.steps = 4;
      run.evaluate_every = 2;
      const TrainedLosses none = TrainGpt(run);
      ASSERT_TRUE(none.status.ok()) << none.status;
      if (dtype == kernels::DType::kFp32) {
        const std::vector<double> plain = PlainLosses(run);
        ASSERT_EQ(none.losses.size(), plain.size());
        for (size_t i = 0; i < plain.size(); ++i)
          EXPECT_NEAR(none.losses[i], plain[i], 1e-5 * std::abs(plain[i])) << "step " << i + 1;
      }
      run.offload = OffloadDevice::kNvme;
      run.host_memory_budget_bytes = 1;
      run.host_memory_budget_bytes = TrainGpt(run).least_host_memory_bytes;
      const TrainedLosses nvme = TrainGpt(run);
      ASSERT_TRUE(nvme.status.ok()) << nvme.status;
      EXPECT_EQ(nvme.losses, none.losses);
      EXPECT_EQ(nvme.norms, none.norms);
      EXPECT_EQ(nvme.evaluations, none.evaluations);
      EXPECT_LE(nvme.peak_managed_bytes, run.host_memory_budget_bytes);
    }
  }
}

// A mask is made again in backward, from the seed of its step, micro-batch and stage.
TEST(Engine, DropoutIsThatOfPlainLibTorchWithTheSameSeeds) {
  RunOptions run;
  run.batch = 4;
  run.seq = 32;
  run.dtype = kernels::DType::kFp32;
  run.model.dropout = run.model.embedding_dropout = run.model.attention_dropout = 0.2;
  run.micro_batches = 2;
  run.steps = 6;
  run.clip = 0.5;
  const std::vector<double> plain = PlainLosses(run);
  const TrainedLosses ours = TrainGpt(run);
  ASSERT_TRUE(ours.status.ok()) << ours.status;
  run.model.dropout = run.model.embedding_dropout = run.model.attention_dropout = 0;
  const std::vector<double> without = PlainLosses(run);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_NEAR(ours.losses[i], plain[i], 1e-5 * std::abs(plain[i])) << "step " << i + 1;
    EXPECT_GT(std::abs(without[i] - plain[i]), 1e-4 * std::abs(plain[i])) << "step " << i + 1;
  }
}

// bf16 has 8 bits: every product and activation carries a relative rounding error of up to 2^-9. The loss is
// a mean over hundreds of tokens of a log-probability near ln(256) = 5.5 whose logits pass about 6 roundings
// per layer; errors of independent sign add up as their root, sqrt(6 * layers + 4) * 2^-9 of logits of order
// one: 0.01 for four layers, on one token. Over 20 steps the trajectories part by at most a few of that; the
// bound is 0.03, 0.6% of the loss.
TEST(Engine, LossesInBf16StayWithinTheirBoundOfFp32) {
  RunOptions run;
  run.batch = 4;
  run.seq = 32;
  run.steps = 20;
  run.dtype = kernels::DType::kFp32;
  const std::vector<double> exact = PlainLosses(run);
  run.dtype = kernels::DType::kBf16;
  const TrainedLosses ours = TrainGpt(run);
  ASSERT_TRUE(ours.status.ok()) << ours.status;
  for (size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(ours.losses[i], exact[i], 0.03) << "step " << i + 1;
}

TEST(Engine, EveryOffloadModeAndBudgetGivesTheSameBits) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32}) {
    for (const int micro_batches : {1, 3}) {
      for (const double clip : {0.0, 0.3}) {
        RunOptions run;
        run.dtype = dtype;
        run.micro_batches = micro_batches;
        run.clip = clip;
        run.steps = 5;
        run.model.dropout = run.model.embedding_dropout = run.model.attention_dropout = 0.1;
        run.offload = OffloadDevice::kNone;
        const TrainedLosses none = TrainGpt(run);
        ASSERT_TRUE(none.status.ok()) << none.status;
        ASSERT_EQ(none.losses.size(), 5u);
        run.offload = OffloadDevice::kCpu;
        const TrainedLosses cpu = TrainGpt(run);
        ASSERT_TRUE(cpu.status.ok()) << cpu.status;
        EXPECT_EQ(cpu.losses, none.losses);
        EXPECT_EQ(cpu.norms, none.norms);
        run.offload = OffloadDevice::kNvme;
        run.host_memory_budget_bytes = 1;
        const TrainedLosses refused = TrainGpt(run);
        ASSERT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition);
        ASSERT_GT(refused.least_host_memory_bytes, 0) << refused.status;
        for (const int64_t extra :
             {int64_t{0}, int64_t{300} << 10, int64_t{1} << 20, int64_t{3} << 20, int64_t{64} << 20}) {
          run.host_memory_budget_bytes = refused.least_host_memory_bytes + extra;
          run.update_workers = extra == 0 ? 1 : 2;
          run.tile_bytes = extra == 300 << 10 ? 128 << 10 : 0;
          const TrainedLosses nvme = TrainGpt(run);
          ASSERT_TRUE(nvme.status.ok()) << nvme.status;
          EXPECT_EQ(nvme.losses, none.losses) << "budget " << run.host_memory_budget_bytes;
          EXPECT_EQ(nvme.norms, none.norms);
          EXPECT_LE(nvme.peak_managed_bytes, run.host_memory_budget_bytes);
        }
      }
    }
  }
}

// The order of update is nobody's business but the plan's: also where clipping or a value that is not finite
// asks for what was updated in backward to be made again or undone.
TEST(Engine, EveryOrderOfUpdateGivesTheSameBits) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    for (const int micro_batches : {1, 2}) {
      RunOptions run;
      run.dtype = dtype;
      run.micro_batches = micro_batches;
      run.steps = 7;
      run.poison_step = 4;
      // In fp16 the step that is skipped halves the scale of those after it.
      run.loss_scale = {.dynamic = true, .initial_scale = 256, .hysteresis = 1};
      // A clip between the norms: some steps are clipped, some are not.
      std::vector<double> norms;
      for (const double norm : TrainGpt(run).norms) {
        if (std::isfinite(norm)) norms.push_back(norm);
      }
      ASSERT_EQ(norms.size(), 6u);
      std::sort(norms.begin(), norms.end());
      for (const double clip : {0.0, norms[2], 1e9}) {
        run.clip = clip;
        run.offload = OffloadDevice::kNone;
        const TrainedLosses none = TrainGpt(run);
        ASSERT_TRUE(none.status.ok()) << none.status;
        run.offload = OffloadDevice::kNvme;
        run.host_memory_budget_bytes = 1;
        const int64_t least = TrainGpt(run).least_host_memory_bytes;
        run.update_order = tiering::UpdateOrder::kInBackward;
        for (const int64_t extra : {int64_t{0}, int64_t{1} << 20, int64_t{64} << 20}) {
          for (const bool evaluates : {false, true}) {
            if (tests::Soak() == 1 && evaluates != (extra == 1 << 20)) continue;  // `make soak` has both
            run.host_memory_budget_bytes = least + extra;
            run.tile_bytes = extra == 0 ? 128 << 10 : 0;
            run.evaluate_every = evaluates ? 3 : 0;
            run.announce_always = evaluates;
            const TrainedLosses nvme = TrainGpt(run);
            ASSERT_TRUE(nvme.status.ok()) << nvme.status;
            EXPECT_EQ(nvme.norms.size(), none.norms.size());
            for (size_t i = 0; i < none.losses.size(); ++i) {
              if (i + 1 == 4) continue;  // not a number, which equals nothing
              EXPECT_EQ(nvme.losses[i], none.losses[i]) << "step " << i + 1 << ", clip " << clip;
              EXPECT_EQ(nvme.norms[i], none.norms[i]) << "step " << i + 1;
              EXPECT_EQ(nvme.loss_scales[i], dtype != kernels::DType::kFp16 ? 1
                                             : i < 4                        ? 256
                                                                            : 128)
                  << "step " << i + 1;
            }
            EXPECT_EQ(nvme.speculative_share, 1.0);
            EXPECT_EQ(nvme.skipped, (std::vector<int64_t>{4}));
            EXPECT_EQ(nvme.committed, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7}));
            // The skipped step is undone in any case.
            if (clip == 0 || clip == 1e9) {
              EXPECT_EQ(nvme.replayed, (std::vector<int64_t>{4}));
            }
            if (clip == norms[2]) {
              EXPECT_GE(nvme.replayed.size(), 2u);  // the skipped one and at least one that was clipped
              EXPECT_LT(nvme.replayed.size(), 7u);
            }
            EXPECT_LE(nvme.peak_managed_bytes, run.host_memory_budget_bytes);
          }
        }
        run.update_order = tiering::UpdateOrder::kAuto;
        run.host_memory_budget_bytes = 0;
        run.evaluate_every = 0;
        run.announce_always = false;
      }
    }
  }
}

// Weights that stay in memory are written while the backward of the next step computes, also where that step
// has been skipped, is abandoned, or where one version is written over the other.
TEST(Engine, WritesThatWaitForBackwardAreThoseOfTheirStep) {
  RunOptions run;
  run.steps = 7;
  run.poison_step = 4;
  run.clip = 1e-3;
  run.hashes_state = true;
  const TrainedLosses none = TrainGpt(run);
  ASSERT_TRUE(none.status.ok()) << none.status;
  run.offload = OffloadDevice::kNvme;
  run.update_order = tiering::UpdateOrder::kInNextForward;
  for (const int versions : {2, 1}) {
    for (const double state_stays : {0.0, 0.5}) {
      for (const bool evaluates : {false, true}) {
        SCOPED_TRACE(testing::Message() << versions << " versions, of the state " << state_stays
                                        << (evaluates ? ", evaluating" : ""));
        run.evaluate_every = evaluates ? 3 : 0;
        run.announce_always = evaluates;
        run.tile_bytes = 128 << 10;
        int64_t in_parts = 0, whole = 0;
        run.adjust = [&](EngineOptions& options) {
          options.storage.versions = versions;
          options.storage.durability = versions == 1 ? Durability::kCheckpoint : Durability::kStep;
          options.memory.bounds.placement = tiering::Placement::kCuda;
          options.memory.bounds.state_fraction = state_stays;
          options.hooks.observer = [&](tiering::OpId, const tiering::Op& op, double, double) {
            in_parts += op.kind == tiering::OpKind::kWriteWeights ? 1 : 0;
            whole += op.kind == tiering::OpKind::kWriteTile ? 1 : 0;
          };
        };
        run.host_memory_budget_bytes = 1;
        run.host_memory_budget_bytes =
            TrainGpt(run).least_host_memory_bytes + (state_stays > 0 ? 1 << 20 : 0);
        const TrainedLosses nvme = TrainGpt(run);
        ASSERT_TRUE(nvme.status.ok()) << nvme.status;
        for (size_t i = 0; i < none.losses.size(); ++i) {
          if (i + 1 == 4) continue;  // not a number, which equals nothing
          EXPECT_EQ(nvme.losses[i], none.losses[i]) << "step " << i + 1;
        }
        EXPECT_EQ(nvme.state, none.state);
        EXPECT_EQ(nvme.skipped, (std::vector<int64_t>{4}));
        EXPECT_GT(state_stays > 0 ? in_parts + whole : in_parts, 0);
      }
    }
  }
}

// What forward has of an update that is made again in backward is what backward makes, also where the step
// before has been skipped or is abandoned.
TEST(Engine, APreviewedUpdateIsTheUpdate) {
  for (const int micro_batches : {1, 2}) {
    RunOptions run;
    run.steps = 7;
    run.poison_step = 4;
    run.clip = 1e-3;
    run.micro_batches = micro_batches;
    run.hashes_state = true;
    const TrainedLosses none = TrainGpt(run);
    ASSERT_TRUE(none.status.ok()) << none.status;
    run.offload = OffloadDevice::kNvme;
    run.tile_bytes = 128 << 10;
    for (const tiering::Placement placement : {tiering::Placement::kCpu, tiering::Placement::kCuda}) {
      for (const double share : {0.5, 1.0}) {
        for (const bool evaluates : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << micro_batches << " micro-batches, placement " << tiering::PlacementName(placement)
                       << ", " << share << (evaluates ? ", evaluating" : ""));
          run.evaluate_every = evaluates ? 3 : 0;
          run.announce_always = evaluates;
          int64_t previews = 0;
          run.adjust = [&](EngineOptions& options) {
            options.memory.bounds.placement = placement;
            options.memory.bounds.previewed_share = share;
            options.optimizer.prefer = tiering::Prefer::kTime;
            options.hooks.observer = [&](tiering::OpId, const tiering::Op& op, double, double) {
              previews += op.preview && op.kind == tiering::OpKind::kUpdate ? 1 : 0;
            };
          };
          run.host_memory_budget_bytes = 1;
          run.host_memory_budget_bytes = TrainGpt(run).least_host_memory_bytes;
          const TrainedLosses nvme = TrainGpt(run);
          ASSERT_TRUE(nvme.status.ok()) << nvme.status;
          for (size_t i = 0; i < none.losses.size(); ++i) {
            if (i + 1 == 4) continue;  // not a number, which equals nothing
            EXPECT_EQ(nvme.losses[i], none.losses[i]) << "step " << i + 1;
          }
          EXPECT_EQ(nvme.state, none.state);
          EXPECT_EQ(nvme.skipped, (std::vector<int64_t>{4}));
          EXPECT_EQ(nvme.committed, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7}));
          EXPECT_GT(previews, 0);
          EXPECT_LE(nvme.peak_managed_bytes, run.host_memory_budget_bytes);
        }
      }
    }
  }
}

// The plan offers updates in backward; the steps' own clipping says when they are made there: not in a new
// run, after enough clean steps, no more once steps are clipped, and again when those are forgotten.
TEST(Engine, UpdatesMoveIntoBackwardAndOutOfItAsStepsAreClipped) {
  constexpr int kSteps = 60;
  auto is_large = [](int64_t step) { return step > 24 && step <= 32; };
  RunOptions run;
  run.offload = OffloadDevice::kNvme;
  run.clip = 1e3;
  auto model = [&run] {
    Model large = models::MakeGpt(run.model);
    // The loss of a batch whose first target is repeated is large, and so is its gradient.
    large.stages.back().forward = [loss = large.stages.back().forward](torch::nn::Module& module,
                                                                       const torch::Tensor& x,
                                                                       const TensorBatch& batch) {
      const bool marked = batch.targets[0][0].item<int64_t>() == batch.targets[0][1].item<int64_t>();
      return loss(module, x, batch) * (marked ? 1e5 : 1.0);
    };
    return large;
  };
  // Updates in backward until at most 2 of the last 16 steps are replayed. Where a plan has another opinion
  // nothing is trained.
  auto offers = [](const tiering::Plan& plan) {
    return plan.speculates && plan.worthwhile_replay_rate > 0.01 && plan.worthwhile_replay_rate < 1.0 / 6;
  };
  auto train = [&](EngineOptions options, std::vector<StepResult>* steps) -> absl::Status {
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model(), std::move(options));
    if (!engine.ok()) return engine.status();
    if (!run.state_dir.empty() && !offers((*engine)->plan().plan)) return absl::OkStatus();
    for (int64_t step = 1; step <= kSteps; ++step) {
      TensorBatch batch = testing_support::MakeBatch(run, step, 0);
      if (is_large(step)) batch.targets[0][0] = batch.targets[0][1];
      absl::StatusOr<StepResult> result = (*engine)->Step({batch}, Next::kTrain);
      if (!result.ok()) return result.status();
      steps->push_back(*result);
    }
    return (*engine)->Flush();
  };
  run.state_dir = testing_support::ScratchDirectory();
  EngineOptions options = testing_support::OptionsOf(run);
  options.storage.overwrite = true;
  std::vector<StepResult> drive, memory;
  // A drive that keeps this machine's compute waiting a little: updates in backward are worth something.
  // Every plan measures compute anew, so a slower drive may do where a faster one did and then did not.
  for (int attempt = 0; attempt < 100 && drive.empty(); ++attempt) {
    const double bytes_per_s = 2e9 * std::pow(0.8, attempt % 24);
    options.hooks.machine = [bytes_per_s](int64_t, const std::function<void()>&) {
      tiering::MachineModel machine;
      machine.read_bytes_per_s = machine.write_bytes_per_s = machine.mixed_bytes_per_s = bytes_per_s;
      return machine;
    };
    const absl::StatusOr<EnginePlan> plan = PlanEngine(model(), options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    if (!offers(plan->plan)) continue;
    ASSERT_EQ(train(options, &drive), absl::OkStatus());
  }
  ASSERT_EQ(drive.size(), static_cast<size_t>(kSteps))
      << "no drive for which updates in backward are worth it";
  std::filesystem::remove_all(run.state_dir);
  run.state_dir.clear();
  run.offload = OffloadDevice::kNone;
  ASSERT_EQ(train(testing_support::OptionsOf(run), &memory), absl::OkStatus());
  int moved[3] =
      {};  // steps updated in backward before, from the first large one on, after those are forgotten
  for (size_t i = 0; i < drive.size(); ++i) {
    const StepResult& step = drive[i];
    EXPECT_EQ(step.loss, memory[i].loss) << "step " << step.step;
    EXPECT_EQ(step.grad_norm, memory[i].grad_norm) << "step " << step.step;
    EXPECT_EQ(step.grad_norm > run.clip, is_large(step.step)) << "step " << step.step;
    EXPECT_EQ(step.replayed, step.speculative_share > 0 && is_large(step.step)) << "step " << step.step;
    moved[step.step <= 24 ? 0 : step.step <= 48 ? 1 : 2] += step.speculative_share > 0 ? 1 : 0;
  }
  EXPECT_EQ(drive[0].speculative_share, 0);
  EXPECT_GT(moved[0], 4);
  EXPECT_GE(moved[1], 1);
  EXPECT_LT(moved[1], 8);
  EXPECT_GT(moved[2], 8);
}

TEST(Engine, EvaluationAndFlushInTheMiddleChangeNoBit) {
  RunOptions run;
  run.steps = 6;
  const TrainedLosses plain = TrainGpt(run);
  ASSERT_TRUE(plain.status.ok()) << plain.status;
  for (const OffloadDevice offload : {OffloadDevice::kNvme, OffloadDevice::kCpu}) {
    run.offload = offload;
    run.evaluate_every = 2;
    const TrainedLosses evaluated = TrainGpt(run);
    ASSERT_TRUE(evaluated.status.ok()) << evaluated.status;
    EXPECT_EQ(evaluated.losses, plain.losses);
    ASSERT_EQ(evaluated.evaluations.size(), 3u);
    run.announce_always = true;  // steps that are announced and then do not come next
    const TrainedLosses announced = TrainGpt(run);
    ASSERT_TRUE(announced.status.ok()) << announced.status;
    EXPECT_EQ(announced.losses, plain.losses);
    EXPECT_EQ(announced.evaluations, evaluated.evaluations);
    run.announce_always = false;
    run.evaluate_every = 0;
  }
}

TEST(Engine, InputsThatGoToTheDriveComeBackWithTheirBits) {
  RunOptions run;
  run.model = {10, 32, 4, 64, 256, 0.1};
  run.batch = 8;
  run.seq = 64;
  run.micro_batches = 2;
  run.steps = 4;
  const TrainedLosses none = TrainGpt(run);
  ASSERT_TRUE(none.status.ok()) << none.status;
  run.offload = OffloadDevice::kNvme;
  run.host_memory_budget_bytes = 1;
  run.host_memory_budget_bytes = TrainGpt(run).least_host_memory_bytes;
  for (const bool evaluates : {false, true}) {
    run.evaluate_every = evaluates ? 2 : 0;
    run.announce_always = evaluates;
    const TrainedLosses nvme = TrainGpt(run);
    ASSERT_TRUE(nvme.status.ok()) << nvme.status;
    EXPECT_EQ(nvme.losses, none.losses);
    EXPECT_GT(nvme.input_scratch_bytes, 0);
    EXPECT_LE(nvme.peak_managed_bytes, run.host_memory_budget_bytes);
  }
}

TEST(Engine, AnOrderOfLayersThatChangesBetweenStepsIsAMissAndNoError) {
  RunOptions run;
  run.batch = 4;
  run.seq = 32;
  run.steps = 8;
  const TrainedLosses fixed = TrainGpt(run);
  run.shuffles = true;
  const TrainedLosses none = TrainGpt(run);
  ASSERT_TRUE(none.status.ok()) << none.status;
  EXPECT_EQ(none.losses[0], fixed.losses[0]);
  EXPECT_NE(none.losses[1], fixed.losses[1]);
  EXPECT_LT(none.losses.back(), none.losses.front());
  run.offload = OffloadDevice::kNvme;
  for (const tiering::UpdateOrder order :
       {tiering::UpdateOrder::kInNextForward, tiering::UpdateOrder::kInBackward}) {
    for (const bool announces : {false, true}) {
      run.update_order = order;
      run.announce_always = announces;
      const TrainedLosses nvme = TrainGpt(run);
      ASSERT_TRUE(nvme.status.ok()) << nvme.status;
      EXPECT_EQ(nvme.losses, none.losses);
    }
  }
}

// What has failed stays failed: an order that nobody will go through is no success.
TEST(Engine, AnOrderForAnEngineThatIsDoneForIsRefused) {
  RunOptions run;
  EngineOptions options = testing_support::OptionsOf(run);
  options.hooks.committed = [](const StepResult&) { return absl::InternalError("nobody wants it"); };
  auto engine = CreateEngine(models::MakeGpt(run.model), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_TRUE((*engine)->SetOrder({0, 2, 1, 3, 4, 5}).ok());
  absl::Status failed = (*engine)->Step({testing_support::MakeBatch(run, 1, 0)}).status();
  if (failed.ok()) failed = (*engine)->Flush();
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ((*engine)->usable(), failed);
  EXPECT_EQ((*engine)->SetOrder({0, 1, 2, 3, 4, 5}), failed);
}

// An exception in a stage is the step's alone: another order, and the step is made as if nothing had been.
TEST(Engine, AStageThatThrowsEndsItsStepAndNoMore) {
  RunOptions run;
  Model model = models::MakeGpt(run.model);
  const StageFunction layer = model.stages[2].forward;
  bool fails = false;
  model.stages[2].forward = [&](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch& batch) {
    TORCH_CHECK(!fails, "the layer is gone");
    return layer(module, x, batch);
  };
  std::vector<double> losses[2];
  for (const bool throws : {false, true}) {
    fails = false;
    auto engine = CreateEngine(model, testing_support::OptionsOf(run));
    ASSERT_TRUE(engine.ok()) << engine.status();
    for (int64_t step = 1; step <= 4; ++step) {
      const Batch batch = testing_support::MakeBatch(run, step, 0);
      if (throws && step % 2 == 0) {
        fails = true;
        const absl::Status status = (*engine)->Step({batch}).status();
        EXPECT_NE(status.message().find("the layer is gone"), std::string::npos) << status;
        fails = false;
        ASSERT_TRUE((*engine)->usable().ok()) << (*engine)->usable();
        EXPECT_EQ((*engine)->ReadState("h.1.ln_1.weight", StateKind::kGradient).status().code(),
                  absl::StatusCode::kFailedPrecondition);
      }
      if (step == 2) {
        ASSERT_TRUE((*engine)->SetOrder({0, 2, 1, 3, 4, 5}).ok());
      }
      const absl::StatusOr<StepResult> result = (*engine)->Step({batch}, Next::kTrain);
      ASSERT_TRUE(result.ok()) << result.status();
      losses[throws ? 1 : 0].push_back(result->loss);
    }
  }
  EXPECT_EQ(losses[1], losses[0]);
}

TEST(Engine, EveryStepIsCommittedInOrderAndResumeGoesOnWithTheSameBits) {
  RunOptions run;
  run.steps = 9;
  const TrainedLosses whole = TrainGpt(run);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  EXPECT_EQ(whole.committed, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9}));
  run.state_dir = testing_support::ScratchDirectory();
  run.keep_state = true;
  run.stop_after = 4;
  const TrainedLosses first = TrainGpt(run);
  ASSERT_TRUE(first.status.ok()) << first.status;
  run.stop_after = 0;
  run.resume = true;
  for (const int64_t budget : {0, 32 << 20}) {
    if (budget != 0) run.steps = 12;
    run.host_memory_budget_bytes = budget;
    const TrainedLosses second = TrainGpt(run);
    ASSERT_TRUE(second.status.ok()) << second.status;
    EXPECT_EQ(second.resumed_from, budget == 0 ? 4 : 9);
    if (budget == 0) {
      std::vector<double> joined = first.losses;
      joined.insert(joined.end(), second.losses.begin(), second.losses.end());
      EXPECT_EQ(joined, whole.losses);
    }
  }
  // Another model, seed or type is another run.
  RunOptions other = run;
  other.seed = run.seed + 1;
  EXPECT_EQ(TrainGpt(other).status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(TrainGpt(other).status.message()), testing::HasSubstr("seed"));
  other = run;
  other.model.layers += 1;
  EXPECT_EQ(TrainGpt(other).status.code(), absl::StatusCode::kFailedPrecondition);
  other = run;
  other.dtype = kernels::DType::kFp32;
  EXPECT_EQ(TrainGpt(other).status.code(), absl::StatusCode::kFailedPrecondition);
  std::filesystem::remove_all(run.state_dir);
}

TEST(Engine, ANonFiniteGradientSkipsTheUpdateAndCommitsTheStep) {
  std::map<OffloadDevice, std::vector<double>> losses;
  for (const OffloadDevice offload : {OffloadDevice::kNone, OffloadDevice::kNvme}) {
    RunOptions run;
    run.offload = offload;
    run.steps = 5;
    run.poison_step = 2;
    const TrainedLosses trained = TrainGpt(run);
    ASSERT_TRUE(trained.status.ok()) << trained.status;
    EXPECT_EQ(trained.skipped, (std::vector<int64_t>{2}));
    EXPECT_EQ(trained.committed.size(), 5u);
    losses[offload] = {trained.losses[0], trained.losses[2], trained.losses[3], trained.losses[4]};
    for (const double loss : losses[offload]) EXPECT_TRUE(std::isfinite(loss));
  }
  EXPECT_EQ(losses[OffloadDevice::kNone], losses[OffloadDevice::kNvme]);
}

// Linear layers of 1M fp32 weights: tiles that fill any queue.
Model WideLayers() {
  Model model;
  model.identity = {{"model", "wide layers"}};
  for (const char* name : {"a", "b", "c"}) {
    const int block =
        model.AddBlock(name, "wide", [] { return std::make_shared<torch::nn::LinearImpl>(1024, 1024); });
    if (*name == 'c') {
      model.AddStage(name, block, [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
        return module.as<torch::nn::LinearImpl>()->forward(x).square().mean();
      });
    } else {
      model.AddStage(name, block, Apply<torch::nn::LinearImpl>);
    }
  }
  return model;
}

TEST(Engine, AsMuchIsInFlightAsSaturatesUnlessThatIsLimited) {
  uint64_t peak[2];
  for (const bool is_limit : {false, true}) {
    const std::string directory = testing_support::ScratchDirectory();
    EngineOptions options;
    options.storage.state_dirs = {directory};
    options.dtype = kernels::DType::kFp32;
    options.example = TensorBatch{torch::randn({2, 1024}), torch::zeros({2})};
    options.storage.io.max_read_bytes_in_flight = options.storage.io.max_write_bytes_in_flight = aio::kMiB;
    options.storage.io_depth_is_limit = is_limit;
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(WideLayers(), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    (*engine)->set_saturating_bytes_in_flight(4 * aio::kMiB);
    for (int step = 0; step < 3; ++step) {
      absl::StatusOr<StepResult> result = (*engine)->Step({options.example}, Next::kTrain);
      ASSERT_TRUE(result.ok()) << result.status();
    }
    ASSERT_TRUE((*engine)->Flush().ok());
    const aio::EngineStats stats = (*engine)->io_stats();
    EXPECT_EQ(stats.saturating_bytes_in_flight, 4 * aio::kMiB);
    ASSERT_EQ(stats.devices.size(), 1u);
    peak[is_limit ? 1 : 0] = stats.devices[0].peak_in_flight_bytes;
    std::filesystem::remove_all(directory);
  }
  EXPECT_GE(peak[0], 4 * aio::kMiB);
  // A block each way, and the two that demand reads may go beyond it.
  EXPECT_LE(peak[1], 4 * aio::kMiB);
}

TEST(TensorMemory, ALimitForAWhileGivesTheFormerOneBack) {
  InstallTensorAllocator();
  TensorMemory::SetLimit(TensorMemory::Stats().live_bytes + (4 << 20));
  const int64_t before = TensorMemory::Limit();
  {
    const TensorMemoryLimit more(before + (64 << 20));
    EXPECT_NO_THROW(torch::empty({4 << 20}, torch::kFloat32));
    const TensorMemoryLimit none(0);
    EXPECT_NO_THROW(torch::empty({32 << 20}, torch::kFloat32));
  }
  EXPECT_EQ(TensorMemory::Limit(), before);
  EXPECT_THROW(torch::empty({4 << 20}, torch::kFloat32), c10::Error);
  TensorMemory::SetLimit(0);
}

// Planning beside an engine that trains takes nothing of its budget away.
TEST(Engine, APlanBesideALivingEngineLeavesItsLimit) {
  RunOptions run;
  run.host_memory_budget_bytes = 64 << 20;
  const EngineOptions options = testing_support::OptionsOf(run);
  auto engine = CreateEngine(models::MakeGpt(run.model), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto plan = PlanEngine(models::MakeGpt(run.model), options);
  EXPECT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(TensorMemory::Limit(), 0);
  const auto result = (*engine)->Step({testing_support::MakeBatch(run, 1, 0)});
  EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_LE((*engine)->peak_managed_bytes(), run.host_memory_budget_bytes);
}

TEST(TensorMemory, CountsPoolsAndRefuses) {
  InstallTensorAllocator();
  TensorMemory::Trim();
  const TensorMemoryStats before = TensorMemory::Stats();
  {
    torch::Tensor held = torch::empty({1 << 20}, torch::kFloat32);
    EXPECT_GE(TensorMemory::Stats().live_bytes - before.live_bytes, 4 << 20);
    TensorMemory::SetLimit(TensorMemory::Stats().live_bytes + (1 << 20));
    EXPECT_THROW(torch::empty({1 << 20}, torch::kFloat32), c10::Error);
    EXPECT_NO_THROW(torch::empty({1 << 16}, torch::kFloat32));
    TensorMemory::SetLimit(0);
  }
  EXPECT_GE(TensorMemory::Stats().kept_bytes, 4 << 20);
  EXPECT_EQ(TensorMemory::Stats().live_bytes, before.live_bytes);
  TensorMemory::Trim();
  EXPECT_EQ(TensorMemory::Stats().kept_bytes, 0);
}

}  // namespace
}  // namespace penstock::zero::engine_test
