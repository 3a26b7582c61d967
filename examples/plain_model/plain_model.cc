// Trains a network that is written by hand, in plain C++ arrays, through the engine: its state is larger than
// the memory that it is given, and lives in DIRECTORY. Then the same run is made again with everything in
// memory, and comes to the same losses to the last bit.
//   plain_model DIRECTORY
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "plain_compute.h"
#include "zero/engine/engine.h"

namespace {

namespace zero = penstock::zero;

constexpr plain::Shape kShape = {.layers = 32, .width = 256};
constexpr int64_t kRows = 16, kSteps = 8;
constexpr int64_t kBudget = int64_t{10} << 20;

// One micro-batch: the targets are a simple function of the inputs.
zero::Batch MakeBatch(int64_t step) {
  struct Tensors {
    std::vector<float> inputs, targets;
  };
  auto tensors = std::make_shared<Tensors>();
  for (int64_t i = 0; i < kRows * kShape.width; ++i) {
    const float x = static_cast<float>((i * 37 + step * 101) % 257) / 257 - 0.5F;
    tensors->inputs.push_back(x);
    tensors->targets.push_back(x * x);
  }
  zero::Batch batch;
  batch.tensors = {{"inputs", {tensors->inputs.data(), zero::ElementType::kFp32, {kRows, kShape.width}}},
                   {"targets", {tensors->targets.data(), zero::ElementType::kFp32, {kRows, kShape.width}}}};
  batch.owner = tensors;
  return batch;
}

// The losses of kSteps steps; empty after an error.
std::vector<double> Train(const zero::EngineOptions& options) {
  std::vector<double> losses;
  absl::StatusOr<std::unique_ptr<zero::Engine>> engine =
      zero::Engine::Create(std::make_shared<plain::PlainCompute>(kShape), options);
  absl::Status status = engine.status();
  while (status.ok() && (*engine)->step() < kSteps) {
    const int64_t step = (*engine)->step() + 1;
    const absl::StatusOr<zero::StepResult> result =
        (*engine)->Step({MakeBatch(step)}, step < kSteps ? zero::Next::kTrain : zero::Next::kUnknown);
    status = result.status();
    if (status.ok()) losses.push_back(result->loss);
  }
  if (status.ok()) status = (*engine)->Flush();
  if (status.ok()) {
    std::printf("%d blocks, state of %lld bytes, at most %lld bytes of memory, loss %.6f to %.6f\n",
                static_cast<int>((*engine)->plan().graph.blocks.size()),
                static_cast<long long>((*engine)->plan().state_bytes),
                static_cast<long long>((*engine)->peak_managed_bytes()), losses.front(), losses.back());
    return losses;
  }
  std::fprintf(stderr, "plain_model: %s\n", std::string(status.message()).c_str());
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: plain_model DIRECTORY\n");
    return 2;
  }
  zero::EngineOptions options;
  options.dtype = penstock::kernels::DType::kFp32;
  options.example = MakeBatch(0);  // the shapes to plan for
  options.optimizer.algorithm = penstock::kernels::AdamOptions{.lr = 1e-4};
  options.storage.state_dirs = {argv[1]};
  options.storage.overwrite = true;
  options.memory.host_memory_budget_bytes = kBudget;
  const std::vector<double> streamed = Train(options);
  options.storage.offload = zero::OffloadDevice::kNone;
  options.storage.state_dirs.clear();
  options.memory.host_memory_budget_bytes = 0;
  const std::vector<double> in_memory = Train(options);
  if (streamed.empty() || streamed != in_memory) {
    std::fprintf(stderr, "plain_model: the losses differ\n");
    return 1;
  }
  return streamed.back() < streamed.front() ? 0 : 1;
}
