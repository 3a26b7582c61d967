#include "tiering/plan/byte_size.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace penstock::tiering {
namespace {

// What is being read, for the error line.
struct Syntax {
  const char* what;
  const char* like;
  double (*factor)(std::string_view unit);  // of a unit in lower case; 0: there is no such unit
};

absl::Status Bad(const Syntax& syntax, std::string_view text, std::string_view why) {
  // The text may be anything that was typed: keep the line short and printable.
  std::string shown;
  for (const char c : text.substr(0, 40)) shown += std::isprint(static_cast<unsigned char>(c)) ? c : '?';
  if (text.size() > 40) shown += "...";
  return absl::InvalidArgumentError(absl::StrCat("\"", shown, "\" is not a ", syntax.what, ": ",
                                                 std::string(why), "; write it like ", syntax.like));
}

double SizeFactor(std::string_view unit) {
  if (unit.empty() || unit == "b") return 1;
  constexpr std::string_view kPrefixes = "kmgtp";
  const size_t power = kPrefixes.find(unit[0]);
  if (power == std::string_view::npos) return 0;
  const std::string_view rest = unit.substr(1);
  const double base = rest.empty() || rest == "b" ? 1000 : rest == "ib" ? 1024 : 0;
  return base == 0 ? 0 : std::pow(base, static_cast<double>(power + 1));
}

double CountFactor(std::string_view unit) {
  if (unit.empty()) return 1;
  if (unit == "k") return 1e3;
  if (unit == "m") return 1e6;
  if (unit == "b" || unit == "g") return 1e9;
  if (unit == "t") return 1e12;
  return 0;
}

constexpr Syntax kSize = {"size", "512MiB, 4GB or 1e9", SizeFactor};
constexpr Syntax kCount = {"count", "350M, 7B or 1e9", CountFactor};

absl::StatusOr<int64_t> Parse(const Syntax& syntax, std::string_view text) {
  const std::string_view original = text;
  const auto blank = [](char c) { return c == ' ' || c == '\t'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  if (text.empty()) return Bad(syntax, original, "it is empty");
  if (text.front() == '-') return Bad(syntax, original, "it is negative");
  if (text.front() == '+') text.remove_prefix(1);
  if (text.empty() || (!std::isdigit(static_cast<unsigned char>(text.front())) && text.front() != '.')) {
    return Bad(syntax, original, "it does not begin with a number");
  }

  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range) return Bad(syntax, original, "the number is out of range");
  if (error != std::errc()) return Bad(syntax, original, "it does not begin with a number");
  std::string_view unit = text.substr(static_cast<size_t>(end - text.data()));
  const std::string_view digits = text.substr(0, static_cast<size_t>(end - text.data()));
  while (!unit.empty() && blank(unit.front())) unit.remove_prefix(1);
  std::string lower(unit);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const double factor = syntax.factor(lower);
  if (factor == 0) return Bad(syntax, original, "its unit is unknown");

  // Whole numbers go the integer way, so that 2^53 + 1 bytes are not rounded.
  int64_t whole = 0;
  const auto exact = std::from_chars(digits.data(), digits.data() + digits.size(), whole);
  if (exact.ec == std::errc() && exact.ptr == digits.data() + digits.size()) {
    int64_t bytes = 0;
    if (__builtin_mul_overflow(whole, static_cast<int64_t>(factor), &bytes)) {
      return Bad(syntax, original, "it is beyond 2^63 - 1");
    }
    return bytes;
  }
  const double bytes = std::round(value * factor);
  // 2^63 itself is the first double that does not fit.
  if (!(bytes < 0x1p63)) return Bad(syntax, original, "it is beyond 2^63 - 1");
  return static_cast<int64_t>(bytes);
}

}  // namespace

absl::StatusOr<int64_t> ParseSize(std::string_view text) { return Parse(kSize, text); }
absl::StatusOr<int64_t> ParseCount(std::string_view text) { return Parse(kCount, text); }

std::string FormatBytes(int64_t bytes) {
  constexpr std::array<const char*, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = std::fabs(static_cast<double>(bytes));
  if (value < 1024) return absl::StrCat(bytes, " B");
  size_t unit = 0;
  // 1023.95 would print as 1024.0.
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%s%.1f %s", bytes < 0 ? "-" : "", value, kUnits[unit]);
}

std::string FormatBandwidth(double bytes_per_second) {
  if (!std::isfinite(bytes_per_second) || bytes_per_second < 0) return "-";
  if (bytes_per_second < 999.5) return absl::StrFormat("%.0f B/s", bytes_per_second);
  if (bytes_per_second < 999.5e3) return absl::StrFormat("%.0f kB/s", bytes_per_second / 1e3);
  if (bytes_per_second < 999.995e6) return absl::StrFormat("%.2f MB/s", bytes_per_second / 1e6);
  return absl::StrFormat("%.2f GB/s", bytes_per_second / 1e9);
}

}  // namespace penstock::tiering
