#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <vector>

#include "base/check.h"
#include "base/status_macros.h"
#include "text/utf8.h"

namespace penstock::text {
namespace {

constexpr char32_t kPlanes = 0x30000;  // beyond, nothing is composed, decomposed or ordered

// Hugging Face's normalizers have the tables of Unicode 9. What is newer and would be ordered, composed or
// decomposed, up to Unicode 15 (utf8proc 2.8), is a plain character to them, and here.
struct Range {
  char32_t first, last;
};
constexpr Range kPlain[] = {
    {0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},     {0xC3C, 0xC3C},
    {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0xECE, 0xECE},     {0x1715, 0x1715},   {0x1ABF, 0x1ACE},
    {0x1DF6, 0x1DFA},   {0x32FF, 0x32FF},   {0xA7F2, 0xA7F4},   {0xA82C, 0xA82C},   {0xAB69, 0xAB69},
    {0x10780, 0x107BF}, {0x10D24, 0x10D27}, {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50},
    {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A},
    {0x11930, 0x11930}, {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0},
    {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D45}, {0x11D97, 0x11D97},
    {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1}, {0x1E030, 0x1E06D}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136},
    {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1F16C, 0x1F16C}, {0x1FBF0, 0x1FBF9},
};
bool IsPlain(utf8proc_int32_t code) {
  const auto* const range =
      std::lower_bound(std::begin(kPlain), std::end(kPlain), static_cast<char32_t>(code),
                       [](const Range& r, char32_t c) { return r.last < c; });
  return range != std::end(kPlain) && range->first <= static_cast<char32_t>(code);
}

// Appends the full decomposition of a character. The classes by which marks are ordered stand beside it.
void Decompose(char32_t code, bool compatible, std::vector<utf8proc_int32_t>& to) {
  if (IsPlain(static_cast<utf8proc_int32_t>(code))) {
    to.push_back(static_cast<utf8proc_int32_t>(code));
    return;
  }
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE |
                                                      (compatible ? UTF8PROC_COMPAT : 0));
  std::array<utf8proc_int32_t, 32> parts{};
  int last_boundary = 0;
  const utf8proc_ssize_t count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code), parts.data(),
                                                         parts.size(), options, &last_boundary);
  if (count < 0 || static_cast<size_t>(count) > parts.size()) {  // unassigned, or too long: as it is
    to.push_back(static_cast<utf8proc_int32_t>(code));
    return;
  }
  to.insert(to.end(), parts.begin(), parts.begin() + count);
}

int ClassOf(utf8proc_int32_t code) {
  const int combining = utf8proc_get_property(code)->combining_class;
  return combining != 0 && IsPlain(code) ? 0 : combining;
}

