// generation_config.json, as transformers reads it: the tokens that end a text, and what texts are made with
// where nothing else is asked for.
#ifndef PENSTOCK_TOOLS_GENERATE_GENERATION_CONFIG_H_
#define PENSTOCK_TOOLS_GENERATE_GENERATION_CONFIG_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace penstock::tools {

// Of the options of models::SamplingOptions, by name, those that it gives; temperature only with "do_sample".
struct GenerationDefaults {
  std::map<std::string, double, std::less<>> sampling;
  std::optional<int64_t> max_tokens;
  std::vector<std::string> stop;

  std::optional<double> Of(std::string_view name) const {
    const auto found = sampling.find(name);
    return found == sampling.end() ? std::nullopt : std::optional<double>(found->second);
  }
};

struct GenerationConfig {
  std::vector<int64_t> ends;  // of "eos_token_id"; empty: it names none
  GenerationDefaults defaults;
  std::vector<std::string> notes;  // what it changes, and what of it is not followed: a line each
};

// Of a directory; nothing where it has no such file. Errors: as ReadJsonObject (base/json.h).
absl::StatusOr<GenerationConfig> ReadGenerationConfig(const std::string& directory);

// "eos_token_id" of an object: a number, or a list of them.
std::vector<int64_t> EndsIn(const nlohmann::json& config);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_GENERATE_GENERATION_CONFIG_H_
