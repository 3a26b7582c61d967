// What forward and backward need in the memory in which they compute, be it the host's or a device's.
#ifndef PENSTOCK_TIERING_PLAN_WORKING_SET_H_
#define PENSTOCK_TIERING_PLAN_WORKING_SET_H_

#include <cstdint>
#include <vector>

#include "tiering/plan/model_graph.h"

namespace penstock::tiering {

// Inputs on their way to or from the next tier: one leaves, one is used, one is made.
inline constexpr int kInputRing = 3;

// Splits the sizes into at most three classes so that `slots` slots of each take the least memory. Returns
// the largest size of each class, ascending.
std::vector<int64_t> ClassSizes(const std::vector<int64_t>& sizes, int slots);

// LibTorch's tensors while a pass computes, where the inputs of the last `saved_activations` stages stay.
// *evaluate_micro_batches: how many of a forward-only pass fit into the same memory.
int64_t ComputeTensorBytes(const ModelGraph& graph, int micro_batches, bool trains, int saved_activations,
                           int* evaluate_micro_batches);

// Of them the inputs of the last `saved_activations` stages, of one micro-batch.
int64_t KeptInputBytes(const ModelGraph& graph, int saved_activations);

// What stays on the host of these where a device computes: a pass's batch, and a little.
int64_t HostTensorBytes(const ModelGraph& graph, int micro_batches);

// And while a run is made: building a block, and one tile of its fp32 values on their way to the store.
int64_t InitialTensorBytes(const ModelGraph& graph, int64_t tile_elements);

// And while somebody looks at a parameter of what is only evaluated: one tile's weights.
int64_t LookedAtTensorBytes(const ModelGraph& graph, int64_t tile_bytes);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_WORKING_SET_H_
