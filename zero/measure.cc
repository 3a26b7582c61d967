#include "zero/measure.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "kernels/cache.h"
#include "kernels/checksum.h"
#include "zero/guarded.h"
#include "zero/stage_runner.h"
#include "zero/tensor_memory.h"
#include "zero/update.h"

namespace penstock::zero {
namespace {

int64_t BytesOf(const torch::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<int64_t>(tensor.element_size()) : 0;
}

// Rounded up as the allocator does.
int64_t Rounded(int64_t bytes) { return bytes == 0 ? 0 : tiering::AlignUp(bytes + 64, 16 << 10); }

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Peak of live tensor bytes over `body`, beyond what was live before.
template <typename Body>
int64_t PeakOf(Device& device, Body&& body) {
  // Nothing is kept from before, so that measuring takes no more than what it measures.
  device.TrimTensors();
  device.ResetLivePeak();
  const int64_t before = device.tensors().live_bytes;
  body();
  return device.tensors().peak_live_bytes - before;
}

// When the device has computed what it was given.
void Finish(Device& device) {
  std::promise<absl::Status> done;
  device.AfterCompute([&](absl::Status status) { done.set_value(std::move(status)); });
  const absl::Status status = done.get_future().get();
  TORCH_CHECK(status.ok(), std::string(status.message()));
}

// Of a few runs; the one before them has loaded LibTorch's kernels and the pool's buffers. `run` is what a
// drive would have brought in the meantime: cached, it would make a block look faster than it trains.
template <typename Body>
double FastestOf(Device& device, const torch::Tensor& run, Body&& body) {
  double best = 1e9;
  for (int repeat = 0; repeat < 3; ++repeat) {
    if (run.device().is_cpu()) kernels::EvictFromCaches(run.data_ptr(), run.nbytes());
    const double begin = Seconds();
    body();
    Finish(device);
    best = std::min(best, Seconds() - begin);
  }
  return best;
}

struct StageMeasure {
  tiering::StageShape shape;
  torch::Tensor output;  // shape and type, no data of interest
};

}  // namespace

absl::StatusOr<MeasuredModel> MeasureModel(const Model& model, const Batch& example, kernels::DType weights,
                                           bool trains, Device& device) {
  MeasuredModel measured;
  tiering::ModelGraph& graph = measured.graph;
  graph.batch_bytes = Rounded(BytesOf(example.inputs)) + Rounded(BytesOf(example.targets));
  std::map<std::string, size_t> first_of_kind;
  for (size_t b = 0; b < model.blocks.size(); ++b) {
    const BlockSpec& spec = model.blocks[b];
    const auto known = spec.kind.empty() ? first_of_kind.end() : first_of_kind.find(spec.kind);
    if (known != first_of_kind.end()) {
      graph.blocks.push_back(graph.blocks[known->second]);
      graph.blocks.back().name = spec.name;
      measured.modules.push_back(measured.modules[known->second]);
    } else {
      std::shared_ptr<torch::nn::Module> module;
      int64_t peak = 0;
      const absl::Status built = Guarded(absl::StrCat("building block ", spec.name), [&] {
        peak = PeakOf(*HostDevice(), [&] { module = spec.build(); });
        TORCH_CHECK(module != nullptr, "its factory returned nothing");
      });
      if (!built.ok()) return built;
      measured.modules.push_back(std::make_shared<BlockModule>(std::move(module)));
      const RunLayout& layout = measured.modules.back()->layout();
      graph.blocks.push_back({spec.name, layout.elements, peak});
      if (!spec.kind.empty()) first_of_kind[spec.kind] = b;
    }
    measured.parameters += measured.modules.back()->layout().parameter_elements;
  }

  std::map<std::string, StageMeasure> known;
  const auto on_device = torch::TensorOptions().device(device.torch_device());
  Batch batch;
  const absl::Status moved = Guarded("the example batch", [&] {
    batch = {device.ToDevice(example.inputs), device.ToDevice(example.targets)};
  });
  if (!moved.ok()) return moved;
  torch::Tensor input = batch.inputs;
  for (size_t s = 0; s < model.stages.size(); ++s) {
    const StageSpec& spec = model.stages[s];
    if (spec.block < 0 || static_cast<size_t>(spec.block) >= model.blocks.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("stage ", spec.name, " uses block ", spec.block, " of ", model.blocks.size()));
    }
    const bool last = s + 1 == model.stages.size();
    const std::string& kind = model.blocks[static_cast<size_t>(spec.block)].kind;
    std::ostringstream key;
    key << kind << '/' << input.sizes() << input.scalar_type() << last << (s == 0);
    tiering::StageShape shape;
    const auto same = kind.empty() ? known.end() : known.find(key.str());
    if (same != known.end()) {
      shape = same->second.shape;
      input = same->second.output;
    } else {
      torch::Tensor output;
      const absl::Status ran = Guarded(absl::StrCat("measuring stage ", spec.name), [&] {
        BlockModule& block = *measured.modules[static_cast<size_t>(spec.block)];
        const auto width = static_cast<int64_t>(kernels::BytesPerElement(weights));
        torch::Tensor run = torch::zeros({block.layout().elements * width}, on_device.dtype(torch::kUInt8));
        block.module().train(trains);
        shape.input_bytes = s == 0 ? 0 : Rounded(BytesOf(input));
        shape.input_scratch_bytes = s == 0 ? 0 : BytesOf(input);
        auto forward = [&] {
          torch::NoGradGuard no_grad;
          block.Attach(run.data_ptr(), weights, device);
          output = spec.forward(block.module(), input, batch).detach();
          block.Detach();
        };
        shape.forward_peak_bytes = PeakOf(device, forward) + Rounded(BytesOf(output));
        shape.forward_seconds = FastestOf(device, run, forward);
        auto backward = [&] {
          torch::AutoGradMode grad(true);
          block.Attach(run.data_ptr(), weights, device);
          torch::Tensor x = input.detach();
          if (s > 0 && torch::isFloatingType(x.scalar_type())) x.set_requires_grad(true);
          torch::Tensor y = spec.forward(block.module(), x, batch);
          TORCH_CHECK(!last || y.dim() == 0, "the last stage must return a scalar loss, not ", y.sizes());
          if (y.requires_grad()) y.backward(torch::zeros_like(y));
          // Taken to where it waits, for which the run itself will do: it is zero, and so are they.
          const torch::Dtype computes = device.compute_dtype(weights);
          for (size_t i = 0; i < block.layout().parameters.size(); ++i) {
            const torch::Tensor gradient = block.Gradient(i);
            if (!gradient.defined()) continue;
            device.Convert(computes == torch::kFloat32 ? kernels::DType::kFp32 : weights, gradient.data_ptr(),
                           weights,
                           static_cast<char*>(run.data_ptr()) + block.layout().parameters[i].offset * width,
                           static_cast<size_t>(gradient.numel()));
          }
          y = torch::Tensor();  // the graph goes before what it computed with
          block.Detach();
        };
        if (trains) {
          shape.backward_peak_bytes = PeakOf(device, backward);
          shape.backward_seconds = FastestOf(device, run, backward);
        }
      });
      if (!ran.ok()) return ran;
      known[key.str()] = {shape, output};
      input = output;
    }
    shape.name = spec.name;
    shape.block = spec.block;
    graph.stages.push_back(std::move(shape));
  }
  input = torch::Tensor();
  batch = Batch();
  known.clear();
  device.TrimTensors();
  // What is left over is the modules' own: buffers, and whatever the caller holds.
  graph.fixed_tensor_bytes = device.tensors().live_bytes;
  return measured;
}

