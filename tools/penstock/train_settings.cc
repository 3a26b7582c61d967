#include "tools/penstock/train_settings.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/directory.h"
#include "base/output_path.h"
#include "base/status_macros.h"
#include "kernels/cpu_features.h"
#include "models/data/dataset.h"
#include "models/families/family.h"
#include "models/weights/weight_files.h"
#include "models/weights/weight_import.h"
#include "run/config.h"
#include "run/record/recorded_config.h"
#include "run/record/recorded_options.h"
#include "run/record/run_record.h"
#include "run/settings.h"
#include "run/unused_keys.h"
#include "swap/inspect.h"
#include "tools/base/flag_check.h"
#include "tools/base/size.h"
#include "tools/penstock/batch_flags.h"
#include "tools/penstock/checkpoint_flags.h"
#include "tools/penstock/config_flags.h"
#include "tools/penstock/lora_base.h"
#include "tools/penstock/lora_flags.h"
#include "tools/penstock/plan_model.h"
#include "tools/penstock/ranks.h"
#include "tools/penstock/resource_flags.h"
#include "tools/penstock/resumable_run.h"
#include "tools/penstock/schedule_flags.h"
#include "tools/penstock/text_flags.h"
#include "tools/penstock/vocabulary_flags.h"
#include "zero/compute/libtorch/tensors.h"
#include "zero/compute/libtorch/threads.h"
#include "zero/config/json_difference.h"
#include "zero/engine/change_ranks.h"
#include "zero/memory/thread_times.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::tools {
namespace {

// The type to compute in, as a name.
absl::StatusOr<std::string> ChooseDtype(const TrainOptions& flags, const run::Config& config,
                                        std::vector<std::string>* notes) {
  const bool fast_bf16 = kernels::GetCpuFeatures().avx512_bf16;
  std::string dtype = flags.dtype.value_or("auto");
  if (dtype == "auto" && config.fp16.enabled.value_or(false)) dtype = "fp16";
  if (dtype == "auto" && config.bf16.has_value()) dtype = *config.bf16 ? "bf16" : "fp32";
  if (dtype == "auto") dtype = fast_bf16 ? "bf16" : "fp32";
  if (!zero::ParseDType(dtype).has_value()) {
    return WrongFlag(absl::StrCat("--dtype ", dtype, ": must be bf16, fp16, fp32 or auto"));
  }
  if (dtype == "bf16" && !fast_bf16) {
    notes->push_back(
        "bf16 was asked for, but this processor has no bf16 instructions: fp32 is up to 200 times faster "
        "here");
  }
  return dtype;
}

// DeepSpeed's answer to a file without offload is none; a --state-dir asks for a drive.
absl::StatusOr<zero::OffloadDevice> ChooseOffload(const TrainOptions& flags, const run::ParsedConfig& parsed,
                                                  std::vector<std::string>* filled) {
  const std::optional<zero::OffloadDevice> given = run::CombinedOffload(parsed.config.zero);
  if (given.has_value()) return *given;
  if (!parsed.deepspeeds || !flags.state_dirs.empty() || parsed.config.penstock.state_dirs.has_value())
    return zero::OffloadDevice::kNvme;
  // A run that is there goes on where it is.
  if (flags.resume) {
    const swap::Holding holding = swap::Probe(std::vector<std::string>{kDefaultStateDir}).holding;
    if (holding != swap::Holding::kNothing && holding != swap::Holding::kForeign)
      return zero::OffloadDevice::kNvme;
  }
  filled->push_back("zero_optimization.offload_optimizer: none (--offload nvme trains from a drive)");
  return zero::OffloadDevice::kNone;
}

// --model says what the weights of --init-from are used for: said where they were made for another function.
void NoteAnotherFunction(const std::string& weights, TrainSettings* settings) {
  const absl::StatusOr<nlohmann::json> published = models::ConfigOfWeights(weights);
  if (!published.ok() || published->is_null()) return;
  const auto theirs = models::ModelFromJson(*published);
  if (!theirs.ok()) {
    settings->notes.push_back(absl::StrCat("--init-from ", weights,
                                           ": by its config.json these are weights of "
                                           "another model (",
                                           std::string(theirs.status().message()),
                                           "); --model is taken at its word"));
    return;
  }
  const nlohmann::ordered_json a = settings->model->ToPublished(), b = (*theirs)->ToPublished();
  // What is no part of the function, and shapes, which the weights themselves tell.
  const std::set<std::string> others = {
      "architectures", "initializer_range", "n_positions",  "n_ctx",       "max_position_embeddings",
      "vocab_size",    "bos_token_id",      "eos_token_id", "pad_token_id"};
  std::vector<std::string> differences;
  for (const auto& [key, value] : a.items()) {
    const nlohmann::ordered_json their = b.value(key, nlohmann::ordered_json());
    if (others.count(key) > 0 || value == their) continue;
    differences.push_back(absl::StrCat(key, " ", value.dump(), ", not ", their.dump()));
  }
  if (differences.empty()) return;
  settings->notes.push_back(absl::StrCat("--init-from ", weights,
                                         ": --model computes something else than its "
                                         "config.json: ",
                                         absl::StrJoin(differences, "; "),
                                         "; without --model that one is taken"));
}

// Decides one thing after the other; each step may rest on those before it.
class Resolver {
 public:
  Resolver(const TrainOptions& flags, bool needs_data, std::shared_ptr<zero::Comm> comm)
      : flags_(flags), needs_data_(needs_data), recorded_(run_, GivenFlags(flags), &changes_) {
    engine_.comm = std::move(comm);
    parsed_.deepspeeds = false;  // without a file the program's own defaults hold
  }
  Resolver(const Resolver&) = delete;
  Resolver& operator=(const Resolver&) = delete;

