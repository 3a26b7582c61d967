#include "tiering/advice/what_if.h"

#include <algorithm>
#include <utility>

#include "tiering/planner/update_order.h"

namespace penstock::tiering {
namespace {

// `now_seconds`: for as many samples as a step under these options has.
WhatIf Ask(std::string change, const ModelGraph& graph, const PlanOptions& options, double now_seconds,
           bool of_clipped_steps = false) {
  WhatIf answer;
  answer.change = std::move(change);
  answer.of_clipped_steps = of_clipped_steps;
  absl::StatusOr<Plan> plan = MakePlan(graph, options);
  if (!plan.ok()) {
    answer.error = std::string(plan.status().message());
    return answer;
  }
  absl::StatusOr<Prediction> prediction =
      of_clipped_steps ? Predict(graph, *plan, options.machine) : PredictStep(graph, *plan, options.machine);
  if (!prediction.ok()) {
    answer.error = std::string(prediction.status().message());
    return answer;
  }
  answer.prediction = *std::move(prediction);
  answer.host_bytes = plan->host_bytes();
  answer.nvme_read_bytes = plan->nvme_read_bytes;
  answer.nvme_write_bytes = plan->nvme_write_bytes;
  answer.clipped_read_bytes = plan->clipped_read_bytes;
  answer.speedup = now_seconds / std::max(of_clipped_steps ? answer.prediction.clipped_step_seconds
                                                           : answer.prediction.step_seconds,
                                          1e-12);
  return answer;
}

}  // namespace

std::vector<WhatIf> AskWhatIf(const ModelGraph& graph, const PlanOptions& planned, const Prediction& now,
                              int drives) {
  std::vector<WhatIf> answers;
  const double seconds = now.step_seconds;
  PlanOptions options = planned;
  options.compares_policies = false;  // that takes longer than what it tells here is worth
  if (options.on_nvme) {
    PlanOptions more = options;
    const double factor = static_cast<double>(drives + 1) / std::max(1, drives);
    more.machine.read_bytes_per_s *= factor;
    more.machine.write_bytes_per_s *= factor;
    more.machine.mixed_bytes_per_s *= factor;
    answers.push_back(Ask("one more drive", graph, more, seconds));
  }
  if (options.host_memory_budget_bytes > 0) {
    PlanOptions more = options;
    more.host_memory_budget_bytes *= 2;
    answers.push_back(Ask("twice the host memory", graph, more, seconds));
  }
  ModelGraph larger = graph;
  larger.batch_bytes *= 2;
  ModelGraph faster = graph;
  for (StageShape& stage : larger.stages) {
    stage.input_bytes *= 2;
    stage.forward_peak_bytes *= 2;
    stage.backward_peak_bytes *= 2;
    stage.forward_seconds *= 2;
    stage.backward_seconds *= 2;
  }
  for (StageShape& stage : faster.stages) {
    stage.forward_seconds /= 2;
    stage.backward_seconds /= 2;
  }
  answers.push_back(Ask("twice the batch", larger, options, 2 * seconds));
  answers.push_back(Ask("twice the compute", faster, options, seconds));
  if (MayPreview(options)) {
    PlanOptions other = options;
    const bool wear = options.prefer == Prefer::kWear;
    other.prefer = wear ? Prefer::kTime : Prefer::kWear;
    answers.push_back(Ask(wear ? "prefer: time" : "prefer: wear", graph, other, now.clipped_step_seconds,
                          /*of_clipped_steps=*/true));
  }
  return answers;
}

}  // namespace penstock::tiering
