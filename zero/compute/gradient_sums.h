// Gradients as they are summed over a block's uses and micro-batches: straight to their place where there is
// one addend, else into fp32 sums that are rounded once (kernels/float16.h).
#ifndef PENSTOCK_ZERO_COMPUTE_GRADIENT_SUMS_H_
#define PENSTOCK_ZERO_COMPUTE_GRADIENT_SUMS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/float16.h"
#include "kernels/thread_pool.h"
#include "tiering/plan/numbers.h"
#include "zero/compute/compute.h"
#include "zero/compute/device.h"
#include "zero/compute/flat_layout.h"

namespace penstock::zero {

// Where a backward pass leaves a block's gradient: the flat parameters' elements from `first` on, which no
// frozen part has. Exactly one of the two is set.
struct GradientPlace {
  void* gradient = nullptr;      // in the type of the weights: one addend, or fp32 sums
  float* accumulator = nullptr;  // in fp32
  int64_t first = 0;
};

// One thread at a time, that which computes; Taken also on another one while the block does not compute.
class GradientSums {
 public:
  using Layouts = tiering::PerBlock<std::shared_ptr<const FlatLayout>>;
  // The device outlives it, and so does `pool`, which shares the work where gradients are in host memory;
  // null: the caller's thread does it all.
  GradientSums(const Layouts& layouts, kernels::DType weights, Device& device,
               kernels::ThreadPool* pool = nullptr)
      : layouts_(layouts), weights_(weights), device_(device), pool_(pool), addends_(layouts.size(), 0) {
    for (const auto& layout : layouts) came_.emplace_back(layout->parameters.size(), 0);
  }

  // Moves the gradients of one backward to their place, or adds them, in the order of compute. Parameters
  // that are missing count as zero. kInvalidArgument: they are no gradients of what trains in this block;
  // kInternal: a second addend for a place that has none.
  absl::Status Add(tiering::BlockIndex block, std::span<const Gradient> gradients,
                   const GradientPlace& place);
  // Rounds a block's sums from element `first` on, on the device, to the type of the weights; the next Add
  // starts new ones.
  absl::Status Round(tiering::BlockIndex block, int64_t first, const float* sums, void* gradient);
  // The block's gradient has been taken over: its next Add starts a new sum.
  void Taken(tiering::BlockIndex block) { addends_[block] = 0; }
  // For each parameter that trains, block by block in the order of the layouts, whether Add has had a
  // gradient of it (1) or not (0) since ForgetCame. While nothing computes.
  std::vector<uint8_t> Came() const;
  void ForgetCame();

 private:
  absl::Status Check(const FlatLayout& layout, std::span<const Gradient> gradients) const;
  void Place(const FlatLayout& layout, std::span<const Gradient> gradients, int64_t first,
             kernels::DType waits, std::byte* to);
  void Accumulate(const FlatLayout& layout, std::span<const Gradient> gradients, int64_t first, float* sums);
  // Where they are.
  void Convert(kernels::DType from, const void* in, kernels::DType to, void* out, size_t n);
  void Add(kernels::DType type, const void* in, float* sums, size_t n);

  const Layouts layouts_;
  const kernels::DType weights_;
  Device& device_;
  kernels::ThreadPool* const pool_;
  tiering::PerBlock<int> addends_;  // to each block's gradient so far
  tiering::PerBlock<std::vector<uint8_t>> came_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_GRADIENT_SUMS_H_
