#include "tools/generate/generation_config.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "models/data/text_sampler.h"

namespace penstock::tools {
namespace {

constexpr const char* kFile = "generation_config.json";

// Options by transformers' name.
constexpr std::pair<const char*, const char*> kFollowed[] = {
    {"temperature", "temperature"},
    {"top_k", "top_k"},
    {"top_p", "top_p"},
    {"min_p", "min_p"},
    {"repetition_penalty", "repetition_penalty"},
    {"min_new_tokens", "min_tokens"},
};

// What else changes which tokens are made; beside null, this asks for nothing.
const std::vector<std::pair<const char*, nlohmann::json>>& NotFollowed() {
  static const std::vector<std::pair<const char*, nlohmann::json>> all = {
      {"num_beams", 1},
      {"num_beam_groups", 1},
      {"penalty_alpha", 0},
      {"dola_layers", nullptr},
      {"constraints", nullptr},
      {"force_words_ids", nullptr},
      {"typical_p", 1},
      {"top_h", nullptr},
      {"epsilon_cutoff", 0},
      {"eta_cutoff", 0},
      {"no_repeat_ngram_size", 0},
      {"encoder_no_repeat_ngram_size", 0},
      {"encoder_repetition_penalty", 1},
      {"exponential_decay_length_penalty", nullptr},
      {"bad_words_ids", nullptr},
      {"sequence_bias", nullptr},
      {"suppress_tokens", nlohmann::json::array()},
      {"begin_suppress_tokens", nlohmann::json::array()},
      {"forced_bos_token_id", nullptr},
      {"forced_eos_token_id", nullptr},
      {"guidance_scale", 1},
      {"watermarking_config", nullptr},
      {"min_length", 0},
      {"max_length", 20},
      {"max_time", nullptr},
  };
  return all;
}

std::string Shown(const nlohmann::json& value) {
  constexpr size_t kMost = 60;
  std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return text.size() <= kMost ? text : absl::StrCat(text.substr(0, kMost), "...");
}

}  // namespace

std::vector<int64_t> EndsIn(const nlohmann::json& config) {
  std::vector<int64_t> ends;
  const auto end = config.find("eos_token_id");
  if (end == config.end()) return ends;
  for (const nlohmann::json& id : end->is_array() ? *end : nlohmann::json::array({*end})) {
    if (id.is_number_integer()) ends.push_back(id.get<int64_t>());
  }
  return ends;
}

absl::StatusOr<GenerationConfig> ReadGenerationConfig(const std::string& directory) {
  GenerationConfig read;
  const absl::StatusOr<nlohmann::json> config = ReadJsonObject(absl::StrCat(directory, "/", kFile));
  if (absl::IsNotFound(config.status())) return read;
  RETURN_IF_ERROR(config.status());
  read.ends = EndsIn(*config);
  std::vector<std::string> followed, left_out;
  const auto value = [&](const char* name) {
    const auto found = config->find(name);
    return found == config->end() ? nlohmann::json() : *found;
  };
  const bool samples = value("do_sample") == nlohmann::json(true);
  for (const auto& [name, option] : kFollowed) {
    const bool temperature = option == std::string_view("temperature");
    nlohmann::json given = value(name);
    if (temperature) given = samples ? (given.is_null() ? nlohmann::json(1) : given) : nlohmann::json();
    if (given.is_null()) continue;
    const models::SamplingBound& bound = models::SamplingBoundOf(option);
    const bool number = bound.whole ? given.is_number_integer() : given.is_number();
    if (!number || !bound.holds(given.get<double>())) {
      left_out.push_back(absl::StrCat(name, " ", Shown(given), " (", bound.words(), ")"));
      continue;
    }
    read.defaults.sampling[option] = given.get<double>();
    followed.push_back(absl::StrCat(option, " ", Shown(given)));
  }
  if (const nlohmann::json most = value("max_new_tokens");
      most.is_number_integer() && most.get<int64_t>() > 0) {
    read.defaults.max_tokens = most.get<int64_t>();
    followed.push_back(absl::StrCat("max_tokens ", Shown(most)));
  }
  if (const nlohmann::json stop = value("stop_strings"); !stop.is_null()) {
    for (const nlohmann::json& each : stop.is_array() ? stop : nlohmann::json::array({stop})) {
      if (each.is_string() && !each.get<std::string>().empty())
        read.defaults.stop.push_back(each.get<std::string>());
    }
    followed.push_back(absl::StrCat("stop ", Shown(stop)));
  }
  for (const auto& [name, neutral] : NotFollowed()) {
    const nlohmann::json given = value(name);
    if (!given.is_null() && given != neutral) left_out.push_back(absl::StrCat(name, " ", Shown(given)));
  }
  if (!followed.empty()) {
    read.notes.push_back(
        absl::StrCat(kFile, ": ", absl::StrJoin(followed, ", "), " where nothing else is asked for"));
  }
  if (!left_out.empty())
    read.notes.push_back(absl::StrCat(kFile, ": not followed: ", absl::StrJoin(left_out, ", ")));
  return read;
}

}  // namespace penstock::tools
