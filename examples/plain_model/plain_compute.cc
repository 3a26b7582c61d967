#include "plain_compute.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>

#include "base/status_macros.h"
#include "zero/compute/device.h"

namespace plain {
namespace {

using penstock::zero::Batch;
using penstock::zero::ElementType;
using penstock::zero::Gradient;
using penstock::zero::HostBuffer;
using penstock::zero::HostTensor;
using penstock::zero::StageUse;
using penstock::zero::TensorMemory;
using penstock::zero::TensorView;
using penstock::zero::Weights;

constexpr int64_t kFloat = sizeof(float);

float* Floats(const HostBuffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

absl::StatusOr<HostBuffer> Rows(int64_t rows, int64_t width) {
  return HostBuffer::Of(rows * width * kFloat, "memory for rows of a layer");
}

const TensorView* Find(const Batch& batch, std::string_view name) {
  for (const auto& [each, view] : batch.tensors) {
    if (each == name) return &view;
  }
  return nullptr;
}

// Both of a batch's tensors have the width's rows, as many.
absl::Status Check(const Batch& batch, int64_t width) {
  const TensorView* const inputs = Find(batch, "inputs");
  const TensorView* const targets = Find(batch, "targets");
  const auto fits = [width](const TensorView* view) {
    return view != nullptr && view->type == ElementType::kFp32 && view->sizes.size() == 2 &&
           view->sizes[1] == width;
  };
  if (fits(inputs) && fits(targets) && inputs->sizes == targets->sizes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "a batch has \"inputs\" and \"targets\", both [rows, width] in fp32, of the model's width");
}

// A layer's parameters in its flat parameters.
struct Layer {
  const float* weight;
  const float* bias;
};
Layer LayerOf(const penstock::zero::FlatLayout& layout, const std::byte* run) {
  const auto* const values = reinterpret_cast<const float*>(run);
  return {values + layout.parameters[0].offset, values + layout.parameters[1].offset};
}

// y = tanh(W x + b) for each row.
void Apply(const Layer& layer, const float* x, int64_t rows, int64_t width, float* y) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < width; ++o) {
      float sum = layer.bias[o];
      for (int64_t i = 0; i < width; ++i) sum += layer.weight[o * width + i] * x[r * width + i];
      y[r * width + o] = std::tanh(sum);
    }
  }
}

// From the gradient of y in `dy`, which becomes that of W x + b, those of W, b and, where it is asked for, x.
void Differentiate(const Layer& layer, const float* x, const float* y, int64_t rows, int64_t width, float* dy,
                   float* dw, float* db, float* dx) {
  for (int64_t i = 0; i < rows * width; ++i) dy[i] *= 1 - y[i] * y[i];
  std::fill_n(dw, width * width, 0.0F);
  std::fill_n(db, width, 0.0F);
  if (dx != nullptr) std::fill_n(dx, rows * width, 0.0F);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < width; ++o) {
      const float d = dy[r * width + o];
      db[o] += d;
      for (int64_t i = 0; i < width; ++i) {
        dw[o * width + i] += d * x[r * width + i];
        if (dx != nullptr) dx[r * width + i] += d * layer.weight[o * width + i];
      }
    }
  }
}

// Normal numbers, the same for each seed on every machine.
class NormalValues final : public penstock::zero::InitialReader {
 public:
  NormalValues(const penstock::zero::FlatLayout& layout, uint64_t seed, double deviation)
      : layout_(layout), random_(seed), deviation_(deviation) {}

  // Every number of the weight is drawn, in its order, whether it is asked for or not.
  absl::Status Read(int64_t first, int64_t elements, float* to) override {
    std::fill_n(to, elements, 0.0F);
    const penstock::zero::Parameter& weight = layout_.parameters[0];
    for (; drawn_ < weight.elements && weight.offset + drawn_ < first + elements; ++drawn_) {
      const float value = Draw();
      if (weight.offset + drawn_ >= first) to[weight.offset + drawn_ - first] = value;
    }
    return absl::OkStatus();
  }

 private:
  // The sum of twelve even ones: as good as normal here, and the same in every standard library.
  float Draw() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += static_cast<double>(random_() >> 11) * 0x1p-53;
    return static_cast<float>(deviation_ * sum);
  }

  const penstock::zero::FlatLayout& layout_;
  std::mt19937_64 random_;
  const double deviation_;
  int64_t drawn_ = 0;
};

}  // namespace

