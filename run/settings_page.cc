#include "run/settings_page.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "run/config.h"
#include "run/config_names.h"
#include "run/settings.h"
#include "zero/config/config_json.h"
#include "zero/config/nearest_name.h"

namespace penstock::run {
namespace {

constexpr int64_t kSteps = 1'000'000;  // of a run whose defaults are printed

// A row of the table with the path that configurations have for it; "": they do not have it.
struct Row {
  std::string path;
  std::string of;  // the optimizers or schedules whose parameter it is
  const Setting* setting;
};

std::string Code(std::string_view text) { return absl::StrCat("`", std::string(text), "`"); }

std::string TypeOf(const Setting& setting) {
  switch (setting.type) {
    case KeyType::kBool:
      return "true or false";
    case KeyType::kWhole:
      return RangeOf(setting, "a whole number");
    case KeyType::kNumber:
      return RangeOf(setting, "a number");
    case KeyType::kText:
    case KeyType::kPath:
      return "text";
    case KeyType::kChoice:
      return absl::StrCat("one of ", ChoicesOf(setting));
    case KeyType::kSize:
      return RangeOf(setting, "bytes, or a size such as \"4GiB\"");
    case KeyType::kPair:
      return "two numbers, each at least 0 and below 1";
    case KeyType::kWholes:
      return RangeOf(setting, "a list of whole numbers");
    case KeyType::kPaths:
      return "a list of directories";
    case KeyType::kNames:
      return "a list of names";
    case KeyType::kObject:
      return "an object";
    case KeyType::kAny:
      break;
  }
  return "";
}

std::string_view OnResumeOf(OnResume on_resume) {
  switch (on_resume) {
    case OnResume::kAsConfigured:
      return "as the last configuration said";
    case OnResume::kByName:
      return "as recorded; another value holds from the next step on: a line says so, and the run records it";
    case OnResume::kFixed:
      return "fixed: the state is made of it, and another value is refused";
    case OnResume::kOnce:
      return "as the run began; another value has no effect, which a line says";
    case OnResume::kEachStart:
      return "given with each start";
  }
  return "";
}

// What a configuration that does not have a key, or has "auto" there, means to DeepSpeed and to Hugging
// Face's Trainer, by path: as FillDefaults answers, for each of the types whose parameter it is.
using Meanings = std::map<std::string, std::string>;

void AddMeaning(const std::string& line, std::string_view type,
                std::map<std::string, std::map<std::string, std::string>>* to) {
  const size_t colon = line.find(": ");
  if (colon == std::string::npos) return;
  const std::string path = absl::StrReplaceAll(line.substr(0, colon), {{" \"auto\"", ""}});
  std::string value = line.substr(colon + 2, line.find(" (", colon) - colon - 2);
  if (value == absl::StrCat(kSteps)) value = "the last step of the run";
  std::string& types = (*to)[path][value];
  absl::StrAppend(&types, types.empty() || type.empty() ? "" : ", ", std::string(type));
}

Meanings MeaningsOf(bool automatic) {
  constexpr int64_t kWarmup = 100;
  std::set<std::string> autos;
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& setting : SectionKeys(section)) {
      if (automatic) autos.insert(PathOf(section, setting));
    }
  }
  std::map<std::string, std::map<std::string, std::string>> found;
  for (const auto& [type, name] : NamesOf(OptimizerType())) {
    Config config;
    config.optimizer.type = type;
    for (const std::string& line : FillDefaults(autos, kSteps, kWarmup, &config)) {
      const bool is_parameter = line.starts_with("optimizer.params.");
      if (is_parameter || type == OptimizerType::kAdamW) AddMeaning(line, is_parameter ? name : "", &found);
    }
  }
  for (const auto& [type, name] : NamesOf(SchedulerType())) {
    Config config;
    config.scheduler.emplace().type = type;
    for (const std::string& line : FillDefaults(autos, kSteps, kWarmup, &config)) {
      if (line.starts_with("scheduler.params.")) AddMeaning(line, name, &found);
    }
  }
  Meanings meanings;
  for (const auto& [path, values] : found) {
    for (const auto& [value, types] : values) {
      std::string& text = meanings[path];
      absl::StrAppend(&text, text.empty() ? "" : "; ", value,
                      values.size() == 1 ? "" : absl::StrCat(" (", types, ")"));
    }
  }
  return meanings;
}