absl::StatusOr<CopyRates> MeasureCopyRates(Device& device) {
  constexpr int64_t kPiece = int64_t{4} << 20;  // about a tile's weights
  const int64_t bytes = std::clamp(device.capacity_bytes() / 4 / kPiece * kPiece, kPiece, 16 * kPiece);
  absl::StatusOr<std::byte*> there = device.AllocateArena(bytes);
  if (!there.ok()) return there.status();
  // A whole page of its own: neighbours must not be pinned and let go with it.
  std::unique_ptr<std::byte, decltype(&std::free)> here(
      static_cast<std::byte*>(std::aligned_alloc(2 << 20, static_cast<size_t>(bytes))), &std::free);
  if (here == nullptr)
    return absl::ResourceExhaustedError(absl::StrCat(bytes, " bytes to measure copies with"));
  std::memset(here.get(), 0, static_cast<size_t>(bytes));
  if (absl::Status status = device.RegisterHost(here.get(), bytes); !status.ok()) return status;
  absl::Status failed;
  // Pieces one after the other, as the lanes have them in flight; the second round counts.
  auto rate = [&](bool in) {
    double seconds = 0;
    for (int round = 0; round < 2; ++round) {
      std::vector<std::promise<absl::Status>> done(static_cast<size_t>(bytes / kPiece));
      const double begin = Seconds();
      for (size_t i = 0; i < done.size(); ++i) {
        std::byte* const host = here.get() + static_cast<int64_t>(i) * kPiece;
        std::byte* const far = *there + static_cast<int64_t>(i) * kPiece;
        auto report = [&done, i](absl::Status status) { done[i].set_value(std::move(status)); };
        if (in) {
          device.CopyIn(far, host, kPiece, /*after_compute=*/false, report);
        } else {
          device.CopyOut(host, far, kPiece, report);
        }
      }
      for (std::promise<absl::Status>& each : done) failed.Update(each.get_future().get());
      seconds = Seconds() - begin;
    }
    return static_cast<double>(bytes) / std::max(seconds, 1e-9);
  };
  CopyRates rates;
  rates.h2d_bytes_per_s = rate(true);
  rates.d2h_bytes_per_s = rate(false);
  device.UnregisterHost(here.get());
  if (!failed.ok()) return failed;
  return rates;
}

