// `penstock export-checkpoint`: a run of ours becomes a checkpoint that DeepSpeed goes on from.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "models/deepspeed/universal.h"
#include "models/families/family.h"
#include "tools/base/cli.h"
#include "tools/base/size.h"
#include "tools/base/verbs.h"
#include "tools/state/state_reader.h"
#include "zero/compute/tile_format.h"
#include "zero/config/json_field.h"
#include "zero/config/lr_schedule.h"
#include "zero/engine/state_identity.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::tools {
namespace {

constexpr const char* kExportCheckpointName = "penstock export-checkpoint";
constexpr int64_t kDefaultMemoryBytes = int64_t{128} << 20;
constexpr uint64_t kTilesAtOnce = 4;  // one is used, the others are on their way
constexpr int64_t kLeastMemoryBytes = int64_t{1} << 20;

struct ExportCheckpointFlags {
  std::vector<std::string> dirs;
  std::string out, names, tag, host_memory;
  bool torch_optimizer = false, overwrite = false, quiet = false;
};

// A run as its record has it.
struct ExportedRun {
  FoundState state;
  std::shared_ptr<const models::LanguageModel> model;
  nlohmann::json record, payload, identity;
  zero::TileFormat format;
};

absl::StatusOr<ExportedRun> FindRun(const ExportCheckpointFlags& flags) {
  ExportedRun run;
  ASSIGN_OR_RETURN(run.state, FindState(flags.dirs));
  const swap::Inspection& inspection = run.state.inspections.front();
  run.identity = zero::RecordedIdentity(inspection, /*with_rank=*/false);
  run.payload = ParseOrNull(inspection.record.payload);
  const auto refused = [&](const std::string& why) {
    return absl::FailedPreconditionError(absl::StrCat(run.state.name(), ": ", why));
  };
  if (!run.identity.is_object() || !run.identity.contains("model") || !run.payload.is_object() ||
      !run.payload.contains("run") || !run.payload["run"].is_object())
    return refused("not a run of penstock train: cannot be exported");
  if (zero::JsonField<std::string>(run.identity["model"], "architecture") == "driven")
    return refused(
        "a run of a Python script, whose model has the names of its parameters: "
        "engine.export_checkpoint(OUT) "
        "writes it there, after resume=True or load_checkpoint");
  run.record = run.payload["run"];
  absl::StatusOr<std::shared_ptr<const models::LanguageModel>> model =
      models::ModelFromJson(run.identity["model"]);
  if (!model.ok()) return refused(std::string(model.status().message()));
  run.model = *std::move(model);
  if (run.model->lora() != nullptr)
    return refused(
        "it trains adapters beside frozen weights, which have no moments: `penstock export` writes the "
        "adapters, "
        "and with --merge the whole model");
  const auto text = [&](const char* key) {
    return zero::JsonField<std::string>(run.identity, key).value_or("");
  };
  if (text("optimizer") != "adam")
    return refused(absl::StrCat("its optimizer is ", text("optimizer"),
                                ", and DeepSpeed's universal format has Adam's moments"));
  const std::optional<kernels::DType> weights = zero::ParseDType(text("dtype"));
  const std::optional<kernels::StateType> states = zero::ParseStateType(text("optimizer_states"));
  if (!weights.has_value() || !states.has_value()) return refused("its tiles are of no known type");
  run.format.weights = *weights;
  run.format.states = *states;
  if (inspection.record.step == 0) return refused("it has made no step yet: there are no moments");
  if (run.identity["block_elements"] != nlohmann::json(run.model->Layout().block_elements))
    return refused("its blocks have other sizes than its model's");
  return run;
}

// The options of DeepSpeed's parameter group, with the rate of the next step.
absl::StatusOr<nlohmann::json> Optimizer(const ExportedRun& run, int64_t updates) {
  const auto number = [&](const char* key, double otherwise) {
    return zero::JsonField<double>(run.record, key).value_or(otherwise);
  };
  double lr = number("lr", 3e-4), beta1 = number("beta1", 0.9), beta2 = number("beta2", 0.999);
  if (const nlohmann::json schedule = run.payload.value("schedule", nlohmann::json()); !schedule.is_null()) {
    ASSIGN_OR_RETURN(const zero::LrSchedule rates, zero::LrSchedule::FromJson(schedule));
    const zero::ScheduledRates next = rates.At(updates + 1);
    lr = next.lr;
    beta1 = next.beta1.value_or(beta1);
    beta2 = next.beta2.value_or(beta2);
  }
  return nlohmann::json{{"lr", lr},
                        {"betas", {beta1, beta2}},
                        {"eps", number("eps", 1e-8)},
                        {"weight_decay", number("weight_decay", 0.01)}};
}

// DeepSpeed's attributes of the scale; null where there is none.
nlohmann::json LossScaler(const ExportedRun& run) {
  if (run.format.weights != kernels::DType::kFp16) return nullptr;
  return models::LossScalerOf(run.payload.value("loss_scale", nlohmann::json()));
}

// Masters and moments of any range of a block, out of the stores of all ranks.
class Moments {
 public:
  static absl::StatusOr<std::unique_ptr<Moments>> Open(const ExportedRun& run, int64_t memory_bytes) {
    RETURN_IF_ERROR(CheckNotTrained(run.state));
    auto moments = std::make_unique<Moments>();
    moments->format_ = run.format;
    aio::ArenaOptions options;
    options.lock = false;
    const uint64_t of_one = zero::ShardedState::MemoryBytes(run.state.inspections);
    options.bytes =
        std::clamp<uint64_t>(static_cast<uint64_t>(memory_bytes) / 4 / of_one, 1, kTilesAtOnce) * of_one;
    ASSIGN_OR_RETURN(moments->arena_, aio::Arena::Create(options));
    aio::EngineOptions io_options;
    io_options.log = [](std::string_view) {};
    ASSIGN_OR_RETURN(moments->io_, aio::Engine::Create(std::move(io_options)));
    ASSIGN_OR_RETURN(moments->state_,
                     zero::ShardedState::Open(*moments->io_, run.state.parts, run.state.inspections,
                                              run.model->Layout().block_elements, run.format.precision(),
                                              {moments->arena_->data(), options.bytes}));
    return moments;
  }

