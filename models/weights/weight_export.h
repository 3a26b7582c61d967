// Streams a model's weights out of a store, or the stores of several ranks, into a safetensors file, in
// bounded memory.
//
// The store keeps matrices as [out, in]; some are published as [in, out] (GPT-2's). Such a matrix is turned
// in strips of its columns that fit into the memory given: where one strip does not hold it, its tiles are
// read once for each. Reads run ahead by as many tiles as there is memory for. Every checksum is checked on
// the way.
//
//   fp32   the masters, joined exactly from their halves where the run computes in bf16
//   bf16   of a bf16 run the weights that forward and backward see; else the masters rounded to nearest even
//
// Threads: one. Errors: kFailedPrecondition: too little memory (says the least), a model of another layout;
// kDataLoss: damage; kAlreadyExists; kResourceExhausted: disk full.
#ifndef PENSTOCK_MODELS_WEIGHTS_WEIGHT_EXPORT_H_
#define PENSTOCK_MODELS_WEIGHTS_WEIGHT_EXPORT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/float16.h"
#include "models/weights/layout.h"
#include "swap/format.h"
#include "swap/safetensors.h"
#include "swap/store.h"

namespace penstock::models {

// What is merged into a matrix as it is written: W + scaling * up * down, in fp32. Tensors of the state.
struct MatrixAdapter {
  const PublishedTensor* down = nullptr;  // [rank, in]
  const PublishedTensor* up = nullptr;    // [out, rank]
  double scaling = 1;
};

struct ExportOptions {
  std::string path;  // of the one file; of shards, what their names and the index's are made of
  // Not 0: files with at most this many bytes of tensors (a larger tensor has one of its own),
  // "model-00001-of-00003.safetensors" beside "model.safetensors.index.json" as Hugging Face has them. Where
  // one holds everything it is the one file, without an index.
  uint64_t max_shard_bytes = 0;
  swap::Dtype dtype = swap::Dtype::kF32;  // or kBf16
  bool overwrite = false;
  // A file in the same directory that describes the weights, and gets its name with theirs. Empty: none.
  std::string config_path, config;
  std::map<std::string, std::string> metadata;
  std::map<std::string, MatrixAdapter> adapters;  // by the matrix's published name
  // Elements of a block's run that are no part of the state; null: there are none. A matrix that is published
  // turned is read whole.
  std::function<absl::Status(int block, int64_t first, int64_t elements, float* to)> elsewhere;
  std::function<void(uint64_t done, uint64_t total)> progress;  // bytes of all files
};

struct ExportMemory {
  uint64_t least_bytes = 0;        // of `memory`
  uint64_t comfortable_bytes = 0;  // four tiles ahead and the largest matrix in one strip
  uint64_t beside_bytes = 0;       // beside `memory`: the adapter of one matrix, in fp32
};

// `weights`: the type of the run's weights, which says where its masters are (zero/compute/tile_format.h).
ExportMemory MemoryForExport(std::span<const swap::Geometry> parts, const ModelLayout& layout,
                             const ExportOptions& options, kernels::DType weights);

// `parts`: by rank. `memory`: pinned, at a multiple of 4096. Returns the number of files with tensors.
//
// No file has its name before all of them are written and durable, and room for all is reserved first: an
// export that fails leaves nothing and changes nothing. With `overwrite` the old export stands until then, so
// that the disk needs room for both. Then the names change hands (AtomicFile::CommitTogether): a kill at any
// moment leaves the old export, the new one, or neither an index nor the one file. What the old export had
// more of, shards that its index names among them, is removed.
absl::StatusOr<int> ExportWeights(std::span<swap::Store* const> parts, const ModelLayout& layout,
                                  kernels::DType weights, std::span<std::byte> memory,
                                  const ExportOptions& options);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_WEIGHT_EXPORT_H_
