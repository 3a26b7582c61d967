#include "zero/compute/libtorch/measure.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cache.h"
#include "zero/compute/libtorch/tensors.h"
#include "zero/compute/libtorch/threads.h"
#include "zero/compute/stopwatch.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {
namespace {

int64_t BytesOf(const torch::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<int64_t>(tensor.element_size()) : 0;
}

// Rounded up as the allocator does.
int64_t Rounded(int64_t bytes) { return bytes == 0 ? 0 : tiering::AlignUp(bytes + 64, 16 << 10); }

// Peak of live tensor bytes over `body`, beyond what was live before. What is kept from before is no part of
// it.
template <typename Body>
int64_t PeakOf(Device& device, Body&& body) {
  device.ResetLivePeak();
  const int64_t before = device.tensors().live_bytes;
  body();
  return device.tensors().peak_live_bytes - before;
}

// When the device has computed what it was given.
void Finish(Device& device) {
  std::promise<absl::Status> done;
  device.AfterCompute([&](absl::Status status) { done.set_value(std::move(status)); });
  const absl::Status status = done.get_future().get();
  TORCH_CHECK(status.ok(), std::string(status.message()));
}

// Of one run. What a drive would have brought in the meantime is not in the caches, where it would make a
// block look faster than it trains.
template <typename Probe, typename Body>
Stopwatch::Reading TimeOnce(Device& device, Probe& probe, Body&& body) {
  probe.Renew();
  const Stopwatch watch(IntraOpThreads());
  body();
  Finish(device);
  // The processor's threads do not say what a device apart takes.
  return device.has_own_memory() ? Stopwatch::Reading{watch.Passed()} : watch.Read();
}

// A run of this length is exact to some percent by itself; of shorter ones the median of three counts.
constexpr double kLongRun = 0.1;
// Runs beside other work are repeated for so long, and the quickest counts.
constexpr double kPatience = 2;

// `first`: of a run that has loaded LibTorch's kernels and the pool's buffers already, or none.
template <typename Probe, typename Body>
Stopwatch::Reading TimeOf(Device& device, Probe& probe, Body&& body, Stopwatch::Reading first = {}) {
  std::vector<double> seconds;
  if (first.seconds > kLongRun) {
    if (!first.disturbed) return first;
    seconds.push_back(first.seconds);
  }
  const Stopwatch patience;
  bool disturbed = first.disturbed;
  do {
    const Stopwatch::Reading timing = TimeOnce(device, probe, body);
    if (!timing.disturbed && timing.seconds > kLongRun) return timing;
    disturbed |= timing.disturbed;
    seconds.push_back(timing.seconds);
  } while (seconds.size() < 3 && patience.Passed() < kPatience);
  std::sort(seconds.begin(), seconds.end());
  return {disturbed ? seconds.front() : seconds[seconds.size() / 2], disturbed};
}

// A NaN is itself, and a stage may have moved its buffers to its device. `before` is on the host.
bool SameBits(const torch::Tensor& before, const torch::Tensor& now) {
  if (before.sizes() != now.sizes() || before.scalar_type() != now.scalar_type()) return false;
  const torch::Tensor here = now.detach().cpu().contiguous();
  return before.nbytes() == 0 || std::memcmp(before.data_ptr(), here.data_ptr(), before.nbytes()) == 0;
}

// What a stage must not change, as it was before the stage ran (zero/compute/libtorch/model.h).
class Untouched {
 public:
  Untouched(const torch::nn::Module& module, const torch::Tensor& input, const TensorBatch& batch)
      : module_(module),
        tensors_{{"its input", input},
                 {"the batch's inputs", batch.inputs},
                 {"the batch's targets", batch.targets}} {
    for (const auto& [what, tensor] : tensors_) versions_.push_back(tensor.defined() ? tensor._version() : 0);
    for (const auto& item : module.named_buffers())
      buffers_.emplace_back(item.key(), item.value().detach().cpu().clone(torch::MemoryFormat::Contiguous));
  }

