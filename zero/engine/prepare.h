// What stands before the first step: the model measured, a plan made under the options, and agreed on by all
// ranks. Nothing is made or changed on a drive.
#ifndef PENSTOCK_ZERO_ENGINE_PREPARE_H_
#define PENSTOCK_ZERO_ENGINE_PREPARE_H_

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "tiering/plan/model_graph.h"
#include "zero/compute/compute.h"
#include "zero/compute/gradient_sums.h"
#include "zero/engine/direct_storage.h"
#include "zero/engine/engine.h"
#include "zero/engine/rank_agreement.h"

namespace penstock::zero {

struct PreparedModel {
  EnginePlan plan;
  GradientSums::Layouts layouts;
  nlohmann::json identity;  // what a store is made with, and what it must have to be resumed
  DeviceExchange devices;   // of several ranks
  DirectStorage storage;    // of a device with its own memory, with a drive
};

// Measures the model and plans it under the options. With options.resume.enabled (or without options.trains)
// the state directories (without a drive of its own: the checkpoint's) must hold a run of this very model,
// type and seed (kFailedPrecondition names what differs), whose tiles the plan takes over; without, the
// directories must be free or options.overwrite set. `known`: what was measured of the same model for the
// same example, which is taken as it is; null: it is measured.
absl::StatusOr<PreparedModel> PrepareModel(Compute& compute, const EngineOptions& options,
                                           const tiering::ModelGraph* known = nullptr);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_PREPARE_H_
