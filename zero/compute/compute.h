// Who computes a model, as the engine sees it.
//
// The engine owns memory, drive, update, commit and plan. It says when a stage's weights are there and what
// is to be computed with them, and takes the gradients. It knows blocks by their parameters' shapes and
// stages by the block that they use; what they compute, and with which library, is the Compute's alone.
// LibTorchCompute (zero/compute/libtorch/libtorch_compute.h) computes torch::nn::Modules;
// examples/plain_model/ computes with loops over arrays; docs/write-a-compute.md says how to write another
// one.
//
// A training pass calls, in the program's order and for each micro-batch: Forward of every stage but the
// last; then, from the last stage to the first one whose block trains, Backward (of the last stage forward
// and backward at once), Gradients for the stage's block where it trains, and Release. An evaluation calls
// Forward of all stages.
// Between the two uses of a position the engine may take its saved inputs out of memory (SavedInputs,
// DropInputs) and have them back (RestoreInputs).
//
// Threads: each call says whose it is; no two of them run at once unless they say so. Errors: a call that
// fails ends the engine's own call with its status. Of that pass it hears no more but Release, DropInputs
// and what another thread had begun to ask; with one rank the engine is as it was before. No exception may
// leave any of them.
#ifndef PENSTOCK_ZERO_COMPUTE_COMPUTE_H_
#define PENSTOCK_ZERO_COMPUTE_COMPUTE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/float16.h"
#include "tiering/plan/model_graph.h"
#include "zero/compute/flat_layout.h"
#include "zero/memory/values.h"

namespace penstock::zero {

class Device;

// What stays the same from Measure to the end.
struct ComputeSetup {
  Device* device = nullptr;  // where weights are and gradients go; outlives the Compute's last call
  kernels::DType weights = kernels::DType::kBf16;
  int intra_op_threads = 1;  // of one operation on the processor
};

struct MeasureOptions {
  bool trains = true;                                  // false: forward only
  bool times = true;                                   // false: memory only, a pass of each kind of stage
  int64_t host_memory_budget_bytes = 0;                // that there is for it; 0: no bound
  std::function<void(const std::string& what)> doing;  // what takes its time just now, for people
};

// What the engine must know before the first step.
struct Measured {
  // What a resumed run must agree on: architecture and sizes.
  nlohmann::json identity;
  // Blocks and stages by number: names, elements, bytes and times (tiering/plan/model_graph.h).
  tiering::ModelGraph graph;
  // Where each block's parameters lie in its flat parameters; blocks of one kind may share it.
  tiering::PerBlock<std::shared_ptr<const FlatLayout>> layouts;
  int64_t parameters = 0;  // elements, without padding
  // Other work had the processors for much of the time: the times are those of what threads ran.
  bool disturbed = false;
  // A sample of the busiest stage's compute on the caller's thread, for measuring it beside other work, and
  // the bytes of tensor memory that it takes from its first call on until it is destroyed. Empty: none. May
  // throw.
  std::function<void()> sample;
  int64_t sample_bytes = 0;
  int64_t buffer_bytes = 0;  // the most that Compute::Buffers has, as text; 0: there are none
};

// The values that a block begins with, as fp32 masters, over its flat parameters.
class InitialReader {
 public:
  virtual ~InitialReader() = default;
  // Elements [first, first + elements), zeros between parameters and beyond their end. Ranges come in
  // ascending order; some may be left out.
  virtual absl::Status Read(int64_t first, int64_t elements, float* to) = 0;
};

struct PassInfo {
  int64_t step = 0;
  bool trains = true;         // false: an evaluation, forward only
  int first_micro_batch = 0;  // in the step, of a call of several
  // What backward of a loss starts from: the loss scale over the step's micro-batches. Of an evaluation: what
  // that of the next training pass will.
  double loss_gradient = 1;
};

// One use of a stage's block.
struct StageUse {
  tiering::StageIndex stage;
  tiering::Position position;  // in the order of the pass, by default the stage's own number
  int micro_batch = 0;
  bool last = false;   // of the pass: its output is the loss, or what Infer returns
  bool trains = true;  // false: dropout and its like are off
  // Of Forward: its backward comes and wants its inputs. false: in an evaluation, and where no stage up to
  // this one trains; then nothing of it is asked for again.
  bool keeps_inputs = true;
  // Of Backward: a stage before it wants the gradients of its inputs. false: backward ends here.
  bool passes_gradients = true;
  uint64_t seed = 0;  // of generators: the same in forward and backward, whatever else is computed between
};

// A block's flat parameters, in the device's memory, in the type of the weights.
struct Weights {
  tiering::BlockIndex block;
  std::byte* data = nullptr;  // the engine's: readable until Forward returns, after Backward until Release
};

// Of one parameter, by its number in the block's FlatLayout, in fp32 or in the type of the weights, as many
// elements as it has. A parameter that is missing took no part: its gradient is zero, or with
// UpdateOptions::missing_gradients kSkip none, if it is missing in all of a step.
struct Gradient {
  int parameter = 0;
  TensorView value;
};

class Compute {
 public:
  virtual ~Compute() = default;

