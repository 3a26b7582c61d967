// A tokenizer for tests: every byte is a token of its own, with its value as id, but for a few merges; "<s>"
// and its kin come behind.
#ifndef PENSTOCK_TESTS_TEXT_BYTE_TOKENIZER_H_
#define PENSTOCK_TESTS_TEXT_BYTE_TOKENIZER_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "text/utf8.h"

namespace penstock::text {

inline constexpr int32_t kFirstSpecialId = 258;

// The text of a tokenizer.json. Ids: bytes 0 to 255, "ab" 256, "\nc" 257, then `specials` in their order.
inline std::string ByteTokenizer(const std::vector<std::string>& specials) {
  nlohmann::json vocab;
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    std::string token;
    AppendCharacter(printable ? byte : next++, token);
    vocab[token] = static_cast<int>(byte);
  }
  vocab["ab"] = 256;
  vocab["Ċc"] = 257;
  nlohmann::json added = nlohmann::json::array();
  for (size_t i = 0; i < specials.size(); ++i) {
    added.push_back({{"id", kFirstSpecialId + static_cast<int32_t>(i)},
                     {"content", specials[i]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  return nlohmann::json{
      {"added_tokens", added},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"a b", "Ċ c"}}}}}
      .dump();
}

}  // namespace penstock::text

#endif  // PENSTOCK_TESTS_TEXT_BYTE_TOKENIZER_H_
