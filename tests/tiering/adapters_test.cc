// Adapters on a base that is eight times the memory: what a step reads, what it writes beside its commit, and
// how near it comes to its lower bound. Shapes are those of Llama 3, whose base is read where it lies.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "tests/tiering/plans.h"
#include "tiering/plan/plan.h"
#include "tiering/program/step_ops.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::adapters_test {
namespace {

constexpr int64_t kRank = 16;

struct Shape {
  const char* name;
  int layers;
  int64_t width, inner, key_width;  // of keys and values
  int64_t vocabulary;
  int tiles;  // of it, for embedding and head each, or for both together
  bool tied;
  double most_clipped;  // of the lower bound of a step
};

// A layer's matrices, and what rank-16 adapters of all of them are.
int64_t LayerElements(const Shape& of) {
  return 2 * of.width * of.width + 2 * of.width * of.key_width + 3 * of.width * of.inner + 2 * of.width;
}
int64_t AdapterElements(const Shape& of) {
  return kRank * (2 * 2 * of.width + 2 * (of.width + of.key_width) + 3 * (of.width + of.inner));
}

struct Model {
  ModelGraph graph;
  int64_t base_bytes = 0;
};

// Of `tokens`; a step computes for `seconds`.
Model ModelOf(const Shape& of, int64_t tokens, double seconds) {
  Model model;
  ModelGraph& graph = model.graph;
  graph.batch_bytes = tokens * 16;
  const int64_t input = tokens * of.width * 2;
  const auto add_block = [&](const char* name, int64_t frozen, int64_t trained) {
    BlockShape block{name, AlignUp(frozen, kPartAlignment) + AlignUp(trained, kPartAlignment)};
    block.trains = trained > 0;
    block.trained_from = trained > 0 ? AlignUp(frozen, kPartAlignment) : 0;
    block.elsewhere_bytes = frozen * 2;
    model.base_bytes += block.elsewhere_bytes;
    graph.blocks.push_back(block);
    return graph.blocks.end_index() - 1;
  };
  const auto add_stage = [&](const char* name, BlockIndex block, int64_t flops_of) {
    StageShape stage{name, block, input, 6 * input, 24 * input};
    stage.input_scratch_bytes = input;
    stage.forward_seconds = static_cast<double>(flops_of);
    // What is frozen has no gradient of its own: computed again, and one product of two.
    stage.backward_seconds = 2 * stage.forward_seconds;
    graph.stages.push_back(stage);
  };
  const int64_t rows = of.vocabulary * of.width / of.tiles;
  std::vector<BlockIndex> vocabulary, head;
  for (int t = 0; t < of.tiles; ++t) vocabulary.push_back(add_block("embed", rows, 0));
  for (const BlockIndex block : vocabulary) add_stage("embed", block, 0);
  for (int i = 0; i < of.layers; ++i) {
    const BlockIndex block = add_block("layer", LayerElements(of), AdapterElements(of));
    add_stage("layer", block, LayerElements(of));
  }
  const BlockIndex norm = add_block("norm", of.width, 0);
  add_stage("norm", norm, 0);
  for (int t = 0; t < of.tiles; ++t)
    head.push_back(of.tied ? vocabulary[static_cast<size_t>(t)] : add_block("head", rows, 0));
  for (const BlockIndex block : head) add_stage("loss", block, rows);
  double sum = 0;
  for (const StageShape& stage : graph.stages) sum += stage.forward_seconds + stage.backward_seconds;
  for (StageShape& stage : graph.stages) {
    stage.forward_seconds *= seconds / sum;
    stage.backward_seconds *= seconds / sum;
  }
  return model;
}

// The busiest part, or one pass after the other: forward reads as much as backward and computes half as much,
// so where both take about as long, the drive waits in one and compute in the other, but for what the weight
// slots hold ahead.
double LowerBoundOf(const Model& model, const Plan& plan, const Prediction& step,
                    const MachineModel& machine) {
  double ahead = 0;
  for (const Slot& slot : plan.weight_slots) ahead += static_cast<double>(slot.bytes);
  const double read = step.read_seconds / 2 - ahead / machine.read_bytes_per_s;
  double forward = 0, backward = 0;
  for (const StageShape& stage : model.graph.stages) {
    forward += stage.forward_seconds;
    backward += stage.backward_seconds;
  }
  forward -= model.graph.stages.back().forward_seconds;  // a part of its backward
  return std::max(step.lower_bound_seconds, std::max(forward, read) + std::max(backward, read));
}

class Adapters : public testing::TestWithParam<Shape> {};

TEST_P(Adapters, ReadTheirBaseTwiceAndWriteNothingButTheirCommits) {
  const Shape& of = GetParam();
  constexpr int64_t kTokens = 256;
  for (const double compute_to_drive : {0.2, 0.7, 1.0, 1.5, 4.0}) {
    SCOPED_TRACE(compute_to_drive);
    PlanOptions options;
    options.frozen_elsewhere = true;
    options.machine.update_workers = 2;
    const auto base = static_cast<double>(ModelOf(of, kTokens, 1).base_bytes);
    const Model model = ModelOf(of, kTokens, compute_to_drive * 2 * base / options.machine.read_bytes_per_s);
    options.host_memory_budget_bytes = model.base_bytes / 8;
    const absl::StatusOr<Plan> plan = MakePlan(model.graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    int64_t committed = 0, apart = 0, base_read = 0;
    const CondensedPlan condensed(*plan);
    ForStepOps(model.graph, condensed.plan(), /*speculative_update=*/true, [&](const Op& op) {
      const int64_t bytes = op.bytes * condensed.times(op);
      if (op.kind == OpKind::kReadWeights) base_read += bytes;
      if (op.lane != Lane::kWrite) return;
      (IsTileWrite(op.kind) ? committed : apart) += bytes;
    });
    EXPECT_LE(base_read, 2 * model.base_bytes);
    EXPECT_LT(apart, 1'000'000);
    EXPECT_LE(committed, plan->precision.UnpaddedBytes(of.layers * AdapterElements(of)) * 1.02);
    const absl::StatusOr<Prediction> step = Predict(model.graph, *plan, options.machine);
    ASSERT_TRUE(step.ok()) << step.status();
    const double bound = LowerBoundOf(model, *plan, *step, options.machine);
    std::printf(
        "%s, compute to drive %.1f: %.2f GB in %d tiles, %d blocks in flight; read %.3f of it and %.3f with "
        "the states, written %.1f "
        "+ %.3f "
        "MB; %.3f s, %.3f of its lower bound, %.3f of its busiest part (%s); clipped %.3f\n",
        of.name, compute_to_drive, base * 1e-9, static_cast<int>(plan->tile_count()),
        plan->weight_classes.back().slots, static_cast<double>(base_read) / base,
        static_cast<double>(plan->nvme_read_bytes) / base, static_cast<double>(committed) * 1e-6,
        static_cast<double>(apart) * 1e-6, step->step_seconds, step->step_seconds / bound,
        step->step_seconds / step->lower_bound_seconds, step->bound_by.c_str(),
        step->clipped_step_seconds / bound);
    // Where both take as long, every wait of one is a wait of the other.
    const bool even = compute_to_drive == 1.0;
    EXPECT_LE(step->step_seconds, (even ? 1.15 : 1.05) * bound);
    EXPECT_LE(step->clipped_step_seconds, (even ? 1.15 : of.most_clipped) * bound);
  }
}

// An adapter of 70 B whose base lies in 4 bit: on a card of 24 GiB with 32 GiB of host memory.
TEST(PackedAdapters, ASeventyBillionBaseInFourBitFitsACardOf24GiBAnd32GiBOfHostMemory) {
  const Shape of{"llama_70b", 80, 8192, 28672, 1024, 128256, 1, false, 1.05};
  Model model = ModelOf(of, /*tokens=*/2048, /*seconds=*/20);
  int64_t base = 0;
  for (BlockShape& block : model.graph.blocks) {
    block.elsewhere_bytes = block.elsewhere_bytes / 2 * 17 / 32;  // half a byte, and 16 bits for 64 of them
    base += block.elsewhere_bytes;
  }
  EXPECT_GT(base, int64_t{34} << 30);
  PlanOptions options;
  options.frozen_elsewhere = true;
  options.micro_batches = 2;
  options.host_memory_budget_bytes = int64_t{32} << 30;
  options.device.has_own_memory = true;
  options.device.budget_bytes = int64_t{24} << 30;
  const absl::StatusOr<Plan> plan = MakePlan(model.graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_LE(plan->host_bytes(), int64_t{32} << 30);
  EXPECT_LE(plan->device.bytes(), int64_t{24} << 30);
  EXPECT_LE(plan->nvme_read_bytes, 1.05 * 2 * base);
  EXPECT_LE(plan->nvme_write_bytes, 1.05 * 12 * of.layers * AdapterElements(of));
  const absl::StatusOr<Prediction> step = Predict(model.graph, *plan, options.machine);
  ASSERT_TRUE(step.ok()) << step.status();
  std::printf(
      "llama_70b in 4 bit: base %.2f GB; read %.3f of it, written %.1f MB; host %.2f of least %.2f GB, "
      "device %.2f of "
      "least %.2f GB; %.1f s, %.3f of its busiest part (%s)\n",
      static_cast<double>(base) * 1e-9,
      static_cast<double>(plan->nvme_read_bytes) / static_cast<double>(base),
      static_cast<double>(plan->nvme_write_bytes) * 1e-6, static_cast<double>(plan->host_bytes()) * 1e-9,
      static_cast<double>(plan->least_host_memory_bytes) * 1e-9,
      static_cast<double>(plan->device.bytes()) * 1e-9, static_cast<double>(plan->device.least_bytes) * 1e-9,
      step->step_seconds, step->step_seconds / step->lower_bound_seconds, step->bound_by.c_str());
}

// Three blocks in flight leave an eighth of a small base little room for tiles of state, which a clipped step
// has all in forward.
INSTANTIATE_TEST_SUITE_P(Llama, Adapters,
                         testing::Values(Shape{"llama_3b", 28, 3072, 8192, 1024, 128256, 5, true, 1.11},
                                         Shape{"llama_8b", 32, 4096, 14336, 1024, 128256, 3, false, 1.05},
                                         Shape{"llama_70b", 80, 8192, 28672, 1024, 128256, 1, false, 1.05}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace penstock::tiering::adapters_test