  absl::StatusOr<TrainSettings> Resolve() {
    if (flags_.config.has_value()) {
      ASSIGN_OR_RETURN(parsed_, run::LoadConfig(*flags_.config));
      settings_.notes = parsed_.notes;
      for (std::string& note : run::KeysUnusedOnCommandLine(config_))
        settings_.notes.push_back(std::move(note));
      RETURN_IF_ERROR(
          ResolveElasticity(flags_, engine_.world(), /*starts=*/needs_data_, &config_, &settings_.notes));
      NoteConfig(config_, recorded_);
    }
    RETURN_IF_ERROR(TakeFlags(flags_, &config_, &settings_.notes));
    if (needs_data_ && flags_.data.empty()) return WrongFlag("--data FILE is needed: the text to learn");
    if (flags_.resume && flags_.overwrite) return WrongFlag("--resume and --overwrite: one or the other");
    RETURN_IF_ERROR(ChooseStorage());
    RETURN_IF_ERROR(TakeRun());
    for (std::string& note :
         run::UnusedPlaceKeys(config_, engine_.world(), engine_.storage.offload, GivenFlags(flags_)))
      settings_.notes.push_back(std::move(note));
    if (engine_.resume.enabled) RETURN_IF_ERROR(run::FitConfigToStore(engine_.storage, &config_));
    RETURN_IF_ERROR(ChooseModel());
    RETURN_IF_ERROR(ChooseData());
    RETURN_IF_ERROR(ChooseEvaluation());
    RETURN_IF_ERROR(ChooseVocabulary());
    RETURN_IF_ERROR(ChooseSteps());
    RETURN_IF_ERROR(ChooseSequences());
    RETURN_IF_ERROR(ChooseSeedAndThreads());
    RETURN_IF_ERROR(ChooseComputeType());
    RETURN_IF_ERROR(ResolveOptimizer(flags_, recorded_, run_, &changes_, &parsed_, &settings_));
    ChooseDataOrder();
    RETURN_IF_ERROR(ResolveText(flags_, run_, &settings_));
    RETURN_IF_ERROR(ResolveMemory(flags_, config_, &settings_));
    ResolveIo(config_, &settings_);
    RETURN_IF_ERROR(ChooseInitialWeights());
    RETURN_IF_ERROR(MakeExample());
    Record();
    settings_.config = config_;
    for (std::vector<std::string>* lines : {&settings_.notes, &settings_.decisions, &settings_.changes})
      for (std::string& line : *lines) line = run::Spelt(line, run::Door::kCommandLine);
    return std::move(settings_);
  }

