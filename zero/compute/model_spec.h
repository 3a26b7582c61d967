// What the engine knows of a model: names and shapes.
#ifndef PENSTOCK_ZERO_COMPUTE_MODEL_SPEC_H_
#define PENSTOCK_ZERO_COMPUTE_MODEL_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

namespace penstock::zero {

struct ParameterSpec {
  std::string name;  // within the block
  std::vector<int64_t> sizes;
  bool trains = true;
  int group = 0;  // of those whose rates are given together (GroupRates, zero/compute/optimizer.h)
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_MODEL_SPEC_H_
