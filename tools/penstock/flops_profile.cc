#include "tools/penstock/flops_profile.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/base/progress.h"

namespace penstock::tools {
namespace {

using tiering::OpKind;

std::string Flops(double flops) {
  constexpr const char* kUnits[] = {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"};
  size_t unit = 0;
  for (; flops >= 1000 && unit + 1 < std::size(kUnits); ++unit) flops /= 1000;
  return absl::StrFormat("%.4g %s", flops, kUnits[unit]);
}

double PerSecond(double flops, double seconds) { return seconds > 0 ? flops / seconds : 0; }

}  // namespace

double ModelFlopsPerStep(const std::vector<models::StageProducts>& products, int64_t sequences,
                         int64_t length) {
  double flops = 0;
  for (const models::StageProducts& stage : products)
    flops += stage.ForwardFlops(sequences, length) + stage.BackwardFlops(sequences, length);
  return flops;
}

FlopsProfile::FlopsProfile(const run::FlopsProfilerConfig& config,
                           const std::vector<models::StageProducts>& products, const Step& step)
    : config_(config), step_number_(config.profile_step.value_or(1)), step_(step) {
  for (const models::StageProducts& stage : products) {
    stages_.push_back({.name = stage.stage,
                       .flops = stage.ForwardFlops(step.sequences, step.length),
                       .backward_flops = stage.BackwardFlops(step.sequences, step.length),
                       .parameters = stage.parameters});
  }
}

void FlopsProfile::Observe(const tiering::Op& op, double start_seconds, double end_seconds) {
  if (op.step != step_number_ || op.evaluates || !op.stage.valid()) return;
  const auto stage = static_cast<size_t>(op.stage.value());
  if (stage >= stages_.size() || op.lane != tiering::Lane::kCompute) return;
  (op.kind == OpKind::kForward ? stages_[stage].forward_seconds : stages_[stage].backward_seconds) +=
      end_seconds - start_seconds;
}

// Of what the processor can do. Nothing does more: where the step seems to, the measure was wrong.
std::string FlopsProfile::Share(double achieved) const {
  const double product = step_.product_flops_per_second;
  if (product <= 0) return "";
  if (achieved > product) {
    return absl::StrFormat(
        "  other work disturbed the product of matrices that this is held against, which came to %s/s (%s, "
        "the best of some, before the run): there is no share of it\n",
        Flops(product), step_.product);
  }
  return absl::StrFormat(
      "  that is %.1f%% of the %s/s that a product of matrices reaches here (%s, the best of some, before "
      "the "
      "run)\n",
      100 * achieved / product, Flops(product), step_.product);
}

std::string FlopsProfile::Summary(const zero::StepResult& result) const {
  double forward = 0, backward = 0, forward_seconds = 0, backward_seconds = 0;
  for (const Block& stage : stages_) {
    forward += stage.flops;
    backward += stage.backward_flops;
    forward_seconds += stage.forward_seconds;
    backward_seconds += stage.backward_seconds;
  }
  const double model = forward + backward, achieved = PerSecond(model, result.seconds);
  const auto tokens = static_cast<double>(step_.sequences * step_.length);
  std::string text = absl::StrFormat(
      "flops profile of step %d%s: %s parameters, %s tokens in sequences of %d\n"
      "counted are matrix products, a multiply-add as two; norms, activations, softmax, look-ups, optimizer "
      "are not\n"
      "  forward              %s: 2 x parameters of matrices x tokens, and attention over what a position "
      "may see\n"
      "  backward             %s: twice forward%s\n"
      "  computed in all      %s: with every stage once more in backward, from its saved activations\n"
      "  forward took         %.4g s, %s/s\n"
      "  backward took        %.4g s, %s/s with the second forward\n"
      "  step took            %.4g s\n"
      "  model_flops_per_second %.6g: forward and backward over the step\n",
      result.step, step_.ranks > 1 ? absl::StrFormat(" (of one rank of %d)", step_.ranks) : "",
      FormatCount(static_cast<double>(step_.parameters)), FormatCount(tokens), step_.length, Flops(forward),
      Flops(backward), backward < 2 * forward ? ", without gradients of what is frozen" : "",
      Flops(2 * forward + backward), forward_seconds, Flops(PerSecond(forward, forward_seconds)),
      backward_seconds, Flops(PerSecond(forward + backward, backward_seconds)), result.seconds, achieved);
  return text + Share(achieved);
}

std::string FlopsProfile::Top() const {
  std::vector<const Block*> order;
  for (const Block& stage : stages_) order.push_back(&stage);
  std::stable_sort(order.begin(), order.end(),
                   [](const Block* a, const Block* b) { return a->seconds() > b->seconds(); });
  order.resize(std::min(order.size(), static_cast<size_t>(config_.top_modules.value_or(1))));
  std::string text;
  for (const Block* stage : order) {
    absl::StrAppend(&text, text.empty() ? "  most time            " : ", ",
                    absl::StrFormat("%s %.4g s", stage->name, stage->seconds()));
  }
  return text.empty() ? text : text + "\n";
}

std::string FlopsProfile::Table() const {
  const double all = std::accumulate(stages_.begin(), stages_.end(), 0.0,
                                     [](double sum, const Block& stage) { return sum + stage.seconds(); });
  std::string text = absl::StrFormat("  %-16s %12s %14s %12s %12s %8s %14s\n", "stage", "parameters",
                                     "forward", "forward s", "backward s", "of time", "per second");
  for (const Block& stage : stages_) {
    absl::StrAppend(
        &text, absl::StrFormat("  %-16s %12d %14s %12.4g %12.4g %7.1f%% %14s\n", stage.name, stage.parameters,
                               Flops(stage.flops), stage.forward_seconds, stage.backward_seconds,
                               100 * PerSecond(stage.seconds(), all),
                               Flops(PerSecond(2 * stage.flops + stage.backward_flops, stage.seconds()))));
  }
  return text +
         "  (parameters of matrices that tokens are multiplied with; per second: all that is computed)\n";
}

std::string FlopsProfile::Text(const zero::StepResult& result) const {
  std::string text = Summary(result);
  if (config_.module_depth.value_or(-1) == 0) return text;
  absl::StrAppend(&text, Top());
  if (config_.detailed.value_or(true)) absl::StrAppend(&text, Table());
  return text;
}

}  // namespace penstock::tools
