// Tokenizers of another form in the place of a tokenizer.json: what they are, and how they are converted.
#ifndef PENSTOCK_TEXT_FOREIGN_TOKENIZER_H_
#define PENSTOCK_TEXT_FOREIGN_TOKENIZER_H_

#include <string>

#include "absl/status/statusor.h"

namespace penstock::text {

// What a directory has that has no tokenizer.json, as a predicate ("has tokenizer.model, ... and no
// tokenizer.json: ..."). Empty: it has one, or no other form that is known. Errors: it cannot be listed.
absl::StatusOr<std::string> DescribeForeignTokenizer(const std::string& directory);

// What a file of that name is, if it is a tokenizer of another form. Empty: none that is known.
std::string DescribeForeignTokenizerFile(const std::string& path);

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_FOREIGN_TOKENIZER_H_
