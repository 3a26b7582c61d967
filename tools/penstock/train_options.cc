#include "tools/penstock/train_options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <tuple>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/cpu_features.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tools/penstock/device_flags.h"
#include "tools/penstock/recorded_options.h"
#include "tools/penstock/optimizer_flags.h"
#include "tools/penstock/ranks.h"
#include "tools/base/size.h"
#include "tools/penstock/state_reader.h"
#include "models/weight_import.h"
#include "zero/compute/block.h"
#include "zero/config/config.h"
#include "zero/engine/engine_state.h"
#include "zero/config/plan_bounds.h"
#include "zero/ranks/sharded_state.h"
#include "zero/engine/rank_agreement.h"
#include "zero/memory/threads.h"

namespace penstock::tools {
namespace {

constexpr const char* kDefaultStateDir = "penstock-state";
constexpr int64_t kMostThreads = 1024;
constexpr int64_t kDefaultBatch = 2;

absl::Status Wrong(const std::string& line) { return absl::InvalidArgumentError(line); }

// A number that must lie in a range; the flag's name goes into the message.
template <typename T>
absl::Status Check(const char* flag, T value, T least, T most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Wrong(absl::StrCat(flag, " ", value, ": must be between ", least, " and ", most));
}

absl::StatusOr<zero::OffloadDevice> ParseOffload(const std::string& text) {
  if (text == "none") return zero::OffloadDevice::kNone;
  if (text == "cpu") return zero::OffloadDevice::kCpu;
  if (text == "nvme") return zero::OffloadDevice::kNvme;
  return Wrong(absl::StrCat("--offload ", text, ": must be none, cpu or nvme"));
}

// The type to compute in, as a name.
absl::StatusOr<std::string> ChooseDtype(const TrainWords& words, const zero::Config& config,
                                        std::vector<std::string>* notes) {
  const bool fast_bf16 = kernels::GetCpuFeatures().avx512_bf16;
  std::string dtype = words.dtype.value_or("auto");
  if (dtype == "auto" && config.fp16.enabled.value_or(false)) dtype = "fp16";
  if (dtype == "auto" && config.bf16.has_value()) dtype = *config.bf16 ? "bf16" : "fp32";
  if (dtype == "auto") dtype = fast_bf16 ? "bf16" : "fp32";
  if (!zero::ParseDType(dtype).has_value()) {
    return Wrong(absl::StrCat("--dtype ", dtype, ": must be bf16, fp16, fp32 or auto"));
  }
  if (dtype == "bf16" && !fast_bf16) {
    notes->push_back(
        "bf16 was asked for, but this processor has no bf16 instructions: fp32 is up to 200 times faster "
        "here");
  }
  return dtype;
}

// How long a killed run may hold its lock: the kernel still finishes its writes.
constexpr int kLockPatienceMs = 2000;

// A run of one version that was killed: nothing to go on from, and nothing to keep either.
absl::Status Overwritten(const std::string& text) { return absl::OutOfRangeError(text); }
bool IsOverwritten(const absl::Status& status) { return absl::IsOutOfRange(status); }

// What the state directories hold, for a run that is to be resumed: its record's "run", null where there is
// none yet.
absl::StatusOr<nlohmann::json> FindRun(const std::vector<std::string>& given) {
  std::vector<std::string> dirs = given;
  // All ranks' records say the same about the run.
  if (const auto parts = zero::FindParts(given); parts.ok()) dirs = parts->front();
  const swap::Finding found = swap::Probe(dirs);
  switch (found.holding) {
    case swap::Holding::kNothing:
    case swap::Holding::kNeverCommitted:
      return nlohmann::json();
    case swap::Holding::kRun:
    case swap::Holding::kInUse:  // the kernel may still finish a killed run's writes: opening waits for them
      break;
    case swap::Holding::kForeign:
      return absl::FailedPreconditionError(found.text);
    case swap::Holding::kDamaged:
      return absl::DataLossError(found.text);
    case swap::Holding::kOverwritten:
      return Overwritten(found.text);
  }
  absl::StatusOr<swap::Inspection> inspection = swap::Inspect(dirs);
  if (absl::IsNotFound(inspection.status())) return nlohmann::json();
  if (!inspection.ok()) return inspection.status();
  if (inspection->record.overwriting) {
    const swap::Finding later = swap::Probe(dirs, kLockPatienceMs);
    if (later.holding == swap::Holding::kInUse) return absl::FailedPreconditionError(later.text);
    return Overwritten(later.text);
  }
  const nlohmann::json payload = nlohmann::json::parse(inspection->record.payload, nullptr, false);
  if (!payload.is_object() || !payload.contains("run") || !payload["run"].is_object() ||
      !payload["run"].contains("model")) {
    return absl::FailedPreconditionError(absl::StrCat(
        dirs.front(), " holds a run that was not made by penstock train; it cannot be resumed here"));
  }
  nlohmann::json run = payload["run"];
  const nlohmann::json identity = nlohmann::json::parse(inspection->shape.identity, nullptr, false);
  if (identity.is_object() && identity.contains("dtype")) run["dtype"] = identity["dtype"];
  // Runs from before there was a choice of optimizers.
  if (run.contains("adamw") && !run.contains("optimizer")) {
    run["optimizer"] = run["adamw"] == false ? "Adam" : "AdamW";
  }
  return run;
}

void ResolveDurability(const zero::Config& config, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  engine.durability = config.penstock.durability.value_or(zero::Durability::kStep);
  engine.versions = static_cast<int>(config.penstock.versions.value_or(0));
  if (engine.versions == 1) engine.durability = zero::Durability::kCheckpoint;
  if (engine.offload == zero::OffloadDevice::kNvme) return;
  if (config.penstock.durability == zero::Durability::kStep) {
    settings->notes.push_back(
        "penstock.durability \"step\": of no effect without offload to nvme: state in memory is kept by "
        "checkpoints");
  }
  if (engine.versions > 0) {
    settings->notes.push_back("penstock.versions: of no effect without offload to nvme");
  }
}

absl::Status ResolveCheckpoints(const TrainWords& words, TrainSettings* settings) {
  zero::CheckpointSchedule& checkpoints = settings->engine.checkpoints;
  checkpoints.parent = words.checkpoint_dir.value_or("");
  if (words.checkpoint_keep.has_value()) {
    if (!words.checkpoint_every.has_value()) return Wrong("--checkpoint-keep needs --checkpoint-every N");
    checkpoints.keep = *words.checkpoint_keep;
    const absl::Status valid = Check<int64_t>("--checkpoint-keep", checkpoints.keep, 1, int64_t{1} << 31);
    if (!valid.ok()) return valid;
  }
  if (!words.checkpoint_every.has_value()) return absl::OkStatus();
  checkpoints.every = *words.checkpoint_every;
  if (checkpoints.parent.empty()) return Wrong("--checkpoint-every needs --checkpoint-dir DIR");
  absl::Status valid = Check<int64_t>("--checkpoint-every", checkpoints.every, 1, int64_t{1} << 40);
  if (!valid.ok() || words.resume || words.overwrite) return valid;
  const std::vector<swap::CheckpointEntry> there = swap::ListCheckpoints(checkpoints.parent);
  if (there.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "--checkpoint-dir ", checkpoints.parent, " holds checkpoints, the newest of step ", there.back().step,
      ": go on from it (--resume), replace them (--overwrite), or use another directory"));
}

// Finds what --resume goes on from; null if there is nothing yet. May make a run of a checkpoint.
absl::StatusOr<nlohmann::json> FindResumable(const TrainWords& words, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  const std::string& checkpoints = engine.checkpoints.parent;
  absl::StatusOr<std::string> newest = absl::NotFoundError("");
  if (!checkpoints.empty()) newest = swap::FindCheckpoint(checkpoints);
  if (!newest.ok() && !absl::IsNotFound(newest.status())) return newest.status();
  if (engine.offload != zero::OffloadDevice::kNvme) {
    // Nothing outlives the process but what was kept: a checkpoint, or the state of a run with a drive.
    settings->goes_back = true;
    engine.state_dirs = newest.ok() ? std::vector<std::string>{*newest} : words.state_dirs;
    if (engine.state_dirs.empty()) {
      if (checkpoints.empty()) {
        return absl::FailedPreconditionError(
            "--resume with --offload none or cpu goes on from a checkpoint: say where with --checkpoint-dir");
      }
      settings->notes.push_back(absl::StrCat("no checkpoint in ", checkpoints, ": starting over"));
      return nlohmann::json();
    }
    absl::StatusOr<nlohmann::json> run = FindRun(engine.state_dirs);
    if (run.ok() && !run->is_null()) {
      settings->notes.push_back(absl::StrCat("going on from ", engine.state_dirs.front()));
    } else if (run.ok()) {
      settings->notes.push_back(
          absl::StrCat("nothing to go on from in ", engine.state_dirs.front(), ": starting over"));
      engine.state_dirs.clear();
    }
    return run;
  }
  absl::StatusOr<nlohmann::json> run = FindRun(engine.state_dirs);
  const bool overwritten = IsOverwritten(run.status());
  const bool alone = engine.comm == nullptr;
  if (!run.ok() && !(overwritten && (newest.ok() || !alone))) return run;
  bool from_checkpoint = newest.ok() && (overwritten || run->is_null());
  if (!alone) {
    GoOn from = GoOn::kState;
    PENSTOCK_TAKE(from, AgreeOnResume(*engine.comm, run, engine.state_dirs, newest.value_or("")));
    from_checkpoint = from == GoOn::kCheckpoint;
    if (from == GoOn::kStartOver) run = nlohmann::json();
  }
  if (from_checkpoint) {
    // The state is gone, and a checkpoint is left.
    const absl::Status restored = zero::RestoreRun(*newest, engine);
    if (!restored.ok()) return restored;
    settings->notes.push_back(absl::StrCat("restored ", engine.state_dirs.front(), " from ", *newest));
    settings->goes_back = true;
    return FindRun(engine.state_dirs);
  }
  if (run->is_null()) {
    settings->notes.push_back(
        absl::StrCat("no step was ever committed in ", engine.state_dirs.front(), ": starting over"));
    return run;
  }
  if (newest.ok()) {
    const int64_t state = StepIn(engine.state_dirs);
    if (StepIn({*newest}) > state) {
      settings->notes.push_back(
          absl::StrCat(engine.state_dirs.front(), " goes on from its step ", state, ", though ", *newest,
                       " is newer: to go on from that one, give a --state-dir that is empty"));
    }
  }
  return run;
}

// A run that goes on with another number of ranks: its steps have as many sequences as before, unless the
// words say what each rank does.
absl::Status SpreadBatch(const zero::BatchRequest& request, const nlohmann::json& run,
                         TrainSettings* settings) {
  const int64_t world = settings->engine.world(), before = run.value("ranks", int64_t{1});
  const int64_t batch = run.value("batch", kDefaultBatch), accumulate = run.value("accumulate", int64_t{1});
  const int64_t sequences = before * batch * accumulate;
  settings->batch = request.micro_batch.value_or(batch);
  settings->accumulate = request.accumulation.value_or(accumulate);
  if (!request.accumulation.has_value() && sequences % (world * settings->batch) == 0) {
    settings->accumulate = sequences / (world * settings->batch);
  } else if (!request.micro_batch.has_value() && sequences % (world * settings->accumulate) == 0) {
    settings->batch = sequences / (world * settings->accumulate);
  }
  const int64_t now = world * settings->batch * settings->accumulate;
  const bool told = request.micro_batch.has_value() && request.accumulation.has_value();
  if (now != sequences && !told) {
    return Wrong(absl::StrCat("a step of this run has ", sequences, " sequences (", before,
                              " ranks, --batch ", batch, ", --accumulate ", accumulate, "), which ", world,
                              " ranks cannot share evenly that way: say --batch and --accumulate of each"));
  }
  settings->notes.push_back(absl::StrCat(
      "made by ", before, before == 1 ? " rank" : " ranks", ", goes on with ", world, ": --batch ",
      settings->batch, " --accumulate ", settings->accumulate, " of each",
      now == sequences ? ", the same sequences in every step"
                       : absl::StrCat("; a step has ", now, " sequences from here on, not ", sequences)));
  settings->engine.run_changes = {
      {"ranks", world}, {"batch", settings->batch}, {"accumulate", settings->accumulate}};
  return absl::OkStatus();
}

absl::Status ResolveBatchSizes(const TrainWords& words, const zero::Config& config, const Kept& kept,
                               const nlohmann::json& run, TrainSettings* settings) {
  zero::BatchRequest request;
  request.train_batch = config.train_batch_size;
  request.micro_batch = words.batch.has_value() ? words.batch : config.micro_batch_per_rank;
  request.accumulation = words.accumulate.has_value() ? words.accumulate : config.gradient_accumulation_steps;
  // Flags win: with both of them the file's product has nothing left to say.
  if (words.batch.has_value() && words.accumulate.has_value()) request.train_batch.reset();
  for (const auto& status : {Check<int64_t>("--batch", request.micro_batch.value_or(1), 1, 1 << 20),
                             Check<int64_t>("--accumulate", request.accumulation.value_or(1), 1, 1 << 20)}) {
    if (!status.ok()) return status;
  }
  if (settings->resumes && run.value("ranks", int64_t{1}) != settings->engine.world())
    return SpreadBatch(request, run, settings);
  absl::StatusOr<zero::BatchSizes> sizes =
      zero::ResolveBatch(request, settings->engine.world(), kDefaultBatch);
  if (!sizes.ok()) return sizes.status();
  PENSTOCK_TAKE(settings->batch, kept.Of("batch", "batch", request.micro_batch, sizes->micro_batch));
  PENSTOCK_TAKE(settings->accumulate,
                kept.Of("accumulate", "accumulate", request.accumulation, sizes->accumulation));
  return absl::OkStatus();
}

bool GoesByOptimizersRate(const zero::SchedulerConfig& scheduler) {
  switch (scheduler.type) {
    case zero::SchedulerType::kWarmupCosineLr:
      return true;
    case zero::SchedulerType::kWarmupLr:
    case zero::SchedulerType::kWarmupDecayLr:
      return !scheduler.warmup_max_lr.has_value();
    default:
      return false;
  }
}

absl::Status ResolveOptimizer(const TrainWords& words, const zero::Config& config, const Kept& kept,
                              TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  OptimizerWords given;
  given.lr = words.lr;
  given.weight_decay = words.weight_decay;
  given.states =
      words.optimizer_states.has_value() ? words.optimizer_states : config.penstock.optimizer_states;
  PENSTOCK_TAKE(engine.optimizer, ResolveOptimizerOptions(given, config.optimizer, kept, &settings->kept));
  PENSTOCK_TAKE(engine.optimizer_states, ResolveOptimizerStates(given, kept, &settings->kept));
  const std::optional<double> clip = words.clip.has_value() ? words.clip : config.gradient_clipping;
  PENSTOCK_TAKE(engine.clip, kept.Of("clip", "clip", clip, 1.0));
  if (absl::Status status = Check("--clip", engine.clip, 0.0, 1e30); !status.ok()) return status;
  absl::StatusOr<zero::LossScaler> scaler = zero::MakeLossScaler(config.fp16);
  if (!scaler.ok()) return scaler.status();
  engine.loss_scale = scaler->options();
  const double lr = zero::LearningRate(engine.optimizer);
  if (settings->resumes) return absl::OkStatus();  // the record has the schedule

  // Flags win, also over rates that the scheduler names itself.
  const bool keeps_scheduler = config.scheduler.has_value() && !words.warmup.has_value() &&
                               (!words.lr.has_value() || GoesByOptimizersRate(*config.scheduler));
  if (keeps_scheduler) {
    absl::StatusOr<zero::LrSchedule> schedule = zero::MakeSchedule(*config.scheduler, lr, settings->steps);
    if (!schedule.ok()) return schedule.status();
    engine.schedule = *schedule;
    return absl::OkStatus();
  }
  const int64_t warmup = words.warmup.value_or(std::min<int64_t>(100, settings->steps / 10));
  if (absl::Status status = Check<int64_t>("--warmup", warmup, 0, int64_t{1} << 40); !status.ok())
    return status;
  if (config.scheduler.has_value()) {
    settings->notes.push_back(absl::StrFormat(
        "%s takes the place of the config's scheduler: %d steps of warm-up, then a cosine to a "
        "tenth of the rate",
        words.lr.has_value() ? "--lr" : "--warmup", warmup));
  }
  absl::StatusOr<zero::LrSchedule> schedule = zero::LrSchedule::Create(
      zero::WarmupThenCosine{.lr = lr, .min_lr = lr / 10, .warmup = warmup, .horizon = settings->steps});
  if (!schedule.ok()) return schedule.status();
  engine.schedule = *schedule;
  return absl::OkStatus();
}

absl::Status ResolveMemory(const TrainWords& words, const zero::Config& config, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  if (words.host_memory.has_value()) {
    absl::StatusOr<int64_t> bytes = ParseSize(*words.host_memory);
    if (!bytes.ok())
      return Wrong(
          absl::StrCat("--host-memory ", *words.host_memory, ": ", std::string(bytes.status().message())));
    if (*bytes <= 0) return Wrong(absl::StrCat("--host-memory ", *words.host_memory, ": must be above 0"));
    engine.host_memory_bytes = *bytes;
  } else if (config.penstock.host_memory_bytes.has_value()) {
    engine.host_memory_bytes = *config.penstock.host_memory_bytes;
  } else if (engine.offload == zero::OffloadDevice::kNvme) {
    const int sharing = engine.comm != nullptr ? engine.comm->environment().local_world : 1;
    engine.host_memory_bytes = AvailableMemoryBytes() / 2 / sharing;
    settings->notes.push_back(
        absl::StrCat("no --host-memory given: ", sharing == 1 ? "" : "a rank's share of ",
                     "half of what is free, ", FormatBytes(engine.host_memory_bytes)));
  }
  return ResolveDevice(words, config, settings);
}

// Where a device computes the processor has little to do but updates: two cores are left to what moves.
int64_t UpdateThreads(const zero::EngineOptions& engine) {
  if (!engine.device->apart()) return 1;
  const int sharing = engine.comm != nullptr ? engine.comm->environment().local_world : 1;
  return std::max<int64_t>(1, int64_t{zero::DefaultIntraOpThreads()} / sharing - 2);
}

absl::Status ResolveIo(const zero::Config& config, TrainSettings* settings) {
  zero::EngineOptions& engine = settings->engine;
  engine.sync = config.penstock.sync == zero::SyncMode::kPower ? swap::Sync::kPower : swap::Sync::kProcess;
  engine.update_order = config.penstock.order.value_or(zero::UpdateOrder::kAuto);
  engine.tile_bytes = config.penstock.tile_bytes.value_or(0);
  const zero::ZeroConfig& zero_config = config.zero;
  if (zero_config.sub_group_size_elements.value_or(0) > 0) {
    // DeepSpeed's unit of an optimizer step is our tile.
    absl::StatusOr<zero::TileFormat> format = zero::FormatOf(engine);
    if (!format.ok()) return format.status();
    const int64_t bytes = format->precision().UnpaddedBytes(*zero_config.sub_group_size_elements);
    engine.tile_bytes = engine.tile_bytes > 0 ? std::min(engine.tile_bytes, bytes) : bytes;
  }
  engine.bounds = zero::PlanBoundsOf(config, engine.world());
  for (const auto& [given, key, why] :
       {std::tuple{zero_config.reduce_bucket_size_elements.has_value(),
                   "zero_optimization.reduce_bucket_size", "a block is reduced as one, in small pieces"},
        {zero_config.allgather_bucket_size_elements.has_value(), "zero_optimization.allgather_bucket_size",
         "a block is gathered as one"},
        {config.penstock.io_threads.has_value(), "penstock.io_threads",
         "one thread drives a device at its full speed"}}) {
    if (given) settings->notes.push_back(absl::StrCat(key, ": accepted and ignored: ", why));
  }
  engine.update_workers = static_cast<int>(config.penstock.update_threads.value_or(UpdateThreads(engine)));
  if (config.aio.block_size_bytes.has_value()) {
    engine.io.block_bytes = static_cast<uint64_t>(*config.aio.block_size_bytes);
  }
  if (config.aio.queue_depth.has_value()) {
    const auto depth = static_cast<uint64_t>(*config.aio.queue_depth);
    // DeepSpeed's depth is per thread, for reads and for writes apart.
    const auto threads = static_cast<uint64_t>(config.aio.intra_op_parallelism.value_or(1));
    const uint64_t bytes = std::max(depth * threads * engine.io.block_bytes, engine.io.block_bytes);
    engine.io.max_read_bytes_in_flight = std::min(engine.io.max_read_bytes_in_flight, bytes);
    engine.io.max_write_bytes_in_flight = std::min(engine.io.max_write_bytes_in_flight, bytes);
    engine.io_depth_is_limit = true;
  }
  engine.gds = config.aio.use_gds.value_or(false);
  return absl::OkStatus();
}

}  // namespace

