#include "zero/compute/libtorch/measure.h"

#include <algorithm>
#include <cstring>
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
  return tensor.defined() ? tensor.numel() * tensor.element_size() : 0;
}

// Rounded up as the allocator does.
int64_t Rounded(int64_t bytes) { return bytes == 0 ? 0 : tiering::AlignUp(bytes + 64, 16 << 10); }
int64_t Rounded(const Values& values) {
  int64_t sum = 0;
  for (const torch::Tensor& value : values) sum += Rounded(BytesOf(value));
  return sum;
}

// One behind the other as they go to the drive (ActivationSpill): each begins a page.
int64_t ScratchBytes(const Values& values) {
  int64_t end = 0;
  for (const torch::Tensor& value : values) end = tiering::AlignUp(end, tiering::kPage) + BytesOf(value);
  return end;
}

Values ValuesOf(const TensorBatch& batch) {
  Values values;
  for (const auto& [name, tensor] : batch.All()) values.push_back(tensor);
  return values;
}

// Peak of live tensor bytes over `body`, beyond what was live before. What is kept from before is no part of
// it.
template <typename Body>
int64_t PeakOf(Device& device, Body&& body) {
  device.ResetLivePeak();
  const int64_t before = device.tensors().live_bytes;
  body();
  return device.tensors().peak_live_bytes - before;
}

// Of one run. What a drive would have brought in the meantime is not in the caches, where it would make a
// block look faster than it trains.
template <typename Probe, typename Body>
Stopwatch::Reading TimeOnce(Device& device, Probe& probe, Body&& body) {
  probe.Renew();
  const Stopwatch watch(IntraOpThreads());
  body();
  Finish(device);
  // The processor's threads do not say what a device with its own memory takes.
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
  Untouched(const Values& inputs, const TensorBatch& batch) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const std::string which = inputs.size() > 1 ? absl::StrCat(" ", i, " of ", inputs.size()) : "";
      tensors_.emplace_back(absl::StrCat("its input", which), inputs[i]);
    }
    for (const auto& [name, tensor] : batch.All())
      tensors_.emplace_back(absl::StrCat("the batch's ", name), tensor);
    for (const auto& [what, tensor] : tensors_) versions_.push_back(tensor._version());
  }

  absl::Status Check(const std::string& stage) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto& [what, tensor] = tensors_[i];
      if (tensor._version() == versions_[i]) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "stage ", stage, " changes ", what,
          " in place, and backward computes the stage again from it: let it compute a new tensor "
          "(relu instead of relu_), or begin with a clone()"));
    }
    return absl::OkStatus();
  }

 private:
  std::vector<std::pair<std::string, torch::Tensor>> tensors_;
  std::vector<int64_t> versions_;
};

// A module's buffers, as they were before a stage ran.
class BuffersBefore {
 public:
  explicit BuffersBefore(const BlockModule& block) : block_(block) {
    for (const torch::Tensor& buffer : block.buffers())
      before_.push_back(buffer.detach().cpu().clone(torch::MemoryFormat::Contiguous));
  }

