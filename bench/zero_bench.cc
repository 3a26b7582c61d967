// zero_bench: what the engine costs beside what it does.
//
//   Plan/1000         planning a model of 1000 blocks, its bytes counted from the program itself
//   Execute/1000      one training step of it in virtual time: what a decision of the executor costs (items:
//   operations) UpdateTile/*      one tile as an update worker treats it: check, AdamW, checksums (bytes:
//   read and written) Tensor/kept       a 24 MiB tensor from the counting allocator, beside Tensor/fresh: the
//   same given back each time Step/none, Step/nvme   a training step of a small GPT, everything resident and
//   state on the drive (items: tokens)
#include <benchmark/benchmark.h>

#include <filesystem>
#include <string>

#include "tiering/executor.h"
#include "tiering/plan.h"
#include "tiering/program.h"
#include "tiering/sim_lanes.h"
#include "tools/gpt.h"
#include "zero/engine.h"
#include "zero/measure.h"
#include "zero/tensor_memory.h"
#include "zero/threads.h"

namespace penstock {
namespace {

tiering::ModelGraph Deep(int blocks) {
  tiering::ModelGraph graph;
  for (int b = 0; b < blocks; ++b) {
    graph.blocks.push_back({"layer", 12 << 20, 48 << 20});
    graph.stages.push_back({"layer", b, 1 << 20, 4 << 20, 8 << 20, 1e-3, 3e-3});
  }
  return graph;
}

tiering::PlanOptions DeepOptions(const tiering::ModelGraph& graph) {
  tiering::PlanOptions options;
  options.host_budget_bytes = graph.elements() * 2 + (int64_t{1} << 31);
  return options;
}

void Plan(benchmark::State& state) {
  const tiering::ModelGraph graph = Deep(static_cast<int>(state.range(0)));
  const tiering::PlanOptions options = DeepOptions(graph);
  for (auto _ : state) {
    absl::StatusOr<tiering::Plan> plan = tiering::MakePlan(graph, options);
    if (!plan.ok()) state.SkipWithError(std::string(plan.status().message()).c_str());
  }
}
BENCHMARK(Plan)->Arg(1000)->Unit(benchmark::kMillisecond);

void Execute(benchmark::State& state) {
  const tiering::ModelGraph graph = Deep(static_cast<int>(state.range(0)));
  const absl::StatusOr<tiering::Plan> plan = tiering::MakePlan(graph, DeepOptions(graph));
  if (!plan.ok()) return state.SkipWithError(std::string(plan.status().message()).c_str());
  int64_t operations = 0;
  for (auto _ : state) {
    tiering::ProgramBuilder builder(graph, *plan, 1);
    tiering::SimLanes lanes(*plan, tiering::MachineModel());
    tiering::Executor executor(&lanes);
    executor.Append(builder.Append(tiering::Pass::kTrain));
    executor.Append(builder.Append(tiering::Pass::kTrain));
    executor.OpenGate(2);
    if (!executor.RunUntilIdle().ok()) state.SkipWithError("the program did not run");
    operations += builder.next_id();
  }
  state.SetItemsProcessed(operations);
}
BENCHMARK(Execute)->Arg(1000)->Unit(benchmark::kMillisecond);

void UpdateTile(benchmark::State& state, kernels::DType weights, kernels::StateType states) {
  const zero::TileFormat format = {.weights = weights, .states = states, .moments = {}};
  for (auto _ : state) {
    const double parameters_per_s = zero::MeasureUpdateRate(format, kernels::AdamOptions());
    state.SetIterationTime(1e6 / parameters_per_s);
  }
  const tiering::Precision precision = format.precision();
  constexpr int64_t kElements = 1'000'000;
  state.SetBytesProcessed(state.iterations() *
                          (2 * precision.UnpaddedBytes(kElements) + kElements * precision.gradient_bytes));
}
BENCHMARK_CAPTURE(UpdateTile, bf16, kernels::DType::kBf16, kernels::StateType::kFp32)
    ->UseManualTime()
    ->Iterations(20);
BENCHMARK_CAPTURE(UpdateTile, bf16_8bit, kernels::DType::kBf16, kernels::StateType::k8Bit)
    ->UseManualTime()
    ->Iterations(20);
BENCHMARK_CAPTURE(UpdateTile, fp16, kernels::DType::kFp16, kernels::StateType::kFp32)
    ->UseManualTime()
    ->Iterations(20);
BENCHMARK_CAPTURE(UpdateTile, fp32, kernels::DType::kFp32, kernels::StateType::kFp32)
    ->UseManualTime()
    ->Iterations(20);

void Tensor(benchmark::State& state, bool kept) {
  zero::TensorMemory::Install();
  constexpr int64_t kBytes = int64_t{24} << 20;
  for (auto _ : state) {
    torch::Tensor tensor = torch::empty({kBytes}, torch::kUInt8);
    benchmark::DoNotOptimize(tensor.fill_(1).data_ptr());
    tensor = torch::Tensor();
    if (!kept) zero::TensorMemory::Trim();
  }
  state.SetBytesProcessed(state.iterations() * kBytes);
}
BENCHMARK_CAPTURE(Tensor, kept, true);
BENCHMARK_CAPTURE(Tensor, fresh, false);

void Step(benchmark::State& state, zero::OffloadDevice offload) {
  zero::SetIntraOpThreads(zero::DefaultIntraOpThreads());
  const std::string directory = "zero_bench-state";
  zero::EngineOptions options;
  options.offload = offload;
  options.example = {torch::zeros({4, 128}, torch::kInt64), torch::zeros({4, 128}, torch::kInt64)};
  options.intra_op_threads = zero::DefaultIntraOpThreads();
  if (offload == zero::OffloadDevice::kNvme) {
    options.state_dirs = {directory};
    options.overwrite = true;
    options.host_memory_bytes = int64_t{96} << 20;
  }
  {
    absl::StatusOr<std::unique_ptr<zero::Engine>> engine =
        zero::Engine::Create(tools::MakeGpt({8, 384, 6, 512, 256, 0}), options);
    if (!engine.ok()) return state.SkipWithError(std::string(engine.status().message()).c_str());
    for (auto _ : state) {
      absl::StatusOr<zero::StepResult> result = (*engine)->Step({options.example}, zero::Next::kTrain);
      if (!result.ok()) state.SkipWithError(std::string(result.status().message()).c_str());
    }
    const tiering::Usage& usage = (*engine)->usage();
    state.counters["nvme_bytes_per_param"] =
        benchmark::Counter(static_cast<double>(usage.bytes[0] + usage.bytes[1]) /
                               static_cast<double>((*engine)->plan().parameters),
                           benchmark::Counter::kAvgIterations);
  }
  state.SetItemsProcessed(state.iterations() * 4 * 128);
  std::filesystem::remove_all(directory);
}
BENCHMARK_CAPTURE(Step, none, zero::OffloadDevice::kNone)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->Iterations(10);
BENCHMARK_CAPTURE(Step, nvme, zero::OffloadDevice::kNvme)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->Iterations(10);

}  // namespace
}  // namespace penstock

BENCHMARK_MAIN();
