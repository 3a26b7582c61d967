// Regular expressions as tokenizer.json writes them, for PCRE2.
//
// They are written for Oniguruma with Ruby's syntax. Most of it means the same to PCRE2; where it does not,
// the pattern is rewritten (\s, \w, \h, \v, ^ and $, which match at every line in Ruby, \u0041, {,n}, names
// of scripts) or, where it cannot be or nobody has needed it yet, refused by name ({1,3}+, which is no
// possessive there, sets within sets, named groups and references, flags but i).
//
// Texts are valid UTF-8. A Regex is immutable; any number of threads may search with one, each with a
// RegexScratch of its own.
#ifndef PENSTOCK_TEXT_REGEX_H_
#define PENSTOCK_TEXT_REGEX_H_

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace penstock::text {

// What a search needs besides the pattern; for one thread at a time.
class RegexScratch {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class Regex;
  pcre2_real_match_data_8* data_;
  pcre2_real_match_context_8* context_;
  pcre2_real_jit_stack_8* stack_;
};

class Regex {
 public:
  struct Match {
    size_t begin = 0;
    size_t end = 0;
  };

  // kInvalidArgument: no pattern, or one that is not served; says which part.
  static absl::StatusOr<Regex> Compile(std::string_view pattern);
  // Matches exactly `text`, which is not empty.
  static absl::StatusOr<Regex> Literal(std::string_view text);
  Regex(Regex&&) = default;
  Regex& operator=(Regex&&) = default;

  // The first match at or after `from`; its begin is npos where there is none. kResourceExhausted: the
  // pattern wants more steps or memory than a text is worth.
  absl::StatusOr<Match> Find(std::string_view text, size_t from, RegexScratch& scratch) const;
  // The same in the begin of a text: a match is found only if it is the same whatever follows.
  absl::StatusOr<Match> FindFinal(std::string_view text, size_t from, RegexScratch& scratch) const;
  // Whether matches depend on nothing that stands before them, and none is empty: what was matched may be
  // forgotten.
  bool LooksForwardOnly() const { return forward_only_; }

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };
  Regex() = default;
  static absl::StatusOr<Regex> CompilePcre(std::string_view pattern, unsigned options);

  std::unique_ptr<pcre2_real_code_8, Free> code_;
  absl::StatusOr<Match> Search(std::string_view text, size_t from, unsigned options,
                               RegexScratch& scratch) const;

  bool jit_ = false;
  bool forward_only_ = false;
};

// The pattern that PCRE2 is given for `pattern`. For tests.
absl::StatusOr<std::string> RewrittenForPcre(std::string_view pattern);

// All matches in turn, as Oniguruma's iterator gives them: an empty one never right behind another.
class RegexMatches {
 public:
  RegexMatches(const Regex& regex, std::string_view text, RegexScratch& scratch)
      : regex_(regex), text_(text), scratch_(scratch) {}
  // begin is npos behind the last one.
  absl::StatusOr<Regex::Match> Next();

 private:
  const Regex& regex_;
  const std::string_view text_;
  RegexScratch& scratch_;
  size_t from_ = 0;
  size_t last_end_ = std::string_view::npos;
};

}  // namespace penstock::text

#endif  // PENSTOCK_TEXT_REGEX_H_
