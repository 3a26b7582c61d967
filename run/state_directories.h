// The directories of a run's state as they are written: "DIR", or "DIR=WEIGHT" with its share of the bytes.
#ifndef PENSTOCK_RUN_STATE_DIRECTORIES_H_
#define PENSTOCK_RUN_STATE_DIRECTORIES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace penstock::run {

struct StateDirectories {
  std::vector<std::string> paths;
  // The share of each in the bytes, relative to the others'. Empty: none was given.
  std::vector<double> weights;
};

// Splits "/nvme0=2" at its last "=" into a path and a weight, where a number follows and no file has the
// whole name. Beside a directory with a weight, one without has 1. kInvalidArgument: a weight that is not
// above 0 and at most 1e6, or one without a path.
absl::StatusOr<StateDirectories> ParseStateDirectories(const std::vector<std::string>& given);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_STATE_DIRECTORIES_H_
