#include "tiering/advice/what_if.h"

#include <algorithm>
#include <utility>

namespace penstock::tiering {
namespace {

WhatIf Ask(std::string change, const ModelGraph& graph, const PlanOptions& options, double samples,
           const Prediction& now) {
  WhatIf answer;
  answer.change = std::move(change);
  absl::StatusOr<Plan> plan = MakePlan(graph, options);
  if (!plan.ok()) {
    answer.error = std::string(plan.status().message());
    return answer;
  }
  absl::StatusOr<Prediction> prediction = PredictStep(graph, *plan, options.machine);
  if (!prediction.ok()) {
    answer.error = std::string(prediction.status().message());
    return answer;
  }
  answer.prediction = *std::move(prediction);
  answer.host_bytes = plan->host_bytes();
  answer.nvme_read_bytes = plan->nvme_read_bytes;
  answer.nvme_write_bytes = plan->nvme_write_bytes;
  answer.speedup = samples * now.step_seconds / std::max(answer.prediction.step_seconds, 1e-12);
  return answer;
}

}  // namespace

std::vector<WhatIf> AskWhatIf(const ModelGraph& graph, const PlanOptions& planned, const Prediction& now,
                              int drives) {
  std::vector<WhatIf> answers;
  PlanOptions options = planned;
  options.compares_policies = false;  // that takes longer than what it tells here is worth
  if (options.on_nvme) {
    PlanOptions more = options;
    const double factor = static_cast<double>(drives + 1) / std::max(1, drives);
    more.machine.read_bytes_per_s *= factor;
    more.machine.write_bytes_per_s *= factor;
    more.machine.mixed_bytes_per_s *= factor;
    answers.push_back(Ask("one more drive", graph, more, 1, now));
  }
  if (options.host_budget_bytes > 0) {
    PlanOptions more = options;
    more.host_budget_bytes *= 2;
    answers.push_back(Ask("twice the host memory", graph, more, 1, now));
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
  answers.push_back(Ask("twice the batch", larger, options, 2, now));
  answers.push_back(Ask("twice the compute", faster, options, 1, now));
  return answers;
}

}  // namespace penstock::tiering
