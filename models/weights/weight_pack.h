// Codes the weights of a model in 8 or 4 bit: from Hugging Face's safetensors to packed ones
// (models/weights/packed_weights.h), in bounded memory, whatever the model.
//
// Matrices are coded; vectors, and routers of mixtures, stay as they are. The matrices of an expert lie side
// by side, so that one read brings all of them. With 4 bit the embeddings (the matrices of block 0) and the
// output (a row for each token) stay at 8: every token depends on them, and they are read by the row, or once
// a pass.
#ifndef PENSTOCK_MODELS_WEIGHTS_WEIGHT_PACK_H_
#define PENSTOCK_MODELS_WEIGHTS_WEIGHT_PACK_H_

#include <cstdint>
#include <functional>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/weights/layout.h"
#include "models/weights/weight_import.h"

namespace penstock::models {

struct PackOptions {
  int bits = 8;
  size_t group = 64;
  int64_t vocabulary = 0;       // of the model: rows of its output
  std::set<std::string> whole;  // names of matrices that are not coded (RoutersOf)
  std::string source;           // kept with the weights: what they were made of
  uint64_t max_shard_bytes = uint64_t{4} << 30;
  std::function<void(uint64_t done, uint64_t total)> progress;  // in coded bytes; may be null
};

struct PackResult {
  int files = 0;
  uint64_t bytes = 0;     // of tensors, coded
  double mean_error = 0;  // root of the mean square of errors over that of values, of coded matrices
};

// Writes model.safetensors, or shards and their index, into `directory`, which exists and has none, and syncs
// them. kDataLoss: a value that is not finite; kFailedPrecondition: packed already. Others as
// WeightImport and SafetensorsWriter.
absl::StatusOr<PackResult> PackWeights(WeightImport* import, const ModelLayout& layout,
                                       const std::string& directory, const PackOptions& options);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_WEIGHT_PACK_H_
