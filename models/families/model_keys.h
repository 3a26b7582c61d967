// The keys of a model's config.json: read, served, refused by name. What a family's own file needs to take a
// published model or refuse it; no key that changes the function is passed over.
#ifndef PENSTOCK_MODELS_FAMILIES_MODEL_KEYS_H_
#define PENSTOCK_MODELS_FAMILIES_MODEL_KEYS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace penstock::models {

// A name that is taken for another.
struct KeyAlias {
  const char *name, *of;
};

// Reads one JSON object, which outlives it. Null counts as absent. The first thing that is wrong stays in
// status(); values are then as they were.
class ModelKeys {
 public:
  explicit ModelKeys(const nlohmann::json& json, std::span<const KeyAlias> aliases = {})
      : json_(json), aliases_(aliases) {}

  const nlohmann::json* Find(const char* key) const;
  // Where transformers takes null for "no", and has another default.
  bool IsNull(const char* key) const;
  // What stands there in place of `key`, if that is absent.
  const char* NameOf(const char* key) const;
  void Whole(const char* key, int64_t* value);
  void Needed(const char* key, int64_t* value);
  void Number(const char* key, double* value);
  void Switch(const char* key, bool* value);
  // "model: KEY is VALUE, WHAT"; the key must be there.
  void Wrong(const char* key, const std::string& what);
  void Fail(const std::string& line) { status_.Update(absl::InvalidArgumentError(line)); }

  // Two names of one thing must agree. Of keys that are neither in `of_function` nor among those that change
  // nothing (tokens, generation, other heads, files; `others` besides), those that are near to one of the
  // function are refused with that one's name, and all others are one line of `notes`. `meant`: names that
  // people use for one.
  void LookAtUnknown(const std::vector<std::string_view>& of_function,
                     const std::vector<std::string_view>& others, std::span<const KeyAlias> meant,
                     std::vector<std::string>* notes);

  // Whole models only: pruned heads and coded weights are refused.
  void RefuseOtherForms();

  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json& json_;
  const std::span<const KeyAlias> aliases_;
  absl::Status status_;
};

// kInvalidArgument unless 1 <= value <= most.
absl::Status CheckSize(const char* name, int64_t value, int64_t most);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_MODEL_KEYS_H_
