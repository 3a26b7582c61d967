#include "tools/pages/planned_model.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "tools/pages/op_places.h"
#include "tools/pages/plan_page.h"
#include "tools/pages/plan_text.h"
#include "zero/compute/driven_compute.h"

namespace penstock::tools {

absl::StatusOr<TraceView> SimulatedStep(const zero::EnginePlan& plan, const tiering::MachineModel& machine) {
  const SlotSizes sizes(plan.plan);
  std::vector<TraceEvent> events;
  RETURN_IF_ERROR(tiering::Simulate(
                      plan.graph, plan.plan, machine, /*steps=*/3,
                      [&](tiering::OpId, const tiering::Op& op, double start, double end) {
                        events.push_back({.lane = std::string(tiering::LaneName(op.lane)),
                                          .name = std::string(tiering::OpKindName(op.kind)),
                                          .start_seconds = start,
                                          .end_seconds = end,
                                          .step = op.step,
                                          .block = op.block.value(),
                                          .tile = op.tile.value(),
                                          .stage = op.stage.value(),
                                          .bytes = op.bytes,
                                          .places = sizes.PlacesOf(op)});
                      },
                      [&](tiering::Stall cause, double start, double end) {
                        events.push_back({.lane = kWaitsTrack,
                                          .name = std::string(tiering::StallName(cause)),
                                          .start_seconds = start,
                                          .end_seconds = end});
                      })
                      .status());
  return StepOf(std::move(events));
}

absl::StatusOr<PlannedModel> PlannedModel::Make(zero::Measured measured, zero::EngineOptions options,
                                                int compute_threads, bool probes_drive,
                                                const std::vector<std::string>& sources) {
  PlannedModel made;
  options.example = zero::DrivenCompute::Unseen();
  zero::DrivenCompute compute(std::move(measured));
  ASSIGN_OR_RETURN(made.plan_, zero::Engine::MakePlan(compute, options));
  MachineRequest request = RequestFor(options, made.plan_.state_bytes, nullptr);
  request.compute_threads = compute_threads;
  request.probe_drive = probes_drive;
  const bool named = request.directories != std::vector<std::string>{""};
  request.stored_profile = named;
  ASSIGN_OR_RETURN(made.machine_, ProbeMachine(request));
  if (!named) made.machine_.sources.front() = "drive: assumed, not measured: no state directory is named";
  made.machine_.sources.insert(made.machine_.sources.end(), sources.begin(), sources.end());
  ASSIGN_OR_RETURN(made.prediction_,
                   tiering::Predict(made.plan_.graph, made.plan_.plan, made.machine_.model));
  // What else would be is asked of this machine, too.
  made.plan_.options.machine = made.machine_.model;
  made.options_ = std::move(options);
  return made;
}

const std::vector<tiering::WhatIf>& PlannedModel::WhatIfs() {
  if (!what_ifs_.has_value()) {
    what_ifs_ = tiering::AskWhatIf(plan_.graph, plan_.options, prediction_,
                                   static_cast<int>(options_.storage.state_dirs.size()));
  }
  return *what_ifs_;
}

nlohmann::json PlannedModel::Json(bool asks_what_if) {
  return PlanJson({plan_, options_, machine_, prediction_},
                  asks_what_if ? WhatIfs() : std::vector<tiering::WhatIf>());
}

std::string PlannedModel::Text() {
  const PlanFacts facts{plan_, options_, machine_, prediction_};
  return absl::StrCat(PlanText(facts), PlanDetails(facts, WhatIfs()));
}

absl::StatusOr<std::string> PlannedModel::Html(const std::string& title) {
  ASSIGN_OR_RETURN(const TraceView step, SimulatedStep(plan_, machine_.model));
  return PlanPage(title, Json(/*asks_what_if=*/true), step);
}

}  // namespace penstock::tools
