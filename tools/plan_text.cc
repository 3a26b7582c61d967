#include "tools/plan_text.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/size.h"
#include "zero/measure.h"

namespace penstock::tools {
namespace {

std::string NearestExisting(const std::string& directory) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::absolute(directory, error);
  while (!path.empty() && !std::filesystem::is_directory(path, error) && path != path.root_path())
    path = path.parent_path();
  return path.string();
}

double BytesPerParameter(const zero::EnginePlan& plan) {
  return static_cast<double>(plan.plan.nvme_read_bytes + plan.plan.nvme_write_bytes) /
         static_cast<double>(plan.parameters);
}

// "bf16", and what is not AdamW in fp32.
std::string TypesText(const zero::EnginePlan& plan, const zero::EngineOptions& options) {
  std::string text = plan.plan.precision.name;
  const std::string optimizer = zero::OptimizerName(options.optimizer);
  if (optimizer != "adam") absl::StrAppend(&text, ", ", optimizer);
  if (plan.format.states != kernels::StateType::kFp32) {
    absl::StrAppend(&text, ", ", std::string(zero::StateTypeName(plan.format.states)), " optimizer states");
  }
  return text;
}

}  // namespace

MeasuredDrives MeasureDrives(const std::vector<std::string>& directories, int64_t memory_bytes,
                             int64_t file_bytes) {
  MeasuredDrives drives;
  for (const std::string& directory : directories) {
    aio::ProbeOptions options;
    options.directory = NearestExisting(directory);
    options.file_bytes = static_cast<uint64_t>(file_bytes);
    options.budget_ms = file_bytes < (int64_t{64} << 20) ? 250 : 800;
    const auto most = static_cast<uint64_t>(memory_bytes > 0 ? memory_bytes / 4 : int64_t{1} << 40);
    std::erase_if(options.depths,
                  [&](uint64_t depth) { return depth > std::min(most, options.file_bytes / 2); });
    absl::StatusOr<aio::DeviceProfile> profile =
        options.depths.empty()
            ? absl::ResourceExhaustedError("the budget is too small to probe the drive with")
            : aio::MeasureDevice(options);
    if (!profile.ok()) {
      drives.note =
          absl::StrCat("drive not measured, 2 GB/s assumed: ", std::string(profile.status().message()));
      drives.profile = aio::DeviceProfile();
      drives.profile.read_bytes_per_s = drives.profile.write_bytes_per_s = drives.profile.mixed_bytes_per_s =
          2e9;
      drives.profile.knee_bytes = 4 << 20;
      return drives;
    }
    aio::DeviceProfile& sum = drives.profile;
    const double read = sum.read_bytes_per_s, write = sum.write_bytes_per_s, mixed = sum.mixed_bytes_per_s;
    sum = std::move(*profile);
    sum.read_bytes_per_s += read;
    sum.write_bytes_per_s += write;
    sum.mixed_bytes_per_s += mixed;
  }
  return drives;
}

absl::StatusOr<tiering::Prediction> Predict(const zero::EnginePlan& plan, const zero::EngineOptions& options,
                                            const aio::DeviceProfile& drives) {
  tiering::MachineModel machine;
  if (drives.read_bytes_per_s > 0) machine.read_bytes_per_s = drives.read_bytes_per_s;
  if (drives.write_bytes_per_s > 0) machine.write_bytes_per_s = drives.write_bytes_per_s;
  machine.update_workers = options.update_workers;
  machine.update_parameters_per_s = zero::MeasureUpdateRate(plan.format, options.optimizer);
  return tiering::Simulate(plan.graph, plan.plan, machine);
}

int64_t FreeBytes(const std::string& directory) {
  struct statvfs system {};
  if (statvfs(NearestExisting(directory).c_str(), &system) != 0) return -1;
  return static_cast<int64_t>(system.f_bavail) * static_cast<int64_t>(system.f_frsize);
}

