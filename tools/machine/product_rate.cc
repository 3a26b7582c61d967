#include "tools/machine/product_rate.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"

namespace penstock::tools {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

ProductRate MeasureProductRate(kernels::DType weights) {
  constexpr int64_t kSize = 1024;
  constexpr double kEnough = 0.3, kMost = 2;  // seconds: without a better one, and in all
  constexpr double kBetter = 0.98;
  const bool bf16 = weights == kernels::DType::kBf16;  // the others compute in fp32
  const torch::NoGradGuard no_graph;
  const torch::Tensor a = torch::ones({kSize, kSize}, bf16 ? torch::kBFloat16 : torch::kFloat32);
  const torch::Tensor b = a.clone();
  torch::Tensor product = torch::empty_like(a);
  torch::mm_out(product, a, b);  // the first one makes its buffers
  const double begin = Now();
  double best = 0, settled = 0, settled_at = begin;
  for (int made = 0; made < 2 || (Now() - settled_at < kEnough && Now() - begin < kMost); ++made) {
    const double start = Now();
    torch::mm_out(product, a, b);
    const double end = Now();
    best = made == 0 ? end - start : std::min(best, end - start);
    if (made > 0 && best > kBetter * settled) continue;
    settled = best;
    settled_at = end;
  }
  constexpr double kFlops = 2.0 * kSize * kSize * kSize;
  return {kFlops / std::max(best, 1e-9), absl::StrCat(kSize, " x ", kSize, " in ", bf16 ? "bf16" : "fp32")};
}

}  // namespace penstock::tools
