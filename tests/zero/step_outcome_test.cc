// When updates are made in backward, from what the last steps' norms were.
#include "zero/engine/step_outcome.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

namespace penstock::zero::step_outcome_test {
namespace {

kernels::SumOfSquares OfNorm(double norm) {
  kernels::SumOfSquares squares;
  squares.Add(norm * norm);
  return squares;
}

tiering::Plan PlanThatOffers(double worthwhile_replay_rate) {
  tiering::Plan plan;
  plan.speculates = true;
  plan.worthwhile_replay_rate = worthwhile_replay_rate;
  return plan;
}

// Steps of these norms, clipped at 1.
class Steps {
 public:
  explicit Steps(double clip = 1) {
    options_.optimizer.clip = clip;
    decisions_ = std::make_unique<StepOutcome>(options_);
  }
  StepOutcome::Decided& Add(double norm, std::vector<uint8_t> came = {}) {
    ++step_;
    assumed_ = decisions_->Assume(step_, layouts_);
    const auto decided = decisions_->Decide(step_, OfNorm(norm), 0.5, std::move(came), layouts_);
    EXPECT_TRUE(decided.ok());
    decision_ = *decided;
    return decisions_->at(step_);
  }
  // Of the last step.
  const UpdateDecision& assumed() const { return assumed_; }
  const UpdateDecision& decision() const { return decision_; }
  void Add(double norm, int steps) {
    for (int i = 0; i < steps; ++i) Add(norm);
  }
  bool Chooses(double worthwhile_replay_rate) const {
    return decisions_->ChoosesToSpeculate(PlanThatOffers(worthwhile_replay_rate));
  }
  StepOutcome& decisions() { return *decisions_; }

 private:
  // Two blocks, the second with something frozen.
  static GradientSums::Layouts Layouts() {
    GradientSums::Layouts layouts;
    for (const bool trains : {true, false}) {
      const std::vector<ParameterSpec> specs = {
          {"a", {3}}, {.name = "b", .sizes = {5}, .trains = trains}, {"c", {7}}};
      layouts.push_back(std::make_shared<const FlatLayout>(FlatLayout::Of(specs)));
    }
    return layouts;
  }

