// What becomes of the flags of `penstock train` and `penstock plan`: flags over config file over defaults; on
// resume, what the run was made with.
#ifndef PENSTOCK_TOOLS_PENSTOCK_TRAIN_SETTINGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_TRAIN_SETTINGS_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "run/config.h"
#include "text/example.h"
#include "tools/penstock/train_options.h"
#include "zero/engine/engine.h"

namespace penstock::models {
class LanguageModel;
}  // namespace penstock::models
namespace penstock::zero {
struct TensorBatch;
}  // namespace penstock::zero

namespace penstock::tools {

inline constexpr int64_t kDefaultBatch = 2;

// Everything decided.
struct TrainSettings {
  std::shared_ptr<const models::LanguageModel> model;
  std::vector<std::string> data_paths;
  std::vector<double> data_weights;  // one for each path; empty: by their tokens
  std::string eval_path;
  double eval_split = 0;  // of the ends of data_paths; 0: none
  // Hugging Face's directory that the model came from, absolute; empty: none. Its tokenizer reads the text.
  std::string model_directory;
  int64_t steps = 100, batch = kDefaultBatch, accumulate = 1, seq = 0, vocab = 0, eval_every = 0;
  int64_t eval_windows = 0;  // at the most; 0: all
  struct Text {
    std::string tokenizer;  // where it lies; empty: none
    std::optional<text::ChatTemplate> chat;
    bool skip_broken = false;
  } text;
  run::Config config;  // of --config, with what flags and defaults filled; empty: there is none
  nlohmann::json to_record = nlohmann::json::object();  // what this start adds to the run's record
  zero::EngineOptions engine;                           // complete but for what hooks into the run
  std::vector<std::string> notes;                       // lines for people: keys ignored, choices made
  // With --overwrite, the ids of the runs that go ("" of one that has none): their logs may go with them.
  std::set<std::string> replaces;
  std::vector<std::string> decisions;  // those that they have to hear of, also with --quiet
  nlohmann::json recorded;             // the record of a run that goes on; null: a new one
  std::vector<std::string> changes;    // of it, by its user, from the next step on: lines for people
  bool resumes = false;                // a run or a checkpoint is there and goes on
  bool goes_back = false;              // to a checkpoint or the beginning: logged steps come again

  bool on_nvme() const { return engine.storage.offload == zero::OffloadDevice::kNvme; }
  // Of all ranks.
  int64_t SamplesPerStep() const { return batch * accumulate * engine.world(); }
  int64_t TokensPerStep() const { return SamplesPerStep() * seq; }
};

// kInvalidArgument for wrong flags, kFailedPrecondition for a state directory or directory of checkpoints
// that is another's or in use. `needs_data`: false where only shapes matter: then nothing is written
// anywhere. `comm`: the other ranks, null for none; all of them call this.
absl::StatusOr<TrainSettings> ResolveTrainOptions(const TrainOptions& flags, bool needs_data,
                                                  std::shared_ptr<zero::Comm> comm = nullptr);

// One micro-batch of the run's shapes, contents zero.
zero::TensorBatch ExampleBatch(int64_t batch, int64_t seq);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_TRAIN_SETTINGS_H_