  // The numbers of those that the stage changes. All of a submodule do where one does: of statistics some may
  // come out as they were, here.
  absl::StatusOr<std::vector<size_t>> Changed(const std::string& stage) const {
    std::set<std::string> submodules;
    for (size_t i = 0; i < before_.size(); ++i) {
      const torch::Tensor& now = block_.buffers()[i];
      if (SameBits(before_[i], now)) continue;
      if (before_[i].sizes() != now.sizes() || before_[i].scalar_type() != now.scalar_type()) {
        return absl::InvalidArgumentError(
            absl::StrCat("stage ", stage, " changes the type or the shape of its block's buffer ",
                         block_.buffer_names()[i], ": only its values may change"));
      }
      submodules.insert(SubmoduleOf(i));
    }
    std::vector<size_t> changed;
    for (size_t i = 0; i < before_.size(); ++i) {
      if (submodules.count(SubmoduleOf(i)) > 0) changed.push_back(i);
    }
    return changed;
  }
  void PutBack() const {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < before_.size(); ++i) {
      torch::Tensor buffer = block_.buffers()[i];
      if (!SameBits(before_[i], buffer)) buffer.copy_(before_[i]);
    }
  }

 private:
  std::string SubmoduleOf(size_t i) const {
    const std::string& name = block_.buffer_names()[i];
    return name.substr(0, name.rfind('.') == std::string::npos ? 0 : name.rfind('.'));
  }

  const BlockModule& block_;
  Values before_;
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
  if (options.host_memory_budget_bytes == 0 || device.has_own_memory()) return absl::OkStatus();
  const auto width = static_cast<int64_t>(kernels::BytesPerElement(weights));
  const auto addend = static_cast<int64_t>(kernels::BytesPerElement(device.compute_type(weights)));
  for (const tiering::BlockShape& block : graph.blocks) {
    const int64_t gradients = options.trains && block.trains ? block.elements - block.trained_from : 0;
    const int64_t bytes = block.elements * width + gradients * addend;
    if (bytes <= options.host_memory_budget_bytes) continue;
    return absl::ResourceExhaustedError(absl::StrCat("block ", block.name, " alone has ", bytes,
                                                     " bytes of weights",
                                                     gradients > 0 ? " and gradients" : ""));
  }
  return absl::OkStatus();
}

// Numbers as weights and activations are: products of zeros take up to a fifth less time, because processors
// that need less power run faster.
void FillLikeWeights(const torch::Tensor& tensor, double scale) {
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
  // `blocks`: what it computes with; of a part before or after another stage its own, which it leaves alone.
  StageProbe(const StageSpec& spec, bool last, std::vector<std::shared_ptr<BlockModule>> blocks,
             Values inputs, Flows flows, TensorBatch batch, kernels::DType weights, Device& device)
      : spec_(spec),
        last_(last),
        blocks_(std::move(blocks)),
        inputs_(std::move(inputs)),
        flows_(std::move(flows)),
        batch_(std::move(batch)),
        weights_(weights),
        width_(static_cast<int64_t>(kernels::BytesPerElement(weights))),
        device_(device) {
    const auto options = torch::TensorOptions().device(TorchDeviceOf(device)).dtype(TorchDtype(weights));
    for (const auto& block : blocks_) runs_.push_back(torch::empty({block->layout().elements}, options));
    Renew();
  }

  // Weights as before any Backward, and not in the caches.
  void Renew() {
    for (const torch::Tensor& run : runs_) {
      FillLikeWeights(run, 0.02);
      if (run.device().is_cpu()) kernels::EvictFromCaches(run.data_ptr(), run.nbytes());
    }
  }

  void Forward() {
    torch::NoGradGuard no_grad;
    Attach();
    StageCall call(Modules(), batch_);
    std::vector<BlockModule*> blocks;
    for (const auto& block : blocks_) blocks.push_back(block.get());
    outputs_ = KeptValues(ComputeStage(spec_, call, inputs_), inputs_, blocks);
    Detach();
  }

  void Backward() {
    torch::AutoGradMode grad(true);
    Attach();
    RunGraph();
    for (size_t b = 0; b < blocks_.size(); ++b) TakeGradients(*blocks_[b], runs_[b]);
    Detach();
  }

  const Values& outputs() const { return outputs_; }
  const Flows& output_flows() const { return output_flows_; }

 private:
  std::vector<torch::nn::Module*> Modules() const {
    std::vector<torch::nn::Module*> modules;
    for (const auto& block : blocks_) modules.push_back(&block->module());
    return modules;
  }
  void Attach() const {
    for (size_t b = 0; b < blocks_.size(); ++b) blocks_[b]->Attach(runs_[b].data_ptr(), weights_, device_);
  }
  void Detach() const {
    for (const auto& block : blocks_) block->Detach();
  }
  // To where they wait, for which the run itself will do.
  void TakeGradients(const BlockModule& block, const torch::Tensor& run) const {
    std::vector<torch::Tensor> gradients;
    for (size_t i = 0; i < block.layout().parameters.size(); ++i) {
      const torch::Tensor& gradient = gradients.emplace_back(block.Gradient(i));
      if (!gradient.defined()) continue;
      device_.Convert(device_.compute_type(weights_), gradient.data_ptr(), weights_,
                      static_cast<char*>(run.data_ptr()) + block.layout().parameters[i].offset * width_,
                      static_cast<size_t>(gradient.numel()));
    }
  }
  // The graph goes before what it computed with.
  void RunGraph() {
    StageCall call(Modules(), batch_);
    const Values outputs = ComputeStage(spec_, call, LeavesOf(inputs_, flows_));
    if (last_) LossOf(outputs);
    output_flows_.clear();
    BackwardRoots roots;
    for (const torch::Tensor& output : outputs) {
      output_flows_.push_back(output.requires_grad() ? 1 : 0);
      if (output.requires_grad()) roots.Add(output, torch::full_like(output, 1e-3));
    }
    roots.Add(call.losses(), 1e-3);
    roots.Run();
  }

  const StageSpec& spec_;
  const bool last_;
  const std::vector<std::shared_ptr<BlockModule>> blocks_;
  const Values inputs_;
  const Flows flows_;
  const TensorBatch batch_;
  const kernels::DType weights_;
  const int64_t width_;
  Device& device_;
  std::vector<torch::Tensor> runs_;
  Values outputs_;
  Flows output_flows_;
};