PlainCompute::PlainCompute(const Shape& shape)
    : shape_(shape),
      layout_(std::make_shared<const penstock::zero::FlatLayout>(
          penstock::zero::FlatLayout::Of(std::vector<penstock::zero::ParameterSpec>{
              {"weight", {shape.width, shape.width}}, {"bias", {shape.width}}}))) {}

absl::StatusOr<penstock::zero::Measured> PlainCompute::Measure(
    const penstock::zero::ComputeSetup& setup, const Batch& example,
    const penstock::zero::MeasureOptions& options) {
  if (setup.weights != penstock::kernels::DType::kFp32 || setup.device->has_own_memory())
    return absl::InvalidArgumentError("the plain model computes on the processor, with fp32 weights");
  RETURN_IF_ERROR(Check(example, shape_.width));
  micro_batches_.clear();
  const int64_t rows = example.tensors.front().second.sizes[0], width = shape_.width;
  const int64_t of_rows = TensorMemory::Counted(rows * width * kFloat);
  const int64_t of_gradients =
      TensorMemory::Counted(width * width * kFloat) + TensorMemory::Counted(width * kFloat);

  penstock::zero::Measured measured;
  measured.identity = {{"architecture", "plain"}, {"layers", shape_.layers}, {"width", width}};
  penstock::tiering::StageShape stage;
  stage.forward_peak_bytes = of_rows;                      // the output
  stage.backward_peak_bytes = 3 * of_rows + of_gradients;  // the output again, two gradients of rows
  if (options.times) {
    ASSIGN_OR_RETURN(const HostBuffer run, HostBuffer::Of(layout_->elements * kFloat, "a layer to time"));
    ASSIGN_OR_RETURN(const HostBuffer x, Rows(rows, width));
    ASSIGN_OR_RETURN(const HostBuffer y, Rows(rows, width));
    std::memset(run.data(), 0, static_cast<size_t>(run.bytes()));
    std::memset(x.data(), 0, static_cast<size_t>(x.bytes()));
    const auto start = std::chrono::steady_clock::now();
    Apply(LayerOf(*layout_, run.data()), Floats(x), rows, width, Floats(y));
    stage.forward_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    stage.backward_seconds = 3 * stage.forward_seconds;  // three products of the same size
  }
  for (int i = 0; i < shape_.layers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    measured.graph.blocks.push_back({.name = name, .elements = layout_->elements});
    stage.name = name;
    stage.block = penstock::tiering::BlockIndex(i);
    stage.input_bytes = i == 0 ? 0 : of_rows;  // the first one's is the batch
    stage.input_scratch_bytes = i == 0 ? 0 : rows * width * kFloat;
    measured.graph.stages.push_back(stage);
    measured.layouts.push_back(layout_);
    measured.parameters += layout_->parameter_elements;
  }
  return measured;
}

absl::StatusOr<std::unique_ptr<penstock::zero::InitialReader>> PlainCompute::Initial(
    penstock::tiering::BlockIndex, uint64_t seed) {
  return std::make_unique<NormalValues>(*layout_, seed, 1 / std::sqrt(static_cast<double>(shape_.width)));
}

absl::Status PlainCompute::Begin(const penstock::zero::PassInfo& pass, std::vector<Batch> batches) {
  pass_ = pass;
  micro_batches_.clear();
  losses_.assign(batches.size(), 0);
  for (Batch& batch : batches) {
    RETURN_IF_ERROR(Check(batch, shape_.width));
    MicroBatch& made = micro_batches_.emplace_back();
    made.rows = Find(batch, "inputs")->sizes[0];
    made.targets = static_cast<const float*>(Find(batch, "targets")->data);
    made.saved.resize(static_cast<size_t>(shape_.layers));
    made.saved.front().view = *Find(batch, "inputs");
    made.batch = std::move(batch);
  }
  return absl::OkStatus();
}

const float* PlainCompute::Input(const MicroBatch& batch, const StageUse& use) const {
  return static_cast<const float*>(batch.saved[static_cast<size_t>(use.position.value())].view.data);
}

absl::Status PlainCompute::Forward(const StageUse& use, std::span<const Weights> weights) {
  MicroBatch& batch = micro_batches_[static_cast<size_t>(use.micro_batch)];
  ASSIGN_OR_RETURN(HostBuffer y, Rows(batch.rows, shape_.width));
  const int64_t elements = batch.rows * shape_.width;
  Apply(LayerOf(*layout_, weights.front().data), Input(batch, use), batch.rows, shape_.width, Floats(y));
  if (use.last) {
    double sum = 0;
    for (int64_t i = 0; i < elements; ++i) sum += std::pow(Floats(y)[i] - batch.targets[i], 2);
    losses_[static_cast<size_t>(use.micro_batch)] = sum / static_cast<double>(elements);
  }
  const auto at = static_cast<size_t>(use.position.value());
  if (!use.keeps_inputs) batch.saved[at].memory = HostBuffer();
  if (!use.last || !use.trains) {
    Saved& next = batch.saved[use.last ? at : at + 1];
    next.memory = std::move(y);
    next.view = {next.memory.data(), ElementType::kFp32, {batch.rows, shape_.width}};
  }
  return absl::OkStatus();
}