// The normal form of a few characters. utf8proc's own ordering of marks is quadratic in their number.
void NormalizeCharacters(std::string_view text, NormalForm form, std::string& to) {
  static thread_local std::vector<utf8proc_int32_t> codes;
  codes.clear();
  for (size_t at = 0; at < text.size(); at += CharacterBytes(text[at]))
    Decompose(ValidCharacter(text.substr(at)), form.compatible, codes);
  for (auto mark = codes.begin(); mark != codes.end();) {
    if (ClassOf(*mark) == 0) {
      ++mark;
      continue;
    }
    const auto end =
        std::find_if(mark, codes.end(), [](utf8proc_int32_t code) { return ClassOf(code) == 0; });
    std::stable_sort(mark, end,
                     [](utf8proc_int32_t a, utf8proc_int32_t b) { return ClassOf(a) < ClassOf(b); });
    mark = end;
  }
  auto count = static_cast<utf8proc_ssize_t>(codes.size());
  if (form.compose) {
    count = utf8proc_normalize_utf32(codes.data(), count,
                                     static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    PENSTOCK_CHECK(count >= 0, "characters that do not compose");
  }
  for (utf8proc_ssize_t i = 0; i < count; ++i)
    AppendCharacter(static_cast<char32_t>(codes[static_cast<size_t>(i)]), to);
}

// Characters that stay as they are under a normal form, whatever follows, and whatever precedes them.
class StableCharacters {
 public:
  explicit StableCharacters(NormalForm form) : unstable_(kPlanes) {
    std::vector<char32_t> seconds;
    std::vector<utf8proc_int32_t> parts;
    // What is composed with something before it is the second of a decomposition; Hangul's by rule.
    for (char32_t code = 0x80; code < kPlanes; ++code) {
      if (code >= 0xAC00 && code <= 0xD7A3) continue;
      parts.clear();
      Decompose(code, /*compatible=*/false, parts);
      for (size_t i = 1; i < parts.size(); ++i) unstable_[static_cast<size_t>(parts[i])] = true;
    }
    for (char32_t code = 0x1161; code <= 0x1175; ++code) unstable_[code] = true;
    for (char32_t code = 0x11A7; code <= 0x11C2; ++code) unstable_[code] = true;
    std::vector<bool> second = unstable_;
    std::string alone, normal;
    for (char32_t code = 0x80; code < kPlanes; ++code) {
      if (code >= 0xD800 && code <= 0xDFFF) continue;
      if (code >= 0xAC00 && code <= 0xD7A3 && form.compose) continue;
      parts.clear();
      Decompose(code, form.compatible, parts);
      if (parts.size() == 1 && parts[0] == static_cast<utf8proc_int32_t>(code)) {
        if (ClassOf(parts[0]) != 0) unstable_[code] = true;
        continue;
      }
      alone.clear();
      normal.clear();
      AppendCharacter(code, alone);
      NormalizeCharacters(alone, form, normal);
      if (alone != normal || ClassOf(parts[0]) != 0 || second[static_cast<size_t>(parts[0])])
        unstable_[code] = true;
    }
  }
  bool Has(char32_t code) const { return code < 0x80 || code >= kPlanes || !unstable_[code]; }

 private:
  std::vector<bool> unstable_;
};

template <bool compose, bool compatible>
const StableCharacters& StableTable() {
  static const auto* const table = new StableCharacters({compose, compatible});
  return *table;
}
const StableCharacters& StableUnder(NormalForm form) {
  if (form.compose) return form.compatible ? StableTable<true, true>() : StableTable<true, false>();
  return form.compatible ? StableTable<false, true>() : StableTable<false, false>();
}

// Normalizes only what is not stable, with the character before it, which may be composed with it.
void ApplyNormalForm(NormalForm form, std::string& text) {
  const StableCharacters* stable = nullptr;
  std::string result;
  size_t copied = 0;    // text before it is in `result`
  size_t previous = 0;  // where the character before `at` begins
  size_t at = 0;
  const std::string_view view = text;
  while (at < view.size()) {
    if (static_cast<unsigned char>(view[at]) < 0x80) {
      previous = at++;
      continue;
    }
    if (stable == nullptr) stable = &StableUnder(form);
    const auto is_stable = [&](size_t where) { return stable->Has(ValidCharacter(view.substr(where))); };
    if (is_stable(at)) {
      previous = at;
      at += CharacterBytes(view[at]);
      continue;
    }
    const size_t begin = std::max(previous, copied);
    size_t end = at;
    while (end < view.size() && !is_stable(end)) end += CharacterBytes(view[end]);
    result.append(view.substr(copied, begin - copied));
    NormalizeCharacters(view.substr(begin, end - begin), form, result);
    copied = previous = at = end;
  }
  if (copied == 0) return;
  result.append(view.substr(copied));
  text = std::move(result);
}

absl::Status ApplyReplace(const ReplaceText& replace, std::string& text, RegexScratch& scratch) {
  std::string result;
  size_t copied = 0;
  if (!replace.literal.empty()) {
    for (size_t at = 0; (at = text.find(replace.literal, at)) != std::string::npos; copied = at) {
      result.append(text, copied, at - copied).append(replace.with);
      at += replace.literal.size();
    }
  } else {
    RegexMatches matches(replace.pattern, text, scratch);
    while (true) {
      ASSIGN_OR_RETURN(const Regex::Match match, matches.Next());
      if (match.begin == std::string_view::npos) break;
      result.append(text, copied, match.begin - copied).append(replace.with);
      copied = match.end;
    }
  }
  if (copied == 0 && result.empty()) return absl::OkStatus();
  result.append(text, copied);
  text = std::move(result);
  return absl::OkStatus();
}

void ApplyStrip(StripSpace strip, std::string& text, bool* from_start) {
  std::string_view view = text;
  while (strip.right && !view.empty()) {
    const size_t bytes = LastCharacterBytes(view);
    if (!IsWhiteSpace(ValidCharacter(view.substr(view.size() - bytes)))) break;
    view.remove_suffix(bytes);
  }
  while (strip.left && !view.empty() && IsWhiteSpace(ValidCharacter(view))) {
    view.remove_prefix(CharacterBytes(view[0]));
    *from_start = false;
  }
  text = std::string(view);
}

void ApplyLowerCase(std::string& text) {
  std::string result;
  result.reserve(text.size());
  for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(CharacterBytes(rest[0]))) {
    const char32_t code = ValidCharacter(rest);
    if (code == 0x130) {  // the only one that becomes two
      result.append("i\xCC\x87");
    } else {
      AppendCharacter(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(code))), result);
    }
  }
  text = std::move(result);
}