  // A piece is read as a tile of so many elements.
  absl::Status Read(int block, int64_t first, int64_t elements, float* master, float* m, float* v) {
    while (elements > 0) {
      // 8-bit states share a scale among the elements of a block of them: a piece begins at one.
      const int64_t begin = first / kPiece * kPiece, end = std::min(begin + kPiece, first + elements);
      RETURN_IF_ERROR(ReadPiece(block, begin));
      const zero::TileMemory tile = Tile();
      const int64_t n = end - first, at = first - begin;
      zero::ReadValues(format_, tile, zero::StateKind::kParameter, at, n, master);
      zero::ReadValues(format_, tile, zero::StateKind::kFirstMoment, at, n, m);
      zero::ReadValues(format_, tile, zero::StateKind::kSecondMoment, at, n, v);
      master += n;
      m += n;
      v += n;
      first += n;
      elements -= n;
    }
    return absl::OkStatus();
  }
  const swap::Recovered& recovered() const { return state_->recovered(); }

 private:
  static constexpr int64_t kPiece = 1 << 18;  // elements

  absl::Status ReadPiece(int block, int64_t begin) {
    if (block == block_ && begin == begin_) return absl::OkStatus();
    const tiering::Precision precision = format_.precision();
    segments_.resize(precision.segment_bytes.size());
    places_.clear();
    for (size_t s = 0; s < segments_.size(); ++s) {
      segments_[s].resize(swap::PaddedBytes(static_cast<uint64_t>(precision.SegmentBytes(s, kPiece))));
      places_.push_back(segments_[s].data());
    }
    block_ = -1;
    RETURN_IF_ERROR(state_->Read(tiering::BlockIndex(static_cast<size_t>(block)), begin, kPiece, places_));
    block_ = block;
    begin_ = begin;
    return absl::OkStatus();
  }

  zero::TileMemory Tile() const {
    zero::TileMemory tile;
    tile.weights = places_[0];
    tile.state.assign(places_.begin() + 1, places_.end());
    tile.elements = kPiece;
    return tile;
  }