  // Finds out what the model takes, in at most MeasureOptions::host_memory_budget_bytes. On the thread that
  // makes the engine. kResourceExhausted: it takes more than there is, and nothing of that size was
  // allocated. kInvalidArgument: the model breaks a rule. May be called again between passes, for another
  // example (Engine::Replan): what is left of the last pass goes first.
  virtual absl::StatusOr<Measured> Measure(const ComputeSetup& setup, const Batch& example,
                                           const MeasureOptions& options) = 0;
  // The values of a new run's block; one block at a time, ascending. On the thread that makes the engine.
  virtual absl::StatusOr<std::unique_ptr<InitialReader>> Initial(tiering::BlockIndex block,
                                                                 uint64_t seed) = 0;

  // A pass over these micro-batches begins. On the engine's caller's thread, while nothing computes.
  virtual absl::Status Begin(const PassInfo& pass, std::vector<Batch> batches) = 0;

  // The compute thread, one call at a time, in program order. ThreadBegins is its first.
  virtual void ThreadBegins() {}
  virtual absl::Status Forward(const StageUse& use, std::span<const Weights> weights) = 0;
  virtual absl::Status Backward(const StageUse& use, std::span<const Weights> weights) = 0;
  // Of the backward just made. Lives until Release.
  virtual absl::StatusOr<std::span<const Gradient>> Gradients(const StageUse& use,
                                                              tiering::BlockIndex block) = 0;
  // The backward just made is over: nothing may refer to its weights any more.
  virtual void Release(const StageUse& use) = 0;

  // What a position keeps from forward to backward leaves memory, or comes back. On the engine's caller's
  // thread, beside compute of other positions. The memory is the Compute's throughout: the engine reads what
  // SavedInputs shows, calls DropInputs when that is on its way no more, and fills what RestoreInputs shows
  // (as many views of the same types and sizes) before that position's backward. The position's first is
  // never asked for, since it has the batch.
  virtual absl::StatusOr<std::span<const TensorView>> SavedInputs(tiering::Position position,
                                                                  int micro_batch) = 0;
  virtual void DropInputs(tiering::Position position, int micro_batch) = 0;
  virtual absl::StatusOr<std::span<const TensorView>> RestoreInputs(tiering::Position position,
                                                                    int micro_batch) = 0;

  // Small state beside the parameters that training passes change (BatchNorm's statistics), as JSON; null:
  // there is none. It is committed with the step. Asked before the first pass of a new run, and of each
  // training pass once, when it has finished computing and stands; waits for a device. What a pass of which
  // it was not asked has changed is undone by the next Begin. On the engine's caller's thread.
  virtual absl::StatusOr<nlohmann::json> Buffers() { return nlohmann::json(); }
  // What it was at the commit that the engine goes on from, after Measure and before the next pass.
  // kDataLoss: it is not this model's.
  virtual absl::Status RestoreBuffers(const nlohmann::json& buffers) {
    if (buffers.is_null()) return absl::OkStatus();
    return absl::DataLossError("the commit has buffers, and who computes this model keeps none");
  }

  // Of the pass that has finished computing, by micro-batch; waits for a device. On any one thread.
  virtual absl::StatusOr<std::vector<double>> Losses() = 0;
  // What the last stage of an evaluation returned, in host memory: for each micro-batch its values.
  virtual absl::StatusOr<std::vector<std::vector<HostTensor>>> Outputs() = 0;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_COMPUTE_H_
