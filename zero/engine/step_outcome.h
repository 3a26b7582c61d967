// What each step's norm decides about its update: clipped or not, skipped or not, made again or not, at which
// rate; and what is kept of a step from then until its updates are committed.
//
// The norm of a step is known when its last gradient is; its updates are applied in its backward, on an
// assumption, or in the next forward, and committed after that. So up to two steps are decided and not
// committed; three where all state lives on a device and is written by way of host memory. Used by the
// engine's thread alone.
#ifndef PENSTOCK_ZERO_ENGINE_STEP_OUTCOME_H_
#define PENSTOCK_ZERO_ENGINE_STEP_OUTCOME_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/reduce.h"
#include "tiering/plan/plan.h"
#include "zero/compute/gradient_sums.h"
#include "zero/compute/missed_updates.h"
#include "zero/compute/update.h"
#include "zero/config/loss_scale.h"
#include "zero/config/lr_schedule.h"
#include "zero/engine/engine.h"

namespace penstock::zero {

class StepOutcome {
 public:
  static constexpr size_t kRemembered = 16;  // steps

  // A step whose norm is known.
  struct Decided {
    StepResult result;       // as far as the norm tells, and what the engine adds
    int64_t updates = 0;     // applied when this step's is
    LossScaler scaler;       // after it
    nlohmann::json buffers;  // as it left them (Compute::Buffers)
    MissedUpdates missed;    // likewise
  };

  // `options` outlives this.
  explicit StepOutcome(const EngineOptions& options)
      : options_(options), schedule_(options.optimizer.schedule), named_(options.optimizer.groups) {}

  // For a new run whose weights are fp16. kInvalidArgument: LossScaler::Create.
  absl::Status ScaleLoss();
  // What a commit's payload says (AddTo), and how many updates it has, of a model of so many parameters that
  // train; kDataLoss names what is not valid.
  absl::Status Restore(const nlohmann::json& payload, int64_t updates, int64_t parameters);
  // Of the run: those of its options, or those that it was resumed with.
  const std::vector<ParameterGroup>& named_groups() const { return named_; }
  // The keys "schedule", "groups", "loss_scale" and "missed_updates" of the payload of a commit of `step`;
  // null: of the run's beginning.
  void AddTo(nlohmann::json* payload, const Decided* step) const;

  // What the updates of the next step go by, for each group or one for all of them, in the place of the
  // schedule; empty: the schedule.
  void SetRates(std::vector<GroupRates> groups) { groups_ = std::move(groups); }

  // Of the newest decision: 1 but for fp16.
  double loss_scale() const { return scaler_.scale(); }
  const LossScaler& scaler() const { return scaler_; }
  int64_t updates() const { return updates_; }
  const MissedUpdates& missed() const { return missed_; }

  // Whether the next step's updates are worth making in backward: where no larger share of the last
  // kRemembered steps than the plan's worthwhile_replay_rate was clipped or skipped. A new run, whose first
  // gradients are large, is taken to be clipped until enough of its own steps tell.
  bool ChoosesToSpeculate(const tiering::Plan& plan) const;
  // They will be, in `step`; and it does not come after all.
  void Speculate(int64_t step) { speculative_.insert(step); }
  void Abandon(int64_t step) { speculative_.erase(step); }
  bool speculates(int64_t step) const { return speculative_.count(step) > 0; }
  // What updates in the backward of `step` go by: no clipping, no skip, and gradients that come to the
  // parameters to which they came in the step before.
  UpdateDecision Assume(int64_t step, const GradientSums::Layouts& layouts);

  // The norm of `step`, from the squares of its gradients as the loss scale left them. `share`: of the tiles,
  // that is updated in backward where any is. `came`: as GradientSums::Came; empty: a gradient came to all.
  // kOutOfRange: LossScaler::Update.
  absl::StatusOr<UpdateDecision> Decide(int64_t step, const kernels::SumOfSquares& squares, double share,
                                        std::vector<uint8_t> came, const GradientSums::Layouts& layouts);
  // Whether the newest decision made updates in backward wrong, or would have.
  bool last_is_replayed() const { return replayed_.back(); }

  // `step` is decided and not applied.
  bool has(int64_t step) const { return decided_.count(step) > 0; }
  Decided& at(int64_t step) { return decided_.at(step); }
  // Its updates are applied and committed.
  void Apply(int64_t step);
  // The last that was.
  const Decided& applied() const { return applied_; }

 private:
  UpdateDecision DecisionOf(int64_t step, double factor, const GradientSums::Layouts& layouts);
  // Those of parameters, where they are not all their groups'.
  std::shared_ptr<const ParameterSteps> OwnSteps(const std::vector<GroupRates>& groups, int64_t update,
                                                 double scale, const GradientSums::Layouts& layouts) const;

  const EngineOptions& options_;
  std::optional<LrSchedule> schedule_;
  std::vector<ParameterGroup> named_;
  LossScaler scaler_;
  int64_t updates_ = 0;
  MissedUpdates missed_;
  std::vector<uint8_t> came_;  // in the step that was decided last; empty: to all
  std::vector<GroupRates> groups_;
  double lr_ = 0;              // of the last decision, of its first group
  std::deque<bool> replayed_;  // of the last steps
  std::set<int64_t> speculative_;
  std::map<int64_t, Decided> decided_;
  Decided applied_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_STEP_OUTCOME_H_
