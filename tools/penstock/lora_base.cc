#include "tools/penstock/lora_base.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "models/families/lora.h"

namespace penstock::tools {
namespace {

absl::StatusOr<std::shared_ptr<models::FrozenWeights>> Open(const std::string& path,
                                                            const models::LanguageModel& adapted,
                                                            kernels::DType type) {
  ASSIGN_OR_RETURN(
      std::unique_ptr<models::FrozenWeights> weights,
      models::FrozenWeights::Open(path, models::WithoutAdapters(adapted.Layout()), type, "--model"));
  return std::shared_ptr<models::FrozenWeights>(std::move(weights));
}

}  // namespace

absl::StatusOr<LoraBase> OpenBase(const std::string& path, const models::LanguageModel& adapted,
                                  kernels::DType type, bool checks, bool quiet) {
  LoraBase base;
  ASSIGN_OR_RETURN(base.weights, Open(path, adapted, type));
  ASSIGN_OR_RETURN(base.record, RecordBase(path, base.weights->Paths(), checks, quiet));
  return base;
}

absl::StatusOr<LoraBase> ReopenBase(const nlohmann::json& record, const std::string& path,
                                    const models::LanguageModel& adapted, kernels::DType type,
                                    BaseCheck check, bool quiet) {
  LoraBase base;
  ASSIGN_OR_RETURN(base.record, CompareBase(record, path, check, quiet));
  absl::StatusOr<std::shared_ptr<models::FrozenWeights>> weights =
      Open(base.record["path"].get<std::string>(), adapted, type);
  if (!weights.ok()) {
    return absl::Status(weights.status().code(), absl::StrCat("the weights that this run's adapters go to: ",
                                                              std::string(weights.status().message())));
  }
  base.weights = *std::move(weights);
  RETURN_IF_ERROR(CheckSameFiles(base.weights->Paths(), base.record));
  return base;
}

}  // namespace penstock::tools
