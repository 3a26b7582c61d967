// `penstock import-checkpoint`: a run of DeepSpeed's becomes one of ours, with masters, moments, step and
// schedule.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "base/write_all.h"
#include "models/deepspeed/checkpoint.h"
#include "models/families/family.h"
#include "models/families/stages.h"
#include "run/record/recorded_config.h"
#include "swap/store.h"
#include "tools/base/cli.h"
#include "tools/base/process_start.h"
#include "tools/base/verbs.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"
#include "tools/penstock/vocabulary_flags.h"
#include "tools/state/state_reader.h"
#include "zero/compute/libtorch/model.h"
#include "zero/config/json_field.h"
#include "zero/engine/new_state.h"
#include "zero/engine/state_identity.h"

namespace penstock::tools {
namespace {

constexpr const char* kImportCheckpointName = "penstock import-checkpoint";
constexpr const char* kTheirConfig = "the checkpoint's ds_config";

struct ImportCheckpointFlags {
  TrainOptions train;
  std::string checkpoint, names;
  std::vector<swap::CommitSeen> replaces;  // what --state-dir held when this process was started
};

// The config that the run was made with, as one for a single rank: the global batch stays.
nlohmann::json TheirConfig(const models::DeepSpeedProgress& progress, std::vector<std::string>* notes) {
  nlohmann::json config = progress.config;
  const auto micro = zero::JsonField<int64_t>(config, "train_micro_batch_size_per_gpu");
  if (micro.has_value() && progress.ranks > 1) {
    config["train_micro_batch_size_per_gpu"] = *micro * progress.ranks;
    notes->push_back(absl::StrCat("a micro-batch of ", *micro * progress.ranks, ": that of ", progress.ranks,
                                  " ranks together"));
  }
  if (const auto field = config.find("checkpoint"); field != config.end()) config.erase(field);
  if (config.contains("optimizer") && config["optimizer"].is_object()) {
    nlohmann::json& optimizer = config["optimizer"];
    // Which of torch's or its own classes computes is of no matter here.
    if (optimizer.contains("params") && optimizer["params"].is_object())
      optimizer["params"].erase("torch_adam");
  } else if (progress.optimizer.is_object()) {
    const bool coupled = progress.optimizer.value("decoupled_weight_decay", nlohmann::json(true)) == false;
    nlohmann::json params = nlohmann::json::object();
    for (const char* key : {"lr", "betas", "eps", "weight_decay"}) {
      if (progress.optimizer.contains(key)) params[key] = progress.optimizer[key];
    }
    config["optimizer"] = {{"type", coupled ? "Adam" : "AdamW"}, {"params", std::move(params)}};
  }
  const bool scheduled = config.contains("scheduler") && config["scheduler"].is_object();
  if (!scheduled && progress.optimizer.is_object() && progress.optimizer.contains("lr") &&
      config.contains("optimizer") && config["optimizer"]["params"].is_object()) {
    config["optimizer"]["params"]["lr"] = progress.optimizer["lr"];
    if (!progress.lr_scheduler.is_null())
      notes->push_back(absl::StrCat("its scheduler is a program's and not the config's: the rate stays at ",
                                    progress.optimizer["lr"].dump(),
                                    ", unless --lr or --config says otherwise"));
  }
  return config;
}

// A file with it, gone with this object.
class ConfigFile {
 public:
  ConfigFile() = default;
  ~ConfigFile() {
    std::error_code error;
    if (!path_.empty()) std::filesystem::remove(path_, error);
  }
  ConfigFile(const ConfigFile&) = delete;
  ConfigFile& operator=(const ConfigFile&) = delete;

