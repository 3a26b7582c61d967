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
  double weights_up, gather, compute, scatter, gradient_down, checkpoint, checkpoint_read, checkpoint_write,
      update;
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

namespace {

// Where state and saved activations lie: what a tier has no room for goes to the one below it.
absl::Status PlaceModel(const ClusterMachine& machine, const ClusterModel& model, ClusterSchedule schedule,
                        ClusterPlan* plan) {
  const auto nodes = static_cast<double>(machine.nodes);
  const auto per_node = static_cast<double>(machine.gpus_per_node);
  const double share =
      plan->params / static_cast<double>(machine.gpus());  // parameters whose state one GPU owns
  const double kept = CheckpointBytes(model);
  while (WorkingStateBytes(model) / static_cast<double>(plan->product_tiles) > machine.gpu_memory_bytes / 4) {
    plan->product_tiles *= 2;
  }
  // One piece of a layer computes while the next arrives.
  const double streamed = WorkingStateBytes(model) / static_cast<double>(plan->product_tiles);
  const double working = WorkingActivationBytes(model) + streamed;
  const auto state_bytes = [&](ClusterTier tier) { return StateBytesPerParam(schedule, tier) * share; };
  double gpu_free = machine.gpu_memory_bytes - working;
  if (gpu_free < 0)
    return DoesNotFit("a layer's working memory", working, "GPU memory", machine.gpu_memory_bytes);
  double host_free = machine.host_memory_bytes;

  if (state_bytes(ClusterTier::kGpu) <= gpu_free) {
    plan->state_on = ClusterTier::kGpu;
    plan->gpu_bytes = state_bytes(ClusterTier::kGpu);
  } else if (state_bytes(ClusterTier::kHost) * per_node <= host_free) {
    plan->state_on = ClusterTier::kHost;
    plan->host_bytes = state_bytes(ClusterTier::kHost) * per_node;
  } else {
    plan->state_on = ClusterTier::kNvme;
    plan->nvme_bytes = state_bytes(ClusterTier::kNvme) * per_node;
    if (plan->nvme_bytes > machine.nvme_bytes) {
      return DoesNotFit(absl::StrFormat("state of %.4g parameters", plan->params), plan->nvme_bytes,
                        "a node's drives", machine.nvme_bytes);
    }
    // Two layers' state on its way, in host memory.
    plan->host_bytes = 2 * 12 * (plan->params / static_cast<double>(model.layers)) / nodes;
  }
  const bool on_nvme = plan->state_on == ClusterTier::kNvme, on_gpu = plan->state_on == ClusterTier::kGpu;
  gpu_free -= plan->gpu_bytes + (on_gpu ? 0 : streamed);
  host_free -= plan->host_bytes;
  // Saved activations next: each of their bytes goes down and up once a step.
  if (kept <= gpu_free) {
    plan->checkpoints_on = ClusterTier::kGpu;
    plan->gpu_bytes += kept;
  } else if (kept * per_node <= host_free) {
    plan->checkpoints_on = ClusterTier::kHost;
    plan->host_bytes += kept * per_node;
    host_free -= kept * per_node;
  } else {
    plan->checkpoints_on = ClusterTier::kNvme;
    plan->nvme_bytes += kept * per_node;
    if (plan->nvme_bytes > machine.nvme_bytes) {
      return DoesNotFit("saved activations beside the state", plan->nvme_bytes, "a node's drives",
                        machine.nvme_bytes);
    }
  }
  const double gradients = kWeight * share * per_node;
  const bool rides = schedule == ClusterSchedule::kPenstock;
  plan->gradients_spill = on_nvme && rides && gradients > host_free;
  if (on_nvme && rides && !plan->gradients_spill) plan->host_bytes += gradients;
  plan->gpu_bytes += working + (on_gpu ? 0 : streamed);
  plan->state_bytes = StateBytesPerParam(schedule, plan->state_on) * plan->params;
  return absl::OkStatus();
}

LayerTimes TimesOfLayer(const ClusterMachine& machine, const ClusterModel& model, const Traffic& traffic,
                        const ClusterPlan& plan) {
  const auto gpus = static_cast<double>(machine.gpus());
  const auto per_node = static_cast<double>(machine.gpus_per_node);
  const auto layers = static_cast<double>(model.layers);
  const bool on_nvme = plan.state_on == ClusterTier::kNvme, on_gpu = plan.state_on == ClusterTier::kGpu;
  const double kept = CheckpointBytes(model);
  const double read = machine.nvme_read_bytes_per_s / per_node,
               write = machine.nvme_write_bytes_per_s / per_node;
  const double layer = plan.params / layers;  // parameters of a layer
  const double own = layer / gpus;            // of those, what one GPU owns
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
  if (plan.checkpoints_on == ClusterTier::kNvme) {
    t.checkpoint_write = Positive(kept / layers, write);
    t.checkpoint_read = Positive(kept / layers, read);
  }
  // On the GPU itself an update is a matter of its memory's bandwidth: nothing beside the rest.
  t.update = on_gpu ? 0 : own / (machine.update_parameters_per_s / per_node);
  return t;
}

// Steps of one GPU, layer by layer. Data may arrive `layers_ahead` uses of a layer before it is used.
class LayerWalk {
 public:
  LayerWalk(const LayerTimes& times, ClusterSchedule schedule, int gathers, size_t layers, int layers_ahead)
      : t_(times),
        rides_(schedule == ClusterSchedule::kPenstock),
        gathers_(gathers),
        ahead_(static_cast<size_t>(layers_ahead)),
        done_(layers, 0),
        written_(layers, 0),
        kept_at_(layers, 0),
        order_(2 * layers, 0) {}

