// What a run keeps from its creation on, and what its user may change when it is resumed. Internal to the
// flags of `penstock train`.
//
// One rule for every value of a run. What its state is made of (vocabulary, seed, types, the optimizer)
// stays: asking for another is refused. Everything else may be changed on resume: by a flag, or by a key of
// --config that says something else than it said before. A change holds from the next step on, is reported,
// and is recorded with the run, so that a later --resume without a flag goes on with it. A key that --config
// no longer has has its default again. What nobody changes stays as recorded, whatever the defaults are by
// then: without --config all of it, and a config that says what it said when a flag won over it changes
// nothing.
#ifndef PENSTOCK_RUN_RECORD_RECORDED_OPTIONS_H_
#define PENSTOCK_RUN_RECORD_RECORDED_OPTIONS_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "run/given_values.h"
#include "run/settings.h"
#include "zero/config/json_field.h"

namespace penstock::run {

// What resuming comes to, collected value by value.
struct Changes {
  nlohmann::json run = nlohmann::json::object();     // keys of the run's record that change, with new values
  nlohmann::json config = nlohmann::json::object();  // what the config says, by the names of the record
  std::vector<std::string> told;                     // "lr 0.0003 -> 0.0001 (--lr)"

  void Tell(const std::string& name, const std::string& before, const std::string& now,
            const std::string& by) {
    told.push_back(absl::StrCat(name, " ", before, " -> ", now, " (", by, ")"));
  }
};

class RecordedOptions {
 public:
  // `run`: the record; null: a new run. `flags`: those that the command line gives.
  RecordedOptions(const nlohmann::json& run, GivenValues flags, Changes* changes)
      : run_(run), flags_(std::move(flags)), changes_(changes) {}

  bool by_flag(const char* name) const { return flags_.count(FlagOfRecord(name)) > 0; }
  // Where a value of this name comes from: "--lr", or "optimizer.params.lr in --config".
  std::string SourceOf(const char* name) const {
    if (by_flag(name)) return FlagOfRecord(name);
    return absl::StrCat(Removed(name) ? "no " : "", KeyOfRecord(name),
                        Removed(name) ? " in `config` any more" : " in `config`");
  }

  // Before any value is asked for, what the config itself says: as its file has it, before flags and defaults
  // take its open places. Only what is noted is a change when it is another.
  void BeginConfig() const { changes_->config[kAsWritten] = true; }
  template <typename T>
  void NoteConfig(const std::string& name, const std::optional<T>& says) const {
    if (says.has_value()) changes_->config[name] = *says;
  }

  // Whether the config says something else under `name` than when the run was made or last resumed;
  // `recorded` is what it is held against where it said nothing then.
  bool ConfigChanges(const char* name, const nlohmann::json& recorded) const {
    if (!changes_->config.contains(name)) return false;
    const nlohmann::json& says = changes_->config[name];
    if (run_.is_object() && run_.contains("config") && run_["config"].is_object() &&
        run_["config"].contains(name)) {
      return run_["config"][name] != says;
    }
    return recorded != says;
  }

  // The config said something under `name` when the run was made or last resumed, and does not any more.
  // (Records from before kAsWritten have flags among what the file said: nothing is known of those.)
  bool Removed(const char* name) const {
    const auto has = [name](const nlohmann::json& config) {
      return config.is_object() && config.value(kAsWritten, false) && config.contains(name);
    };
    if (!changes_->config.contains(kAsWritten) || changes_->config.contains(name) || !run_.is_object() ||
        !run_.contains("config") || !has(run_["config"]))
      return false;
    // A flag had won over it: the flag's value stays.
    return !run_.contains(name) || !run_[name].is_primitive() || run_[name] == run_["config"][name];
  }

  // `otherwise`: of a new run for which nobody says anything.
  template <typename T>
  absl::StatusOr<T> Of(const char* name, const std::optional<T>& given, const T& otherwise) const {
    const nlohmann::json wanted = given.has_value() ? nlohmann::json(*given) : nlohmann::json();
    ASSIGN_OR_RETURN(const nlohmann::json value, Of(name, wanted, nlohmann::json(otherwise)));
    if (const std::optional<T> read = zero::JsonAs<T>(value); read.has_value()) return *read;
    return Damaged(name, value);
  }
  // The same of values as JSON; null: it is not given.
  absl::StatusOr<nlohmann::json> Of(const char* name, const nlohmann::json& given,
                                    const nlohmann::json& otherwise) const;

 private:
  static absl::Status Damaged(const char* name, const nlohmann::json& recorded);

  static constexpr const char* kAsWritten = "as_written";  // among what the config says, in the record

  const nlohmann::json& run_;
  const GivenValues flags_;
  Changes* const changes_;
};

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_RECORD_RECORDED_OPTIONS_H_
