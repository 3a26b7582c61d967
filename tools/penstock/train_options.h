// The flags of `penstock train` and `penstock plan`, and what becomes of them: flags over config file over
// defaults; on resume, what the run was made with.
#ifndef PENSTOCK_TOOLS_PENSTOCK_TRAIN_OPTIONS_H_
#define PENSTOCK_TOOLS_PENSTOCK_TRAIN_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/dataset.h"
#include "models/gpt.h"
#include "zero/engine/engine.h"

namespace CLI {
class App;
}  // namespace CLI

namespace penstock::tools {

// As given; empty: not given.
struct TrainOptions {
  std::optional<std::string> model, data, eval_data, config, offload, host_memory, device_memory, device,
      dtype;
  std::vector<std::string> state_dirs;
  std::optional<int64_t> eval_every, eval_windows, steps, batch, accumulate, seq, vocab, warmup, seed,
      threads, checkpoint_every, checkpoint_keep;
  std::optional<double> lr, clip, weight_decay, rank_timeout;
  std::optional<std::string> optimizer_states;
  std::optional<std::string> init_from, checkpoint_dir, report, log, trace;
  bool resume = false, overwrite = false, check = false, quiet = false, json = false;
};

// Adds the flags to `app`. `plans`: of the verb plan, which has --json and needs no data.
void DeclareTrainOptions(CLI::App& app, TrainOptions& flags, bool plans);

inline constexpr int64_t kDefaultBatch = 2;

// Everything decided.
struct TrainSettings {
  models::GptConfig model;
  std::string data_path, eval_path;
  int64_t steps = 100, batch = kDefaultBatch, accumulate = 1, seq = 0, vocab = 0, eval_every = 0;
  int64_t eval_windows = 0;                        // at the most; 0: all
  nlohmann::json kept = nlohmann::json::object();  // of the optimizer: part of engine.run
  zero::EngineOptions engine;                      // complete but for what hooks into the run
  std::vector<std::string> notes;                  // lines for people: keys ignored, choices made
  // With --overwrite, the ids of the runs that go ("" of one that has none): their logs may go with them.
  std::set<std::string> replaces;
  std::vector<std::string> decisions;  // those that they have to hear of, also with --quiet
  nlohmann::json recorded;             // the record of a run that goes on; null: a new one
  std::vector<std::string> changes;    // of it, by its user, from the next step on: lines for people
  bool resumes = false;                // a run or a checkpoint is there and goes on
  bool goes_back = false;              // to a checkpoint or the beginning: logged steps come again
};

// kInvalidArgument for wrong flags, kFailedPrecondition for a state directory or directory of checkpoints
// that is another's or in use. `needs_data`: false where only shapes matter: then nothing is written
// anywhere. `comm`: the other ranks, null for none; all of them call this.
absl::StatusOr<TrainSettings> ResolveTrainOptions(const TrainOptions& flags, bool needs_data,
                                                  std::shared_ptr<zero::Comm> comm = nullptr);

// One micro-batch of the run's shapes, contents zero.
zero::Batch ExampleBatch(int64_t batch, int64_t seq);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_TRAIN_OPTIONS_H_
