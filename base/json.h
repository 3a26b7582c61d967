// The one parser of JSON: text from outside becomes a value within bounds, or a status.
#ifndef PENSTOCK_BASE_JSON_H_
#define PENSTOCK_BASE_JSON_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace penstock {

struct JsonOptions {
  // Deeper values would overflow the stack of what walks them: copies, comparisons and dump() recurse.
  int max_depth = 128;
  // Each value takes 16 to 150 bytes of memory, whatever its length in the text; 400,000 take at most 64 MiB.
  uint64_t max_values = 400'000;
  bool comments = false;       // /* */ and // are skipped
  bool duplicate_keys = true;  // the last one counts; false: they are refused
};

// Returns the value that `text` spells. kInvalidArgument: malformed, or beyond the bounds; the message begins
// with `name` (of a file, usually; empty: with nothing) and says at which byte. Never throws.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text, std::string_view name,
                                         const JsonOptions& options = {});

// The same, of a value that must be an object.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, std::string_view name,
                                               const JsonOptions& options = {});

// Reads and parses a file (base/small_file.h): its errors too.
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path, uint64_t limit_bytes,
                                              const JsonOptions& options = {});
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path);

}  // namespace penstock

#endif  // PENSTOCK_BASE_JSON_H_
