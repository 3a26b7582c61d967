// HJSON, as DeepSpeed reads its configurations: JSON with comments (#, //, /* */), commas that may be missing
// at line ends or stand behind the last member, keys and texts without quotes, single and triple quotes, an
// outer object without braces. And strict where nlohmann's parser is lenient.
#ifndef PENSTOCK_ZERO_CONFIG_CONFIG_JSON_H_
#define PENSTOCK_ZERO_CONFIG_CONFIG_JSON_H_

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace penstock::zero {

// Levels of nesting that are accepted: far above any configuration, far below what a recursion minds.
inline constexpr int kDeepestJson = 64;
inline constexpr int kMostJsonValues = 10'000;

// Parses an object, keeping the order of its keys. It reads what Python's hjson 3.1 reads, to the same values
// (tests/golden/hjson.json), but for a text with nothing in it, which is refused. kInvalidArgument, one line,
// with line and column for a syntax error and the path for a key that occurs twice in one object.
absl::StatusOr<nlohmann::ordered_json> ParseHjson(std::string_view text);

// `text` without anything that would break a line or a terminal: bytes outside printable ASCII become '?',
// and what is longer than `limit` is cut and ends in "...".
std::string Printable(std::string_view text, size_t limit = 80);

// A value for an error line: scalars as JSON, "an object" or "an array" for the rest.
std::string ShowValue(const nlohmann::ordered_json& value);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_CONFIG_CONFIG_JSON_H_
