#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/regex.h"

#include <pcre2.h>

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "text/strings.h"
#include "text/utf8.h"

namespace penstock::text {
namespace {

constexpr uint32_t kMatchLimit = 50'000'000;
constexpr size_t kJitStackBytes = size_t{16} << 20;

// White_Space as ranges of a class. PCRE2's \s has U+180E besides.
constexpr std::string_view kSpace =
    R"(\x09-\x0d\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kNoSpace =
    R"(\x00-\x08\x0e-\x1f\x21-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";
// PCRE2's \w knows neither marks nor connectors but the underscore; Oniguruma's knows the fractions and
// superscripts of Latin-1 as well.
constexpr std::string_view kWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";
constexpr std::string_view kHexDigit = "0-9A-Fa-f";

absl::Status Refused(std::string_view pattern, size_t at, std::string_view what) {
  return absl::InvalidArgumentError(
      Cat("the pattern ", Quoted(pattern), " has, at byte ", at, ", ", what, ", which is not served here"));
}

// Turns a pattern from Oniguruma's language into PCRE2's, one element after the other.
class Rewriter {
 public:
  explicit Rewriter(std::string_view pattern) : pattern_(pattern) {}

  absl::StatusOr<std::string> Run() {
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      switch (c) {
        case '\\':
          RETURN_IF_ERROR(Escape(/*in_class=*/false));
          break;
        case '[':
          RETURN_IF_ERROR(Class());
          break;
        case '(':
          RETURN_IF_ERROR(Group());
          break;
        case '{':
          RETURN_IF_ERROR(Interval());
          break;
        case '^':  // both match at every line in Ruby
        case '$':
          CatTo(out_, "(?m:", std::string(1, c), ")");
          ++at_;
          break;
        default:
          Copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  bool Here(std::string_view what) const { return pattern_.substr(at_).starts_with(what); }
  void Copy(size_t bytes) {
    out_.append(pattern_.substr(at_, bytes));
    at_ += bytes;
  }
  void Put(std::string_view set, bool in_class, bool negated = false) {
    if (in_class) {
      out_.append(set);
    } else {
      CatTo(out_, negated ? "[^" : "[", set, "]");
    }
    at_ += 2;
  }

  absl::Status Escape(bool in_class) {
    if (at_ + 1 == pattern_.size()) return Refused(pattern_, at_, "a \\ at its end");
    const char c = pattern_[at_ + 1];
    if (static_cast<unsigned char>(c) >= 0x80) {  // the character itself
      ++at_;
      return absl::OkStatus();
    }
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c))) {
      Copy(2);
      return absl::OkStatus();
    }
    switch (c) {
      case 'n':
      case 'r':
      case 't':
      case 'f':
      case 'a':
      case 'e':
      case 'd':
      case 'D':
        Copy(2);
        return absl::OkStatus();
      case 'v':
        out_.append(R"(\x0b)");
        at_ += 2;
        return absl::OkStatus();
      case 's':
        Put(kSpace, in_class);
        return absl::OkStatus();
      case 'S':
        Put(in_class ? kNoSpace : kSpace, in_class, /*negated=*/true);
        return absl::OkStatus();
      case 'w':
        Put(kWord, in_class);
        return absl::OkStatus();
      case 'W':
        if (in_class) break;
        Put(kWord, in_class, /*negated=*/true);
        return absl::OkStatus();
      case 'h':
        Put(kHexDigit, in_class);
        return absl::OkStatus();
      case 'A':
      case 'z':
        if (in_class) break;
        Copy(2);
        return absl::OkStatus();
      case 'x':
      case 'u':
        return CodePoint(c);
      case 'p':
      case 'P':
        return Property(c);
      default:
        break;
    }
    return Refused(pattern_, at_, Cat("\\", std::string(1, c), in_class ? " in a set" : ""));
  }

  // \x{1F600}, \x41, \u0041
  absl::Status CodePoint(char kind) {
    const size_t begin = at_;
    std::string_view digits;
    if (kind == 'x' && pattern_.substr(at_ + 2, 1) == "{") {
      const size_t end = pattern_.find('}', at_);
      if (end == std::string_view::npos) return Refused(pattern_, begin, "\\x{ without }");
      digits = pattern_.substr(at_ + 3, end - at_ - 3);
      at_ = end + 1;
    } else {
      const size_t count = kind == 'x' ? 2 : 4;
      digits = pattern_.substr(at_ + 2, count);
      if (digits.size() != count) return Refused(pattern_, begin, "an unfinished number of a character");
      at_ += 2 + count;
    }
    uint32_t code = 0;
    bool right = !digits.empty() && digits.size() <= 6;
    for (const char digit : digits) {
      if (!absl::ascii_isxdigit(static_cast<unsigned char>(digit))) right = false;
      code = code * 16 +
             static_cast<uint32_t>(absl::ascii_isdigit(static_cast<unsigned char>(digit))
                                       ? digit - '0'
                                       : absl::ascii_tolower(static_cast<unsigned char>(digit)) - 'a' + 10);
    }
    // Two digits name a byte, not a character, in Oniguruma's UTF-8.
    if (!right || code > 0x10FFFF ||
        (digits.size() == 2 && kind == 'x' && code >= 0x80 && pattern_[begin + 2] != '{'))
      return Refused(pattern_, begin, "a number that names no character");
    CatTo(out_, "\\x{", absl::Hex(code), "}");
    return absl::OkStatus();
  }

