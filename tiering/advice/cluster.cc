#include "tiering/advice/cluster.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace penstock::tiering {
namespace {

constexpr double kWeight = 2;  // bytes of a 16-bit weight or gradient

// Bytes per parameter through the drives where all state lives there.
struct Traffic {
  double forward_read, forward_written;  // with the weights that forward reads
  double backward_read, backward_written;
  double end_read, end_written;  // after backward: DeepSpeed's optimizer pass
  int gathers;
};

Traffic TrafficOf(ClusterSchedule schedule, bool gradients_spill) {
  if (schedule == ClusterSchedule::kZeroInfinity) {
    // Weights read in both passes; fp32 gradients written; then p, m, v and the gradients read, p, m, v and
    // new weights written.
    return {2, 0, 2, 4, 16, 14, 3};
  }
  const double spilled = gradients_spill ? kWeight : 0;
  return {12 + spilled, 12, 2, spilled, 0, 0, 2};
}

class Timeline {
 public:
  // An operation of `seconds` on `lane` after `after` is over; returns when it ends. Each lane runs in order.
  double Add(ClusterLane lane, double seconds, double after) {
    if (seconds <= 0) return after;
    double& free = free_[static_cast<size_t>(lane)];
    const double start = std::max(free, after);
    busy_[static_cast<size_t>(lane)] += seconds;
    return free = start + seconds;
  }
  const std::array<double, kClusterLanes>& busy() const { return busy_; }

 private:
  std::array<double, kClusterLanes> free_{}, busy_{};
};

// Seconds of one layer's share of one GPU on each of its ways.
struct LayerTimes {
  double forward_read, forward_write, backward_read, backward_write, end_read, end_write;
  double weights_up, gather, compute, scatter, gradient_down, checkpoint, checkpoint_io, update;
};

double Positive(double bytes, double bytes_per_s) { return bytes > 0 ? bytes / bytes_per_s : 0; }

absl::Status DoesNotFit(std::string_view what, double bytes, std::string_view where, double capacity) {
  return absl::FailedPreconditionError(absl::StrFormat("%s: %.4g TB do not fit into %.4g TB of %s",
                                                       std::string(what), bytes * 1e-12, capacity * 1e-12,
                                                       std::string(where)));
}

}  // namespace

std::string_view Name(ClusterSchedule schedule) {
  return schedule == ClusterSchedule::kPenstock ? "penstock" : "zero-infinity";
}

std::string_view Name(ClusterTier tier) {
  switch (tier) {
    case ClusterTier::kGpu:
      return "gpu";
    case ClusterTier::kHost:
      return "host";
    case ClusterTier::kNvme:
      return "nvme";
  }
  return "?";
}

std::string_view Name(ClusterLane lane) {
  switch (lane) {
    case ClusterLane::kNvmeRead:
      return "nvme read";
    case ClusterLane::kNvmeWrite:
      return "nvme write";
    case ClusterLane::kToGpu:
      return "host to gpu";
    case ClusterLane::kFromGpu:
      return "gpu to host";
    case ClusterLane::kCollective:
      return "network";
    case ClusterLane::kGpu:
      return "compute";
    case ClusterLane::kUpdate:
      return "optimizer";
  }
  return "?";
}

double ClusterModel::params() const {
  const auto width = static_cast<double>(hidden);
  return 12 * static_cast<double>(layers) * width * width;
}

double IntensityOfWeights(const ClusterModel& model) { return model.tokens_per_gpu(); }
double IntensityOfState(const ClusterModel& model) { return model.tokens_per_gpu() / 4; }
double IntensityOfActivations(const ClusterModel& model) {
  return 24.0 * static_cast<double>(model.hidden * model.layers_per_checkpoint);
}

double Efficiency(double intensity, double bytes_per_s, double peak_flops) {
  return intensity * bytes_per_s / (intensity * bytes_per_s + peak_flops);
}

double BandwidthFor(double efficiency, double intensity, double peak_flops) {
  return efficiency * peak_flops / ((1 - efficiency) * intensity);
}

