#include "tests/zero/training.h"

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "kernels/checksum.h"

namespace penstock::zero::testing_support {

TensorBatch MakeBatch(const RunOptions& run, int64_t step, int micro_batch) {
  TensorBatch batch;
  batch.inputs = torch::empty({run.batch, run.seq}, torch::kInt64);
  batch.targets = torch::empty({run.batch, run.seq}, torch::kInt64);
  auto inputs = batch.inputs.accessor<int64_t, 2>();
  auto targets = batch.targets.accessor<int64_t, 2>();
  for (int64_t row = 0; row < run.batch; ++row) {
    const uint64_t mixed = MixSeed(run.seed, static_cast<uint64_t>(step), static_cast<uint64_t>(micro_batch),
                                   static_cast<uint64_t>(row));
    const auto start = static_cast<int64_t>(mixed % 256), stride = static_cast<int64_t>(1 + mixed / 256 % 5);
    for (int64_t i = 0; i < run.seq; ++i) {
      inputs[row][i] = (start + i * stride) % run.model.vocab;
      targets[row][i] = (start + (i + 1) * stride) % run.model.vocab;
    }
  }
  return batch;
}

std::string ScratchDirectory() {
  std::string path = (std::filesystem::current_path() / "scratch-XXXXXX").string();
  if (mkdtemp(path.data()) == nullptr) std::abort();
  return path;
}

ScratchTest::~ScratchTest() { std::filesystem::remove_all(scratch_); }

// Embedding and loss keep their places.
static std::vector<int> ShuffledLayers(int stages, uint64_t seed) {
  std::vector<int> order(static_cast<size_t>(stages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin() + 1, order.end() - 1, std::mt19937_64(seed));
  return order;
}

EngineOptions OptionsOf(const RunOptions& run) {
  EngineOptions options;
  options.storage.offload = run.state_dir.empty() ? run.offload : OffloadDevice::kNvme;
  options.dtype = run.dtype;
  options.micro_batches = run.micro_batches;
  options.example = MakeBatch(run, 0, 0);
  options.optimizer.algorithm =
      run.optimizer.value_or(kernels::AdamOptions{.lr = run.lr, .weight_decay = run.weight_decay});
  options.optimizer.states = run.optimizer_states;
  options.optimizer.loss_scale = run.loss_scale;
  options.optimizer.clip = run.clip;
  options.seed = run.seed;
  options.memory.host_memory_budget_bytes = run.host_memory_budget_bytes;
  options.device = run.device;
  options.memory.device_memory_budget_bytes = run.device_memory_budget_bytes;
  options.optimizer.workers = run.update_workers;
  options.memory.tile_bytes = run.tile_bytes;
  options.optimizer.order = run.update_order;
  options.resume.enabled = run.resume || !run.resume_from.empty();
  options.storage.checkpoints = run.checkpoints;
  options.comm = run.comm;
  if (!run.resume_from.empty()) options.storage.state_dirs = {run.resume_from};
  if (options.storage.offload == OffloadDevice::kNvme) options.storage.state_dirs = {run.state_dir};
  return options;
}

static absl::StatusOr<std::vector<uint64_t>> HashState(Engine& engine) {
  std::vector<uint64_t> hashes;
  for (const std::string& name : engine.ParameterNames()) {
    for (const StateKind kind :
         {StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment, StateKind::kGradient}) {
      const absl::StatusOr<HostTensor> value = engine.ReadState(name, kind);
      if (!value.ok() && value.status().code() != absl::StatusCode::kFailedPrecondition)
        return value.status();
      hashes.push_back(
          value.ok() ? kernels::Checksum(value->view.data, static_cast<size_t>(value->view.bytes())) : 0);
    }
  }
  return hashes;
}

TrainedLosses TrainGpt(const RunOptions& given) {
  TrainedLosses trained;
  RunOptions run = given;
  if (run.state_dir.empty() && run.offload == OffloadDevice::kNvme) run.state_dir = ScratchDirectory();
  EngineOptions options = OptionsOf(run);
  if (run.adjust) run.adjust(options);
  options.hooks.committed = [&](const StepResult& result) {
    trained.committed.push_back(result.step);
    return absl::OkStatus();
  };
  Engine* running = nullptr;
  options.hooks.checkpointed = [&](int64_t step, const std::string& path, const absl::Status& status) {
    trained.checkpoints.push_back({step, running->step(), path, status});
  };
  Model model = run.make_model ? run.make_model() : models::MakeGpt(run.model);
  if (run.poison_step != 0) {
    StageFunction loss = model.stages.back().forward;
    model.stages.back().forward = [loss](torch::nn::Module& module, const torch::Tensor& x,
                                         const TensorBatch& batch) {
      torch::Tensor value = loss(module, x, batch);
      // A row whose first target is repeated marks the batch: see below.
      const bool poisoned = batch.targets[0][0].item<int64_t>() == batch.targets[0][1].item<int64_t>();
      return poisoned ? value * std::numeric_limits<float>::infinity() : value;
    };
  }
  const int stages = static_cast<int>(model.stages.size());
  trained.status = [&]() -> absl::Status {
    absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(std::move(model), options);
    if (!engine.ok()) return engine.status();
    trained.plan = (*engine)->plan().plan;
    trained.input_scratch_bytes = (*engine)->plan().plan.input_scratch_bytes;
    running = engine->get();
    trained.resumed_from = (*engine)->resumed_from().value_or(-1);
    const int64_t last = run.stop_after > 0 ? run.stop_after : run.steps;
    if (run.opened) {
      if (absl::Status status = run.opened(**engine); !status.ok()) return status;
    }
    while ((*engine)->step() < last) {
      const int64_t step = (*engine)->step() + 1;
      std::vector<Batch> batches;
      for (int m = 0; m < run.micro_batches; ++m) {
        TensorBatch batch = MakeBatch(run, step, m * options.world() + options.rank());
        if (step == run.poison_step) batch.targets[0][0] = batch.targets[0][1];
        batches.push_back(batch);
      }
      // A process that goes on with a run starts with the order that the run had.
      if (const int64_t since = step - step % 2; run.shuffles && since > 0) {
        std::vector<int> order = ShuffledLayers(stages, static_cast<uint64_t>(since));
        if (absl::Status status = (*engine)->SetOrder(std::move(order)); !status.ok()) return status;
      }
      const bool evaluates = run.evaluate_every > 0 && step % run.evaluate_every == 0;
      const bool announces = run.announce_always || (step < last && !evaluates);
      absl::StatusOr<StepResult> result =
          (*engine)->Step(std::move(batches), announces ? Next::kTrain : Next::kUnknown);
      if (!result.ok()) return result.status();
      trained.losses.push_back(result->loss);
      trained.norms.push_back(result->grad_norm);
      trained.loss_scales.push_back(result->loss_scale);
      if (result->skipped) trained.skipped.push_back(step);
      if (result->replayed) trained.replayed.push_back(step);
      trained.speculative_share = std::max(trained.speculative_share, result->speculative_share);
      if (run.after_step) {
        if (absl::Status status = run.after_step(**engine); !status.ok()) return status;
      }
      if (!evaluates) continue;
      std::vector<Batch> held_out;
      for (int m = 0; m < 5; ++m) held_out.push_back(MakeBatch(run, -1, m));
      absl::StatusOr<double> evaluation = (*engine)->Evaluate(held_out);
      if (!evaluation.ok()) return evaluation.status();
      trained.evaluations.push_back(*evaluation);
    }
    absl::Status flushed = (*engine)->Flush();
    if (flushed.ok() && run.hashes_state) {
      absl::StatusOr<std::vector<uint64_t>> state = HashState(**engine);
      if (!state.ok()) return state.status();
      trained.state = *std::move(state);
    }
    trained.peak_managed_bytes = (*engine)->peak_managed_bytes();
    trained.peak_device_bytes = (*engine)->peak_device_bytes();
    trained.gds_read_bytes = (*engine)->gds_read_bytes();
    trained.read_bytes = (*engine)->usage().bytes[static_cast<size_t>(tiering::Lane::kRead)];
    trained.write_bytes = (*engine)->usage().bytes[static_cast<size_t>(tiering::Lane::kWrite)];
    return flushed;
  }();
  const std::string message(trained.status.message()), words = "least that works is ";
  if (const size_t at = message.find(words); at != std::string::npos) {
    trained.least_host_memory_bytes = std::stoll(message.substr(at + words.size()));
  }
  if (!run.keep_state && !run.state_dir.empty()) std::filesystem::remove_all(run.state_dir);
  return trained;
}

}  // namespace penstock::zero::testing_support
