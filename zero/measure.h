// Finds out what a model takes before the run starts: builds one block of each kind and runs it once.
//
// Nothing is guessed: the bytes are those that LibTorch asked its allocator for, with the real batch and
// sequence.
#ifndef PENSTOCK_ZERO_MEASURE_H_
#define PENSTOCK_ZERO_MEASURE_H_

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tiering/model_graph.h"
#include "zero/block.h"
#include "zero/model.h"
#include "zero/tile_format.h"

namespace penstock::zero {

struct MeasuredModel {
  tiering::ModelGraph graph;
  std::vector<std::shared_ptr<BlockModule>> modules;  // [block]; blocks of one kind share
  int64_t parameters = 0;                             // without padding
};

// `example` is one micro-batch of the run's shapes. `trains`: false measures forward only. Stages are
// measured on the device that will compute them, blocks are built in host memory.
absl::StatusOr<MeasuredModel> MeasureModel(const Model& model, const Batch& example, kernels::DType weights,
                                           bool trains, Device& device);

// What copies between registered host memory and a device apart reach, in some of its memory: before its
// arena is made.
struct CopyRates {
  double h2d_bytes_per_s = 0;
  double d2h_bytes_per_s = 0;
};
absl::StatusOr<CopyRates> MeasureCopyRates(Device& device);

// Parameters per second that one update worker gets through, checksums included, from memory.
double MeasureUpdateRate(const TileFormat& format, const OptimizerOptions& optimizer);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEASURE_H_