double StateBytesPerParam(ClusterSchedule schedule, ClusterTier tier) {
  if (schedule == ClusterSchedule::kZeroInfinity)
    return 20;  // weights 2, gradients 2, fp32 p, m, v, gradients 16
  return tier == ClusterTier::kNvme ? 2 * 12 + kWeight : 12 + kWeight;
}

double CheckpointBytes(const ClusterModel& m) {
  return 2 * m.tokens_per_gpu() * static_cast<double>(m.hidden) *
         std::ceil(static_cast<double>(m.layers) / static_cast<double>(m.layers_per_checkpoint));
}

double WorkingStateBytes(const ClusterModel& m) {
  // The product from hidden to 4 hidden, its weights and its gradients.
  return 4.0 * static_cast<double>(m.hidden) * 4 * static_cast<double>(m.hidden);
}

double WorkingActivationBytes(const ClusterModel& m) {
  return m.tokens_per_gpu() * static_cast<double>(m.layers_per_checkpoint) *
         (16.0 * static_cast<double>(m.hidden) + 2.0 * static_cast<double>(m.heads * m.sequence));
}

double LargestModel(const ClusterMachine& machine, ClusterSchedule schedule, ClusterTier tier) {
  const auto nodes = static_cast<double>(machine.nodes);
  double bytes = machine.nvme_bytes * nodes;
  if (tier == ClusterTier::kHost) bytes = machine.host_memory_bytes * nodes;
  if (tier == ClusterTier::kGpu) bytes = machine.gpu_memory_bytes * static_cast<double>(machine.gpus());
  return bytes / StateBytesPerParam(schedule, tier);
}

