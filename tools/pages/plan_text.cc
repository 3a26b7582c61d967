#include "tools/pages/plan_text.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tiering/advice/tier_table.h"
#include "tools/base/size.h"
#include "tools/pages/markup.h"
#include "zero/engine/report.h"

namespace penstock::tools {
namespace {

double BytesPerParameter(const zero::EnginePlan& plan) {
  return static_cast<double>(plan.plan.nvme_read_bytes + plan.plan.nvme_write_bytes) /
         static_cast<double>(plan.parameters);
}

// "bf16", and what is not AdamW in fp32.
std::string TypesText(const zero::EnginePlan& plan, const zero::EngineOptions& options) {
  std::string text = plan.plan.precision.name;
  const std::string optimizer = zero::OptimizerName(options.optimizer.algorithm);
  if (optimizer != "adam") absl::StrAppend(&text, ", ", optimizer);
  if (plan.format.states != kernels::StateType::kFp32) {
    absl::StrAppend(&text, ", ", std::string(zero::StateTypeName(plan.format.states)), " optimizer states");
  }
  return text;
}

tiering::Wear WearOf(const PlanFacts& facts) {
  const auto drives = static_cast<double>(std::max<size_t>(1, facts.options.storage.state_dirs.size()));
  return tiering::WearOf(facts.plan.plan.nvme_write_bytes, facts.prediction.step_seconds,
                         drives * facts.rated_bytes_written);
}

std::vector<tiering::TierLine> TiersOf(const zero::EnginePlan& plan) {
  return tiering::TiersOf(plan.graph, plan.plan, {.versions = plan.versions, .bytes = plan.disk_bytes});
}

nlohmann::json Finite(double value) {
  return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json();
}

std::string Tiers(const PlanFacts& facts) {
  std::string text = absl::StrFormat("where it lives:          %12s %12s %12s   %12s %12s\n", "in flight",
                                     "stays", "on the drive", "read a step", "written");
  auto cell = [](int64_t bytes) { return bytes == 0 ? std::string("-") : FormatBytes(bytes); };
  tiering::TierLine sum{.what = "together"};
  auto line = [&](const tiering::TierLine& l) {
    absl::StrAppend(&text, absl::StrFormat("  %-22s %12s %12s %12s   %12s %12s\n", l.what,
                                           cell(l.in_flight_bytes), cell(l.resident_bytes),
                                           cell(l.nvme_bytes), cell(l.read_bytes), cell(l.written_bytes)));
  };
  for (const tiering::TierLine& l : TiersOf(facts.plan)) {
    line(l);
    sum.in_flight_bytes += l.in_flight_bytes;
    sum.resident_bytes += l.resident_bytes;
    sum.nvme_bytes += l.nvme_bytes;
    sum.read_bytes += l.read_bytes;
    sum.written_bytes += l.written_bytes;
  }
  line(sum);
  return text;
}

std::string Lanes(const tiering::Prediction& p, const tiering::MachineModel& machine) {
  std::string text = "lanes, busy in a step:\n";
  auto line = [&](const char* what, double seconds, double of) {
    if (seconds <= 0) return;
    absl::StrAppend(&text, absl::StrFormat("  %-22s %10.3g s  %3.0f%%\n", what, seconds,
                                           100 * seconds / std::max(of, 1e-12)));
  };
  line("forward and backward", p.compute_seconds, p.step_seconds);
  line("drive, reads", p.read_seconds, p.step_seconds);
  line("drive, writes", p.write_seconds, p.step_seconds);
  line("drive, together", p.drive_seconds, p.step_seconds);
  line("copies to the device", p.copy_in_seconds, p.step_seconds);
  line("copies from the device", p.copy_out_seconds, p.step_seconds);
  line("updates and checks", p.update_seconds, p.step_seconds * std::max(1, machine.update_workers));
  absl::StrAppend(
      &text, absl::StrFormat("  a step takes %.2f of its lower bound, %.3g s\n",
                             p.step_seconds / std::max(p.lower_bound_seconds, 1e-12), p.lower_bound_seconds));
  if (p.clipped_lower_bound_seconds > p.lower_bound_seconds) {
    absl::StrAppend(&text, absl::StrFormat("  a clipped step takes %.2f of its own lower bound, %.3g s\n",
                                           p.clipped_step_seconds / p.clipped_lower_bound_seconds,
                                           p.clipped_lower_bound_seconds));
  }
  return text;
}

std::string DeviceText(const PlanFacts& facts) {
  const tiering::DevicePlan& device = facts.plan.plan.device;
  if (!device.has_own_memory) return "";
  std::string text = absl::StrCat("device memory (", facts.options.device->Describe(), "):\n");
  const tiering::Ledger ledger = device.ledger();
  for (const tiering::Ledger::Line& line : ledger.lines()) {
    absl::StrAppend(&text, absl::StrFormat("  %-32s %12s", line.what, FormatBytes(line.bytes)));
    if (line.count > 1) absl::StrAppend(&text, absl::StrFormat("  in %d", line.count));
    absl::StrAppend(&text, "\n");
  }
  absl::StrAppend(&text, absl::StrFormat("  %-32s %12s  (the least that works: %s)\n", "together",
                                         FormatBytes(device.bytes()), FormatBytes(device.least_bytes)));
  absl::StrAppend(&text, absl::StrFormat("  %.0f%% of the state lives there and is updated there\n",
                                         100 * facts.plan.plan.on_device_share()));
  if (device.gds) absl::StrAppend(&text, "  weights that only it needs come straight from the drive\n");
  absl::StrAppend(&text, absl::StrFormat("  %s to it and %s from it per step, at %s and %s\n",
                                         FormatBytes(device.h2d_bytes), FormatBytes(device.d2h_bytes),
                                         FormatBandwidth(facts.machine.model.h2d_bytes_per_s),
                                         FormatBandwidth(facts.machine.model.d2h_bytes_per_s)));
  return text;
}

nlohmann::json DeviceJson(const PlanFacts& facts) {
  const tiering::DevicePlan& device = facts.plan.plan.device;
  nlohmann::json json = {{"name", std::string(facts.options.device->name())}};
  if (!device.has_own_memory) return json;
  nlohmann::json lines = nlohmann::json::array();
  const tiering::Ledger ledger = device.ledger();
  for (const tiering::Ledger::Line& line : ledger.lines()) {
    lines.push_back({{"what", line.what}, {"bytes", line.bytes}, {"count", line.count}});
  }
  json.update({{"memory_budget_bytes", device.budget_bytes},
               {"memory_bytes", device.bytes()},
               {"least_memory_bytes", device.least_bytes},
               {"memory", std::move(lines)},
               {"updated_on_device_share", facts.plan.plan.on_device_share()},
               {"gds", device.gds},
               {"h2d_bytes_per_step", device.h2d_bytes},
               {"d2h_bytes_per_step", device.d2h_bytes}});
  return json;
}

const char* VersionsText(int versions) {
  return versions == 1 ? "one version" : versions == 2 ? "two versions" : "three versions";
}

std::string_view DurabilityName(const tiering::Plan& plan) {
  return zero::Name(plan.commits_every_step ? zero::Durability::kStep : zero::Durability::kCheckpoint);
}

// What a kill will cost, where it costs more than the step under way.
std::string DurabilityText(const zero::EnginePlan& plan, const zero::EngineOptions& options) {
  if (!plan.plan.on_nvme || !plan.plan.trains || plan.plan.commits_every_step) return "";
  const int64_t every = options.storage.checkpoints.every;
  std::string text = absl::StrFormat(
      "durability: checkpoint: %s a step less to write, since what stays in memory is "
      "written %s and at the end; ",
      FormatBytes(plan.plan.late_write_bytes),
      every > 0 ? absl::StrFormat("every %d steps", every) : "at an orderly stop");
  if (plan.versions > 1) {
    absl::StrAppend(&text, every > 0 ? "a kill goes back to the last of these\n"
                                     : "a kill goes back to where this process began (--checkpoint-every N "
                                       "bounds that)\n");
    return text;
  }
  absl::StrAppend(
      &text, "with one version a kill leaves nothing in ", options.storage.state_dirs.front(), ": ",
      every > 0 ? absl::StrCat("--resume goes back to the newest checkpoint in ",
                               options.storage.checkpoints.parent, "\n")
                : std::string("everything is lost, for there are no checkpoints (--checkpoint-dir, "
                              "--checkpoint-every N)\n"));
  return text;
}

std::string WearText(const PlanFacts& facts) {
  if (facts.plan.plan.nvme_write_bytes == 0) return "";
  const tiering::Wear wear = WearOf(facts);
  const size_t drives = std::max<size_t>(1, facts.options.storage.state_dirs.size());
  return absl::StrFormat("wear: %.3g TB written a day; %s days of training to the rating of %.0f TB%s\n",
                         wear.bytes_per_day * 1e-12, Plain(wear.days_to_rating, 3),
                         static_cast<double>(drives) * facts.rated_bytes_written * 1e-12,
                         drives > 1 ? absl::StrFormat(" of %d drives", drives) : "");
}

std::string OfSteps(const tiering::WhatIf& w) {
  return absl::StrFormat("%.3g s a step, bound by %s; %.2f times as many samples a second",
                         w.prediction.step_seconds, w.prediction.bound_by, w.speedup);
}

std::string OfClippedSteps(const PlanFacts& facts, const tiering::WhatIf& w) {
  return absl::StrFormat("%.3g s a clipped step instead of %.3g s, which reads %s instead of %s",
                         w.prediction.clipped_step_seconds, facts.prediction.clipped_step_seconds,
                         FormatBytes(w.clipped_read_bytes), FormatBytes(facts.plan.plan.clipped_read_bytes));
}

}  // namespace

int64_t FreeBytes(const std::string& directory) {
  const absl::StatusOr<aio::FileSystemSpace> space = aio::QueryFileSystem(aio::NearestExisting(directory));
  return space.ok() ? static_cast<int64_t>(space->free_bytes) : -1;
}

// ", 38.6 GiB free", of a run that is not there yet, and whether that is enough.
std::string RoomText(const zero::EnginePlan& plan, const zero::EngineOptions& options) {
  if (options.storage.state_dirs.front().empty()) return "";  // of a drive that nobody has named
  const int64_t free = FreeBytes(options.storage.state_dirs.front());
  if (free < 0 || options.resume.enabled) return "";
  // Of one of several directories that is not known: they may lie on one drive.
  const bool known = options.storage.state_dirs.size() == 1 && !options.storage.overwrite;
  if (known && plan.disk_bytes > free) {
    return absl::StrFormat(", which does not fit: %s are free in %s, and %s are missing", FormatBytes(free),
                           options.storage.state_dirs.front(), FormatBytes(plan.disk_bytes - free));
  }
  return absl::StrCat(", ", FormatBytes(free), " free");
}

// " (3.4 s while every step is clipped)", where that makes a difference.
std::string WhileClipped(const tiering::Prediction& prediction) {
  if (prediction.clipped_step_seconds <= prediction.step_seconds * 1.005) return "";
  return absl::StrFormat(" (%.3g s while every step is clipped)", prediction.clipped_step_seconds);
}

absl::StatusOr<std::string> ProcessMemoryText(const zero::EnginePlan& plan,
                                              const zero::EngineOptions& options,
                                              const zero::HostMemory& memory) {
  const int here = options.comm != nullptr ? options.comm->environment().local_world : 1;
  // The ranks of a host take reserved huge pages one after the other: all of them find some, or none.
  const bool reserved = here * plan.plan.arena_bytes <= memory.huge_page_bytes;
  const int64_t planned = plan.plan.host_bytes() - (reserved ? plan.plan.arena_bytes : 0),
                beside = zero::ProcessOverheadBytes(options.intra_op_threads);
  const int64_t all = here * (planned + beside);
  const std::string many = here > 1 ? absl::StrCat(" of each of ", here, " ranks") : "";
  const std::string takes = absl::StrFormat(
      "%s of memory in all: %s planned%s and about %s beside it (code, LibTorch, scratch of BLAS)%s",
      FormatBytes(all), FormatBytes(planned),
      reserved ? absl::StrFormat(" (and %s in reserved huge pages)", FormatBytes(plan.plan.arena_bytes)) : "",
      FormatBytes(beside), many);
  const std::string bound =
      memory.is_cgroup ? absl::StrFormat("%s says %s", memory.bound_by, FormatBytes(memory.limit_bytes))
                       : absl::StrFormat("%s has %s", memory.bound_by, FormatBytes(memory.limit_bytes));
  const int64_t most = memory.hard_limit_bytes / here - beside;
  if (here * (planned + zero::LeastProcessOverheadBytes()) > memory.hard_limit_bytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the process would take ", takes, ", and is killed beyond ", memory.hard_limit_by, ", which allows ",
        FormatBytes(memory.hard_limit_bytes),
        most >= plan.plan.least_host_memory_bytes
            ? absl::StrFormat("; --host-memory %dM fits", most >> 20)
            : absl::StrFormat("; the least that works here is %s and that beside it: raise the limit",
                              FormatBytes(plan.plan.least_host_memory_bytes))));
  }
  std::string text = absl::StrCat("process: ", takes);
  // What it has already of that is no longer free.
  const int64_t there = memory.free_bytes + here * memory.own_bytes;
  if (all > there) {
    absl::StrAppend(&text, "; only ", FormatBytes(there), " are there for it now (", bound,
                    "): a smaller --host-memory, or others must leave");
  }
  return text;
}