 private:
  // Where state and checkpoints live, and that a start which does not resume replaces nothing unasked.
  absl::Status ChooseStorage() {
    ASSIGN_OR_RETURN(engine_.storage.offload, ChooseOffload(flags_, parsed_, &filled_));
    const bool on_drive = engine_.storage.offload == zero::OffloadDevice::kNvme;
    // A plan may be for another machine: that nobody may write here is no error there.
    const bool writes = !flags_.resume && (needs_data_ || flags_.check);
    if (on_drive) {
      engine_.storage.state_dirs = flags_.state_dirs;
      engine_.storage.state_dir_weights = flags_.state_dir_weights;
      if (flags_.state_dirs.empty()) {
        ASSIGN_OR_RETURN(run::StateDirectories configured, run::StateDirectoriesOf(config_));
        engine_.storage.state_dirs = std::move(configured.paths);
        engine_.storage.state_dir_weights = std::move(configured.weights);
      }
      if (engine_.storage.state_dirs.empty()) engine_.storage.state_dirs = {kDefaultStateDir};
      all_ranks_dirs_ = engine_.storage.state_dirs;
      if (needs_data_) {
        RETURN_IF_ERROR(zero::FinishChangeOfRanks(engine_.comm.get(), all_ranks_dirs_));
      }
      if (!flags_.resume || config_.penstock.resume_ranks != "any") {
        RETURN_IF_ERROR(CheckRankDirectories(engine_.storage.state_dirs, engine_.world()));
      }
      if (engine_.comm != nullptr)
        engine_.storage.state_dirs = zero::RankDirectories(engine_.storage.state_dirs, engine_.rank());
      for (const std::string& directory : engine_.storage.state_dirs)
        RETURN_IF_ERROR(CheckDirectoryPlace("--state-dir", directory, writes));
    }
    if (needs_data_ && !flags_.resume && !flags_.overwrite && on_drive) {
      RETURN_IF_ERROR(CheckFree(engine_.storage.state_dirs));
    }
    RETURN_IF_ERROR(ResolveCheckpoints(flags_, &settings_));
    const zero::CheckpointSchedule& checkpoints = engine_.storage.checkpoints;
    if (checkpoints.any()) {
      RETURN_IF_ERROR(CheckDirectoryPlace("--checkpoint-dir", checkpoints.parent, writes));
    }
    if (needs_data_ && flags_.overwrite) {
      RETURN_IF_ERROR(SeeReplaced(&settings_));
    }
    if (flags_.resume) {
      RETURN_IF_ERROR(CheckWasThere(flags_, engine_));
    }
    if (needs_data_) {
      RETURN_IF_ERROR(TakeCheckpoints(&settings_));
      RETURN_IF_ERROR(CheckNoCheckpoints(flags_, settings_));
    }
    return CheckReplaced(settings_);
  }

  // The record of the run that goes on.
  absl::Status TakeRun() {
    bool restores = false;
    if (flags_.resume && config_.penstock.resume_ranks == "any" && !all_ranks_dirs_.empty()) {
      const auto would_start = [this] {
        absl::StatusOr<TrainSettings> settings =
            Resolver(flags_, /*needs_data=*/false, engine_.comm).Resolve();
        return settings.ok() ? PlanMemory(*std::move(settings)).status() : settings.status();
      };
      ASSIGN_OR_RETURN(run_, TakeOtherRanks(config_, all_ranks_dirs_, /*starts=*/needs_data_, would_start,
                                            &restores, &settings_));
    }
    if (restores) {
      settings_.resumes = true;
    } else if (flags_.resume) {
      ASSIGN_OR_RETURN(run_, FindResumable(flags_, config_, /*starts=*/needs_data_, &restores, &settings_));
      settings_.resumes = !run_.is_null();
    }
    engine_.resume.enabled = settings_.resumes && !restores;  // there is no state to plan for yet
    // A run that was killed before its first commit is started over by --resume. Of what has a commit, and of
    // checkpoints, it replaces nothing.
    const bool starts_over = flags_.resume && !settings_.resumes;
    engine_.storage.overwrite = flags_.overwrite || starts_over;
    if (starts_over) engine_.storage.checkpoints.replaces.emplace();
    // As the file has it: what fills its open places depends on the run's other flags.
    if (flags_.config.has_value()) {
      ASSIGN_OR_RETURN(nlohmann::json recorded, run::ConfigToRecord(*flags_.config));
      if (!recorded.empty() || (settings_.resumes && run_.contains(run::kRecordedConfigKey)))
        settings_.to_record[run::kRecordedConfigKey] = std::move(recorded);
      return absl::OkStatus();
    }
    if (!settings_.resumes || !run_.contains(run::kRecordedConfigKey)) return absl::OkStatus();
    const nlohmann::json& recorded = run_[run::kRecordedConfigKey];
    ASSIGN_OR_RETURN(config_, run::ConfigFromRecord(recorded));
    RETURN_IF_ERROR(TakeFlags(flags_, &config_, &settings_.notes));
    if (!recorded.empty())
      settings_.notes.push_back(
          absl::StrCat("as this run's last --config said: ", run::RecordedKeys(recorded)));
    return absl::OkStatus();
  }

