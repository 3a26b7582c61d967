// How a text is cut into words: tokenizer.json's "pre_tokenizer".
#ifndef PENSTOCK_TEXT_PRE_TOKENIZER_H_
#define PENSTOCK_TEXT_PRE_TOKENIZER_H_

#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "text/regex.h"

namespace penstock::text {

// What becomes of the matches of a pattern, and of the text between them (tokenizers' names).
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct SplitText {
  Regex pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // the text between the matches counts as the matches
};
// A space before every piece that has none.
struct PrefixSpace {};
struct Metaspace {
  enum class Prepend { kFirst, kNever, kAlways };
  std::string replacement;  // one character, for spaces
  Prepend prepend = Prepend::kAlways;
  bool split = true;  // before every replacement
};
using PreTokenizerStep = std::variant<SplitText, PrefixSpace, Metaspace>;

class PreTokenizer {
 public:
  using Sink = absl::FunctionRef<absl::Status(std::string_view word)>;

  void Add(PreTokenizerStep step) { steps_.push_back(std::move(step)); }

  // Hands every word to `sink`, in turn; none is empty. `at_start`: the piece stands where the whole text
  // begins.
  absl::Status Run(std::string_view piece, bool at_start, RegexScratch& scratch, Sink sink) const {
    return RunFrom(0, piece, at_start, scratch, sink);
  }

  // Whether a piece may come part by part: its first step is a pattern whose matches stand alone, and no
  // later one asks where a word stands.
  bool HasParts() const;
  // Hands on the words that are certain whatever follows `piece`, and gives the bytes that they take.
  absl::StatusOr<size_t> RunPart(std::string_view piece, RegexScratch& scratch, Sink sink) const;

  bool empty() const { return steps_.empty(); }
  // The only step, if that is a Metaspace that does not split.
  const Metaspace* OnlyMetaspace() const {
    const auto* const only = steps_.size() == 1 ? std::get_if<Metaspace>(&steps_[0]) : nullptr;
    return only != nullptr && !only->split ? only : nullptr;
  }

 private:
  absl::Status RunFrom(size_t step, std::string_view piece, bool at_start, RegexScratch& scratch,
                       Sink sink) const;

  std::vector<PreTokenizerStep> steps_;
};

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_PRE_TOKENIZER_H_
