#include "zero/compute/libtorch/libtorch_compute.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "base/status_macros.h"
#include "zero/compute/libtorch/initial_values.h"
#include "zero/compute/libtorch/tensor_allocator.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {
namespace {

// Of a block's module, or of what it says that its parameters begin with.
class ModuleReader final : public InitialReader {
 public:
  // Throws as LibTorch does. `spec` and `layout` outlive it.
  ModuleReader(const BlockSpec& spec, const FlatLayout& layout) : spec_(spec), layout_(layout) {
    module_ = spec.build();
    TORCH_CHECK(module_ != nullptr, "its factory returned nothing");
    TORCH_CHECK(layout.SameShapes(LayoutOf(*module_)),
                "its parameters differ from those of the others of kind ", spec.kind);
    if (!spec.initial.empty()) stream_.emplace(spec, layout);
  }

  const torch::nn::Module& module() const { return *module_; }

  absl::Status Read(int64_t first, int64_t elements, float* to) override {
    return Guarded(absl::StrCat("building block ", spec_.name), [&] {
      if (stream_.has_value()) {
        stream_->Read(first, elements, to);
      } else {
        CopyParameters(*module_, layout_, first, elements, to);
      }
    });
  }

 private:
  const BlockSpec& spec_;
  const FlatLayout& layout_;
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<InitialStream> stream_;  // of a block that says what it begins with
};

}  // namespace

LibTorchCompute::LibTorchCompute(Model model)
    : lowered_(Lower(std::move(model))), model_(lowered_.model), saved_(model_.stages.size()) {
  InstallTensorAllocator();
}

absl::StatusOr<Measured> LibTorchCompute::Measure(const ComputeSetup& setup, const Batch& example,
                                                  const MeasureOptions& options) {
  if (model_.blocks.empty() || model_.stages.empty())
    return absl::InvalidArgumentError("a model needs at least one block and one stage");
  RETURN_IF_ERROR(CheckBlocks(lowered_));
  ForgetPass();
  setup_ = setup;
  measured_ = MeasuredModel();  // of a call before
  TensorBatch tensors;
  RETURN_IF_ERROR(Guarded("the example batch", [&] { tensors = TensorsOf(example); }));
  ASSIGN_OR_RETURN(measured_, MeasureModel(lowered_, tensors, setup.weights, options, *setup.device));
  Measured measured;
  measured.identity = model_.identity;
  measured.graph = measured_.graph;
  for (const auto& block : measured_.modules) measured.layouts.push_back(block->shared_layout());
  measured.parameters = measured_.parameters;
  measured.disturbed = measured_.disturbed;
  RETURN_IF_ERROR(Guarded("the buffers of the model", [&] {
    buffers_ = ChangingBuffers(model_, measured_.modules, measured_.changing, *setup.device);
    buffers_changed_ = false;
    if (buffers_.any()) measured.buffer_bytes = static_cast<int64_t>(buffers_.ToJson().dump().size());
  }));
  measured.sample_bytes = measured_.sample_bytes;
  if (measured_.busiest.stage >= 0) {
    measured.sample =
        [example, run = BusiestStage(lowered_, measured_, tensors, setup.weights, *setup.device)] { run(); };
  }
  return measured;
}

absl::StatusOr<std::unique_ptr<InitialReader>> LibTorchCompute::Initial(tiering::BlockIndex block,
                                                                        uint64_t seed) {
  const BlockSpec& spec = model_.blocks[At(block)];
  std::unique_ptr<InitialReader> reader;
  RETURN_IF_ERROR(Guarded(absl::StrCat("building block ", spec.name), [&] {
    torch::manual_seed(seed);
    auto made = std::make_unique<ModuleReader>(spec, measured_.modules[At(block)]->layout());
    buffers_.Begin(block.value(), made->module());
    reader = std::move(made);
  }));
  return reader;
}

void LibTorchCompute::ForgetPass() {
  for (auto& saved : saved_) saved.clear();
  flowing_.clear();
  batches_.clear();
  held_.clear();
  outputs_.clear();
  losses_.clear();
  inner_losses_.clear();
  borrowed_.clear();
}