  // The directory that the model came from: its weights, if they are asked for, and its tokenizer.
  absl::Status ChooseModelDirectory() {
    std::string path;
    if (settings_.resumes) path = run_.value("model_directory", std::string());
    if (flags_.model.has_value()) {
      path = *flags_.model;
    } else if (flags_.init_from.has_value() && !settings_.resumes) {
      path = adapter_.has_value() ? adapter_->base : *flags_.init_from;
    }
    if (path.empty()) return absl::OkStatus();
    ASSIGN_OR_RETURN(const bool is_directory, IsDirectory(path));
    if (!is_directory) return absl::OkStatus();
    std::error_code error;
    settings_.model_directory = std::filesystem::absolute(path, error).lexically_normal();
    settings_.to_record["model_directory"] = settings_.model_directory;
    if (settings_.resumes && run_.value("model_directory", std::string()) != settings_.model_directory)
      changes_.run["model_directory"] = settings_.model_directory;
    return absl::OkStatus();
  }

  absl::Status ChooseModel() {
    if (!settings_.resumes) {
      ASSIGN_OR_RETURN(adapter_, AdapterIn(flags_));
    }
    RETURN_IF_ERROR(ChooseModelDirectory());
    RETURN_IF_ERROR(ChooseBase());
    if (const absl::Status trains = settings_.model->CheckTrains(); !trains.ok())
      return WrongFlag(absl::StrCat("--model: ", std::string(trains.message())));
    if (settings_.resumes) return TakeRecordedAdapters();
    ASSIGN_OR_RETURN(settings_.model, Adapted(settings_.model, flags_, adapter_));
    if (settings_.model->lora() == nullptr) return absl::OkStatus();
    RETURN_IF_ERROR(CheckOneProcess(*settings_.model, engine_.world()));
    settings_.notes.push_back(DescribeAdapters(*settings_.model));
    return absl::OkStatus();
  }

  // Of a run that goes on: its model has what the run has, whatever --model says of the rest.
  absl::Status TakeRecordedAdapters() {
    ASSIGN_OR_RETURN(const std::shared_ptr<const models::LanguageModel> made,
                     models::ModelFromJson(run_["model"]));
    RETURN_IF_ERROR(CheckOneProcess(*made, engine_.world()));
    RETURN_IF_ERROR(CheckSameAdapters(*made, flags_));
    if (made->lora() == nullptr || settings_.model->lora() != nullptr) return absl::OkStatus();
    auto adapted = models::WithLora(settings_.model, *made->lora());
    // A model without these matrices is another one, which is said where it is compared.
    if (adapted.ok()) settings_.model = *std::move(adapted);
    return absl::OkStatus();
  }

  absl::Status ChooseBase() {
    if (settings_.resumes && !flags_.model.has_value()) {
      ASSIGN_OR_RETURN(settings_.model, models::ModelFromJson(run_["model"]));
      return absl::OkStatus();
    }
    if (adapter_.has_value() && !flags_.model.has_value()) {
      if (settings_.model_directory.empty()) {
        return WrongFlag(absl::StrCat("--init-from ", *flags_.init_from,
                                      " is an adapter, and the model that it was made for (\"",
                                      adapter_->base, "\") is no directory here: give --model DIR"));
      }
      ASSIGN_OR_RETURN(settings_.model, models::OpenModel(settings_.model_directory, &settings_.notes));
      return absl::OkStatus();
    }
    if (flags_.model.has_value() || !flags_.init_from.has_value()) {
      ASSIGN_OR_RETURN(settings_.model,
                       models::OpenModel(flags_.model.value_or("gpt-small"), &settings_.notes));
      if (flags_.init_from.has_value() && !adapter_.has_value())
        NoteAnotherFunction(*flags_.init_from, &settings_);
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const nlohmann::json published, models::ConfigOfWeights(*flags_.init_from));
    if (published.is_null()) {
      return WrongFlag(absl::StrCat("--init-from ", *flags_.init_from,
                                    ": no config.json tells what model that is: give --model as well"));
    }
    const auto model = models::ModelFromJson(published, &settings_.notes);
    if (!model.ok()) {
      return WrongFlag(
          absl::StrCat("--init-from ", *flags_.init_from, ": ", std::string(model.status().message())));
    }
    settings_.model = *model;
    return absl::OkStatus();
  }

  absl::Status CheckDataFlags() const {
    if (!flags_.data_weights.empty() && flags_.data_weights.size() != flags_.data.size()) {
      return WrongFlag(absl::StrCat("--data-weights has ", flags_.data_weights.size(), " numbers for ",
                                    flags_.data.size(), " --data: give one for each"));
    }
    for (const double weight : flags_.data_weights) {
      if (!std::isfinite(weight) || weight <= 0)
        return WrongFlag(absl::StrCat("--data-weights ", weight, ": a weight is above 0"));
    }
    if (!flags_.eval_split.has_value()) return absl::OkStatus();
    if (!(*flags_.eval_split >= 0 && *flags_.eval_split < 1))
      return WrongFlag(absl::StrCat("--eval-split ", *flags_.eval_split, ": a share below 1; 0 is none"));
    if (*flags_.eval_split > 0 && flags_.eval_data.has_value())
      return WrongFlag("--eval-split and --eval-data: one or the other");
    return absl::OkStatus();
  }

