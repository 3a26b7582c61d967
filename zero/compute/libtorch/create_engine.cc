#include "zero/compute/libtorch/create_engine.h"

#include <utility>

#include "base/status_macros.h"
#include "zero/compute/libtorch/libtorch_compute.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {

absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(Model model, EngineOptions options) {
  return Engine::Create(std::make_shared<LibTorchCompute>(std::move(model)), std::move(options));
}

absl::StatusOr<EnginePlan> PlanEngine(const Model& model, const EngineOptions& options) {
  LibTorchCompute compute(model);
  return Engine::MakePlan(compute, options);
}

absl::StatusOr<std::vector<torch::Tensor>> InferTensors(Engine& engine, const std::vector<Batch>& batches) {
  ASSIGN_OR_RETURN(const std::vector<std::vector<HostTensor>> outputs, engine.Infer(batches));
  std::vector<torch::Tensor> tensors;
  RETURN_IF_ERROR(Guarded("outputs", [&] {
    for (const std::vector<HostTensor>& output : outputs) tensors.push_back(CopyOf(output.front()));
  }));
  return tensors;
}

absl::StatusOr<torch::Tensor> ReadStateTensor(Engine& engine, std::string_view parameter, StateKind kind) {
  ASSIGN_OR_RETURN(const HostTensor value, engine.ReadState(parameter, kind));
  torch::Tensor tensor;
  RETURN_IF_ERROR(Guarded("a parameter's state", [&] { tensor = CopyOf(value); }));
  return tensor;
}

absl::Status WriteStateTensor(Engine& engine, std::string_view parameter, StateKind kind,
                              const torch::Tensor& value) {
  torch::Tensor values;
  RETURN_IF_ERROR(Guarded("value of a parameter's state", [&] {
    TORCH_CHECK(value.defined(), "an undefined tensor");
    values = value.detach().to(torch::kCPU, torch::kFloat32).contiguous();
  }));
  return engine.WriteState(parameter, kind, ViewOf(values));
}

}  // namespace penstock::zero
