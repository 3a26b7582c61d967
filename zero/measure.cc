#include "zero/measure.h"

#include <algorithm>
#include <chrono>
#include <sstream>

#include "absl/strings/str_cat.h"
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
int64_t PeakOf(Body&& body) {
  // Nothing is kept from before, so that measuring takes no more than what it measures.
  TensorMemory::Trim();
  TensorMemory::ResetLivePeak();
  const int64_t before = TensorMemory::Stats().live_bytes;
  body();
  return TensorMemory::Stats().peak_live_bytes - before;
}

// Of a few runs; the one before them has loaded LibTorch's kernels and the pool's buffers.
template <typename Body>
double FastestOf(Body&& body) {
  double best = 1e9;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const double begin = Seconds();
    body();
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
                                           bool trains) {
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
        peak = PeakOf([&] { module = spec.build(); });
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
  torch::Tensor input = example.inputs;
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
        torch::Tensor run = torch::zeros({block.layout().elements * width}, torch::kUInt8);
        block.module().train(trains);
        shape.input_bytes = s == 0 ? 0 : Rounded(BytesOf(input));
        shape.input_scratch_bytes = s == 0 ? 0 : BytesOf(input);
        auto forward = [&] {
          torch::NoGradGuard no_grad;
          block.Attach(run.data_ptr(), weights);
          output = spec.forward(block.module(), input, example).detach();
          block.Detach();
        };
        shape.forward_peak_bytes = PeakOf(forward) + Rounded(BytesOf(output));
        shape.forward_seconds = FastestOf(forward);
        auto backward = [&] {
          torch::AutoGradMode grad(true);
          block.Attach(run.data_ptr(), weights);
          torch::Tensor x = input.detach();
          if (s > 0 && torch::isFloatingType(x.scalar_type())) x.set_requires_grad(true);
          torch::Tensor y = spec.forward(block.module(), x, example);
          TORCH_CHECK(!last || y.dim() == 0, "the last stage must return a scalar loss, not ", y.sizes());
          if (y.requires_grad()) y.backward(torch::zeros_like(y));
          for (size_t i = 0; i < block.layout().parameters.size(); ++i) {
            (void)block.Gradient(i);  // one that is not contiguous is copied when it is taken
          }
          y = torch::Tensor();  // the graph goes before what it computed with
          block.Detach();
        };
        if (trains) {
          shape.backward_peak_bytes = PeakOf(backward);
          shape.backward_seconds = FastestOf(backward);
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
  known.clear();
  TensorMemory::Trim();
  // What is left over is the modules' own: buffers, and whatever the caller holds.
  graph.fixed_tensor_bytes = TensorMemory::Stats().live_bytes;
  return measured;
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
