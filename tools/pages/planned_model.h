// A plan that was made, with the machine that it was made on: what `penstock plan` and penstock.plan tell of
// it.
#ifndef PENSTOCK_TOOLS_PAGES_PLANNED_MODEL_H_
#define PENSTOCK_TOOLS_PAGES_PLANNED_MODEL_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tiering/advice/what_if.h"
#include "tiering/simulate/simulate.h"
#include "tools/machine/machine_probe.h"
#include "tools/pages/trace_view.h"
#include "zero/compute/compute.h"
#include "zero/engine/engine.h"

namespace penstock::tools {

// The step that a page draws: one that has another before and behind it.
absl::StatusOr<TraceView> SimulatedStep(const zero::EnginePlan& plan, const tiering::MachineModel& machine);

// Of a model that its owner computes (zero/compute/driven_compute.h): the very plan that an engine with these
// options makes, and what its step takes on this machine. Nothing is made on a drive but the file of a probe.
class PlannedModel {
 public:
  // `measured`: as an engine is given it. `probes_drive`: the state directories' drives are measured, unless
  // a profile is stored; else they are assumed. One directory "" stands for a drive that is not known.
  // `sources`: where the figures of `measured` are from, a line each. Errors are those of
  // zero::Engine::MakePlan.
  static absl::StatusOr<PlannedModel> Make(zero::Measured measured, zero::EngineOptions options,
                                           int compute_threads, bool probes_drive,
                                           const std::vector<std::string>& sources);

  const zero::EnginePlan& plan() const { return plan_; }
  const tiering::Prediction& prediction() const { return prediction_; }
  // As `penstock plan --json`. `asks_what_if`: with what another machine, budget or batch would change.
  nlohmann::json Json(bool asks_what_if);
  // As `penstock plan`.
  std::string Text();
  // As `penstock plan --html`. Simulates three steps.
  absl::StatusOr<std::string> Html(const std::string& title);

 private:
  PlannedModel() = default;
  // They take as long as the plan, several times: asked for once.
  const std::vector<tiering::WhatIf>& WhatIfs();

  zero::EngineOptions options_;
  zero::EnginePlan plan_;
  Machine machine_;
  tiering::Prediction prediction_;
  std::optional<std::vector<tiering::WhatIf>> what_ifs_;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_PLANNED_MODEL_H_