// Those that a stage is probed with.
std::vector<std::shared_ptr<BlockModule>> ModulesOf(const LoweredModel& model, const MeasuredModel& measured,
                                                    size_t stage) {
  std::vector<int> blocks = model.BlocksOf(stage);
  if (blocks.empty()) blocks = {model.model.stages[stage].block};
  std::vector<std::shared_ptr<BlockModule>> modules;
  for (const int block : blocks) modules.push_back(measured.modules[static_cast<size_t>(block)]);
  return modules;
}

// The steps of MeasureModel.
class Measurement {
 public:
  Measurement(const LoweredModel& lowered, kernels::DType weights, const MeasureOptions& options,
              Device& device)
      : lowered_(lowered), model_(lowered.model), weights_(weights), options_(options), device_(device) {}

  absl::StatusOr<MeasuredModel> Run(const TensorBatch& example) {
    graph().batch_bytes = Rounded(ValuesOf(example));
    for (size_t b = 0; b < model_.blocks.size(); ++b) RETURN_IF_ERROR(Block(b));
    RETURN_IF_ERROR(CheckLargest(graph(), weights_, options_, device_));
    RETURN_IF_ERROR(Guarded("the example batch", [&] { batch_ = ToDevice(device_, example); }));
    inputs_ = InputsOf(batch_);
    flows_.assign(inputs_.size(), 0);
    for (size_t s = 0; s < model_.stages.size(); ++s) RETURN_IF_ERROR(Stage(s));
    ChooseBusiest();
    inputs_.clear();
    batch_ = TensorBatch();
    kinds_.clear();
    CountChangingBuffers();
    CountFurtherBlocks();
    device_.TrimTensors();
    // What is left over is the modules' own: buffers, and whatever the caller holds.
    graph().fixed_tensor_bytes += device_.tensors().live_bytes;
    return std::move(measured_);
  }

 private:
  // Of all stages that compute the same.
  struct Kind {
    tiering::StageShape shape;
    Values outputs;  // shapes and types, no data of interest
    Flows output_flows;
    double backward_seconds = 0;  // of all of them
    MeasuredModel::Busiest input;
    int64_t sample_bytes = 0;
  };

  tiering::ModelGraph& graph() { return measured_.graph; }
  void Doing(const std::string& what) const {
    if (options_.doing) options_.doing(what);
  }

