#include "models/families/model_keys.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "models/weights/scaled_weights.h"
#include "zero/config/config_json.h"
#include "zero/config/nearest_name.h"

namespace penstock::models {
namespace {

// Keys that do not change the function: of tokenizers, of generation, of other heads than the language
// model's, of files and of transformers itself, in this and former releases.
const std::vector<std::string_view>& OtherKeys() {
  static const auto& keys = *new std::vector<std::string_view>{
      "architecture", "architectures",
      // tokens
      "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
      "forced_bos_token_id", "forced_eos_token_id", "tokenizer_class", "prefix", "bad_words_ids",
      // other heads
      "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
      "summary_use_proj", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
      "task_specific_params", "is_decoder", "is_encoder_decoder", "cross_attention_hidden_size",
      // how it is run and kept
      "use_cache", "torch_dtype", "dtype", "torchscript", "use_bfloat16", "tf_legacy_loss",
      "transformers_version", "gradient_checkpointing", "attn_implementation", "output_past",
      "output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate",
      "chunk_size_feed_forward", "auto_map",
      // generation
      "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
      "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
      "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences",
      "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
      "begin_suppress_tokens"};
  return keys;
}

// Some letters apart, or one of the names that people use for what `of` is.
bool IsMisspelt(const std::string& key, const std::string& of, std::span<const KeyAlias> meant) {
  for (const KeyAlias& alias : meant) {
    if (key == alias.name && of == alias.of) return true;
  }
  return zero::EditDistance(key, of) <= 2;
}

bool Among(const std::vector<std::string_view>& names, std::string_view key) {
  return std::find(names.begin(), names.end(), key) != names.end();
}

}  // namespace

const nlohmann::json* ModelKeys::Find(const char* key) const {
  const auto it = json_.find(NameOf(key));
  return it == json_.end() || it->is_null() ? nullptr : &*it;
}

bool ModelKeys::IsNull(const char* key) const {
  const auto it = json_.find(key);
  return it != json_.end() && it->is_null();
}

const char* ModelKeys::NameOf(const char* key) const {
  const auto there = [this](const char* name) { return json_.contains(name) && !json_[name].is_null(); };
  for (const KeyAlias& alias : aliases_) {
    if (std::string_view(alias.of) == key && !there(key) && there(alias.name)) return alias.name;
  }
  return key;
}

void ModelKeys::Whole(const char* key, int64_t* value) {
  const nlohmann::json* given = Find(key);
  if (given == nullptr) return;
  const bool fits = given->is_number_integer() &&
                    !(given->is_number_unsigned() && given->get<uint64_t>() > uint64_t{1} << 62);
  if (!fits) return Wrong(key, "not a whole number");
  *value = given->get<int64_t>();
}

void ModelKeys::Needed(const char* key, int64_t* value) {
  if (Find(key) == nullptr) return Fail(absl::StrCat("model: ", key, " is missing"));
  Whole(key, value);
}

void ModelKeys::Number(const char* key, double* value) {
  const nlohmann::json* given = Find(key);
  if (given == nullptr) return;
  if (!given->is_number()) return Wrong(key, "not a number");
  *value = given->get<double>();
}

void ModelKeys::Switch(const char* key, bool* value) {
  const nlohmann::json* given = Find(key);
  if (given == nullptr) return;
  if (!given->is_boolean()) return Wrong(key, "neither true nor false");
  *value = given->get<bool>();
}

void ModelKeys::Wrong(const char* key, const std::string& what) {
  Fail(absl::StrCat("model: ", NameOf(key), " is ", zero::ShowValue(*Find(key)), ", ", what));
}

void ModelKeys::LookAtUnknown(const std::vector<std::string_view>& of_function,
                              const std::vector<std::string_view>& others, std::span<const KeyAlias> meant,
                              std::vector<std::string>* notes) {
  std::vector<std::string_view> known = of_function;
  known.insert(known.end(), OtherKeys().begin(), OtherKeys().end());
  known.insert(known.end(), others.begin(), others.end());
  for (const KeyAlias& alias : aliases_) {
    known.emplace_back(alias.name);
    const nlohmann::json* given = Find(alias.name);
    const nlohmann::json* of = Find(alias.of);
    if (given == nullptr || of == nullptr || *given == *of) continue;
    Wrong(alias.name, absl::StrCat("and ", alias.of, " is ", zero::ShowValue(*of),
                                   ", which is the same thing: leave one of them out"));
  }
  std::vector<std::string> unknown;
  for (const auto& [key, value] : json_.items()) {
    // Those of transformers' own bookkeeping begin with an underscore: "_name_or_path".
    if (Among(known, key) || key.starts_with('_')) continue;
    // Nobody means anything by null. Whole words that are added or left out make another key, not a misspelt
    // one: "model_name" is not "model_type".
    if (value.is_null()) continue;
    const std::optional<std::string> nearest = zero::NearestName(key, known);
    if (nearest.has_value() && Among(of_function, *nearest) && IsMisspelt(key, *nearest, meant)) {
      Fail(absl::StrCat("model: unknown key ", zero::ShowValue(key), " (did you mean \"", *nearest, "\"?)"));
    }
    unknown.push_back(zero::ShowValue(key));
  }
  if (notes == nullptr || unknown.empty()) return;
  notes->push_back(absl::StrCat("model: unknown keys, of no effect: ", absl::StrJoin(unknown, ", ")));
}

void ModelKeys::RefuseOtherForms() {
  const nlohmann::json* given = Find("pruned_heads");
  if (given != nullptr && !given->empty())
    Wrong("pruned_heads", "which is not served: train from whole weights in fp32, bf16 or fp16");
  Quantization quantization;
  if (const absl::Status read = ReadQuantization(json_, &quantization); !read.ok())
    Fail(std::string(read.message()));
}

absl::Status CheckSize(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("model: ", name, " is ", value, ", not between 1 and ", most));
}

}  // namespace penstock::models
