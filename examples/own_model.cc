// Trains a model of your own, whose training state is larger than the memory it is given.
//
//   own_model [STATE_DIR]          STATE_DIR on a local disk; default own-model-state, below the current one
//
// The model is a residual network that tells ten kinds of small noisy pictures apart: 6.4 million
// parameters, so 73 MiB of weights, momenta and variances, in 20 MiB of memory. Its modules are plain
// torch::nn modules: they know nothing of Penstock. What it takes is a list of blocks (what is fetched and
// released as one) and a list of stages (in which order they are used). Batches have names, inner stages have
// losses of their own, and BatchNorm's statistics are kept. The program trains 20 steps, lets go of
// everything, and resumes from the drive to step 40, as if a kill had come between.
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <random>
#include <string>

#include "zero/compute/libtorch/create_engine.h"
#include "zero/engine/engine.h"

namespace zero = penstock::zero;

constexpr int64_t kPixels = 16 * 16, kWidth = 256, kLayers = 12, kKinds = 10, kPictures = 64;
constexpr int64_t kBudget = 20 << 20;

// Modules as you would write them anyway. BatchNorm's statistics are buffers that training changes.
struct StemImpl : torch::nn::Module {
  StemImpl() {
    linear = register_module("linear", torch::nn::Linear(kPixels, kWidth));
    norm = register_module("norm", torch::nn::BatchNorm1d(kWidth));
  }
  torch::Tensor forward(const torch::Tensor& pictures) { return norm(linear(pictures)); }

  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

struct ResidualImpl : torch::nn::Module {
  ResidualImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::relu(up(norm(x)))); }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};

zero::Model MakeModel() {
  zero::Model model;
  // What a resumed run must agree on; a state directory of another model is refused.
  model.identity = {{"model", "residual"}, {"layers", kLayers}, {"width", kWidth}};

  // A stage is a function of the list that the stage before it returns; it sees its block and the batch.
  const int stem = model.AddBlock("stem", "stem", [] { return std::make_shared<StemImpl>(); });
  model.AddStage("stem", stem, [](zero::StageCall& call, const zero::Values&) -> zero::Values {
    return {call.module<StemImpl>().forward(call.batch()["pictures"])};
  });
  // A ready-made module is a block too.
  const auto head = [] { return std::make_shared<torch::nn::LinearImpl>(kWidth, kKinds); };
  const auto loss = [](zero::StageCall& call, const torch::Tensor& x) {
    return torch::cross_entropy_loss(call.module<torch::nn::LinearImpl>().forward(x), call.batch()["kinds"]);
  };
  for (int64_t i = 0; i < kLayers; ++i) {
    if (i == kLayers / 2) {
      // In the middle a head of its own, whose loss counts a little.
      const int middle = model.AddBlock("middle", "", head);
      model.AddStage("middle", middle, [loss](zero::StageCall& call, const zero::Values& x) {
        call.AddLoss("middle", 0.1 * loss(call, x[0]));
        return x;
      });
    }
    const std::string name = "layer." + std::to_string(i);
    // Blocks of one kind ("layer") have the same shapes: one is measured for all of them.
    const int layer = model.AddBlock(name, "layer", [] { return std::make_shared<ResidualImpl>(); });
    model.AddStage(name, layer, zero::Apply<ResidualImpl>);  // of one tensor
  }
  // The last stage returns the loss.
  const int last = model.AddBlock("head", "", head);
  model.AddStage("loss", last, [loss](zero::StageCall& call, const zero::Values& x) -> zero::Values {
    return {loss(call, x[0])};
  });
  return model;
}

