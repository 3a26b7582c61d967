// Where a block's parameters lie in memory: one contiguous run, its flat parameters.
//
// The run has the parameters in their order, each at a multiple of kParameterAlignment elements, zeros
// between them, padded to tiering::kElementAlignment. Where some train and some are frozen, the frozen ones
// come first, and the others begin at a multiple of tiering::kPartAlignment: apart, they are stored and
// updated apart. `parameters` has the order in which they were given all the same.
#ifndef PENSTOCK_ZERO_COMPUTE_FLAT_LAYOUT_H_
#define PENSTOCK_ZERO_COMPUTE_FLAT_LAYOUT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zero/compute/model_spec.h"

namespace penstock::zero {

inline constexpr int64_t kParameterAlignment = 64;

struct Parameter {
  std::string name;  // within the block
  std::vector<int64_t> sizes;
  int64_t offset = 0;  // in the run, in elements
  int64_t elements = 0;
  bool trains = true;
  int group = 0;
};

// Elements [from, to) of the run, of one group.
struct TrainedRange {
  int64_t from = 0, to = 0;
  int group = 0;
};

// Blocks of one kind share it.
struct FlatLayout {
  std::vector<Parameter> parameters;
  int64_t elements = 0;            // of the run, padding included
  int64_t parameter_elements = 0;  // without padding
  int64_t trained_from = 0;        // where those that train begin; 0: all train, or none
  // What the optimizer updates, ascending; neighbours of one group are one range. Padding counts as trained:
  // it stays zero.
  std::vector<TrainedRange> trained;

  static FlatLayout Of(std::span<const ParameterSpec> parameters);
  bool Trains() const;  // false: every parameter is frozen
  int groups() const;   // one more than the highest
  bool SameShapes(const FlatLayout& other) const;
  // The numbers of the parameters in the order in which they lie in the run.
  std::vector<size_t> InOrder() const;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_FLAT_LAYOUT_H_
