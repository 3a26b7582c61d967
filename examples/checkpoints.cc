// Checkpoints, a kill, and two ways back: trains a model of three blocks and shows that its bits do not
// depend on what happened in between.
//
//   checkpoints [DIR]        DIR on a local disk; default checkpoints-example, below the current one
//
// Three runs of 20 steps:
//   1. without interruption.
//   2. as a process of its own, which keeps a checkpoint every 4 steps and is killed (SIGKILL) in the middle
//   of
//      a step; then resumed from its state directory, from the last step that it had committed.
//   3. from the newest whole checkpoint of the killed run, in host memory, as if the state's drive were lost.
// Losses and parameters of all three are compared bit by bit.
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <bit>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "swap/checkpoint.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/engine/engine.h"

namespace zero = penstock::zero;

constexpr int64_t kWidth = 128, kBlocks = 3, kRows = 32, kSteps = 20, kKillAfter = 6, kCheckpointEvery = 4;

struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};

// examples/own_model.cc explains blocks and stages.
zero::Model MakeModel() {
  zero::Model model;
  model.identity = {{"model", "checkpoints-example"}, {"width", kWidth}, {"blocks", kBlocks}};
  for (int64_t i = 0; i < kBlocks; ++i) {
    const std::string name = "layer." + std::to_string(i);
    const int block = model.AddBlock(name, "layer", [] { return std::make_shared<LayerImpl>(); });
    if (i + 1 < kBlocks) {
      model.AddStage(name, block, zero::Apply<LayerImpl>);
    } else {
      model.AddStage(name, block,
                     [](torch::nn::Module& module, const torch::Tensor& x, const zero::TensorBatch& batch) {
                       return torch::mse_loss(module.as<LayerImpl>()->forward(x), batch.targets);
                     });
    }
  }
  return model;
}

// A function of the step: a resumed run sees what it would have seen.
zero::TensorBatch MakeBatch(int64_t step) {
  zero::TensorBatch batch{torch::empty({kRows, kWidth}), torch::empty({kRows, kWidth})};
  float* inputs = batch.inputs.data_ptr<float>();
  float* targets = batch.targets.data_ptr<float>();
  for (int64_t i = 0; i < kRows * kWidth; ++i) {
    inputs[i] = static_cast<float>((i * 37 + step * 101) % 257) / 257 - 0.5f;
    targets[i] = inputs[i] * inputs[i];
  }
  return batch;
}

zero::EngineOptions Options() {
  zero::EngineOptions options;
  options.memory.host_memory_budget_bytes = 64 << 20;
  options.dtype = penstock::kernels::DType::kFp32;
  options.example = MakeBatch(0);
  options.optimizer.algorithm = penstock::kernels::AdamOptions{.lr = 1e-3};
  return options;
}

// What a run came to. Losses by step: of those that this process made.
struct Result {
  bool ok = false;
  int64_t resumed_from = 0;
  std::map<int64_t, double> losses;
  std::vector<torch::Tensor> parameters;
};

Result Fail(const absl::Status& status) {
  std::fprintf(stderr, "checkpoints: %s\n", std::string(status.message()).c_str());
  return {};
}

// Trains to step `last`.
Result Train(const zero::EngineOptions& options, int64_t last) {
  absl::StatusOr<std::unique_ptr<zero::Engine>> engine = zero::CreateEngine(MakeModel(), options);
  if (!engine.ok()) return Fail(engine.status());
  Result result;
  result.resumed_from = (*engine)->resumed_from().value_or(0);
  while ((*engine)->step() < last) {
    const int64_t step = (*engine)->step() + 1;
    const absl::StatusOr<zero::StepResult> done =
        (*engine)->Step({MakeBatch(step)}, step < last ? zero::Next::kTrain : zero::Next::kUnknown);
    if (!done.ok()) return Fail(done.status());
    result.losses[step] = done->loss;
  }
  // Applies and commits the last update, and waits for a checkpoint that is being written.
  if (const absl::Status flushed = (*engine)->Flush(); !flushed.ok()) return Fail(flushed);
  for (const std::string& name : (*engine)->ParameterNames()) {
    absl::StatusOr<torch::Tensor> value = zero::ReadStateTensor(**engine, name, zero::StateKind::kParameter);
    if (!value.ok()) return Fail(value.status());
    result.parameters.push_back(*std::move(value));
  }
  result.ok = true;
  return result;
}

