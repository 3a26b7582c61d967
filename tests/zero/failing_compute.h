// The hand-written model of examples/plain_model, one stage of which fails when it is told to.
#ifndef PENSTOCK_TESTS_ZERO_FAILING_COMPUTE_H_
#define PENSTOCK_TESTS_ZERO_FAILING_COMPUTE_H_

#include <optional>
#include <span>

#include "absl/status/status.h"
#include "plain_compute.h"

namespace penstock::zero::testing_support {

class FailingCompute final : public plain::PlainCompute {
 public:
  using PlainCompute::PlainCompute;
  std::optional<int> fails_in;  // the backward of this stage
  absl::Status Backward(const StageUse& use, std::span<const Weights> weights) override {
    if (use.stage.value() == fails_in) return absl::AbortedError("made to fail");
    return PlainCompute::Backward(use, weights);
  }
};

}  // namespace penstock::zero::testing_support

#endif  // PENSTOCK_TESTS_ZERO_FAILING_COMPUTE_H_
