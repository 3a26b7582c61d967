#include "tools/penstock/train_options.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/statusor.h"
#include "run/config.h"
#include "run/settings.h"

namespace penstock::tools {

namespace {

enum class Of { kPlan, kTrain };

// Calls visit(name, value) for each flag of a verb that has a member, in the order of its help; `others`
// where those of TrainOptions::others come.
template <typename Options, typename Visit, typename Others>
void VisitFlags(Of verb, Options& flags, const Visit& visit, const Others& others) {
  visit("--model", flags.model);
  visit("--lora-rank", flags.lora_rank);
  visit("--lora-alpha", flags.lora_alpha);
  visit("--lora-dropout", flags.lora_dropout);
  visit("--lora-targets", flags.lora_targets);
  visit("--vocabulary-tiles", flags.vocabulary_tiles);
  visit("--data", flags.data);
  visit("--data-weights", flags.data_weights);
  visit("--tokenizer", flags.tokenizer);
  visit("--chat-template", flags.chat_template);
  visit("--skip-broken-lines", flags.skip_broken_lines);
  visit("--eval-data", flags.eval_data);
  visit("--eval-split", flags.eval_split);
  visit("--eval-every", flags.eval_every);
  visit("--eval-windows", flags.eval_windows);
  visit("--vocab", flags.vocab);
  visit("--config", flags.config);
  visit("--state-dir", flags.state_dirs);
  others();
  visit("--device", flags.device);
  visit("--dtype", flags.dtype);
  visit("--steps", flags.steps);
  visit("--batch", flags.batch);
  visit("--accumulate", flags.accumulate);
  visit("--seq", flags.seq);
  visit("--lr", flags.lr);
  visit("--warmup", flags.warmup);
  visit("--optimizer", flags.optimizer);
  visit("--seed", flags.seed);
  visit("--threads", flags.threads);
  visit("--resume", flags.resume);
  visit("--overwrite", flags.overwrite);
  visit("--init-from", flags.init_from);
  visit("--checkpoint-dir", flags.checkpoint_dir);
  visit("--checkpoint-every", flags.checkpoint_every);
  visit("--checkpoint-keep", flags.checkpoint_keep);
  if (verb == Of::kPlan) {
    visit("--json", flags.json);
  } else {
    visit("--rank-timeout", flags.rank_timeout);
    visit("--report", flags.report);
    visit("--log", flags.log);
    visit("--prometheus", flags.prometheus);
    visit("--trace", flags.trace);
    visit("--check", flags.check);
    visit("--quiet", flags.quiet);
  }
}

bool IsGiven(bool flag) { return flag; }
template <typename T>
bool IsGiven(const std::optional<T>& value) {
  return value.has_value();
}
template <typename T>
bool IsGiven(const std::vector<T>& values) {
  return !values.empty();
}

// The value of a flag is of the setting's type where that is a number, and else text.
void DeclareOther(const run::Setting& setting, CLI::App& app, run::GivenValues& values) {
  const std::string flag(setting.flag), help = run::HelpOf(flag);
  const auto take = [&values, flag](const auto& value) { values[flag] = value; };
  if (setting.type == run::KeyType::kBool) {
    // Of several the last one counts; what is neither true nor false is refused as of any other flag.
    const auto last = std::make_shared<bool>(false);
    app.add_flag(flag, *last, help)->each([take, last](const std::string& given) {
      if (CLI::detail::lexical_cast(given, *last)) take(*last);
    });
  } else if (setting.type == run::KeyType::kWhole) {
    app.add_option_function<int64_t>(flag, take, help);
  } else if (setting.type == run::KeyType::kNumber) {
    app.add_option_function<double>(flag, take, help);
  } else {
    app.add_option_function<std::string>(flag, take, help);
  }
}

}  // namespace

run::GivenValues GivenFlags(const TrainOptions& flags) {
  run::GivenValues given = flags.others;
  const auto add = [&given]<typename T>(const char* name, const T& value) {
    if (!IsGiven(value)) return;
    if constexpr (requires { value.value(); }) {
      given[name] = *value;
    } else {
      given[name] = value;
    }
  };
  VisitFlags(Of::kTrain, flags, add, [] {});
  return given;
}

std::vector<std::string> FilesRead(const TrainOptions& flags) {
  std::vector<std::string> files = flags.data;
  for (const auto* one : {&flags.eval_data, &flags.config, &flags.model, &flags.init_from, &flags.tokenizer,
                          &flags.chat_template}) {
    if (one->has_value()) files.push_back(**one);
  }
  return files;
}

void DeclareTrainOptions(CLI::App& app, TrainOptions& flags, bool plans) {
  // A flag given twice means its last value, so that scripts can be given further flags.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto declare = [&app]<typename T>(const char* name, T& to) {
    if constexpr (std::is_same_v<T, bool>) {
      app.add_flag(name, to, run::HelpOf(name));
    } else {
      app.add_option(name, to, run::HelpOf(name));
    }
  };
  std::set<std::string> members;
  const auto remember = [&members](const char* name, const auto&) { members.insert(name); };
  VisitFlags(Of::kPlan, flags, remember, [] {});
  VisitFlags(plans ? Of::kPlan : Of::kTrain, flags, declare, [&] {
    const run::Verb other_verb = plans ? run::Verb::kTrain : run::Verb::kPlan;
    for (const run::Setting* const setting : run::SettingsWithFlags()) {
      if (setting->verbs != other_verb && !members.contains(std::string(setting->flag)))
        DeclareOther(*setting, app, flags.others);
    }
  });
  for (const char* const repeated : {"--data", "--state-dir"})
    app.get_option(repeated)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.get_option("--data-weights")->delimiter(',');
  app.parse_complete_callback([&flags] {
    absl::StatusOr<run::StateDirectories> parsed = run::ParseStateDirectories(flags.state_dirs);
    if (!parsed.ok()) throw CLI::ValidationError("--state-dir", std::string(parsed.status().message()));
    flags.state_dirs = std::move(parsed->paths);
    flags.state_dir_weights = std::move(parsed->weights);
  });
  if (plans) return;
  app.footer(
      "Several processes train together where the environment says so: RANK, WORLD_SIZE, LOCAL_RANK, "
      "MASTER_ADDR and "
      "MASTER_PORT as torchrun sets them, or what mpirun and srun set. Each has --batch sequences, and its "
      "part of the "
      "state in rank-K/ of --state-dir; rank 0 writes report, log and progress. They know each other by the "
      "secret in PENSTOCK_RANKS_SECRET, or in the file .penstock.ranks-secret of a --state-dir that all of "
      "them see.");
}

}  // namespace penstock::tools