  absl::Status Check(const std::string& stage, const std::string& block) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto& [what, tensor] = tensors_[i];
      if (!tensor.defined() || static_cast<int64_t>(tensor._version()) == versions_[i]) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "stage ", stage, " changes ", what,
          " in place, and backward computes the stage again from it: let it compute a new tensor "
          "(relu instead of relu_), or begin with a clone()"));
    }
    size_t i = 0;
    for (const auto& item : module_.named_buffers()) {
      const bool same = i < buffers_.size() && buffers_[i].first == item.key() &&
                        SameBits(buffers_[i].second, item.value());
      ++i;
      if (same) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "block ", block, " changes its buffer ", item.key(), " in stage ", stage,
          ": backward computes the stage again and would change it twice, blocks of one kind would "
          "share it, and it is not stored; use a layer without running statistics (LayerNorm, "
          "GroupNorm, BatchNorm with track_running_stats(false))"));
    }
    return absl::OkStatus();
  }

 private:
  const torch::nn::Module& module_;
  const std::vector<std::pair<const char*, torch::Tensor>> tensors_;
  std::vector<int64_t> versions_;
  std::vector<std::pair<std::string, torch::Tensor>> buffers_;
};

// Each parameter must have memory of its own, in its block and among all blocks.
class OwnMemory {
 public:
  absl::Status Check(const BlockSpec& spec, const torch::nn::Module& module) {
    std::map<const void*, std::string> storages;  // of this block: it gives them up afterwards
    std::set<const void*> tensors;
    for (const auto& item : module.named_parameters()) {
      const void* const tensor = item.value().unsafeGetTensorImpl();
      if (!tensors.insert(tensor).second) continue;  // the same parameter under a second name
      if (const auto [other, is_new] = blocks_.emplace(tensor, spec.name); !is_new) {
        return absl::InvalidArgumentError(
            absl::StrCat("block ", spec.name, " has the parameter ", item.key(), ", which block ",
                         other->second, " has too: make them one block that several stages use"));
      }
      if (!item.value().has_storage() || item.value().numel() == 0) continue;
      const void* const storage = item.value().storage().unsafeGetStorageImpl();
      if (const auto [other, is_new] = storages.emplace(storage, item.key()); !is_new) {
        return absl::InvalidArgumentError(
            absl::StrCat("block ", spec.name, ": its parameters ", other->second, " and ", item.key(),
                         " lie in one memory: register the tensor that they are parts of, and take the parts "
                         "where it computes, or give each its own with clone()"));
      }
    }
    return absl::OkStatus();
  }

 private:
  std::map<const void*, std::string> blocks_;
};

// Weights, and gradients as backward leaves them, of the largest block: computing it takes that much,
// whatever the batch. Where that is more than there is, nothing is run.
absl::Status CheckLargest(const tiering::ModelGraph& graph, kernels::DType weights,
                          const MeasureOptions& options, const Device& device) {
  if (options.host_memory_bytes == 0 || device.has_own_memory()) return absl::OkStatus();
  const auto width = static_cast<int64_t>(kernels::BytesPerElement(weights));
  const auto addend = static_cast<int64_t>(kernels::BytesPerElement(device.compute_type(weights)));
  for (const tiering::BlockShape& block : graph.blocks) {
    const int64_t gradients = options.trains && block.trains ? block.elements - block.trained_from : 0;
    const int64_t bytes = block.elements * width + gradients * addend;
    if (bytes <= options.host_memory_bytes) continue;
    return absl::ResourceExhaustedError(absl::StrCat("block ", block.name, " alone has ", bytes,
                                                     " bytes of weights",
                                                     gradients > 0 ? " and gradients" : ""));
  }
  return absl::OkStatus();
}

// Numbers as weights and activations are: products of zeros take up to a fifth less time, because processors
// that need less power run faster.
void FillLikeWeights(torch::Tensor tensor, double scale) {
  constexpr int64_t kPattern = 16 << 10;
  std::vector<float> numbers(kPattern);
  std::minstd_rand random(1);
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  for (float& number : numbers) number = normal(random);
  const torch::Tensor pattern =
      torch::from_blob(numbers.data(), {kPattern}, torch::kFloat32).to(tensor.device(), tensor.scalar_type());
  torch::Tensor flat = tensor.view({-1});
  for (int64_t at = 0; at < flat.numel(); at += kPattern) {
    const int64_t count = std::min(kPattern, flat.numel() - at);
    flat.narrow(0, at, count).copy_(pattern.narrow(0, 0, count));
  }
}

