// LAMB's norms of whole parameters, added up from tiles and from ranks, and the trust ratios that follow.
//
// A step adds the norms of its tiles, on any thread and in any order; over several ranks all of them exchange
// their sums; then its decision makes them ratios, by which its updates go until the next decision. Sums are
// exact (kernels/reduce.h), so that ratios depend neither on tiles nor on the number of ranks.
#ifndef PENSTOCK_ZERO_LANES_TENSOR_NORMS_H_
#define PENSTOCK_ZERO_LANES_TENSOR_NORMS_H_

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/optimizer.h"
#include "tiering/plan/plan.h"
#include "zero/compute/gradient_sums.h"
#include "zero/compute/update.h"
#include "zero/memory/arena_view.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

class TensorNorms {
 public:
  // `layouts` outlive this.
  explicit TensorNorms(const GradientSums::Layouts& layouts);

  // Forgets what was added.
  void Clear();
  // Of a tile, in the block's whole run. Thread-safe.
  void Add(const TileFormat& format, const UpdateDecision& decision, uint64_t seed, tiering::BlockIndex block,
           const tiering::Tile& tile, const TileMemory& memory);
  // The sums become those over all ranks, which all come here at the same step.
  absl::Status Exchange(Comm& comm, int64_t step);
  // Of all parameters, from their sums, which are forgotten. A decision to skip has none.
  void Decide(const UpdateDecision& decision);
  // The block's, parameter by parameter, as the last decision made them. 1 before there was one.
  std::span<const double> trusts(tiering::BlockIndex block) const { return trusts_[block]; }

 private:
  const GradientSums::Layouts& layouts_;
  std::mutex mutex_;
  tiering::PerBlock<std::vector<kernels::LambNorms>> norms_;
  tiering::PerBlock<std::vector<double>> trusts_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_LANES_TENSOR_NORMS_H_