absl::Status LibTorchCompute::Begin(const PassInfo& pass, std::vector<Batch> batches) {
  pass_ = pass;
  const size_t count = batches.size();
  ForgetPass();  // before the new batches come
  held_ = std::move(batches);
  const bool given_up = std::exchange(buffers_changed_, pass.trains && buffers_.any());
  const absl::Status status = Guarded("batches", [&] {
    if (given_up) buffers_.Undo();
    for (const Batch& batch : held_) batches_.push_back(ToDevice(*setup_.device, TensorsOf(batch)));
  });
  if (setup_.device->has_own_memory()) held_.clear();
  batches_.resize(count);
  for (auto& saved : saved_) saved.assign(count, Saved());
  flowing_.assign(count, Flowing());
  outputs_.assign(count, Values());
  losses_.assign(count, torch::Tensor());
  inner_losses_.assign(count, InnerLossesOf());
  for (size_t m = 0; m < count; ++m) {
    Saved& first = saved_.front()[m];
    first.values = InputsOf(batches_[m]);
    first.flows.assign(first.values.size(), 0);
  }
  return status;
}

void LibTorchCompute::ThreadBegins() { at::set_num_threads(setup_.intra_op_threads); }

const StageSpec& LibTorchCompute::stage(const StageUse& use) const { return model_.stages[At(use.stage)]; }

const StageRole& LibTorchCompute::role(const StageUse& use) const { return lowered_.roles[At(use.stage)]; }

BlockModule& LibTorchCompute::module(const StageUse& use) const {
  return *measured_.modules[At(stage(use).block)];
}

std::vector<BlockModule*> LibTorchCompute::Computing(const StageUse& use) const {
  std::vector<BlockModule*> modules;
  for (const int block : lowered_.BlocksOf(At(use.stage)))
    modules.push_back(measured_.modules[At(block)].get());
  return modules;
}

void LibTorchCompute::Attach(const StageUse& use, const Weights& weights) {
  if (role(use).part != StageRole::kComputes) return;
  module(use).Attach(weights.data, setup_.weights, *setup_.device);
  const std::vector<int>& more = stage(use).more_blocks;
  for (size_t k = 0; k < more.size(); ++k) {
    TORCH_CHECK(
        k < borrowed_.size() && borrowed_[k].of == use.stage.value() && borrowed_[k].weights.defined(),
        "it stands apart from the parts that bring its further blocks: an order of stages keeps them "
        "together");
    measured_.modules[At(more[k])]->Attach(borrowed_[k].weights.data_ptr(), setup_.weights, *setup_.device);
  }
}

void LibTorchCompute::Detach(const StageUse& use) {
  for (BlockModule* block : Computing(use)) block->Detach();
}

StageCall LibTorchCompute::CallOf(const StageUse& use) const {
  std::vector<torch::nn::Module*> modules;
  for (BlockModule* block : Computing(use)) modules.push_back(&block->module());
  return {std::move(modules), batches_[At(use.micro_batch)]};
}

Values LibTorchCompute::RunStage(const StageUse& use, StageCall& call, const Values& inputs) const {
  const auto changes = [&] {
    int64_t sum = 0;
    for (const int block : lowered_.BlocksOf(At(use.stage))) sum += buffers_.ChangesOfOthers(block);
    return sum;
  };
  const int64_t before = changes();
  Values outputs = ComputeStage(stage(use), call, inputs);
  TORCH_CHECK(changes() == before,
              "it changes a buffer of its block that it left alone where it was measured: what training "
              "changes must change in every step, else backward would change it once more");
  return outputs;
}

// Once for all micro-batches: forward begins with the part before the stage, backward with the part after it.
void LibTorchCompute::BorrowBlock(const StageUse& use, const Weights& weights) {
  const StageRole& part = role(use);
  if (use.micro_batch > 0) return;
  borrowed_.resize(std::max(borrowed_.size(), part.which + 1));
  Borrowed& to = borrowed_[part.which];
  to.weights = torch::Tensor();
  const auto options =
      torch::TensorOptions().dtype(TorchDtype(setup_.weights)).device(TorchDeviceOf(*setup_.device));
  to.weights = torch::from_blob(weights.data, {module(use).layout().elements}, options).clone();
  to.gradients.assign(batches_.size(), {});
  to.of = part.of;
}

