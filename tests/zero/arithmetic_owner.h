// A model without products, whose owner drives it in host memory or on a device: every stage reads all
// weights of its block, and a gradient depends on its weight. What it computes is no derivative of anything.
#ifndef PENSTOCK_TESTS_ZERO_ARITHMETIC_OWNER_H_
#define PENSTOCK_TESTS_ZERO_ARITHMETIC_OWNER_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/float16.h"
#include "zero/compute/driven_compute.h"
#include "zero/engine/driven_engine.h"

namespace penstock::zero::testing_support {

// Streams of a device on which work is done later.
class DeviceQueue {
 public:
  virtual ~DeviceQueue() = default;
  virtual void* NewStream() = 0;
  virtual void Enqueue(void* stream, std::function<void()> work) = 0;
};

// Blocks of two parameters each; a stage for each of `stages`, which names its block.
struct Shape {
  std::vector<std::vector<int64_t>> blocks = {{3000, 50}, {5000, 7}, {5000, 7}, {20000, 300}, {5000, 7}};
  std::vector<int> stages = {0, 1, 2, 3, 4, 0};  // the first block is tied
  std::vector<int> frozen;                       // blocks
  std::vector<int> partly_frozen;                // blocks whose first parameter is
  kernels::DType dtype = kernels::DType::kBf16;
  int micro_batches = 1;
};

inline float Load(kernels::DType type, const std::byte* from, int64_t i) {
  uint16_t half = 0;
  float value = 0;
  if (type == kernels::DType::kFp32) {
    std::memcpy(&value, from + 4 * i, 4);
    return value;
  }
  std::memcpy(&half, from + 2 * i, 2);
  return type == kernels::DType::kBf16 ? kernels::Bf16ToFloat(half) : kernels::Fp16ToFloat(half);
}

class ArithmeticOwner {
 public:
  // queue: where the owner computes on a device; null: at once.
  ArithmeticOwner(Shape shape, bool on_device, DeviceQueue* queue)
      : shape_(std::move(shape)), on_device_(on_device), queue_(queue) {
    for (size_t b = 0; b < shape_.blocks.size(); ++b) {
      std::vector<ParameterSpec> specs;
      for (size_t p = 0; p < shape_.blocks[b].size(); ++p) {
        const bool frozen = Has(shape_.frozen, b) || (p == 0 && Has(shape_.partly_frozen, b));
        specs.push_back({"p" + std::to_string(p), {shape_.blocks[b][p]}, !frozen});
      }
      layouts_.push_back(std::make_shared<const FlatLayout>(FlatLayout::Of(specs)));
    }
    if (queue_ != nullptr) streams_ = {queue_->NewStream(), queue_->NewStream(), queue_->NewStream()};
  }

  Measured Measure() const {
    Measured measured;
    measured.identity = {{"architecture", "arithmetic"}};
    for (size_t b = 0; b < layouts_.size(); ++b) {
      measured.graph.blocks.push_back({.name = "block" + std::to_string(b),
                                       .elements = layouts_[b]->elements,
                                       .trains = layouts_[b]->Trains(),
                                       .trained_from = layouts_[b]->trained_from});
      measured.layouts.push_back(layouts_[b]);
      measured.parameters += layouts_[b]->parameter_elements;
    }
    for (size_t s = 0; s < shape_.stages.size(); ++s) {
      measured.graph.stages.push_back({.name = "stage" + std::to_string(s),
                                       .block = tiering::BlockIndex(shape_.stages[s]),
                                       .forward_seconds = 1e-4,
                                       .backward_seconds = 3e-4});
    }
    return measured;
  }

  EngineOptions Options(const std::string& directory) const {
    EngineOptions options;
    options.dtype = shape_.dtype;
    options.micro_batches = shape_.micro_batches;
    options.storage.state_dirs = {directory};
    options.storage.overwrite = true;
    options.initial_values = [](int block, int64_t first, int64_t n, float* to) {
      for (int64_t i = 0; i < n; ++i) to[i] = 0.01F * static_cast<float>((first + i + block) % 19 - 9);
      return absl::OkStatus();
    };
    return options;
  }

