// The keys of DeepSpeed's configuration and what becomes of each: the one table behind zero/config/config.h.
#ifndef PENSTOCK_ZERO_CONFIG_CONFIG_KEYS_H_
#define PENSTOCK_ZERO_CONFIG_CONFIG_KEYS_H_

#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace penstock::zero {

enum class KeyUse {
  kServed,    // its value takes effect
  kNeedless,  // accepted without effect: the results are the same; named in one note with all others
  kIgnored,   // accepted without effect though it could change the results: a note says why
  kRefused,   // an error, unless its value is neutral (switches off what Penstock has not)
};

enum class KeyType {
  kBool,
  kWhole,   // a whole number, also written as 5e8
  kNumber,  // any finite number
  kText,
  kPath,    // text that may be empty
  kChoice,  // one of `choices`, in any case
  kSize,    // bytes, or text such as "4GiB"
  kPair,    // two numbers below 1: Adam's betas
  kWholes,  // a list of whole numbers, in any order and not empty
  kPaths,   // a list of paths, not empty
  kObject,  // a section of its own, or where there is none contents that are not looked at
  kAny,     // not looked at
};

struct KeySpec {
  std::string_view name;
  KeyUse use;
  KeyType type;
  std::string_view why = "";  // kIgnored, kRefused: the rest of the line; kNeedless: for readers of the table
  std::string_view neutral = "";  // kRefused: a JSON scalar that is as good as absent, beside null, false and
                                  // "auto"; kIgnored: false
  double least =
      -std::numeric_limits<double>::infinity();  // numbers and sizes: both ends belong to the range
  double most = std::numeric_limits<double>::infinity();
  std::string_view choices = "";    // "none|cpu|nvme", spelled as served
  std::string_view canonical = "";  // the other spelling under which it is served; "" is this one
  bool old_name = false;            // the canonical spelling has replaced it: a note says so
};

// The choices of optimizer.type.
inline constexpr std::string_view kServedOptimizers = "Adam|AdamW|Adagrad|Lion|SGD";

// The keys of the section at a canonical path: "" is the top, "zero_optimization.offload_param". The
// parameters of optimizers and schedules are at "optimizer.params/" and "scheduler.params/" followed by the
// type. Empty for a path that is no section.
std::span<const KeySpec> SectionKeys(std::string_view section);

// All section paths.
std::vector<std::string_view> SectionPaths();

// What a configuration says, by canonical path ("aio.block_size"): booleans, int64 for kWhole and kSize,
// double for kNumber, the canonical spelling for kChoice, an array of two doubles for kPair, of int64 for
// kWholes. Keys whose value
// is null or "auto" are absent.
struct CheckedKeys {
  std::map<std::string, nlohmann::json> served;
  std::vector<std::string> notes;  // in the file's order
  std::set<std::string> autos;     // canonical paths of keys whose value is "auto"
};

// Walks a parsed configuration along the table. kInvalidArgument, one line beginning with the key's path as
// given, for the first key that is unknown (at the top level: misspelt), refused, of a wrong type, out of
// range, or given under two spellings.
absl::StatusOr<CheckedKeys> CheckKeys(const nlohmann::ordered_json& root);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_CONFIG_CONFIG_KEYS_H_