void LibTorchCompute::TakeBorrowedGradients(const StageUse& use) {
  const std::vector<int>& more = stage(use).more_blocks;
  for (size_t k = 0; k < more.size(); ++k) {
    const BlockModule& block = *measured_.modules[At(more[k])];
    std::vector<torch::Tensor>& gradients = borrowed_[k].gradients[At(use.micro_batch)];
    for (size_t i = 0; i < block.layout().parameters.size(); ++i) gradients.push_back(block.Gradient(i));
  }
}

// The stage has computed: of the last micro-batch the copies go.
void LibTorchCompute::EndBorrowing(const StageUse& use) {
  if (At(use.micro_batch) + 1 < batches_.size()) return;
  for (size_t k = 0; k < stage(use).more_blocks.size(); ++k) borrowed_[k].weights = torch::Tensor();
}

Values LibTorchCompute::CopyBuffers(const StageUse& use) const {
  Values copies;
  for (const int block : lowered_.BlocksOf(At(use.stage))) {
    for (torch::Tensor& copy : buffers_.Copies(block)) copies.push_back(std::move(copy));
  }
  return copies;
}

void LibTorchCompute::LendBuffers(const StageUse& use) {
  for (const int block : lowered_.BlocksOf(At(use.stage))) buffers_.Lend(block);
}

void LibTorchCompute::LendBuffers(const StageUse& use, const Values& values) const {
  auto next = values.begin();
  for (const int block : lowered_.BlocksOf(At(use.stage))) {
    const auto end = next + static_cast<std::ptrdiff_t>(buffers_.count(block));
    buffers_.LendThese(block, {next, end});
    next = end;
  }
}

// What was measured, where the stage is where it was measured; in another order of stages whatever may.
Flows LibTorchCompute::FlowsAfter(const StageUse& use, const Flows& inputs, const Values& outputs) const {
  const MeasuredModel::StageFlows& flows = measured_.flows[At(use.stage)];
  if (inputs == flows.inputs && outputs.size() == flows.outputs.size()) return flows.outputs;
  Flows after;
  for (const torch::Tensor& output : outputs)
    after.push_back(torch::isFloatingType(output.scalar_type()) ? 1 : 0);
  return after;
}

void LibTorchCompute::NoteLosses(const StageUse& use, const StageCall& call) {
  for (const auto& [name, loss] : call.losses())
    inner_losses_[At(use.micro_batch)][use.position].emplace_back(name,
                                                                  loss.detach().clone());  // it may be lent
}

absl::Status LibTorchCompute::Forward(const StageUse& use, std::span<const Weights> weights) {
  absl::Status status = Guarded(absl::StrCat("forward of ", stage(use).name), [&] {
    torch::NoGradGuard no_grad;
    if (role(use).part == StageRole::kBefore) BorrowBlock(use, weights.front());
    Attach(use, weights.front());
    SeedGenerators(*setup_.device, use.seed);
    Saved& from = saved(use.position, use.micro_batch);
    Values copies = CopyBuffers(use);
    if (use.trains) {
      LendBuffers(use);
      if (use.keeps_inputs) from.buffers = std::move(copies);
    } else {
      LendBuffers(use, copies);
    }
    StageCall call = CallOf(use);
    const std::vector<BlockModule*> blocks = Computing(use);
    for (BlockModule* block : blocks) block->module().train(use.trains);
    Values outputs = KeptValues(RunStage(use, call, from.values), from.values, blocks);
    Detach(use);
    EndBorrowing(use);
    if (!use.keeps_inputs) {
      NoteLosses(use, call);  // else backward has them
      from.values.clear();
    }
    if (!use.last) {
      Saved& to = saved(use.position + 1, use.micro_batch);
      to.flows = FlowsAfter(use, from.flows, outputs);
      to.values = std::move(outputs);
    } else {
      if (!outputs.empty() && outputs.front().dim() == 0) losses_[At(use.micro_batch)] = outputs.front();
      outputs_[At(use.micro_batch)] = std::move(outputs);
    }
  });
  if (!status.ok()) Detach(use);  // its weights are the engine's again
  return status;
}

