// DeepSpeed's elastic batch size (its version 0.1): one number of sequences a step that many numbers of ranks
// can share evenly, so that a run goes on with another number of ranks and sees the same steps.
#ifndef PENSTOCK_RUN_ELASTICITY_H_
#define PENSTOCK_RUN_ELASTICITY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "run/config.h"

namespace penstock::run {

struct ElasticBatch {
  int64_t train_batch = 0;
  std::vector<int64_t> ranks;  // that can share it, each with one of the micro-batches; rising
  bool Allows(int64_t world) const;
  std::string RanksText() const;  // "1, 2, 3, 4, 6 and 30 more up to 840"
};

// Each micro-batch, and their least common multiple, is made as large as highly composite numbers of at most
// 720,720 let it be within max_train_batch_size; of these batches the one is taken that most numbers of ranks
// from min_gpus to max_gpus can share. Of equals the largest, or without prefer_larger_batch the smallest.
// DeepSpeed to 0.18 and its main branch (0.19 has no elasticity); as in the latter a multiple beyond
// max_train_batch_size is no candidate. kInvalidArgument: no number of ranks can share any, or `config` lacks
// what DeepSpeed needs.
absl::StatusOr<ElasticBatch> ComputeElasticBatch(const ElasticityConfig& config);

// The largest of the micro-batches with which so many ranks share it: what each has in one of its
// train_batch / world / micro-batch passes. kInvalidArgument: they cannot.
absl::StatusOr<int64_t> ElasticMicroBatch(const ElasticityConfig& config, const ElasticBatch& batch,
                                          int64_t world);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_ELASTICITY_H_
