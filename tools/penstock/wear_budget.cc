#include "tools/penstock/wear_budget.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tiering/plan/plan.h"

namespace penstock::tools {
namespace {

std::string Terabytes(double bytes) { return absl::StrFormat("%.4g TB", bytes * 1e-12); }

// Written a step by a plan under other options, by one rank; empty: there is none.
std::optional<double> WrittenUnder(const zero::EnginePlan& plan, tiering::PlanOptions options) {
  options.compares_policies = false;
  options.fixed_tiles.clear();
  const absl::StatusOr<tiering::Plan> other = tiering::MakePlan(plan.graph, options);
  if (!other.ok()) return std::nullopt;
  return static_cast<double>(other->nvme_write_bytes);
}

}  // namespace

absl::Status WearBudget::Check(double written_bytes) const {
  if (!any() || written_bytes <= bytes_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "penstock.wear_budget_tb: the run has written ", Terabytes(written_bytes), " to its drives, of ",
      Terabytes(bytes_), " that it may: raise the budget and go on with --resume"));
}

std::vector<std::string> WearBudget::Warnings(const zero::EnginePlan& plan,
                                              const zero::EngineOptions& options,
                                              const Future& future) const {
  if (!any()) return {};
  const auto ranks = static_cast<double>(options.world());
  const auto steps = static_cast<double>(future.steps), state = static_cast<double>(plan.state_bytes);
  // All but the steps.
  const double fixed = future.written_bytes + static_cast<double>(future.checkpoints) * state;
  const auto in_all = [&](double a_step) { return fixed + ranks * steps * a_step; };
  const auto a_step = static_cast<double>(plan.plan.nvme_write_bytes);
  if (in_all(a_step) <= bytes_) return {};
  std::vector<std::string> lines = {absl::StrFormat(
      "penstock.wear_budget_tb: %s will have been written by the last step, more than %s: the "
      "run will stop before; what writes less:",
      Terabytes(in_all(a_step)), Terabytes(bytes_))};
  const auto add = [&](const char* what, double bytes) {
    const char* const fits = bytes <= bytes_ ? ", which fits" : "";
    if (bytes < 0.99 * in_all(a_step))
      lines.push_back(absl::StrCat("  ", what, ": ", Terabytes(bytes), fits));
  };
  if (options.optimizer.states != kernels::StateType::k8Bit) {
    zero::EngineOptions compact = options;
    compact.optimizer.states = kernels::StateType::k8Bit;
    tiering::PlanOptions asked = plan.options;
    asked.precision = zero::FormatOf(compact).precision();
    if (const auto less = WrittenUnder(plan, asked); less.has_value())
      add("--optimizer-states 8bit, of a new run", in_all(*less));
  }
  if (plan.options.commits_every_step) {
    tiering::PlanOptions asked = plan.options;
    asked.commits_every_step = false;
    if (const auto less = WrittenUnder(plan, asked); less.has_value())
      add("penstock.durability \"checkpoint\"", in_all(*less));
  }
  if (plan.options.host_memory_budget_bytes > 0) {
    tiering::PlanOptions asked = plan.options;
    asked.host_memory_budget_bytes *= 2;
    asked.commits_every_step = false;
    if (const auto less = WrittenUnder(plan, asked); less.has_value())
      add("that, and twice the --host-memory", in_all(*less));
  }
  add("twice the --batch or --accumulate, and half the --steps", in_all(a_step / 2));
  return lines;
}

}  // namespace penstock::tools
