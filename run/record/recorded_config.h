// What --config says of how a run is trained and watched, beside what is computed: memory, drives, order,
// wear, watchdog, monitors, profiles. It still holds where a run is resumed without --config.
//
// What is computed has names of its own in the run's record (recorded_options.h), and where state lives is
// told anew, or found. All other keys that are served are recorded: OnResume::kAsConfigured in
// run/settings.h.
#ifndef PENSTOCK_RUN_RECORD_RECORDED_CONFIG_H_
#define PENSTOCK_RUN_RECORD_RECORDED_CONFIG_H_

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "run/config.h"

namespace penstock::run {

// Its name in a run's record.
inline constexpr const char* kRecordedConfigKey = "config_kept";

// Of a config file that has been read without an error: values by path. Paths of files become absolute, since
// a resume may run in another directory.
absl::StatusOr<nlohmann::json> ConfigToRecord(const std::string& file);

// A config that says that and nothing else. kDataLoss: a later version made it, or it is damaged.
absl::StatusOr<Config> ConfigFromRecord(const nlohmann::json& recorded);

// Its keys, with commas between.
std::string RecordedKeys(const nlohmann::json& recorded);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_RECORD_RECORDED_CONFIG_H_
