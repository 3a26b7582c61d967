// Parameters to which no gradient came in some steps: in layers that are dropped at random, experts without
// tokens, branches that are not taken.
//
// torch.optim leaves a parameter without a gradient as it is, and its count of updates with it, by which
// Adam, Adagrad, SGD's first update and LAMB go. With MissingGradients::kSkip so does the engine: a
// parameter's own count is that of the run less what it has missed.
#ifndef PENSTOCK_ZERO_COMPUTE_MISSED_UPDATES_H_
#define PENSTOCK_ZERO_COMPUTE_MISSED_UPDATES_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "tiering/plan/numbers.h"
#include "zero/compute/gradient_sums.h"

namespace penstock::zero {

// How many parameters train, of all blocks.
int64_t TrainedParameters(const GradientSums::Layouts& layouts);

// Whether states of 8 bit have a scale in common for two parameters that train.
bool ShareScales(const GradientSums::Layouts& layouts);

// How many updates each parameter has missed so far. A value: copies share what they have.
class MissedUpdates {
 public:
  // None has missed any.
  MissedUpdates() = default;

  bool none() const { return counts_ == nullptr; }
  // Of the parameters that train, block by block in the order of the layouts. Empty: all 0.
  std::span<const int64_t> counts() const {
    return counts_ == nullptr ? std::span<const int64_t>() : std::span<const int64_t>(*counts_);
  }
  // The same, and one more of each to which no gradient came (GradientSums::Came; empty: to all one came).
  MissedUpdates And(std::span<const uint8_t> came) const;

  // As a commit records it: a count, of how many parameters one behind the other, and so on; null: none.
  // MostBytes bounds its text.
  nlohmann::json ToJson() const;
  static int64_t MostBytes(int64_t parameters) { return 12 * parameters + 32; }
  // kDataLoss: it is none of as many parameters.
  static absl::StatusOr<MissedUpdates> FromJson(const nlohmann::json& json, int64_t parameters);
  static MissedUpdates Of(std::vector<int64_t> counts);

 private:
  std::shared_ptr<const std::vector<int64_t>> counts_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_MISSED_UPDATES_H_