  absl::Status Write(const nlohmann::json& config) {
    std::error_code ignored;  // without one the name is relative
    std::string path = (std::filesystem::temp_directory_path(ignored) / "ds_config.XXXXXX").string();
    const int fd = ::mkstemp(path.data());
    if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be made: set TMPDIR"));
    path_ = path;
    const int error = WriteAll(fd, config.dump());
    ::close(fd);
    return error == 0 ? absl::OkStatus() : absl::ErrnoToStatus(error, absl::StrCat(path_, ": write"));
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// `penstock train` has one learning rate and one set of options for all parameters.
absl::Status CheckOneGroup(const models::DeepSpeedCheckpoint& checkpoint) {
  const nlohmann::json& groups = checkpoint.progress().groups;
  for (const nlohmann::json& group : groups) {
    for (const char* key : {"lr", "betas", "eps", "weight_decay"}) {
      const nlohmann::json first = groups[0].value(key, nlohmann::json());
      const nlohmann::json other = group.value(key, nlohmann::json());
      if (other != first)
        return absl::InvalidArgumentError(absl::StrCat(
            checkpoint.directory(), ": its parameter groups have different ", key, " (", first.dump(), ", ",
            other.dump(),
            "): one for all parameters is served; engine.load_checkpoint of Python takes several"));
    }
  }
  return absl::OkStatus();
}

// ImportCheckpointFlags over the config of the checkpoint.
absl::StatusOr<TrainSettings> Settings(const ImportCheckpointFlags& flags,
                                       const models::DeepSpeedProgress& progress) {
  TrainOptions train = flags.train;
  std::vector<std::string> notes;
  ConfigFile file;
  if (!train.config.has_value() && progress.config.is_object()) {
    RETURN_IF_ERROR(file.Write(TheirConfig(progress, &notes)));
    train.config = file.path();
  }
  train.others["--offload"] = "nvme";
  train.steps = std::max(train.steps.value_or(100), progress.step);
  absl::StatusOr<TrainSettings> settings = ResolveTrainOptions(train, /*needs_data=*/false);
  const auto named = [&](const std::string& text) {
    return file.path().empty() ? text : absl::StrReplaceAll(text, {{file.path(), kTheirConfig}});
  };
  if (!settings.ok())
    return absl::Status(settings.status().code(), named(std::string(settings.status().message())));
  for (std::string& note : settings->notes) note = named(note);
  // What it says of another machine's memory, drives and monitors is no wish for this one.
  if (!file.path().empty() && settings->engine.resume.run.erase(run::kRecordedConfigKey) > 0)
    notes.push_back(
        absl::StrCat("what ", kTheirConfig,
                     " says of memory, drives and monitors is not kept: give train --config for it"));
  settings->notes.insert(settings->notes.end(), notes.begin(), notes.end());
  return settings;
}

// What differs between the checkpoint and what was asked for, as far as the run would differ.
absl::Status CheckAgainst(const models::DeepSpeedProgress& progress, const TrainSettings& settings,
                          std::vector<std::string>* notes) {
  const std::string optimizer = zero::OptimizerName(settings.engine.optimizer.algorithm);
  if (optimizer != "adam")
    return absl::InvalidArgumentError(
        absl::StrCat("the config's optimizer is ", optimizer, ", and the checkpoint has Adam's moments"));
  const auto index = zero::JsonField<int64_t>(progress.lr_scheduler, "last_batch_iteration");
  if (settings.engine.optimizer.schedule.has_value() && index.has_value() && *index + 1 != progress.updates)
    notes->push_back(absl::StrCat("its scheduler has made ", *index + 1, " steps and its optimizer ",
                                  progress.updates, ": rates go on by the optimizer's count"));
  return absl::OkStatus();
}

absl::Status Import(const ImportCheckpointFlags& flags, std::ostream& out, std::ostream& err) {
  if (!flags.train.model.has_value())
    return absl::InvalidArgumentError("--model is needed: a config.json, a directory with one, or a preset");
  if (flags.train.state_dirs.empty())
    return absl::InvalidArgumentError("--state-dir is needed: where the run goes on");
  if (flags.train.resume) return absl::InvalidArgumentError("--resume: an import begins a run");
  if (flags.train.lora_rank.has_value())
    return absl::InvalidArgumentError("--lora-rank: an imported run trains all of its weights: leave it out");
  if (flags.train.overwrite) RETURN_IF_ERROR(swap::CheckSeen(flags.train.state_dirs, flags.replaces));
  ASSIGN_OR_RETURN(std::shared_ptr<const models::LanguageModel> model, models::OpenModel(*flags.train.model));
  if (flags.train.vocab.has_value()) model = model->WithVocabulary(*flags.train.vocab);
  ASSIGN_OR_RETURN(model, InTiles(std::move(model), flags.train));  // as Settings has it
  models::NameMap names;
  if (!flags.names.empty()) {
    ASSIGN_OR_RETURN(names, models::ReadNames(flags.names));
  }
  ASSIGN_OR_RETURN(
      std::unique_ptr<models::DeepSpeedCheckpoint> checkpoint,
      models::DeepSpeedCheckpoint::Open(flags.checkpoint, model->Layout(), names, {.names = "--names FILE"}));
  const models::DeepSpeedProgress& progress = checkpoint->progress();
  RETURN_IF_ERROR(CheckOneGroup(*checkpoint));
  ASSIGN_OR_RETURN(TrainSettings settings, Settings(flags, progress));
  zero::EngineOptions& options = settings.engine;
  RETURN_IF_ERROR(CheckAgainst(progress, settings, &settings.notes));
  std::string note;
  ASSIGN_OR_RETURN(const nlohmann::json loss_scale,
                   models::LossScaleOf(options.dtype, options.optimizer.loss_scale, progress, &note));
  if (!note.empty()) settings.notes.push_back(std::move(note));
  if (!flags.train.quiet) {
    for (const std::string& line : settings.notes) err << line << "\n" << std::flush;
  }

  const std::vector<int64_t>& counts = checkpoint->updates();
  if (const auto other = std::find_if(counts.begin(), counts.end(),
                                      [&](int64_t count) { return count != progress.updates; });
      other != counts.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint->directory(), ": parameters have had ", *other, " and ", progress.updates,
                     " updates, since no gradient came to some: penstock train has one count for all. Go on "
                     "from it with load_checkpoint of penstock.initialize"));
  }

