#include "zero/engine/step_outcome.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/status_macros.h"

namespace penstock::zero {

absl::Status StepOutcome::ScaleLoss() {
  absl::StatusOr<LossScaler> scaler = LossScaler::Create(options_.optimizer.loss_scale);
  if (scaler.ok()) scaler_ = *scaler;
  return scaler.status();
}

absl::Status StepOutcome::Restore(const nlohmann::json& payload, int64_t updates) {
  if (!payload.contains("schedule")) return absl::DataLossError("schedule");
  if (const nlohmann::json& kept = payload["schedule"]; !kept.is_null()) {
    absl::StatusOr<LrSchedule> schedule = LrSchedule::FromJson(kept);
    if (!schedule.ok()) return absl::DataLossError("schedule");
    schedule_ = *schedule;
  }
  if (options_.optimizer.new_schedule.has_value()) schedule_ = options_.optimizer.new_schedule;
  named_.clear();
  if (payload.contains("groups")) {
    ASSIGN_OR_RETURN(named_, GroupsFromJson(payload["groups"]));
  }
  if (options_.optimizer.new_groups.has_value()) named_ = *options_.optimizer.new_groups;
  if (payload.contains("loss_scale")) {
    absl::StatusOr<LossScaler> scaler = LossScaler::FromJson(payload["loss_scale"]);
    if (!scaler.ok()) return absl::DataLossError("loss scale");
    scaler_ = *scaler;
  }
  if (options_.optimizer.new_loss_scale.has_value()) {
    ASSIGN_OR_RETURN(LossScaler scaler, scaler_.With(*options_.optimizer.new_loss_scale));
    scaler_ = scaler;
  }
  updates_ = updates;
  return absl::OkStatus();
}

void StepOutcome::AddTo(nlohmann::json* payload, const Decided* step) const {
  (*payload)["schedule"] = schedule_.has_value() ? schedule_->ToJson() : nlohmann::json();
  if (!named_.empty()) (*payload)["groups"] = ToJson(named_);
  (*payload)["loss_scale"] = (step != nullptr ? step->scaler : scaler_).ToJson();
}

bool StepOutcome::ChoosesToSpeculate(const tiering::Plan& plan) const {
  const auto replayed = static_cast<double>(std::count(replayed_.begin(), replayed_.end(), true));
  const auto steps = static_cast<double>(replayed_.size());
  // As if two had been, at first; gone when as many as are remembered have told.
  const double doubt = options_.optimizer.clip > 0 ? 2 * (1 - steps / kRemembered) : 0;
  const double rate = (replayed + doubt) / std::max(1.0, steps + doubt);
  return plan.speculates && rate <= plan.worthwhile_replay_rate;
}

UpdateDecision StepOutcome::Assume(int64_t step) { return DecisionOf(step, /*factor=*/1.0); }

absl::StatusOr<UpdateDecision> StepOutcome::Decide(int64_t step, const kernels::SumOfSquares& squares,
                                                   double share) {
  const double scale = scaler_.scale();
  const double norm = std::sqrt(squares.Value()) / scale;
  // As torch.nn.utils.clip_grad_norm_.
  const double factor =
      options_.optimizer.clip > 0 ? std::min(1.0, options_.optimizer.clip / (norm + 1e-6)) : 1.0;
  UpdateDecision decision = DecisionOf(step, factor);
  decision.skip = !squares.Finite();
  decision.replay = decision.skip || factor < 1.0;
  if (!decision.skip) ++updates_;
  RETURN_IF_ERROR(scaler_.Update(decision.skip));
  replayed_.push_back(decision.replay);
  if (replayed_.size() > kRemembered) replayed_.pop_front();

  Decided& decided = decided_[step];
  decided.updates = updates_;
  decided.scaler = scaler_;
  StepResult& result = decided.result;
  result.step = step;
  result.grad_norm = norm;
  result.loss_scale = scale;
  result.skipped = decision.skip;
  result.lr = lr_;
  if (speculative_.erase(step) > 0) {
    result.speculative_share = share;
    result.replayed = decision.replay;
  }
  return decision;
}

void StepOutcome::Apply(int64_t step) {
  const auto found = decided_.find(step);
  if (found == decided_.end()) return;
  applied_ = std::move(found->second);
  decided_.erase(found);
}

// Of gradients as the loss scale left them, times `factor`.
UpdateDecision StepOutcome::DecisionOf(int64_t step, double factor) {
  std::vector<GroupRates> groups = groups_;
  if (groups.empty()) {
    groups.push_back({.rates = {.lr = LearningRate(options_.optimizer.algorithm)}});
    if (schedule_.has_value()) groups.front().rates = schedule_->At(updates_ + 1);
    groups = RatesOfGroups(groups.front(), named_);
  }
  lr_ = groups.front().rates.lr;
  UpdateDecision decision;
  decision.step = step;
  decision.update = updates_ + 1;
  decision.groups.clear();
  for (const GroupRates& group : groups) {
    decision.groups.push_back(
        MakeOptimizerStep(options_.optimizer.algorithm, group, decision.update, factor / scaler_.scale()));
  }
  return decision;
}

}  // namespace penstock::zero