  EngineOptions options_;
  const GradientSums::Layouts layouts_ = Layouts();
  UpdateDecision assumed_, decision_;
  std::unique_ptr<StepOutcome> decisions_;
  int64_t step_ = 0;
};

constexpr int kRemembered = static_cast<int>(StepOutcome::kRemembered);

TEST(StepOutcome, ANewRunIsTakenToBeClippedUntilItsOwnStepsTell) {
  Steps steps;
  EXPECT_FALSE(steps.Chooses(0.9));
  EXPECT_TRUE(steps.Chooses(1));
  steps.Add(0.5, kRemembered - 1);
  EXPECT_FALSE(steps.Chooses(0.001)) << "some of the doubt is left";
  steps.Add(0.5);
  EXPECT_TRUE(steps.Chooses(0)) << "none is";
}

TEST(StepOutcome, TheDoubtFadesWithEveryStep) {
  Steps steps;
  int first = -1;
  for (int step = 0; step < kRemembered && first < 0; ++step) {
    if (steps.Chooses(0.1)) first = step;
    steps.Add(0.5);
  }
  EXPECT_GT(first, 2);
  EXPECT_LT(first, kRemembered);
}

TEST(StepOutcome, WithoutClippingThereIsNoDoubt) {
  Steps steps(/*clip=*/0);
  EXPECT_TRUE(steps.Chooses(0));
  steps.Add(1e6);
  EXPECT_TRUE(steps.Chooses(0)) << "nothing is clipped";
  steps.Add(std::numeric_limits<double>::infinity());
  EXPECT_FALSE(steps.Chooses(0.3)) << "a skipped step is made again too";
  EXPECT_TRUE(steps.Chooses(0.5));
}

TEST(StepOutcome, ClippedStepsEndItAndAreForgotten) {
  Steps steps;
  steps.Add(0.5, kRemembered);
  EXPECT_TRUE(steps.Chooses(0.1));
  steps.Add(2, 2);
  EXPECT_FALSE(steps.Chooses(0.1)) << "2 of 16";
  EXPECT_TRUE(steps.Chooses(0.125));
  steps.Add(0.5, kRemembered - 2);
  EXPECT_FALSE(steps.Chooses(0.1)) << "they are the oldest of those that are remembered";
  steps.Add(0.5);
  EXPECT_TRUE(steps.Chooses(0.1));
  tiering::Plan without = PlanThatOffers(1);
  without.speculates = false;
  EXPECT_FALSE(steps.decisions().ChoosesToSpeculate(without));
}

TEST(StepOutcome, ASkippedStepTakesNoNumberOfAnUpdate) {
  Steps steps;
  EXPECT_EQ(steps.Add(0.5).updates, 1);
  const StepOutcome::Decided& skipped = steps.Add(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(skipped.updates, 1);
  EXPECT_TRUE(skipped.result.skipped);
  EXPECT_TRUE(steps.decisions().last_is_replayed());
  EXPECT_EQ(steps.Add(2).updates, 2);
  EXPECT_TRUE(steps.decisions().last_is_replayed()) << "clipped";
}

// Numbers of updates by which the parameters' steps were made, -1 for none; by the bias correction of each.
std::vector<int64_t> NumbersOf(const UpdateDecision& decision) {
  std::vector<int64_t> numbers;
  for (const tiering::BlockIndex block : {tiering::BlockIndex(0), tiering::BlockIndex(1)}) {
    for (size_t p = 0; p < 3; ++p) {
      if (block.value() == 1 && p == 1) continue;  // frozen
      const int own = decision.own->of[block][p];
      int64_t number = -1;
      for (int64_t update = 1; own >= 0 && update <= decision.update; ++update) {
        const OptimizerStep made = MakeOptimizerStep(kernels::AdamOptions{}, {{.lr = 1e-3}}, update, 1.0);
        if (std::get<kernels::AdamStep>(made).sqrt_correction2 ==
            std::get<kernels::AdamStep>(decision.own->steps[static_cast<size_t>(own)]).sqrt_correction2)
          number = update;
      }
      numbers.push_back(number);
    }
  }
  return numbers;
}

TEST(StepOutcome, ParametersWithoutAGradientKeepTheirCounts) {
  using testing::ElementsAre;
  Steps steps(/*clip=*/0);
  steps.Add(1);
  EXPECT_EQ(steps.decision().own, nullptr) << "a gradient came to all";
  EXPECT_FALSE(steps.decision().replay);

  StepOutcome::Decided first = steps.Add(1, {1, 0, 1, 1, 0});
  EXPECT_EQ(steps.assumed().own, nullptr);
  EXPECT_THAT(NumbersOf(steps.decision()), ElementsAre(2, -1, 2, 2, -1));
  EXPECT_TRUE(steps.decision().replay) << "it was assumed that one came to all";
  EXPECT_THAT(first.missed.counts(), ElementsAre(0, 1, 0, 0, 1));

  steps.Add(1, {1, 0, 1, 1, 0});
  EXPECT_THAT(NumbersOf(steps.assumed()), ElementsAre(3, -1, 3, 3, -1));
  EXPECT_THAT(NumbersOf(steps.decision()), ElementsAre(3, -1, 3, 3, -1));
  EXPECT_FALSE(steps.decision().replay) << "as in the step before";

  steps.Add(std::numeric_limits<double>::infinity(), {0, 1, 1, 1, 1});
  EXPECT_TRUE(steps.decision().skip) << "which no parameter misses";
  const StepOutcome::Decided last = steps.Add(1, {1, 1, 1, 1, 1});
  EXPECT_THAT(NumbersOf(steps.decision()), ElementsAre(4, 2, 4, 4, 2));
  EXPECT_THAT(last.missed.counts(), ElementsAre(0, 2, 0, 0, 2));

  // What a commit says of either.
  nlohmann::json payload;
  steps.decisions().AddTo(&payload, &first);
  EngineOptions options;
  StepOutcome restored(options);
  ASSERT_TRUE(restored.Restore(nlohmann::json::parse(payload.dump()), 2, 5).ok());
  EXPECT_THAT(restored.missed().counts(), ElementsAre(0, 1, 0, 0, 1));
  EXPECT_EQ(restored.Restore(nlohmann::json::parse(payload.dump()), 2, 6).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(restored.Restore(nlohmann::json::parse(payload.dump()), 0, 5).code(), absl::StatusCode::kDataLoss)
      << "more than there were updates";
}

}  // namespace
}  // namespace penstock::zero::step_outcome_test