absl::Status ApplyStep(const NormalizerStep& step, std::string& text, RegexScratch& scratch,
                       bool* from_start) {
  if (const auto* form = std::get_if<NormalForm>(&step)) {
    ApplyNormalForm(*form, text);
  } else if (const auto* prepend = std::get_if<PrependText>(&step)) {
    if (!text.empty()) text.insert(0, prepend->text);
  } else if (const auto* replace = std::get_if<ReplaceText>(&step)) {
    return ApplyReplace(*replace, text, scratch);
  } else if (const auto* strip = std::get_if<StripSpace>(&step)) {
    ApplyStrip(*strip, text, from_start);
  } else {
    ApplyLowerCase(text);
  }
  return absl::OkStatus();
}

}  // namespace

bool Normalizer::HasParts() const {
  bool others = false;  // behind these, characters are not those of the text
  for (const NormalizerStep& step : steps_) {
    if (std::holds_alternative<StripSpace>(step) || (others && std::holds_alternative<NormalForm>(step)))
      return false;
    const auto* const replace = std::get_if<ReplaceText>(&step);
    if (replace != nullptr && (replace->literal.empty() || replace->with.empty() ||
                               CharacterBytes(replace->literal[0]) != replace->literal.size()))
      return false;
    others = others || !std::holds_alternative<NormalForm>(step);
  }
  return true;
}

bool Normalizer::MayBeginPart(char32_t code) const {
  for (const NormalizerStep& step : steps_) {
    const auto* const form = std::get_if<NormalForm>(&step);
    if (form != nullptr && code >= 0x80 && !StableUnder(*form).Has(code)) return false;
  }
  return true;
}

absl::Status Normalizer::ApplyToPart(bool first, std::string& part, RegexScratch& scratch) const {
  for (const NormalizerStep& step : steps_) {
    if (std::holds_alternative<PrependText>(step) && !first) continue;
    bool unused = true;
    RETURN_IF_ERROR(ApplyStep(step, part, scratch, &unused));
  }
  return absl::OkStatus();
}

absl::Status Normalizer::Apply(std::string& text, RegexScratch& scratch, bool* from_start) const {
  for (const NormalizerStep& step : steps_) RETURN_IF_ERROR(ApplyStep(step, text, scratch, from_start));
  return absl::OkStatus();
}

}  // namespace penstock::text
