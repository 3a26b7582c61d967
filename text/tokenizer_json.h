// tokenizer.json, read: a description of everything that encoding and decoding need.
#ifndef PENSTOCK_TEXT_TOKENIZER_JSON_H_
#define PENSTOCK_TEXT_TOKENIZER_JSON_H_

#include <cstdint>
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
};

// kInvalidArgument, one line: where in the file, what stands there, what is served.
absl::StatusOr<TokenizerParts> ParseTokenizerJson(std::string_view json);

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_TOKENIZER_JSON_H_
