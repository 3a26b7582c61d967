// zero_bench: what the engine costs beside what it does.
//
// - Plan/1000: planning a model of 1000 blocks, its bytes counted from the program itself
// - Execute/1000: one training step of it in virtual time, what a decision of the executor costs (items:
//   operations)
// - UpdateTile/*: one tile as an update worker treats it: check, AdamW, checksums (bytes: read and written)
// - Tensor/kept: a 24 MiB tensor from the counting allocator, beside Tensor/fresh: the same given back each
//   time
// - Step/none, Step/nvme: a training step of a small GPT, everything resident and state on the drive (items:
//   tokens)
// - Commit/*: a commit in percent of a training step, with sync: process and power
// - Checkpoint: a step while a checkpoint is copied over one while none is
#include <benchmark/benchmark.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "aio/program.h"
#include "models/families/gpt.h"
#include "models/families/stages.h"
#include "tiering/plan/plan.h"
#include "tiering/program/executor.h"
#include "tiering/program/program.h"
#include "tiering/simulate/sim_lanes.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/libtorch/tensor_allocator.h"
#include "zero/compute/libtorch/threads.h"
#include "zero/compute/machine_rates.h"
#include "zero/engine/checkpointing.h"
#include "zero/engine/engine.h"
#include "zero/memory/tensor_memory.h"
#include "zero/memory/thread_times.h"

