#include "run_watch.h"

#include <algorithm>

#include "absl/status/status.h"
#include "aio/profile.h"
#include "tools/pages/plan_text.h"

namespace penstock::python {

void RunWatch::Attach(GivenOptions* given) {
  zero::EngineOptions& options = given->engine;
  report_.Start(options, PENSTOCK_VERSION, options.world());
  plans_again_ = given->plans_again;
  if (given->breaks_down) breakdown_.emplace();
  if (given->logs_exchanges) exchanges_.emplace();
  options.hooks.committed = [this](const zero::StepResult& result) {
    committed_.store(result.step);
    return absl::OkStatus();
  };
  options.hooks.observer = [this](tiering::OpId, const tiering::Op& op, double start_seconds,
                                  double end_seconds) {
    if (check_ != nullptr) check_->Observe(op, start_seconds, end_seconds);
    if (breakdown_.has_value() && trains_.load()) breakdown_->Observe(op, start_seconds, end_seconds);
    if (exchanges_.has_value()) exchanges_->Observe(op, start_seconds, end_seconds);
  };
  if (!given->breaks_down) return;
  options.hooks.stall_observer = [this](tiering::Stall cause, double start_seconds, double end_seconds) {
    if (trains_.load()) breakdown_->ObserveStall(cause, start_seconds, end_seconds);
  };
}

std::string RunWatch::Planned(const zero::Engine& engine, const std::string& run_id) {
  committed_.store(engine.committed_step());
  report_.Identify(run_id);
  aio::DeviceProfile unmeasured;
  // Without a drive there are none in flight.
  unmeasured.saturating_bytes_in_flight = std::max<uint64_t>(1, engine.io_stats().saturating_bytes_in_flight);
  const zero::EnginePlan& plan = engine.plan();
  // By how long the first forward took.
  tiering::Prediction at_start;
  if (plan.plan.trains) {
    at_start = tiering::Predict(plan.graph, plan.plan, plan.options.machine).value_or(tiering::Prediction());
  }
  report_.Planned(engine, unmeasured, at_start);
  check_ = std::make_unique<zero::PredictionCheck>(
      engine, at_start, static_cast<int64_t>(unmeasured.saturating_bytes_in_flight), plans_again_, &report_);
  return at_start.step_seconds > 0 ? tools::PlanLine(plan, at_start) : "";
}

void RunWatch::Stepped(const zero::Engine& engine, const zero::StepResult& result, int64_t tokens,
                       double flops) {
  report_.Stepped(engine, result, tokens);
  if (breakdown_.has_value()) breakdown_line_ = breakdown_->Line(result.step, result.seconds);
  report_.Computes(flops);
  check_->Stepped(result);
}

std::string RunWatch::Report(const zero::Engine& engine) { return report_.Finish(&engine, absl::OkStatus()); }

}  // namespace penstock::python
