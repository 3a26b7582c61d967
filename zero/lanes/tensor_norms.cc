#include "zero/lanes/tensor_norms.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "base/index.h"
#include "base/status_macros.h"

namespace penstock::zero {

using kernels::LambNorms;
using tiering::BlockIndex;

// Ranks hand each other its bytes.
static_assert(std::is_trivially_copyable_v<LambNorms>);

TensorNorms::TensorNorms(const GradientSums::Layouts& layouts) : layouts_(layouts) {
  for (const auto& layout : layouts) {
    norms_.emplace_back(layout->parameters.size());
    trusts_.emplace_back(layout->parameters.size(), 1.0);
  }
}

void TensorNorms::Clear() {
  const std::lock_guard lock(mutex_);
  for (std::vector<LambNorms>& of_block : norms_) std::fill(of_block.begin(), of_block.end(), LambNorms());
}

void TensorNorms::Add(const TileFormat& format, const UpdateDecision& decision, uint64_t seed,
                      BlockIndex block, const tiering::Tile& tile, const TileMemory& memory) {
  std::vector<LambNorms> of_tile(layouts_[block]->parameters.size());
  AddTensorNorms(format, {decision, *layouts_[block], block}, seed, tile, memory, of_tile);
  const std::lock_guard lock(mutex_);
  std::vector<LambNorms>& sums = norms_[block];
  for (size_t p = 0; p < of_tile.size(); ++p) {
    sums[p].param.Merge(of_tile[p].param);
    sums[p].update.Merge(of_tile[p].update);
  }
}

absl::Status TensorNorms::Exchange(Comm& comm, int64_t step) {
  size_t count = 0;
  for (const std::vector<LambNorms>& of_block : norms_) count += of_block.size();
  std::vector<LambNorms> all(At(comm.world()) * count);
  LambNorms* mine = all.data() + At(comm.rank()) * count;
  for (const std::vector<LambNorms>& of_block : norms_)
    mine = std::copy(of_block.begin(), of_block.end(), mine);
  const What what{.name = "the norms of updates", .step = step};
  RETURN_IF_ERROR(comm.AllGather(Channel::kReduceScatter, what, all.data(), count * sizeof(LambNorms)));
  Clear();
  for (size_t k = 0; k < At(comm.world()); ++k) {
    const LambNorms* theirs = all.data() + k * count;
    for (std::vector<LambNorms>& of_block : norms_) {
      for (LambNorms& sum : of_block) {
        sum.param.Merge(theirs->param);
        sum.update.Merge(theirs->update);
        ++theirs;
      }
    }
  }
  return absl::OkStatus();
}

void TensorNorms::Decide(const UpdateDecision& decision) {
  for (const BlockIndex block : norms_.indices()) {
    const BlockSteps steps(decision, *layouts_[block], block);
    for (size_t p = 0; !decision.skip && p < norms_[block].size(); ++p) {
      const OptimizerStep* const step = steps.of(p);
      if (step != nullptr) trusts_[block][p] = TrustOf(*step, norms_[block][p]);
    }
  }
  Clear();
}

}  // namespace penstock::zero
