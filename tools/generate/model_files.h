// The files of a Hugging Face directory that stand beside its weights.
#ifndef PENSTOCK_TOOLS_GENERATE_MODEL_FILES_H_
#define PENSTOCK_TOOLS_GENERATE_MODEL_FILES_H_

#include <string>

#include "absl/status/status.h"

namespace penstock::tools {

// What others need besides weights and config.json.
inline constexpr const char* kTokenizerFiles[] = {"tokenizer.json",
                                                  "tokenizer_config.json",
                                                  "special_tokens_map.json",
                                                  "generation_config.json",
                                                  "tokenizer.model",
                                                  "vocab.json",
                                                  "merges.txt",
                                                  "added_tokens.json",
                                                  "chat_template.jinja"};

// Copies those of them that `from` has into the directory `to`. Those that `to` has already stay.
absl::Status CopyTokenizer(const std::string& from, const std::string& to);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_GENERATE_MODEL_FILES_H_
