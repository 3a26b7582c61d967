// What it costs that a model's owner drives it (zero/compute/driven_compute.h): steps of a model so small
// that little is computed, once as a Compute and once driven from a thread of its owner's, which calls the
// same Compute. The model is that of examples/plain_model or, where LibTorch is there, one of as many
// LibTorch modules. State is all in memory, or all on a drive that is none: the kernel's page cache. `uses`
// is the number of times that a stage is computed in a step.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "aio/backend.h"
#include "aio/inline_backend.h"
#include "plain_compute.h"
#include "zero/compute/device.h"
#include "zero/engine/driven_engine.h"
#include "zero/engine/engine.h"
#ifdef PENSTOCK_BENCH_TORCH
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include "zero/compute/libtorch/libtorch_compute.h"
#include "zero/compute/libtorch/model.h"
#include "zero/compute/libtorch/threads.h"
#endif

namespace penstock {
namespace {

constexpr plain::Shape kShape = {.layers = 64, .width = 16};
constexpr int kUses = 2 * kShape.layers - 1;

zero::Batch MakeBatch() {
  auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(kShape.width), 0.1F);
  const zero::TensorView view = {values->data(), zero::ElementType::kFp32, {1, kShape.width}};
  zero::Batch batch;
  batch.tensors = {{"inputs", view}, {"targets", view}};
  batch.owner = values;
  return batch;
}

// Makes each transfer at once in the page cache, and syncs nothing.
class CachedBackend final : public aio::InlineBackend {
 public:
  std::string_view name() const override { return "cached"; }

