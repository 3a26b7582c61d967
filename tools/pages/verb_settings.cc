#include "tools/pages/verb_settings.h"

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "run/settings.h"
#include "run/settings_page.h"
#include "tools/base/cli.h"

namespace penstock::tools {

int RunSettings(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  constexpr const char* kName = "penstock settings";
  CLI::App app("The settings of a training, as a page; with a name, one of them", kName);
  std::optional<std::string> name;
  bool python = false;
  app.add_option("name", name,
                 "Path in the JSON (penstock.order), flag (clip) or keyword of penstock.initialize");
  app.add_flag("--python", python, "Print the keywords of penstock.initialize, as a module of Python");
  // A setting's flag is a name here.
  const bool is_name = argc == 2 && run::FindFlag(argv[1]).first != nullptr;
  if (is_name) {
    name = argv[1];
  } else if (const std::optional<int> code = ParseFlags(app, argc, argv, out, err)) {
    return *code;
  }
  if (!name.has_value()) {
    out << (python ? run::KeywordsModule() : run::SettingsPage()) << std::flush;
    return kExitOk;
  }
  const absl::StatusOr<std::string> described = run::DescribeSetting(*name);
  if (!described.ok()) return Fail(kName, described.status(), err);
  out << *described << std::flush;
  return kExitOk;
}

}  // namespace penstock::tools
