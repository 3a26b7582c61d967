#include "aio/bytes.h"

#include <cctype>
#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/io_error.h"

namespace penstock::aio {

std::string FormatBytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < kKiB) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  const int decimals = value < 10 ? 2 : value < 100 ? 1 : 0;
  return absl::StrFormat("%.*f %s", decimals, value, kUnits[unit]);
}

absl::StatusOr<uint64_t> ParseBytes(std::string_view text) {
  const auto refuse = [&](std::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("\"", OneLine(text, 40),
                                                   "\" is not a size: ", std::string(why),
                                                   "; write for example 4096, 64K, 512M, 4GiB or 1e9"));
  };
  // Digits, one point, and an exponent: no sign, no hexadecimal, no "inf".
  if (text.empty() || !(std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '.')) {
    return refuse("it does not begin with a digit");
  }
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value, std::chars_format::general);
  if (error != std::errc()) return refuse("the number cannot be read");
  std::string suffix;
  for (const char* c = rest; c != end; ++c)
    suffix += static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
  int shift = 0;
  if (!suffix.empty() && suffix != "B") {
    const size_t letter = std::string_view("KMGT").find(suffix[0]);
    const std::string_view tail = std::string_view(suffix).substr(1);
    if (letter == std::string_view::npos || !(tail.empty() || tail == "B" || tail == "IB")) {
      return refuse("the unit is unknown");
    }
    shift = 10 * (static_cast<int>(letter) + 1);
  }
  // Whole numbers go the integer way, so that 2^53 + 1 bytes are not rounded.
  uint64_t whole = 0;
  const auto exact = std::from_chars(text.data(), rest, whole);
  if (exact.ec == std::errc() && exact.ptr == rest) {
    if (whole > (uint64_t{INT64_MAX} >> shift)) return refuse("it is too large");
    return whole << shift;
  }
  const double bytes = std::ldexp(value, shift);
  if (!(bytes < std::ldexp(1.0, 63))) return refuse("it is too large");
  if (bytes != std::floor(bytes)) return refuse("it is not a whole number of bytes");
  return static_cast<uint64_t>(bytes);
}

}  // namespace penstock::aio
