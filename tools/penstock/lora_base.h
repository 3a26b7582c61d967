// The weights that a run's adapters go to, where the run keeps nothing of them: where they lie, what their
// files were when it began, and that they still are that.
#ifndef PENSTOCK_TOOLS_PENSTOCK_LORA_BASE_H_
#define PENSTOCK_TOOLS_PENSTOCK_LORA_BASE_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/float16.h"
#include "models/family.h"
#include "models/frozen_weights.h"

namespace penstock::tools {

// Where a run's record says what its base is.
inline constexpr const char* kBaseKey = "lora_base";

struct LoraBase {
  std::shared_ptr<models::FrozenWeights> weights;
  nlohmann::json record;  // for the run's: the path, and of each file its size, time and checksum
};

// Of a new run. `checks`: the files are read once, for their checksums. kUnimplemented: why they cannot be
// read in place.
absl::StatusOr<LoraBase> OpenBase(const std::string& path, const models::LanguageModel& adapted,
                                  kernels::DType type, bool checks, bool quiet);

// Of a run that has one. `path`: where it lies now; empty: where the record says. A file whose size and time
// are the recorded ones is taken to be the same; another is read, and must have the recorded bytes.
// kFailedPrecondition names the one that has not.
absl::StatusOr<LoraBase> ReopenBase(const nlohmann::json& record, const std::string& path,
                                    const models::LanguageModel& adapted, kernels::DType type, bool quiet);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_LORA_BASE_H_
