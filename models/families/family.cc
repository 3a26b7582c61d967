#include "models/families/family.h"

#include <algorithm>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "models/families/gpt.h"
#include "models/families/llama.h"
#include "models/families/lora.h"
#include "models/families/vocabulary_cut.h"
#include "zero/config/config_json.h"

namespace penstock::models {
double StageProducts::ForwardFlops(int64_t sequences, int64_t length) const {
  const auto rows = static_cast<double>(sequences), tokens = rows * static_cast<double>(length);
  const double pairs = rows * static_cast<double>(length) * static_cast<double>(length + 1) / 2;
  return 2 * static_cast<double>(parameters) * tokens + 4 * static_cast<double>(attention_width) * pairs;
}

double StageProducts::BackwardFlops(int64_t sequences, int64_t length) const {
  const double frozen = 2 * static_cast<double>(frozen_parameters) * static_cast<double>(sequences * length);
  return 2 * ForwardFlops(sequences, length) - frozen;
}

namespace {

// What reads text in a model that also looks at images.
absl::StatusOr<std::shared_ptr<const LanguageModel>> TextOfGemma3(const nlohmann::json& json,
                                                                  std::vector<std::string>* notes) {
  if (!json.contains("text_config") || !json["text_config"].is_object())
    return absl::InvalidArgumentError("model: gemma3 without an object text_config");
  nlohmann::json text = json["text_config"];
  if (text.value("model_type", nlohmann::json("gemma3_text")) != "gemma3_text")
    return absl::InvalidArgumentError("model: text_config of a gemma3 is of another model_type");
  text["model_type"] = "gemma3_text";
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"}) {
    if (json.contains(key)) text[key] = json[key];
  }
  // Whether the head is the embedding is said of the whole; its text part has no head of its own.
  text["tie_word_embeddings"] = json.value("tie_word_embeddings", nlohmann::json(true));
  if (notes != nullptr)
    notes->emplace_back("model: of gemma3 what reads and writes text is served, images are not");
  return ModelFromJson(text, notes);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const LanguageModel>> ModelFromJson(const nlohmann::json& json,
                                                                   std::vector<std::string>* notes) {
  if (json.is_object() && json.contains(kLoraKey)) {
    ASSIGN_OR_RETURN(LoraOptions lora, LoraOptionsFromJson(json[kLoraKey]));
    nlohmann::json of_base = json;
    of_base.erase(kLoraKey);
    ASSIGN_OR_RETURN(std::shared_ptr<const LanguageModel> base, ModelFromJson(of_base, notes));
    auto adapted = WithLora(std::move(base), std::move(lora));
    if (adapted.ok()) return adapted;
    return absl::InvalidArgumentError(
        absl::StrCat("model: its ", kLoraKey, ": ", std::string(adapted.status().message())));
  }
  const nlohmann::json type =
      json.is_object() ? json.value("model_type", nlohmann::json()) : nlohmann::json();
  if (type.is_string() && IsLlamaType(type.get<std::string>())) {
    ASSIGN_OR_RETURN(const LlamaConfig config, LlamaConfigFromJson(json, notes));
    return DescribeLlama(config);
  }
  if (type == "gemma3") return TextOfGemma3(json, notes);
  if (!type.is_null() && type != "gpt2") {
    return absl::InvalidArgumentError(absl::StrCat(
        "model: model_type is ", zero::ShowValue(type),
        ", none of gpt2, llama, mistral, qwen2, qwen3, smollm3, granite, olmo2, phi3, "
        "gemma2, gemma3, gemma3_text, mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe, gpt_oss, "
        "deepseek_v2, deepseek_v3"));
  }
  ASSIGN_OR_RETURN(const GptConfig config, GptConfigFromJson(json, notes));
  return DescribeGpt(config);
}

int VocabularyTiles(const LanguageModel& model) {
  return VocabularyCut(model.vocabulary(), model.tile_rows()).tiles();
}

int64_t UsualVocabularyTiles(const LanguageModel& model) {
  const LanguageModel& whole = model.base() != nullptr ? *model.base() : model;
  int64_t layer = 0, width = 0;
  for (const BlockDescription& block : whole.Blocks()) {
    if (width == 0) width = block.parameters.front().columns;  // the embedding's
    if (block.kind != "layer" && block.kind != "mixture") continue;
    int64_t parameters = 0;
    for (const ParameterDescription& parameter : block.parameters) parameters += parameter.elements();
    layer = std::max(layer, parameters);
  }
  const int64_t tiles = UsualTiles(model.vocabulary(), width, layer);
  if (tiles == 1 || model.lora() == nullptr) return tiles;
  // An adapter of the head wants all of it.
  const int64_t rows = RowsOfTiles(model.vocabulary(), tiles);
  return WithLora(whole.WithTileRows(rows), *model.lora()).ok() ? tiles : 1;
}

absl::StatusOr<std::shared_ptr<const LanguageModel>> WithVocabularyTiles(
    std::shared_ptr<const LanguageModel> model, int64_t rows) {
  if (rows < 0 || rows >= model->vocabulary()) rows = 0;
  if (model->tile_rows() == rows) return model;
  if (model->lora() == nullptr) return model->WithTileRows(rows);
  return WithLora(model->base()->WithTileRows(rows), *model->lora());
}

absl::StatusOr<std::shared_ptr<const LanguageModel>> OpenModel(const std::string& preset_or_path,
                                                               std::vector<std::string>* notes) {
  if (const std::optional<GptConfig> preset = GptPreset(preset_or_path); preset.has_value())
    return DescribeGpt(*preset);
  const auto wrong = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("model ", preset_or_path, ": ", why));
  };
  ASSIGN_OR_RETURN(const bool directory, IsDirectory(preset_or_path));
  const std::string path = directory ? absl::StrCat(preset_or_path, "/config.json") : preset_or_path;
  const absl::StatusOr<std::string> text = ReadSmallFile(path);
  if (absl::IsNotFound(text.status()) && directory) return wrong("no config.json in there");
  if (absl::IsNotFound(text.status()))
    return wrong(absl::StrCat("neither a file that can be read nor one of ", GptPresetNames()));
  if (!text.ok()) return wrong(std::string(text.status().message()));
  const absl::StatusOr<nlohmann::json> json = ParseJson(*text, path);
  if (!json.ok()) return wrong(std::string(json.status().message()));
  absl::StatusOr<std::shared_ptr<const LanguageModel>> model = ModelFromJson(*json, notes);
  if (!model.ok()) return wrong(std::string(model.status().message()));
  return model;
}

}  // namespace penstock::models
