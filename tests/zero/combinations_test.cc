// Modes drawn at random, many at once, held against the same training with everything in memory: whatever the
// plan does with them, losses, norms and the state at the end have the same bits, and budgets hold.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "models/families/stages.h"
#include "tests/soak.h"
#include "tests/zero/freeze.h"
#include "tests/zero/training.h"
#include "zero/compute/test_device.h"
#include "zero/engine/engine.h"

namespace penstock::zero::combinations_test {
namespace {

using testing_support::Freeze;
using testing_support::MakeTestDevice;
using testing_support::RunOptions;
using testing_support::ScratchTest;
using testing_support::TrainedLosses;
using testing_support::TrainGpt;

constexpr int64_t kMiB = int64_t{1} << 20;

// What a model has beyond a plain GPT.
struct Oddities {
  int frozen_layer = -1, half_frozen_layer = -1;
  bool frozen_embedding = false;
  bool repeats = false;     // the first layer serves twice, first and somewhere in the middle
  bool transposed = false;  // the layers give tensors that are not contiguous
  std::string Describe() const {
    return absl::StrCat("frozen layer ", frozen_layer, ", half of ", half_frozen_layer,
                        frozen_embedding ? ", frozen embedding" : "", repeats ? ", repeats" : "",
                        transposed ? ", transposed" : "");
  }
};

Model MakeOdd(const models::GptConfig& config, const Oddities& odd) {
  Model model = models::MakeGpt(config);
  auto block = [&model](int layer) { return &model.blocks[static_cast<size_t>(layer) + 1]; };
  if (odd.frozen_layer >= 0) Freeze(block(odd.frozen_layer), 1);
  if (odd.half_frozen_layer >= 0) Freeze(block(odd.half_frozen_layer), 2);
  if (odd.frozen_embedding) Freeze(&model.blocks[0], 1);
  if (odd.transposed) {
    for (size_t s = 1; s + 1 < model.stages.size(); ++s) {
      model.stages[s].forward = [forward = model.stages[s].forward](torch::nn::Module& module,
                                                                    const torch::Tensor& x,
                                                                    const TensorBatch& batch) {
        return forward(module, x, batch).transpose(0, 1).contiguous().transpose(0, 1);
      };
    }
  }
  if (odd.repeats) {
    StageSpec again = model.stages[1];
    again.name += " again";
    model.stages.insert(model.stages.begin() + 3, std::move(again));
  }
  return model;
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int64_t Below(int64_t bound) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(bound)); }
  bool OneIn(int64_t n) { return Below(n) == 0; }
  template <typename T>
  T Of(std::initializer_list<T> values) {
    return values.begin()[Below(static_cast<int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 random_;
};

std::vector<uint64_t> Bits(const std::vector<double>& values) {
  std::vector<uint64_t> bits;
  for (const double value : values) bits.push_back(std::bit_cast<uint64_t>(value));
  return bits;
}

// What is trained: the bits depend on all of it.
RunOptions DrawTraining(Draw& draw, std::string* said) {
  RunOptions run;
  const bool long_inputs = draw.OneIn(4);  // which a small budget has to put somewhere else
  run.model = {long_inputs ? 8 : 3, 32, 2, 64, 256, draw.Of({0.0, 0.1})};
  run.batch = long_inputs ? 8 : 2;
  run.seq = long_inputs ? 64 : 16;
  run.seed = static_cast<uint64_t>(draw.Below(1000));
  run.steps = 6;
  run.dtype =
      draw.Of({kernels::DType::kBf16, kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16});
  run.optimizer_states =
      draw.Of({kernels::StateType::kFp32, kernels::StateType::kBf16, kernels::StateType::k8Bit});
  const bool lamb = draw.OneIn(5);
  if (lamb && run.optimizer_states == kernels::StateType::k8Bit)
    run.optimizer_states = kernels::StateType::kBf16;
  run.optimizer = draw.Of<OptimizerOptions>(
      {kernels::AdamOptions{.lr = 3e-3, .weight_decay = 0.01}, kernels::AdamOptions{.lr = 3e-3},
       kernels::LionOptions{.lr = 1e-3}, kernels::SgdOptions{.lr = 1e-2},
       kernels::SgdOptions{.lr = 1e-2, .momentum = 0.9}, kernels::AdagradOptions{.lr = 1e-2}});
  if (lamb)
    run.optimizer = kernels::LambOptions{.adam = {.lr = 1e-2, .weight_decay = 0.01}, .corrects_rate = true};
  run.loss_scale = {.dynamic = true, .initial_scale = 256, .hysteresis = 1};
  run.micro_batches = draw.Of({1, 1, 2, 3});
  run.poison_step = draw.Of({0, 0, 3, 5});
  run.shuffles = draw.OneIn(3);
  run.evaluate_every = draw.Of({0, 1, 2, 6});
  Oddities odd;
  if (draw.OneIn(4)) odd.frozen_layer = static_cast<int>(draw.Below(3));
  if (draw.OneIn(3)) odd.half_frozen_layer = static_cast<int>(draw.Below(3));
  odd.frozen_embedding = draw.OneIn(6);
  odd.repeats = draw.OneIn(3);
  odd.transposed = draw.OneIn(3);
  run.make_model = [config = run.model, odd] { return MakeOdd(config, odd); };
  run.hashes_state = true;
  // A clip between the norms, above or below all of them, or none.
  run.clip = 0;
  const TrainedLosses free = TrainGpt(run);
  EXPECT_TRUE(free.status.ok()) << free.status << ": " << odd.Describe();
  std::vector<double> norms;
  for (const double norm : free.norms) {
    if (std::isfinite(norm)) norms.push_back(norm);
  }
  std::sort(norms.begin(), norms.end());
  if (!norms.empty()) run.clip = draw.Of({0.0, norms.front() / 2, norms[norms.size() / 2], norms.back() * 2});
  *said = absl::StrCat(std::string(DTypeName(run.dtype)), ", states ", static_cast<int>(run.optimizer_states),
                       ", optimizer ", run.optimizer->index(), ", ", run.micro_batches,
                       " micro-batches, poison ", run.poison_step, run.shuffles ? ", shuffles" : "",
                       ", evaluates every ", run.evaluate_every, ", clip ", run.clip, ", dropout ",
                       run.model.dropout, ", ", odd.Describe());
  return run;
}

// How it is trained: the bits depend on none of it.
RunOptions DrawMode(Draw& draw, const RunOptions& training, const std::string& scratch, std::string* said) {
  RunOptions run = training;
  run.offload = draw.Of({OffloadDevice::kNone, OffloadDevice::kCpu, OffloadDevice::kNvme,
                         OffloadDevice::kNvme, OffloadDevice::kNvme});
  const bool device = run.offload == OffloadDevice::kNone || draw.OneIn(3);
  const bool drive = run.offload == OffloadDevice::kNvme;
  run.update_order = draw.Of(
      {tiering::UpdateOrder::kAuto, tiering::UpdateOrder::kInNextForward, tiering::UpdateOrder::kInBackward});
  if (run.optimizer.has_value() && NeedsTensorNorms(*run.optimizer) &&
      run.update_order == tiering::UpdateOrder::kInBackward)
    run.update_order = tiering::UpdateOrder::kAuto;  // which is refused
  run.tile_bytes = draw.Of({int64_t{0}, int64_t{64} << 10, int64_t{256} << 10});
  run.update_workers = static_cast<int>(1 + draw.Below(3));
  run.announce_always = draw.OneIn(2);
  const bool gds = device && drive && draw.OneIn(2);
  const bool by_checkpoints = drive && draw.OneIn(4);
  const int versions = by_checkpoints && draw.OneIn(2) ? 1 : 0;
  const auto share = device ? draw.Of<std::optional<double>>({{}, 0.0, 0.5, 1.0}) : std::nullopt;
  const auto placement =
      draw.Of({tiering::Placement::kAuto, tiering::Placement::kAuto, tiering::Placement::kCpu});
  const auto prefer = draw.Of({tiering::Prefer::kWear, tiering::Prefer::kTime});
  const auto previewed = draw.Of<std::optional<double>>({{}, 0.5, 1.0});
  if (drive && draw.OneIn(3)) run.checkpoints = {.parent = scratch + "/kept", .every = 2, .keep = 1};
  run.adjust = [=](EngineOptions& options) {
    options.storage.gds = gds;
    options.storage.versions = versions;
    if (by_checkpoints) options.storage.durability = Durability::kCheckpoint;
    options.memory.bounds.processor_share = share;
    options.memory.bounds.placement = placement;
    options.memory.bounds.previewed_share = previewed;
    options.optimizer.prefer = prefer;
  };
  if (drive) run.state_dir = scratch + "/state";
  run.keep_state = true;
  if (device) {
    run.device = MakeTestDevice({.gds = gds});
    run.device_memory_budget_bytes = 1;
    run.device_memory_budget_bytes =
        TrainGpt(run).least_host_memory_bytes + draw.Of({64 << 10, 64 << 10, 1 << 20, 64 << 20});
    run.device = MakeTestDevice({.latency_seconds = draw.Of({0.0, 1e-4}), .gds = gds});
  }
  if (drive) {
    run.host_memory_budget_bytes = 1;
    run.host_memory_budget_bytes =
        TrainGpt(run).least_host_memory_bytes + draw.Of({64 << 10, 64 << 10, 500 << 10, 2 << 20, 64 << 20});
  }
  absl::StrAppend(said, "; offload ", static_cast<int>(run.offload), ", device memory ",
                  run.device_memory_budget_bytes, ", host memory ", run.host_memory_budget_bytes, ", order ",
                  static_cast<int>(run.update_order), ", tiles ", run.tile_bytes, ", ", run.update_workers,
                  " workers", gds ? ", gds" : "", by_checkpoints ? ", durable by checkpoints" : "",
                  ", versions ", versions, ", share ", share.value_or(-1), ", placement ",
                  static_cast<int>(placement), ", prefers ", static_cast<int>(prefer), ", previewed ",
                  previewed.value_or(-1), ", checkpoints every ", run.checkpoints.every);
  return run;
}

class CombinationsTest : public ScratchTest {};

TEST_F(CombinationsTest, EveryModeGivesTheBitsOfMemory) {
  const int trainings = 24 * tests::Soak();
  const char* again = std::getenv("PENSTOCK_COMBINATION");  // one of them, by the number that a failure names
  int resumed = 0, speculative = 0, spilled = 0;
  for (int t = 0; t < trainings && !HasFailure(); ++t) {
    if (again != nullptr && t != std::atoi(again)) continue;
    Draw draw(static_cast<uint64_t>(t));
    std::string said;
    const RunOptions training = DrawTraining(draw, &said);
    const TrainedLosses memory = TrainGpt(training);
    ASSERT_TRUE(memory.status.ok()) << memory.status << "\n" << said;
    for (int mode = 0; mode < 2; ++mode) {
      std::string how = absl::StrCat("PENSTOCK_COMBINATION=", t, ": ", said);
      RunOptions run = DrawMode(draw, training, scratch_, &how);
      SCOPED_TRACE(how);
      TrainedLosses whole;
      bool last_speculates = false;
      // On a drive, in two parts, of which the second may have another budget.
      int64_t part =
          run.offload == OffloadDevice::kNvme && draw.OneIn(2) ? 1 + draw.Below(run.steps - 1) : run.steps;
      for (run.stop_after = part;;) {
        const TrainedLosses trained = TrainGpt(run);
        ASSERT_TRUE(trained.status.ok()) << trained.status;
        auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
        append(whole.losses, trained.losses);
        append(whole.norms, trained.norms);
        append(whole.evaluations, trained.evaluations);
        append(whole.loss_scales, trained.loss_scales);
        append(whole.skipped, trained.skipped);
        append(whole.committed, trained.committed);
        whole.state = trained.state;
        for (const TrainedLosses::Checkpoint& checkpoint : trained.checkpoints)
          EXPECT_TRUE(checkpoint.status.ok()) << checkpoint.status;
        if (run.host_memory_budget_bytes > 0) {
          EXPECT_LE(trained.peak_managed_bytes, run.host_memory_budget_bytes);
        }
        if (run.device_memory_budget_bytes > 0) {
          EXPECT_LE(trained.peak_device_bytes, run.device_memory_budget_bytes);
        }
        last_speculates = trained.speculative_share > 0;
        speculative += last_speculates ? 1 : 0;
        spilled += trained.input_scratch_bytes > 0 ? 1 : 0;
        if (run.stop_after == run.steps) break;
        ++resumed;
        run.resume = true;
        run.stop_after = run.steps;
        if (draw.OneIn(2)) run.host_memory_budget_bytes += draw.Of({1, 8}) * kMiB;
      }
      EXPECT_EQ(Bits(whole.losses), Bits(memory.losses));
      EXPECT_EQ(Bits(whole.norms), Bits(memory.norms));
      EXPECT_EQ(Bits(whole.evaluations), Bits(memory.evaluations));
      EXPECT_EQ(whole.loss_scales, memory.loss_scales);
      EXPECT_EQ(whole.skipped, memory.skipped);
      EXPECT_EQ(whole.committed, memory.committed);
      ASSERT_EQ(whole.state.size(), memory.state.size());
      for (size_t i = 0; i < whole.state.size(); ++i) {
        // A gradient that nothing can ask for again is kept nowhere (Engine::ReadState says so).
        const bool may_be_gone = i % 4 == 3 && run.clip == 0 && last_speculates;
        if (whole.state[i] == 0 && may_be_gone) continue;
        EXPECT_EQ(whole.state[i], memory.state[i]) << "parameter " << i / 4 << ", kind " << i % 4;
      }
      for (const auto& entry : std::filesystem::directory_iterator(scratch_))
        std::filesystem::remove_all(entry);
    }
  }
  if (again != nullptr) return;
  // What is drawn does happen.
  EXPECT_GT(resumed, trainings / 12);
  EXPECT_GT(speculative, trainings / 24);
  EXPECT_GT(spilled, 0);
}

}  // namespace
}  // namespace penstock::zero::combinations_test
