// Adapters of low rank (LoRA): a model whose matrices W of some names are used as W + scaling * B * A. A
// [rank, in] and B [out, rank] train, everything else is frozen: of that a run keeps weights and no state.
//
//   ASSIGN_OR_RETURN(std::shared_ptr<const LanguageModel> adapted, WithLora(model, {.rank = 8}));
//
// Names, defaults and files are those of PEFT: adapter_config.json and adapter_model.safetensors.
#ifndef PENSTOCK_MODELS_FAMILIES_LORA_H_
#define PENSTOCK_MODELS_FAMILIES_LORA_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/families/family.h"
#include "models/weights/layout.h"
#include "models/weights/weight_import.h"

namespace penstock::models {

inline constexpr const char* kAdapterConfig = "adapter_config.json";
inline constexpr const char* kAdapterWeights = "adapter_model.safetensors";
inline constexpr const char* kAllLinear = "all-linear";  // as a target: every matrix but the head's

struct LoraOptions {
  int64_t rank = 8;
  double alpha = 8;  // scaling is alpha / rank
  double dropout = 0;
  // Of matrices, each a name or the end of one: "q_proj", "mlp.c_proj". Empty: the family's usual ones.
  std::vector<std::string> targets;

  double scaling() const { return alpha / static_cast<double>(rank); }
  nlohmann::json ToJson() const;
};
absl::StatusOr<LoraOptions> LoraOptionsFromJson(const nlohmann::json& json);  // what ToJson gave

// The model with adapters; its lora() has the targets sorted, "all-linear" resolved. kInvalidArgument: a
// number out of range, or a target that the model has not (names those that it has); the message begins with
// the option's name.
absl::StatusOr<std::shared_ptr<const LanguageModel>> WithLora(std::shared_ptr<const LanguageModel> base,
                                                              LoraOptions options);

// ---- PEFT's files.

// Whether a directory has an adapter_config.json.
bool IsAdapter(const std::string& directory);

struct PublishedAdapter {
  LoraOptions options;
  std::string base;  // base_model_name_or_path; empty: it says none
};
// Of a directory. kInvalidArgument: it cannot be read, or what it asks for is not computed (names the key).
absl::StatusOr<PublishedAdapter> ReadAdapterConfig(const std::string& directory);

// `base`: where the model came from; empty: unknown.
nlohmann::ordered_json AdapterConfigOf(const LanguageModel& adapted, const std::string& base);

// ---- Where things lie.

// The adapters' tensors alone, or all others; in both the blocks are the adapted model's.
ModelLayout AdaptersOf(const ModelLayout& adapted);
ModelLayout WithoutAdapters(const ModelLayout& adapted);
// What a state has that keeps nothing of what is frozen: `layout` is one of the adapted model's.
ModelLayout KeptApart(const LanguageModel& adapted, ModelLayout layout);

// Names in PEFT's files, of the matrix that is published as `matrix`.
std::string PublishedDown(const std::string& matrix);
std::string PublishedUp(const std::string& matrix);

// What elements of a block's run begin with, as zero::EngineOptions::initial_values.
using InitialElements = std::function<absl::Status(int block, int64_t first, int64_t elements, float* to)>;
// Weights from `base`, adapters from `adapter`, or where that is null as PEFT begins: A uniformly within
// 1 / sqrt(in), the same for every cut into ranges, and B zero.
InitialElements AdaptedValues(const LanguageModel& adapted, std::shared_ptr<WeightImport> base,
                              std::shared_ptr<WeightImport> adapter, uint64_t seed);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_LORA_H_
