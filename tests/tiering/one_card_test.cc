// The figures of one card in virtual time: an H200 and its host, with the rates that bench/results/gpu.md has
// of them. What they say of a step is arithmetic from there on: of kernels that a model's library runs, of a
// front end and of launches they say nothing.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/tiering/plans.h"
#include "tiering/plan/plan.h"
#include "tiering/program/program.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::one_card_test {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30, kMiB = int64_t{1} << 20;

// bench/results/gpu.md, 2026-11-26 and 27. Copies of pinned memory: 49.8 to 50.7 GB/s in each direction.
constexpr double kCopyBytesPerS = 50e9;
// A copy on the device: 3254 GB/s are 0.777 of it. AdamW with split masters there: 2660 GB/s, of 26 bytes a
// parameter.
constexpr double kDeviceCopyBytesPerS = 3254e9 / 0.777;
constexpr double kDeviceUpdateBytesPerS = 2660e9;
// gpt-1b on the drive: 4.94 s a step, 1.124 of what writing its 12 bytes a parameter takes.
constexpr double kWriteBytesPerS = 12 * 0.925e9 / (4.94 / 1.124);
// Plain PyTorch from Python, 0.93 G parameters, 4 x 1,024 tokens, recomputing: 0.136 s, of which its AdamW
// moves 14 bytes a parameter (weight, gradient and two moments in bf16, of which three are written).
constexpr double kPlainSeconds = 0.136;
// What the processor updates in a second: 14 workers, 26 bytes a parameter at the 105 GB/s of the host's
// memory. ThePredictionsAreWhatThatCardTook holds it to a measured step.
constexpr int kWorkers = 14;
constexpr double kHostBytesPerS = 105e9;

constexpr double kUpdateBytes = 26;  // of fp32 masters in two halves, fp32 moments and a bf16 gradient

MachineModel H200() {
  MachineModel machine;
  machine.h2d_bytes_per_s = machine.d2h_bytes_per_s = kCopyBytesPerS;
  machine.device_update_parameters_per_s = kDeviceUpdateBytesPerS / kUpdateBytes;
  machine.update_workers = kWorkers;
  machine.update_parameters_per_s = kHostBytesPerS / kUpdateBytes / kWorkers;
  machine.read_bytes_per_s = machine.write_bytes_per_s = kWriteBytesPerS;
  return machine;
}

// Of forward, recomputation and backward of 4 x 1,024 tokens of the Llama below, as plain PyTorch computes
// them.
double ComputeSeconds(const ModelGraph& graph) {
  return kPlainSeconds - 14 * static_cast<double>(graph.elements()) / kDeviceCopyBytesPerS;
}

// Seconds are spread over what multiplies, in the proportion of its parameters: forward is one part of four.
void Spread(double seconds, ModelGraph* graph) {
  int64_t elements = 0;
  for (const StageShape& stage : graph->stages)
    elements += stage.name == "embedding" ? 0 : graph->blocks[stage.block].elements;
  for (StageShape& stage : graph->stages) {
    const double of_it = stage.name == "embedding"
                             ? 0
                             : seconds * static_cast<double>(graph->blocks[stage.block].elements) /
                                   static_cast<double>(elements);
    stage.forward_seconds = of_it / 4;
    stage.backward_seconds = of_it * 3 / 4;
  }
}

void Add(const std::string& name, int64_t elements, int64_t input_bytes, int64_t peak_bytes,
         ModelGraph* graph) {
  const BlockIndex block(static_cast<int>(graph->blocks.size()));
  graph->blocks.push_back({.name = name, .elements = AlignUp(elements, kElementAlignment)});
  graph->stages.push_back({.name = name,
                           .block = block,
                           .input_bytes = input_bytes,
                           .forward_peak_bytes = peak_bytes / 2,
                           .backward_peak_bytes = peak_bytes,
                           .input_scratch_bytes = input_bytes});
}

// bench/gpu/peers' Llama of 0.93 G parameters: 16 layers of width 2,048, a vocabulary of 32,000. What it
// takes of the device besides weights at 4 x 1,024 tokens: the run with two buffers for a block of 131 MB had
// a peak of 2.05 GiB, of which 18 inputs of 16 MiB are saved and the rest is a block's own.
ModelGraph Llama(int64_t sequences) {
  constexpr int64_t kLayer = 4 * 2048 * 2048 + 3 * 2048 * 5376 + 2 * 2048, kEnd = 32000 * 2048;
  const int64_t input = sequences * 1024 * 2048 * 2;
  const auto measured = static_cast<int64_t>(2.05 * static_cast<double>(kGiB)) - 2 * kEnd * 2;
  const int64_t peak = (measured - 18 * 16 * kMiB) * sequences / 4;
  ModelGraph graph;
  Add("embedding", kEnd, 0, input, &graph);
  for (int layer = 0; layer < 16; ++layer) Add("layer", kLayer, input, peak / 2, &graph);
  Add("head", kEnd + 2048, input, peak, &graph);
  Spread(ComputeSeconds(graph) * static_cast<double>(sequences) / 4, &graph);
  return graph;
}

