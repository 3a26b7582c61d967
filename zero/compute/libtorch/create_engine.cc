#include "zero/compute/libtorch/create_engine.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "zero/compute/libtorch/libtorch_compute.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {

namespace {

// Of the value's own memory, which it takes over.
torch::Tensor Adopt(HostTensor value) {
  const auto options = torch::TensorOptions().dtype(TorchDtype(value.view.type));
  auto held = std::make_shared<HostTensor>(std::move(value));
  return torch::from_blob(
      held->view.data, held->view.sizes, [held](void*) {}, options);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(Model model, EngineOptions options) {
  return Engine::Create(std::make_shared<LibTorchCompute>(std::move(model)), std::move(options));
}

absl::StatusOr<EnginePlan> PlanEngine(const Model& model, const EngineOptions& options) {
  LibTorchCompute compute(model);
  return Engine::MakePlan(compute, options);
}

absl::StatusOr<std::vector<torch::Tensor>> InferTensors(Engine& engine, const std::vector<Batch>& batches) {
  ASSIGN_OR_RETURN(std::vector<Values> outputs, InferValues(engine, batches));
  std::vector<torch::Tensor> tensors;
  for (Values& output : outputs) {
    if (output.size() != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("the last stage returns ", output.size(), " values: InferValues gives them all"));
    }
    tensors.push_back(std::move(output.front()));
  }
  return tensors;
}

absl::StatusOr<std::vector<Values>> InferValues(Engine& engine, const std::vector<Batch>& batches) {
  ASSIGN_OR_RETURN(std::vector<std::vector<HostTensor>> outputs, engine.Infer(batches));
  std::vector<Values> values;
  RETURN_IF_ERROR(Guarded("outputs", [&] {
    for (std::vector<HostTensor>& output : outputs) {
      values.emplace_back();
      for (HostTensor& value : output) values.back().push_back(Adopt(std::move(value)));
    }
  }));
  return values;
}

absl::StatusOr<torch::Tensor> ReadStateTensor(Engine& engine, std::string_view parameter, StateKind kind) {
  ASSIGN_OR_RETURN(HostTensor value, engine.ReadState(parameter, kind));
  torch::Tensor tensor;
  RETURN_IF_ERROR(Guarded("a parameter's state", [&] { tensor = Adopt(std::move(value)); }));
  return tensor;
}

absl::Status WriteStateTensor(Engine& engine, std::string_view parameter, StateKind kind,
                              const torch::Tensor& value) {
  torch::Tensor values;
  const absl::Status converted = Guarded("value of a parameter's state", [&] {
    TORCH_CHECK(value.defined(), "an undefined tensor");
    values = value.detach().to(torch::kCPU, torch::kFloat32).contiguous();
  });
  if (!converted.ok()) {
    // The other ranks make this call as well, and must hear of it.
    TensorView none;
    none.type = ElementType::kBool;
    const absl::Status refused = engine.WriteState(parameter, kind, none);
    const bool wrong = absl::IsInvalidArgument(refused) && !absl::IsResourceExhausted(converted);
    return wrong ? absl::InvalidArgumentError(converted.message()) : converted;
  }
  return engine.WriteState(parameter, kind, ViewOf(values));
}

}  // namespace penstock::zero
