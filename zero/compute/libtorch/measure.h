// Finds out what a model takes before the run starts: builds one block of each kind and runs it once.
//
// Nothing is guessed: the bytes are those that LibTorch asked its allocator for, with the real batch and
// sequence. Blocks that say what they begin with (BlockSpec::initial) are built without memory; whatever else
// is made is bounded by the limit on tensors (zero/memory/tensor_memory.h), which the caller sets.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_MEASURE_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_MEASURE_H_

#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tiering/plan/model_graph.h"
#include "zero/compute/compute.h"
#include "zero/compute/device.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/lowered_model.h"
#include "zero/compute/libtorch/model.h"
#include "zero/compute/libtorch/stage_values.h"

namespace penstock::zero {

struct MeasuredModel {
  tiering::ModelGraph graph;
  std::vector<std::shared_ptr<BlockModule>> modules;  // [block]; blocks of one kind share
  int64_t parameters = 0;                             // without padding
  int64_t sample_bytes = 0;                           // that BusiestStage takes
  // Other work had the processors for much of the time: only what threads ran is counted, which leaves what
  // that work took of caches and memory.
  bool disturbed = false;
  // Of each stage, in the model's own order: what it takes and returns wants a gradient. Where nothing is
  // trained, nothing does.
  struct StageFlows {
    Flows inputs, outputs;
  };
  std::vector<StageFlows> flows;
  // [block] the numbers of its buffers that training changes.
  std::vector<std::vector<size_t>> changing;
  // Of the stages, those that backward spends most time in, and what goes into them.
  struct ValueShape {
    std::vector<int64_t> sizes;
    torch::Dtype type = torch::kFloat32;
  };
  struct Busiest {
    int stage = -1;  // one of them; -1: nothing is trained
    std::vector<ValueShape> inputs;
    bool forward_only = false;  // a sample of it is its forward: the backward is long
  } busiest;
};

// `example` is one micro-batch of the run's shapes. Stages are measured on the device that will compute them,
// blocks are built in host memory. kResourceExhausted: it takes more than there is, and nothing of that size
// was allocated. kInvalidArgument: a block breaks a rule of zero/compute/libtorch/model.h.
absl::StatusOr<MeasuredModel> MeasureModel(const LoweredModel& model, const TensorBatch& example,
                                           kernels::DType weights, const MeasureOptions& options,
                                           Device& device);

// The busiest stage, once a call, on the caller's thread: a sample of compute, for measuring it beside other
// work. Its backward, or where that is long its forward. Takes the memory that the stage takes, from the
// first call on. Throws as LibTorch does; all that is given outlives it. `measured` has a busiest stage.
std::function<void()> BusiestStage(const LoweredModel& model, const MeasuredModel& measured,
                                   const TensorBatch& example, kernels::DType weights, Device& device);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_MEASURE_H_