  // Destroyed from the last to the first.
  std::unique_ptr<aio::Arena> arena_;
  std::unique_ptr<aio::Engine> io_;
  std::unique_ptr<zero::ShardedState> state_;
  zero::TileFormat format_;
  std::vector<std::vector<std::byte>> segments_;
  std::vector<void*> places_;
  int block_ = -1;
  int64_t begin_ = 0;
};

absl::Status Export(const ExportCheckpointFlags& flags, std::ostream& out) {
  models::UniversalOptions options;
  if (!flags.names.empty()) {
    ASSIGN_OR_RETURN(options.names, models::ReadNames(flags.names));
  }
  int64_t memory = kDefaultMemoryBytes;
  if (!flags.host_memory.empty()) {
    const absl::StatusOr<int64_t> given = ParseSize(flags.host_memory);
    if (!given.ok() || *given < kLeastMemoryBytes)
      return absl::InvalidArgumentError(
          absl::StrCat("--host-memory ", flags.host_memory, ": must be a size of 1MiB or more, as 128MiB"));
    memory = *given;
  }
  ASSIGN_OR_RETURN(const ExportedRun run, FindRun(flags));
  ASSIGN_OR_RETURN(std::unique_ptr<Moments> moments, Moments::Open(run, memory));
  models::DeepSpeedProgress progress;
  progress.step = static_cast<int64_t>(moments->recovered().step);
  progress.updates = static_cast<int64_t>(moments->recovered().updates);
  progress.version = models::kDeepSpeedVersion;
  ASSIGN_OR_RETURN(const nlohmann::json group, Optimizer(run, progress.updates));
  progress.groups.push_back(group);
  progress.lr_scheduler = {{"last_batch_iteration", progress.updates - 1}};
  progress.loss_scaler = LossScaler(run);
  options.directory = flags.out;
  options.tag = flags.tag.empty() ? absl::StrCat("global_step", progress.step, "_universal") : flags.tag;
  // The file that names it is read by its first line, without blanks at its ends.
  const bool unprintable =
      absl::StripAsciiWhitespace(options.tag) != options.tag ||
      std::any_of(options.tag.begin(), options.tag.end(), [](char c) { return absl::ascii_iscntrl(c); });
  if (options.tag.find('/') != std::string::npos || options.tag.front() == '.' || unprintable ||
      options.tag == "latest" || options.tag == "latest_universal")
    return absl::InvalidArgumentError(
        absl::StrCat("--tag ", OneLine(options.tag),
                     ": must be a name without /, control characters and blanks at its ends, not beginning "
                     "with a dot, and neither latest nor latest_universal"));
  options.overwrite = flags.overwrite;
  options.memory_bytes = static_cast<uint64_t>(memory);
  const nlohmann::json imported = run.record.value("imported", nlohmann::json::object());
  options.step_is_tensor =
      flags.torch_optimizer || zero::JsonField<bool>(imported, "torch_optimizer").value_or(false);
  const models::ModelLayout layout = run.model->Layout();
  {
    ByteProgress shown("exporting", flags.quiet);
    options.progress = [&](uint64_t done, uint64_t total) { shown.Update(done, total); };
    RETURN_IF_ERROR(models::WriteUniversal(
        progress, layout,
        [&](int block, int64_t first, int64_t elements, float* master, float* m, float* v) {
          return moments->Read(block, first, elements, master, m, v);
        },
        options));
  }
  if (!flags.quiet) {
    out << absl::StrFormat(
               "%s/%s: step %d, %u tensors, %d parameters; load it with \"checkpoint\": {\"load_universal\": "
               "true}\n",
               flags.out, options.tag, progress.step, layout.tensors.size(), layout.parameters())
        << std::flush;
  }
  return absl::OkStatus();
}

}  // namespace

int RunExportCheckpoint(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("Writes a state directory or checkpoint as DeepSpeed's universal checkpoint",
               kExportCheckpointName);
  ExportCheckpointFlags flags;
  std::vector<std::string> paths;
  app.add_option("DIR... OUT", paths,
                 "State directory or checkpoint (all directories of a striped run), then the directory that "
                 "load_checkpoint is given")
      ->required()
      ->expected(2, 65);
  app.add_option(
      "--names", flags.names,
      "JSON: Hugging Face's name of a parameter -> its name in DeepSpeed's model, where they differ");
  app.add_option("--tag", flags.tag, "Name of the checkpoint in OUT [global_stepN_universal]");
  app.add_flag("--torch-optimizer", flags.torch_optimizer,
               "For torch's own optimizers (torch_adam), which count steps in a tensor");
  app.add_option("--host-memory", flags.host_memory, "Most memory for buffers [128MiB]");
  app.add_flag("--overwrite", flags.overwrite, "Replace an existing checkpoint of that name");
  app.add_flag("--quiet", flags.quiet, "No progress, no summary");
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  flags.out = paths.back();
  flags.dirs.assign(paths.begin(), paths.end() - 1);
  const absl::Status status = Export(flags, out);
  return status.ok() ? kExitOk : Fail(kExportCheckpointName, status, err);
}

}  // namespace penstock::tools
