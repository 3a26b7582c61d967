#include "tiering/plan/working_set.h"

#include <algorithm>

namespace penstock::tiering {
namespace {

// LibTorch asks for a little beside what was measured: scalars, views, rounding.
constexpr int64_t kTensorSlack = int64_t{2} << 20;

}  // namespace

std::vector<int64_t> ClassSizes(const std::vector<int64_t>& sizes, int slots) {
  std::vector<int64_t> distinct = sizes;
  std::sort(distinct.begin(), distinct.end());
  std::vector<int64_t> count;
  std::vector<int64_t> value;
  for (const int64_t size : distinct) {
    if (value.empty() || value.back() != size) {
      value.push_back(size);
      count.push_back(0);
    }
    ++count.back();
  }
  const size_t n = value.size();
  std::vector<int64_t> before(n + 1, 0);
  for (size_t i = 0; i < n; ++i) before[i + 1] = before[i] + count[i];
  auto cost = [&](size_t from, size_t to) {  // one class of value[from..to)
    return std::min<int64_t>(slots, before[to] - before[from]) * value[to - 1];
  };
  int64_t best = cost(0, n);
  std::vector<int64_t> classes = {value[n - 1]};
  // More than a few hundred different sizes are thinned out: the exact optimum is not worth a cubic search.
  const size_t stride = std::max<size_t>(1, n / 300);
  for (size_t i = 1; i < n; i += stride) {
    if (const int64_t two = cost(0, i) + cost(i, n); two < best) {
      best = two;
      classes = {value[i - 1], value[n - 1]};
    }
    for (size_t j = i + 1; j < n; j += stride) {
      if (const int64_t three = cost(0, i) + cost(i, j) + cost(j, n); three < best) {
        best = three;
        classes = {value[i - 1], value[j - 1], value[n - 1]};
      }
    }
  }
  return classes;
}

int64_t KeptInputBytes(const ModelGraph& graph, int saved_activations) {
  const int64_t kept = graph.saved_activation_bytes(saved_activations);
  if (!graph.inputs_beside) return kept;
  return kept - graph.saved_activation_bytes(std::min(saved_activations, kInputRing));
}

int64_t ComputeTensorBytes(const ModelGraph& graph, int micro_batches, bool trains, int saved_activations,
                           int* evaluate_micro_batches) {
  int64_t largest_input = 0, forward = 0, backward = 0;
  for (const StageShape& stage : graph.stages) {
    largest_input = std::max(largest_input, stage.input_bytes);
    forward = std::max(forward, stage.forward_peak_bytes);
    backward = std::max(backward, stage.backward_peak_bytes);
  }
  if (graph.inputs_beside) largest_input = 0;
  const int64_t kept = KeptInputBytes(graph, saved_activations);
  const int64_t fixed = graph.fixed_tensor_bytes + kTensorSlack;
  const int64_t m = micro_batches;
  if (!trains) {
    *evaluate_micro_batches = static_cast<int>(m);
    return fixed + m * (graph.batch_bytes + 2 * largest_input) + forward;
  }
  // A forward-only pass keeps one input and one output per micro-batch instead of one input per stage.
  const int64_t per_evaluation = std::max<int64_t>(1, 2 * largest_input + graph.batch_bytes);
  const int64_t training = m * (kept + graph.batch_bytes) + std::max(forward, backward);
  *evaluate_micro_batches = graph.inputs_beside
                                ? 1
                                : static_cast<int>(std::max<int64_t>(
                                      1, std::min<int64_t>((training - forward) / per_evaluation, 256)));
  return fixed + std::max(training, forward + per_evaluation);
}

int64_t HostTensorBytes(const ModelGraph& graph, int micro_batches) {
  return graph.fixed_tensor_bytes + kTensorSlack + micro_batches * graph.batch_bytes;
}

int64_t InitialTensorBytes(const ModelGraph& graph, int64_t tile_elements) {
  int64_t bytes = 0;
  for (const BlockShape& block : graph.blocks) bytes = std::max(bytes, block.init_bytes + tile_elements * 4);
  return graph.fixed_tensor_bytes + kTensorSlack + bytes;
}

int64_t LookedAtTensorBytes(const ModelGraph& graph, int64_t tile_bytes) {
  return graph.fixed_tensor_bytes + kTensorSlack + AlignUp(tile_bytes, kPage) + kPage;
}

}  // namespace penstock::tiering