absl::Status PlainCompute::Backward(const StageUse& use, std::span<const Weights> weights) {
  MicroBatch& batch = micro_batches_[static_cast<size_t>(use.micro_batch)];
  const int64_t rows = batch.rows, width = shape_.width, elements = rows * width;
  const Layer layer = LayerOf(*layout_, weights.front().data);
  const float* const x = Input(batch, use);
  ASSIGN_OR_RETURN(const HostBuffer y, Rows(rows, width));
  Apply(layer, x, rows, width, Floats(y));
  HostBuffer dy = std::move(batch.from_above);
  if (use.last) {
    ASSIGN_OR_RETURN(dy, Rows(rows, width));
    double sum = 0;
    const double scale = 2 * pass_.loss_gradient / static_cast<double>(elements);
    for (int64_t i = 0; i < elements; ++i) {
      const float difference = Floats(y)[i] - batch.targets[i];
      sum += static_cast<double>(difference) * difference;
      Floats(dy)[i] = static_cast<float>(scale) * difference;
    }
    losses_[static_cast<size_t>(use.micro_batch)] = sum / static_cast<double>(elements);
  }
  ASSIGN_OR_RETURN(weight_gradient_, HostBuffer::Of(width * width * kFloat, "memory for a gradient"));
  ASSIGN_OR_RETURN(bias_gradient_, HostBuffer::Of(width * kFloat, "memory for a gradient"));
  HostBuffer dx;
  if (use.passes_gradients) {
    ASSIGN_OR_RETURN(dx, Rows(rows, width));
  }
  Differentiate(layer, x, Floats(y), rows, width, Floats(dy), Floats(weight_gradient_),
                Floats(bias_gradient_), dx.bytes() > 0 ? Floats(dx) : nullptr);
  batch.from_above = std::move(dx);
  if (use.position.value() > 0) batch.saved[static_cast<size_t>(use.position.value())].memory = HostBuffer();
  return absl::OkStatus();
}

absl::StatusOr<std::span<const Gradient>> PlainCompute::Gradients(const StageUse&,
                                                                  penstock::tiering::BlockIndex) {
  gradients_ = {{0, {weight_gradient_.data(), ElementType::kFp32, {shape_.width, shape_.width}}},
                {1, {bias_gradient_.data(), ElementType::kFp32, {shape_.width}}}};
  return gradients_;
}

void PlainCompute::Release(const StageUse&) {
  gradients_.clear();
  weight_gradient_ = HostBuffer();
  bias_gradient_ = HostBuffer();
}

absl::StatusOr<std::span<const TensorView>> PlainCompute::SavedInputs(penstock::tiering::Position position,
                                                                      int micro_batch) {
  const Saved& saved =
      micro_batches_[static_cast<size_t>(micro_batch)].saved[static_cast<size_t>(position.value())];
  return std::span(&saved.view, 1);
}

void PlainCompute::DropInputs(penstock::tiering::Position position, int micro_batch) {
  micro_batches_[static_cast<size_t>(micro_batch)].saved[static_cast<size_t>(position.value())].memory =
      HostBuffer();
}

absl::StatusOr<std::span<const TensorView>> PlainCompute::RestoreInputs(penstock::tiering::Position position,
                                                                        int micro_batch) {
  MicroBatch& batch = micro_batches_[static_cast<size_t>(micro_batch)];
  Saved& saved = batch.saved[static_cast<size_t>(position.value())];
  ASSIGN_OR_RETURN(saved.memory, Rows(batch.rows, shape_.width));
  saved.view.data = saved.memory.data();
  return std::span(&saved.view, 1);
}

absl::StatusOr<std::vector<std::vector<HostTensor>>> PlainCompute::Outputs() {
  std::vector<std::vector<HostTensor>> outputs;
  for (MicroBatch& batch : micro_batches_) {
    Saved& last = batch.saved.back();
    HostTensor& output = outputs.emplace_back().emplace_back();
    output.view = last.view;
    output.memory = std::move(last.memory);
  }
  return outputs;
}

}  // namespace plain
