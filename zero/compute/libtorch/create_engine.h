// The engine for models of torch::nn::Modules (zero/compute/libtorch/model.h), and its values as LibTorch's
// tensors. Errors are those of zero/engine/engine.h.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_CREATE_ENGINE_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_CREATE_ENGINE_H_

#include <torch/types.h>

#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/compute/libtorch/model.h"
#include "zero/engine/engine.h"

namespace penstock::zero {

// Engine::Create and Engine::MakePlan over a LibTorchCompute of the model.
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(Model model, EngineOptions options);
absl::StatusOr<EnginePlan> PlanEngine(const Model& model, const EngineOptions& options);

// Engine::Infer of a last stage that returns one tensor, or a list.
absl::StatusOr<std::vector<torch::Tensor>> InferTensors(Engine& engine, const std::vector<Batch>& batches);
absl::StatusOr<std::vector<Values>> InferValues(Engine& engine, const std::vector<Batch>& batches);

// Engine::ReadState and WriteState; a value of any type and device is converted.
absl::StatusOr<torch::Tensor> ReadStateTensor(Engine& engine, std::string_view parameter, StateKind kind);
absl::Status WriteStateTensor(Engine& engine, std::string_view parameter, StateKind kind,
                              const torch::Tensor& value);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_CREATE_ENGINE_H_