std::string MeaningIn(const Meanings& meanings, const std::string& path) {
  const auto found = meanings.find(path);
  return found == meanings.end() ? "" : found->second;
}

std::string Entry(const Row& row) {
  const Setting& setting = *row.setting;
  std::vector<std::string> spellings;
  if (!row.path.empty()) spellings.push_back(absl::StrCat("JSON ", Code(row.path)));
  if (!setting.flag.empty()) {
    spellings.push_back(absl::StrCat("flag ", Code(setting.flag),
                                     setting.verbs == Verb::kTrain  ? " of train"
                                     : setting.verbs == Verb::kPlan ? " of plan"
                                                                    : ""));
  }
  if (!setting.keyword.empty())
    spellings.push_back(absl::StrCat("Python ", Code(absl::StrCat(std::string(setting.keyword), "="))));
  const std::string_view heading = !row.path.empty()       ? std::string_view(row.path)
                                   : !setting.flag.empty() ? setting.flag
                                                           : setting.keyword;
  std::string text = absl::StrCat("### ", std::string(heading), "\n", std::string(setting.help), ".\n\n- ",
                                  absl::StrJoin(spellings, ", "), "\n");
  const std::string type = TypeOf(setting);
  std::vector<std::string> values;
  if (!type.empty()) values.push_back(type);
  if (!setting.fallback.empty()) values.push_back(absl::StrCat("default: ", std::string(setting.fallback)));
  if (!setting.from_python.empty())
    values.push_back(absl::StrCat("from Python: ", std::string(setting.from_python)));
  if (!values.empty()) absl::StrAppend(&text, "- ", absl::StrJoin(values, "; "), "\n");
  static const auto& absent = *new Meanings(MeaningsOf(false));
  static const auto& automatic = *new Meanings(MeaningsOf(true));
  const std::string unsaid = MeaningIn(absent, row.path), as_auto = MeaningIn(automatic, row.path);
  if (!unsaid.empty())
    absl::StrAppend(&text, "- in a configuration of DeepSpeed's that does not have it: ", unsaid, "\n");
  if (!as_auto.empty()) absl::StrAppend(&text, "- as \"auto\": ", as_auto, "\n");
  if (!row.of.empty()) absl::StrAppend(&text, "- of ", row.of, "\n");
  absl::StrAppend(&text, "- on resume: ", std::string(OnResumeOf(setting.on_resume)), "\n");
  if (setting.of_rank) absl::StrAppend(&text, "- ranks may differ in it\n");
  if (!setting.without_device.empty()) {
    absl::StrAppend(
        &text,
        "- without effect, which a line says, with `--device cpu`, and from Python with `device=\"cpu\"`: ",
        std::string(setting.without_device), "\n");
  }
  if (!setting.without_ranks.empty()) {
    absl::StrAppend(&text, "- without effect, which a line says, with one rank: ",
                    std::string(setting.without_ranks), "\n");
  }
  if (!setting.without_drive.empty()) {
    absl::StrAppend(&text, "- without effect, which a line says, where state is not on a drive: ",
                    std::string(setting.without_drive), "\n");
  }
  if (!setting.command_line_ignores.empty()) {
    absl::StrAppend(&text, "- without effect on the command line, which a line says: ",
                    Spelt(setting.command_line_ignores, Door::kCommandLine), "\n");
  }
  if (!setting.python_ignores.empty()) {
    absl::StrAppend(&text,
                    "- without effect from Python, which a line says: ", std::string(setting.python_ignores),
                    "\n");
  }
  if (!setting.in_python.empty())
    absl::StrAppend(&text, "- in Python: ", std::string(setting.in_python), "\n");
  return text;
}

// "WarmupLR" of "scheduler.params/WarmupLR"; "" of other sections.
std::string ParameterOf(std::string_view section) {
  const size_t slash = section.find('/');
  return slash == std::string_view::npos ? "" : std::string(section.substr(slash + 1));
}

// Whether it is set by somebody with an effect: sections are not.
bool IsSetting(const Setting& setting) {
  return setting.use == KeyUse::kServed && setting.type != KeyType::kObject;
}