  zero::NewState state;
  state.format = zero::FormatOf(options);
  state.block_elements = settings.model->Layout().block_elements;
  tiering::ModelGraph graph;
  for (const int64_t elements : state.block_elements)
    graph.blocks.push_back({.name = {}, .elements = elements});
  state.identity =
      zero::IdentityOf(models::MakeModel(*settings.model).identity, options, state.format, graph).dump();
  options.resume.run["imported"] = {
      {"format", progress.format}, {"step", progress.step}, {"torch_optimizer", progress.step_is_tensor}};
  const nlohmann::json schedule =
      options.optimizer.schedule.has_value() ? options.optimizer.schedule->ToJson() : nlohmann::json();
  state.payload =
      nlohmann::json{{"run", options.resume.run}, {"schedule", schedule}, {"loss_scale", loss_scale}}.dump();
  state.check = [&] { return checkpoint->CheckRead(); };
  state.step = progress.step;
  state.updates = progress.updates;
  state.tile_bytes = options.memory.tile_bytes;
  state.store.directories = options.storage.state_dirs;
  state.store.weights = zero::ChooseStripes(options.storage, options.memory.host_memory_budget_bytes).weights;
  state.store.sync = options.storage.sync;
  state.store.overwrite = flags.train.overwrite;
  state.store.overwrites_only = flags.replaces;
  if (options.storage.versions > 0) state.store.slots = static_cast<uint32_t>(options.storage.versions);
  const auto read = [&](zero::StateKind kind, int block, int64_t first, int64_t elements, float* to) {
    return checkpoint->Read(kind, block, first, elements, to);
  };
  // A run that is replaced is as it was until all of the checkpoint has been read and checked.
  if (!flags.replaces.empty()) RETURN_IF_ERROR(zero::ReadWhole(state, read));
  {
    ByteProgress shown("importing", flags.train.quiet);
    RETURN_IF_ERROR(
        zero::WriteNewState(state, read, [&](uint64_t done, uint64_t total) { shown.Update(done, total); }));
  }
  if (!flags.train.quiet) {
    out << absl::StrFormat(
               "%s: step %d of %s (%s), %d parameters as %s; go on with penstock train --resume\n",
               options.storage.state_dirs.front(), progress.step, checkpoint->directory(), progress.format,
               settings.model->Layout().parameters(), std::string(zero::DTypeName(state.format.weights)))
        << std::flush;
  }
  return absl::OkStatus();
}

}  // namespace

int RunImportCheckpoint(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("Makes a state directory of a checkpoint of DeepSpeed's (ZeRO-1, 2, 3 or universal)",
               kImportCheckpointName);
  ImportCheckpointFlags flags;
  app.add_option("CHECKPOINT", flags.checkpoint, "What save_checkpoint or ds_to_universal wrote")->required();
  app.add_option("--names", flags.names,
                 "JSON: Hugging Face's name of a parameter -> its name in the checkpoint, where they differ");
  DeclareTrainOptions(app, flags.train, /*plans=*/true);
  app.add_flag("--quiet", flags.train.quiet, "No progress, no notes, no summary");
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  if (flags.train.overwrite) flags.replaces = swap::SeeCommits(flags.train.state_dirs, ProcessStartNs());
  const absl::Status status = Import(flags, out, err);
  return status.ok() ? kExitOk : Fail(kImportCheckpointName, status, err);
}

}  // namespace penstock::tools