// The pictures of a step: a pattern for each kind, in noise. The same step always gives the same pictures, so
// that a resumed run sees what it would have seen.
zero::TensorBatch MakeBatch(int64_t step) {
  std::mt19937 random(static_cast<uint32_t>(step));
  std::normal_distribution<float> noise(0, 1);
  torch::Tensor pictures = torch::empty({kPictures, kPixels});
  torch::Tensor kinds = torch::empty({kPictures}, torch::kInt64);
  for (int64_t i = 0; i < kPictures; ++i) {
    const int64_t kind = static_cast<int64_t>(random() % kKinds);
    kinds.data_ptr<int64_t>()[i] = kind;
    float* picture = pictures.data_ptr<float>() + i * kPixels;
    for (int64_t p = 0; p < kPixels; ++p) {
      picture[p] = noise(random) + ((p / 16) % kKinds == kind || (p % 16) % kKinds == kind ? 1.0f : 0.0f);
    }
  }
  zero::TensorBatch batch;
  batch.named = {{"pictures", pictures}, {"kinds", kinds}};
  return batch;
}

// Trains up to step `last`; returns the loss of that step, or -1.
double Train(const std::string& directory, bool resume, int64_t last) {
  zero::EngineOptions options;
  options.storage.state_dirs = {directory};  // several drives: several directories
  options.memory.host_memory_budget_bytes = kBudget;
  options.dtype = penstock::kernels::DType::kFp32;
  options.example = MakeBatch(0);  // the shapes to plan for
  options.optimizer.algorithm = penstock::kernels::AdamOptions{.lr = 1e-3};
  options.resume.enabled = resume;
  options.storage.overwrite = !resume;
  options.hooks.planned =
      [](const zero::EnginePlan& plan) {  // what it is going to take; an error here would end it
        std::printf("%lld parameters, %.1f MiB of state, a budget of %.1f MiB (%.1f would do)\n",
                    static_cast<long long>(plan.parameters),
                    static_cast<double>(plan.state_bytes) / (1 << 20),
                    static_cast<double>(kBudget) / (1 << 20),
                    static_cast<double>(plan.plan.least_host_memory_bytes) / (1 << 20));
        return absl::OkStatus();
      };
  absl::StatusOr<std::unique_ptr<zero::Engine>> engine = zero::CreateEngine(MakeModel(), options);
  if (!engine.ok()) {
    std::fprintf(stderr, "own_model: %s\n", std::string(engine.status().message()).c_str());
    return -1;
  }
  if (resume) std::printf("resumed from step %lld\n", static_cast<long long>((*engine)->step()));
  double loss = -1;
  while ((*engine)->step() < last) {
    const int64_t step = (*engine)->step() + 1;
    // Saying that another step follows lets its reads start while this one still computes.
    const zero::Next next = step < last ? zero::Next::kTrain : zero::Next::kUnknown;
    absl::StatusOr<zero::StepResult> result = (*engine)->Step({MakeBatch(step)}, next);
    if (!result.ok()) {
      std::fprintf(stderr, "own_model: %s\n", std::string(result.status().message()).c_str());
      return -1;
    }
    loss = result->loss;
    if (step % 5 == 0) {
      std::printf("step %3lld  loss %.4f  %.1f MiB read, %.1f MiB written\n", static_cast<long long>(step),
                  loss, static_cast<double>(result->nvme_read_bytes) / (1 << 20),
                  static_cast<double>(result->nvme_write_bytes) / (1 << 20));
    }
  }
  // The last update is applied and committed here. Without it, the state would be that of the step before.
  const absl::Status flushed = (*engine)->Flush();
  if (!flushed.ok()) std::fprintf(stderr, "own_model: %s\n", std::string(flushed.message()).c_str());
  std::printf("at most %.1f MiB of memory managed\n",
              static_cast<double>((*engine)->peak_managed_bytes()) / (1 << 20));
  return flushed.ok() ? loss : -1;
}

int main(int argc, char** argv) {
  const std::string directory = argc > 1 ? argv[1] : "own-model-state";
  const double middle = Train(directory, /*resume=*/false, 20);
  if (middle < 0) return 1;
  const double end = Train(directory, /*resume=*/true, 40);
  if (end < 0) return 1;
  std::printf("loss %.4f after 20 steps, %.4f after 40\n", middle, end);
  return end < middle && end < 2.0 ? 0 : 1;  // guessing gives ln 10 = 2.30
}
