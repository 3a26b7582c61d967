// 100 steps beside LibTorch's own optimizers, gradients and all in fp32. LibTorch adds up in the same order
// but its compiler decides where to fuse, hence a bound in units in the last place, and a count of how many
// are equal.
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "kernels/optimizer.h"
#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::torch_optimizer_test {
namespace {

constexpr size_t kN = 4099;  // a tail for every vector width
constexpr int kSteps = 100;

// Runs `theirs` and `ours(step, gradient)` side by side on the same gradients; compares parameters after each
// step. Returns the share of elements that are equal to the bit at the end.
template <class Ours>
double Compare(torch::optim::Optimizer* theirs, torch::Tensor* param, std::vector<float>* p, double most_ulps,
               const Ours& ours) {
  double share = 0;
  for (int t = 1; t <= kSteps; ++t) {
    const std::vector<float> g = Random(kN, Values::kNormal, 1000 + static_cast<uint64_t>(t));
    param->mutable_grad() = torch::from_blob(const_cast<float*>(g.data()), {kN}, torch::kFloat32).clone();
    theirs->step();
    ours(t, g.data());
    const float* expected = param->data_ptr<float>();
    size_t equal = 0;
    for (size_t i = 0; i < kN; ++i) {
      // Parameters pass through zero; errors are of the size of what was added up: about one.
      const double off = std::fabs(static_cast<double>((*p)[i]) - expected[i]);
      const double scale = std::fmax(std::fabs(expected[i]), 1.0);
      EXPECT_LE(off, most_ulps * 0x1p-23 * scale) << "step " << t << " element " << i;
      if (off > most_ulps * 0x1p-23 * scale) return 0;
      equal += SameFloat((*p)[i], expected[i]);
    }
    share = static_cast<double>(equal) / kN;
  }
  ::testing::Test::RecordProperty("equal_share", std::to_string(share));
  return share;
}

struct Fixture {
  std::vector<float> p = Random(kN, Values::kNormal, 1);
  std::vector<float> m = std::vector<float>(kN, 0.0f), v = std::vector<float>(kN, 0.0f);
  torch::Tensor param = torch::from_blob(p.data(), {kN}, torch::kFloat32).clone().set_requires_grad(true);

  UpdateArrays Arrays(const float* g) {
    UpdateArrays a;
    a.n = kN;
    a.param = p.data();
    a.grad = g;
    a.m = m.data();
    a.v = v.data();
    return a;
  }
};

// ATen's vector code for the machine decides whether it fuses; where it does (AVX2 and up), the bits are the
// same.
bool AtenFuses() { return BestSimdLevel() >= SimdLevel::kAvx2; }

TEST(TorchOptimizer, AdamW) {
  for (const double decay : {0.0, 0.1}) {
    Fixture f;
    torch::optim::AdamW theirs(
        {f.param}, torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).eps(1e-8).weight_decay(decay));
    const double share = Compare(&theirs, &f.param, &f.p, 4.0, [&](int t, const float* g) {
      const AdamOptions options = {
          .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = decay};
      AdamWFp32(MakeAdamStep(options, t), f.p.data(), f.m.data(), f.v.data(), g, kN);
    });
    if (AtenFuses()) {
      EXPECT_EQ(share, 1.0) << "weight decay " << decay;
    }
  }
}

TEST(TorchOptimizer, Adam) {
  for (const double decay : {0.0, 0.1}) {
    Fixture f;
    torch::optim::Adam theirs({f.param}, torch::optim::AdamOptions(1e-3).weight_decay(decay));
    const double share = Compare(&theirs, &f.param, &f.p, 4.0, [&](int t, const float* g) {
      const AdamOptions options = {.weight_decay = decay, .mode = AdamMode::kAdam};
      ApplyUpdate(MakeAdamStep(options, t), f.Arrays(g));
    });
    if (AtenFuses()) {
      EXPECT_EQ(share, 1.0) << "weight decay " << decay;
    }
  }
}

TEST(TorchOptimizer, Adagrad) {
  for (const double decay : {0.0, 0.1}) {
    Fixture f;
    torch::optim::Adagrad theirs(
        {f.param}, torch::optim::AdagradOptions(1e-2).lr_decay(0.01).weight_decay(decay).eps(1e-10));
    const double share = Compare(&theirs, &f.param, &f.p, 4.0, [&](int t, const float* g) {
      const AdagradOptions options = {.lr = 1e-2, .lr_decay = 0.01, .eps = 1e-10, .weight_decay = decay};
      ApplyUpdate(MakeAdagradStep(options, t), f.Arrays(g));
    });
    if (AtenFuses()) {
      EXPECT_EQ(share, 1.0) << "weight decay " << decay;
    }
  }
}

TEST(TorchOptimizer, Sgd) {
  for (const double momentum : {0.0, 0.9}) {
    for (const bool nesterov : {false, true}) {
      if (nesterov && momentum == 0.0) continue;
      for (const double dampening : {0.0, 0.1}) {
        if (nesterov && dampening != 0.0) continue;
        Fixture f;
        torch::optim::SGD theirs(
            {f.param},
            torch::optim::SGDOptions(1e-2).momentum(momentum).dampening(dampening).weight_decay(0.1).nesterov(
                nesterov));
        const double share = Compare(&theirs, &f.param, &f.p, 4.0, [&](int t, const float* g) {
          const SgdOptions options = {.lr = 1e-2,
                                      .momentum = momentum,
                                      .dampening = dampening,
                                      .weight_decay = 0.1,
                                      .nesterov = nesterov};
          ApplyUpdate(MakeSgdStep(options, t), f.Arrays(g));
        });
        if (AtenFuses()) {
          EXPECT_EQ(share, 1.0) << momentum << " " << nesterov << " " << dampening;
        }
      }
    }
  }
}

}  // namespace
}  // namespace penstock::kernels::torch_optimizer_test