// The process that is killed. A checkpoint is copied while training goes on, so the kill waits until one is
// whole: then it comes with the next commit, between two writes of some later step.
int TrainAndDie(const std::string& directory) {
  bool kept = false;
  zero::EngineOptions options = Options();
  options.storage.state_dirs = {directory + "/state"};
  options.storage.overwrite = true;
  options.storage.checkpoints = {.parent = directory + "/checkpoints", .every = kCheckpointEvery, .keep = 2};
  options.hooks.checkpointed = [&kept](int64_t step, const std::string& path, const absl::Status& status) {
    if (!status.ok()) {
      std::fprintf(stderr, "checkpoints: no checkpoint of step %lld: %s\n", static_cast<long long>(step),
                   std::string(status.message()).c_str());
      return;
    }
    std::printf("step %lld is kept in %s\n", static_cast<long long>(step), path.c_str());
    std::fflush(stdout);
    kept = true;
  };
  options.hooks.committed = [&kept](const zero::StepResult& step) {
    if (kept && step.step >= kKillAfter) ::raise(SIGKILL);
    return absl::OkStatus();
  };
  if (!Train(options, kSteps - 4).ok) return 1;
  ::raise(SIGKILL);  // the drive was so slow that the one checkpoint came with the flush
  return 1;
}

// Runs TrainAndDie in a process of its own; true if it was killed.
bool RunUntilKilled(const std::string& directory) {
  const pid_t child = ::fork();
  if (child < 0) {
    std::perror("checkpoints: fork");
    return false;
  }
  if (child == 0) {  // LibTorch's threads did not come along: the program starts anew
    ::execl("/proc/self/exe", "checkpoints", "--die", directory.c_str(), nullptr);
    std::perror("checkpoints: exec");
    ::_exit(1);
  }
  int status = 0;
  if (::waitpid(child, &status, 0) != child) return false;
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

// The same bits, in every loss that both have and in every parameter.
bool Same(const Result& a, const Result& b) {
  for (const auto& [step, loss] : b.losses) {
    const auto other = a.losses.find(step);
    if (other == a.losses.end() || std::bit_cast<uint64_t>(other->second) != std::bit_cast<uint64_t>(loss))
      return false;
  }
  if (a.parameters.size() != b.parameters.size()) return false;
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    if (!torch::equal(a.parameters[i], b.parameters[i])) return false;
  }
  return !b.losses.empty();
}

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--die") return TrainAndDie(argv[2]);
  const std::string directory = argc > 1 ? argv[1] : "checkpoints-example";
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    std::fprintf(stderr, "checkpoints: %s: %s\n", directory.c_str(), error.message().c_str());
    return 1;
  }
  const std::string checkpoints = directory + "/checkpoints";

  zero::EngineOptions options = Options();
  options.storage.state_dirs = {directory + "/whole"};
  options.storage.overwrite = true;
  const Result whole = Train(options, kSteps);
  if (!whole.ok) return 1;
  std::printf("without interruption: loss %.6f\n", whole.losses.at(kSteps));

  if (!RunUntilKilled(directory)) {
    std::fprintf(stderr, "checkpoints: the run was to be killed, and was not\n");
    return 1;
  }
  // Found now, since the resumed run may go on keeping some.
  const absl::StatusOr<std::string> newest = penstock::swap::FindCheckpoint(checkpoints);
  if (!newest.ok()) {
    Fail(newest.status());
    return 1;
  }

  options = Options();
  options.storage.state_dirs = {directory + "/state"};
  options.resume.enabled = true;
  const Result resumed = Train(options, kSteps);
  if (!resumed.ok) return 1;
  const bool resumed_same = Same(whole, resumed);
  std::printf("killed, resumed from step %lld: %s\n", static_cast<long long>(resumed.resumed_from),
              resumed_same ? "the same bits" : "OTHER BITS");

  options = Options();
  options.storage.offload =
      zero::OffloadDevice::kCpu;           // needs no drive; any mode opens any other's checkpoint
  options.storage.state_dirs = {*newest};  // only read
  options.resume.enabled = true;
  const Result restored = Train(options, kSteps);
  if (!restored.ok) return 1;
  const bool restored_same = Same(whole, restored);
  std::printf("from %s, step %lld: %s\n", newest->c_str(), static_cast<long long>(restored.resumed_from),
              restored_same ? "the same bits" : "OTHER BITS");
  return resumed_same && restored_same && resumed.resumed_from >= kKillAfter ? 0 : 1;
}
