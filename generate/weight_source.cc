#include "generate/weight_source.h"

#include <algorithm>

namespace penstock::generate {

uint64_t WeightSource::pass_bytes() const {
  uint64_t sum = 0;
  for (const WeightUnit& unit : units_) sum += unit.bytes;
  return sum;
}

uint64_t WeightSource::largest_unit_bytes() const {
  uint64_t most = 0;
  for (const WeightUnit& unit : units_) most = std::max(most, unit.bytes);
  return most;
}

uint64_t WeightSource::largest_expert_bytes() const {
  uint64_t most = 0;
  for (const WeightUnit& unit : experts_) most = std::max(most, unit.bytes);
  return most;
}

absl::Status WeightSource::StartExpert(size_t, std::byte*, aio::Priority, ExpertRead*) {
  return absl::UnimplementedError("weights: experts are read from a directory of Hugging Face's alone");
}

absl::Status WeightSource::FinishExpert(ExpertRead* read) {
  absl::Status status;
  for (size_t i = 0; i < read->started; ++i) status.Update(engine_.Wait(&read->requests[i]));
  read->started = 0;
  return status;
}

absl::Status WeightSource::Finish(UnitRead* read) {
  if (!read->pending) return absl::FailedPreconditionError("weights: no read to finish");
  read->pending = false;
  if (read->store == nullptr) return engine_.Wait(&read->request);
  absl::Status status = read->store->Wait(&read->tile);
  if (status.ok()) status = read->store->VerifyRead(read->tile);
  return status;
}

}  // namespace penstock::generate
