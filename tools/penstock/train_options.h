// The flags of `penstock train` and `penstock plan`, as given.
#ifndef PENSTOCK_TOOLS_PENSTOCK_TRAIN_OPTIONS_H_
#define PENSTOCK_TOOLS_PENSTOCK_TRAIN_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "run/given_values.h"

namespace CLI {
class App;
}  // namespace CLI

namespace penstock::tools {

// Where state lives unless a flag or the config says.
inline constexpr const char* kDefaultStateDir = "penstock-state";

// Empty: not given.
struct TrainOptions {
  std::vector<std::string> data;
  std::optional<std::string> model, eval_data, config, device, dtype, tokenizer, chat_template;
  std::vector<std::string> state_dirs;
  std::vector<double> state_dir_weights;  // of --state-dir DIR=WEIGHT; empty: none was given
  std::optional<int64_t> eval_every, eval_windows, steps, batch, accumulate, seq, vocab, warmup, seed,
      threads, checkpoint_every, checkpoint_keep, lora_rank;
  std::vector<double> data_weights;
  std::optional<double> lr, rank_timeout, eval_split, lora_alpha, lora_dropout;
  std::optional<std::string> optimizer, lora_targets, vocabulary_tiles;
  std::optional<std::string> init_from, checkpoint_dir, report, log, trace, prometheus;
  bool resume = false, overwrite = false, check = false, quiet = false, json = false,
       skip_broken_lines = false;
  // Of all other flags that the table of settings has: what they say is the table's to check and to use.
  run::GivenValues others;
};

// The values of those that have one, by their names ("--lr"). Directories are without their weights.
run::GivenValues GivenFlags(const TrainOptions& flags);

// The paths of what they say is to be read, directories of models among them.
std::vector<std::string> FilesRead(const TrainOptions& flags);

// Adds the flags to `app`. `plans`: of the verb plan, which has --json and needs no data.
void DeclareTrainOptions(CLI::App& app, TrainOptions& flags, bool plans);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_TRAIN_OPTIONS_H_
