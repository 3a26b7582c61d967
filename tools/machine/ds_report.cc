// `ds_report`: the name under which DeepSpeed's users look for what `penstock env` tells.
#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "tools/base/cli.h"
#include "tools/base/version.h"
#include "tools/machine/verb_env.h"

namespace {

// What trains tells it best, since it has LibTorch and its BLAS loaded: the program beside this one becomes
// this process. Returns where there is none.
void AskPenstock(std::vector<const char*> arguments) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return;
  const std::string penstock = self.parent_path() / "penstock";
  arguments[0] = "env";
  arguments.insert(arguments.begin(), penstock.c_str());
  arguments.push_back(nullptr);
  (void)execv(penstock.c_str(), const_cast<char* const*>(arguments.data()));
}

}  // namespace

int main(int argc, char** argv) {
  // DeepSpeed's own flags leave out its table of operators, of which there is none here, and the warnings,
  // which each have a line of their own.
  std::vector<const char*> arguments;
  for (int i = 0; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument != "--hide_operator_status" && argument != "--hide_errors_and_warnings")
      arguments.push_back(argv[i]);
  }
  if (!arguments.empty()) AskPenstock(arguments);
  return penstock::tools::OrBug(
      [&] {
        return penstock::tools::RunEnv(static_cast<int>(arguments.size()), arguments.data(), std::cout,
                                       std::cerr);
      },
      std::string("penstock ") + penstock::tools::kVersion, "ds_report", std::cerr);
}
