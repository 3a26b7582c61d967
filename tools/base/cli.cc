#include "tools/base/cli.h"

#include <CLI/CLI.hpp>
#include <cerrno>
#include <new>
#include <vector>

#include "absl/strings/str_cat.h"
#include "run/settings.h"
#include "zero/config/nearest_name.h"

namespace penstock::tools {
namespace {

// The verb that the arguments have come to: it is whose flags are right or wrong.
CLI::App& Deepest(CLI::App& app) {
  CLI::App* deepest = &app;
  for (;;) {
    const std::vector<CLI::App*> parsed = deepest->get_subcommands();
    if (parsed.empty()) return *deepest;
    deepest = parsed.back();
  }
}

// The line for a word that nothing has taken.
std::string UnknownWord(const CLI::App& app, const std::string& word) {
  const std::string& name = app.get_name();
  if (word.size() > 1 && word[0] == '-') {
    const std::string flag = word.substr(0, word.find('='));
    std::vector<std::string> flags;
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& long_name : option->get_lnames()) flags.push_back("--" + long_name);
    }
    const std::vector<std::string_view> views(flags.begin(), flags.end());
    return absl::StrCat("unknown flag ", flag, zero::DidYouMean(flag, views), "; see ", name, " --help");
  }
  std::vector<std::string> verbs;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    verbs.push_back(verb->get_name());
  }
  const std::vector<std::string_view> views(verbs.begin(), verbs.end());
  return absl::StrCat(verbs.empty() ? "unexpected word \"" : "unknown verb \"", word, "\"",
                      zero::DidYouMean(word, views), "; see ", name, " --help");
}

}  // namespace

std::string OneLine(std::string_view text) {
  std::string line;
  for (const char c : text) line += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c;
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

int OrBug(const std::function<int()>& run, std::string_view program, std::string_view arguments,
          std::ostream& err) {
  std::string what;
  try {
    return run();
  } catch (const std::bad_alloc&) {
    err << program << kNoMemory << std::flush;
    return kExitFailed;
  } catch (const std::exception& error) {
    what = error.what();
  } catch (...) {
    what = "something that is no exception was thrown";
  }
  err << std::string(program) << ": this is a bug: " << OneLine(what.substr(0, what.find('\n')))
      << "; please report this line, the arguments (" << OneLine(arguments)
      << ") and what `penstock env` says; committed steps are safe"
      << "\n"
      << std::flush;
  return kExitFailed;
}

std::string MessageOf(const absl::Status& status) {
  return run::Spelt(std::string(status.message()), run::Door::kCommandLine);
}

int Fail(std::string_view program, const absl::Status& status, std::ostream& err) {
  err << std::string(program) << ": " << OneLine(MessageOf(status)) << "\n" << std::flush;
  return absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status) ||
                 absl::IsAlreadyExists(status)
             ? kExitWrong
             : kExitFailed;
}

std::optional<int> ParseFlags(CLI::App& app, int argc, const char* const* argv, std::ostream& out,
                              std::ostream& err) {
  // The vector form takes the arguments in reverse and leaves argv[0] out.
  std::vector<std::string> arguments;
  for (int i = argc - 1; i >= 1; --i) arguments.emplace_back(argv[i]);
  try {
    app.parse(arguments);
    return std::nullopt;
  } catch (const CLI::CallForHelp&) {
    out << Deepest(app).help();
  } catch (const CLI::CallForAllHelp&) {
    out << app.help("", CLI::AppFormatMode::All);
  } catch (const CLI::CallForVersion& version) {
    out << version.what() << "\n";
  } catch (const CLI::ParseError& error) {
    const CLI::App& verb = Deepest(app);
    const std::vector<std::string> left = app.remaining(true);
    std::string message = error.what();
    // An unknown word also makes CLI11 miss what it might have been: the word is the better news.
    if (!left.empty()) message = UnknownWord(verb, left.front());
    err << verb.get_name() << ": " << OneLine(message) << "\n" << std::flush;
    return kExitWrong;
  }
  out.flush();
  return kExitOk;
}

}  // namespace penstock::tools
