#include "zero/engine/step_outcome.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/index.h"
#include "base/status_macros.h"

namespace penstock::zero {

absl::Status StepOutcome::ScaleLoss() {
  absl::StatusOr<LossScaler> scaler = LossScaler::Create(options_.optimizer.loss_scale);
  if (scaler.ok()) scaler_ = *scaler;
  return scaler.status();
}

absl::Status StepOutcome::Restore(const nlohmann::json& payload, int64_t updates, int64_t parameters) {
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
  if (options_.trains) {
    ASSIGN_OR_RETURN(missed_,
                     MissedUpdates::FromJson(payload.value("missed_updates", nlohmann::json()), parameters));
    const std::span<const int64_t> counts = missed_.counts();
    if (!counts.empty() && *std::max_element(counts.begin(), counts.end()) > updates)
      return absl::DataLossError("counts of missed updates");
  }
  updates_ = updates;
  return absl::OkStatus();
}

void StepOutcome::AddTo(nlohmann::json* payload, const Decided* step) const {
  (*payload)["schedule"] = schedule_.has_value() ? schedule_->ToJson() : nlohmann::json();
  if (!named_.empty()) (*payload)["groups"] = ToJson(named_);
  (*payload)["loss_scale"] = (step != nullptr ? step->scaler : scaler_).ToJson();
  const MissedUpdates& missed = step != nullptr ? step->missed : missed_;
  if (!missed.none()) (*payload)["missed_updates"] = missed.ToJson();
}

bool StepOutcome::ChoosesToSpeculate(const tiering::Plan& plan) const {
  const auto replayed = static_cast<double>(std::count(replayed_.begin(), replayed_.end(), true));
  const auto steps = static_cast<double>(replayed_.size());
  // As if two had been, at first; gone when as many as are remembered have told.
  const double doubt = options_.optimizer.clip > 0 ? 2 * (1 - steps / kRemembered) : 0;
  const double rate = (replayed + doubt) / std::max(1.0, steps + doubt);
  return plan.speculates && rate <= plan.worthwhile_replay_rate;
}

UpdateDecision StepOutcome::Assume(int64_t step, const GradientSums::Layouts& layouts) {
  return DecisionOf(step, /*factor=*/1.0, layouts);
}

absl::StatusOr<UpdateDecision> StepOutcome::Decide(int64_t step, const kernels::SumOfSquares& squares,
                                                   double share, std::vector<uint8_t> came,
                                                   const GradientSums::Layouts& layouts) {
  const double scale = scaler_.scale();
  const double norm = std::sqrt(squares.Value()) / scale;
  // As torch.nn.utils.clip_grad_norm_.
  const double factor =
      options_.optimizer.clip > 0 ? std::min(1.0, options_.optimizer.clip / (norm + 1e-6)) : 1.0;
  if (std::find(came.begin(), came.end(), uint8_t{0}) == came.end()) came.clear();
  const bool assumed = came == came_;
  came_ = std::move(came);
  UpdateDecision decision = DecisionOf(step, factor, layouts);
  decision.skip = !squares.Finite();
  decision.replay = decision.skip || factor < 1.0 || !assumed;
  if (!decision.skip) {
    ++updates_;
    missed_ = missed_.And(came_);
  }
  RETURN_IF_ERROR(scaler_.Update(decision.skip));
  replayed_.push_back(decision.replay);
  if (replayed_.size() > kRemembered) replayed_.pop_front();

  Decided& decided = decided_[step];
  decided.updates = updates_;
  decided.missed = missed_;
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
UpdateDecision StepOutcome::DecisionOf(int64_t step, double factor, const GradientSums::Layouts& layouts) {
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
  const double scale = factor / scaler_.scale();
  for (const GroupRates& group : groups) {
    decision.groups.push_back(MakeOptimizerStep(options_.optimizer.algorithm, group, decision.update, scale));
  }
  decision.own = OwnSteps(groups, decision.update, scale, layouts);
  return decision;
}

std::shared_ptr<const ParameterSteps> StepOutcome::OwnSteps(const std::vector<GroupRates>& groups,
                                                            int64_t update, double scale,
                                                            const GradientSums::Layouts& layouts) const {
  if (missed_.none() && came_.empty()) return nullptr;
  auto made = std::make_shared<ParameterSteps>();
  std::map<std::pair<size_t, int64_t>, int> known;  // by group, and updates missed
  size_t at = 0;                                    // of the parameters that train
  for (const auto& layout : layouts) {
    std::vector<int>& of_block = made->of.emplace_back(layout->parameters.size(), ParameterSteps::kNone);
    for (size_t p = 0; p < layout->parameters.size(); ++p) {
      if (!layout->parameters[p].trains) continue;
      const size_t number = at++;
      if (!came_.empty() && came_[number] == 0) continue;
      const size_t group = groups.size() == 1 ? 0 : At(layout->parameters[p].group);
      const int64_t missed = missed_.none() ? 0 : missed_.counts()[number];
      const auto [found, is_new] = known.try_emplace({group, missed}, static_cast<int>(made->steps.size()));
      if (is_new) {
        made->steps.push_back(
            MakeOptimizerStep(options_.optimizer.algorithm, groups[group], update - missed, scale));
      }
      of_block[p] = found->second;
    }
  }
  return made;
}

}  // namespace penstock::zero