// One stage, as the run will compute it.
class StageProbe {
 public:
  StageProbe(const StageSpec& spec, bool first, bool last, std::shared_ptr<BlockModule> block,
             torch::Tensor input, TensorBatch batch, kernels::DType weights, Device& device)
      : spec_(spec),
        first_(first),
        last_(last),
        block_(std::move(block)),
        input_(std::move(input)),
        batch_(std::move(batch)),
        weights_(weights),
        width_(static_cast<int64_t>(kernels::BytesPerElement(weights))),
        device_(device),
        run_(torch::empty({block_->layout().elements},
                          torch::TensorOptions().device(TorchDeviceOf(device)).dtype(TorchDtype(weights)))) {
    Renew();
  }

  // Weights as before any Backward, and not in the caches.
  void Renew() {
    FillLikeWeights(run_, 0.02);
    if (run_.device().is_cpu()) kernels::EvictFromCaches(run_.data_ptr(), run_.nbytes());
  }

  void Forward() {
    torch::NoGradGuard no_grad;
    block_->Attach(run_.data_ptr(), weights_, device_);
    output_ = spec_.forward(block_->module(), input_, batch_).detach();
    block_->Detach();
  }

  void Backward() {
    torch::AutoGradMode grad(true);
    block_->Attach(run_.data_ptr(), weights_, device_);
    torch::Tensor x = input_.detach();
    if (!first_ && torch::isFloatingType(x.scalar_type())) x.set_requires_grad(true);
    torch::Tensor y = spec_.forward(block_->module(), x, batch_);
    TORCH_CHECK(!last_ || y.dim() == 0, "the last stage must return a scalar loss, not ", y.sizes());
    if (y.requires_grad()) y.backward(torch::full_like(y, 1e-3));
    // Taken to where it waits, for which the run itself will do.
    std::vector<torch::Tensor> gradients;
    for (size_t i = 0; i < block_->layout().parameters.size(); ++i) {
      const torch::Tensor& gradient = gradients.emplace_back(block_->Gradient(i));
      if (!gradient.defined()) continue;
      device_.Convert(device_.compute_type(weights_), gradient.data_ptr(), weights_,
                      static_cast<char*>(run_.data_ptr()) + block_->layout().parameters[i].offset * width_,
                      static_cast<size_t>(gradient.numel()));
    }
    gradients.clear();
    y = torch::Tensor();  // the graph goes before what it computed with
    block_->Detach();
  }

  const torch::Tensor& output() const { return output_; }

 private:
  const StageSpec& spec_;
  const bool first_, last_;
  const std::shared_ptr<BlockModule> block_;
  const torch::Tensor input_;
  const TensorBatch batch_;
  const kernels::DType weights_;
  const int64_t width_;
  Device& device_;
  const torch::Tensor run_;
  torch::Tensor output_;
};

// The steps of MeasureModel.
class Measurement {
 public:
  Measurement(const Model& model, kernels::DType weights, const MeasureOptions& options, Device& device)
      : model_(model), weights_(weights), options_(options), device_(device) {}

  absl::StatusOr<MeasuredModel> Run(const TensorBatch& example) {
    graph().batch_bytes = Rounded(BytesOf(example.inputs)) + Rounded(BytesOf(example.targets));
    for (size_t b = 0; b < model_.blocks.size(); ++b) RETURN_IF_ERROR(Block(b));
    RETURN_IF_ERROR(CheckLargest(graph(), weights_, options_, device_));
    RETURN_IF_ERROR(Guarded("the example batch", [&] {
      batch_ = {ToDevice(device_, example.inputs), ToDevice(device_, example.targets)};
    }));
    input_ = batch_.inputs;
    for (size_t s = 0; s < model_.stages.size(); ++s) RETURN_IF_ERROR(Stage(s));
    ChooseBusiest();
    input_ = torch::Tensor();
    batch_ = TensorBatch();
    kinds_.clear();
    device_.TrimTensors();
    // What is left over is the modules' own: buffers, and whatever the caller holds.
    graph().fixed_tensor_bytes = device_.tensors().live_bytes;
    return std::move(measured_);
  }

 private:
  // Of all stages that compute the same.
  struct Kind {
    tiering::StageShape shape;
    torch::Tensor output;         // shape and type, no data of interest
    double backward_seconds = 0;  // of all of them
    MeasuredModel::Busiest input;
    int64_t sample_bytes = 0;
  };

  tiering::ModelGraph& graph() { return measured_.graph; }
  void Doing(const std::string& what) const {
    if (options_.doing) options_.doing(what);
  }

