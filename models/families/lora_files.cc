// PEFT's adapter_config.json, read and written. A key that changes the function is served, or refused by
// name.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "models/families/lora.h"
#include "zero/config/config_json.h"
#include "zero/config/json_field.h"

namespace penstock::models {
namespace {

// Of no effect on the function: where it came from, what it was made with, and how it was initialised.
constexpr std::string_view kPassedOver[] = {
    "auto_mapping",   "base_model_name_or_path", "revision",          "inference_mode",
    "peft_version",   "megatron_core",           "qalora_group_size", "eva_config",
    "layers_pattern", "lora_ga_config",          "loftq_config",      "corda_config",
    "task_type",      "ensure_weight_tying"};

// Initialisations that leave the base's weights as they are. Others (pissa, olora, ...) change them.
bool LeavesBase(const nlohmann::json& initial) {
  return initial.is_boolean() || initial.is_null() || initial == "gaussian" || initial == "eva" ||
         initial == "orthogonal";
}

// What a key says that asks for nothing.
bool IsOff(const nlohmann::json& value) {
  return value.is_null() || value == false || value == "none" ||
         ((value.is_object() || value.is_array()) && value.empty());
}

class Reader {
 public:
  Reader(const nlohmann::json& json, const std::string& path) : json_(json), path_(path) {}

  absl::StatusOr<PublishedAdapter> Read() {
    if (json_.value("peft_type", nlohmann::json()) != "LORA")
      return Wrong("peft_type", "LORA alone is served");
    PublishedAdapter adapter;
    adapter.base = zero::JsonField<std::string>(json_, "base_model_name_or_path").value_or("");
    RETURN_IF_ERROR(Take("r", &adapter.options.rank, LoraOptions().rank));
    RETURN_IF_ERROR(Take("lora_alpha", &adapter.options.alpha, LoraOptions().alpha));
    RETURN_IF_ERROR(Take("lora_dropout", &adapter.options.dropout, LoraOptions().dropout));
    RETURN_IF_ERROR(TakeTargets(&adapter.options.targets));
    if (!LeavesBase(Value("init_lora_weights")))
      return Wrong("init_lora_weights",
                   "which changes the weights that are adapted: merge it with PEFT first");
    for (const auto& [key, value] : json_.items()) {
      constexpr std::string_view kServed[] = {
          "peft_type",     "r", "lora_alpha", "lora_dropout", "target_modules", "init_lora_weights",
          "fan_in_fan_out"};  // how matrices are kept, which the model says
      const auto is = [&key = key](std::string_view name) { return key == name; };
      if (std::any_of(std::begin(kServed), std::end(kServed), is) ||
          std::any_of(std::begin(kPassedOver), std::end(kPassedOver), is) || IsOff(value))
        continue;
      return Wrong(key.c_str(), "which is not served");
    }
    return adapter;
  }

 private:
  nlohmann::json Value(const char* key) const { return json_.contains(key) ? json_[key] : nlohmann::json(); }
  absl::Status Wrong(const char* key, const std::string& why) const {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": ", key, " is ", zero::ShowValue(Value(key)), ": ", why));
  }

  template <typename T>
  absl::Status Take(const char* key, T* to, const T& otherwise) const {
    *to = otherwise;
    if (Value(key).is_null()) return absl::OkStatus();
    const std::optional<T> value = zero::JsonField<T>(json_, key);
    if (!value.has_value()) return Wrong(key, "no such number");
    *to = *value;
    return absl::OkStatus();
  }

  absl::Status TakeTargets(std::vector<std::string>* targets) const {
    const nlohmann::json given = Value("target_modules");
    if (given.is_null()) return absl::OkStatus();  // the family's usual ones
    if (given == kAllLinear) {
      targets->assign(1, kAllLinear);
      return absl::OkStatus();
    }
    const auto names = zero::JsonAs<std::vector<std::string>>(given);
    if (!names.has_value() || names->empty())
      return Wrong("target_modules", absl::StrCat("a list of names, or \"", kAllLinear, "\", is served"));
    *targets = *names;
    return absl::OkStatus();
  }

  const nlohmann::json& json_;
  const std::string& path_;
};

}  // namespace

bool IsAdapter(const std::string& directory) {
  // What cannot be looked at counts as there: reading it says what is wrong.
  return PathExists(absl::StrCat(directory, "/", kAdapterConfig)).value_or(true);
}

absl::StatusOr<PublishedAdapter> ReadAdapterConfig(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/", kAdapterConfig);
  ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonObject(path));
  return Reader(json, path).Read();
}

nlohmann::ordered_json AdapterConfigOf(const LanguageModel& adapted, const std::string& base) {
  const LoraOptions& lora = *adapted.lora();
  bool turned = false;
  const ModelLayout layout = adapted.Layout();
  for (const PublishedTensor& tensor : layout.tensors) turned |= tensor.transposed;
  nlohmann::ordered_json json = {{"peft_type", "LORA"},
                                 {"task_type", "CAUSAL_LM"},
                                 {"base_model_name_or_path", nullptr},
                                 {"r", lora.rank},
                                 {"lora_alpha", lora.alpha},
                                 {"lora_dropout", lora.dropout},
                                 {"target_modules", lora.targets},
                                 {"fan_in_fan_out", turned},
                                 {"bias", "none"},
                                 {"inference_mode", true},
                                 {"init_lora_weights", true},
                                 {"modules_to_save", nullptr},
                                 {"layers_to_transform", nullptr},
                                 {"rank_pattern", nlohmann::ordered_json::object()},
                                 {"alpha_pattern", nlohmann::ordered_json::object()},
                                 {"use_rslora", false},
                                 {"use_dora", false}};
  if (!base.empty()) json["base_model_name_or_path"] = base;
  // As PEFT writes them: it has whole numbers there.
  if (std::floor(lora.alpha) == lora.alpha) json["lora_alpha"] = static_cast<int64_t>(lora.alpha);
  return json;
}

}  // namespace penstock::models
