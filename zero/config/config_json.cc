#include "zero/config/config_json.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace penstock::zero {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kSpace = " \t\n";                         // between tokens; "\r" has become "\n"
constexpr std::string_view kStripped = " \t\n\v\f\x1c\x1d\x1e\x1f";  // from the ends of bare words
constexpr std::string_view kPunctuators = "{}[],:";
constexpr size_t kDeepestIndent = 4096;  // so that many texts on one long line are not as many walks over it

// As Python opens a text: every kind of line end is "\n".
std::string WithPlainLineEnds(std::string_view text) {
  std::string plain;
  plain.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\r') {
      plain += text[i];
    } else if (i + 1 == text.size() || text[i + 1] != '\n') {
      plain += '\n';
    }
  }
  return plain;
}

bool IsUtf8(const std::string& text) {
  try {
    (void)Json(text).dump();
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

std::string_view Strip(std::string_view text) {
  const size_t first = text.find_first_not_of(kStripped);
  if (first == std::string_view::npos) return "";
  return text.substr(first, text.find_last_not_of(kStripped) - first + 1);
}

// A number as JSON writes it, followed by blanks to the end of `text`.
std::optional<Json> NumberOf(std::string_view text) {
  text = text.substr(0, text.find_last_not_of(" \t") + 1);
  size_t at = 0;
  const auto digits = [&] {
    const size_t from = at;
    while (at < text.size() && absl::ascii_isdigit(static_cast<unsigned char>(text[at]))) ++at;
    return at - from;
  };
  const auto take = [&](char c) { return at < text.size() && text[at] == c ? (++at, true) : false; };
  take('-');
  if (!take('0') && digits() == 0) return std::nullopt;
  const size_t whole = at;
  if (take('.') && digits() == 0) return std::nullopt;
  if (take('e') || take('E')) {
    if (!take('+')) take('-');
    if (digits() == 0) return std::nullopt;
  }
  if (at != text.size()) return std::nullopt;
  if (whole == text.size()) {
    int64_t value = 0;
    if (absl::SimpleAtoi(absl::string_view(text.data(), text.size()), &value)) return Json(value);
  }
  double value = 0;
  if (!absl::SimpleAtod(absl::string_view(text.data(), text.size()), &value)) return std::nullopt;
  return Json(value);
}

// Reads as Python's hjson 3.1 does (hjson/decoder.py), which DeepSpeed opens its files with; the names are
// those of the syntax, https://hjson.github.io. A failure is kept in error_, and every loop ends with it.
class Reader {
 public:
  explicit Reader(std::string text) : text_(std::move(text)) {}

  absl::StatusOr<Json> Root() {
    if (Starts("\xef\xbb\xbf")) at_ = 3;
    Json value;
    if (Peek() == kEnd) {
      Fail("there is nothing in it");
    } else if (!error_.empty()) {
    } else if (text_[at_] == '{' || text_[at_] == '[') {
      value = Value();
    } else {
      const size_t begin = at_;
      value = Members(/*braces=*/false);
      if (!error_.empty()) {
        // A single value, which is no configuration; else what is wrong with the members counts.
        Reader alone(text_);
        alone.at_ = begin;
        Json single = alone.Value();
        if (alone.error_.empty() && alone.Peek() == kEnd) return single;
      }
    }
    if (error_.empty() && Peek() != kEnd) Fail("there is more behind the end of the object");
    if (!error_.empty()) return absl::InvalidArgumentError(error_);
    return value;
  }

 private:
  static constexpr int kEnd = -1;

  int Char(size_t at) const { return at < text_.size() ? static_cast<unsigned char>(text_[at]) : kEnd; }
  bool Starts(std::string_view with) const { return std::string_view(text_).substr(at_).starts_with(with); }

  void Fail(const std::string& what) { FailAt(at_, what); }
  void FailAt(size_t at, const std::string& what) {
    if (!error_.empty()) return;
    at = std::min(at, text_.size());
    const std::string_view before = std::string_view(text_).substr(0, at);
    const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
    error_ = absl::StrCat("not JSON: line ", 1 + std::count(before.begin(), before.end(), '\n'), ", column ",
                          at - line_start + 1, ": ", what);
    at_ = text_.size();
  }
  // What concerns a key rather than the syntax.
  void FailAtKey(const std::string& what) {
    if (!error_.empty()) return;
    std::string path;
    for (const std::string& key : keys_) absl::StrAppend(&path, path.empty() ? "" : ".", Printable(key));
    error_ = absl::StrCat(Printable(path, 200), ": ", what);
    at_ = text_.size();
  }

  // Skips blanks and comments; the character that follows, which stays.
  int Peek() {
    for (;;) {
      at_ = std::min(text_.find_first_not_of(kSpace, at_), text_.size());
      if (Starts("#") || Starts("//")) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (Starts("/*")) {
        const size_t end = text_.find("*/", at_ + 2);
        if (end == std::string::npos) {
          Fail("a comment without an end");
          return kEnd;
        }
        at_ = end + 2;
      } else {
        return Char(at_);
      }
    }
  }

  Json Value() {
    if (++values_ > kMostJsonValues) {
      FailAtKey(absl::StrCat("more than ", kMostJsonValues, " values"));
      return {};
    }
    switch (Char(at_)) {
      case '"':
        return Quoted();
      case '\'':
        return Starts("'''") ? Json(MultiLine()) : Json(Quoted());
      case '{':
      case '[': {
        const bool object = text_[at_] == '{';
        if (++depth_ > kDeepestJson) {
          FailAtKey(absl::StrCat("nested deeper than ", kDeepestJson, " levels"));
          return {};
        }
        ++at_;
        Json value = object ? Members(/*braces=*/true) : Elements();
        --depth_;
        return value;
      }
      default:
        return Bare();
    }
  }

  Json Members(bool braces) {
    Json object = Json::object();
    if (braces && Peek() == '}') {
      ++at_;
      return object;
    }
    while (error_.empty()) {
      keys_.push_back(Key());
      if (error_.empty() && Peek() != ':') Fail("a \":\" is missing");
      if (!error_.empty()) break;
      ++at_;
      Peek();
      Json value = Value();
      if (error_.empty() && object.contains(keys_.back()))
        FailAtKey("given twice in one object; keep one of them");
      if (!error_.empty()) break;
      object[keys_.back()] = std::move(value);
      keys_.pop_back();
      if (Peek() == ',') {
        ++at_;
        Peek();
      }
      if (!braces && Char(at_) == kEnd) break;
      if (braces && Char(at_) == '}') {
        ++at_;
        break;
      }
    }
    return object;
  }

  Json Elements() {
    Json array = Json::array();
    if (Peek() == ']') {
      ++at_;
      return array;
    }
    while (error_.empty()) {
      array.push_back(Value());
      if (Peek() == ',') {
        ++at_;
        Peek();
      }
      if (Char(at_) == ']') {
        ++at_;
        break;
      }
    }
    return array;
  }

  // A key without quotes has no blanks in it, but may have some behind it.
  std::string Key() {
    const int first = Peek();
    if (first == '"' || first == '\'') return Quoted();
    const size_t begin = at_;
    const size_t end = text_.find_first_of("{}[],:", begin);
    if (end == std::string::npos) {
      Fail("a key without a \":\"");
      return "";
    }
    if (text_[end] != ':') {
      FailAt(end, absl::StrCat("\"", text_.substr(end, 1), "\" where a key is expected"));
      return "";
    }
    const std::string_view key = Strip(std::string_view(text_).substr(begin, end - begin));
    if (key.empty() || key.find_first_of(kSpace) != std::string_view::npos) {
      Fail(key.empty() ? "\":\" without a key" : "a key with blanks in it needs quotes");
      return "";
    }
    at_ = end;
    return std::string(key);
  }

  // null, true, false or a number, up to what ends one; else a text up to the end of the line, whatever is in
  // it.
  Json Bare() {
    const size_t begin = at_;
    if (Char(begin) == kEnd || kPunctuators.find(text_[begin]) != std::string_view::npos) {
      Fail("a value is missing");
      return {};
    }
    // Only up to the first of what ends one can it be one: none of them has such characters in it.
    for (bool first = true; error_.empty(); ++at_) {
      const int c = Char(at_);
      const bool line_ends = c == kEnd || c == '\n';
      if (!line_ends && c != ',' && c != '}' && c != ']' && c != '#' && !Starts("//") && !Starts("/*"))
        continue;
      const std::string_view so_far = std::string_view(text_).substr(begin, at_ - begin);
      const std::string_view word = Strip(so_far);
      if (!std::exchange(first, false)) {
        if (line_ends) return std::string(word);
        continue;
      }
      if (word == "null") return nullptr;
      if (word == "true") return true;
      if (word == "false") return false;
      if (std::optional<Json> number = NumberOf(so_far); number.has_value()) {
        if (number->is_number_float() && !std::isfinite(number->get<double>())) {
          FailAt(begin, absl::StrCat("the number ", Printable(word), " is too large"));
        }
        return *number;
      }
      if (line_ends) return std::string(word);
    }
    return {};
  }

  std::string Quoted() {
    const size_t begin = at_;
    const char quote = text_[at_++];
    std::string value;
    while (error_.empty()) {
      const int c = Char(at_);
      if (c == kEnd) {
        FailAt(begin, "a string without an end");
      } else if (c == quote) {
        ++at_;
        return value;
      } else if (c < 0x20) {
        Fail("a string with a control character in it; write it as \\n, \\t or \\u00..");
      } else if (c == '\\') {
        Escape(value);
      } else {
        value += text_[at_++];
      }
    }
    return value;
  }

  void Escape(std::string& value) {
    constexpr std::string_view kNames = "\"'\\/bfnrt", kMeanings = "\"'\\/\b\f\n\r\t";
    const int name = Char(at_ + 1);
    if (name == 'u') {
      uint32_t code = Hex(at_ + 2);
      const bool pair = code >= 0xd800 && code < 0xdc00 && Char(at_ + 6) == '\\' && Char(at_ + 7) == 'u';
      const uint32_t low = pair ? Hex(at_ + 8) : 0;
      if (low >= 0xdc00 && low < 0xe000) {
        code = 0x10000 + ((code - 0xd800) << 10 | (low - 0xdc00));
        at_ += 6;
      }
      if (code >= 0xd800 && code < 0xe000) Fail("half of a pair of \\u.... that make one character");
      if (!error_.empty()) return;
      at_ += 6;
      AppendUtf8(code, value);
      return;
    }
    const size_t known = name == kEnd ? std::string_view::npos : kNames.find(static_cast<char>(name));
    if (known == std::string_view::npos) {
      Fail("a \\ in a string before what it cannot stand before");
      return;
    }
    value += kMeanings[known];
    at_ += 2;
  }

  uint32_t Hex(size_t from) {
    uint32_t code = 0;
    for (size_t i = from; i < from + 4; ++i) {
      const int c = Char(i);
      if (c == kEnd || !absl::ascii_isxdigit(static_cast<unsigned char>(c))) {
        Fail("\\u needs four hexadecimal digits");
        return 0;
      }
      code = code << 4 | static_cast<uint32_t>(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return code;
  }

  static void AppendUtf8(uint32_t code, std::string& to) {
    const auto put = [&to](uint32_t byte) { to += static_cast<char>(byte); };
    if (code < 0x80) return put(code);
    if (code < 0x800) {
      put(0xc0 | code >> 6);
    } else {
      if (code < 0x10000) {
        put(0xe0 | code >> 12);
      } else {
        put(0xf0 | code >> 18);
        put(0x80 | (code >> 12 & 0x3f));
      }
      put(0x80 | (code >> 6 & 0x3f));
    }
    put(0x80 | (code & 0x3f));
  }

  // Between triple quotes; of every line as many blanks are left out as there are characters before the
  // quotes.
  std::string MultiLine() {
    const size_t begin = at_;
    const size_t looked_at = std::min(at_, kDeepestIndent);
    const std::string_view before = std::string_view(text_).substr(at_ - looked_at, looked_at);
    const size_t line_start = before.rfind('\n') + 1;
    const auto indent = static_cast<size_t>(
        std::count_if(before.begin() + static_cast<ptrdiff_t>(line_start), before.end(),
                      [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
    const auto skip = [this](size_t most) {
      for (; most > 0 && (Char(at_) == ' ' || Char(at_) == '\t'); --most) ++at_;
    };
    at_ += 3;
    skip(text_.size());
    if (Char(at_) == '\n') {
      ++at_;
      skip(indent);
    }
    std::string value;
    while (!Starts("'''")) {
      const int c = Char(at_);
      if (c == kEnd) {
        FailAt(begin, "a text in triple quotes without an end");
        return "";
      }
      value += text_[at_++];
      if (c == '\n') skip(indent);
    }
    at_ += 3;
    if (value.ends_with('\n')) value.pop_back();
    return value;
  }

  const std::string text_;
  size_t at_ = 0;
  int depth_ = 0;
  int values_ = 0;
  std::vector<std::string> keys_;  // of the objects that are open
  std::string error_;
};

}  // namespace

std::string Printable(std::string_view text, size_t limit) {
  std::string shown;
  for (const char c : text.substr(0, limit)) shown += c >= 0x20 && c < 0x7f ? c : '?';
  if (text.size() > limit) shown += "...";
  return shown;
}

std::string ShowValue(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  return Printable(value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace), 60);
}

absl::StatusOr<Json> ParseHjson(std::string_view text) {
  std::string plain = WithPlainLineEnds(text);
  if (!IsUtf8(plain)) return absl::InvalidArgumentError("not JSON: not text in UTF-8");
  absl::StatusOr<Json> value = Reader(std::move(plain)).Root();
  if (value.ok() && !value->is_object()) {
    return absl::InvalidArgumentError(absl::StrCat("a configuration is an object, not ", ShowValue(*value)));
  }
  return value;
}

}  // namespace penstock::zero
