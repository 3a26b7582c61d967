// The weights that a run's adapters go to, opened where they lie.
#ifndef PENSTOCK_TOOLS_PENSTOCK_LORA_BASE_H_
#define PENSTOCK_TOOLS_PENSTOCK_LORA_BASE_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/float16.h"
#include "models/families/family.h"
#include "models/weights/frozen_weights.h"
#include "tools/state/base_files.h"

namespace penstock::tools {

struct LoraBase {
  std::shared_ptr<models::FrozenWeights> weights;
  nlohmann::json record;  // for the run's: see RecordBase
};

// Of a new run. `checks`: the files are read once, for their checksums. kUnimplemented: why they cannot be
// read in place.
absl::StatusOr<LoraBase> OpenBase(const std::string& path, const models::LanguageModel& adapted,
                                  kernels::DType type, bool checks, bool quiet);

// Of a run that has one. `path`: where it lies now; empty: where the record says. The files are held against
// the record before any is opened: errors as of CompareBase.
absl::StatusOr<LoraBase> ReopenBase(const nlohmann::json& record, const std::string& path,
                                    const models::LanguageModel& adapted, kernels::DType type,
                                    BaseCheck check, bool quiet);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_LORA_BASE_H_
