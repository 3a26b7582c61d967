// Batches for the hand-written model of examples/plain_model.
#ifndef PENSTOCK_TESTS_ZERO_PLAIN_BATCH_H_
#define PENSTOCK_TESTS_ZERO_PLAIN_BATCH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "plain_compute.h"

namespace penstock::zero::testing_support {

// Number `number` of them: targets are a simple function of the inputs.
inline Batch PlainBatch(const plain::Shape& shape, int64_t number, int64_t rows = 8) {
  struct Tensors {
    std::vector<float> inputs, targets;
  };
  auto tensors = std::make_shared<Tensors>();
  for (int64_t i = 0; i < rows * shape.width; ++i) {
    const float x = static_cast<float>((i * 37 + number * 101) % 257) / 257 - 0.5F;
    tensors->inputs.push_back(x);
    tensors->targets.push_back(x * x);
  }
  Batch batch;
  batch.tensors = {{"inputs", {tensors->inputs.data(), ElementType::kFp32, {rows, shape.width}}},
                   {"targets", {tensors->targets.data(), ElementType::kFp32, {rows, shape.width}}}};
  batch.owner = tensors;
  return batch;
}

}  // namespace penstock::zero::testing_support

#endif  // PENSTOCK_TESTS_ZERO_PLAIN_BATCH_H_