namespace penstock {
namespace {

tiering::ModelGraph Deep(int blocks) {
  tiering::ModelGraph graph;
  for (int b = 0; b < blocks; ++b) {
    graph.blocks.push_back({"layer", 12 << 20, 48 << 20});
    graph.stages.push_back({"layer", tiering::BlockIndex(b), 1 << 20, 4 << 20, 8 << 20, 1e-3, 3e-3});
  }
  return graph;
}

tiering::PlanOptions DeepOptions(const tiering::ModelGraph& graph) {
  tiering::PlanOptions options;
  options.host_memory_budget_bytes = graph.elements() * 2 + (int64_t{1} << 31);
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
    const absl::StatusOr<double> parameters_per_s = zero::MeasureUpdateRate(format, kernels::AdamOptions());
    if (!parameters_per_s.ok())
      return state.SkipWithError(std::string(parameters_per_s.status().message()).c_str());
    state.SetIterationTime(1e6 / *parameters_per_s);
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
  zero::InstallTensorAllocator();
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
  options.storage.offload = offload;
  options.example =
      zero::TensorBatch{torch::zeros({4, 128}, torch::kInt64), torch::zeros({4, 128}, torch::kInt64)};
  options.intra_op_threads = zero::DefaultIntraOpThreads();
  if (offload == zero::OffloadDevice::kNvme) {
    options.storage.state_dirs = {directory};
    options.storage.overwrite = true;
    options.memory.host_memory_budget_bytes = int64_t{96} << 20;
  }
  {
    absl::StatusOr<std::unique_ptr<zero::Engine>> engine =
        zero::CreateEngine(models::MakeGpt({8, 384, 6, 512, 256, 0}), options);
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

// What durability costs a training that streams its state: steps of a GPT of 8 layers, one after the other in
// one run. Counters in percent of a step's time are medians over its steps.
class DurableRun {
 public:
  DurableRun(int64_t width, swap::Sync sync, int64_t checkpoint_every) {
    zero::SetIntraOpThreads(zero::DefaultIntraOpThreads());
    zero::EngineOptions options;
    options.example =
        zero::TensorBatch{torch::zeros({1, 256}, torch::kInt64), torch::zeros({1, 256}, torch::kInt64)};
    options.optimizer.clip = 0;
    options.intra_op_threads = zero::DefaultIntraOpThreads();
    options.storage.state_dirs = {kDirectory};
    options.storage.overwrite = true;
    options.storage.sync = sync;
    options.memory.host_memory_budget_bytes = width * width * 400;
    options.storage.checkpoints = {std::string(kDirectory) + "/kept", checkpoint_every, 1};
    options.hooks.checkpointed = [this](int64_t, const std::string&, const absl::Status& status) {
      ++ended_;  // perhaps when the next one begins
      if (!status.ok()) error_ = status;
    };
    options.hooks.committed = [this, checkpoint_every](const zero::StepResult& result) {
      if (checkpoint_every > 0 && result.step % checkpoint_every == 0) ++begun_;
      return absl::OkStatus();
    };
    options.hooks.observer = [this](tiering::OpId, const tiering::Op& op, double start, double end) {
      if (op.kind == tiering::OpKind::kCommit) commit_seconds_.push_back(end - start);
    };
    example_ = options.example;
    absl::StatusOr<std::unique_ptr<zero::Engine>> engine =
        zero::CreateEngine(models::MakeGpt({8, width, 8, 512, 256, 0}), options);
    if (engine.ok()) engine_ = std::move(*engine);
    error_ = engine.status();
  }
  ~DurableRun() {
    engine_.reset();
    std::filesystem::remove_all(kDirectory);
  }

  // A checkpoint's steps, from that in which its copy began to that in which it ended, and those after them
  // until the next.
  struct Cycle {
    std::vector<double> copied, alone;
  };

  // Its seconds.
  double Step() {
    const int64_t begun = begun_;
    const bool before = begun_ > ended_;
    absl::StatusOr<zero::StepResult> result = engine_->Step({example_}, zero::Next::kTrain);
    error_.Update(result.status());
    if (!result.ok()) return 0;
    if (begun_ > begun) cycles_.emplace_back();
    if (!cycles_.empty()) {
      const bool copied = before || begun_ > ended_;
      (copied ? cycles_.back().copied : cycles_.back().alone).push_back(result->seconds);
    }
    commit_stall_seconds_ = engine_->usage().stall_seconds[static_cast<size_t>(tiering::Stall::kCommit)];
    return result->seconds;
  }
  const absl::Status& error() const { return error_; }
  std::vector<double>& commit_seconds() { return commit_seconds_; }
  double commit_stall_seconds() const { return commit_stall_seconds_; }

  const std::vector<Cycle>& cycles() const { return cycles_; }

 private:
  static constexpr const char* kDirectory = "zero_bench-durable";
  std::unique_ptr<zero::Engine> engine_;
  zero::Batch example_;
  absl::Status error_;
  int64_t begun_ = 0, ended_ = 0;  // checkpoints
  std::vector<Cycle> cycles_;
  std::vector<double> commit_seconds_;
  double commit_stall_seconds_ = 0;
};

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

void Commit(benchmark::State& state, swap::Sync sync) {
  DurableRun run(/*width=*/800, sync, 0);
  for (int warm = 0; warm < 3 && run.error().ok(); ++warm) run.Step();
  const double stalled = run.commit_stall_seconds();
  run.commit_seconds().clear();
  std::vector<double> steps;
  double total = 0;
  for (auto _ : state) {
    if (run.error().ok()) steps.push_back(run.Step());
    state.SetIterationTime(steps.empty() ? 0 : steps.back());
    total += steps.empty() ? 0 : steps.back();
  }
  if (!run.error().ok()) return state.SkipWithError(std::string(run.error().message()).c_str());
  const double step = Quantile(steps, 0.5);
  state.counters["commit_ms"] = 1e3 * Quantile(run.commit_seconds(), 0.5);
  state.counters["commit_ms_p90"] = 1e3 * Quantile(run.commit_seconds(), 0.9);
  state.counters["commit_percent"] = 100 * Quantile(run.commit_seconds(), 0.5) / step;
  // What compute waited for it: a commit is under way while the next step's reads and compute are.
  state.counters["stall_percent"] = 100 * (run.commit_stall_seconds() - stalled) / total;
}
BENCHMARK_CAPTURE(Commit, process, swap::Sync::kProcess)
    ->Unit(benchmark::kMillisecond)
    ->UseManualTime()
    ->Iterations(25);
BENCHMARK_CAPTURE(Commit, power, swap::Sync::kPower)
    ->Unit(benchmark::kMillisecond)
    ->UseManualTime()
    ->Iterations(25);

// Steps during which a checkpoint is copied over steps during which none is, taking turns in one run: each
// over the median of its turn's others, since drives drift; counters are medians over the turns. `alone_*`:
// the same of steps without a copy, which is what noise alone makes of it.
void Checkpoint(benchmark::State& state) {
  constexpr size_t kAlone = 12;
  DurableRun run(/*width=*/640, swap::Sync::kProcess, zero::kSpreadSteps + static_cast<int64_t>(kAlone));
  for (auto _ : state) state.SetIterationTime(run.error().ok() ? run.Step() : 0);
  if (!run.error().ok()) return state.SkipWithError(std::string(run.error().message()).c_str());
  std::vector<double> first, last, middle, alone;
  for (const DurableRun::Cycle& cycle : run.cycles()) {
    if (cycle.alone.size() + 1 < kAlone / 2 || cycle.copied.size() < 3) continue;  // cut short by the end
    const double base = Quantile(cycle.alone, 0.5);
    first.push_back(cycle.copied.front() / base);
    last.push_back(cycle.copied.back() / base);
    for (size_t i = 1; i + 1 < cycle.copied.size(); ++i) middle.push_back(cycle.copied[i] / base);
    for (const double each : cycle.alone) alone.push_back(each / base);
  }
  state.counters["checkpoints"] = static_cast<double>(first.size());
  state.counters["first"] = Quantile(first, 0.5);
  state.counters["last"] = Quantile(last, 0.5);
  for (const auto& [name, q] : {std::pair{"p50", 0.5}, {"p90", 0.9}}) {
    state.counters[std::string("middle_") + name] = Quantile(middle, q);
    state.counters[std::string("alone_") + name] = Quantile(alone, q);
  }
}
BENCHMARK(Checkpoint)
    ->Unit(benchmark::kMillisecond)
    ->UseManualTime()
    ->Iterations(9 * (zero::kSpreadSteps + 12));

}  // namespace
}  // namespace penstock

int main(int argc, char** argv) {
  penstock::aio::IgnoreFileSizeSignal();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