void DeclareTrainWords(CLI::App& app, TrainWords& words, bool plans) {
  // A flag given twice means its last value, so that scripts can be given further words.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option(
      "--model", words.model,
      "A preset (gpt-tiny, gpt-small, gpt-125m, gpt-350m, gpt-1b, ...) or a config.json [gpt-small]");
  app.add_option("--data", words.data, "Text (its bytes are the tokens), or nanoGPT's .bin");
  app.add_option("--eval-data", words.eval_data, "Held-out text, in the same form");
  app.add_option("--eval-every", words.eval_every, "Evaluate after every so many steps [at the end]");
  app.add_option("--vocab", words.vocab, "Vocabulary of .bin tokens [256 for text]");
  app.add_option("--config", words.config, "DeepSpeed's JSON; flags win over it");
  app.add_option("--state-dir", words.state_dirs,
                 "Where training state lives; several are striped [penstock-state]")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--offload", words.offload, "none, cpu or nvme [nvme]");
  app.add_option("--host-memory", words.host_memory, "Hard budget, as 512M or 4GiB [half of what is free]");
  app.add_option("--device-memory", words.device_memory, "Hard budget of the device [what is free on it]");
  app.add_option("--device", words.device, "cpu or cuda [cpu]");
  app.add_option("--dtype", words.dtype, "bf16, fp16, fp32 or auto [auto]");
  app.add_option("--steps", words.steps, "Number of the last step, also on resume [100]");
  app.add_option("--batch", words.batch, "Sequences in a micro-batch [2]");
  app.add_option("--accumulate", words.accumulate, "Micro-batches in a step [1]");
  app.add_option("--seq", words.seq, "Tokens in a sequence [the model's context]");
  app.add_option("--lr", words.lr, "Peak learning rate [3e-4]");
  app.add_option("--warmup", words.warmup,
                 "Steps of linear warm-up before the cosine [a tenth of the steps, 100 at most]");
  app.add_option("--clip", words.clip, "Bound of the global gradient norm, 0 for none [1.0]");
  app.add_option("--weight-decay", words.weight_decay, "Weight decay [0.01 for AdamW]");
  app.add_option("--optimizer-states", words.optimizer_states,
                 "What the optimizer's states are kept in: fp32, bf16 or 8bit [fp32]");
  app.add_option("--seed", words.seed, "Of initial values, data order and dropout [1]");
  app.add_option("--threads", words.threads, "Intra-op threads, recorded with the run [one per core]");
  app.add_flag("--resume", words.resume,
               "Continue the run in --state-dir; with --offload none or cpu, and where that directory is "
               "empty, from the newest checkpoint");
  app.add_flag("--overwrite", words.overwrite,
               "Replace the run in --state-dir, and the checkpoints in --checkpoint-dir");
  app.add_option(
      "--init-from", words.init_from,
      "Initial weights: safetensors in Hugging Face's GPT-2 layout, a file, an index or a directory");
  app.add_option("--checkpoint-dir", words.checkpoint_dir, "Where checkpoints are kept");
  app.add_option("--checkpoint-every", words.checkpoint_every,
                 "Keep a checkpoint after every so many steps, written while training goes on");
  app.add_option("--checkpoint-keep", words.checkpoint_keep, "Keep only the newest so many [all]");
  if (plans) {
    app.add_flag("--json", words.json, "Print JSON");
    return;
  }
  app.add_option("--rank-timeout", words.rank_timeout,
                 "Seconds without a sign of life after which another rank counts as lost [30]");
  app.footer(
      "Several processes train together where the environment says so: RANK, WORLD_SIZE, LOCAL_RANK, "
      "MASTER_ADDR and "
      "MASTER_PORT as torchrun sets them, or what mpirun and srun set. Each has --batch sequences, and its "
      "part of the "
      "state in rank-K/ of --state-dir; rank 0 writes report, log and progress.");
  app.add_option("--report", words.report, "Write the run's report, a JSON file");
  app.add_option("--log", words.log, "Append a JSON line for every committed step");
  app.add_option("--trace", words.trace, "Write a trace for Perfetto or chrome://tracing");
  app.add_flag("--check", words.check, "Only check the words and the config");
  app.add_flag("--quiet", words.quiet, "No progress");
}

