// The settings of a training, a row each: what it is, its spellings in DeepSpeed's JSON, on the command line
// and in Python, its type and bounds, what holds where nobody says, what a resumed run makes of it, and where
// it goes. The table is run/settings.cc. Help texts, the page docs/settings.md, the check of configurations
// and their reading, and the rules of resumed runs come from it.
#ifndef PENSTOCK_RUN_SETTINGS_H_
#define PENSTOCK_RUN_SETTINGS_H_

#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace penstock::zero {
struct EngineOptions;
}  // namespace penstock::zero

namespace penstock::run {

struct Config;

enum class KeyUse {
  kServed,    // its value takes effect
  kNeedless,  // accepted without effect: the results are the same; named in one note with all others
  kIgnored,   // accepted without effect though it could change the results: a note says why
  kRefused,   // an error, unless its value is neutral (switches off what Penstock has not)
};

enum class KeyType {
  kBool,
  kWhole,   // a whole number, also written as 5e8
  kNumber,  // any finite number
  kText,
  kPath,    // text that may be empty
  kChoice,  // one of `choices`, in any case
  kSize,    // bytes, or text such as "4GiB"
  kPair,    // two numbers below 1: Adam's betas
  kWholes,  // a list of whole numbers, in any order and not empty
  kPaths,   // a list of paths, not empty
  kNames,   // a list of text
  kObject,  // a section of its own, or where there is none contents that are not looked at
  kAny,     // not looked at
};

// What a run that is resumed makes of a setting.
enum class OnResume {
  kAsConfigured,  // holds as the last configuration said; a later configuration replaces all of these
  kByName,     // recorded; another value changes the run from the next step on, which a line says and the run
               // records
  kFixed,      // the state is made of it: another value is refused
  kOnce,       // recorded when the run begins: another value has no effect, which a line says
  kEachStart,  // given with each start
};

// The verbs whose command lines have a flag.
enum class Verb { kTrainAndPlan, kTrain, kPlan };

struct Setting {
  std::string_view name = "";  // of the key in its section; "": configurations do not have it
  KeyUse use;
  KeyType type;
  std::string_view why = "";  // kIgnored, kRefused: the rest of the line; kNeedless: for readers of the table
  std::string_view neutral =
      "";  // kRefused: a JSON scalar that is as good as absent, beside null, false and
           // "auto"; kIgnored: false; served, where it has no effect: what holds all the same
  double least =
      -std::numeric_limits<double>::infinity();  // numbers and sizes: both ends belong to the range
  double most = std::numeric_limits<double>::infinity();
  std::string_view infinite = "";   // a JSON scalar that infinity means; "": it is refused, as in a JSON text
  std::string_view choices = "";    // "none|cpu|nvme", spelled as served
  std::string_view canonical = "";  // the other spelling under which it is served; "" is this one
  bool old_name = false;            // the canonical spelling has replaced it: a note says so
  std::string_view help = "";       // served: what it is, with its unit; no full stop
  std::string_view fallback = "";   // what holds where nobody says
  std::string_view from_python = "";  // the same from Python, where that differs
  std::string_view flag = "";         // "--clip"
  Verb verbs = Verb::kTrainAndPlan;   // that have the flag
  std::string_view keyword = "";      // of penstock.initialize
  std::string_view python_type = "";  // of the keyword, where it takes more than a configuration can write
  std::string_view in_python = "";    // what the keyword's documentation says beyond `help`: whole sentences
  OnResume on_resume = OnResume::kAsConfigured;
  std::string_view record = "";                // its names in a run's record, separated by |; "": it has none
  std::string_view called = "";                // how messages name the key, where its path is not all of it
  bool of_rank = false;                        // ranks may differ in it
  std::string_view without_device = "";        // why it has no effect where no device has memory of its own
  std::string_view without_ranks = "";         // why it has no effect where one process trains
  std::string_view without_drive = "";         // why it has no effect where state is in memory
  std::string_view python_ignores = "";        // why it has no effect from Python
  std::string_view command_line_ignores = "";  // why it has no effect on the command line
  // False: its record has more or less under these names than its value (PartOf).
  bool whole = true;
  std::string_view deepspeeds =
      "";  // a JSON number: DeepSpeed's value of an absent key, and the Trainer's of "auto"
  std::string_view answers = "";  // the call of DeepSpeed's engine that gives what the configuration has here
  std::string_view answer = "";   // JSON: what it gives where the configuration has nothing; "": `deepspeeds`
  // JSON scalars, of what each run records as a whole: the value of a new run that nobody gives it to, and
  // that from Python, where it differs.
  std::string_view settled = "", settled_from_python = "";
  // Puts a checked value into its place in Config, and finds it there, null where the place is empty. Null:
  // `option` alone has it or, without one, what checks configurations has turned it into another key.
  void (*into)(Config& config, const nlohmann::json& value) = nullptr;
  nlohmann::json (*from)(const Config& config) = nullptr;
  // The engine's option that a checked value is, as it is: puts it there, and finds it there. Null: there is
  // none, or its value is made of several settings (run/config_options.h).
  void (*option)(zero::EngineOptions& options, const nlohmann::json& value) = nullptr;
  nlohmann::json (*option_of)(const zero::EngineOptions& options) = nullptr;

