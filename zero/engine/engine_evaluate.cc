#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "tiering/program/program.h"
#include "zero/engine/engine_impl.h"

namespace penstock::zero {

using tiering::Op;
using tiering::Pass;

absl::StatusOr<std::vector<double>> Engine::Impl::EvaluateEach(const std::vector<Batch>& batches) {
  std::vector<double> losses;
  RETURN_IF_ERROR(ForwardAll(batches, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const std::vector<double> group, compute_->Losses());
    losses.insert(losses.end(), group.begin(), group.end());
    return absl::OkStatus();
  }));
  return losses;
}

absl::StatusOr<double> Engine::Impl::Evaluate(const std::vector<Batch>& batches) {
  ASSIGN_OR_RETURN(std::vector<double> losses, EvaluateEach(batches));
  // One by one: how many of them pass at once depends on the budget, and the sum must not.
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
}

int64_t Engine::Impl::EvaluatesAtOnce(const Batch& batch) const {
  return std::max<int64_t>(1, EvaluationRoom() / std::max<int64_t>(1, batch.elements()));
}

absl::StatusOr<std::vector<std::vector<HostTensor>>> Engine::Impl::Infer(const std::vector<Batch>& batches) {
  std::vector<std::vector<HostTensor>> outputs;
  RETURN_IF_ERROR(ForwardAll(batches, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(std::vector<std::vector<HostTensor>> group, compute_->Outputs());
    std::move(group.begin(), group.end(), std::back_inserter(outputs));
    return absl::OkStatus();
  }));
  return outputs;
}

int64_t Engine::Impl::EvaluationRoom() const {
  return std::max(1, plan_.plan.evaluate_micro_batches) * options_.example.elements();
}

absl::Status Engine::Impl::ForwardAll(const std::vector<Batch>& batches,
                                      absl::FunctionRef<absl::Status()> take) {
  RETURN_IF_ERROR(broken_);
  if (batches.empty()) return absl::InvalidArgumentError("nothing to evaluate: no batches given");
  RETURN_IF_ERROR(AbandonAhead());
  const auto tokens = [&](size_t i) { return batches[i].elements(); };
  int64_t own_bytes = 0;
  size_t n = 0;
  for (size_t from = 0; from < batches.size(); from += n) {
    int64_t taken = tokens(from);
    for (n = 1; from + n < batches.size() && taken + tokens(from + n) <= EvaluationRoom(); ++n)
      taken += tokens(from + n);
    RETURN_IF_ERROR(compute_->Begin({.step = step_, .trains = false, .loss_gradient = LossGradient()},
                                    {batches.begin() + static_cast<std::ptrdiff_t>(from),
                                     batches.begin() + static_cast<std::ptrdiff_t>(from + n)}));
    std::vector<Op> ops = builder_->Append(Pass::kEvaluate, static_cast<int>(n));
    for (const Op& op : ops) {
      if (op.lane == tiering::Lane::kRead && op.step == builder_->next_step()) own_bytes += op.bytes;
    }
    executor_->Append(std::move(ops));
    AppendPersistIfDue();
    executor_->OpenGate(++gates_);
    RETURN_IF_ERROR(executor_->RunUntilIdle());
    if (!pass_failure_.ok()) {
      lanes_->ForgetFailedPass();
      AddUsage(executor_->TakeUsage());
      return std::exchange(pass_failure_, absl::OkStatus());
    }
    RETURN_IF_ERROR(take());
  }
  const tiering::Usage usage = executor_->TakeUsage();
  AddUsage(usage);
  // The last step's updates were made on the way: theirs are the next step's to tell.
  owed_read_bytes_ += usage.bytes[static_cast<size_t>(tiering::Lane::kRead)] - own_bytes;
  owed_write_bytes_ += usage.bytes[static_cast<size_t>(tiering::Lane::kWrite)];
  const double now = lanes_->Now();
  evaluation_seconds_ += now - std::exchange(last_end_, now);
  return absl::OkStatus();
}

}  // namespace penstock::zero