  // One of each kind is built, and those that have a module of their own.
  absl::Status Block(size_t b) {
    const BlockSpec& spec = model_.blocks[b];
    const auto first = spec.kind.empty() ? first_of_kind_.end() : first_of_kind_.find(spec.kind);
    if (first == first_of_kind_.end()) {
      RETURN_IF_ERROR(Build(spec));
      if (!spec.kind.empty()) first_of_kind_[spec.kind] = b;
    } else {
      graph().blocks.push_back(graph().blocks[tiering::BlockIndex(first->second)]);
      graph().blocks.back().name = spec.name;
      const auto shared = shared_of_kind_.find(spec.kind);
      if (spec.own_module || shared == shared_of_kind_.end()) {
        RETURN_IF_ERROR(BuildOwn(spec, measured_.modules[first->second]->layout()));
      } else {
        measured_.modules.push_back(measured_.modules[shared->second]);
      }
    }
    if (!spec.kind.empty() && !spec.own_module) shared_of_kind_.emplace(spec.kind, b);
    measured_.parameters += measured_.modules.back()->layout().parameter_elements;
    return absl::OkStatus();
  }

  // A module beside the first of its kind.
  absl::Status BuildOwn(const BlockSpec& spec, const FlatLayout& layout) {
    std::shared_ptr<torch::nn::Module> module;
    RETURN_IF_ERROR(Guarded(absl::StrCat("building block ", spec.name), [&] {
      module = spec.build();
      TORCH_CHECK(module != nullptr, "its factory returned nothing");
    }));
    RETURN_IF_ERROR(own_.Check(spec, *module));
    if (!layout.SameShapes(LayoutOf(*module))) {
      return absl::InvalidArgumentError(absl::StrCat("block ", spec.name,
                                                     " has other parameters than the first of its kind, ",
                                                     spec.kind, ": give it a kind of its own"));
    }
    measured_.modules.push_back(std::make_shared<BlockModule>(std::move(module)));
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
    const std::string& kind = model_.blocks[static_cast<size_t>(spec.block)].kind;
    std::ostringstream key;
    key << kind << '/';
    for (size_t i = 0; i < inputs_.size(); ++i)
      key << inputs_[i].sizes() << inputs_[i].scalar_type() << static_cast<int>(flows_[i]);
    key << (s + 1 == model_.stages.size()) << (s == 0);
    key << static_cast<int>(lowered_.roles[s].part);
    bool like_others = !kind.empty();
    for (const int block : spec.more_blocks) {
      const std::string& further = model_.blocks[static_cast<size_t>(block)].kind;
      key << '+' << further;
      like_others &= !further.empty();
    }
    if (!like_others) key << '#' << s;
    auto of_kind = kinds_.find(key.str());
    Values outputs;
    if (of_kind == kinds_.end()) {
      Kind made;
      RETURN_IF_ERROR(RunStage(s, &made, &outputs));
      if (like_others) made.outputs = outputs;
      of_kind = kinds_.emplace(key.str(), std::move(made)).first;
    } else {
      outputs = of_kind->second.outputs;
    }
    tiering::StageShape shape = of_kind->second.shape;
    of_kind->second.backward_seconds += shape.backward_seconds;
    shape.name = spec.name;
    shape.block = tiering::BlockIndex(spec.block);
    graph().stages.push_back(std::move(shape));
    measured_.flows.push_back({std::move(flows_), of_kind->second.output_flows});
    flows_ = of_kind->second.output_flows;
    inputs_ = std::move(outputs);
    return absl::OkStatus();
  }

  absl::Status RunStage(size_t s, Kind* kind, Values* outputs) {
    const StageSpec& spec = model_.stages[s];
    const std::string what = absl::StrCat("measuring stage ", spec.name);
    Doing(what);
    absl::Status broken;
    RETURN_IF_ERROR(Guarded(what, [&] { broken = Probe(s, kind, outputs); }));
    RETURN_IF_ERROR(broken);
    kind->input.stage = static_cast<int>(s);
    for (const torch::Tensor& input : inputs_)
      kind->input.inputs.push_back({input.sizes().vec(), input.scalar_type()});
    kind->input.forward_only = kind->shape.backward_seconds > 2 * kLongRun;
    kind->sample_bytes = Rounded(graph().blocks[tiering::BlockIndex(spec.block)].elements *
                                 static_cast<int64_t>(kernels::BytesPerElement(weights_))) +
                         kind->shape.input_bytes + graph().batch_bytes +
                         std::max(kind->shape.forward_peak_bytes, kind->shape.backward_peak_bytes);
    return absl::OkStatus();
  }

