// The owner of the hand-written model of examples/plain_model, who drives it himself.
#ifndef PENSTOCK_TESTS_ZERO_PLAIN_OWNER_H_
#define PENSTOCK_TESTS_ZERO_PLAIN_OWNER_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plain_compute.h"
#include "tests/zero/plain_batch.h"
#include "zero/compute/device.h"
#include "zero/compute/driven_compute.h"
#include "zero/engine/engine_options.h"

namespace penstock::zero::testing_support {

// Computes it where it is told to, with the engine's weights.
class Owner {
 public:
  Owner(const plain::Shape& shape, int micro_batches)
      : shape_(shape), micro_batches_(micro_batches), plain_(shape) {}

  absl::StatusOr<Measured> Measure() {
    absl::StatusOr<Measured> measured =
        plain_.Measure({HostDevice().get(), kernels::DType::kFp32, 1}, PlainBatch(shape_, 0), {});
    if (!measured.ok()) return measured;
    measured->graph.inputs_beside = moves_inputs;
    for (tiering::StageShape& stage : measured->graph.stages) {
      if (!moves_inputs) stage.input_bytes = stage.input_scratch_bytes = 0;
    }
    return measured;
  }
  EngineOptions Options(const std::string& directory) {
    EngineOptions options;
    options.dtype = kernels::DType::kFp32;
    options.micro_batches = micro_batches_;
    options.storage.state_dirs = {directory};
    options.storage.overwrite = true;
    options.initial_values = [this](int block, int64_t first, int64_t n, float* to) {
      if (reader_ == nullptr || block != block_read_ || first == 0)  // another rank's part begins elsewhere
        reader_ = *plain_.Initial(tiering::BlockIndex(block), 100 + static_cast<uint64_t>(block));
      block_read_ = block;
      return reader_->Read(first, n, to);
    };
    return options;
  }

  // One training pass, in vertical order.
  absl::Status Compute(DrivenCompute& driven, std::vector<Batch> batches) {
    for (int s = 0; s + 1 < shape_.layers; ++s) {
      for (int m = 0; m < micro_batches_; ++m) {
        absl::Status status = One(driven, Direction::kForward, s, m, &batches);
        if (!status.ok()) return status;
      }
    }
    for (int s = shape_.layers - 1; s >= 0; --s) {
      for (int m = 0; m < micro_batches_; ++m) {
        absl::Status status = One(driven, Direction::kBackward, s, m, &batches);
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  absl::Status One(DrivenCompute& driven, Direction direction, int stage, int m,
                   std::vector<Batch>* batches) {
    absl::StatusOr<DrivenCompute::Entered> entered = driven.Enter(direction, tiering::StageIndex(stage), m);
    if (!entered.ok()) return entered.status();
    if (!batches->empty()) {
      absl::Status begun = plain_.Begin(driven.pass(), std::exchange(*batches, {}));
      if (!begun.ok()) return begun;
    }
    DrivenCompute::Result result;
    const StageUse use = entered->use();
    for (const auto& [dropped, number] : driven.TakeDropped()) {
      plain_.DropInputs(tiering::Position(dropped.value()), number);
      --inputs_here_;
    }
    if (direction == Direction::kForward) {
      absl::Status status = plain_.Forward(use, entered->weights());
      if (!status.ok()) return status;
      if (moves_inputs && stage > 0 && stage < shape_.layers - 3) {
        const auto inputs = plain_.SavedInputs(use.position, m);
        if (!inputs.ok()) return inputs.status();
        result.inputs.assign(inputs->begin(), inputs->end());
        most_inputs_here = std::max(most_inputs_here, ++inputs_here_);
      }
      return driven.Leave(*std::move(entered), std::move(result));
    }
    if (std::vector<HostBuffer> back = driven.TakeInputs(use.stage, m); !back.empty()) {
      const auto inputs = plain_.RestoreInputs(use.position, m);
      if (!inputs.ok()) return inputs.status();
      for (size_t i = 0; i < back.size(); ++i)
        std::memcpy((*inputs)[i].data, back[i].data(), static_cast<size_t>((*inputs)[i].bytes()));
      ++came_back;
    }
    absl::Status status = plain_.Backward(use, entered->weights());
    if (!status.ok()) return status;
    const auto gradients = plain_.Gradients(use, tiering::BlockIndex(stage));
    result.gradients = {{tiering::BlockIndex(stage), {gradients->begin(), gradients->end()}}};
    result.loss = (*plain_.Losses())[static_cast<size_t>(m)];
    if (leaves) leaves(&result);
    status = driven.Leave(*std::move(entered), std::move(result));
    plain_.Release(use);
    return status;
  }

  // Inputs of all stages but the first and the last three may leave memory. Before Measure.
  bool moves_inputs = false;
  int most_inputs_here = 0, came_back = 0;

  // What becomes of a result before a backward use is left with it.
  std::function<void(DrivenCompute::Result*)> leaves;

 private:
  const plain::Shape shape_;
  const int micro_batches_;
  plain::PlainCompute plain_;
  std::unique_ptr<InitialReader> reader_;
  int block_read_ = -1;
  int inputs_here_ = 0;
};

}  // namespace penstock::zero::testing_support

#endif  // PENSTOCK_TESTS_ZERO_PLAIN_OWNER_H_