// All rows that are served under their own name, those without a key last. A parameter of several optimizers
// or schedules is one row.
std::vector<Row> ServedRows() {
  std::vector<Row> rows;
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& setting : SectionKeys(section)) {
      if (!IsSetting(setting) || !setting.canonical.empty()) continue;
      const std::string path = PathOf(section, setting), of = ParameterOf(section);
      const auto same =
          std::find_if(rows.begin(), rows.end(), [&path](const Row& row) { return row.path == path; });
      if (same == rows.end()) {
        rows.push_back({path, of, &setting});
      } else {
        absl::StrAppend(&same->of, ", ", of);
      }
    }
  }
  for (const Setting& setting : SettingsWithoutKeys()) rows.push_back({"", "", &setting});
  return rows;
}

std::string TableOf(KeyUse use) {
  std::string text = "| key | why |\n|---|---|\n";
  std::set<std::string> told;
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& setting : SectionKeys(section)) {
      if (setting.use != use || IsSetting(setting) || !setting.canonical.empty()) continue;
      const std::string path = PathOf(section, setting);
      if (!told.insert(path).second) continue;
      absl::StrAppend(&text, "| ", Code(path), " | ", Spelt(setting.why, Door::kCommandLine), " |\n");
    }
  }
  return text;
}

// The type of a keyword, as Python annotates it.
std::string PythonTypeOf(const Setting& setting) {
  if (!setting.python_type.empty()) return std::string(setting.python_type);
  switch (setting.type) {
    case KeyType::kBool:
      return "Optional[bool]";
    case KeyType::kWhole:
      return "Optional[int]";
    case KeyType::kNumber:
      return "Optional[float]";
    case KeyType::kText:
    case KeyType::kChoice:
      return "Optional[str]";
    case KeyType::kPath:
      return "Optional[PathLike]";
    case KeyType::kSize:
      return "Union[None, int, str]";
    case KeyType::kPaths:
      return "Union[None, PathLike, Sequence[PathLike]]";
    case KeyType::kNames:
      return "Optional[Sequence[str]]";
    default:
      return "Any";
  }
}

// Lines of at most 150 characters, of which all but the first are further in.
std::string Wrapped(std::string_view text, std::string_view indent) {
  constexpr size_t kColumns = 150;
  std::string wrapped(indent);
  size_t begin = 0;  // of the line
  for (const absl::string_view word : absl::StrSplit(absl::string_view(text.data(), text.size()), ' ')) {
    const size_t length = wrapped.size() - begin;
    if (length + 1 + word.size() > kColumns) {
      wrapped += '\n';
      begin = wrapped.size();
      absl::StrAppend(&wrapped, std::string(indent), "    ");
    } else if (length > indent.size()) {
      wrapped += ' ';
    }
    absl::StrAppend(&wrapped, word);
  }
  return wrapped + "\n";
}

std::string MeaningInPython(const Setting& setting) {
  std::string text = absl::StrCat(std::string(setting.keyword), ": ", std::string(setting.help), ".");
  if (!setting.in_python.empty()) absl::StrAppend(&text, " ", std::string(setting.in_python));
  const std::string_view fallback = setting.from_python.empty() ? setting.fallback : setting.from_python;
  if (!fallback.empty()) absl::StrAppend(&text, " Default: ", std::string(fallback), ".");
  return text;
}

// A TypedDict of the keywords that `are_in` it.
template <typename AreIn>
std::string KeywordsClass(std::string_view heading, std::string_view what, const AreIn& are_in) {
  std::string meanings, types;
  for (const Row& row : ServedRows()) {
    const std::string_view keyword = row.setting->keyword;
    if (keyword.empty() || row.path.empty() || !are_in(keyword)) continue;
    absl::StrAppend(&meanings, Wrapped(MeaningInPython(*row.setting), "    "));
    absl::StrAppend(&types, "    ", std::string(keyword), ": ", PythonTypeOf(*row.setting), "\n");
  }
  return absl::StrCat("\n\nclass ", std::string(heading), ":\n    \"\"\"", std::string(what), "\n\n",
                      meanings, "    \"\"\"\n\n", types);
}

}  // namespace