  // A run that goes on keeps its weights, as long as its texts are as many, and what it holds out.
  absl::Status ChooseData() {
    RETURN_IF_ERROR(CheckDataFlags());
    settings_.data_paths = flags_.data;
    settings_.data_weights = flags_.data_weights;
    settings_.eval_split = flags_.eval_split.value_or(0);
    if (!run_.is_object()) {
      if (!settings_.data_weights.empty()) settings_.to_record["data_weights"] = settings_.data_weights;
      if (settings_.eval_split > 0) settings_.to_record["eval_split"] = settings_.eval_split;
      return absl::OkStatus();
    }
    const auto weights = run_.value("data_weights", std::vector<double>());
    if (settings_.data_weights.empty() && weights.size() == flags_.data.size())
      settings_.data_weights = weights;
    if (!flags_.eval_split.has_value() && !flags_.eval_data.has_value())
      settings_.eval_split = run_.value("eval_split", 0.0);
    if (settings_.data_weights != weights) settings_.to_record["data_weights"] = settings_.data_weights;
    if (settings_.eval_split != run_.value("eval_split", 0.0))
      settings_.to_record["eval_split"] = settings_.eval_split;
    return absl::OkStatus();
  }

  absl::Status ChooseEvaluation() {
    settings_.eval_path = flags_.eval_data.value_or("");
    settings_.eval_every = flags_.eval_every.value_or(0);
    settings_.eval_windows = flags_.eval_windows.value_or(0);
    for (const auto& [flag, given] :
         {std::pair{"--eval-every", flags_.eval_every}, {"--eval-windows", flags_.eval_windows}}) {
      if (!given.has_value()) continue;
      if (settings_.eval_path.empty() && settings_.eval_split == 0)
        return WrongFlag(absl::StrCat(flag, " needs --eval-data FILE or --eval-split SHARE"));
      RETURN_IF_ERROR(CheckFlag<int64_t>(flag, *given, 1, int64_t{1} << 40));
    }
    return absl::OkStatus();
  }

  // After it the model is known whole: that of the record, where there is one.
  absl::Status ChooseVocabulary() {
    if (flags_.vocab.has_value()) {
      RETURN_IF_ERROR(CheckFlag<int64_t>("--vocab", *flags_.vocab, 1, int64_t{1} << 32));
    }
    ASSIGN_OR_RETURN(settings_.vocab, recorded_.Of<int64_t>("vocab", flags_.vocab, 0));
    if (settings_.vocab > 0) settings_.model = settings_.model->WithVocabulary(settings_.vocab);
    if (!settings_.resumes) return ChooseTiles();
    const auto made = models::ModelFromJson(run_["model"]);
    if (made.ok()) {
      ASSIGN_OR_RETURN(settings_.model, InTilesOf(**made, settings_.model, flags_));
    }
    if (!flags_.model.has_value()) return absl::OkStatus();
    const std::string difference =
        made.ok() ? zero::JsonDifference((*made)->ToJson(), settings_.model->ToJson()) : std::string();
    if (difference.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("--model ", *flags_.model, ": ",
                     engine_.storage.state_dirs.empty() ? "" : engine_.storage.state_dirs.front(),
                     " holds a run of another model (", difference,
                     "); leave the flag out, or start another run in another --state-dir"));
  }

  absl::Status ChooseTiles() {
    ASSIGN_OR_RETURN(settings_.model, InTiles(settings_.model, flags_));
    const int64_t rows = settings_.model->tile_rows();
    if (rows == 0 || flags_.vocabulary_tiles.value_or("auto") != "auto") return absl::OkStatus();
    settings_.notes.push_back(absl::StrCat("model: the vocabulary of ", settings_.model->vocabulary(),
                                           " is in blocks of ", rows,
                                           " rows, of which few are in memory at a time "
                                           "(--vocabulary-tiles 1: in one)"));
    return absl::OkStatus();
  }