// gpt-1b: 24 layers of width 1,792 and a vocabulary of 256 bytes, 0.93 G parameters.
ModelGraph Gpt1b(double compute_seconds) {
  constexpr int64_t kWidth = 1792;
  const int64_t input = 4 * 1024 * kWidth * 2;
  ModelGraph graph;
  Add("embedding", (256 + 1024) * kWidth, 0, input, &graph);
  for (int layer = 0; layer < 24; ++layer)
    Add("layer", 12 * kWidth * kWidth + 13 * kWidth, input, 512 * kMiB, &graph);
  Add("head", 256 * kWidth, input, 64 * kMiB, &graph);
  Spread(compute_seconds, &graph);
  return graph;
}

class OneCard : public testing::Test {
 protected:
  OneCard() {
    options_.on_nvme = false;
    options_.device.has_own_memory = true;
    options_.machine = H200();
  }

  Prediction Predicted(const ModelGraph& graph, int64_t device_memory) {
    options_.device.budget_bytes = device_memory;
    const absl::StatusOr<Plan> plan = MakePlan(graph, options_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    if (!plan.ok()) return {};
    EXPECT_LE(plan->device.bytes(), device_memory);
    plan_ = *plan;
    const absl::StatusOr<Prediction> prediction = Predict(graph, *plan, options_.machine);
    EXPECT_TRUE(prediction.ok()) << prediction.status();
    return prediction.ok() ? *prediction : Prediction();
  }
  void Record(const std::string& what, double seconds) { RecordProperty(what, std::to_string(seconds)); }

  PlanOptions options_;
  Plan plan_;
};

// 2 GiB of the device, with what a step's tensors take, and all state in host memory: at most 0.26 s. It was
// 0.779. Bound by the processor: 26 bytes of 0.93 G at 105 GB/s, 0.230 s. Squares are the device's; while the
// processor made them, 1.86 GB took it 0.017 s more.
TEST_F(OneCard, WithStateInHostMemoryTheProcessorsUpdatesAreTheBound) {
  const ModelGraph graph = Llama(4);
  options_.bounds.processor_share = 1;
  const Prediction host = Predicted(graph, 2 * kGiB);
  const double updates = kUpdateBytes * static_cast<double>(graph.elements()) / kHostBytesPerS;
  EXPECT_EQ(plan_.on_device_share(), 0);
  EXPECT_EQ(host.bound_by, "optimizer");
  EXPECT_NEAR(host.lower_bound_seconds, updates, 0.001);
  EXPECT_LE(host.step_seconds, 0.26);
  EXPECT_LE(host.step_seconds, 1.06 * updates);
  EXPECT_LE(host.clipped_step_seconds, 0.36) << "while every step is clipped";
  Record("step", host.step_seconds);
  Record("clipped", host.clipped_step_seconds);
  Record("bound", host.lower_bound_seconds);
  // As it was while every update waited for the norm, and forward for the updates.
  options_.update_order = UpdateOrder::kInNextForward;
  const double waits = Predicted(graph, 2 * kGiB).step_seconds;
  EXPECT_GT(waits, 0.31);
  EXPECT_LE(waits, 1.07 * (ComputeSeconds(graph) * 3 / 4 + updates));
}

// What is free of 139 GiB, and already 16 GiB, hold all state: 1.2 of plain PyTorch's step, all of it compute
// and the device's update of 26 bytes a parameter, 9 ms, beside plain PyTorch's of 14.
TEST_F(OneCard, WithWhatIsFreeAStepIsPlainPyTorchsAndAnUpdateOfMasters) {
  const ModelGraph graph = Llama(4);
  const double update = kUpdateBytes * static_cast<double>(graph.elements()) / kDeviceUpdateBytesPerS;
  // Left to itself the planner hands the processor half of the updates, beside backward: shorter by 3% where
  // nothing is clipped, and longer by half where every step is.
  const Prediction chosen = Predicted(graph, 120 * kGiB);
  EXPECT_LE(chosen.step_seconds, ComputeSeconds(graph) + update);
  EXPECT_LE(chosen.clipped_step_seconds, ComputeSeconds(graph) * 3 / 4 + 0.5 * 0.23 + 0.01);
  Record("chosen", chosen.step_seconds);
  Record("chosen_clipped", chosen.clipped_step_seconds);
  options_.bounds.processor_share = 0;  // offload_optimizer.ratio
  for (const int64_t memory : {16 * kGiB, 120 * kGiB}) {
    const Prediction all = Predicted(graph, memory);
    EXPECT_EQ(plan_.on_device_share(), 1);
    EXPECT_LE(all.step_seconds, 1.2 * kPlainSeconds);
    EXPECT_LE(all.step_seconds, 1.01 * (ComputeSeconds(graph) + update));
    EXPECT_LE(all.clipped_step_seconds, 1.2 * kPlainSeconds);
    Record("step" + std::to_string(memory / kGiB), all.step_seconds);
  }
  const double part = Predicted(graph, 8 * kGiB).step_seconds;
  EXPECT_GT(plan_.on_device_share(), 0.3);
  EXPECT_LE(part, 1.35 * kPlainSeconds);
  Record("step8", part);
}

// 16 x 1,024 tokens: four times the compute over the same updates. With all state in host memory at least
// 0.95 of plain PyTorch's tokens a second, whether steps are clipped or not.
TEST_F(OneCard, OverFourTimesTheTokensStateInHostMemoryCostsAsGoodAsNothing) {
  const ModelGraph graph = Llama(16);
  const double plain = 4 * ComputeSeconds(graph) + (kPlainSeconds - ComputeSeconds(graph));
  options_.bounds.processor_share = 1;
  const Prediction host = Predicted(graph, 8 * kGiB);
  EXPECT_EQ(plan_.on_device_share(), 0);
  EXPECT_EQ(host.bound_by, "compute");
  EXPECT_GE(plain / host.step_seconds, 0.95);
  Record("tokens", plain / host.step_seconds);
  Record("clipped", plain / host.clipped_step_seconds);
}

// On the drive a step takes at most 1.1 of what its bytes take there, at the rate of that machine's virtual
// disk and at those of faster ones, until compute is the bound.
TEST_F(OneCard, OnTheDriveAStepIsBoundByItsBytesThere) {
  const ModelGraph graph = Llama(4);
  options_.on_nvme = true;
  options_.host_memory_budget_bytes = 8 * kGiB;
  for (const double rate : {kWriteBytesPerS, 2 * kWriteBytesPerS, 4 * kWriteBytesPerS}) {
    SCOPED_TRACE(rate);
    options_.machine.read_bytes_per_s = options_.machine.write_bytes_per_s = rate;
    const Prediction drive = Predicted(graph, 2 * kGiB);
    EXPECT_TRUE(drive.bound_by == "write" || drive.bound_by == "read") << drive.bound_by;
    EXPECT_LE(drive.step_seconds, 1.1 * drive.drive_seconds);
    Record("of_bound_at_" + std::to_string(rate / 1e9), drive.step_seconds / drive.drive_seconds);
  }
}

// gpt-1b with everything on the device at 40% of 989 TFLOP/s, of 6 operations a parameter and token: 0.057 s.
// The engine's part of it is the update, 9 ms, and nothing else: what is left for forward, recomputation and
// backward, 0.048 s, is theirs to the last 2%. That they take it, 8 operations a parameter and token at 64%
// of the peak, is the kernels', and only a card can show it.
TEST_F(OneCard, ResidentStateLeavesAllButItsUpdateToCompute) {
  const auto elements = static_cast<double>(Gpt1b(1).elements());
  const double at_40_percent = 6 * elements * 4096 / (0.4 * 989e12);
  const double update = kUpdateBytes * elements / kDeviceUpdateBytesPerS;
  const double left = at_40_percent - update;
  EXPECT_NEAR(left, 0.048, 0.001);
  EXPECT_LE(8 * elements * 4096 / left, 0.65 * 989e12);
  const Prediction all = Predicted(Gpt1b(left / 1.02), 16 * kGiB);
  EXPECT_EQ(plan_.on_device_share(), 1);
  EXPECT_LE(all.step_seconds, at_40_percent);
  Record("of_peak", 6 * elements * 4096 / all.step_seconds / 989e12);
}

// What the engine's C++ runs took on that card, within 10%: with everything there, 0.16 to 0.18 s; with 8 GiB
// of it and updates in the next forward, as they were then, 0.22 to 0.25 s; on the drive 4.94 s.
TEST_F(OneCard, ThePredictionsAreWhatThatCardTook) {
  const double update = kUpdateBytes * static_cast<double>(Gpt1b(1).elements()) / kDeviceUpdateBytesPerS;
  const ModelGraph graph = Gpt1b(0.171 - update);
  options_.clips = false;
  options_.update_order = UpdateOrder::kInNextForward;
  const double resident = Predicted(graph, 64 * kGiB).step_seconds;
  EXPECT_NEAR(resident, 0.171, 0.017);
  const double part = Predicted(graph, 8 * kGiB).step_seconds;
  EXPECT_GT(plan_.on_device_share(), 0.4);
  EXPECT_LT(plan_.on_device_share(), 0.7);
  EXPECT_NEAR(part, 0.235, 0.0235);
  options_.on_nvme = true;
  options_.host_memory_budget_bytes = 8 * kGiB;
  const Prediction drive = Predicted(graph, 12 * kGiB);
  EXPECT_EQ(drive.bound_by, "write");
  EXPECT_NEAR(drive.step_seconds, 4.94, 0.494);
  Record("resident", resident);
  Record("part", part);
  Record("drive", drive.step_seconds);
}

}  // namespace
}  // namespace penstock::tiering::one_card_test