std::string KeywordsModule() {
  // Of one start or one process: initialize's alone, or in the signature of plan.
  static constexpr auto kOfAStart =
      std::to_array<std::string_view>({"state_dir", "host_memory", "device_memory", "seed", "device",
                                       "progress", "rank_timeout", "replan", "resume_ranks"});
  const auto is_of_a_start = [](std::string_view keyword) {
    return std::find(kOfAStart.begin(), kOfAStart.end(), keyword) != kOfAStart.end();
  };
  return absl::StrCat(
      "\"\"\"The keywords of ``penstock.initialize`` and ``penstock.plan`` that are settings.\n\n"
      "This file is printed from the table in run/settings.cc by ``penstock settings --python``.\n\"\"\"\n\n"
      "from __future__ import annotations\n\n"
      "from typing import TYPE_CHECKING, Any, Optional, Sequence, TypedDict, Union\n\n"
      "if TYPE_CHECKING:\n    import torch\n\n    from ._settings import PathLike\n",
      KeywordsClass("Keywords(TypedDict, total=False)", "Of ``penstock.initialize`` and ``penstock.plan``.",
                    [&](std::string_view keyword) { return !is_of_a_start(keyword); }),
      KeywordsClass(
          "StartKeywords(Keywords, total=False)",
          "Of ``penstock.initialize``: those of every training, and those of a start and of a process.",
          is_of_a_start));
}

std::string SettingsPage() {
  std::string text =
      "# Settings\n\n"
      "For everyone who sets something: each setting of a training with its spellings in DeepSpeed's JSON, "
      "on the "
      "command line and in Python. Flags and keywords win over the JSON. `penstock settings NAME` prints one "
      "entry.\n\n"
      "This page is printed from the table in `run/settings.cc` by `penstock settings`.\n\n"
      "## Settings that configurations have\n\n";
  bool keys = true;
  for (const Row& row : ServedRows()) {
    if (keys && row.path.empty()) absl::StrAppend(&text, "## Settings of the command line and of Python\n\n");
    keys = !row.path.empty();
    absl::StrAppend(&text, Entry(row), "\n");
  }
  absl::StrAppend(&text,
                  "## Keys without effect that change no result\n\nOne line names those that are given.\n\n",
                  TableOf(KeyUse::kNeedless),
                  "\n## Keys without effect that could change a result\n\nEach has a line.\n\n",
                  TableOf(KeyUse::kIgnored),
                  "\n## Keys that are refused\n\nUnless the value switches the feature off.\n\n",
                  TableOf(KeyUse::kRefused));
  return text;
}

absl::StatusOr<std::string> DescribeSetting(std::string_view spelling) {
  std::string text;
  std::vector<std::string> names;
  for (const Row& row : ServedRows()) {
    const Setting& setting = *row.setting;
    const std::string_view bare = setting.flag.empty() ? "" : setting.flag.substr(2);
    const bool is = spelling == row.path || spelling == setting.name || spelling == setting.flag ||
                    spelling == bare || spelling == setting.keyword;
    if (is && !spelling.empty()) absl::StrAppend(&text, text.empty() ? "" : "\n", Entry(row));
    for (const std::string_view name :
         {std::string_view(row.path), setting.name, setting.flag, setting.keyword}) {
      if (!name.empty()) names.emplace_back(name);
    }
  }
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& setting : SectionKeys(section)) {
      if (setting.use == KeyUse::kServed || IsSetting(setting)) continue;
      const std::string path = PathOf(section, setting);
      names.push_back(path);
      if (spelling != path && spelling != setting.name) continue;
      absl::StrAppend(&text, text.empty() ? "" : "\n", "### ", path, "\n",
                      setting.use == KeyUse::kRefused ? "Not served: " : "Accepted without effect: ",
                      Spelt(setting.why, Door::kCommandLine), ".\n");
    }
  }
  if (!text.empty()) return text;
  const std::vector<std::string_view> all(names.begin(), names.end());
  return absl::InvalidArgumentError(absl::StrCat("there is no setting \"", zero::Printable(spelling, 100),
                                                 "\"", zero::DidYouMean(spelling, all)));
}

}  // namespace penstock::run