absl::Status LibTorchCompute::Backward(const StageUse& use, std::span<const Weights> weights) {
  return Guarded(absl::StrCat("backward of ", stage(use).name), [&] {
    if (role(use).part == StageRole::kAfter) BorrowBlock(use, weights.front());
    Attach(use, weights.front());
    for (BlockModule* block : Computing(use)) block->module().train();
    SeedGenerators(*setup_.device, use.seed);
    torch::AutoGradMode grad(true);
    ComputeBackward(use);
    TakeBorrowedGradients(use);
    EndBorrowing(use);
  });
}

void LibTorchCompute::ComputeBackward(const StageUse& use) {
  Saved from = std::exchange(saved(use.position, use.micro_batch), Saved());
  if (use.last) {
    LendBuffers(use);  // its forward as well
  } else {
    LendBuffers(use, from.buffers);
  }
  if (!use.passes_gradients) std::fill(from.flows.begin(), from.flows.end(), 0);
  const Values inputs = LeavesOf(std::exchange(from.values, Values()), from.flows);
  StageCall call = CallOf(use);
  const Values outputs = RunStage(use, call, inputs);
  NoteLosses(use, call);
  Flowing from_above = std::exchange(flowing_[At(use.micro_batch)], Flowing());
  BackwardRoots roots;
  if (use.last) {
    const torch::Tensor& loss = LossOf(outputs);
    losses_[At(use.micro_batch)] = loss.detach();  // fetched when the pass is over: nobody waits for it
    roots.Add(loss, torch::full_like(loss, pass_.loss_gradient));
  } else {
    AddFromAbove(outputs, std::move(from_above), &roots);
  }
  roots.Add(call.losses(), pass_.loss_gradient);
  roots.Run();
  if (!use.passes_gradients) return;
  Flowing& down = flowing_[At(use.micro_batch)];
  for (size_t i = 0; i < inputs.size(); ++i)
    down.gradients.push_back(from.flows[i] != 0 ? inputs[i].grad() : torch::Tensor());
  down.wanted = std::move(from.flows);
}

void LibTorchCompute::AddFromAbove(const Values& outputs, Flowing from_above, BackwardRoots* roots) {
  const size_t count = from_above.gradients.size();
  TORCH_CHECK(outputs.size() == count, "it returned ", count, " values in forward and ", outputs.size(),
              " in backward");
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK(from_above.wanted[i] != 0 || !outputs[i].requires_grad(), "value ", i,
                " of what it returns needs a gradient now, and needed none where it was measured: what leads "
                "to parameters must do so in every step");
    roots->Add(outputs[i], std::move(from_above.gradients[i]));
  }
}

TensorView LibTorchCompute::DeviceView(const torch::Tensor& tensor) const {
  TensorView view = ViewOf(tensor);
  view.on_device = setup_.device->has_own_memory();  // a device for tests has its tensors in host memory
  return view;
}

absl::StatusOr<std::span<const Gradient>> LibTorchCompute::Gradients(const StageUse& use,
                                                                     tiering::BlockIndex) {
  const BlockModule& block = module(use);
  const StageRole& part = role(use);
  gradients_.clear();
  gradient_tensors_.clear();
  if (part.part == StageRole::kAfter) return gradients_;  // what it has comes with the part before
  RETURN_IF_ERROR(Guarded(absl::StrCat("gradient of ", stage(use).name), [&] {
    std::vector<torch::Tensor> borrowed;
    if (part.part == StageRole::kBefore)
      borrowed = std::exchange(borrowed_[part.which].gradients[At(use.micro_batch)], {});
    borrowed.resize(block.layout().parameters.size());
    for (size_t i = 0; i < block.layout().parameters.size(); ++i) {
      torch::Tensor gradient = part.part == StageRole::kBefore ? borrowed[i] : block.Gradient(i);
      if (!gradient.defined()) continue;
      gradients_.push_back({static_cast<int>(i), DeviceView(gradient)});
      gradient_tensors_.push_back(std::move(gradient));
    }
  }));
  return gradients_;
}

