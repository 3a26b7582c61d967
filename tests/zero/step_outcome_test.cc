// When updates are made in backward, from what the last steps' norms were.
#include "zero/engine/step_outcome.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>

namespace penstock::zero {
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
  StepOutcome::Decided& Add(double norm) {
    ++step_;
    EXPECT_TRUE(decisions_->Decide(step_, OfNorm(norm), 0.5).ok());
    return decisions_->at(step_);
  }
  void Add(double norm, int steps) {
    for (int i = 0; i < steps; ++i) Add(norm);
  }
  bool Chooses(double worthwhile_replay_rate) const {
    return decisions_->ChoosesToSpeculate(PlanThatOffers(worthwhile_replay_rate));
  }
  StepOutcome& decisions() { return *decisions_; }

 private:
  EngineOptions options_;
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

}  // namespace
}  // namespace penstock::zero
