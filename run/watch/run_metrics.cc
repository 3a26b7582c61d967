#include "run/watch/run_metrics.h"

#include <ctime>
#include <filesystem>

#include "absl/strings/str_cat.h"

namespace penstock::run {
namespace {

Metric Gauge(std::string_view name, std::string_view help, double value) {
  return {
      .name = name, .help = help, .type = Metric::Type::kGauge, .samples = {{.labels = {}, .value = value}}};
}

Metric Counter(std::string_view name, std::string_view help, double value) {
  return {.name = name,
          .help = help,
          .type = Metric::Type::kCounter,
          .samples = {{.labels = {}, .value = value}}};
}

Metric Stalls(const tiering::Usage& usage) {
  Metric stalls{.name = "penstock_stall_seconds_total",
                .help = "What compute waited for, by cause; of this process.",
                .type = Metric::Type::kCounter,
                .samples = {}};
  for (int i = 0; i < tiering::kStalls; ++i) {
    const std::string cause(tiering::StallName(static_cast<tiering::Stall>(i)));
    stalls.samples.push_back(
        {.labels = {{"cause", cause}}, .value = usage.stall_seconds[static_cast<size_t>(i)]});
  }
  return stalls;
}

}  // namespace

std::string PrometheusPath(const std::string& path, int rank, int world) {
  if (world == 1 || rank == 0) return path;
  std::filesystem::path own = path;
  const std::string ending = own.extension();
  own.replace_filename(absl::StrCat(own.stem().string(), "-rank-", rank, ending));
  return own;
}

absl::Status RunMetrics::Committed(const zero::StepResult& result, const zero::Engine& engine,
                                   const Totals& totals) {
  tokens_ += static_cast<double>(totals.tokens_per_step);
  seconds_ += result.seconds;
  skipped_ += result.skipped ? 1 : 0;
  newest_ = result;
  committed_at_ = std::time(nullptr);
  return Write(engine, totals);
}

absl::Status RunMetrics::Ended(const zero::Engine& engine, const Totals& totals) {
  return committed_at_ == 0 ? absl::OkStatus() : Write(engine, totals);
}

absl::Status RunMetrics::Write(const zero::Engine& engine, const Totals& totals) {
  const auto number = [](auto value) { return static_cast<double>(value); };
  const double rate = newest_.seconds > 0 ? number(totals.tokens_per_step) / newest_.seconds : 0;
  return file_.Write({
      Gauge("penstock_step", "Last step that is committed.", number(newest_.step)),
      Gauge("penstock_last_step", "Step with which the run is to end.", number(totals.last_step)),
      Gauge("penstock_last_commit_timestamp_seconds", "When that was, in seconds since 1970.",
            number(committed_at_)),
      Gauge("penstock_loss", "Loss of that step.", newest_.loss),
      Gauge("penstock_learning_rate", "Learning rate of its update.", newest_.lr),
      Gauge("penstock_gradient_norm", "Global norm of its gradients, before clipping.", newest_.grad_norm),
      Gauge("penstock_loss_scale", "Its loss scale, 1 but with fp16.", newest_.loss_scale),
      Gauge("penstock_step_seconds", "What it took, without evaluations.", newest_.seconds),
      Gauge("penstock_tokens_per_second", "Tokens of all ranks over that.", rate),
      Counter("penstock_tokens_total", "Tokens trained on, of all ranks; since this process began.", tokens_),
      Counter("penstock_seconds_total", "Seconds of steps; of this process.", seconds_),
      Counter("penstock_skipped_steps_total", "Steps whose gradients were not finite; of this process.",
              number(skipped_)),
      Counter("penstock_read_bytes_total", "Bytes read from drives; of this process.",
              number(totals.read_bytes)),
      Counter("penstock_written_bytes_total", "Bytes written to drives; of this process.",
              number(totals.written_bytes)),
      Counter("penstock_run_written_bytes_total",
              "Bytes written to drives by all processes of the run: wear.", number(totals.run_written_bytes)),
      Stalls(engine.usage()),
      Gauge("penstock_peak_managed_bytes", "The most that arena and tensors took together.",
            number(engine.peak_managed_bytes())),
      Gauge("penstock_host_memory_budget_bytes", "What they may take; 0: no bound.",
            number(totals.budget_bytes)),
  });
}

}  // namespace penstock::run