void LibTorchCompute::Release(const StageUse& use) {
  gradients_.clear();
  gradient_tensors_.clear();
  Detach(use);
}

absl::StatusOr<std::span<const TensorView>> LibTorchCompute::SavedInputs(tiering::Position position,
                                                                         int micro_batch) {
  Saved& from = saved(position, micro_batch);
  RETURN_IF_ERROR(Guarded("the inputs of a stage", [&] {
    from.views.clear();
    for (const Values* values : {&from.values, &from.buffers}) {
      for (const torch::Tensor& value : *values) from.views.push_back(DeviceView(value));
    }
  }));
  return from.views;
}

void LibTorchCompute::DropInputs(tiering::Position position, int micro_batch) {
  Saved& from = saved(position, micro_batch);
  from.values.clear();
  from.buffers.clear();
}

absl::StatusOr<std::span<const TensorView>> LibTorchCompute::RestoreInputs(tiering::Position position,
                                                                           int micro_batch) {
  Saved& to = saved(position, micro_batch);
  RETURN_IF_ERROR(Guarded("memory for the inputs of a stage", [&] {
    to.values.clear();
    to.buffers.clear();
    for (TensorView& view : to.views) {
      Values& values = to.values.size() < to.flows.size() ? to.values : to.buffers;
      values.push_back(torch::empty(
          view.sizes,
          torch::TensorOptions().dtype(TorchDtype(view.type)).device(TorchDeviceOf(*setup_.device))));
      view = DeviceView(values.back());
    }
  }));
  return to.views;
}

absl::StatusOr<nlohmann::json> LibTorchCompute::Buffers() {
  buffers_changed_ = false;
  if (!buffers_.any()) return nlohmann::json();
  return buffers_.Accept();
}

absl::Status LibTorchCompute::RestoreBuffers(const nlohmann::json& buffers) {
  return buffers_.Restore(buffers);
}

absl::StatusOr<std::vector<double>> LibTorchCompute::Losses() {
  std::vector<double> losses;
  RETURN_IF_ERROR(Guarded("losses", [&] {
    for (size_t m = 0; m < losses_.size(); ++m) {
      losses.push_back(losses_[m].defined() ? losses_[m].item<double>() : 0);
      for (const auto& [position, inner] : inner_losses_[m]) {
        for (const auto& [name, loss] : inner) losses.back() += loss.item<double>();
      }
    }
  }));
  return losses;
}

absl::StatusOr<std::map<std::string, double>> LibTorchCompute::InnerLosses() {
  std::map<std::string, double> losses;
  RETURN_IF_ERROR(Guarded("inner losses", [&] {
    for (const InnerLossesOf& of_micro_batch : inner_losses_) {
      for (const auto& [position, inner] : of_micro_batch) {
        for (const auto& [name, loss] : inner) losses[name] += loss.item<double>();
      }
    }
    for (auto& [name, loss] : losses) loss /= static_cast<double>(inner_losses_.size());
  }));
  return losses;
}

absl::StatusOr<std::vector<std::vector<HostTensor>>> LibTorchCompute::Outputs() {
  std::vector<std::vector<HostTensor>> outputs;
  absl::Status copied;
  RETURN_IF_ERROR(Guarded("outputs", [&] {
    for (Values& of_micro_batch : outputs_) {
      outputs.emplace_back();
      for (torch::Tensor& output : std::exchange(of_micro_batch, Values())) {
        absl::StatusOr<HostTensor> value = HostTensorOf(ToHost(*setup_.device, output));
        output = torch::Tensor();
        copied.Update(value.status());
        if (value.ok()) outputs.back().push_back(*std::move(value));
      }
    }
  }));
  RETURN_IF_ERROR(copied);
  return outputs;
}

}  // namespace penstock::zero
