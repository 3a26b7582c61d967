// The buffers of a model's blocks that training changes (BatchNorm's statistics): small state beside the
// parameters, which a step keeps and a commit has.
//
// Each block has its own, also where blocks share a module object: they are lent to the module while it
// computes. A training pass changes them in forward, once for each use and micro-batch; backward computes
// again with a copy of what they were. What a pass that is given up has changed is undone when the next one
// begins. One thread at a time. Functions throw as LibTorch does, but for those that return a status.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_CHANGING_BUFFERS_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_CHANGING_BUFFERS_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/model.h"

namespace penstock::zero {

class ChangingBuffers {
 public:
  ChangingBuffers() = default;
  // `which`: of each block, the numbers of those that change; their values are those of its module. All else
  // outlives it.
  ChangingBuffers(const Model& model, const std::vector<std::shared_ptr<BlockModule>>& modules,
                  const std::vector<std::vector<size_t>>& which, Device& device);

  bool any() const;
  size_t count(int block) const { return blocks_[static_cast<size_t>(block)].which.size(); }
  // The values that a new run's block begins with.
  void Begin(int block, const torch::nn::Module& module);

  // The module computes with these, and changes them.
  void Lend(int block) { LendThese(block, blocks_[static_cast<size_t>(block)].now); }
  void LendThese(int block, const Values& values) const;
  Values Copies(int block) const;
  // How often those that do not change have been changed all the same.
  int64_t ChangesOfOthers(int block) const;

  // Of a pass that is given up: as before it.
  void Undo();
  // The changes so far are the step's. Their values, by block and name.
  absl::StatusOr<nlohmann::json> Accept();
  // kDataLoss: not those of the model.
  absl::Status Restore(const nlohmann::json& values);
  nlohmann::json ToJson() const;

 private:
  struct Block {
    std::string name;
    std::shared_ptr<BlockModule> module;
    std::vector<size_t> which;
    Values now, accepted;
  };
  Values ClonesOf(const Values& values) const;
  absl::Status RestoreBlock(Block* block, const nlohmann::json& values) const;

  std::vector<Block> blocks_;
  Device* device_ = nullptr;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_CHANGING_BUFFERS_H_
