// What the files beside tokenizer.json add to it: tokenizer_config.json, and where that has no
// added_tokens_decoder the older special_tokens_map.json and added_tokens.json. Read as transformers 5 reads
// them.
#ifndef PENSTOCK_TEXT_TOKENIZER_CONFIG_H_
#define PENSTOCK_TEXT_TOKENIZER_CONFIG_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "text/added_tokens.h"
#include "text/tokenizer_json.h"

namespace penstock::text {

struct TokenizerConfig {
  // Tokens that tokenizer.json must have, in the order in which the missing ones are appended.
  // `id`: the one that the file gives; -1: none.
  std::vector<AddedToken> tokens;
  absl::flat_hash_set<std::string> named;  // those of them that are special by their names: eos_token, ...
  bool from_added_tokens_json = false;     // those with ids are added_tokens.json's
  std::optional<std::string> bos, eos, unk, pad;
  std::optional<bool> add_bos_token, add_eos_token;
  // The class that transformers opens the directory with; empty: the one that follows tokenizer.json. What
  // it cuts texts by, if that is its own.
  std::string tokenizer_class;
  std::vector<std::string> class_steps;
  // Of ByteLevel, in the place of tokenizer.json's: by the classes of tokenizers that make one of their own.
  std::optional<bool> byte_level_prefix;
  std::optional<bool> add_prefix_space;  // as the file has it
};

// Of a directory; files that are missing say nothing. kInvalidArgument, one line: the file, the key, and what
// is wrong or not served.
absl::StatusOr<TokenizerConfig> ReadTokenizerConfig(const std::string& directory);

// Adds config.tokens to parts->added_tokens: one that is there takes over the new properties, one of the
// vocabulary keeps its id, and others get the ids behind the last.
struct AddedByConfig {
  bool any = false;                // a token was added or changed
  std::vector<std::string> notes;  // a line for each thing that `config` says and that is not followed
};
AddedByConfig AddTokens(const TokenizerConfig& config, TokenizerParts* parts);

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_TOKENIZER_CONFIG_H_
