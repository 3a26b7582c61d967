// `ds_report`: the name under which DeepSpeed's users look for what `penstock env` tells.
#include <iostream>
#include <string_view>
#include <vector>

#include "tools/base/cli.h"
#include "tools/base/version.h"
#include "tools/penstock/verb_env.h"

int main(int argc, char** argv) {
  // DeepSpeed's own flags leave out its table of operators, of which there is none here, and the warnings,
  // which each have a line of their own.
  std::vector<const char*> arguments;
  for (int i = 0; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument != "--hide_operator_status" && argument != "--hide_errors_and_warnings")
      arguments.push_back(argv[i]);
  }
  return penstock::tools::OrBug(
      [&] {
        return penstock::tools::RunEnv(static_cast<int>(arguments.size()), arguments.data(), std::cout,
                                       std::cerr);
      },
      std::string("penstock ") + penstock::tools::kVersion, "ds_report", std::cerr);
}