  // A general category as it is; any other name is a script's, by the property Script alone.
  absl::Status Property(char kind) {
    const size_t begin = at_;
    const size_t end = pattern_.find('}', at_);
    if (pattern_.substr(at_ + 2, 1) != "{" || end == std::string_view::npos)
      return Refused(pattern_, begin, "\\p without a name in braces");
    std::string_view name = pattern_.substr(at_ + 3, end - at_ - 3);
    const bool caret = !name.empty() && name.front() == '^';
    if (caret) name.remove_prefix(1);
    static constexpr std::array<std::string_view, 37> kCategories = {
        "C",  "Cc", "Cf", "Cn", "Co", "Cs", "L",  "Ll", "Lm", "Lo", "Lt", "Lu", "M",
        "Mc", "Me", "Mn", "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd", "Pe", "Pf", "Pi",
        "Po", "Ps", "S",  "Sc", "Sk", "Sm", "So", "Z",  "Zl", "Zp", "Zs"};
    bool category = false;
    for (const std::string_view known : kCategories) category = category || name == known;
    bool word = name.size() > 2;
    for (const char c : name) word = word && (absl::ascii_isalpha(static_cast<unsigned char>(c)) || c == '_');
    if (!category && !word) return Refused(pattern_, begin, Cat("the property ", Quoted(name)));
    CatTo(out_, "\\", std::string(1, kind), "{", caret ? "^" : "", category ? "" : "sc:", name, "}");
    at_ = end + 1;
    return absl::OkStatus();
  }

  absl::Status Class() {
    const size_t begin = at_;
    Copy(1);
    if (Here("^")) Copy(1);
    if (Here("]")) return Refused(pattern_, at_, "a ] that is the first of a set");
    while (at_ < pattern_.size()) {
      if (Here("]")) {
        Copy(1);
        return absl::OkStatus();
      }
      if (Here("[")) return Refused(pattern_, at_, "a set in a set");
      if (Here("&&")) return Refused(pattern_, at_, "an intersection of sets");
      if (Here("\\")) {
        RETURN_IF_ERROR(Escape(/*in_class=*/true));
      } else {
        Copy(1);
      }
    }
    return Refused(pattern_, begin, "a [ without ]");
  }

  absl::Status Group() {
    if (!Here("(?") && !Here("(*")) {
      out_.append("(?:");  // what a group holds is of no use to a tokenizer
      ++at_;
      return absl::OkStatus();
    }
    for (const std::string_view known : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:", "(?-i:"}) {
      if (!Here(known)) continue;
      Copy(known.size());
      return absl::OkStatus();
    }
    return Refused(pattern_, at_, Cat("the group ", Quoted(pattern_.substr(at_, 4))));
  }

  // {1,3}, {2}, {2,}, {,3}; anything else in braces is text to both.
  absl::Status Interval() {
    const size_t end = pattern_.find('}', at_);
    const std::string_view inside =
        end == std::string_view::npos ? std::string_view() : pattern_.substr(at_ + 1, end - at_ - 1);
    bool interval = !inside.empty() && inside != ",";
    int commas = 0;
    for (const char c : inside) {
      commas += c == ',';
      interval = interval && (c == ',' || absl::ascii_isdigit(static_cast<unsigned char>(c)));
    }
    if (!interval || commas > 1) {
      out_.append("\\{");
      ++at_;
      return absl::OkStatus();
    }
    if (pattern_.substr(end + 1, 1) == "+") return Refused(pattern_, at_, "a + behind {}");
    CatTo(out_, "{", inside.front() == ',' ? "0" : "", inside, "}");
    at_ = end + 1;
    return absl::OkStatus();
  }

  const std::string_view pattern_;
  size_t at_ = 0;
  std::string out_;
};

std::string PcreError(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

RegexScratch::RegexScratch()
    : data_(pcre2_match_data_create(1, nullptr)),
      context_(pcre2_match_context_create(nullptr)),
      stack_(pcre2_jit_stack_create(32 << 10, kJitStackBytes, nullptr)) {
  PENSTOCK_CHECK(data_ != nullptr && context_ != nullptr, "no memory for a search");
  pcre2_set_match_limit(context_, kMatchLimit);
  if (stack_ != nullptr) pcre2_jit_stack_assign(context_, nullptr, stack_);
}

RegexScratch::~RegexScratch() {
  pcre2_match_data_free(data_);
  pcre2_match_context_free(context_);
  if (stack_ != nullptr) pcre2_jit_stack_free(stack_);
}

void Regex::Free::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }

absl::StatusOr<std::string> RewrittenForPcre(std::string_view pattern) { return Rewriter(pattern).Run(); }

absl::StatusOr<Regex> Regex::CompilePcre(std::string_view pattern, unsigned options) {
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  PENSTOCK_CHECK(context != nullptr, "no memory for a pattern");
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE at = 0;
  Regex regex;
  regex.code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), options,
                                  &error, &at, context));
  pcre2_compile_context_free(context);
  if (regex.code_ == nullptr) {
    return absl::InvalidArgumentError(
        Cat("PCRE2 does not take the pattern ", Quoted(pattern), ", at byte ", at, ": ", PcreError(error)));
  }
  regex.jit_ = pcre2_jit_compile(regex.code_.get(), PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD) == 0;
  uint32_t behind = 1, empty = 1;
  pcre2_pattern_info(regex.code_.get(), PCRE2_INFO_MAXLOOKBEHIND, &behind);
  pcre2_pattern_info(regex.code_.get(), PCRE2_INFO_MATCHEMPTY, &empty);
  regex.forward_only_ = behind == 0 && empty == 0 && pattern.find("\\A") == std::string_view::npos &&
                        pattern.find("(?m:^)") == std::string_view::npos;
  return regex;
}

