#include "text/tokenizer_class.h"

#include <algorithm>
#include <array>

#include "text/strings.h"

namespace penstock::text {
namespace {

struct Registered {
  std::string_view model_type, tokenizer_class;
};
// Of the model types that are served. Of the others the named class counts.
constexpr std::array<Registered, 6> kRegistered = {{{"gpt2", "GPT2Tokenizer"},
                                                    {"qwen2", "Qwen2Tokenizer"},
                                                    {"qwen3", "Qwen2Tokenizer"},
                                                    {"mistral", ""},
                                                    {"granite", ""},
                                                    {"olmo2", ""}}};

constexpr const char* kQwen2 =
    R"(Split (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ Isolated)";
constexpr const char* kQwen35 =
    R"(Split (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ Isolated)";

struct Known {
  std::string_view tokenizer_class;
  std::vector<std::string> steps;
};

}  // namespace

std::string TokenizerClass(std::string_view named, std::string_view model_type) {
  if (named.ends_with("Fast")) named.remove_suffix(4);
  for (const Registered& known : kRegistered) {
    if (known.model_type != model_type) continue;
    // What a Qwen 2 names is passed over: it is often wrong.
    if (named.empty() || model_type == "qwen2" || known.tokenizer_class.empty())
      return std::string(known.tokenizer_class);
  }
  return std::string(named);
}

bool SetsByteLevelPrefix(std::string_view tokenizer_class) {
  constexpr std::array<std::string_view, 6> kSet = {"GPT2Tokenizer",    "CodeGenTokenizer",
                                                    "GPTNeoXTokenizer", "CohereTokenizer",
                                                    "Qwen2Tokenizer",   "Qwen3_5Tokenizer"};
  return std::find(kSet.begin(), kSet.end(), tokenizer_class) != kSet.end();
}

std::vector<std::string> StepsOfClass(std::string_view tokenizer_class, bool add_prefix_space, bool legacy) {
  const char* const metaspace = !add_prefix_space ? "never" : legacy ? "always" : "first";
  const std::array<Known, 9> known = {
      {{"LlamaTokenizer", {Cat("Metaspace ", metaspace)}},
       {"CodeLlamaTokenizer", {add_prefix_space ? "Metaspace first" : "Metaspace never"}},
       {"GemmaTokenizer", {"Replace   \u2581", "Split   MergedWithPrevious"}},
       {"GPT2Tokenizer", {"ByteLevel words"}},
       {"CodeGenTokenizer", {"ByteLevel words"}},
       {"GPTNeoXTokenizer", {"NFC", "ByteLevel words"}},
       {"CohereTokenizer", {"NFC", "Digits each", "ByteLevel words"}},
       {"Qwen2Tokenizer", {"NFC", kQwen2, "ByteLevel"}},
       {"Qwen3_5Tokenizer", {"NFC", kQwen35, "ByteLevel"}}}};
  for (const Known& each : known) {
    if (each.tokenizer_class == tokenizer_class) return each.steps;
  }
  return {};
}

}  // namespace penstock::text
