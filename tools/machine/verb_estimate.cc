#include "tools/machine/verb_estimate.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "tiering/advice/estimate.h"
#include "tools/base/cli.h"
#include "tools/base/size.h"

namespace penstock::tools {
namespace {

constexpr const char* kEstimateName = "penstock estimate";

struct EstimateFlags {
  std::string params;
  std::string largest_layer;
  std::string model;
  std::optional<int64_t> lora_rank;
  std::string lora_targets;
  int64_t layers = 0;
  int64_t width = 0;
  int64_t context = 1024;
  int64_t vocab = 256;
  int64_t gpus = 1;
  int64_t nodes = 1;
  double buffer_factor = 1.5;
  std::string dtype = "bf16", states = "fp32";
  int64_t drives = 1;
  std::string read = "3GB";
  std::string write = "2GB";
  double terabytes_written = 600;
  double step_seconds = 0;
  std::string stage = "all";
  bool json = false;
};

void Declare(CLI::App& app, EstimateFlags& flags, bool with_model) {
  app.option_defaults()->always_capture_default();
  if (with_model) {
    app.add_option("--model", flags.model, "A preset, or a model's config.json");
    app.add_option("--lora-rank", flags.lora_rank,
                   "Rank of LoRA adapters for --model, in Penstock's rows [none: all weights train]");
    app.add_option("--lora-targets", flags.lora_targets, "Matrices that are adapted, as train has them");
  }
  app.add_option("--params", flags.params, "Parameters in all, such as 7B or 2851e6 (shared ones once)");
  app.add_option("--largest-layer", flags.largest_layer,
                 "Parameters of the largest layer [all, where not given]");
  app.add_option("--layers", flags.layers, "Instead of --params, a GPT's shape: its layers")
      ->check(CLI::Range(1, 100'000));
  app.add_option("--width", flags.width, "... and width")->check(CLI::Range(1, 1'000'000));
  app.add_option("--context", flags.context, "... and context")->check(CLI::Range(1, 100'000'000));
  app.add_option("--vocab", flags.vocab, "... and vocabulary")->check(CLI::Range(1, 100'000'000));
  app.add_option("--gpus-per-node", flags.gpus, "Ranks on one node");
  app.add_option("--nodes", flags.nodes, "Nodes");
  app.add_option("--buffer-factor", flags.buffer_factor, "DeepSpeed's additional_buffer_factor");
  app.add_option("--dtype", flags.dtype, "bf16, fp16 or fp32")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  app.add_option("--optimizer-states", flags.states, "m and v in fp32, bf16 or 8bit")
      ->check(CLI::IsMember({"fp32", "bf16", "8bit"}));
  app.add_option("--drives", flags.drives, "NVMe drives of one node")->check(CLI::Range(1, 1000));
  app.add_option("--read-bandwidth", flags.read, "Bytes per second that one drive reads");
  app.add_option("--write-bandwidth", flags.write, "Bytes per second that one drive writes");
  app.add_option("--tbw", flags.terabytes_written, "Terabytes (10^12) that one drive is rated to be written")
      ->check(CLI::Range(0.001, 1e9));
  app.add_option("--step-seconds", flags.step_seconds,
                 "Compute of one step; 0: a step takes what its I/O takes")
      ->check(CLI::Range(0.0, 1e9));
  app.add_option("--stage", flags.stage, "What to show: 2, 3, nvme or all")
      ->check(CLI::IsMember({"2", "3", "nvme", "all"}));
  app.add_flag("--json", flags.json, "One JSON object with everything, in bytes");
}

absl::StatusOr<ModelSize> Size(const EstimateFlags& flags, const ModelSizer& sizer) {
  const bool shape = flags.layers > 0 || flags.width > 0;
  if (static_cast<int>(!flags.params.empty()) + static_cast<int>(!flags.model.empty()) +
          static_cast<int>(shape) !=
      1) {
    return absl::InvalidArgumentError(absl::StrCat("give the model's size in one way: --params N, ",
                                                   sizer ? "--model NAME, " : "",
                                                   "or --layers L and --width W"));
  }
  if (flags.lora_rank.has_value() || !flags.lora_targets.empty()) {
    if (flags.model.empty() || !flags.lora_rank.has_value())
      return absl::InvalidArgumentError("--lora-rank and --lora-targets: give --model, and --lora-rank");
    if (*flags.lora_rank < 1)
      return absl::InvalidArgumentError(
          absl::StrCat("--lora-rank ", *flags.lora_rank, ": must be 1 or more"));
    if (flags.gpus * flags.nodes > 1)
      return absl::InvalidArgumentError(
          "--lora-rank: adapters are trained by one process: one GPU of one node");
  }
  if (!flags.model.empty())
    return sizer(flags.model, {.rank = flags.lora_rank.value_or(0), .targets = flags.lora_targets});
  if (shape) {
    if (flags.layers == 0 || flags.width == 0)
      return absl::InvalidArgumentError("--layers and --width go together");
    return GptSize(flags.layers, flags.width, flags.context, flags.vocab);
  }
  const absl::StatusOr<int64_t> params = ParseCount(flags.params);
  if (!params.ok()) return absl::InvalidArgumentError(absl::StrCat("--params: ", params.status().message()));
  return ModelSize{.params = *params, .largest_layer_params = *params};
}

absl::StatusOr<double> Bandwidth(const char* flag, const std::string& text) {
  const absl::StatusOr<int64_t> bytes = ParseSize(text);
  if (!bytes.ok()) return absl::InvalidArgumentError(absl::StrCat(flag, ": ", bytes.status().message()));
  if (*bytes < 1)
    return absl::InvalidArgumentError(absl::StrCat(flag, ": must be 1 byte per second or more"));
  return static_cast<double>(*bytes);
}

absl::Status Run(const EstimateFlags& flags, const ModelSizer& sizer, std::ostream& out) {
  ASSIGN_OR_RETURN(const ModelSize size, Size(flags, sizer));
  tiering::EstimateInput input;
  input.params = size.params;
  input.largest_layer_params = size.largest_layer_params;
  input.frozen_params = size.frozen_params;
  input.largest_block_params = size.largest_block_params;
  input.gpus_per_node = flags.gpus;
  input.nodes = flags.nodes;
  input.buffer_factor = flags.buffer_factor;
  if (!flags.largest_layer.empty()) {
    const absl::StatusOr<int64_t> largest = ParseCount(flags.largest_layer);
    if (!largest.ok())
      return absl::InvalidArgumentError(absl::StrCat("--largest-layer: ", largest.status().message()));
    input.largest_layer_params = *largest;
    input.largest_block_params = 0;
  }
  RETURN_IF_ERROR(tiering::CheckEstimate(input));

  tiering::DriveInput drives;
  const tiering::Precision precision = flags.dtype == "fp32"   ? tiering::Precision::Fp32()
                                       : flags.dtype == "fp16" ? tiering::Precision::Fp16()
                                                               : tiering::Precision::Bf16();
  drives.precision = precision.WithMoments(flags.states == "8bit" ? 1 : flags.states == "bf16" ? 2 : 4);
  drives.drives = flags.drives;
  drives.rated_bytes_written = flags.terabytes_written * 1e12;
  drives.step_seconds = flags.step_seconds;
  ASSIGN_OR_RETURN(const double read, Bandwidth("--read-bandwidth", flags.read));
  drives.read_bytes_per_s = read;
  ASSIGN_OR_RETURN(const double write, Bandwidth("--write-bandwidth", flags.write));
  drives.write_bytes_per_s = write;

  if (flags.json) {
    nlohmann::json json = tiering::EstimateJson(input, drives);
    json["input"]["vocabulary_tiles"] = size.vocabulary_tiles;
    out << json.dump(2) << "\n" << std::flush;
    return absl::OkStatus();
  }
  const auto wants = [&flags](const char* stage) { return flags.stage == "all" || flags.stage == stage; };
  std::string text;
  if (wants("2"))
    absl::StrAppend(&text, "ZeRO-2 (DeepSpeed's estimate; its GB are 2^30 bytes)\n", FormatZero2(input),
                    "\n");
  if (wants("3"))
    absl::StrAppend(&text, "ZeRO-3 (DeepSpeed's estimate; its GB are 2^30 bytes)\n", FormatZero3(input),
                    "\n");
  if (wants("nvme")) absl::StrAppend(&text, FormatTiers(input, drives), "\n");
  if (wants("nvme") && size.vocabulary_tiles > 1)
    absl::StrAppend(&text, "Penstock has the vocabulary in ", size.vocabulary_tiles, " tiles\n\n");
  if (!text.empty()) text.pop_back();
  out << text << std::flush;
  return absl::OkStatus();
}

}  // namespace

ModelSize GptSize(int64_t layers, int64_t width, int64_t context, int64_t vocab) {
  const int64_t layer = 12 * width * width + 13 * width;
  const int64_t embedding = (vocab + context) * width;
  return {.params = layers * layer + embedding + 2 * width,
          .largest_layer_params = std::max(layer, embedding)};
}

int RunEstimate(int argc, const char* const* argv, std::ostream& out, std::ostream& err,
                const ModelSizer& sizer) {
  CLI::App app("Memory that a model needs, by DeepSpeed's formulas and with Penstock's NVMe tier",
               kEstimateName);
  EstimateFlags flags;
  Declare(app, flags, sizer != nullptr);
  if (const std::optional<int> code = ParseFlags(app, argc, argv, out, err)) return *code;
  const absl::Status status = Run(flags, sizer, out);
  return status.ok() ? kExitOk : Fail(kEstimateName, status, err);
}

}  // namespace penstock::tools