double MeasureUpdateRate(const TileFormat& format, const OptimizerOptions& optimizer) {
  constexpr int64_t kElements = int64_t{1} << 19;
  RunLayout layout;
  layout.elements = kElements;
  layout.trained = {{0, kElements}};
  TileMemory memory;
  memory.elements = kElements;
  const tiering::Precision precision = format.precision();
  std::vector<torch::Tensor> held;
  auto take = [&](int64_t bytes) {
    held.push_back(torch::zeros({bytes}, torch::kUInt8));
    return held.back().data_ptr();
  };
  memory.weights = take(precision.SegmentBytes(0, kElements));
  for (size_t s = 1; s < precision.segment_bytes.size(); ++s)
    memory.state.push_back(take(precision.SegmentBytes(s, kElements)));
  memory.gradient = take(kElements * precision.gradient_bytes);
  const OptimizerStep step = MakeOptimizerStep(optimizer, {.lr = 1e-3}, 1, 1.0);
  double best = 1e9;
  for (int repeat = 0; repeat < 4; ++repeat) {
    for (const torch::Tensor& bytes : held) kernels::EvictFromCaches(bytes.data_ptr(), bytes.nbytes());
    const double begin = Seconds();
    // As an update on the drive: what was read is checked, what is written is checksummed.
    for (int pass = 0; pass < 2; ++pass) {
      uint64_t sum = 0;
      for (const torch::Tensor& bytes : held)
        sum += kernels::Checksum(bytes.data_ptr(), static_cast<size_t>(bytes.numel()));
      if (sum == 1) best = 0;  // the sums must not be optimised away
      if (pass == 0) UpdateTile(format, step, /*seed=*/1, layout, {0, kElements}, memory);
    }
    best = std::min(best, Seconds() - begin);
  }
  return static_cast<double>(kElements) / std::max(best, 1e-9);
}

}  // namespace penstock::zero
