// The plan of a run's model, also of one whose layers are too large to be run here.
//
// A plan rests on what a layer takes when it is run once. Where that would take long by its arithmetic and
// what a product of matrices reaches here, the same model is run in its place so many times narrower
// (models/families/narrow_model.h), and what it took becomes what the model takes: times by arithmetic, saved
// activations by width, and memory beside them by a bound: activations by width, and gradients of the
// parameters, which come to be one after the other, all at once.
#ifndef PENSTOCK_TOOLS_PENSTOCK_PLAN_MODEL_H_
#define PENSTOCK_TOOLS_PENSTOCK_PLAN_MODEL_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "tools/penstock/train_settings.h"
#include "zero/engine/engine.h"

namespace penstock::tools {

struct ModelPlan {
  zero::EnginePlan plan;
  int64_t narrower = 1;  // how many times the model is that was run; 1: the model itself

  // "compute: estimated, ...", a line for people; empty: it was measured.
  std::string EstimateText() const;
};

// `options`: of `settings`, with hooks. `most_seconds`: what running the layers may be expected to take.
absl::StatusOr<ModelPlan> PlanModel(const TrainSettings& settings, const zero::EngineOptions& options,
                                    double most_seconds = 4);

// What a training would take, itself and its process: an error where it does not fit. No time is measured,
// and nothing is written. All ranks of `settings` call it.
absl::StatusOr<zero::EnginePlan> PlanMemory(TrainSettings settings,
                                            const std::function<void(const std::string&)>& preparing = {});

// `refused`: what planning a new run said. Where its budget was too small, and the vocabulary in more tiles
// would fit into it, that is named as well.
absl::Status NameTilesThatFit(absl::Status refused, const TrainSettings& settings,
                              const zero::EngineOptions& options);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_PLAN_MODEL_H_
