#include "tools/machine/cluster_flags.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/json.h"
#include "base/small_file.h"
#include "tiering/advice/cluster.h"
#include "tiering/plan/byte_size.h"

namespace penstock::tools {
namespace {

using tiering::ClusterLane;
using tiering::ClusterMachine;
using tiering::ClusterModel;
using tiering::ClusterPlan;
using tiering::ClusterSchedule;
using tiering::ClusterTier;

constexpr ClusterSchedule kSchedules[] = {ClusterSchedule::kPenstock, ClusterSchedule::kZeroInfinity};
constexpr ClusterTier kTiers[] = {ClusterTier::kGpu, ClusterTier::kHost, ClusterTier::kNvme};

// What a kind of data needs and what the machine gives it.
struct Need {
  const char* what;
  double intensity;
  double given;  // bytes per second, on the scale of the intensity
  const char* way;
};

std::vector<Need> Needs(const ClusterMachine& machine, const ClusterModel& model) {
  const auto gpus = static_cast<double>(machine.gpus());
  const double nvme = 2 * machine.nvme_read_bytes_per_s * machine.nvme_write_bytes_per_s /
                      (machine.nvme_read_bytes_per_s + machine.nvme_write_bytes_per_s) *
                      static_cast<double>(machine.nodes);
  return {{"weights and gradients", IntensityOfWeights(model), machine.gpu_link_bytes_per_s, "GPU links"},
          {"optimizer state", IntensityOfState(model), machine.host_link_bytes_per_s * gpus,
           "host memory of all"},
          {"optimizer state", IntensityOfState(model), nvme, "drives of all"},
          {"saved activations", IntensityOfActivations(model), machine.host_link_bytes_per_s, "host links"}};
}

std::string Text(const ClusterMachine& machine, const ClusterModel& model) {
  std::string text = absl::StrFormat(
      "%s, %d x %d GPUs; a model of %.4g parameters (%d layers of %d), %.4g sequences of %d tokens on "
      "each "
      "GPU\n",
      machine.name, machine.nodes, machine.gpus_per_node, model.params(), model.layers, model.hidden,
      model.batch_per_gpu, model.sequence);
  absl::StrAppend(&text, absl::StrFormat("%-24s %14s %14s %14s %14s  %s\n", "if nothing overlaps",
                                         "flop per byte", "90% needs", "is given", "reaches", "over"));
  for (const Need& need : Needs(machine, model)) {
    absl::StrAppend(
        &text, absl::StrFormat(
                   "%-24s %14.4g %14s %14s %13.1f%%  %s\n", need.what, need.intensity,
                   tiering::FormatBandwidth(tiering::BandwidthFor(0.9, need.intensity, machine.gpu_flops)),
                   tiering::FormatBandwidth(need.given),
                   100 * tiering::Efficiency(need.intensity, need.given, machine.gpu_flops), need.way));
  }
  absl::StrAppend(&text, "largest model whose state fits:\n");
  for (const ClusterSchedule schedule : kSchedules) {
    absl::StrAppend(&text, absl::StrFormat("  %-14s", std::string(Name(schedule))));
    for (const ClusterTier tier : kTiers) {
      absl::StrAppend(&text, absl::StrFormat(" %s %.3gT", std::string(Name(tier)),
                                             LargestModel(machine, schedule, tier) * 1e-12));
    }
    absl::StrAppend(&text, "\n");
  }
  for (const ClusterSchedule schedule : kSchedules) {
    const absl::StatusOr<ClusterPlan> plan = PlanOnPaper(machine, model, schedule);
    if (!plan.ok()) {
      absl::StrAppend(&text, std::string(Name(schedule)), ": ", std::string(plan.status().message()), "\n");
      continue;
    }
    absl::StrAppend(
        &text,
        absl::StrFormat(
            "%s: state on %s (%.4g TB), saved activations on %s%s; of a GPU %.1f GB, of a node %.4g TB of "
            "memory and %.4g TB of drives\n",
            std::string(Name(schedule)), std::string(Name(plan->state_on)), plan->state_bytes * 1e-12,
            std::string(Name(plan->checkpoints_on)), plan->gradients_spill ? ", gradients spilled" : "",
            plan->gpu_bytes * 1e-9, plan->host_bytes * 1e-12, plan->nvme_bytes * 1e-12));
    absl::StrAppend(&text,
                    absl::StrFormat("  %.4g s a step, %.1f TFLOP/s a GPU, %.3g PFLOP/s in all, bound by %s\n",
                                    plan->step_seconds, plan->flops_per_gpu * 1e-12,
                                    plan->flops_per_gpu * static_cast<double>(machine.gpus()) * 1e-15,
                                    std::string(Name(plan->bound_by))));
    if (plan->product_tiles > 1) {
      absl::StrAppend(&text,
                      absl::StrFormat("  the largest products are cut into %d\n", plan->product_tiles));
    }
    absl::StrAppend(&text, "  busy:");
    for (int l = 0; l < tiering::kClusterLanes; ++l) {
      const double busy = plan->busy_seconds[static_cast<size_t>(l)] / plan->step_seconds;
      if (busy > 0) {
        absl::StrAppend(
            &text, absl::StrFormat(" %s %.0f%%", std::string(Name(static_cast<ClusterLane>(l))), 100 * busy));
      }
    }
    absl::StrAppend(&text, "\n");
    if (std::isfinite(plan->days_to_rating)) {
      absl::StrAppend(
          &text, absl::StrFormat("  %.4g TB written on a node's drives a step; %.3g days to their rating\n",
                                 plan->written_bytes_per_step * 1e-12, plan->days_to_rating));
    }
  }
  return text;
}

nlohmann::json Json(const ClusterMachine& machine, const ClusterModel& model) {
  nlohmann::json needs = nlohmann::json::array(), largest = nlohmann::json::object(),
                 plans = nlohmann::json::object();
  for (const Need& need : Needs(machine, model)) {
    needs.push_back(
        {{"what", need.what},
         {"over", need.way},
         {"flop_per_byte", need.intensity},
         {"given_bytes_per_s", need.given},
         {"needed_for_90_percent_bytes_per_s", tiering::BandwidthFor(0.9, need.intensity, machine.gpu_flops)},
         {"efficiency", tiering::Efficiency(need.intensity, need.given, machine.gpu_flops)}});
  }
  for (const ClusterSchedule schedule : kSchedules) {
    const std::string name(Name(schedule));
    for (const ClusterTier tier : kTiers) {
      largest[name][std::string(Name(tier))] = LargestModel(machine, schedule, tier);
    }
    const absl::StatusOr<ClusterPlan> plan = PlanOnPaper(machine, model, schedule);
    if (!plan.ok()) {
      plans[name] = {{"error", std::string(plan.status().message())}};
      continue;
    }
    nlohmann::json busy = nlohmann::json::object();
    for (int l = 0; l < tiering::kClusterLanes; ++l) {
      busy[std::string(Name(static_cast<ClusterLane>(l)))] = plan->busy_seconds[static_cast<size_t>(l)];
    }
    plans[name] = {
        {"state_on", std::string(Name(plan->state_on))},
        {"checkpoints_on", std::string(Name(plan->checkpoints_on))},
        {"gradients_spill", plan->gradients_spill},
        {"state_bytes", plan->state_bytes},
        {"gpu_bytes", plan->gpu_bytes},
        {"host_bytes_per_node", plan->host_bytes},
        {"nvme_bytes_per_node", plan->nvme_bytes},
        {"step_seconds", plan->step_seconds},
        {"flops_per_gpu", plan->flops_per_gpu},
        {"busy_seconds", std::move(busy)},
        {"bound_by", std::string(Name(plan->bound_by))},
        {"nvme_write_bytes_per_node_per_step", plan->written_bytes_per_step},
        {"days_to_rated_writes",
         std::isfinite(plan->days_to_rating) ? nlohmann::json(plan->days_to_rating) : nlohmann::json()}};
  }
  return {{"name", machine.name},         {"nodes", machine.nodes},    {"gpus", machine.gpus()},
          {"params", model.params()},     {"needs", std::move(needs)}, {"largest_params", std::move(largest)},
          {"schedules", std::move(plans)}};
}

}  // namespace

absl::Status PlanCluster(const std::string& path, bool json, std::ostream& out) {
  const absl::StatusOr<nlohmann::json> parsed = ReadJsonObject(path, kSmallFileBytes, {.comments = true});
  if (!parsed.ok()) return absl::InvalidArgumentError(absl::StrCat("--cluster ", parsed.status().message()));
  ClusterMachine machine;
  ClusterModel model;
  if (absl::Status status = tiering::ReadClusterJson(*parsed, &machine, &model); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--cluster ", path, ": ", std::string(status.message())));
  }
  if (json) {
    out << Json(machine, model).dump(2) << "\n" << std::flush;
  } else {
    out << Text(machine, model) << std::flush;
  }
  return absl::OkStatus();
}

}  // namespace penstock::tools
