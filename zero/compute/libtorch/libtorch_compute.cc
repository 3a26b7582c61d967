#include "zero/compute/libtorch/libtorch_compute.h"

#include <ATen/Parallel.h>

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

LibTorchCompute::LibTorchCompute(Model model) : model_(std::move(model)), saved_(model_.stages.size()) {
  InstallTensorAllocator();
}

absl::StatusOr<Measured> LibTorchCompute::Measure(const ComputeSetup& setup, const Batch& example,
                                                  const MeasureOptions& options) {
  if (model_.blocks.empty() || model_.stages.empty())
    return absl::InvalidArgumentError("a model needs at least one block and one stage");
  setup_ = setup;
  measured_ = MeasuredModel();  // of a call before
  TensorBatch tensors;
  RETURN_IF_ERROR(Guarded("the example batch", [&] { tensors = TensorsOf(example); }));
  ASSIGN_OR_RETURN(measured_, MeasureModel(model_, tensors, setup.weights, options, *setup.device));
  Measured measured;
  measured.identity = model_.identity;
  measured.graph = measured_.graph;
  for (const auto& block : measured_.modules) measured.layouts.push_back(block->shared_layout());
  measured.parameters = measured_.parameters;
  measured.disturbed = measured_.disturbed;
  measured.sample_bytes = measured_.sample_bytes;
  if (measured_.busiest.stage >= 0) {
    measured.sample =
        [example, run = BusiestStage(model_, measured_, tensors, setup.weights, *setup.device)] { run(); };
  }
  return measured;
}

absl::StatusOr<std::unique_ptr<InitialReader>> LibTorchCompute::Initial(tiering::BlockIndex block,
                                                                        uint64_t seed) {
  const BlockSpec& spec = model_.blocks[At(block)];
  std::unique_ptr<InitialReader> reader;
  RETURN_IF_ERROR(Guarded(absl::StrCat("building block ", spec.name), [&] {
    torch::manual_seed(seed);
    reader = std::make_unique<ModuleReader>(spec, measured_.modules[At(block)]->layout());
  }));
  return reader;
}

absl::Status LibTorchCompute::Begin(const PassInfo& pass, std::vector<Batch> batches) {
  pass_ = pass;
  const size_t count = batches.size();
  // What a pass that failed has left goes before the new batches come.
  for (auto& saved : saved_) saved.clear();
  flowing_.clear();
  batches_.clear();
  held_ = std::move(batches);
  const absl::Status status = Guarded("batches", [&] {
    for (const Batch& batch : held_) {
      const TensorBatch host = TensorsOf(batch);
      batches_.push_back({ToDevice(*setup_.device, host.inputs), ToDevice(*setup_.device, host.targets)});
    }
  });
  if (setup_.device->has_own_memory()) held_.clear();
  batches_.resize(count);
  for (auto& saved : saved_) saved.assign(count, Saved());
  flowing_.assign(count, torch::Tensor());
  outputs_.assign(count, torch::Tensor());
  losses_.assign(count, torch::Tensor());
  for (size_t m = 0; m < count; ++m) saved_.front()[m].tensor = batches_[m].inputs;
  return status;
}

void LibTorchCompute::ThreadBegins() { at::set_num_threads(setup_.intra_op_threads); }

const StageSpec& LibTorchCompute::stage(const StageUse& use) const { return model_.stages[At(use.stage)]; }

BlockModule& LibTorchCompute::module(const StageUse& use) const {
  return *measured_.modules[At(stage(use).block)];
}

absl::Status LibTorchCompute::Forward(const StageUse& use, std::span<const Weights> weights) {
  const StageSpec& spec = stage(use);
  BlockModule& block = module(use);
  absl::Status status = Guarded(absl::StrCat("forward of ", spec.name), [&] {
    torch::NoGradGuard no_grad;
    block.Attach(weights.front().data, setup_.weights, *setup_.device);
    block.module().train(use.trains);
    SeedGenerators(*setup_.device, use.seed);
    torch::Tensor& input = saved(use.position, use.micro_batch).tensor;
    // In one piece: it may have to be copied as it is, and comes back so, and everywhere the next stage is to
    // compute with the same.
    torch::Tensor output =
        spec.forward(block.module(), input, batches_[At(use.micro_batch)]).detach().contiguous();
    block.Detach();
    if (!use.trains) input = torch::Tensor();
    if (!use.last) {
      saved(use.position + 1, use.micro_batch).tensor = std::move(output);
    } else {
      if (output.dim() == 0) losses_[At(use.micro_batch)] = output;
      outputs_[At(use.micro_batch)] = std::move(output);
    }
  });
  if (!status.ok()) block.Detach();  // its weights are the engine's again
  return status;
}

