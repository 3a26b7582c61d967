// `penstock settings [NAME]`: the settings of a training as a page, or one of them.
#ifndef PENSTOCK_TOOLS_PAGES_VERB_SETTINGS_H_
#define PENSTOCK_TOOLS_PAGES_VERB_SETTINGS_H_

#include <ostream>

namespace penstock::tools {

// Returns the exit code: 2 for a name that no setting has.
int RunSettings(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_VERB_SETTINGS_H_
