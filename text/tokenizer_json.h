// tokenizer.json, read: a description of everything that encoding and decoding need.
#ifndef PENSTOCK_TEXT_TOKENIZER_JSON_H_
#define PENSTOCK_TEXT_TOKENIZER_JSON_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/decoder.h"
#include "text/normalizer.h"
#include "text/pre_tokenizer.h"

namespace penstock::text {

struct TokenizerParts {
  BpeModel model;
  std::vector<AddedToken> added_tokens;  // with the ids that tokenizers gives them
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Decoder decoder;
  // What the template puts before and behind a text.
  std::vector<int32_t> prefix, suffix;
  // The steps of normalizer and pre-tokenizer as text: type, pattern, what decides.
  std::vector<std::string> steps;
  bool byte_level_prefix_changed = false;
  bool prefixes_space = false;  // something puts a space before a text that has none
};

// kInvalidArgument, one line: where in the file, what stands there, what is served.
// `byte_level_prefix`: in the place of what the file says of ByteLevel's add_prefix_space.
absl::StatusOr<TokenizerParts> ParseTokenizerJson(std::string_view json,
                                                  std::optional<bool> byte_level_prefix = std::nullopt);

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_TOKENIZER_JSON_H_