absl::Status LibTorchCompute::Backward(const StageUse& use, std::span<const Weights> weights) {
  const StageSpec& spec = stage(use);
  BlockModule& block = module(use);
  torch::Tensor& from_below = saved(use.position, use.micro_batch).tensor;
  torch::Tensor& flowing = flowing_[At(use.micro_batch)];
  return Guarded(absl::StrCat("backward of ", spec.name), [&] {
    block.Attach(weights.front().data, setup_.weights, *setup_.device);
    block.module().train();
    SeedGenerators(*setup_.device, use.seed);
    torch::AutoGradMode grad(true);
    torch::Tensor input = std::exchange(from_below, torch::Tensor()).detach();
    const bool flows_on = use.position.value() > 0 && torch::isFloatingType(input.scalar_type());
    if (flows_on) input.set_requires_grad(true);
    torch::Tensor output = spec.forward(block.module(), input, batches_[At(use.micro_batch)]);
    torch::Tensor from_above = std::exchange(flowing, torch::Tensor());
    if (use.last) {
      TORCH_CHECK(output.dim() == 0, "the last stage must return a scalar loss, not ", output.sizes());
      losses_[At(use.micro_batch)] = output.detach();  // fetched when the pass is over: nobody waits for it
      from_above = torch::full_like(output, pass_.loss_gradient);
    }
    if (output.requires_grad() && from_above.defined()) output.backward(from_above);
    if (flows_on) flowing = input.grad();
  });
}

TensorView LibTorchCompute::DeviceView(const torch::Tensor& tensor) const {
  TensorView view = ViewOf(tensor);
  view.on_device = setup_.device->has_own_memory();  // a device for tests has its tensors in host memory
  return view;
}

absl::StatusOr<std::span<const Gradient>> LibTorchCompute::Gradients(const StageUse& use,
                                                                     tiering::BlockIndex) {
  const BlockModule& block = module(use);
  gradients_.clear();
  gradient_tensors_.clear();
  RETURN_IF_ERROR(Guarded(absl::StrCat("gradient of ", stage(use).name), [&] {
    for (size_t i = 0; i < block.layout().parameters.size(); ++i) {
      torch::Tensor gradient = block.Gradient(i);
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
  module(use).Detach();
}

absl::StatusOr<std::span<const TensorView>> LibTorchCompute::SavedInputs(tiering::Position position,
                                                                         int micro_batch) {
  Saved& from = saved(position, micro_batch);
  RETURN_IF_ERROR(Guarded("the input of a stage", [&] { from.view = DeviceView(from.tensor); }));
  return std::span(&from.view, 1);
}

void LibTorchCompute::DropInputs(tiering::Position position, int micro_batch) {
  saved(position, micro_batch).tensor = torch::Tensor();
}

absl::StatusOr<std::span<const TensorView>> LibTorchCompute::RestoreInputs(tiering::Position position,
                                                                           int micro_batch) {
  Saved& to = saved(position, micro_batch);
  RETURN_IF_ERROR(Guarded("memory for the input of a stage", [&] {
    to.tensor = torch::empty(
        to.view.sizes,
        torch::TensorOptions().dtype(TorchDtype(to.view.type)).device(TorchDeviceOf(*setup_.device)));
    to.view = DeviceView(to.tensor);
  }));
  return std::span(&to.view, 1);
}

absl::StatusOr<std::vector<double>> LibTorchCompute::Losses() {
  std::vector<double> losses;
  RETURN_IF_ERROR(Guarded("losses", [&] {
    for (const torch::Tensor& loss : losses_) losses.push_back(loss.defined() ? loss.item<double>() : 0);
  }));
  return losses;
}

absl::StatusOr<std::vector<std::vector<HostTensor>>> LibTorchCompute::Outputs() {
  std::vector<std::vector<HostTensor>> outputs;
  absl::Status copied;
  RETURN_IF_ERROR(Guarded("outputs", [&] {
    for (torch::Tensor& output : outputs_) {
      absl::StatusOr<HostTensor> value = HostTensorOf(ToHost(*setup_.device, output));
      output = torch::Tensor();
      copied.Update(value.status());
      if (value.ok()) outputs.emplace_back().push_back(*std::move(value));
    }
  }));
  if (!copied.ok()) return copied;
  return outputs;
}

}  // namespace penstock::zero