  // Throws as LibTorch does; an error is a rule that the block breaks.
  absl::Status Probe(size_t s, Kind* kind, Values* outputs) {
    tiering::StageShape* const shape = &kind->shape;
    const StageSpec& spec = model_.stages[s];
    const std::vector<std::shared_ptr<BlockModule>> blocks = ModulesOf(lowered_, measured_, s);
    for (const auto& block : blocks) block->module().train(options_.trains);
    // Nothing is kept from the stage before, so that measuring takes no more than what it measures.
    device_.TrimTensors();
    StageProbe probe(spec, s + 1 == model_.stages.size(), blocks, inputs_, flows_, batch_, weights_, device_);
    shape->input_bytes = s == 0 ? 0 : Rounded(inputs_);
    shape->input_scratch_bytes = s == 0 ? 0 : ScratchBytes(inputs_);
    const Untouched untouched(inputs_, batch_);
    std::vector<BuffersBefore> buffers;
    for (const auto& block : blocks) buffers.emplace_back(*block);
    const auto forward = [&] { probe.Forward(); };
    const auto time = [&](auto& pass, Stopwatch::Reading first) {
      const Stopwatch::Reading timing = TimeOf(device_, probe, pass, first);
      measured_.disturbed |= timing.disturbed;
      return timing.seconds;
    };
    shape->forward_peak_bytes = PeakOf(device_, forward) + Rounded(probe.outputs());
    *outputs = probe.outputs();
    kind->output_flows.assign(outputs->size(), 0);
    if (options_.trains) {
      RETURN_IF_ERROR(untouched.Check(spec.name));
      const auto backward = [&] { probe.Backward(); };
      Stopwatch::Reading first;  // the pool's buffers are there from forward, most of them
      shape->backward_peak_bytes = PeakOf(device_, [&] { first = TimeOnce(device_, probe, backward); });
      RETURN_IF_ERROR(untouched.Check(spec.name));
      const std::vector<int> computes = lowered_.BlocksOf(s);
      for (size_t b = 0; b < computes.size(); ++b) {
        ASSIGN_OR_RETURN(const std::vector<size_t> changed, buffers[b].Changed(spec.name));
        ChangingOf(computes[b]).insert(changed.begin(), changed.end());
      }
      if (options_.times) shape->backward_seconds = time(backward, first);
      TORCH_CHECK(probe.output_flows().size() == outputs->size(), "it returns ", outputs->size(),
                  " values without a gradient and ", probe.output_flows().size(),
                  " with one: backward computes the stage again");
      kind->output_flows = probe.output_flows();
    }
    if (options_.times) shape->forward_seconds = time(forward, {});
    for (const BuffersBefore& before : buffers) before.PutBack();
    return absl::OkStatus();
  }

  // Blocks of one kind compute alike.
  std::set<size_t>& ChangingOf(int block) {
    const std::string& kind = model_.blocks[static_cast<size_t>(block)].kind;
    return changing_[kind.empty() ? absl::StrCat("#", block) : absl::StrCat("/", kind)];
  }

  // Each block keeps its own, and once more as the last step left them; each stage keeps, beside its inputs,
  // what they were before it, at the first position beside the batch.
  void CountChangingBuffers() {
    int64_t largest = 0;
    for (size_t b = 0; b < model_.blocks.size(); ++b) {
      const std::set<size_t>& numbers = ChangingOf(static_cast<int>(b));
      measured_.changing.emplace_back(numbers.begin(), numbers.end());
      graph().fixed_tensor_bytes += 2 * Rounded(ChangingBuffersOf(b));
    }
    for (size_t s = 0; s < model_.stages.size(); ++s) {
      tiering::StageShape& stage = graph().stages[tiering::StageIndex(s)];
      Values buffers;
      for (const int block : lowered_.BlocksOf(s)) {
        const Values of_block = ChangingBuffersOf(static_cast<size_t>(block));
        buffers.insert(buffers.end(), of_block.begin(), of_block.end());
      }
      if (buffers.empty()) continue;
      largest = std::max(largest, Rounded(buffers));
      stage.forward_peak_bytes += Rounded(buffers);
      if (s == 0) continue;
      stage.input_bytes += Rounded(buffers);
      stage.input_scratch_bytes =
          tiering::AlignUp(stage.input_scratch_bytes, tiering::kPage) + ScratchBytes(buffers);
    }
    graph().batch_bytes += largest;
  }
  Values ChangingBuffersOf(size_t block) const {
    Values buffers;
    for (const size_t i : measured_.changing[block])
      buffers.push_back(measured_.modules[block]->buffers()[i]);
    return buffers;
  }

