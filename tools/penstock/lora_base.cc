#include "tools/penstock/lora_base.h"

#include <filesystem>
#include <set>
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

// The files that hold the weights are those that were compared, and no others.
absl::Status CheckSameFiles(const models::FrozenWeights& weights, const nlohmann::json& record) {
  std::set<std::string> compared;
  for (const nlohmann::json& file : record["files"]) compared.insert(file["name"].get<std::string>());
  for (const std::string& path : weights.Paths()) {
    if (compared.erase(std::filesystem::path(path).filename()) == 0)
      return AnotherBase(path, "it was none of them");
  }
  if (compared.empty()) return absl::OkStatus();
  return AnotherBase(record["path"].get<std::string>(),
                     absl::StrCat("nothing of them is in ", *compared.begin()));
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
  RETURN_IF_ERROR(CheckSameFiles(*base.weights, base.record));
  return base;
}

}  // namespace penstock::tools
