// What all ranks know of each other: a number, and how each of them fared. Every rank calls each of these, in
// the same order.
#ifndef PENSTOCK_ZERO_RANKS_AGREE_H_
#define PENSTOCK_ZERO_RANKS_AGREE_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

// Everybody's number, by rank; `what` it is (comm.h).
absl::StatusOr<std::vector<int64_t>> AllNumbers(Comm& comm, const char* what, int64_t mine);

// The same on all: OK where everybody's is, else that of the first rank that has another, which is named.
absl::Status AgreeOnStatus(Comm& comm, Channel channel, const absl::Status& mine);

// kInvalidArgument on all ranks where any of them was started with something else than rank 0: it names rank,
// key and both values.
absl::Status AgreeOnOptions(Comm& comm, const nlohmann::json& mine);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_AGREE_H_