absl::StatusOr<ClusterPlan> PlanOnPaper(const ClusterMachine& machine, const ClusterModel& model,
                                        ClusterSchedule schedule, int layers_ahead) {
  const auto gpus = static_cast<double>(machine.gpus());
  const auto nodes = static_cast<double>(machine.nodes);
  const auto per_node = static_cast<double>(machine.gpus_per_node);
  const auto layers = static_cast<double>(model.layers);
  ClusterPlan plan;
  plan.params = model.params();
  const double share = plan.params / gpus;    // parameters whose state one GPU owns
  const double layer = plan.params / layers;  // parameters of a layer

  const double kept = CheckpointBytes(model);
  while (WorkingStateBytes(model) / static_cast<double>(plan.product_tiles) > machine.gpu_memory_bytes / 4) {
    plan.product_tiles *= 2;
  }
  const double working =
      WorkingActivationBytes(model) + WorkingStateBytes(model) / static_cast<double>(plan.product_tiles);
  auto state_bytes = [&](ClusterTier tier) { return StateBytesPerParam(schedule, tier) * share; };
  // One piece of a layer computes while the next arrives.
  const double streamed = WorkingStateBytes(model) / static_cast<double>(plan.product_tiles);
  double gpu_free = machine.gpu_memory_bytes - working;
  if (gpu_free < 0)
    return DoesNotFit("a layer's working memory", working, "GPU memory", machine.gpu_memory_bytes);
  double host_free = machine.host_memory_bytes;

  if (state_bytes(ClusterTier::kGpu) <= gpu_free) {
    plan.state_on = ClusterTier::kGpu;
    plan.gpu_bytes = state_bytes(ClusterTier::kGpu);
  } else if (state_bytes(ClusterTier::kHost) * per_node <= host_free) {
    plan.state_on = ClusterTier::kHost;
    plan.host_bytes = state_bytes(ClusterTier::kHost) * per_node;
  } else {
    plan.state_on = ClusterTier::kNvme;
    plan.nvme_bytes = state_bytes(ClusterTier::kNvme) * per_node;
    if (plan.nvme_bytes > machine.nvme_bytes) {
      return DoesNotFit(absl::StrFormat("state of %.4g parameters", plan.params), plan.nvme_bytes,
                        "a node's drives", machine.nvme_bytes);
    }
    // Two layers' state on its way, in host memory.
    plan.host_bytes = 2 * 12 * layer / nodes;
  }
  gpu_free -= plan.gpu_bytes + (plan.state_on == ClusterTier::kGpu ? 0 : streamed);
  host_free -= plan.host_bytes;
  // Saved activations next: each of their bytes goes down and up once a step.
  if (kept <= gpu_free) {
    plan.checkpoints_on = ClusterTier::kGpu;
    plan.gpu_bytes += kept;
  } else if (kept * per_node <= host_free) {
    plan.checkpoints_on = ClusterTier::kHost;
    plan.host_bytes += kept * per_node;
    host_free -= kept * per_node;
  } else {
    plan.checkpoints_on = ClusterTier::kNvme;
    plan.nvme_bytes += kept * per_node;
    if (plan.nvme_bytes > machine.nvme_bytes) {
      return DoesNotFit("kept inputs beside the state", plan.nvme_bytes, "a node's drives",
                        machine.nvme_bytes);
    }
  }
  const double gradients = kWeight * share * per_node;
  const bool on_nvme = plan.state_on == ClusterTier::kNvme, on_gpu = plan.state_on == ClusterTier::kGpu;
  const bool rides = schedule == ClusterSchedule::kPenstock;
  plan.gradients_spill = on_nvme && rides && gradients > host_free;
  if (on_nvme && rides && !plan.gradients_spill) plan.host_bytes += gradients;
  plan.gpu_bytes += working + (on_gpu ? 0 : streamed);
  plan.state_bytes = StateBytesPerParam(schedule, plan.state_on) * plan.params;

  // One layer on each way of one GPU.
  const Traffic traffic = TrafficOf(schedule, plan.gradients_spill);
  const double read = machine.nvme_read_bytes_per_s / per_node,
               write = machine.nvme_write_bytes_per_s / per_node;
  const double own = layer / gpus;  // parameters of a layer that one GPU owns
  const double others = (gpus - 1) / gpus;
  LayerTimes t{};
  if (on_nvme) {
    t.forward_read = own * traffic.forward_read / read;
    t.forward_write = own * traffic.forward_written / write;
    t.backward_read = own * traffic.backward_read / read;
    t.backward_write = own * traffic.backward_written / write;
    t.end_read = own * traffic.end_read / read;
    t.end_write = own * traffic.end_written / write;
  }
  t.weights_up = on_gpu ? 0 : own * kWeight / machine.host_link_bytes_per_s;
  t.gather = Positive(layer * kWeight * others, machine.gpu_link_bytes_per_s);
  t.scatter = t.gather;
  t.gradient_down = t.weights_up;
  t.compute = 2 * model.tokens_per_gpu() * layer / machine.gpu_flops;
  t.checkpoint = plan.checkpoints_on == ClusterTier::kGpu ? 0 : kept / layers / machine.host_link_bytes_per_s;
  const bool inputs_on_nvme = plan.checkpoints_on == ClusterTier::kNvme;
  // On the GPU itself an update is a matter of its memory's bandwidth: nothing beside the rest.
  t.update = on_gpu ? 0 : own / (machine.update_parameters_per_s / per_node);

  Timeline line;
  const auto count = static_cast<size_t>(model.layers);
  std::vector<double> done(count, 0);     // when layer i was last computed with
  std::vector<double> written(count, 0);  // when its state was last written
  std::vector<double> kept_at(count, 0);
  double norm = 0, before = 0, step = 0;
  std::array<double, kClusterLanes> busy_before{};
  constexpr int kSteps = 4;
  std::vector<double> order(2 * count, 0);  // when the walk's i-th use was over
  double walked_before = 0;
  for (int s = 0; s < kSteps; ++s) {
    if (s == kSteps - 1) {
      before = norm;
      busy_before = line.busy();
    }
    // Data may arrive `layers_ahead` uses before it is used.
    auto room = [&](size_t use) {
      const auto ahead = static_cast<size_t>(layers_ahead);
      return use >= ahead ? order[use - ahead] : walked_before;
    };
    double computed = norm;
    const double gradients_final = norm;
    for (size_t i = 0; i < count; ++i) {
      double ready = line.Add(ClusterLane::kNvmeRead, t.forward_read, std::max(room(i), written[i]));
      if (rides && s > 0) {
        ready = line.Add(ClusterLane::kUpdate, t.update, std::max(ready, gradients_final));
        written[i] = line.Add(ClusterLane::kNvmeWrite, t.forward_write, ready);
      }
      ready = line.Add(ClusterLane::kToGpu, t.weights_up, std::max(ready, written[i] * (rides ? 0 : 1)));
      ready = line.Add(ClusterLane::kCollective, t.gather, ready);
      computed = order[i] = line.Add(ClusterLane::kGpu, t.compute, std::max(ready, computed));
      kept_at[i] = line.Add(ClusterLane::kFromGpu, t.checkpoint, computed);
      if (inputs_on_nvme)
        kept_at[i] = line.Add(ClusterLane::kNvmeWrite, Positive(kept / layers, write), kept_at[i]);
    }
    for (size_t n = 0; n < count; ++n) {
      const size_t i = count - 1 - n, use = count + n;
      double ready = line.Add(ClusterLane::kNvmeRead, t.backward_read, std::max(room(use), written[i]));
      ready = line.Add(ClusterLane::kToGpu, t.weights_up, ready);
      // Weights for the recomputation and, as published, once more for backward.
      ready = line.Add(ClusterLane::kCollective, t.gather * (traffic.gathers - 1), ready);
      double input = kept_at[i];
      if (inputs_on_nvme)
        input = line.Add(ClusterLane::kNvmeRead, Positive(kept / layers, read), std::max(input, room(use)));
      input = line.Add(ClusterLane::kToGpu, t.checkpoint, std::max(input, room(use)));
      computed = order[use] = line.Add(ClusterLane::kGpu, 3 * t.compute, std::max({ready, input, computed}));
      double gradient = line.Add(ClusterLane::kCollective, t.scatter, computed);
      gradient = line.Add(ClusterLane::kFromGpu, t.gradient_down, gradient);
      done[i] = line.Add(ClusterLane::kNvmeWrite, t.backward_write, gradient);
    }
    norm = *std::max_element(done.begin(), done.end());
    if (!rides) {
      double last = norm;
      for (size_t i = 0; i < count; ++i) {
        double ready = line.Add(ClusterLane::kNvmeRead, t.end_read, norm);
        ready = line.Add(ClusterLane::kUpdate, t.update, ready);
        written[i] = line.Add(ClusterLane::kNvmeWrite, t.end_write, ready);
        last = std::max(last, written[i]);
      }
      norm = last;
    }
    walked_before = order.back();
    step = norm - before;
  }
  for (size_t l = 0; l < kClusterLanes; ++l) plan.busy_seconds[l] = line.busy()[l] - busy_before[l];
  plan.step_seconds = step;
  plan.flops_per_gpu = 8 * model.tokens_per_gpu() * plan.params / step;
  const auto busiest = std::max_element(plan.busy_seconds.begin(), plan.busy_seconds.end());
  plan.bound_by = static_cast<ClusterLane>(busiest - plan.busy_seconds.begin());
  plan.written_bytes_per_step =
      plan.busy_seconds[static_cast<size_t>(ClusterLane::kNvmeWrite)] * machine.nvme_write_bytes_per_s;
  plan.days_to_rating = std::numeric_limits<double>::infinity();
  if (plan.written_bytes_per_step > 0 && machine.rated_bytes_written > 0) {
    plan.days_to_rating =
        machine.rated_bytes_written / plan.written_bytes_per_step * plan.step_seconds / 86400;
  }
  return plan;
}

