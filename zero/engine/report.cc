#include "zero/engine/report.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "absl/strings/str_format.h"

namespace penstock::zero {
namespace {

// JSON has no infinities: what is not finite is null.
nlohmann::json Number(double value) {
  return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json();
}

std::string WithAllDigits(const nlohmann::json& value) {
  return value.is_number_float() ? absl::StrFormat("%.17g", value.get<double>()) : value.dump();
}

int64_t PeakRssBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace

nlohmann::json StepJson(const StepResult& result, int64_t tokens) {
  return {{"step", result.step},
          {"loss", Number(result.loss)},
          {"grad_norm", Number(result.grad_norm)},
          {"lr", result.lr},
          {"loss_scale", result.loss_scale},
          {"skipped", result.skipped},
          {"in_backward", result.speculative_share},
          {"redone", result.replayed},
          {"tokens", tokens},
          {"seconds", result.seconds},
          {"stall_io_seconds", result.stall_io_seconds},
          {"compute_seconds", result.compute_seconds},
          {"optimizer_seconds", result.optimizer_seconds},
          {"evaluation_seconds", result.evaluation_seconds},
          {"nvme_read_bytes", result.nvme_read_bytes},
          {"nvme_write_bytes", result.nvme_write_bytes}};
}

nlohmann::json EvaluationJson(const Evaluation& evaluation) {
  return {{"step", evaluation.step},
          {"loss", Number(evaluation.loss)},
          {"windows", evaluation.windows},
          {"seconds", evaluation.seconds}};
}

std::string LogLine(const nlohmann::json& entry) {
  // In the order in which people read them; nlohmann's objects are sorted.
  constexpr const char* kOrder[] = {"step",
                                    "loss",
                                    "windows",
                                    "grad_norm",
                                    "lr",
                                    "loss_scale",
                                    "skipped",
                                    "in_backward",
                                    "redone",
                                    "tokens",
                                    "seconds",
                                    "stall_io_seconds",
                                    "compute_seconds",
                                    "optimizer_seconds",
                                    "nvme_read_bytes",
                                    "nvme_write_bytes",
                                    "stuck",
                                    "run_id"};
  std::string line = "{";
  for (const char* key : kOrder) {
    if (!entry.contains(key)) continue;
    line += (line.size() > 1 ? ", \"" : "\"") + std::string(key) + "\": " + WithAllDigits(entry[key]);
  }
  return line + "}";
}

void Report::Start(const EngineOptions& options, const std::string& version, int world_size) {
  world_size_ = world_size;
  report_ = {{"version", version},
             {"optimizer_states", std::string(StateTypeName(options.optimizer.states))},
             {"device", std::string(options.device->name())},
             {"world_size", world_size},
             {"seed", options.seed},
             {"host_memory_budget_bytes", options.memory.host_memory_budget_bytes},
             {"device_memory_budget_bytes", options.memory.device_memory_budget_bytes},
             {"replanned", nullptr},
             {"stopped_by", nullptr}};
}

nlohmann::json SavedActivationsJson(const tiering::Plan& plan) {
  return {{"stages", plan.positions},
          {"stages_that_spill", plan.spilled_inputs()},
          {"spilled_to", plan.device.has_own_memory ? "host memory" : "drive"}};
}

nlohmann::json ExchangeJson(const tiering::Plan& plan) {
  if (plan.world == 1) return nullptr;
  const tiering::ExchangedBytes all = plan.gathered + plan.reduced;
  return {{"quantized_weights", plan.codes.weights},
          {"quantized_gradients", plan.codes.gradients},
          {"weights_bytes_per_step", plan.gathered.bytes},
          {"gradients_bytes_per_step", plan.reduced.bytes},
          {"saved_bytes_per_step", all.whole_bytes - all.bytes}};
}

void Report::Planned(const Engine& engine, const aio::DeviceProfile& device,
                     const tiering::Prediction& prediction) {
  const EnginePlan& plan = engine.plan();
  parameters_ = plan.parameters;
  report_["dtype"] = std::string(DTypeName(plan.format.weights));
  report_["params"] = plan.parameters;
  report_["blocks"] = plan.graph.blocks.size();
  report_["state_bytes_total"] = plan.state_bytes;
  for (size_t i = 0; i < plan.stripes.weights.size(); ++i)
    report_["state_dir_shares"].push_back(plan.stripes.share(i, plan.stripes.weights.size()));
  report_["versions"] = plan.versions;
  report_["durability"] =
      std::string(Name(plan.plan.commits_every_step ? Durability::kStep : Durability::kCheckpoint));
  report_["exchange"] = ExchangeJson(plan.plan);
  report_["resumed_from_step"] =
      engine.resumed_from().has_value() ? nlohmann::json(*engine.resumed_from()) : nlohmann::json();
  report_["io_backend"] = engine.io_backend();
  report_["io_read_bandwidth_bytes_per_s"] = device.read_bytes_per_s;
  report_["io_write_bandwidth_bytes_per_s"] = device.write_bytes_per_s;
  report_["io_knee_bytes"] = device.saturating_bytes_in_flight;
  report_["gds"] = plan.plan.device.gds;
  prediction_ = prediction;
  report_["predicted_at_start_step_seconds"] = prediction.step_seconds;
  report_["predicted_at_start_clipped_step_seconds"] = prediction.clipped_step_seconds;
  report_["prediction_from"] = "start";
  report_["bound_by"] = prediction.bound_by;
  report_["device_memory_budget_bytes"] = plan.plan.device.budget_bytes;
  DescribePlan(engine);
  seconds_ = 0;
}

void Report::DescribePlan(const Engine& engine) {
  const tiering::Plan& plan = engine.plan().plan;
  report_["state_bytes_nvme"] = engine.plan().disk_bytes;
  report_["nvme_write_bytes_saved_per_step"] = plan.late_write_bytes;
  report_["saved_activations"] = SavedActivationsJson(plan);
  report_["arena_pages"] = engine.arena_pages();
  report_["order_of_update"] = std::string(plan.order_of_update());
  report_["in_backward_share"] = plan.speculative_share();
  report_["updated_on_device_share"] = plan.on_device_share();
  report_["plan"] = plan.reasons;
}

void Report::PlannedAgain(const Engine& engine, const tiering::RunPrediction::Beside& beside,
                          const absl::StatusOr<zero::PlannedAgain>& again) {
  nlohmann::json& told = report_["replanned"];
  told = {{"after_step", engine.step()},
          {"predicted_step_seconds", beside.predicted_seconds},
          {"measured_step_seconds", beside.measured_seconds}};
  if (!again.ok()) {
    told["outcome"] = "refused";
    told["error"] = std::string(again.status().message());
    return;
  }
  told["outcome"] = !again->explained ? "unexplained" : again->moved.empty() ? "stays" : "moved";
  told["kept_step_seconds"] = again->kept_seconds;
  told["step_seconds"] = again->seconds;
  told["moved"] = again->moved;
  if (again->moved.empty()) return;
  DescribePlan(engine);
  Predicted(again->prediction);
  fills_ = stepped_ + 1;
  first_ = last_ = Now(engine);
  deferred_steps_ = replayed_steps_ = 0;
}

void Report::Predicted(const tiering::Prediction& prediction) {
  prediction_ = prediction;
  report_["prediction_from"] = "steps";
  report_["bound_by"] = prediction.bound_by;
}

Report::Mark Report::Now(const Engine& engine) const {
  Mark mark;
  mark.seconds = seconds_ + evaluation_seconds_;
  mark.step_seconds = seconds_;
  const aio::EngineStats io = engine.io_stats();
  mark.saturated_seconds = io.saturated_seconds();
  mark.saturated_bytes = static_cast<int64_t>(io.SaturatedBytes());
  mark.compute_union_seconds = engine.usage().compute_union_seconds;
  mark.step_bytes = step_read_bytes_ + step_write_bytes_;
  mark.steps = stepped_;
  return mark;
}

void Report::Evaluated(const Evaluation& evaluation) {
  evaluations_.push_back(EvaluationJson(evaluation));
  evaluated_since_step_seconds_ += evaluation.seconds;
}

void Report::Stepped(const Engine& engine, const StepResult& result, int64_t tokens) {
  seconds_ += result.seconds;
  evaluation_seconds_ += result.evaluation_seconds;
  evaluated_since_step_seconds_ = 0;
  compute_seconds_ += result.compute_seconds;
  step_read_bytes_ += result.nvme_read_bytes;
  step_write_bytes_ += result.nvme_write_bytes;
  tokens_ += tokens;
  ++stepped_;
  skipped_steps_ += result.skipped ? 1 : 0;
  steps_.push_back(StepJson(result, tokens));
  if (steps_.size() > kStepsKept) steps_.pop_front();
  last_ = Now(engine);
  if (stepped_ == fills_) first_ = last_;
  if (stepped_ == fills_) return;
  if (result.speculative_share == 0) ++deferred_steps_;
  if (result.replayed) ++replayed_steps_;
}

std::string Report::Finish(const Engine* engine, const absl::Status& status) {
  report_["status"] = status.ok() ? "ok" : "failed";
  report_["error"] = status.ok() ? nlohmann::json() : nlohmann::json(std::string(status.message()));
  const double steps = static_cast<double>(last_.steps - first_.steps);
  const double seconds = last_.seconds - first_.seconds;
  const double saturated = last_.saturated_seconds - first_.saturated_seconds;
  const double computed = last_.compute_union_seconds - first_.compute_union_seconds;
  const auto bytes = static_cast<double>(last_.saturated_bytes - first_.saturated_bytes);
  overlap_ratio_ = std::max(saturated, computed) > 0 ? seconds / std::max(saturated, computed) : 0;
  const auto step_bytes = static_cast<double>(last_.step_bytes - first_.step_bytes);
  bytes_per_param_per_step_ =
      steps > 0 && parameters_ > 0 ? step_bytes / steps / static_cast<double>(parameters_) : 0;
  io_gbps_ = saturated > 0 ? bytes / saturated * 1e-9 : 0;
  if (report_.contains("prediction_from")) {
    const double deferred = steps > 0 ? static_cast<double>(deferred_steps_) / steps : 0;
    report_["predicted_step_seconds"] =
        (1 - deferred) * prediction_.step_seconds + deferred * prediction_.clipped_step_seconds;
    report_["predicted_unclipped_step_seconds"] = prediction_.step_seconds;
    report_["predicted_clipped_step_seconds"] = prediction_.clipped_step_seconds;
    report_["predicted_floor_seconds"] = prediction_.lower_bound_seconds;
    report_["predicted_clipped_floor_seconds"] = prediction_.clipped_lower_bound_seconds;
    const double floor =
        (1 - deferred) * prediction_.lower_bound_seconds + deferred * prediction_.clipped_lower_bound_seconds;
    const bool known = report_["prediction_from"] == "steps" && steps > 0 && floor > 0;
    floor_ratio_ = known ? (last_.step_seconds - first_.step_seconds) / steps / floor : 0;
    report_["floor_ratio"] = known ? nlohmann::json(floor_ratio_) : nlohmann::json();
  }
  report_["deferred_steps"] = deferred_steps_;
  report_["redone_steps"] = replayed_steps_;
  report_["nvme_bytes_per_param_per_step"] = bytes_per_param_per_step_;
  report_["io_saturated_seconds"] = saturated;
  report_["compute_union_seconds"] = computed;
  report_["overlap_ratio"] = overlap_ratio_;
  if (flops_per_step_ > 0) {
    const double flops_per_second = seconds > 0 ? flops_per_step_ * steps / seconds : 0;
    report_["model_flops_per_step"] = flops_per_step_;
    report_["model_flops_per_second"] = flops_per_second;
    if (product_flops_per_second_ > 0) {
      const double share = flops_per_second / (product_flops_per_second_ * world_size_);
      report_["product_flops_per_second"] = product_flops_per_second_;
      report_["mfu"] = share > 0 && share <= 1 ? nlohmann::json(share) : nlohmann::json();
    }
  }
  report_["io_gbps_achieved"] = io_gbps_;
  report_["peak_rss_bytes"] = PeakRssBytes();
  nlohmann::json stalls = nlohmann::json::object();
  aio::EngineStats io;
  if (engine != nullptr) {
    report_["peak_managed_bytes"] = engine->peak_managed_bytes();
    report_["peak_pinned_bytes"] = engine->peak_pinned_bytes();
    report_["peak_device_bytes"] = engine->peak_device_bytes();
    if (engine->device().has_own_memory())
      report_["pinned_for_device_bytes"] = engine->pinned_for_device_bytes();
    for (int i = 0; i < tiering::kStalls; ++i) {
      const auto stall = static_cast<tiering::Stall>(i);
      stalls[std::string(tiering::StallName(stall))] = engine->usage().stall_seconds[static_cast<size_t>(i)];
    }
    io = engine->io_stats();
    report_["saved_activations"]["written_bytes"] = engine->input_bytes().written;
    report_["saved_activations"]["read_bytes"] = engine->input_bytes().read;
    if (report_.contains("exchange") && report_["exchange"].is_object()) {
      const tiering::ExchangedBytes gathered = engine->gathered(), reduced = engine->reduced();
      report_["exchange"].update(
          {{"weights_bytes", gathered.bytes},
           {"gradients_bytes", reduced.bytes},
           {"saved_bytes", (gathered + reduced).whole_bytes - (gathered + reduced).bytes}});
    }
    const CheckpointTotals checkpoints = engine->checkpoint_totals();
    report_["checkpoints"] = {{"written", checkpoints.written},
                              {"seconds", checkpoints.seconds},
                              {"waited_seconds", checkpoints.waited_seconds},
                              {"under_way", engine->copies_checkpoint()}};
  }
  report_["stall_seconds"] = std::move(stalls);
  report_["totals"] = {{"nvme_read_bytes", engine != nullptr ? ReadBytes(*engine) : probe_read_bytes_},
                       {"nvme_write_bytes", engine != nullptr ? WriteBytes(*engine) : probe_write_bytes_},
                       {"step_nvme_read_bytes", step_read_bytes_},
                       {"step_nvme_write_bytes", step_write_bytes_},
                       {"steps", stepped_},
                       {"skipped_steps", skipped_steps_},
                       {"compute_seconds", compute_seconds_},
                       {"h2d_bytes", engine != nullptr ? engine->copied().h2d_bytes : 0},
                       {"d2h_bytes", engine != nullptr ? engine->copied().d2h_bytes : 0},
                       {"gds_read_bytes", engine != nullptr ? engine->gds_read_bytes() : 0},
                       {"seconds", seconds_},
                       {"evaluation_seconds", evaluation_seconds_ + evaluated_since_step_seconds_},
                       {"tokens", tokens_},
                       {"io_errors_retried", io.IoErrorsRetried()},
                       {"io_cpu_ms_per_gib", io.CpuMsPerGiB()}};
  if (run_write_bytes_.has_value()) report_["totals"]["run_nvme_write_bytes"] = *run_write_bytes_;
  // Steps and evaluations by hand: their losses are printed with 17 digits.
  std::string text = report_.dump(2);
  text.erase(text.find_last_of('}'));
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  const auto append = [&text](const char* name, const auto& entries) {
    text += absl::StrFormat(",\n  \"%s\": [", name);
    for (size_t i = 0; i < entries.size(); ++i) text += (i == 0 ? "\n    " : ",\n    ") + LogLine(entries[i]);
    text += entries.empty() ? "]" : "\n  ]";
  };
  append("evaluations", evaluations_);
  append("steps", steps_);
  return text + "\n}\n";
}

}  // namespace penstock::zero