  // And what rests on them: what a config leaves open.
  absl::Status ChooseSteps() {
    settings_.steps = flags_.steps.value_or(settings_.resumes ? run_.value("steps", int64_t{100}) : 100);
    RETURN_IF_ERROR(CheckFlag<int64_t>("--steps", settings_.steps, 1, int64_t{1} << 40));
    // On resume the record has what was filled when the run was created.
    if (settings_.resumes) FillRemoved(parsed_, recorded_, settings_.steps, &config_);
    if (parsed_.deepspeeds && !settings_.resumes)
      FillFromDeepSpeed(flags_, settings_.steps, &parsed_, &filled_);
    if (!filled_.empty()) {
      settings_.notes.push_back(absl::StrCat("what ", *flags_.config,
                                             " leaves open is as in DeepSpeed, and what is \"auto\" as in "
                                             "Hugging Face's Trainer: ",
                                             absl::StrJoin(filled_, ", ")));
    }
    return absl::OkStatus();
  }

  absl::Status ChooseSequences() {
    RETURN_IF_ERROR(ResolveBatchSizes(flags_, config_, recorded_, run_, &changes_, &settings_));
    if (flags_.seq.has_value()) {
      if (absl::Status status = CheckFlag<int64_t>("--seq", *flags_.seq, 1, settings_.model->context());
          !status.ok()) {
        return WrongFlag(absl::StrCat(std::string(status.message()), " (the model's context)"));
      }
    }
    ASSIGN_OR_RETURN(settings_.seq, recorded_.Of("seq", flags_.seq, settings_.model->usual_length()));
    return absl::OkStatus();
  }

  absl::Status ChooseSeedAndThreads() {
    ASSIGN_OR_RETURN(const int64_t seed, recorded_.Of<int64_t>("seed", flags_.seed, 1));
    RETURN_IF_ERROR(CheckFlag<int64_t>("--seed", seed, 0, int64_t{1} << 62));
    engine_.seed = static_cast<uint64_t>(seed);
    if (flags_.threads.has_value()) {
      RETURN_IF_ERROR(CheckFlag<int64_t>("--threads", *flags_.threads, 1, run::kMostThreads));
    }
    const int sharing = engine_.comm != nullptr ? engine_.comm->environment().local_world : 1;
    const int64_t threads =
        flags_.threads.value_or(std::max<int64_t>(1, zero::DefaultIntraOpThreads() / sharing));
    const int64_t kept_threads = run_.is_null() ? threads : run_.value("threads", threads);
    if (flags_.threads.has_value() && kept_threads != threads) {
      settings_.notes.push_back(absl::StrCat("--threads ", threads, ": the run goes on with the ",
                                             kept_threads,
                                             " that it was created with, so that its bits stay the same"));
    }
    engine_.intra_op_threads = static_cast<int>(kept_threads);
    return absl::OkStatus();
  }

  absl::Status ChooseComputeType() {
    ASSIGN_OR_RETURN(std::string dtype, ChooseDtype(flags_, config_, &settings_.notes));
    std::optional<std::string> said = flags_.dtype;
    if (said == "auto") said.reset();
    if (!said.has_value() && !flags_.dtype.has_value() && changes_.config.contains("dtype")) said = dtype;
    if (settings_.resumes) {
      ASSIGN_OR_RETURN(dtype, recorded_.Of("dtype", said, run_.value("dtype", dtype)));
    }
    engine_.dtype = *zero::ParseDType(dtype);
    return absl::OkStatus();
  }

  void ChooseDataOrder() {
    settings_.to_record["data_order"] = models::kSequenceOrder;
    if (!settings_.resumes) return;
    const std::string order = run_.value("data_order", models::kSequenceOrder);
    if (order == models::kSequenceOrder) return;
    changes_.run["data_order"] = models::kSequenceOrder;
    changes_.Tell("the order of the data", order, models::kSequenceOrder, "this version of the program");
  }