std::string PlanText(const zero::EnginePlan& plan, const zero::EngineOptions& options,
                     const tiering::Prediction& prediction, const MeasuredDrives& drives) {
  std::string text =
      absl::StrFormat("%d parameters in %d blocks, %s; state %s", plan.parameters, plan.graph.blocks.size(),
                      TypesText(plan, options), FormatBytes(plan.state_bytes));
  if (options.host_memory_bytes > 0 && plan.state_bytes > options.host_memory_bytes) {
    absl::StrAppend(&text, absl::StrFormat(", %.1f times the host memory budget of %s",
                                           static_cast<double>(plan.state_bytes) /
                                               static_cast<double>(options.host_memory_bytes),
                                           FormatBytes(options.host_memory_bytes)));
  }
  absl::StrAppend(&text, "\nhost memory:\n");
  const tiering::Ledger ledger = plan.plan.ledger();
  for (const tiering::Ledger::Line& line : ledger.lines()) {
    absl::StrAppend(&text, absl::StrFormat("  %-22s %12s", line.what, FormatBytes(line.bytes)));
    if (line.count > 1) absl::StrAppend(&text, absl::StrFormat("  in %d", line.count));
    absl::StrAppend(&text, "\n");
  }
  absl::StrAppend(&text, absl::StrFormat("  %-22s %12s", "together", FormatBytes(plan.plan.host_bytes())));
  absl::StrAppend(&text, absl::StrFormat("  (the least that works: %s)\n",
                                         FormatBytes(plan.plan.least_host_memory_bytes)));
  if (plan.plan.on_nvme) {
    const int64_t free = FreeBytes(options.state_dirs.front());
    absl::StrAppend(
        &text,
        absl::StrFormat("drive: %s for two versions of everything%s; %s written and %s read per step, "
                        "%.1f bytes per parameter\n",
                        FormatBytes(plan.disk_bytes),
                        free >= 0 && !options.resume ? absl::StrCat(", ", FormatBytes(free), " free") : "",
                        FormatBytes(plan.plan.nvme_write_bytes), FormatBytes(plan.plan.nvme_read_bytes),
                        BytesPerParameter(plan)));
    if (drives.note.empty()) {
      absl::StrAppend(&text, absl::StrFormat("       reads %s, writes %s, both at once %s\n",
                                             FormatBandwidth(drives.profile.read_bytes_per_s),
                                             FormatBandwidth(drives.profile.write_bytes_per_s),
                                             FormatBandwidth(drives.profile.mixed_bytes_per_s)));
    } else {
      absl::StrAppend(&text, "       ", drives.note, "\n");
    }
  }
  if (plan.plan.speculates) {
    absl::StrAppend(
        &text,
        absl::StrFormat("order of update: %.0f%% of the tiles in backward, as long as fewer than %.0f%% "
                        "of the steps are clipped or skipped; otherwise in the next forward\n",
                        100 * plan.plan.in_backward_share(), 100 * plan.plan.worthwhile_redo_rate));
  }
  absl::StrAppend(
      &text,
      absl::StrFormat("predicted step: %.3g s, bound by %s (compute %.3g s, drive %.3g s, updates %.3g s)\n",
                      prediction.step_seconds, prediction.bound_by, prediction.compute_seconds,
                      prediction.read_seconds + prediction.write_seconds, prediction.update_seconds));
  return text;
}

nlohmann::json PlanJson(const zero::EnginePlan& plan, const zero::EngineOptions& options,
                        const tiering::Prediction& prediction, const MeasuredDrives& drives) {
  nlohmann::json host = nlohmann::json::array();
  const tiering::Ledger ledger = plan.plan.ledger();
  for (const tiering::Ledger::Line& line : ledger.lines()) {
    host.push_back({{"what", line.what}, {"bytes", line.bytes}, {"count", line.count}});
  }
  return {{"params", plan.parameters},
          {"blocks", plan.graph.blocks.size()},
          {"dtype", plan.plan.precision.name},
          {"optimizer", zero::OptimizerName(options.optimizer)},
          {"optimizer_states", std::string(zero::StateTypeName(plan.format.states))},
          {"offload", std::string(zero::Name(options.offload))},
          {"order_of_update", !plan.plan.speculates                  ? "next_forward"
                              : plan.plan.in_backward_share() == 1.0 ? "in_backward"
                                                                     : "mixed"},
          {"in_backward_share", plan.plan.in_backward_share()},
          {"worthwhile_redo_rate", plan.plan.worthwhile_redo_rate},
          {"host_memory_budget_bytes", options.host_memory_bytes},
          {"host_memory_bytes", plan.plan.host_bytes()},
          {"least_host_memory_bytes", plan.plan.least_host_memory_bytes},
          {"host", std::move(host)},
          {"state_bytes_total", plan.state_bytes},
          {"state_bytes_nvme", plan.disk_bytes},
          {"nvme_read_bytes_per_step", plan.plan.nvme_read_bytes},
          {"nvme_write_bytes_per_step", plan.plan.nvme_write_bytes},
          {"nvme_bytes_per_param_per_step", BytesPerParameter(plan)},
          {"io_read_bandwidth_bytes_per_s", drives.profile.read_bytes_per_s},
          {"io_write_bandwidth_bytes_per_s", drives.profile.write_bytes_per_s},
          {"drive_measured", drives.note.empty()},
          {"predicted_step_seconds", prediction.step_seconds},
          {"predicted_compute_seconds", prediction.compute_seconds},
          {"predicted_drive_seconds", prediction.read_seconds + prediction.write_seconds},
          {"predicted_update_seconds", prediction.update_seconds},
          {"bound_by", prediction.bound_by}};
}

}  // namespace penstock::tools
