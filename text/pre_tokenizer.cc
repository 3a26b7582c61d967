#include "text/pre_tokenizer.h"

#include <algorithm>

#include "base/status_macros.h"
#include "text/strings.h"

namespace penstock::text {
namespace {

// Matches and what lies between them come in; pieces as the behaviour wants them go out.
class Joiner {
 public:
  Joiner(SplitBehavior behavior, absl::FunctionRef<absl::Status(size_t begin, size_t end)> sink)
      : behavior_(behavior), sink_(sink) {}

  absl::Status Take(size_t begin, size_t end, bool match) {
    switch (behavior_) {
      case SplitBehavior::kRemoved:
        return match ? absl::OkStatus() : sink_(begin, end);
      case SplitBehavior::kIsolated:
        return sink_(begin, end);
      case SplitBehavior::kMergedWithPrevious:
        return Join(begin, end, match, has_ && match && !last_match_);
      case SplitBehavior::kMergedWithNext:
        return Join(begin, end, match, has_ && last_match_ && !match);
      case SplitBehavior::kContiguous:
        return Join(begin, end, match, has_ && last_match_ == match);
    }
    return absl::OkStatus();
  }
  absl::Status Finish() { return has_ ? sink_(begin_, end_) : absl::OkStatus(); }

 private:
  absl::Status Join(size_t begin, size_t end, bool match, bool with_last) {
    if (!with_last) {
      RETURN_IF_ERROR(Finish());
      begin_ = begin;
    }
    has_ = true;
    end_ = end;
    last_match_ = match;
    return absl::OkStatus();
  }

  const SplitBehavior behavior_;
  const absl::FunctionRef<absl::Status(size_t begin, size_t end)> sink_;
  bool has_ = false;
  bool last_match_ = false;
  size_t begin_ = 0;
  size_t end_ = 0;
};

absl::Status Split(const SplitText& split, std::string_view text, RegexScratch& scratch,
                   absl::FunctionRef<absl::Status(size_t begin, size_t end)> sink) {
  Joiner joiner(split.behavior, sink);
  RegexMatches matches(split.pattern, text, scratch);
  size_t done = 0;
  while (true) {
    ASSIGN_OR_RETURN(const Regex::Match match, matches.Next());
    if (match.begin == std::string_view::npos) break;
    if (match.begin > done) RETURN_IF_ERROR(joiner.Take(done, match.begin, split.invert));
    RETURN_IF_ERROR(joiner.Take(match.begin, match.end, !split.invert));
    done = match.end;
  }
  if (done < text.size()) RETURN_IF_ERROR(joiner.Take(done, text.size(), split.invert));
  return joiner.Finish();
}

}  // namespace

bool PreTokenizer::HasParts() const {
  const auto* const first = steps_.empty() ? nullptr : std::get_if<SplitText>(&steps_[0]);
  if (first == nullptr || first->behavior != SplitBehavior::kIsolated || !first->pattern.LooksForwardOnly())
    return false;
  return std::none_of(steps_.begin(), steps_.end(),
                      [](const PreTokenizerStep& step) { return std::holds_alternative<Metaspace>(step); });
}

absl::StatusOr<size_t> PreTokenizer::RunPart(std::string_view piece, RegexScratch& scratch, Sink sink) const {
  const auto& split = std::get<SplitText>(steps_[0]);
  size_t done = 0;
  while (true) {
    ASSIGN_OR_RETURN(const Regex::Match match, split.pattern.FindFinal(piece, done, scratch));
    if (match.begin == std::string_view::npos) return done;
    RETURN_IF_ERROR(RunFrom(1, piece.substr(done, match.begin - done), false, scratch, sink));
    RETURN_IF_ERROR(RunFrom(1, piece.substr(match.begin, match.end - match.begin), false, scratch, sink));
    done = match.end;
  }
}

absl::Status PreTokenizer::RunFrom(size_t step, std::string_view piece, bool at_start, RegexScratch& scratch,
                                   Sink sink) const {
  if (piece.empty()) return absl::OkStatus();
  if (step == steps_.size()) return sink(piece);
  if (const auto* split = std::get_if<SplitText>(&steps_[step])) {
    return Split(*split, piece, scratch, [&](size_t begin, size_t end) {
      return RunFrom(step + 1, piece.substr(begin, end - begin), at_start && begin == 0, scratch, sink);
    });
  }
  if (std::holds_alternative<PrefixSpace>(steps_[step])) {
    if (piece.front() == ' ') return RunFrom(step + 1, piece, at_start, scratch, sink);
    std::string with_space(1, ' ');
    with_space.append(piece);
    return RunFrom(step + 1, with_space, at_start, scratch, sink);
  }
  const auto& metaspace = std::get<Metaspace>(steps_[step]);
  const std::string& replacement = metaspace.replacement;
  std::string replaced = ReplacedAll(piece, " ", replacement);
  const bool prepend = metaspace.prepend == Metaspace::Prepend::kAlways ||
                       (metaspace.prepend == Metaspace::Prepend::kFirst && at_start);
  if (prepend && !replaced.starts_with(replacement)) replaced.insert(0, replacement);
  if (!metaspace.split) return RunFrom(step + 1, replaced, at_start, scratch, sink);
  // Before every replacement: each begins a word.
  const std::string_view rest = replaced;
  for (size_t begin = 0; begin < rest.size();) {
    const size_t end = std::min(rest.find(replacement, begin + replacement.size()), rest.size());
    // A word that does not begin with a replacement may end before one that is nearer.
    const size_t nearer = rest.substr(begin).starts_with(replacement)
                              ? end
                              : std::min(rest.find(replacement, begin), rest.size());
    RETURN_IF_ERROR(
        RunFrom(step + 1, rest.substr(begin, nearer - begin), at_start && begin == 0, scratch, sink));
    begin = nearer;
  }
  return absl::OkStatus();
}

}  // namespace penstock::text
