#include "run/watch/wear_budget.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tiering/plan/plan.h"

namespace penstock::run {
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

// Those that a run writes between two steps, one of them where state in memory is kept at the end.
int64_t CheckpointsBetween(const zero::EngineOptions& options, int64_t first, int64_t last, int64_t every) {
  const bool at_end =
      options.storage.checkpoints.at_end && options.storage.offload != zero::OffloadDevice::kNvme;
  const int64_t on_the_way = every > 0 ? last / every - first / every : 0;
  const bool last_is_one = every > 0 && last % every == 0;
  return on_the_way + (at_end && last > first && !last_is_one ? 1 : 0);
}

}  // namespace

absl::Status WearBudget::Check(double written_bytes) const {
  if (!any() || written_bytes <= bytes_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "penstock.wear_budget_tb: the run has written ", Terabytes(written_bytes), " to its drives, of ",
      Terabytes(bytes_), " that it may: raise the budget and go on with `resume`"));
}

std::vector<std::string> WearBudget::Warnings(const zero::EnginePlan& plan,
                                              const zero::EngineOptions& options,
                                              const Future& future) const {
  if (!any()) return {};
  const auto ranks = static_cast<double>(options.world()), state = static_cast<double>(plan.state_bytes);
  const auto steps = static_cast<double>(std::max<int64_t>(0, future.last_step - future.first_step));
  const int64_t every = options.storage.checkpoints.every;
  // With so many steps between checkpoints.
  const auto checkpointed = [&](int64_t between) {
    return state *
           static_cast<double>(CheckpointsBetween(options, future.first_step, future.last_step, between));
  };
  const auto in_all = [&](double a_step) {
    return future.written_bytes + checkpointed(every) + ranks * steps * a_step;
  };
  const auto a_step = static_cast<double>(plan.plan.nvme_write_bytes);
  if (in_all(a_step) <= bytes_) return {};
  // Checkpoints on the way count for each step alike.
  const double each = ranks * a_step + (every > 0 ? state / static_cast<double>(every) : 0);
  const double room = bytes_ - future.written_bytes;
  const double left = each > 0 ? room / each : (room > 0 ? steps : 0);
  const std::string when = left <= 0 ? "the run will stop before its next step"
                           : left >= steps
                               ? "what is kept at the end is more than is left"
                               : absl::StrFormat("the run will stop after step %d or so",
                                                 future.first_step + static_cast<int64_t>(left) + 1);
  std::vector<std::string> lines = {absl::StrFormat(
      "penstock.wear_budget_tb: %s will have been written by the last step, more than %s: %s; what writes "
      "less:",
      Terabytes(in_all(a_step)), Terabytes(bytes_), when)};
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
      add("`optimizer_states 8bit`, of a new run", in_all(*less));
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
      add(plan.options.commits_every_step ? "that, and twice the `host_memory`" : "twice the `host_memory`",
          in_all(*less));
  }
  add("twice the `batch` or `accumulate`, and half the `steps`", in_all(a_step / 2));
  if (every > 0)
    add("twice the `checkpoint_every`", in_all(a_step) - checkpointed(every) + checkpointed(2 * every));
  if (lines.size() == 1) {
    lines.front().pop_back();  // the colon
    lines.front() += " is not known: raise the budget";
  }
  return lines;
}

}  // namespace penstock::run