namespace {

std::string SpilledText(const tiering::Plan& plan) {
  if (plan.spilled_inputs() == 0) return "";
  return absl::StrFormat("; saved activations of %d of %d stages wait %s", plan.spilled_inputs(),
                         plan.positions, plan.device.has_own_memory ? "in host memory" : "on the drive");
}

}  // namespace

std::string PlanLine(const zero::EnginePlan& plan, const tiering::Prediction& prediction) {
  return absl::StrFormat(
      "plan: %d parameters, state %s; host memory %s (the least that works: %s); %.1f bytes per parameter "
      "and "
      "step to and from the drive%s; predicted step %.3g s, bound by %s",
      plan.parameters, FormatBytes(plan.state_bytes), FormatBytes(plan.plan.host_bytes()),
      FormatBytes(plan.plan.least_host_memory_bytes), BytesPerParameter(plan), SpilledText(plan.plan),
      prediction.step_seconds, prediction.bound_by);
}

std::string PlanText(const PlanFacts& facts) {
  const zero::EnginePlan& plan = facts.plan;
  const zero::EngineOptions& options = facts.options;
  const tiering::Prediction& prediction = facts.prediction;
  std::string text =
      absl::StrFormat("%d parameters in %d blocks, %s; state %s", plan.parameters, plan.graph.blocks.size(),
                      TypesText(plan, options), FormatBytes(plan.state_bytes));
  if (options.memory.host_memory_budget_bytes > 0 &&
      plan.state_bytes > options.memory.host_memory_budget_bytes) {
    absl::StrAppend(&text, absl::StrFormat(", %.1f times the host memory budget of %s",
                                           static_cast<double>(plan.state_bytes) /
                                               static_cast<double>(options.memory.host_memory_budget_bytes),
                                           FormatBytes(options.memory.host_memory_budget_bytes)));
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
  absl::StrAppend(&text, DeviceText(facts));
  if (plan.plan.on_nvme) {
    absl::StrAppend(&text,
                    absl::StrFormat("drive: %s for %s of everything%s; %s written and %s read per step, "
                                    "%.1f bytes per parameter\n",
                                    FormatBytes(plan.disk_bytes), VersionsText(plan.versions),
                                    RoomText(plan, options), FormatBytes(plan.plan.nvme_write_bytes),
                                    FormatBytes(plan.plan.nvme_read_bytes), BytesPerParameter(plan)));
    absl::StrAppend(&text, absl::StrFormat("       reads %s, writes %s, both at once %s%s\n",
                                           FormatBandwidth(facts.machine.drives.read_bytes_per_s),
                                           FormatBandwidth(facts.machine.drives.write_bytes_per_s),
                                           FormatBandwidth(facts.machine.drives.mixed_bytes_per_s),
                                           !facts.machine.drive_measured    ? " (assumed)"
                                           : facts.machine.drives.disturbed ? " (disturbed: the best seen)"
                                                                            : ""));
    if (!plan.stripes.line.empty()) absl::StrAppend(&text, "       ", plan.stripes.line, "\n");
  }
  absl::StrAppend(&text, DurabilityText(plan, options));
  if (plan.plan.speculates) {
    absl::StrAppend(
        &text,
        absl::StrFormat("order of update: %.0f%% of the tiles in backward, as long as at most %.0f%% of the "
                        "last steps were clipped or skipped; otherwise in the next forward\n",
                        100 * plan.plan.speculative_share(), 100 * plan.plan.worthwhile_replay_rate));
  }
  for (const std::string& reason : plan.plan.reasons) absl::StrAppend(&text, reason, "\n");
  absl::StrAppend(
      &text, absl::StrFormat(
                 "predicted step: %.3g s%s, bound by %s (compute %.3g s, drive %.3g s, updates %.3g s)\n",
                 prediction.step_seconds, WhileClipped(prediction), prediction.bound_by,
                 prediction.compute_seconds, prediction.drive_seconds, prediction.update_seconds));
  if (plan.compute_disturbed) {
    absl::StrAppend(&text,
                    "other work had the processors while compute was measured; what was waited for them is "
                    "taken off: plan again when the machine is quiet\n");
  }
  return text;
}

std::string PlanDetails(const PlanFacts& facts, const std::vector<tiering::WhatIf>& what_ifs) {
  std::string text = Tiers(facts);
  absl::StrAppend(&text, Lanes(facts.prediction, facts.machine.model), WearText(facts));
  absl::StrAppend(&text, "what if, planned anew:\n");
  for (const tiering::WhatIf& w : what_ifs) {
    if (!w.error.empty()) {
      absl::StrAppend(&text, absl::StrFormat("  %-22s %s\n", w.change, w.error));
      continue;
    }
    absl::StrAppend(&text, absl::StrFormat("  %-22s %s\n", w.change,
                                           w.of_clipped_steps ? OfClippedSteps(facts, w) : OfSteps(w)));
  }
  absl::StrAppend(&text, "figures:\n");
  for (const std::string& source : facts.machine.sources) absl::StrAppend(&text, "  ", source, "\n");
  return text;
}

nlohmann::json PlanJson(const PlanFacts& facts, const std::vector<tiering::WhatIf>& what_ifs) {
  const zero::EnginePlan& plan = facts.plan;
  const tiering::Prediction& prediction = facts.prediction;
  nlohmann::json host = nlohmann::json::array();
  const tiering::Ledger ledger = plan.plan.ledger();
  for (const tiering::Ledger::Line& line : ledger.lines()) {
    host.push_back({{"what", line.what}, {"bytes", line.bytes}, {"count", line.count}});
  }
  nlohmann::json tiers = nlohmann::json::array();
  for (const tiering::TierLine& line : TiersOf(plan)) {
    tiers.push_back({{"what", line.what},
                     {"host_in_flight_bytes", line.in_flight_bytes},
                     {"host_resident_bytes", line.resident_bytes},
                     {"nvme_bytes", line.nvme_bytes},
                     {"nvme_read_bytes_per_step", line.read_bytes},
                     {"nvme_write_bytes_per_step", line.written_bytes}});
  }
  nlohmann::json asked = nlohmann::json::array();
  for (const tiering::WhatIf& w : what_ifs) {
    if (!w.error.empty()) {
      asked.push_back({{"change", w.change}, {"error", w.error}});
      continue;
    }
    asked.push_back({{"change", w.change},
                     {"predicted_step_seconds", w.prediction.step_seconds},
                     {"bound_by", w.prediction.bound_by},
                     {"speedup", w.speedup},
                     {"host_memory_bytes", w.host_bytes},
                     {"nvme_read_bytes_per_step", w.nvme_read_bytes},
                     {"nvme_write_bytes_per_step", w.nvme_write_bytes}});
    if (!w.of_clipped_steps) continue;
    asked.back().update({{"predicted_clipped_step_seconds", w.prediction.clipped_step_seconds},
                         {"nvme_clipped_read_bytes_per_step", w.clipped_read_bytes}});
  }
  const tiering::Wear wear = WearOf(facts);
  return {{"params", plan.parameters},
          {"blocks", plan.graph.blocks.size()},
          {"dtype", plan.plan.precision.name},
          {"optimizer", zero::OptimizerName(facts.options.optimizer.algorithm)},
          {"optimizer_states", std::string(zero::StateTypeName(plan.format.states))},
          {"offload", std::string(zero::Name(facts.options.storage.offload))},
          {"order_of_update", std::string(plan.plan.order_of_update())},
          {"in_backward_share", plan.plan.speculative_share()},
          {"previewed_share", plan.plan.previewed_share()},
          {"worthwhile_redo_rate", plan.plan.worthwhile_replay_rate},
          {"placement", std::string(tiering::PlacementName(plan.options.bounds.placement))},
          {"saved_activations", zero::SavedActivationsJson(plan.plan)},
          {"exchange", zero::ExchangeJson(plan.plan)},
          {"reasons", plan.plan.reasons},
          {"host_memory_budget_bytes", facts.options.memory.host_memory_budget_bytes},
          {"host_memory_bytes", plan.plan.host_bytes()},
          {"pinned_memory_bytes", plan.plan.arena_bytes},
          {"least_host_memory_bytes", plan.plan.least_host_memory_bytes},
          {"host", std::move(host)},
          {"device", DeviceJson(facts)},
          {"least_device_memory_bytes", plan.plan.device.least_bytes},
          {"tiers", std::move(tiers)},
          {"durability", std::string(DurabilityName(plan.plan))},
          {"versions", plan.versions},
          {"nvme_write_bytes_saved_per_step", plan.plan.late_write_bytes},
          {"state_bytes_total", plan.state_bytes},
          {"state_bytes_nvme", plan.disk_bytes},
          {"nvme_read_bytes_per_step", plan.plan.nvme_read_bytes},
          {"nvme_write_bytes_per_step", plan.plan.nvme_write_bytes},
          {"nvme_clipped_read_bytes_per_step", plan.plan.clipped_read_bytes},
          {"nvme_bytes_per_param_per_step", BytesPerParameter(plan)},
          {"nvme_written_bytes_per_day", wear.bytes_per_day},
          {"days_to_rated_writes", Finite(wear.days_to_rating)},
          {"io_read_bandwidth_bytes_per_s", facts.machine.drives.read_bytes_per_s},
          {"io_write_bandwidth_bytes_per_s", facts.machine.drives.write_bytes_per_s},
          {"drive_measured", facts.machine.drive_measured},
          {"drive_disturbed", facts.machine.drives.disturbed},
          {"compute_disturbed", plan.compute_disturbed},
          {"machine", MachineJson(facts.machine.model)},
          {"figures", facts.machine.sources},
          {"predicted_step_seconds", prediction.step_seconds},
          {"predicted_clipped_step_seconds", prediction.clipped_step_seconds},
          {"predicted_floor_seconds", prediction.lower_bound_seconds},
          {"predicted_clipped_floor_seconds", prediction.clipped_lower_bound_seconds},
          {"predicted_compute_seconds", prediction.compute_seconds},
          {"predicted_read_seconds", prediction.read_seconds},
          {"predicted_write_seconds", prediction.write_seconds},
          {"predicted_drive_seconds", prediction.drive_seconds},
          {"predicted_update_seconds", prediction.update_seconds},
          {"predicted_copy_in_seconds", prediction.copy_in_seconds},
          {"predicted_copy_out_seconds", prediction.copy_out_seconds},
          {"bound_by", prediction.bound_by},
          {"what_if", std::move(asked)}};
}

std::string CalibratedText(const tiering::Prediction& prediction, const tiering::MachineModel& machine,
                           bool drive_seen) {
  std::string text =
      absl::StrFormat("from the first steps: %.3g s a step%s, bound by %s; compute %.3g s, updates %.3g s",
                      prediction.step_seconds, WhileClipped(prediction), prediction.bound_by,
                      prediction.compute_seconds, prediction.update_seconds);
  if (drive_seen) {
    absl::StrAppend(
        &text,
        absl::StrFormat("; drive %.3g s at reads %s, writes %s, both %s", prediction.drive_seconds,
                        FormatBandwidth(machine.read_bytes_per_s), FormatBandwidth(machine.write_bytes_per_s),
                        FormatBandwidth(2 * machine.mixed_rate(machine.read_bytes_per_s))));
  }
  return text;
}

}  // namespace penstock::tools
