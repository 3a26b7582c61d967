// What it costs that a model's owner drives it (zero/compute/driven_compute.h): steps of the hand-written
// model of examples/plain_model, so small that little is computed; the same as a Compute and driven from a
// thread of its owner's. State is all in memory, or all on a drive that is none: the kernel's page cache.
// `uses` is the number of times that a stage is computed in a step.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
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

void StepOfACompute(benchmark::State& state) {
  const Directory directory;
  auto engine = zero::Engine::Create(std::make_shared<plain::PlainCompute>(kShape),
                                     Options(state.range(0) != 0, directory));
  if (!engine.ok()) return state.SkipWithError(std::string(engine.status().message()).c_str());
  const zero::Batch batch = MakeBatch();
  for (auto _ : state) {
    if (!(*engine)->Step({batch}, zero::Next::kTrain).ok()) return state.SkipWithError("a step failed");
  }
  Report(state);
}
BENCHMARK(StepOfACompute)->ArgName("drive")->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMicrosecond);

// One use, on the owner's thread.
absl::Status One(zero::DrivenCompute& driven, plain::PlainCompute& plain, zero::Direction direction,
                 int stage) {
  auto entered = driven.Enter(direction, tiering::StageIndex(stage), 0);
  if (!entered.ok()) return entered.status();
  const zero::StageUse use = entered->use();
  if (direction == zero::Direction::kForward) {
    const absl::Status status = plain.Forward(use, entered->weights());
    return status.ok() ? driven.Leave(*std::move(entered), {}) : status;
  }
  absl::Status status = plain.Backward(use, entered->weights());
  if (!status.ok()) return status;
  const auto gradients = plain.Gradients(use, tiering::BlockIndex(stage));
  zero::DrivenCompute::Result result;
  result.gradients = {{tiering::BlockIndex(stage), {gradients->begin(), gradients->end()}}};
  if (use.last) result.loss = plain.Losses()->front();
  status = driven.Leave(*std::move(entered), std::move(result));
  plain.Release(use);
  return status;
}

void StepOfADrivenModel(benchmark::State& state) {
  plain::PlainCompute plain(kShape);
  const Directory directory;
  zero::EngineOptions options = Options(state.range(0) != 0, directory);
  std::unique_ptr<zero::InitialReader> reader;
  options.initial_values = [&](int block, int64_t first, int64_t n, float* to) {
    if (first == 0) reader = *plain.Initial(tiering::BlockIndex(block), 1);
    return reader->Read(first, n, to);
  };
  auto measured = plain.Measure({zero::HostDevice().get(), kernels::DType::kFp32, 1}, MakeBatch(), {});
  for (tiering::StageShape& stage : measured->graph.stages) stage.input_bytes = 0;
  auto engine = zero::DrivenEngine::Create(*std::move(measured), std::move(options));
  if (!engine.ok()) return state.SkipWithError(std::string(engine.status().message()).c_str());
  zero::DrivenCompute& driven = (*engine)->compute();
  for (auto _ : state) {
    absl::Status status = (*engine)->Begin(zero::Next::kTrain);
    if (status.ok()) status = plain.Begin({}, {MakeBatch()});
    for (int s = 0; s + 1 < kShape.layers && status.ok(); ++s)
      status = One(driven, plain, zero::Direction::kForward, s);
    for (int s = kShape.layers - 1; s >= 0 && status.ok(); --s)
      status = One(driven, plain, zero::Direction::kBackward, s);
    if (status.ok()) status = (*engine)->Finish().status();
    if (!status.ok()) return state.SkipWithError(std::string(status.message()).c_str());
  }
  Report(state);
}
BENCHMARK(StepOfADrivenModel)->ArgName("drive")->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace penstock

BENCHMARK_MAIN();