 private:
  int64_t Transfer(aio::Piece& piece) override {
    if (piece.op == aio::Op::kSync) return 0;
    fcntl(piece.fd(), F_SETFL, fcntl(piece.fd(), F_GETFL) & ~O_DIRECT);
    return Whole(piece);
  }
};

// In the working directory, on a file system with O_DIRECT; goes with it.
class Directory {
 public:
  Directory() : path_("compute_bench-" + std::to_string(getpid())) {}
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

zero::EngineOptions Options(bool on_drive, const Directory& directory) {
  zero::EngineOptions options;
  options.dtype = kernels::DType::kFp32;
  options.storage.offload = on_drive ? zero::OffloadDevice::kNvme : zero::OffloadDevice::kNone;
  if (on_drive) {
    options.storage.state_dirs = {directory.path()};
    options.storage.io.backend_factory = [] { return std::make_unique<CachedBackend>(); };
  }
  options.storage.overwrite = true;
  options.example = MakeBatch();
  return options;
}

void Report(benchmark::State& state) {
  state.SetItemsProcessed(state.iterations() * kUses);
  state.counters["uses"] = kUses;
}

// Makes the model; a contestant in two forms.
using Maker = std::function<std::shared_ptr<zero::Compute>()>;

std::shared_ptr<zero::Compute> Plain() { return std::make_shared<plain::PlainCompute>(kShape); }

#ifdef PENSTOCK_BENCH_TORCH
// Layers and loss as PlainCompute has them.
std::shared_ptr<zero::Compute> LibTorch() {
  zero::SetIntraOpThreads(1);
  zero::Model model;
  for (int i = 0; i < kShape.layers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    const int block = model.AddBlock(
        name, "layer", [] { return std::make_shared<torch::nn::LinearImpl>(kShape.width, kShape.width); });
    model.AddStage(name, block,
                   [i](torch::nn::Module& module, const torch::Tensor& x, const zero::TensorBatch& batch) {
                     const torch::Tensor& rows = i == 0 ? batch.inputs : x;
                     const torch::Tensor out = module.as<torch::nn::LinearImpl>()->forward(rows).tanh();
                     return i + 1 < kShape.layers ? out : torch::nn::functional::mse_loss(out, batch.targets);
                   });
  }
  return std::make_shared<zero::LibTorchCompute>(std::move(model));
}
#endif

void StepOfACompute(benchmark::State& state, const Maker& maker) {
  const Directory directory;
  auto engine = zero::Engine::Create(maker(), Options(state.range(0) != 0, directory));
  if (!engine.ok()) return state.SkipWithError(std::string(engine.status().message()).c_str());
  const zero::Batch batch = MakeBatch();
  for (auto _ : state) {
    if (!(*engine)->Step({batch}, zero::Next::kTrain).ok()) return state.SkipWithError("a step failed");
  }
  Report(state);
}

// One use, on the owner's thread.
absl::Status One(zero::DrivenCompute& driven, zero::Compute& owner, zero::Direction direction, int stage) {
  auto entered = driven.Enter(direction, tiering::StageIndex(stage), 0);
  if (!entered.ok()) return entered.status();
  const zero::StageUse use = entered->use();
  if (direction == zero::Direction::kForward) {
    const absl::Status status = owner.Forward(use, entered->weights());
    return status.ok() ? driven.Leave(*std::move(entered), {}) : status;
  }
  absl::Status status = owner.Backward(use, entered->weights());
  if (!status.ok()) return status;
  const auto gradients = owner.Gradients(use, tiering::BlockIndex(stage));
  if (!gradients.ok()) return gradients.status();
  zero::DrivenCompute::Result result;
  result.gradients = {{tiering::BlockIndex(stage), {gradients->begin(), gradients->end()}}};
  if (use.last) {
    const auto losses = owner.Losses();
    if (!losses.ok()) return losses.status();
    result.loss = losses->front();
  }
  status = driven.Leave(*std::move(entered), std::move(result));
  owner.Release(use);
  return status;
}

void StepOfADrivenModel(benchmark::State& state, const Maker& maker) {
  const std::shared_ptr<zero::Compute> owner = maker();
  const Directory directory;
  zero::EngineOptions options = Options(state.range(0) != 0, directory);
  auto measured = owner->Measure({zero::HostDevice().get(), kernels::DType::kFp32, 1}, MakeBatch(), {});
  if (!measured.ok()) return state.SkipWithError(std::string(measured.status().message()).c_str());
  std::unique_ptr<zero::InitialReader> reader;
  options.initial_values = [&](int block, int64_t first, int64_t n, float* to) -> absl::Status {
    if (first == 0) {
      auto of_block = owner->Initial(tiering::BlockIndex(block), 1);
      if (!of_block.ok()) return of_block.status();
      reader = *std::move(of_block);
    }
    return reader->Read(first, n, to);
  };
  for (tiering::StageShape& stage : measured->graph.stages) stage.input_bytes = 0;
  auto engine = zero::DrivenEngine::Create(*std::move(measured), std::move(options));
  if (!engine.ok()) return state.SkipWithError(std::string(engine.status().message()).c_str());
  zero::DrivenCompute& driven = (*engine)->compute();
  owner->ThreadBegins();
  const zero::Batch batch = MakeBatch();
  for (auto _ : state) {
    absl::Status status = (*engine)->Begin(zero::Next::kTrain);
    if (status.ok()) status = owner->Begin({}, {batch});
    for (int s = 0; s + 1 < kShape.layers && status.ok(); ++s)
      status = One(driven, *owner, zero::Direction::kForward, s);
    for (int s = kShape.layers - 1; s >= 0 && status.ok(); --s)
      status = One(driven, *owner, zero::Direction::kBackward, s);
    if (status.ok()) status = (*engine)->Finish().status();
    if (!status.ok()) return state.SkipWithError(std::string(status.message()).c_str());
  }
  Report(state);
}

void InMemoryAndOnADrive(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgName("drive")->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMicrosecond);
}
BENCHMARK_CAPTURE(StepOfACompute, plain, Plain)->Apply(InMemoryAndOnADrive);
BENCHMARK_CAPTURE(StepOfADrivenModel, plain, Plain)->Apply(InMemoryAndOnADrive);
#ifdef PENSTOCK_BENCH_TORCH
BENCHMARK_CAPTURE(StepOfACompute, libtorch, LibTorch)->Apply(InMemoryAndOnADrive);
BENCHMARK_CAPTURE(StepOfADrivenModel, libtorch, LibTorch)->Apply(InMemoryAndOnADrive);
#endif

}  // namespace
}  // namespace penstock

BENCHMARK_MAIN();
