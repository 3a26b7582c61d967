// Attention in blocks of queries against the formula in one piece.
#include "models/families/causal_attention.h"

#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>
#include <vector>

#include "zero/compute/libtorch/tensor_allocator.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::models::causal_attention_test {
namespace {

using torch::Tensor;

Tensor InOnePiece(const Tensor& q, const Tensor& k, const Tensor& v) {
  const int64_t length = q.size(1);
  const Tensor future = torch::ones({length, length}, torch::kBool).triu_(1);
  const Tensor scores = torch::bmm(q, k.transpose(1, 2)) / std::sqrt(static_cast<double>(q.size(2)));
  return torch::bmm(torch::softmax(scores.masked_fill(future, -std::numeric_limits<double>::infinity()), -1),
                    v);
}

Tensor InBlocks(const Tensor& q, const Tensor& k, const Tensor& v) {
  return CausalAttention(q, k, v, {.scale = 1 / std::sqrt(static_cast<double>(q.size(2)))});
}

struct Results {
  Tensor out;
  std::vector<Tensor> gradients;
};

template <typename Attention>
Results Differentiate(Attention attention, const std::vector<Tensor>& inputs, const Tensor& out_gradient,
                      torch::ScalarType type) {
  std::vector<Tensor> x;
  for (const Tensor& input : inputs) x.push_back(input.detach().to(type).clone().set_requires_grad(true));
  Results results{attention(x[0], x[1], x[2]), {}};
  results.out.backward(out_gradient.to(type));
  for (const Tensor& input : x) results.gradients.push_back(input.grad());
  return results;
}

std::vector<Tensor> Inputs(int64_t length) {
  torch::manual_seed(length);
  std::vector<Tensor> inputs;
  for (int i = 0; i < 4; ++i)  // strided, as a batch of one gives them
    inputs.push_back(torch::randn({length, 3, 8}, torch::kFloat64).transpose(0, 1));
  return inputs;
}

TEST(CausalAttention, IsTheFormula) {
  for (const int64_t length : {int64_t{1}, int64_t{7}, kWholeLength, kWholeLength + 1, 3 * kQueryRows - 1,
                               3 * kQueryRows, 3 * kQueryRows + 1}) {
    SCOPED_TRACE(length);
    const std::vector<Tensor> inputs = Inputs(length);
    const Results blocks = Differentiate(InBlocks, inputs, inputs[3], torch::kFloat64);
    const Results whole = Differentiate(InOnePiece, inputs, inputs[3], torch::kFloat64);
    EXPECT_TRUE(torch::allclose(blocks.out, whole.out, 1e-12, 1e-12));
    for (size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(torch::allclose(blocks.gradients[i], whole.gradients[i], 1e-11, 1e-11)) << i;
  }
}

// Heads that share keys: as if the keys were there for each of them.
TEST(CausalAttention, GroupsOfQueriesShareTheirKeys) {
  constexpr int64_t kGroup = 3;
  const auto repeated = [](const Tensor& q, const Tensor& k, const Tensor& v) {
    return InOnePiece(q, k.repeat_interleave(kGroup, 0), v.repeat_interleave(kGroup, 0));
  };
  for (const int64_t length : {int64_t{1}, int64_t{7}, kWholeLength, kWholeLength + 1, 3 * kQueryRows + 1}) {
    SCOPED_TRACE(length);
    torch::manual_seed(length);
    std::vector<Tensor> inputs;
    for (const int64_t heads : {2 * kGroup, int64_t{2}, int64_t{2}, 2 * kGroup})
      inputs.push_back(torch::randn({heads, length, 8}, torch::kFloat64));
    const Results ours = Differentiate(InBlocks, inputs, inputs[3], torch::kFloat64);
    const Results whole = Differentiate(repeated, inputs, inputs[3], torch::kFloat64);
    EXPECT_TRUE(torch::allclose(ours.out, whole.out, 1e-12, 1e-12));
    for (size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(torch::allclose(ours.gradients[i], whole.gradients[i], 1e-11, 1e-11)) << i;
  }
}

// Windows and caps, with and without groups, over and under the length that is one piece.
TEST(CausalAttention, LooksBackOverAWindowUnderACap) {
  for (const auto& [window, cap] : std::vector<std::pair<int64_t, double>>{
           {1, 0}, {5, 0}, {kQueryRows, 0}, {kQueryRows + 7, 0}, {1000, 0}, {0, 2}, {30, 0.5}}) {
    for (const int64_t length : {int64_t{7}, kWholeLength, kWholeLength + 1, 3 * kQueryRows + 1}) {
      SCOPED_TRACE(testing::Message() << window << " of " << length << " under " << cap);
      torch::manual_seed(length);
      std::vector<Tensor> inputs;
      for (const int64_t heads : {4, 2, 2, 4})
        inputs.push_back(torch::randn({heads, length, 8}, torch::kFloat64));
      const auto ours = [w = window, c = cap](const Tensor& q, const Tensor& k, const Tensor& v) {
        return CausalAttention(q, k, v, {.scale = 0.7, .window = w, .cap = c});
      };
      const auto formula = [w = window, c = cap](const Tensor& q, const Tensor& k, const Tensor& v) {
        Tensor scores = torch::bmm(q, k.repeat_interleave(2, 0).transpose(1, 2)) * 0.7;
        if (c > 0) scores = torch::tanh(scores / c) * c;
        const Tensor places = torch::arange(q.size(1));
        const Tensor behind = places.unsqueeze(1) - places.unsqueeze(0);
        Tensor hidden = behind < 0;
        if (w > 0) hidden = hidden | (behind >= w);
        scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
        return torch::bmm(torch::softmax(scores, -1), v.repeat_interleave(2, 0));
      };
      const Results made = Differentiate(ours, inputs, inputs[3], torch::kFloat64);
      const Results exact = Differentiate(formula, inputs, inputs[3], torch::kFloat64);
      EXPECT_TRUE(torch::allclose(made.out, exact.out, 1e-12, 1e-12));
      for (size_t i = 0; i < 3; ++i)
        EXPECT_TRUE(torch::allclose(made.gradients[i], exact.gradients[i], 1e-11, 1e-11)) << i;
      const int64_t last = std::min<int64_t>(length, 40);
      const Tensor end = AttentionOfLast(inputs[0].narrow(1, length - last, last), inputs[1], inputs[2],
                                         {.scale = 0.7, .window = window, .cap = cap});
      EXPECT_TRUE(torch::allclose(end, exact.out.narrow(1, length - last, last), 1e-12, 1e-12));
    }
  }
}

// With the same probabilities dropped the same results, forward and backward; and the share that is asked
// for.
TEST(CausalAttention, DropsOutTheSameForwardAndBackward) {
  constexpr double kDropout = 0.3;
  for (const int64_t length : {kWholeLength, kWholeLength + 1, 3 * kQueryRows + 5}) {
    SCOPED_TRACE(length);
    const std::vector<Tensor> inputs = Inputs(length);
    // What is dropped, found by values that are a unit matrix: the result is the probabilities.
    torch::manual_seed(3);
    const Tensor unit = torch::eye(length, torch::kFloat64).expand({3, length, length}).contiguous();
    const Tensor thinned = CausalAttention(inputs[0], inputs[1], unit, {.scale = 0.25, .dropout = kDropout});
    const Tensor whole = CausalAttention(inputs[0], inputs[1], unit, {.scale = 0.25});
    const Tensor kept = (thinned != 0).to(torch::kFloat64);
    EXPECT_NEAR((kept.sum() / (whole != 0).sum()).item<double>(), 1 - kDropout, 0.01);
    EXPECT_TRUE(torch::allclose(thinned, whole * kept / (1 - kDropout), 1e-12, 1e-15));
    const auto blocks = [](const Tensor& q, const Tensor& k, const Tensor& v) {
      torch::manual_seed(3);
      return CausalAttention(q, k, v, {.scale = 0.25, .dropout = kDropout});
    };
    const auto formula = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
      const Tensor future = torch::ones({length, length}, torch::kBool).triu_(1);
      const Tensor scores = torch::bmm(q, k.transpose(1, 2)) * 0.25;
      const Tensor p =
          torch::softmax(scores.masked_fill(future, -std::numeric_limits<double>::infinity()), -1);
      return torch::bmm(p * kept / (1 - kDropout), v);
    };
    const Results ours = Differentiate(blocks, inputs, inputs[3], torch::kFloat64);
    const Results expected = Differentiate(formula, inputs, inputs[3], torch::kFloat64);
    EXPECT_TRUE(torch::allclose(ours.out, expected.out, 1e-12, 1e-12));
    for (size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(torch::allclose(ours.gradients[i], expected.gradients[i], 1e-11, 1e-11)) << i;
  }
}

double ErrorOf(const Tensor& value, const Tensor& exact) {
  return ((value.to(torch::kFloat64) - exact).norm() / exact.norm()).item<double>();
}

TEST(CausalAttention, RoundsLittleMoreThanInOnePiece) {
  const std::vector<Tensor> drawn = Inputs(5 * kQueryRows);
  std::vector<Tensor> inputs;  // that both types hold
  for (const Tensor& tensor : drawn) inputs.push_back(tensor.to(torch::kBFloat16).to(torch::kFloat64));
  const Results exact = Differentiate(InOnePiece, inputs, inputs[3], torch::kFloat64);
  const Results whole = Differentiate(InOnePiece, inputs, inputs[3], torch::kBFloat16);
  const Results blocks = Differentiate(InBlocks, inputs, inputs[3], torch::kBFloat16);
  EXPECT_EQ(blocks.out.scalar_type(), torch::kBFloat16);
  EXPECT_LE(ErrorOf(blocks.out, exact.out), 1.1 * ErrorOf(whole.out, exact.out));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(blocks.gradients[i].scalar_type(), torch::kBFloat16);
    EXPECT_LE(ErrorOf(blocks.gradients[i], exact.gradients[i]),
              1.25 * ErrorOf(whole.gradients[i], exact.gradients[i]))
        << i;
  }
}

// Memory grows with the length, not with its square.
TEST(CausalAttention, NeverHoldsTheScoresOfAWholeSequence) {
  zero::InstallTensorAllocator();
  constexpr int64_t kLength = 16 * kQueryRows, kHeads = 2, kDepth = 8;
  const auto options = torch::TensorOptions(torch::kFloat32).requires_grad(true);
  const Tensor q = torch::randn({kHeads, kLength, kDepth}, options), k = torch::randn_like(q, options),
               v = torch::randn_like(q, options);
  const auto peak = [&](auto attention) {
    const int64_t before = zero::TensorMemory::Stats().live_bytes;
    zero::TensorMemory::ResetLivePeak();
    attention(q, k, v).sum().backward();
    return zero::TensorMemory::Stats().peak_live_bytes - before;
  };
  constexpr int64_t kScores = kHeads * kLength * kLength * 4;
  EXPECT_GT(peak(InOnePiece), 2 * kScores);
  EXPECT_LT(peak(InBlocks), kScores / 2);
}

}  // namespace
}  // namespace penstock::models::causal_attention_test