  // One of each kind is built.
  absl::Status Block(size_t b) {
    const BlockSpec& spec = model_.blocks[b];
    const auto known = spec.kind.empty() ? first_of_kind_.end() : first_of_kind_.find(spec.kind);
    if (known != first_of_kind_.end()) {
      graph().blocks.push_back(graph().blocks[tiering::BlockIndex(known->second)]);
      graph().blocks.back().name = spec.name;
      measured_.modules.push_back(measured_.modules[known->second]);
    } else {
      RETURN_IF_ERROR(Build(spec));
      if (!spec.kind.empty()) first_of_kind_[spec.kind] = b;
    }
    measured_.parameters += measured_.modules.back()->layout().parameter_elements;
    return absl::OkStatus();
  }

  absl::Status Build(const BlockSpec& spec) {
    const std::string what = absl::StrCat("building block ", spec.name);
    Doing(what);
    std::shared_ptr<torch::nn::Module> module;
    int64_t peak = 0;
    RETURN_IF_ERROR(Guarded(what, [&] {
      HostDevice()->TrimTensors();
      peak = PeakOf(*HostDevice(), [&] { module = spec.build(); });
      TORCH_CHECK(module != nullptr, "its factory returned nothing");
    }));
    RETURN_IF_ERROR(own_.Check(spec, *module));
    measured_.modules.push_back(std::make_shared<BlockModule>(std::move(module)));
    const FlatLayout& layout = measured_.modules.back()->layout();
    if (!spec.initial.empty() && spec.initial.size() != layout.parameters.size()) {
      return absl::InvalidArgumentError(absl::StrCat("block ", spec.name, " says what ", spec.initial.size(),
                                                     " parameters begin with, and has ",
                                                     layout.parameters.size()));
    }
    graph().blocks.push_back({spec.name, layout.elements, peak, layout.Trains(), layout.trained_from});
    return absl::OkStatus();
  }

