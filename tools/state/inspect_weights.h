// What `penstock inspect` says of weights: a directory that `penstock pack` wrote, or Hugging Face's, by the
// headers of its files. Needs no LibTorch.
#ifndef PENSTOCK_TOOLS_STATE_INSPECT_WEIGHTS_H_
#define PENSTOCK_TOOLS_STATE_INSPECT_WEIGHTS_H_

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::tools {

// Returns whether `path` is a directory with model.safetensors or its index, or one of these files.
absl::StatusOr<bool> HoldsWeights(const std::string& path);

// kDataLoss: a file is missing, or not what it says it is.
absl::Status InspectWeights(const std::string& path, bool json, std::ostream& out);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_STATE_INSPECT_WEIGHTS_H_
