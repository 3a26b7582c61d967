// What tokenizer.json's "normalizer" does to a text before it is cut.
#ifndef PENSTOCK_TEXT_NORMALIZER_H_
#define PENSTOCK_TEXT_NORMALIZER_H_

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "text/regex.h"

namespace penstock::text {

// One of Unicode's normal forms.
struct NormalForm {
  bool compose = true;
  bool compatible = false;
};
struct PrependText {
  std::string text;  // not to an empty one
};
struct ReplaceText {
  Regex pattern;
  std::string literal;  // what the pattern is, if it is no expression
  std::string with;
};
struct StripSpace {
  bool left = true;
  bool right = true;
};
struct LowerCase {};
using NormalizerStep = std::variant<NormalForm, PrependText, ReplaceText, StripSpace, LowerCase>;

class Normalizer {
 public:
  void Add(NormalizerStep step) { steps_.push_back(std::move(step)); }
  bool empty() const { return steps_.empty(); }

  // Makes valid UTF-8 of valid UTF-8. `from_start` becomes false where something is cut off at the left.
  absl::Status Apply(std::string& text, RegexScratch& scratch, bool* from_start) const;

  // Whether a text may be normalized part by part, cut where MayBeginPart says.
  bool HasParts() const;
  bool MayBeginPart(char32_t code) const;
  // As Apply; `first`: the part is the first of its text.
  absl::Status ApplyToPart(bool first, std::string& part, RegexScratch& scratch) const;

 private:
  std::vector<NormalizerStep> steps_;
};

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_NORMALIZER_H_
