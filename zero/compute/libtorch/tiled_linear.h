// One linear layer larger than the memory of a block, as several blocks.
//
//   y = x W^T + b,  W [out, in]:  tile k holds rows k * out / tiles .. of W and b and computes that part of
//   y.
//
// Each tile is a block of its own: fetched, updated and released alone, so that the weights in memory at once
// are a tile's and its neighbour's, not the layer's. Between the tiles' stages one tensor travels, x followed
// by the parts of y that are done, [..., in + k * out / tiles]; it is what each stage keeps for backward. The
// result is that of torch::nn::Linear up to the rounding of its products; the gradient of x is summed over
// the tiles, last to first, in the compute type.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_TILED_LINEAR_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_TILED_LINEAR_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "zero/compute/libtorch/model.h"

namespace penstock::zero {

struct TiledLinearOptions {
  int64_t in = 0;
  int64_t out = 0;
  int64_t tiles = 1;
  bool bias = true;
};

// Appends `tiles` blocks "name.0", "name.1", ... and their stages. The first stage takes [..., in], the last
// one gives [..., out]. Initial values are those of torch::nn::Linear: uniform within 1 / sqrt(in).
// kInvalidArgument: tiles does not divide out.
absl::Status AddTiledLinear(Model* model, const std::string& name, const TiledLinearOptions& options);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_TILED_LINEAR_H_
