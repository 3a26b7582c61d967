#include "tools/generate/generate_flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "run/record/run_record.h"
#include "tools/base/cli.h"
#include "tools/base/flag_check.h"
#include "tools/base/size.h"
#include "tools/state/state_reader.h"

namespace penstock::tools {
namespace {

constexpr int64_t kMostDrafted = 64;

absl::StatusOr<std::optional<int64_t>> BatchOf(const std::string& text) {
  if (text == "auto") return std::optional<int64_t>();
  const absl::StatusOr<int64_t> batch = ParseCount(text);
  if (batch.ok() && *batch >= 1 && *batch <= 1 << 20) return std::optional<int64_t>(*batch);
  return WrongFlag(absl::StrCat("--batch ", text, ": must be auto, or a number from 1 on"));
}

absl::StatusOr<generate::CachePlace> PlaceOf(const std::string& text) {
  if (text == "auto") return generate::CachePlace::kAuto;
  if (text == "device") return generate::CachePlace::kDevice;
  if (text == "host") return generate::CachePlace::kHost;
  if (text == "nvme") return generate::CachePlace::kDrive;
  return WrongFlag(absl::StrCat("--kv ", text, ": must be auto, device, host or nvme"));
}

const char* PlaceName(generate::CachePlace place) {
  return place == generate::CachePlace::kDevice ? "device"
         : place == generate::CachePlace::kHost ? "host"
                                                : "nvme";
}

absl::StatusOr<uint64_t> BudgetOf(const std::optional<std::string>& text, int threads) {
  if (!text.has_value()) return static_cast<uint64_t>(DefaultHostMemory(1, threads));
  const absl::StatusOr<int64_t> bytes = ParseSize(*text);
  if (bytes.ok() && *bytes > 0) return static_cast<uint64_t>(*bytes);
  return WrongFlag(absl::StrCat("--host-memory ", *text, ": must be a size above 0, as 512MiB or 4GiB"));
}

}  // namespace

void DeclareGenerateMemory(CLI::App& app, GenerateMemoryFlags& flags) {
  app.add_option("--batch", flags.batch, "Texts at once, or auto [auto]");
  app.add_option("--host-memory", flags.host_memory,
                 "Hard host memory budget, such as 512MiB or 4GiB [half of the free memory]");
  app.add_option("--device", flags.device, "Computing device: cpu or cuda [cpu]");
  app.add_option("--device-memory", flags.device_memory,
                 "Hard device memory budget [the free memory of the device]");
  app.add_option("--kv", flags.kv, "Where keys and values live: auto, device, host or nvme [auto]");
  app.add_option(
      "--prompt-lookup", flags.prompt_lookup,
      "Upper bound of the tokens that are guessed from what the text repeats and verified in one pass [0]");
  app.add_option("--threads", flags.threads, "Intra-op threads [one per core]");
}

void DeclareFrozenWeights(CLI::App& app, std::string& directory) {
  app.add_option(
      "--model", directory,
      "Directory of the frozen weights of a run with --lora-rank, if it has moved [where the run last "
      "read them]");
}

absl::Status ResolveGenerateMemory(const GenerateMemoryFlags& flags, int threads,
                                   const OpenGenerateDevice& open_device,
                                   generate::GeneratorOptions* options) {
  RETURN_IF_ERROR(CheckFlag<int64_t>("--threads", threads, 1, run::kMostThreads));
  RETURN_IF_ERROR(CheckFlag<int64_t>("--prompt-lookup", flags.prompt_lookup, 0, kMostDrafted));
  generate::GenerationWish& wish = options->wish;
  wish.drafted = flags.prompt_lookup;
  ASSIGN_OR_RETURN(wish.batch, BatchOf(flags.batch));
  ASSIGN_OR_RETURN(wish.cache, PlaceOf(flags.kv));
  ASSIGN_OR_RETURN(wish.budget_bytes, BudgetOf(flags.host_memory, threads));
  options->threads = threads;
  if (flags.device == "cpu") {
    if (!flags.device_memory.has_value()) return absl::OkStatus();
    if (const absl::StatusOr<int64_t> bytes = ParseSize(*flags.device_memory); !bytes.ok()) {
      return WrongFlag(absl::StrCat("--device-memory ", *flags.device_memory, ": ",
                                    std::string(bytes.status().message())));
    }
    return WrongFlag("--device-memory requires --device cuda; --host-memory bounds a run on the CPU");
  }
  if (open_device) return open_device(flags, options);
  if (flags.device != "cuda")
    return WrongFlag(absl::StrCat("--device ", flags.device, ": must be cpu or cuda"));
  return WrongFlag(
      "--device cuda: this program has no LibTorch, which computes there: build penstock from source (make "
      "build)");
}

generate::OpenWeights OpenWeightsOf(const TextModel& model) {
  return [&model](aio::Engine* engine, const generate::WeightUses& uses) {
    if (!model.directory.empty())
      return generate::OpenSafetensors(engine, model.directory, model.model->Layout(), uses, "weights");
    if (!model.base.empty()) {
      return generate::OpenAdapted(engine, model.parts, model.sequence, model.dtype, model.base, *model.model,
                                   uses, "--model");
    }
    return generate::OpenState(engine, model.parts, model.sequence, model.dtype, model.model->Layout(), uses);
  };
}

int64_t WeightBits(const TextModel& model) { return model.packed.has_value() ? model.packed->bits : 16; }

namespace {

// Empty of a model without mixtures.
std::string ExpertPlanText(const generate::GenerationPlan& plan) {
  const generate::ExpertPart& experts = plan.experts;
  if (experts.all == 0) return "";
  return absl::StrFormat(
      "experts: %d of %d in memory (%s); a pass uses about %.0f of them and reads %.0f (%s), if its routers "
      "choose each alike\n",
      experts.places, experts.all, FormatBytes(static_cast<int64_t>(experts.memory_bytes)), experts.pass_used,
      experts.pass_read, FormatBytes(static_cast<int64_t>(experts.pass_bytes)));
}

}  // namespace

std::string GenerationPlanText(const generate::GenerationPlan& plan, const generate::GenerationWish& wish) {
  const auto size = [](uint64_t bytes) { return FormatBytes(static_cast<int64_t>(bytes)); };
  std::string device;
  if (plan.device.has_value()) {
    device = absl::StrFormat(
        "device memory %s: weights resident %s, in flight %s; keys and values %s; tensors %s; the least that "
        "works here %s; each pass copies %s there at %s\n",
        size(plan.device->total_bytes), size(plan.device->resident_bytes), size(plan.device->ring_bytes),
        size(plan.device->cache_bytes), size(plan.device->tensor_bytes), size(plan.device->least_bytes),
        size(plan.device->pass_bytes), FormatBandwidth(wish.device->copy_bytes_per_second));
  }
  const std::string cache =
      plan.cache == generate::CachePlace::kDevice
          ? "on the device"
          : absl::StrCat(size(plan.cache_bytes), plan.cache == generate::CachePlace::kHost
                                                     ? " (all in memory)"
                                                     : " (the rest on the drive)");
  return absl::StrFormat(
      "%d at once; host memory %s: weights resident %s, in flight %s; keys and values %s; tensors %s; "
      "the least that works here %s\n%s%s"
      "each pass reads %s of weights and up to %s of keys and values; drive %s: about %.3f s a pass, %.2f "
      "tokens/s, bound by %s\n",
      plan.batch, size(plan.total_bytes), size(plan.resident_bytes), size(plan.ring_bytes), cache,
      size(plan.tensor_bytes), size(plan.least_bytes), device, ExpertPlanText(plan), size(plan.pass_bytes),
      size(plan.cache_pass_bytes), FormatBandwidth(wish.drive_bytes_per_second), plan.pass_seconds,
      plan.tokens_per_second(), generate::PassBoundName(plan.bound));
}

nlohmann::ordered_json GenerationPlanJson(const generate::GenerationPlan& plan,
                                          const generate::GenerationWish& wish) {
  nlohmann::ordered_json json = {{"batch", plan.batch},
                                 {"kv", PlaceName(plan.cache)},
                                 {"prompt_lookup", wish.drafted},
                                 {"host_memory_budget_bytes", wish.budget_bytes},
                                 {"least_host_memory_bytes", plan.least_bytes},
                                 {"planned_bytes", plan.total_bytes},
                                 {"resident_bytes", plan.resident_bytes},
                                 {"ring_bytes", plan.ring_bytes},
                                 {"kv_memory_bytes", plan.cache_bytes},
                                 {"tensor_limit_bytes", plan.tensor_bytes},
                                 {"weight_pass_bytes", plan.pass_bytes},
                                 {"kv_pass_bytes", plan.cache_pass_bytes},
                                 {"io_read_bandwidth_bytes_per_s", wish.drive_bytes_per_second},
                                 {"predicted_pass_seconds", plan.pass_seconds},
                                 {"predicted_tokens_per_second", plan.tokens_per_second()},
                                 {"bound_by", generate::PassBoundName(plan.bound)}};
  if (const generate::ExpertPart& experts = plan.experts; experts.all > 0) {
    json["experts"] = {{"in_memory", experts.places},          {"all", experts.all},
                       {"memory_bytes", experts.memory_bytes}, {"pass_used", experts.pass_used},
                       {"pass_read", experts.pass_read},       {"pass_bytes", experts.pass_bytes}};
  }
  if (plan.device.has_value()) {
    const generate::DevicePart& device = *plan.device;
    json.update({{"device_memory_budget_bytes", wish.device->budget_bytes},
                 {"least_device_memory_bytes", device.least_bytes},
                 {"device_planned_bytes", device.total_bytes},
                 {"device_resident_bytes", device.resident_bytes},
                 {"device_ring_bytes", device.ring_bytes},
                 {"device_kv_bytes", device.cache_bytes},
                 {"device_tensor_limit_bytes", device.tensor_bytes},
                 {"device_pass_bytes", device.pass_bytes},
                 {"copy_bandwidth_bytes_per_s", wish.device->copy_bytes_per_second}});
  }
  return json;
}

void AddGenerationRun(const generate::GenerationStats& stats, nlohmann::ordered_json* json) {
  const double decode = std::max(stats.decode_seconds, 1e-9);
  json->update({{"peak_tensor_bytes", stats.peak_tensor_bytes},
                {"finished", stats.finished},
                {"passes", stats.passes},
                {"prompt_tokens", stats.prompt_tokens},
                {"tokens", stats.tokens},
                {"seconds", stats.seconds},
                {"stall_io_seconds", stats.wait_seconds},
                {"stall_copy_seconds", stats.copy_wait_seconds},
                {"h2d_bytes", stats.h2d_bytes},
                {"d2h_bytes", stats.d2h_bytes},
                {"peak_device_bytes", stats.peak_device_bytes},
                {"tokens_per_second", static_cast<double>(stats.tokens) / std::max(stats.seconds, 1e-9)},
                {"weight_read_bytes", stats.weight_read_bytes},
                {"kv_read_bytes", stats.cache_read_bytes},
                {"kv_write_bytes", stats.cache_written_bytes},
                {"drafted_tokens", stats.drafted_tokens},
                {"accepted_tokens", stats.accepted_tokens},
                {"decode_passes", stats.decode_passes},
                {"decode_seconds", stats.decode_seconds},
                {"decode_read_bytes", stats.decode_read_bytes},
                {"decode_tokens_per_second", static_cast<double>(stats.decode_tokens) / decode},
                {"decode_read_bytes_per_s", static_cast<double>(stats.decode_read_bytes) / decode}});
  if (!json->contains("experts")) return;
  const generate::ExpertStats& experts = stats.experts;
  (*json)["experts"].update({{"used", experts.used},
                             {"hits", experts.hits},
                             {"guessed_hits", experts.guessed_hits},
                             {"misses", experts.misses},
                             {"guesses", experts.guesses},
                             {"right_guesses", experts.right_guesses},
                             {"read_bytes", experts.read_bytes},
                             {"wrong_guess_bytes", experts.wrong_bytes},
                             {"stall_seconds", experts.wait_seconds},
                             {"stall_guessed_seconds", experts.guess_wait_seconds}});
}

}  // namespace penstock::tools