  absl::Status ChooseInitialWeights() {
    if (settings_.resumes) {
      const bool in_place = run_.contains(kBaseKey) && flags_.init_from.has_value() &&
                            !models::IsAdapter(*flags_.init_from);  // it says where the base lies
      if (flags_.init_from.has_value() && !in_place)
        settings_.notes.push_back("--init-from: of no effect, since the run goes on with its own weights");
      return ReopenRecordedBase();
    }
    const bool adapts = settings_.model->lora() != nullptr;
    std::optional<std::string> weights;
    if (!adapter_.has_value()) weights = flags_.init_from;
    const std::string& directory = settings_.model_directory;
    if (!weights.has_value() && (flags_.model.has_value() || adapter_.has_value()) && !directory.empty()) {
      if (models::HasWeights(directory)) {
        weights = flags_.model.value_or(directory);
      } else {
        ASSIGN_OR_RETURN(const bool has_other, models::HasOtherWeights(directory));
        if (needs_data_ && has_other) {
          return WrongFlag(absl::StrCat("--model ", directory, ": ", models::WhyNoWeights(directory),
                                        " (for random values, give the config.json alone)"));
        }
        if (!adapts) {
          settings_.notes.push_back(absl::StrCat(
              "--model ", *flags_.model, ": no safetensors in there: training begins with random values"));
        }
      }
    }
    if (!weights.has_value() && adapts && needs_data_) {
      return WrongFlag(
          "--lora-rank: adapters go to weights that are there: give --model DIR with safetensors in it, or "
          "--init-from WEIGHTS");
    }
    if (!weights.has_value()) return absl::OkStatus();
    RETURN_IF_ERROR(ReadBaseInPlace(*weights));
    const models::LanguageModel& base = adapts ? *settings_.model->base() : *settings_.model;
    std::shared_ptr<models::WeightImport> opened, adapter;
    ASSIGN_OR_RETURN(opened, engine_.frozen != nullptr
                                 ? models::WeightImport::OpenAnyCode(*weights, base.Layout(), "--model")
                                 : models::WeightImport::Open(*weights, base.Layout()));
    if (adapter_.has_value()) {
      ASSIGN_OR_RETURN(
          adapter, models::WeightImport::Open(absl::StrCat(*flags_.init_from, "/", models::kAdapterWeights),
                                              models::AdaptersOf(settings_.model->Layout())));
    }
    if (adapts) {
      engine_.initial_values = models::AdaptedValues(*settings_.model, opened, adapter, engine_.seed);
      return absl::OkStatus();
    }
    engine_.initial_values = [opened](int block, int64_t first, int64_t elements, float* to) {
      return opened->Read(block, first, elements, to);
    };
    return absl::OkStatus();
  }

  // What adapters leave frozen is read where it lies, if it can be.
  absl::Status ReadBaseInPlace(const std::string& weights) {
    if (settings_.model->lora() == nullptr) return absl::OkStatus();
    const bool on_drive = engine_.storage.offload == zero::OffloadDevice::kNvme;
    std::string why = "without a drive it stays in memory";
    if (on_drive) {
      absl::StatusOr<LoraBase> base =
          OpenBase(weights, *settings_.model, engine_.dtype, /*checks=*/needs_data_, flags_.quiet);
      if (base.ok()) {
        TakeBase(*std::move(base));
        settings_.to_record[kBaseKey] = base_record_;
        return absl::OkStatus();
      }
      if (!absl::IsUnimplemented(base.status())) return base.status();
      why = std::string(base.status().message());
    }
    settings_.notes.push_back(absl::StrCat("lora: the model's weights are copied into the state: ", why));
    return absl::OkStatus();
  }

  void TakeBase(LoraBase base) {
    base_record_ = std::move(base.record);
    const int64_t bytes = BaseBytes(base_record_);
    settings_.notes.push_back(
        absl::StrCat("lora: the model's weights, ", FormatBytes(bytes),
                     base.weights->bits() > 0 ? absl::StrCat(" in ", base.weights->bits(), " bit") : "",
                     ", are read where they lie, in ", PathOfBase(base_record_), ", and copied nowhere"));
    engine_.frozen = std::move(base.weights);
  }

  absl::Status ReopenRecordedBase() {
    if (!run_.contains(kBaseKey)) return absl::OkStatus();
    if (engine_.storage.offload != zero::OffloadDevice::kNvme) {
      return WrongFlag(
          "this run reads the weights that its adapters go to where they lie, for a state on a drive: go on "
          "with --offload nvme");
    }
    ASSIGN_OR_RETURN(LoraBase base, FindBase());
    TakeBase(std::move(base));
    if (base_record_ != run_[kBaseKey]) changes_.run[kBaseKey] = base_record_;
    return absl::OkStatus();
  }

  absl::StatusOr<LoraBase> BaseAt(const std::string& path) {
    return ReopenBase(run_[kBaseKey], path, *settings_.model, engine_.dtype, BaseCheck::kTimes, flags_.quiet);
  }

  // Where --init-from says, or --model, or the record. A run may have its weights from elsewhere than its
  // config and tokenizer: then --model says where those are, and the recorded weights are it still.
  absl::StatusOr<LoraBase> FindBase() {
    const bool by_init_from = flags_.init_from.has_value() && !models::IsAdapter(*flags_.init_from);
    if (by_init_from) return BaseAt(*flags_.init_from);
    const std::string recorded = PathOfBase(run_[kBaseKey]);
    const std::string model_was = run_.value("model_directory", std::string());
    const bool apart = BaseDirectory(recorded) != model_was;
    const std::string& model = settings_.model_directory;
    const bool given = flags_.model.has_value() && !model.empty() && models::HasWeights(model);
    if (!given || (apart && model == model_was)) return BaseAt("");
    absl::StatusOr<LoraBase> base = BaseAt(model);
    if (base.ok() || !apart) return base;
    absl::StatusOr<LoraBase> there = BaseAt("");
    if (!there.ok()) return base;
    settings_.notes.push_back(absl::StrCat("lora: --model ", *flags_.model,
                                           " has other weights than this run's adapters were made for: "
                                           "those that it began with are read (--init-from says where they "
                                           "lie, if they have moved)"));
    return there;
  }