zero::Batch ExampleBatch(int64_t batch, int64_t seq) {
  return {torch::zeros({batch, seq}, torch::kInt64), torch::zeros({batch, seq}, torch::kInt64)};
}

absl::StatusOr<TrainSettings> ResolveTrainWords(const TrainWords& words, bool needs_data,
                                                std::shared_ptr<zero::Comm> comm) {
  TrainSettings settings;
  zero::EngineOptions& engine = settings.engine;
  engine.comm = std::move(comm);
  zero::Config config;
  if (words.config.has_value()) {
    absl::StatusOr<zero::ParsedConfig> parsed = zero::LoadConfig(*words.config);
    if (!parsed.ok()) return parsed.status();
    config = parsed->config;
    settings.notes = std::move(parsed->notes);
  }
  if (needs_data && !words.data.has_value()) return Wrong("--data FILE is needed: the text to learn");
  if (words.resume && words.overwrite) return Wrong("--resume and --overwrite: one or the other");

  zero::OffloadDevice offload = zero::CombinedOffload(config.zero).value_or(zero::OffloadDevice::kNvme);
  if (words.offload.has_value()) PENSTOCK_TAKE(offload, ParseOffload(*words.offload));
  engine.offload = offload;
  if (offload == zero::OffloadDevice::kNvme) {
    engine.state_dirs = !words.state_dirs.empty() ? words.state_dirs : zero::NvmePaths(config.zero);
    if (engine.state_dirs.empty()) engine.state_dirs = {kDefaultStateDir};
    if (absl::Status status = CheckRankDirectories(engine.state_dirs, engine.world()); !status.ok())
      return status;
    if (engine.comm != nullptr) engine.state_dirs = zero::RankDirectories(engine.state_dirs, engine.rank());
  }
  ResolveDurability(config, &settings);
  if (absl::Status status = ResolveCheckpoints(words, &settings); !status.ok()) return status;
  nlohmann::json run;
  if (words.resume) {
    PENSTOCK_TAKE(run, FindResumable(words, &settings));
    settings.resumes = !run.is_null();
  }
  engine.resume = settings.resumes;
  // A run that was killed before its first commit is started over by --resume.
  engine.overwrite = words.overwrite || (words.resume && !settings.resumes);
  const Kept kept(run);

  std::string model_name, dtype;
  if (settings.resumes && !words.model.has_value()) {
    PENSTOCK_TAKE(settings.model, GptConfigFromJson(run["model"]));
  } else if (words.init_from.has_value() && !words.model.has_value()) {
    nlohmann::json published;
    PENSTOCK_TAKE(published, ConfigOfWeights(*words.init_from));
    if (published.is_null()) {
      return Wrong(absl::StrCat("--init-from ", *words.init_from,
                                ": no config.json tells what model that is: give --model as well"));
    }
    PENSTOCK_TAKE(settings.model, GptConfigFromJson(published));
    const bool told =
        published.contains("activation_function") && published["activation_function"].is_string();
    const std::string activation = told ? published["activation_function"].get<std::string>() : "gelu";
    if (activation != "gelu") {
      settings.notes.push_back(absl::StrCat("--init-from: those weights were trained with ", activation,
                                            "; this model computes gelu, which is close to gelu_new"));
    }
  } else {
    PENSTOCK_TAKE(settings.model, ParseGptConfig(words.model.value_or("gpt-small")));
  }
  settings.data_path = words.data.value_or("");
  settings.eval_path = words.eval_data.value_or("");
  settings.eval_every = words.eval_every.value_or(0);
  if (words.eval_every.has_value()) {
    if (settings.eval_path.empty()) return Wrong("--eval-every needs --eval-data FILE");
    if (absl::Status status = Check<int64_t>("--eval-every", settings.eval_every, 1, int64_t{1} << 40);
        !status.ok()) {
      return status;
    }
  }
  if (words.vocab.has_value()) {
    if (absl::Status status = Check<int64_t>("--vocab", *words.vocab, 1, int64_t{1} << 32); !status.ok())
      return status;
  }
  PENSTOCK_TAKE(settings.vocab, kept.Of<int64_t>("vocab", "vocab", words.vocab, 0));
  if (settings.vocab > 0) settings.model.vocab = settings.vocab;

  settings.steps = words.steps.value_or(settings.resumes ? run.value("steps", int64_t{100}) : 100);
  if (absl::Status status = Check<int64_t>("--steps", settings.steps, 1, int64_t{1} << 40); !status.ok())
    return status;
  if (absl::Status status = ResolveBatchSizes(words, config, kept, run, &settings); !status.ok())
    return status;
  if (words.seq.has_value()) {
    if (absl::Status status = Check<int64_t>("--seq", *words.seq, 1, settings.model.context); !status.ok()) {
      return Wrong(absl::StrCat(std::string(status.message()), " (the model's context)"));
    }
  }
  PENSTOCK_TAKE(settings.seq, kept.Of("seq", "seq", words.seq, settings.model.context));

  int64_t seed = 1;
  PENSTOCK_TAKE(seed, kept.Of<int64_t>("seed", "seed", words.seed, 1));
  if (absl::Status status = Check<int64_t>("--seed", seed, 0, int64_t{1} << 62); !status.ok()) return status;
  engine.seed = static_cast<uint64_t>(seed);
  if (words.threads.has_value()) {
    if (absl::Status status = Check<int64_t>("--threads", *words.threads, 1, kMostThreads); !status.ok())
      return status;
  }
  const int sharing = engine.comm != nullptr ? engine.comm->environment().local_world : 1;
  const int64_t threads =
      words.threads.value_or(std::max<int64_t>(1, zero::DefaultIntraOpThreads() / sharing));
  const int64_t kept_threads = run.is_null() ? threads : run.value("threads", threads);
  if (words.threads.has_value() && kept_threads != threads) {
    settings.notes.push_back(absl::StrCat("--threads ", threads, ": the run goes on with the ", kept_threads,
                                          " that it was created with, so that its bits stay the same"));
  }
  engine.intra_op_threads = static_cast<int>(kept_threads);

  PENSTOCK_TAKE(dtype, ChooseDtype(words, config, &settings.notes));
  if (settings.resumes && !words.dtype.has_value()) dtype = run.value("dtype", dtype);
  engine.dtype = zero::TorchDtype(*zero::ParseDType(dtype));
  if (absl::Status status = ResolveOptimizer(words, config, kept, &settings); !status.ok()) return status;
  if (absl::Status status = ResolveMemory(words, config, &settings); !status.ok()) return status;
  if (absl::Status status = ResolveIo(config, &settings); !status.ok()) return status;

  if (words.init_from.has_value() && settings.resumes) {
    settings.notes.push_back("--init-from: of no effect, since the run goes on with its own weights");
  } else if (words.init_from.has_value()) {
    std::unique_ptr<WeightImport> opened;
    PENSTOCK_TAKE(opened, WeightImport::Open(*words.init_from, settings.model));
    engine.initial_values = [weights = std::shared_ptr<WeightImport>(std::move(opened))](
                                int block, int64_t first, int64_t elements, float* to) {
      return weights->Read(block, first, elements, to);
    };
  }

  engine.micro_batches = static_cast<int>(settings.accumulate);
  engine.example = ExampleBatch(settings.batch, settings.seq);
  engine.run = {{"model", settings.model.ToJson()},
                {"steps", settings.steps},
                {"batch", settings.batch},
                {"accumulate", settings.accumulate},
                {"seq", settings.seq},
                {"vocab", settings.vocab},
                {"seed", seed},
                {"threads", engine.intra_op_threads},
                {"clip", engine.clip},
                {"blas", zero::DescribeBlas().name}};
  if (engine.world() > 1) engine.run["ranks"] = engine.world();
  engine.run.update(settings.kept);
  return settings;
}

}  // namespace penstock::tools