  // One of each kind is run; the next one's input is what it returned.
  absl::Status Stage(size_t s) {
    const StageSpec& spec = model_.stages[s];
    if (spec.block < 0 || static_cast<size_t>(spec.block) >= model_.blocks.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("stage ", spec.name, " uses block ", spec.block, " of ", model_.blocks.size()));
    }
    const std::string& kind = model_.blocks[static_cast<size_t>(spec.block)].kind;
    std::ostringstream key;
    key << kind << '/' << input_.sizes() << input_.scalar_type() << (s + 1 == model_.stages.size())
        << (s == 0);
    if (kind.empty()) key << '#' << s;  // like no other
    auto of_kind = kinds_.find(key.str());
    torch::Tensor output;
    if (of_kind == kinds_.end()) {
      Kind made;
      RETURN_IF_ERROR(RunStage(s, &made, &output));
      made.output = kind.empty() ? torch::Tensor() : output;
      of_kind = kinds_.emplace(key.str(), std::move(made)).first;
    } else {
      output = of_kind->second.output;
    }
    tiering::StageShape shape = of_kind->second.shape;
    of_kind->second.backward_seconds += shape.backward_seconds;
    shape.name = spec.name;
    shape.block = tiering::BlockIndex(spec.block);
    graph().stages.push_back(std::move(shape));
    input_ = std::move(output);
    return absl::OkStatus();
  }

  absl::Status RunStage(size_t s, Kind* kind, torch::Tensor* output) {
    const StageSpec& spec = model_.stages[s];
    const std::string what = absl::StrCat("measuring stage ", spec.name);
    Doing(what);
    absl::Status broken;
    RETURN_IF_ERROR(Guarded(what, [&] { broken = Probe(s, &kind->shape, output); }));
    RETURN_IF_ERROR(broken);
    kind->input = {static_cast<int>(s), input_.sizes().vec(), input_.scalar_type(),
                   /*forward_only=*/kind->shape.backward_seconds > 2 * kLongRun};
    kind->sample_bytes = Rounded(graph().blocks[tiering::BlockIndex(spec.block)].elements *
                                 static_cast<int64_t>(kernels::BytesPerElement(weights_))) +
                         kind->shape.input_bytes + graph().batch_bytes +
                         std::max(kind->shape.forward_peak_bytes, kind->shape.backward_peak_bytes);
    return absl::OkStatus();
  }

  // Throws as LibTorch does; an error is a rule that the block breaks.
  absl::Status Probe(size_t s, tiering::StageShape* shape, torch::Tensor* output) {
    const StageSpec& spec = model_.stages[s];
    const std::string& block_name = model_.blocks[static_cast<size_t>(spec.block)].name;
    const auto& block = measured_.modules[static_cast<size_t>(spec.block)];
    block->module().train(options_.trains);
    // Nothing is kept from the stage before, so that measuring takes no more than what it measures.
    device_.TrimTensors();
    StageProbe probe(spec, s == 0, s + 1 == model_.stages.size(), block, input_, batch_, weights_, device_);
    shape->input_bytes = s == 0 ? 0 : Rounded(BytesOf(input_));
    shape->input_scratch_bytes = s == 0 ? 0 : BytesOf(input_);
    const Untouched untouched(block->module(), input_, batch_);
    const auto forward = [&] { probe.Forward(); };
    const auto time = [&](auto& pass, Stopwatch::Reading first) {
      const Stopwatch::Reading timing = TimeOf(device_, probe, pass, first);
      measured_.disturbed |= timing.disturbed;
      return timing.seconds;
    };
    shape->forward_peak_bytes = PeakOf(device_, forward) + Rounded(BytesOf(probe.output()));
    *output = probe.output();
    if (options_.trains) {
      RETURN_IF_ERROR(untouched.Check(spec.name, block_name));
      const auto backward = [&] { probe.Backward(); };
      Stopwatch::Reading first;  // the pool's buffers are there from forward, most of them
      shape->backward_peak_bytes = PeakOf(device_, [&] { first = TimeOnce(device_, probe, backward); });
      RETURN_IF_ERROR(untouched.Check(spec.name, block_name));
      if (options_.times) shape->backward_seconds = time(backward, first);
    }
    if (options_.times) shape->forward_seconds = time(forward, {});
    return absl::OkStatus();
  }

  void ChooseBusiest() {
    const auto busiest = std::max_element(kinds_.begin(), kinds_.end(), [](const auto& a, const auto& b) {
      return a.second.backward_seconds < b.second.backward_seconds;
    });
    if (!options_.trains || busiest == kinds_.end()) return;
    measured_.busiest = busiest->second.input;
    measured_.sample_bytes = busiest->second.sample_bytes;
  }

  const Model& model_;
  const kernels::DType weights_;
  const MeasureOptions& options_;
  Device& device_;
  MeasuredModel measured_;
  std::map<std::string, size_t> first_of_kind_;
  OwnMemory own_;
  TensorBatch batch_;
  torch::Tensor input_;  // of the next stage
  std::map<std::string, Kind> kinds_;
};

}  // namespace

absl::StatusOr<MeasuredModel> MeasureModel(const Model& model, const TensorBatch& example,
                                           kernels::DType weights, const MeasureOptions& options,
                                           Device& device) {
  return Measurement(model, weights, options, device).Run(example);
}

std::function<void()> BusiestStage(const Model& model, const MeasuredModel& measured,
                                   const TensorBatch& example, kernels::DType weights, Device& device) {
  const auto make = [&model, &measured, example, weights, &device] {
    const MeasuredModel::Busiest& busiest = measured.busiest;
    const StageSpec& spec = model.stages[static_cast<size_t>(busiest.stage)];
    const bool first = busiest.stage == 0;
    const bool last = static_cast<size_t>(busiest.stage) + 1 == model.stages.size();
    const TensorBatch batch = {ToDevice(device, example.inputs), ToDevice(device, example.targets)};
    torch::Tensor input = batch.inputs;
    if (!first) {
      const auto options = torch::TensorOptions().device(TorchDeviceOf(device)).dtype(busiest.input_type);
      input = torch::zeros(busiest.input_sizes, options);
      if (torch::isFloatingType(busiest.input_type)) FillLikeWeights(input, 1);
    }
    return std::make_shared<StageProbe>(spec, first, last, measured.modules[static_cast<size_t>(spec.block)],
                                        std::move(input), batch, weights, device);
  };
  // Made when it is first called: whoever needs no sample pays for none.
  return [make, probe = std::shared_ptr<StageProbe>(), &device, &measured]() mutable {
    if (probe == nullptr) probe = make();
    if (measured.busiest.forward_only) {
      probe->Forward();
    } else {
      probe->Backward();
    }
    Finish(device);
  };
}

}  // namespace penstock::zero