  absl::Status MakeExample() {
    engine_.micro_batches = static_cast<int>(settings_.accumulate);
    // Inputs and targets, as whole numbers of 64 bits: made before anything else is known of the run.
    int64_t tokens = 0;
    const int64_t most = std::max(engine_.memory.host_memory_budget_bytes, int64_t{64} << 20);
    if (__builtin_mul_overflow(settings_.batch, settings_.seq, &tokens) || tokens > most / 16) {
      return absl::FailedPreconditionError(
          absl::StrCat("--batch ", settings_.batch, " --seq ", settings_.seq,
                       ": the tokens alone are more than the host memory budget of ",
                       FormatBytes(engine_.memory.host_memory_budget_bytes), " has room for"));
    }
    engine_.example = ExampleBatch(settings_.batch, settings_.seq);
    return absl::OkStatus();
  }

  // What the run's record says from now on: all of a new run, the changes of one that goes on.
  void Record() {
    engine_.resume.run = {{"model", settings_.model->ToJson()},
                          {"steps", settings_.steps},
                          {"batch", settings_.batch},
                          {"accumulate", settings_.accumulate},
                          {"seq", settings_.seq},
                          {"vocab", settings_.vocab},
                          {"seed", static_cast<int64_t>(engine_.seed)},
                          {"threads", engine_.intra_op_threads},
                          {"blas", zero::DescribeBlas().name}};
    if (engine_.world() > 1) engine_.resume.run["ranks"] = engine_.world();
    if (engine_.storage.checkpoints.any()) {
      // For whoever wants to read the model while it is trained.
      std::error_code error;
      std::string parent = std::filesystem::absolute(engine_.storage.checkpoints.parent, error);
      if (error) parent = engine_.storage.checkpoints.parent;
      engine_.resume.run["checkpoint_dir"] = parent;
      changes_.run["checkpoint_dir"] = parent;
    }
    engine_.resume.run.update(settings_.to_record);
    if (flags_.config.has_value()) engine_.resume.run["config"] = changes_.config;
    if (!settings_.resumes) return;
    if (flags_.config.has_value() && run_.value("config", nlohmann::json::object()) != changes_.config)
      changes_.run["config"] = changes_.config;
    for (const char* name : {"tokenizer", "chat_template", "skip_broken_lines", "data_weights", "eval_split",
                             run::kRecordedConfigKey}) {
      if (settings_.to_record.contains(name) &&
          settings_.to_record[name] != run_.value(name, nlohmann::json()))
        changes_.run[name] = settings_.to_record[name];
    }
    // Of runs from before these were recorded.
    for (const char* name : {"sync", "durability", "data_order"}) {
      if (!run_.contains(name)) changes_.run[name] = settings_.to_record[name];
    }
    if (settings_.steps != run_.value("steps", settings_.steps)) changes_.run["steps"] = settings_.steps;
    engine_.resume.run_changes.update(changes_.run);
    settings_.changes = std::move(changes_.told);
    settings_.recorded = std::move(run_);
  }

  const TrainOptions& flags_;
  const bool needs_data_;
  run::ParsedConfig parsed_;
  run::Config& config_ = parsed_.config;
  std::vector<std::string> filled_;                  // what the file leaves open, as DeepSpeed has it
  std::optional<models::PublishedAdapter> adapter_;  // of --init-from
  nlohmann::json base_record_;                       // of what is read in place
  nlohmann::json run_;                               // the record of a run that goes on; null: a new one
  run::Changes changes_;
  const run::RecordedOptions recorded_;  // of run_ and changes_
  TrainSettings settings_;
  std::vector<std::string>
      all_ranks_dirs_;  // the state directories as all ranks are given them; none: no drive
  zero::EngineOptions& engine_ = settings_.engine;
};

}  // namespace

zero::TensorBatch ExampleBatch(int64_t batch, int64_t seq) {
  return {torch::zeros({batch, seq}, torch::kInt64), torch::zeros({batch, seq}, torch::kInt64)};
}

absl::StatusOr<TrainSettings> ResolveTrainOptions(const TrainOptions& flags, bool needs_data,
                                                  std::shared_ptr<zero::Comm> comm) {
  return Resolver(flags, needs_data, std::move(comm)).Resolve();
}

}  // namespace penstock::tools
