// Trainings of the wide model through the engine.
#ifndef PENSTOCK_TESTS_ZERO_WIDE_TRAINING_H_
#define PENSTOCK_TESTS_ZERO_WIDE_TRAINING_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/zero/training.h"
#include "tests/zero/wide_model.h"

namespace penstock::zero::testing_support {

inline constexpr int kWideMicroBatches = 2;

inline EngineOptions WideOptions(const WideShape& shape) {
  EngineOptions options;
  options.storage.offload = OffloadDevice::kNone;
  options.dtype = kernels::DType::kFp32;
  options.micro_batches = kWideMicroBatches;
  options.example = MakeWideBatch(shape, 0, 0);
  options.optimizer.algorithm = kernels::AdamOptions{.lr = 1e-2};
  options.optimizer.clip = 1.0;
  return options;
}

// On a drive, in as little memory as works.
inline EngineOptions WideOnADrive(const WideShape& shape, const Model& model, const std::string& directory) {
  EngineOptions options = WideOptions(shape);
  options.storage.offload = OffloadDevice::kNvme;
  options.storage.state_dirs = {directory};
  options.storage.overwrite = true;
  options.memory.tile_bytes = 64 << 10;
  const absl::StatusOr<EnginePlan> plan = PlanEngine(model, options);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (plan.ok()) options.memory.host_memory_budget_bytes = plan->plan.least_host_memory_bytes;
  return options;
}

inline std::vector<Batch> WideBatches(const WideShape& shape, int64_t step) {
  std::vector<Batch> batches;
  for (int m = 0; m < kWideMicroBatches; ++m) batches.push_back(MakeWideBatch(shape, step, m));
  return batches;
}

struct WideLosses {
  std::vector<double> losses, norms, evaluations;
  bool operator==(const WideLosses&) const = default;

  void Append(const WideLosses& more) {
    losses.insert(losses.end(), more.losses.begin(), more.losses.end());
    norms.insert(norms.end(), more.norms.begin(), more.norms.end());
    evaluations.insert(evaluations.end(), more.evaluations.begin(), more.evaluations.end());
  }
};

inline WideLosses TrainWide(Engine& engine, const WideShape& shape, int64_t last) {
  WideLosses losses;
  while (engine.step() < last) {
    const absl::StatusOr<StepResult> result = engine.Step(WideBatches(shape, engine.step() + 1));
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok()) break;
    losses.losses.push_back(result->loss);
    losses.norms.push_back(result->grad_norm);
    const absl::StatusOr<double> evaluation = engine.Evaluate(WideBatches(shape, 1000));
    EXPECT_TRUE(evaluation.ok()) << evaluation.status();
    losses.evaluations.push_back(evaluation.value_or(-1));
  }
  return losses;
}

}  // namespace penstock::zero::testing_support

#endif  // PENSTOCK_TESTS_ZERO_WIDE_TRAINING_H_
