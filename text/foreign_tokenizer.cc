#include "text/foreign_tokenizer.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "base/directory.h"
#include "base/status_macros.h"
#include "text/strings.h"

namespace penstock::text {
namespace {

constexpr const char* kWordPiece = "vocab.txt";

// Whether a file of that name is a whole tokenizer of a form that transformers converts.
bool IsConverted(std::string_view name) {
  for (const char* const known :
       {"tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"}) {
    if (name == known) return true;
  }
  return name.ends_with(".tiktoken");
}

std::string Conversion(std::string_view directory) {
  return Cat(
      "transformers makes one (pip install transformers sentencepiece tiktoken): python3 -c \"from "
      "transformers import AutoTokenizer as T; T.from_pretrained('",
      directory, "').save_pretrained('", directory, "')\"");
}

}  // namespace

absl::StatusOr<std::string> DescribeForeignTokenizer(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectoryIfThere(directory));
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (has("tokenizer.json")) return "";
  std::string form;
  if (has("vocab.json") && has("merges.txt")) form = "vocab.json and merges.txt";
  for (const std::string& name : names) {
    if (form.empty() && IsConverted(name)) form = name;
  }
  if (!form.empty()) return Cat("has ", form, " and no tokenizer.json: ", Conversion(directory));
  return has(kWordPiece) ? "has no tokenizer.json, but a vocab.txt of WordPiece, which is not served" : "";
}

std::string DescribeForeignTokenizerFile(const std::string& path) {
  const std::string_view name = std::string_view(path).substr(path.rfind('/') + 1);
  if (name == kWordPiece) return "is a vocabulary of WordPiece, which is not served";
  if (!IsConverted(name) && name != "vocab.json" && name != "merges.txt") return "";
  return Cat("is no tokenizer.json: ", Conversion(DirectoryOf(path)), ", and give that directory");
}

}  // namespace penstock::text
