// `penstock env`: what this machine offers, what is missing, and what that costs (tools/machine/env_probe.h).
#ifndef PENSTOCK_TOOLS_MACHINE_VERB_ENV_H_
#define PENSTOCK_TOOLS_MACHINE_VERB_ENV_H_

#include <ostream>

namespace penstock::tools {

// argv[1..] are the flags after the verb: --dir DIR (default: the current directory), --json. Returns the
// exit code: 0 (also when things are missing), or 2 with one line on `err`.
int RunEnv(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_MACHINE_VERB_ENV_H_