absl::StatusOr<Regex> Regex::Compile(std::string_view pattern) {
  if (FindBroken(pattern) != std::string_view::npos)
    return absl::InvalidArgumentError(Cat("the pattern ", Quoted(pattern), " is not UTF-8"));
  ASSIGN_OR_RETURN(std::string rewritten, RewrittenForPcre(pattern));
  // Where this finds nothing at the first space of several, it finds nothing at the others: without the verb
  // each would be tried up to the last, and a megabyte of spaces would take hours.
  if (pattern == R"(\s+$)") CatTo(rewritten, "|[", kSpace, "]++(*SKIP)(*FAIL)");
  return CompilePcre(rewritten, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_UTF_CHECK);
}

absl::StatusOr<Regex> Regex::Literal(std::string_view text) {
  if (text.empty() || FindBroken(text) != std::string_view::npos)
    return absl::InvalidArgumentError(Cat("the pattern ", Quoted(text), " is empty or not UTF-8"));
  return CompilePcre(text, PCRE2_UTF | PCRE2_LITERAL | PCRE2_NO_UTF_CHECK);
}

absl::StatusOr<Regex::Match> Regex::Find(std::string_view text, size_t from, RegexScratch& scratch) const {
  return Search(text, from, 0, scratch);
}

absl::StatusOr<Regex::Match> Regex::FindFinal(std::string_view text, size_t from,
                                              RegexScratch& scratch) const {
  return Search(text, from, PCRE2_PARTIAL_HARD, scratch);
}

absl::StatusOr<Regex::Match> Regex::Search(std::string_view text, size_t from, unsigned options,
                                           RegexScratch& scratch) const {
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data() == nullptr ? "" : text.data());
  const int found = jit_ ? pcre2_jit_match(code_.get(), subject, text.size(), from, options, scratch.data_,
                                           scratch.context_)
                         : pcre2_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | options,
                                       scratch.data_, scratch.context_);
  if (found == PCRE2_ERROR_NOMATCH || found == PCRE2_ERROR_PARTIAL)
    return Match{std::string_view::npos, std::string_view::npos};
  if (found < 0) {
    return absl::ResourceExhaustedError(Cat("the tokenizer's pattern failed at byte ", from, " of a text of ",
                                            text.size(), ": ", PcreError(found),
                                            "; cut the text into shorter documents"));
  }
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(scratch.data_);
  return Match{ends[0], ends[1]};
}

absl::StatusOr<Regex::Match> RegexMatches::Next() {
  while (from_ <= text_.size()) {
    ASSIGN_OR_RETURN(const Regex::Match match, regex_.Find(text_, from_, scratch_));
    if (match.begin == std::string_view::npos) break;
    if (match.begin == match.end && match.end == last_end_) {
      from_ += from_ < text_.size() ? CharacterBytes(text_[from_]) : 1;
      continue;
    }
    from_ = last_end_ = match.end;
    return match;
  }
  from_ = text_.size() + 1;
  return Regex::Match{std::string_view::npos, std::string_view::npos};
}

}  // namespace penstock::text