namespace {

// Fills fields by name; every name must be known and every value a number in its range.
class Reader {
 public:
  Reader(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

  void Number(const char* name, double* to, double least = 1e-9) {
    const nlohmann::json* value = Take(name);
    if (value == nullptr) return;
    if (!value->is_number() || !(value->get<double>() >= least && value->get<double>() <= 1e30)) {
      return Fail(name, absl::StrFormat("%s is no number of at least %g", value->dump(), least));
    }
    *to = value->get<double>();
  }
  void Count(const char* name, int64_t* to, double most) {
    const nlohmann::json* value = Take(name);
    if (value == nullptr) return;
    if (!value->is_number() || value->get<double>() < 1 || value->get<double>() > most ||
        value->get<double>() != std::floor(value->get<double>())) {
      return Fail(name, absl::StrFormat("%s is no whole number from 1 to %g", value->dump(), most));
    }
    *to = static_cast<int64_t>(value->get<double>());
  }
  void Text(const char* name, std::string* to) {
    const nlohmann::json* value = Take(name);
    if (value == nullptr) return;
    if (!value->is_string()) return Fail(name, "must be text");
    *to = value->get<std::string>();
  }
  absl::Status Done() {
    for (const auto& [key, value] : object_.items()) {
      if (std::find(taken_.begin(), taken_.end(), key) == taken_.end()) {
        std::string names;
        for (const std::string& name : taken_) absl::StrAppend(&names, names.empty() ? "" : ", ", name);
        status_.Update(
            absl::InvalidArgumentError(absl::StrCat(where_, ".", key, ": is not known; known are ", names)));
      }
    }
    return status_;
  }

 private:
  const nlohmann::json* Take(const char* name) {
    taken_.emplace_back(name);
    const auto it = object_.find(name);
    return it == object_.end() ? nullptr : &*it;
  }
  void Fail(const char* name, const std::string& what) {
    status_.Update(absl::InvalidArgumentError(absl::StrCat(where_, ".", name, ": ", what)));
  }

  const nlohmann::json& object_;
  const std::string where_;
  std::vector<std::string> taken_;
  absl::Status status_;
};

}  // namespace

absl::Status ReadClusterJson(const nlohmann::json& json, ClusterMachine* machine, ClusterModel* model) {
  if (!json.is_object())
    return absl::InvalidArgumentError("a cluster is an object of \"machine\" and \"model\"");
  for (const auto& [key, value] : json.items()) {
    if (key != "machine" && key != "model") {
      return absl::InvalidArgumentError(absl::StrCat(key, ": is not known; known are machine, model"));
    }
    if (!value.is_object()) return absl::InvalidArgumentError(absl::StrCat(key, ": must be an object"));
  }
  const nlohmann::json none = nlohmann::json::object();
  Reader m(json.contains("machine") ? json["machine"] : none, "machine");
  m.Text("name", &machine->name);
  m.Count("nodes", &machine->nodes, 1e6);
  m.Count("gpus_per_node", &machine->gpus_per_node, 1e4);
  m.Number("gpu_flops", &machine->gpu_flops);
  m.Number("gpu_memory_bytes", &machine->gpu_memory_bytes);
  m.Number("gpu_link_bytes_per_s", &machine->gpu_link_bytes_per_s);
  m.Number("host_link_bytes_per_s", &machine->host_link_bytes_per_s);
  m.Number("host_memory_bytes", &machine->host_memory_bytes);
  m.Number("nvme_bytes", &machine->nvme_bytes, 0);
  m.Number("nvme_read_bytes_per_s", &machine->nvme_read_bytes_per_s);
  m.Number("nvme_write_bytes_per_s", &machine->nvme_write_bytes_per_s);
  m.Number("update_parameters_per_s", &machine->update_parameters_per_s);
  m.Number("rated_bytes_written", &machine->rated_bytes_written, 0);
  RETURN_IF_ERROR(m.Done());
  Reader r(json.contains("model") ? json["model"] : none, "model");
  r.Count("layers", &model->layers, 1e5);
  r.Count("hidden", &model->hidden, 1e7);
  r.Count("heads", &model->heads, 1e6);
  r.Count("sequence", &model->sequence, 1e9);
  r.Number("batch_per_gpu", &model->batch_per_gpu);
  r.Count("layers_per_checkpoint", &model->layers_per_checkpoint, 1e5);
  return r.Done();
}

}  // namespace penstock::tiering