  // Whether a configuration has a place for its value, and the value there, null where it is empty.
  bool HasPlace() const { return into != nullptr || option != nullptr; }
  void Put(Config& config, const nlohmann::json& value) const;
  nlohmann::json Find(const Config& config) const;

 private:
  // First, since constant expressions below need their bodies.
  template <typename T>
  constexpr Setting With(T Setting::*member, T value) const {
    Setting made = *this;
    made.*member = value;
    return made;
  }
  constexpr Setting Resumes(OnResume what, std::string_view names) const {
    return With(&Setting::on_resume, what).With(&Setting::record, names);
  }

 public:
  // The row with one more thing said of it.
  constexpr Setting Says(std::string_view what, std::string_view otherwise = "") const {
    return With(&Setting::help, what).With(&Setting::fallback, otherwise);
  }
  constexpr Setting AtLeast(double bound) const { return With(&Setting::least, bound); }
  constexpr Setting Neutral(std::string_view value) const { return With(&Setting::neutral, value); }
  constexpr Setting InfinityIs(std::string_view value) const { return With(&Setting::infinite, value); }
  constexpr Setting Flag(std::string_view spelling) const { return With(&Setting::flag, spelling); }
  constexpr Setting Of(Verb which) const { return With(&Setting::verbs, which); }
  constexpr Setting Keyword(std::string_view spelling, std::string_view annotation = "") const {
    return With(&Setting::keyword, spelling).With(&Setting::python_type, annotation);
  }
  constexpr Setting InPython(std::string_view sentences) const {
    return With(&Setting::in_python, sentences);
  }
  constexpr Setting Python(std::string_view otherwise) const {
    return With(&Setting::from_python, otherwise);
  }
  constexpr Setting ByName(std::string_view names) const { return Resumes(OnResume::kByName, names); }
  // As ByName, of a value that is recorded within another form or together with others.
  constexpr Setting AsPart() const { return With(&Setting::whole, false); }
  constexpr Setting PartOf(std::string_view names) const { return ByName(names).AsPart(); }
  constexpr Setting DeepSpeeds(std::string_view value) const { return With(&Setting::deepspeeds, value); }
  constexpr Setting Answers(std::string_view call, std::string_view otherwise = "") const {
    return With(&Setting::answers, call).With(&Setting::answer, otherwise);
  }
  constexpr Setting Settles(std::string_view value, std::string_view otherwise = "") const {
    return With(&Setting::settled, value).With(&Setting::settled_from_python, otherwise);
  }
  constexpr Setting Fixed(std::string_view names) const { return Resumes(OnResume::kFixed, names); }
  constexpr Setting Once(std::string_view names) const { return Resumes(OnResume::kOnce, names); }
  constexpr Setting EachStart() const { return Resumes(OnResume::kEachStart, record); }
  constexpr Setting Called(std::string_view message) const { return With(&Setting::called, message); }
  constexpr Setting OfRank() const { return With(&Setting::of_rank, true); }
  constexpr Setting NeedsDevice(std::string_view because) const {
    return With(&Setting::without_device, because);
  }
  constexpr Setting NeedsRanks(std::string_view because) const {
    return With(&Setting::without_ranks, because);
  }
  constexpr Setting NeedsDrive(std::string_view because) const {
    return With(&Setting::without_drive, because);
  }
  constexpr Setting FromPython(std::string_view because) const {
    return With(&Setting::python_ignores, because);
  }
  constexpr Setting OnCommandLine(std::string_view because) const {
    return With(&Setting::command_line_ignores, because);
  }
  constexpr Setting Into(void (*put)(Config&, const nlohmann::json&),
                         nlohmann::json (*find)(const Config&)) const {
    return With(&Setting::into, put).With(&Setting::from, find);
  }
  // The value is in the optional that `Place()(config)` is.
  template <typename Place>
  constexpr Setting At(Place place) const;
  // The value is the engine's option that `Place()(options)` is.
  template <typename Place>
  constexpr Setting Sets(Place place) const;
};

// The value that a row's JSON scalar is (Setting::neutral, infinite, deepspeeds, settled).
nlohmann::json ScalarOf(std::string_view scalar);

// The choices of optimizer.type.
inline constexpr std::string_view kServedOptimizers = "Adam|AdamW|Adagrad|Lion|SGD|Lamb";

// The keys of the section at a canonical path: "" is the top, "zero_optimization.offload_param". The
// parameters of optimizers and schedules are at "optimizer.params/" and "scheduler.params/" followed by the
// type. Empty for a path that is no section.
std::span<const Setting> SectionKeys(std::string_view section);

// All section paths.
std::vector<std::string_view> SectionPaths();

// The settings that configurations do not have.
std::span<const Setting> SettingsWithoutKeys();

// The canonical path of a key of a section: "optimizer.params.lr".
std::string PathOf(std::string_view section, const Setting& setting);

// The row of a canonical path; null: there is none. Of a parameter of several optimizers or schedules it is
// that of the first one that serves it.
const Setting* FindKey(std::string_view path);

// The row of a flag ("--clip"), or of a keyword, and its canonical path, "" where configurations do not have
// it. Null: there is none.
std::pair<const Setting*, std::string> FindFlag(std::string_view flag);
std::pair<const Setting*, std::string> FindKeyword(std::string_view keyword);

// "Maximum global gradient norm; 0 disables clipping [1.0]". Empty for a flag without a row.
std::string HelpOf(std::string_view flag);

// `kind` ("a number") with its bounds: "a number from 0 to 1".
std::string RangeOf(const Setting& setting, std::string_view kind);

// "none, cpu, nvme".
std::string ChoicesOf(const Setting& setting);

// How messages name the key that has a name in a run's record: "penstock.sync" for "sync". A name that no key
// has is itself.
std::string KeyOfRecord(std::string_view name);

// The flag of what has this name in a run's record: "--clip" for "clip"; "": it has none.
std::string FlagOfRecord(std::string_view name);

// The front ends, of which each spells a setting in its own way.
enum class Door { kCommandLine, kPython };

// A message as its reader spells settings. A message for both doors names a setting in
// backticks, by its keyword or, without one, by its flag with _ for -: "`resume`" becomes "--resume" or
// "resume=True", "`offload nvme`" "--offload nvme" or "offload='nvme'", and from Python a setting that has no
// keyword the words of its name. What else is in backticks stays.
std::string Spelt(std::string_view message, Door door);

// Whether a run's state is made of what has this name in its record.
bool IsFixedInRecord(std::string_view name);

// What a configuration has at a canonical path; null: nothing.
nlohmann::json ValueAt(const Config& config, std::string_view path);

// What DeepSpeed's engine answers of its configuration, by call: the "paths" of the key there, in all
// spellings, and the "default" where there is none.
nlohmann::json DeepSpeedAnswers();

// Gives the engine what a configuration says of its options (Setting::option). Of what it does not say, they
// stay as they are.
void SetOptions(const Config& config, zero::EngineOptions* options);

// The settings with a key that are flags of `penstock train`, in the order of the table.
std::vector<const Setting*> SettingsWithFlags();

// Whether a key holds on resume as the last configuration said (OnResume::kAsConfigured).
bool HoldsAsConfigured(std::string_view path);

// Puts checked values (CheckedKeys::served) into their places.
void Fill(const std::map<std::string, nlohmann::json>& served, Config* config);

// What a configuration says of the settings that a run records under names of their own, by those names. Of
// what is recorded in another form (Setting::whole) there is nothing.
std::map<std::string, nlohmann::json> SaidByRecord(const Config& config);

// Gives `to` what `from` says of those settings whose name in a record (the first of several) is `taken`.
void CopyRecorded(const Config& from, const std::function<bool(const std::string&)>& taken, Config* to);

// Asks for the value of each setting that a run settles (Setting::settled): `ask` gets its name in the
// record, what the configuration says, null where it says nothing, and what a new run has then. Its answer
// goes into the configuration.
absl::Status Settle(const std::function<absl::StatusOr<nlohmann::json>(
                        const char* name, const nlohmann::json& given, const nlohmann::json& otherwise)>& ask,
                    Config* config);

// Gives what a run from Python records (KeptFromPython), and nobody has said, the value of a new run there.
void SettleFromPython(Config* config);

// By canonical path, what a run from Python may be resumed with another value of (OnResume::kByName) and has
// a keyword.
nlohmann::json KeptFromPython(const Config& config);

// What a configuration says of the settings in which ranks may not differ, by canonical path.
nlohmann::json SharedValues(const Config& config);

// Removes the keys that may have another value on each rank: directories, and budgets of memory.
void RemoveWhatRanksMayDifferIn(nlohmann::ordered_json* config);

// What a configuration says, by canonical path ("aio.block_size"): booleans, int64 for kWhole and kSize,
// double for kNumber, the canonical spelling for kChoice, an array of two doubles for kPair, of int64 for
// kWholes, of text for kPaths and kNames. Keys whose value is null or "auto" are absent.
struct CheckedKeys {
  std::map<std::string, nlohmann::json> served;
  std::vector<std::string> notes;  // in the file's order
  std::set<std::string> autos;     // canonical paths of keys whose value is "auto"
};

// Walks a parsed configuration along the table. kInvalidArgument, one line beginning with the key's path as
// given, for the first key that is unknown (at the top level: misspelt), refused, of a wrong type, out of
// range, or given under two spellings.
absl::StatusOr<CheckedKeys> CheckKeys(const nlohmann::ordered_json& root);

// A value of a setting as CheckedKeys has it. kInvalidArgument, which begins with `spelling`: of a wrong
// type, or out of range.
absl::StatusOr<nlohmann::json> CheckValue(const Setting& setting, const std::string& spelling,
                                          const nlohmann::ordered_json& value);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_SETTINGS_H_