  // Returns when the step ends.
  double Step() {
    Forward();
    Backward();
    end_ = *std::max_element(done_.begin(), done_.end());
    if (!rides_) UpdateAtTheEnd();
    walked_before_ = order_.back();
    first_ = false;
    return end_;
  }
  const std::array<double, kClusterLanes>& busy() const { return line_.busy(); }

 private:
  // When what a use needs may begin to arrive.
  double Room(size_t use) const { return use >= ahead_ ? order_[use - ahead_] : walked_before_; }

  void Forward() {
    computed_ = end_;
    for (size_t i = 0; i < done_.size(); ++i) {
      double ready = line_.Add(ClusterLane::kNvmeRead, t_.forward_read, std::max(Room(i), written_[i]));
      if (rides_ && !first_) {
        ready = line_.Add(ClusterLane::kUpdate, t_.update, std::max(ready, end_));  // gradients are final
        written_[i] = line_.Add(ClusterLane::kNvmeWrite, t_.forward_write, ready);
      }
      ready = line_.Add(ClusterLane::kToGpu, t_.weights_up, std::max(ready, rides_ ? 0 : written_[i]));
      ready = line_.Add(ClusterLane::kCollective, t_.gather, ready);
      computed_ = order_[i] = line_.Add(ClusterLane::kGpu, t_.compute, std::max(ready, computed_));
      kept_at_[i] = line_.Add(ClusterLane::kFromGpu, t_.checkpoint, computed_);
      kept_at_[i] = line_.Add(ClusterLane::kNvmeWrite, t_.checkpoint_write, kept_at_[i]);
    }
  }

  void Backward() {
    const size_t count = done_.size();
    for (size_t n = 0; n < count; ++n) {
      const size_t i = count - 1 - n, use = count + n;
      double ready = line_.Add(ClusterLane::kNvmeRead, t_.backward_read, std::max(Room(use), written_[i]));
      ready = line_.Add(ClusterLane::kToGpu, t_.weights_up, ready);
      // Weights for the recomputation and, as published, once more for backward.
      ready = line_.Add(ClusterLane::kCollective, t_.gather * (gathers_ - 1), ready);
      double input = line_.Add(ClusterLane::kNvmeRead, t_.checkpoint_read, std::max(kept_at_[i], Room(use)));
      input = line_.Add(ClusterLane::kToGpu, t_.checkpoint, input);
      computed_ = order_[use] =
          line_.Add(ClusterLane::kGpu, 3 * t_.compute, std::max({ready, input, computed_}));
      double gradient = line_.Add(ClusterLane::kCollective, t_.scatter, computed_);
      gradient = line_.Add(ClusterLane::kFromGpu, t_.gradient_down, gradient);
      done_[i] = line_.Add(ClusterLane::kNvmeWrite, t_.backward_write, gradient);
    }
  }

  // DeepSpeed's optimizer pass.
  void UpdateAtTheEnd() {
    const double begin = end_;
    for (double& written : written_) {
      double ready = line_.Add(ClusterLane::kNvmeRead, t_.end_read, begin);
      ready = line_.Add(ClusterLane::kUpdate, t_.update, ready);
      written = line_.Add(ClusterLane::kNvmeWrite, t_.end_write, ready);
      end_ = std::max(end_, written);
    }
  }

  const LayerTimes t_;
  const bool rides_;
  const int gathers_;
  const size_t ahead_;
  Timeline line_;
  std::vector<double> done_;     // when layer i was last computed with
  std::vector<double> written_;  // when its state was last written
  std::vector<double> kept_at_;  // when its saved activations were
  std::vector<double> order_;    // when the walk's i-th use was over
  double computed_ = 0, walked_before_ = 0, end_ = 0;
  bool first_ = true;
};

}  // namespace

absl::StatusOr<ClusterPlan> PlanOnPaper(const ClusterMachine& machine, const ClusterModel& model,
                                        ClusterSchedule schedule, int layers_ahead) {
  ClusterPlan plan;
  plan.params = model.params();
  RETURN_IF_ERROR(PlaceModel(machine, model, schedule, &plan));
  const Traffic traffic = TrafficOf(schedule, plan.gradients_spill);
  LayerWalk walk(TimesOfLayer(machine, model, traffic, plan), schedule, traffic.gathers,
                 static_cast<size_t>(model.layers), layers_ahead);
  // The last of a few steps: the first ones have nothing of a step before them.
  constexpr int kStepsBefore = 3;
  double before = 0;
  for (int step = 0; step < kStepsBefore; ++step) before = walk.Step();
  const std::array<double, kClusterLanes> busy_before = walk.busy();
  plan.step_seconds = walk.Step() - before;
  for (size_t l = 0; l < kClusterLanes; ++l) plan.busy_seconds[l] = walk.busy()[l] - busy_before[l];
  plan.flops_per_gpu = 8 * model.tokens_per_gpu() * plan.params / plan.step_seconds;
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