  absl::Status Step(DrivenEngine& engine, int64_t step, StepResult* result) {
    if (absl::Status begun = engine.Begin(Next::kTrain); !begun.ok()) return begun;
    absl::Status computed = Pass(engine.compute(), step);
    absl::StatusOr<StepResult> finished = engine.Finish();
    if (finished.ok()) *result = *finished;
    computed.Update(finished.status());
    return computed;
  }

  absl::Status Pass(DrivenCompute& compute, int64_t step) { return PassUntil(compute, step, 0); }

  // Without backward of the stages before `stops_at`.
  absl::Status PassUntil(DrivenCompute& compute, int64_t step, int stops_at) {
    step_ = step;
    micro_.clear();
    for (int m = 0; m < shape_.micro_batches; ++m) {
      micro_.push_back(std::make_shared<Micro>());
      micro_.back()->inputs.assign(shape_.stages.size(), 0);
    }
    const int last = static_cast<int>(shape_.stages.size()) - 1;
    for (int s = 0; s < last; ++s) {
      for (int m = 0; m < shape_.micro_batches; ++m) {
        if (absl::Status status = One(compute, Direction::kForward, s, m); !status.ok()) return status;
      }
    }
    int first = 0;
    while (first < last && !layouts_[At(first)]->Trains()) ++first;
    first = std::max(first, stops_at);
    for (int s = last; s >= first; --s) {
      for (int m = 0; m < shape_.micro_batches; ++m) {
        if (absl::Status status = One(compute, Direction::kBackward, s, m); !status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  absl::Status One(DrivenCompute& compute, Direction direction, int s, int m) {
    const bool backward = direction == Direction::kBackward;
    // Forward, backward, and what a use is left with, on streams of their own.
    const std::optional<DeviceStream> stream = StreamOf(backward ? 1 : 0);
    absl::StatusOr<DrivenCompute::Entered> entered =
        compute.Enter(direction, tiering::StageIndex(s), m, stream);
    if (!entered.ok()) return entered.status();
    const StageUse use = entered->use();
    const std::byte* const weights = entered->weights().front().data;
    const double scale = compute.pass().loss_gradient;
    const std::shared_ptr<Micro> micro = micro_[static_cast<size_t>(m)];
    if (!backward) {
      On(stream, [this, micro, s, weights] { Forward(*micro, s, weights); });
      DrivenCompute::Result result;
      result.stream = stream;
      return compute.Leave(*std::move(entered), std::move(result));
    }
    DrivenCompute::Result result;
    std::vector<Gradient> gradients;
    std::vector<std::shared_ptr<std::vector<std::byte>>> memory;  // of them
    const FlatLayout& layout = *layouts_[At(s)];
    for (size_t p = 0; p < layout.parameters.size(); ++p) {
      if (!layout.parameters[p].trains) continue;
      if (p == 1 && (m + step_) % 3 == 0) continue;  // takes no part
      const bool wide = p == 0 && m == 1;            // of another type than the weights
      const ElementType type = wide || shape_.dtype == kernels::DType::kFp32 ? ElementType::kFp32
                               : shape_.dtype == kernels::DType::kBf16       ? ElementType::kBf16
                                                                             : ElementType::kFp16;
      Gradient gradient{static_cast<int>(p),
                        {.type = type, .sizes = layout.parameters[p].sizes, .on_device = on_device_}};
      memory.push_back(std::make_shared<std::vector<std::byte>>(static_cast<size_t>(gradient.value.bytes()),
                                                                std::byte{0xff}));
      gradient.value.data = memory.back()->data();
      gradients.push_back(gradient);
    }
    On(stream, [this, micro, s, weights, scale, gradients, step = step_] {
      Backward(*micro, s, step, weights, scale, gradients);
    });
    if (layout.Trains())
      result.gradients = {{tiering::BlockIndex(shape_.stages[static_cast<size_t>(s)]), gradients}};
    const std::optional<DeviceStream> left = StreamOf(2);
    result.stream = left;
    if (stream.has_value()) result.also = {*stream};
    if (!use.passes_gradients) result.loss = micro->loss.get_future().get();  // known since long
    const absl::Status status = compute.Leave(*std::move(entered), std::move(result));
    // Their memory is somebody else's now.
    On(left, [memory] {
      for (const auto& each : memory) std::fill(each->begin(), each->end(), std::byte{0xff});
    });
    return status;
  }

 private:
  struct Micro {
    float value = 0.5F, flows = 0;
    std::vector<float> inputs;  // by stage
    std::promise<double> loss;
  };

  static bool Has(const std::vector<int>& all, size_t one) {
    return std::find(all.begin(), all.end(), static_cast<int>(one)) != all.end();
  }
  size_t At(int stage) const { return static_cast<size_t>(shape_.stages[static_cast<size_t>(stage)]); }
  std::optional<DeviceStream> StreamOf(size_t which) const {
    if (streams_.empty()) return std::nullopt;
    return DeviceStream{.stream = streams_[which]};
  }
  void On(const std::optional<DeviceStream>& stream, std::function<void()> work) {
    if (!stream.has_value()) return work();
    queue_->Enqueue(stream->stream, std::move(work));
  }

  void Forward(Micro& micro, int s, const std::byte* weights) const {
    micro.inputs[static_cast<size_t>(s)] = micro.value;
    float sum = 0;
    for (const Parameter& parameter : layouts_[At(s)]->parameters) {
      for (int64_t i = 0; i < parameter.elements; ++i)
        sum = 0.99F * sum + Load(shape_.dtype, weights, parameter.offset + i);
    }
    micro.value = std::tanh(micro.value + 0.1F * sum);
  }
  void Backward(Micro& micro, int s, int64_t step, const std::byte* weights, double scale,
                const std::vector<Gradient>& gradients) const {
    if (s + 1 == static_cast<int>(shape_.stages.size())) {
      Forward(micro, s, weights);
      const float difference = micro.value - 0.1F * static_cast<float>(step % 5);
      micro.flows = static_cast<float>(2 * scale * difference);
      micro.loss.set_value(static_cast<double>(difference) * difference);
    }
    const FlatLayout& layout = *layouts_[At(s)];
    for (const Gradient& gradient : gradients) {
      const Parameter& parameter = layout.parameters[static_cast<size_t>(gradient.parameter)];
      for (int64_t i = 0; i < parameter.elements; ++i) {
        const float value = micro.flows * (Load(shape_.dtype, weights, parameter.offset + i) +
                                           0.01F * static_cast<float>(i % 7));
        auto* const to = static_cast<std::byte*>(gradient.value.data);
        if (gradient.value.type == ElementType::kFp32) {
          std::memcpy(to + 4 * i, &value, 4);
        } else {
          const uint16_t half = gradient.value.type == ElementType::kBf16 ? kernels::FloatToBf16(value)
                                                                          : kernels::FloatToFp16(value);
          std::memcpy(to + 2 * i, &half, 2);
        }
      }
    }
    const float input = micro.inputs[static_cast<size_t>(s)];
    micro.flows *= 0.9F * (1.1F - input * input);
  }

  const Shape shape_;
  const bool on_device_;
  DeviceQueue* const queue_;
  std::vector<std::shared_ptr<const FlatLayout>> layouts_;
  std::vector<void*> streams_;
  int64_t step_ = 0;
  std::vector<std::shared_ptr<Micro>> micro_;
};

}  // namespace penstock::zero::testing_support

#endif  // PENSTOCK_TESTS_ZERO_ARITHMETIC_OWNER_H_
