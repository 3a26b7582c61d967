// The settings as text, from their table.
#ifndef PENSTOCK_RUN_SETTINGS_PAGE_H_
#define PENSTOCK_RUN_SETTINGS_PAGE_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace penstock::run {

// docs/settings.md: a heading a setting, then the keys of DeepSpeed that are accepted without effect or
// refused. `penstock settings > docs/settings.md` writes it anew.
std::string SettingsPage();

// python/penstock/_engine/_keywords.py: names, types and meanings of the settings that penstock.initialize
// and penstock.plan take as keywords. `penstock settings --python` prints it.
std::string KeywordsModule();

// The settings that have this spelling: a path of a configuration ("penstock.order") or its last part
// ("order"), a flag with or without its dashes, a keyword of penstock.initialize. kInvalidArgument, with the
// nearest one, where there is none.
absl::StatusOr<std::string> DescribeSetting(std::string_view spelling);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_SETTINGS_PAGE_H_
