// The classes of transformers 5 that make normalizer and pre-tokenizer of their own, whatever tokenizer.json
// says: here tokenizer.json is followed, as by `tokenizers` and transformers 4, and a difference is reported.
#ifndef PENSTOCK_TEXT_TOKENIZER_CLASS_H_
#define PENSTOCK_TEXT_TOKENIZER_CLASS_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::text {

// The class that AutoTokenizer of transformers 5 opens a directory with, without "Fast", by what its files
// name and the model's model_type (both may be empty). Empty: the one that follows tokenizer.json.
std::string TokenizerClass(std::string_view named, std::string_view model_type);

// Whether the class gives its ByteLevel the add_prefix_space of tokenizer_config.json.
bool SetsByteLevelPrefix(std::string_view tokenizer_class);

// The steps of the class's normalizer and pre-tokenizer, in the words of TokenizerParts::steps. Empty: those
// of tokenizer.json, or not known. The arguments are those of tokenizer_config.json.
std::vector<std::string> StepsOfClass(std::string_view tokenizer_class, bool add_prefix_space, bool legacy);

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_TOKENIZER_CLASS_H_