  // Copies of their weights are there from before the stage to after it, and their gradients of all
  // micro-batches from the stage on.
  void CountFurtherBlocks() {
    int64_t most = 0;
    for (size_t s = 0; s < model_.stages.size(); ++s) {
      tiering::StageShape& stage = graph().stages[tiering::StageIndex(s)];
      int64_t weights = 0, gradients = 0;
      for (const int block : model_.stages[static_cast<size_t>(lowered_.roles[s].of)].more_blocks) {
        const FlatLayout& layout = measured_.modules[static_cast<size_t>(block)]->layout();
        weights += Rounded(layout.elements * static_cast<int64_t>(kernels::BytesPerElement(weights_)));
        const auto width = static_cast<int64_t>(kernels::BytesPerElement(device_.compute_type(weights_)));
        for (const Parameter& parameter : layout.parameters)
          gradients += parameter.trains ? Rounded(parameter.elements * width) : 0;
      }
      stage.forward_peak_bytes += weights;
      stage.backward_peak_bytes += weights;
      if (options_.trains) most = std::max(most, gradients);
    }
    graph().batch_bytes += most;
  }

  void ChooseBusiest() {
    const auto busiest = std::max_element(kinds_.begin(), kinds_.end(), [](const auto& a, const auto& b) {
      return a.second.backward_seconds < b.second.backward_seconds;
    });
    if (!options_.trains || busiest == kinds_.end()) return;
    measured_.busiest = busiest->second.input;
    measured_.sample_bytes = busiest->second.sample_bytes;
  }

  const LoweredModel& lowered_;
  const Model& model_;
  const kernels::DType weights_;
  const MeasureOptions& options_;
  Device& device_;
  MeasuredModel measured_;
  std::map<std::string, size_t> first_of_kind_, shared_of_kind_;  // of the latter the module is everybody's
  OwnMemory own_;
  TensorBatch batch_;
  Values inputs_;  // of the next stage
  Flows flows_;    // those of them that want a gradient
  std::map<std::string, Kind> kinds_;
  std::map<std::string, std::set<size_t>> changing_;  // by kind
};

}  // namespace

absl::StatusOr<MeasuredModel> MeasureModel(const LoweredModel& model, const TensorBatch& example,
                                           kernels::DType weights, const MeasureOptions& options,
                                           Device& device) {
  return Measurement(model, weights, options, device).Run(example);
}

std::function<void()> BusiestStage(const LoweredModel& model, const MeasuredModel& measured,
                                   const TensorBatch& example, kernels::DType weights, Device& device) {
  const auto make = [&model, &measured, example, weights, &device] {
    const MeasuredModel::Busiest& busiest = measured.busiest;
    const auto stage = static_cast<size_t>(busiest.stage);
    const bool last = stage + 1 == model.model.stages.size();
    const TensorBatch batch = ToDevice(device, example);
    Values inputs = busiest.stage == 0 ? InputsOf(batch) : Values();
    for (size_t i = 0; busiest.stage > 0 && i < busiest.inputs.size(); ++i) {
      const auto options = torch::TensorOptions().device(TorchDeviceOf(device)).dtype(busiest.inputs[i].type);
      inputs.push_back(torch::zeros(busiest.inputs[i].sizes, options));
      if (torch::isFloatingType(busiest.inputs[i].type)) FillLikeWeights(inputs.back(), 1);
    }
    return std::make_shared<StageProbe>(model.model.stages[stage], last, ModulesOf(model, measured, stage),
                                        std::move(inputs), measured.flows[stage].inputs, batch, weights,
                                        device);
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
