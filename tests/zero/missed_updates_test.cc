// Parameters to which no gradient comes in some steps: each is updated by its own count, or stays as it is.
#include "zero/compute/missed_updates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "kernels/optimizer.h"
#include "plain_compute.h"
#include "swap/checkpoint.h"
#include "tests/zero/plain_batch.h"
#include "zero/compute/tile_format.h"
#include "zero/compute/update.h"
#include "zero/engine/engine.h"

namespace penstock::zero::missed_updates_test {
namespace {

using testing_support::PlainBatch;

TEST(MissedUpdates, CountsComeBackFromACommitAndAreRefusedWhereTheyAreNone) {
  std::mt19937_64 random(1);
  MissedUpdates missed;
  std::vector<int64_t> expected(200, 0);
  EXPECT_TRUE(missed.ToJson().is_null());
  for (int step = 0; step < 300; ++step) {
    std::vector<uint8_t> came(expected.size());
    const bool all = random() % 3 == 0;
    for (size_t p = 0; p < came.size(); ++p) {
      came[p] = all || random() % 4 != 0 ? 1 : 0;
      expected[p] += came[p] == 0 ? 1 : 0;
    }
    missed = missed.And(came);
    ASSERT_EQ(std::vector<int64_t>(missed.counts().begin(), missed.counts().end()), expected);
    const nlohmann::json json = missed.ToJson();
    EXPECT_LE(static_cast<int64_t>(json.dump().size()), MissedUpdates::MostBytes(200));
    const auto back = MissedUpdates::FromJson(nlohmann::json::parse(json.dump()), 200);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_THAT(back->counts(), testing::ElementsAreArray(expected));
  }
  EXPECT_TRUE(missed.And({}).counts().data() == missed.counts().data()) << "a gradient came to all";
  EXPECT_TRUE(MissedUpdates::FromJson(nlohmann::json(), 7)->none());
  EXPECT_TRUE(MissedUpdates::FromJson(nlohmann::json::parse("[0, 7]"), 7)->none());
  for (const char* const wrong :
       {"[1]", "[1, 6]", "[1, 8]", "[-1, 7]", "[1, 7, 1, 0, 1, 1]", "{}", "[1.5, 7]",
        "[1, 18446744073709551615, 0, 8]", "[18446744073709551615, 7]", "\"1,7\""}) {
    const auto refused = MissedUpdates::FromJson(nlohmann::json::parse(wrong), 7);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kDataLoss) << wrong;
  }
}

// A block's state, cut into tiles that have memory of their own, as in a plan.
class Tiles {
 public:
  Tiles(const TileFormat& format, const std::vector<tiering::Tile>& tiles) : format_(format), tiles_(tiles) {
    const tiering::Precision precision = format.precision();
    for (const tiering::Tile& tile : tiles) {
      Held& held = held_.emplace_back();
      for (size_t s = 0; s < precision.segment_bytes.size(); ++s)
        held.segments.emplace_back(static_cast<size_t>(precision.SegmentBytes(s, tile.elements)));
      held.gradient.resize(static_cast<size_t>(tile.elements * precision.gradient_bytes));
    }
  }

  size_t size() const { return tiles_.size(); }
  const tiering::Tile& tile(size_t i) const { return tiles_[i]; }
  TileMemory memory(size_t i) {
    TileMemory memory;
    memory.elements = tiles_[i].elements;
    for (size_t s = 0; s < held_[i].segments.size(); ++s)
      (s == 0 ? memory.weights : memory.state.emplace_back()) = held_[i].segments[s].data();
    memory.gradient = held_[i].gradient.data();
    return memory;
  }
  void Fill(const std::vector<float>& values, const std::vector<float>& gradient, const std::vector<float>& m,
            const std::vector<float>& v) {
    for (size_t i = 0; i < tiles_.size(); ++i) {
      const auto at = static_cast<size_t>(tiles_[i].offset);
      FillTile(format_, values.data() + at, memory(i));
      for (const auto& [kind, moment] :
           {std::pair{StateKind::kFirstMoment, &m}, {StateKind::kSecondMoment, &v}}) {
        if (Keeps(format_, kind))
          WriteValues(format_, memory(i), kind, 0, tiles_[i].elements, moment->data() + at);
      }
      kernels::Convert(kernels::DType::kFp32, gradient.data() + at, format_.weights, held_[i].gradient.data(),
                       static_cast<size_t>(tiles_[i].elements));
    }
  }
  std::vector<float> Read(StateKind kind) {
    std::vector<float> all;
    for (size_t i = 0; i < tiles_.size(); ++i) {
      std::vector<float> values(static_cast<size_t>(tiles_[i].elements));
      ReadValues(format_, memory(i), kind, 0, tiles_[i].elements, values.data());
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }

 private:
  struct Held {
    std::vector<std::vector<char>> segments;
    std::vector<char> gradient;
  };
  const TileFormat format_;
  const std::vector<tiering::Tile> tiles_;
  std::vector<Held> held_;
};

std::vector<OptimizerOptions> Algorithms() {
  return {kernels::AdamOptions{.weight_decay = 0.1},
          kernels::AdamOptions{.weight_decay = 0.1, .mode = kernels::AdamMode::kAdam},
          kernels::AdagradOptions{.lr_decay = 0.1, .weight_decay = 0.1},
          kernels::LionOptions{.weight_decay = 0.1},
          kernels::SgdOptions{.momentum = 0.9, .dampening = 0.1, .weight_decay = 0.1},
          kernels::SgdOptions{.weight_decay = 0.1},
          kernels::LambOptions{.adam = {.weight_decay = 0.1}}};
}

// Against the kernels over each parameter by itself.
TEST(MissedUpdates, EachParameterOfATileIsUpdatedByItsOwnCountOrKeepsItsBits) {
  int shared_scales = 0, kept = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    const OptimizerOptions algorithm = Algorithms()[static_cast<size_t>(below(7))];
    TileFormat format;
    format.moments = MomentsOf(algorithm);
    format.weights = std::vector{kernels::DType::kFp32, kernels::DType::kBf16,
                                 kernels::DType::kFp16}[static_cast<size_t>(below(3))];
    format.states = std::vector{kernels::StateType::kFp32, kernels::StateType::kBf16,
                                kernels::StateType::k8Bit}[static_cast<size_t>(below(3))];
    const bool lamb = NeedsTensorNorms(algorithm), coded = format.states == kernels::StateType::k8Bit;
    if (lamb && coded) continue;
    std::vector<ParameterSpec> specs;
    for (int64_t p = 0, n = 1 + below(9); p < n; ++p) {
      specs.push_back({.name = std::to_string(p),
                       .sizes = {1 + below(below(2) == 0 ? 200 : 3000)},
                       .trains = below(5) != 0,
                       .group = coded ? 0 : static_cast<int>(below(2))});
    }
    const FlatLayout layout = FlatLayout::Of(specs);
    UpdateDecision decision{.step = 1, .update = 1 + below(50)};
    const std::vector<GroupRates> rates = {{{.lr = 1e-3}}, {{.lr = 3e-3}, 0.01}};
    decision.groups.clear();
    for (const GroupRates& group : rates)
      decision.groups.push_back(MakeOptimizerStep(algorithm, group, decision.update, 0.5));
    auto own = std::make_shared<ParameterSteps>();
    std::vector<int>& numbers = own->of.emplace_back();
    for (const Parameter& parameter : layout.parameters) {
      numbers.push_back(ParameterSteps::kNone);
      if (!parameter.trains || below(3) == 0) continue;
      // Some have one in common.
      numbers.back() = static_cast<int>(own->steps.size());
      if (numbers.size() > 1 && below(2) == 0 && numbers[numbers.size() - 2] >= 0 &&
          layout.parameters[numbers.size() - 2].group == parameter.group) {
        numbers.back() = numbers[numbers.size() - 2];
        continue;
      }
      own->steps.push_back(MakeOptimizerStep(algorithm, rates[At(parameter.group)],
                                             decision.update - below(decision.update), 0.5));
    }
    decision.own = own;
    const BlockSteps steps(decision, layout, tiering::BlockIndex(0));

    std::vector<float> values(static_cast<size_t>(layout.elements), 0.0F), gradient(values), m(values),
        v(values);
    std::normal_distribution<float> normal(0, 0.3F);
    for (const Parameter& parameter : layout.parameters) {
      for (int64_t i = parameter.offset; i < parameter.offset + parameter.elements; ++i) {
        const auto at = static_cast<size_t>(i);
        values[at] = normal(random);
        if (!parameter.trains) continue;
        gradient[at] = normal(random);
        m[at] = normal(random);
        v[at] = std::abs(normal(random));
      }
    }
    std::vector<std::vector<float>> first;
    for (int cut = 0; cut < 3; ++cut) {
      std::vector<tiering::Tile> places;
      for (int64_t at = 0; at < layout.elements;) {
        const int64_t n = cut == 0
                              ? layout.elements
                              : std::min(layout.elements - at, tiering::kElementAlignment * (1 + below(2)));
        places.push_back({at, n});
        at += n;
      }
      Tiles tiles(format, places);
      tiles.Fill(values, gradient, m, v);
      std::vector<StateKind> kinds = {StateKind::kParameter};
      for (const StateKind kind : {StateKind::kFirstMoment, StateKind::kSecondMoment})
        if (Keeps(format, kind)) kinds.push_back(kind);
      std::vector<std::vector<float>> before, after;
      for (const StateKind kind : kinds) before.push_back(tiles.Read(kind));
      std::vector<double> trusts(layout.parameters.size(), 1.0);
      if (lamb) {
        std::vector<kernels::LambNorms> norms(layout.parameters.size());
        for (size_t i = 0; i < tiles.size(); ++i)
          AddTensorNorms(format, steps, seed, tiles.tile(i), tiles.memory(i), norms);
        for (size_t p = 0; p < norms.size(); ++p)
          if (steps.of(p) != nullptr) trusts[p] = TrustOf(*steps.of(p), norms[p]);
      }
      for (size_t i = 0; i < tiles.size(); ++i)
        UpdateTile(format, steps, seed, tiles.tile(i), tiles.memory(i), trusts);
      for (const StateKind kind : kinds) after.push_back(tiles.Read(kind));
      if (cut == 0) first = after;
      ASSERT_EQ(after, first) << "another cut gives other bits, seed " << seed;

      if (cut > 0) continue;
      Tiles alone(format, places);
      for (size_t p = 0; p < layout.parameters.size(); ++p) {
        const Parameter& parameter = layout.parameters[p];
        alone.Fill(values, gradient, m, v);
        const bool updates = numbers[p] != ParameterSteps::kNone;
        // Whole scales, since padding and neighbours are not looked at below.
        const int64_t begin =
            coded ? parameter.offset / tiering::kScaleBlock * tiering::kScaleBlock : parameter.offset;
        int64_t end = parameter.offset + parameter.elements;
        if (coded) end = std::min(tiering::AlignUp(end, tiering::kScaleBlock), layout.elements);
        if (updates) {
          kernels::UpdateArrays arrays = ArraysOf(format, alone.memory(0), begin, end - begin);
          arrays.first_element = static_cast<uint64_t>(begin);
          arrays.seed = seed;
          std::visit(
              [&](const auto& step) {
                if constexpr (std::is_same_v<std::decay_t<decltype(step)>, kernels::LambStep>) {
                  kernels::LambNorms norms;
                  kernels::LambMoments(step, arrays, &norms);
                  EXPECT_NEAR(trusts[p], kernels::LambTrust(step, norms), 1e-9);  // summed in other pieces
                  kernels::LambApply(step, trusts[p], arrays);
                } else {
                  kernels::ApplyUpdate(step, arrays);
                }
              },
              own->steps[static_cast<size_t>(numbers[p])]);
        } else {
          kept += parameter.trains ? 1 : 0;
        }
        for (size_t k = 0; k < kinds.size(); ++k) {
          const std::vector<float> expected = alone.Read(kinds[k]);
          for (int64_t i = parameter.offset; i < parameter.offset + parameter.elements; ++i) {
            const auto at = static_cast<size_t>(i);
            if (coded && parameter.trains) {
              // Of what shares a scale with a neighbour of another step, moments are rounded anew.
              const int64_t block = i / tiering::kScaleBlock * tiering::kScaleBlock;
              const bool shares = block < parameter.offset ||
                                  block + tiering::kScaleBlock > parameter.offset + parameter.elements;
              if (shares) {
                ++shared_scales;
                const bool master = kinds[k] == StateKind::kParameter;
                if (master && !updates) {
                  ASSERT_EQ(after[k][at], expected[at]) << seed;
                } else {
                  const float most = master ? 0.01F : 0.3F;
                  ASSERT_NEAR(after[k][at], expected[at], most) << seed;
                }
                continue;
              }
            }
            ASSERT_EQ(after[k][at], expected[at])
                << "seed " << seed << ", parameter " << p << ", " << StateKindName(kinds[k]) << " of element "
                << i - parameter.offset << (updates ? "" : ", which has no gradient");
          }
        }
      }
    }
  }
  EXPECT_GT(kept, 100);
  EXPECT_GT(shared_scales, 1000);
}

// The plain model, whose gradients of some parameters are not there.
class Dropping final : public plain::PlainCompute {
 public:
  using PlainCompute::PlainCompute;

  // Whether there is a gradient: a whole layer is left out now and then, or its bias.
  static bool Comes(int64_t step, int micro_batch, int layer, int parameter) {
    if (layer == 0) return true;
    std::mt19937_64 random(static_cast<uint64_t>(step * 1000 + micro_batch * 100 + layer * 10 + 7));
    (void)random();
    const uint64_t drawn = random();
    return drawn % 3 != 0 && (parameter == 0 || drawn % 5 != 0);
  }
  absl::Status Begin(const PassInfo& pass, std::vector<Batch> batches) override {
    pass_ = pass;
    return PlainCompute::Begin(pass, std::move(batches));
  }
  absl::StatusOr<std::span<const Gradient>> Gradients(const StageUse& use,
                                                      tiering::BlockIndex block) override {
    const auto all = PlainCompute::Gradients(use, block);
    came_.clear();
    const int micro_batch = pass_.first_micro_batch + use.micro_batch;
    for (const Gradient& gradient : *all) {
      if (Comes(pass_.step, micro_batch, block.value(), gradient.parameter)) came_.push_back(gradient);
    }
    return std::span<const Gradient>(came_);
  }

 private:
  PassInfo pass_;
  std::vector<Gradient> came_;
};

constexpr plain::Shape kShape = {.layers = 5, .width = 96};
constexpr int64_t kSteps = 12;
constexpr int kMicroBatches = 2;

using States = std::map<std::string, std::vector<float>>;  // by name and kind

struct Mode {
  std::string name;
  OptimizerOptions algorithm = kernels::AdamOptions{.lr = 1e-3, .weight_decay = 0.1};
  OffloadDevice offload = OffloadDevice::kNvme;
  tiering::UpdateOrder order = tiering::UpdateOrder::kAuto;
  double clip = 0;
  Durability durability = Durability::kStep;
  bool previews = false;
  int calls = 1;
  bool least = false;  // of host memory, which keeps no gradients
};
void PrintTo(const Mode& mode, std::ostream* out) { *out << mode.name; }

// The same training by hand: no engine, no tiles, a count for each parameter.
States TrainByHand(const OptimizerOptions& algorithm, double clip, std::vector<double>* losses) {
  Dropping compute(kShape);
  const auto layers = static_cast<size_t>(kShape.layers);
  const ComputeSetup setup{.device = HostDevice().get(), .weights = kernels::DType::kFp32};
  const absl::StatusOr<Measured> measured = compute.Measure(setup, PlainBatch(kShape, 0), {});
  EXPECT_TRUE(measured.ok());
  const FlatLayout& layout = *measured->layouts[tiering::BlockIndex(0)];
  const auto n = static_cast<size_t>(layout.elements);
  std::vector<std::vector<float>> values(layers, std::vector<float>(n)), m = values, v = values;
  std::vector<std::vector<int64_t>> counts(layers, std::vector<int64_t>(2, 0));
  for (size_t b = 0; b < layers; ++b) {
    auto reader = compute.Initial(tiering::BlockIndex(b), 100 + b);
    EXPECT_TRUE((*reader)->Read(0, layout.elements, values[b].data()).ok());
  }
  for (int64_t step = 1; step <= kSteps; ++step) {
    std::vector<std::vector<float>> sums(layers, std::vector<float>(n, 0.0F));
    std::vector<std::vector<bool>> came(layers, std::vector<bool>(2, false));
    std::vector<Batch> batches;
    for (int i = 0; i < kMicroBatches; ++i) batches.push_back(PlainBatch(kShape, kMicroBatches * step + i));
    EXPECT_TRUE(compute.Begin({.step = step, .loss_gradient = 1.0 / kMicroBatches}, batches).ok());
    const auto use_of = [&](int layer, int i) {
      return StageUse{.stage = tiering::StageIndex(layer),
                      .position = tiering::Position(layer),
                      .micro_batch = i,
                      .last = layer + 1 == kShape.layers,
                      .passes_gradients = layer > 0};
    };
    for (int i = 0; i < kMicroBatches; ++i) {
      for (int layer = 0; layer + 1 < kShape.layers; ++layer) {
        const Weights weights{tiering::BlockIndex(layer),
                              reinterpret_cast<std::byte*>(values[At(layer)].data())};
        EXPECT_TRUE(compute.Forward(use_of(layer, i), {&weights, 1}).ok());
      }
    }
    for (int layer = kShape.layers - 1; layer >= 0; --layer) {
      for (int i = 0; i < kMicroBatches; ++i) {
        const Weights weights{tiering::BlockIndex(layer),
                              reinterpret_cast<std::byte*>(values[At(layer)].data())};
        const StageUse use = use_of(layer, i);
        EXPECT_TRUE(compute.Backward(use, {&weights, 1}).ok());
        for (const Gradient& gradient : *compute.Gradients(use, tiering::BlockIndex(layer))) {
          const Parameter& parameter = layout.parameters[At(gradient.parameter)];
          const auto* const from = static_cast<const float*>(gradient.value.data);
          for (int64_t e = 0; e < parameter.elements; ++e)
            sums[At(layer)][static_cast<size_t>(parameter.offset + e)] += from[e];
          came[At(layer)][At(gradient.parameter)] = true;
        }
        compute.Release(use);
      }
    }
    for (const double loss : *compute.Losses()) losses->push_back(loss);
    kernels::SumOfSquares squares;
    for (const std::vector<float>& sum : sums)
      kernels::AddSquares(kernels::DType::kFp32, sum.data(), sum.size(), &squares);
    const double norm = std::sqrt(squares.Value());
    const double factor = clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1.0;
    for (size_t b = 0; b < layers; ++b) {
      for (size_t p = 0; p < 2; ++p) {
        if (!came[b][p]) continue;
        const Parameter& parameter = layout.parameters[p];
        const auto at = static_cast<size_t>(parameter.offset);
        kernels::UpdateArrays arrays;
        arrays.n = static_cast<size_t>(parameter.elements);
        arrays.param = values[b].data() + at;
        arrays.grad = sums[b].data() + at;
        if (MomentsOf(algorithm).m) arrays.m = m[b].data() + at;
        if (MomentsOf(algorithm).v) arrays.v = v[b].data() + at;
        const OptimizerStep own =
            MakeOptimizerStep(algorithm, {{.lr = LearningRate(algorithm)}}, ++counts[b][p], factor);
        std::visit(
            [&](const auto& of) {
              if constexpr (std::is_same_v<std::decay_t<decltype(of)>, kernels::LambStep>) {
                kernels::LambNorms norms;
                kernels::LambMoments(of, arrays, &norms);
                kernels::LambApply(of, kernels::LambTrust(of, norms), arrays);
              } else {
                kernels::ApplyUpdate(of, arrays);
              }
            },
            own);
      }
    }
  }
  States states;
  for (size_t b = 0; b < layers; ++b) {
    for (const Parameter& parameter : layout.parameters) {
      for (const auto& [kind, from] : {std::pair{StateKind::kParameter, &values},
                                       {StateKind::kFirstMoment, &m},
                                       {StateKind::kSecondMoment, &v}}) {
        const auto begin = (*from)[b].begin() + parameter.offset;
        states[absl::StrCat("layer.", b, ".", parameter.name, std::string(StateKindName(kind)))] =
            std::vector<float>(begin, begin + parameter.elements);
      }
    }
  }
  return states;
}

class MissedUpdatesTest : public testing::TestWithParam<Mode> {
 protected:
  ~MissedUpdatesTest() override { std::filesystem::remove_all(directory_); }

  EngineOptions Options() const {
    const Mode& mode = GetParam();
    EngineOptions options;
    options.dtype = kernels::DType::kFp32;
    options.micro_batches = kMicroBatches / mode.calls;
    options.calls_per_step = mode.calls;
    options.example = PlainBatch(kShape, 0);
    options.initial_values = [reader = std::shared_ptr<InitialReader>(), read = -1](
                                 int block, int64_t first, int64_t n, float* to) mutable {
      if (reader == nullptr || block != read || first == 0)
        reader = *Dropping(kShape).Initial(tiering::BlockIndex(block), 100 + static_cast<uint64_t>(block));
      read = block;
      return reader->Read(first, n, to);
    };
    options.optimizer.algorithm = mode.algorithm;
    options.optimizer.missing_gradients = MissingGradients::kSkip;
    options.optimizer.clip = mode.clip;
    options.optimizer.order = mode.order;
    if (mode.previews) {
      options.optimizer.prefer = tiering::Prefer::kTime;
      options.memory.bounds.previewed_share = 1;
    }
    options.storage.offload = mode.offload;
    options.storage.durability = mode.durability;
    if (mode.offload == OffloadDevice::kNvme) options.storage.state_dirs = {directory_ + "/state"};
    if (mode.offload == OffloadDevice::kNvme && mode.durability == Durability::kStep)
      options.storage.overwrite = true;
    if (mode.offload != OffloadDevice::kNvme || mode.durability == Durability::kCheckpoint) {
      options.storage.checkpoints.parent = directory_ + "/kept";
      options.storage.checkpoints.every = 3;
      options.storage.checkpoints.keep = 1;
    }
    options.memory.tile_bytes = 16 << 10;
    if (mode.least) {
      options.memory.host_memory_budget_bytes = 1 << 30;
      const auto plan = Engine::MakePlan(*std::make_unique<Dropping>(kShape), options);
      EXPECT_TRUE(plan.ok()) << plan.status();
      options.memory.host_memory_budget_bytes = plan->plan.least_host_memory_bytes;
    }
    return options;
  }
  // Goes on from what is there.
  EngineOptions Resumed() const {
    EngineOptions options = Options();
    options.resume.enabled = true;
    options.storage.overwrite = false;
    if (GetParam().offload != OffloadDevice::kNvme)
      options.storage.state_dirs = {*swap::FindCheckpoint(directory_ + "/kept")};
    return options;
  }
  static absl::Status Train(Engine& engine, int64_t to, std::vector<double>* losses = nullptr) {
    const int calls = GetParam().calls;
    while (engine.step() < to) {
      const int64_t step = engine.step() + 1;
      for (int call = 0; call < calls; ++call) {
        std::vector<Batch> batches;
        for (int i = call * kMicroBatches / calls; i < (call + 1) * kMicroBatches / calls; ++i)
          batches.push_back(PlainBatch(kShape, kMicroBatches * step + i));
        // Now and then a step is announced.
        StepOptions options(step % 4 != 0 && step < to ? Next::kTrain : Next::kUnknown);
        options.update = call + 1 == calls;
        const auto result = engine.Step(std::move(batches), options);
        if (!result.ok()) return result.status();
        if (losses != nullptr && result->updated) losses->push_back(result->loss);
      }
    }
    return absl::OkStatus();
  }
  static States StatesOf(Engine& engine) {
    States states;
    for (const std::string& name : engine.ParameterNames()) {
      for (const StateKind kind :
           {StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment}) {
        if (!Keeps(engine.plan().format, kind)) continue;
        const auto value = engine.ReadState(name, kind);
        EXPECT_TRUE(value.ok()) << value.status();
        const auto* const values = static_cast<const float*>(value->view.data);
        states[absl::StrCat(name, std::string(StateKindName(kind)))] =
            std::vector<float>(values, values + value->view.elements());
      }
    }
    return states;
  }
  // Bits of those that the run keeps.
  static void ExpectByHand(Engine& engine) {
    std::vector<double> losses;
    const States by_hand = TrainByHand(GetParam().algorithm, GetParam().clip, &losses);
    for (const auto& [name, values] : StatesOf(engine)) {
      const auto found = by_hand.find(name);
      ASSERT_NE(found, by_hand.end()) << name;
      EXPECT_TRUE(values == found->second) << name;
    }
  }
  static std::unique_ptr<Engine> Open(const EngineOptions& options) {
    auto engine = Engine::Create(std::make_shared<Dropping>(kShape), options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }

  const std::string directory_ =
      (std::filesystem::current_path() / ("missed-" + std::to_string(getpid()))).string();
};

TEST_P(MissedUpdatesTest, ATrainingHasTheBitsOfOneByHand) {
  const auto engine = Open(Options());
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(Train(*engine, kSteps).ok());
  ExpectByHand(*engine);
}

TEST_P(MissedUpdatesTest, AResumedRunGoesOnWithTheCounts) {
  for (const int64_t stop : {3, 6, 9}) {
    const auto engine = Open(stop == 3 ? Options() : Resumed());
    ASSERT_NE(engine, nullptr);
    ASSERT_EQ(engine->step(), stop - 3);
    ASSERT_TRUE(Train(*engine, stop).ok());
    ASSERT_TRUE(engine->Flush().ok());
  }
  const auto engine = Open(Resumed());
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(Train(*engine, kSteps).ok());
  ExpectByHand(*engine);
}

TEST_P(MissedUpdatesTest, ARunThatWasKilledGoesOnWithTheCountsOfItsLastCommit) {
  if (GetParam().offload != OffloadDevice::kNvme) GTEST_SKIP() << "state in memory goes with its process";
  for (int64_t kill_at = 2; kill_at < kSteps; kill_at += 3) {
    const pid_t child = fork();
    if (child == 0) {
      // Its step is computed, and not committed or in part.
      auto engine = Open(kill_at == 2 ? Options() : Resumed());
      if (engine != nullptr) (void)Train(*engine, kill_at);
      (void)raise(SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
  }
  const auto engine = Open(Resumed());
  ASSERT_NE(engine, nullptr);
  ASSERT_TRUE(Train(*engine, kSteps).ok());
  ExpectByHand(*engine);
}

INSTANTIATE_TEST_SUITE_P(
    Modes, MissedUpdatesTest,
    testing::Values(
        Mode{.name = "Memory", .offload = OffloadDevice::kCpu},
        Mode{.name = "MemoryClipped", .offload = OffloadDevice::kCpu, .clip = 0.3}, Mode{.name = "Drive"},
        Mode{.name = "InBackward", .order = tiering::UpdateOrder::kInBackward},
        Mode{.name = "InBackwardInLeastMemory", .order = tiering::UpdateOrder::kInBackward, .least = true},
        Mode{.name = "InBackwardClipped", .order = tiering::UpdateOrder::kInBackward, .clip = 0.3},
        Mode{.name = "NextForward", .order = tiering::UpdateOrder::kInNextForward, .clip = 0.3},
        Mode{.name = "Previews", .clip = 0.3, .previews = true},
        Mode{.name = "DurableAtCheckpoints", .durability = Durability::kCheckpoint},
        Mode{.name = "Calls", .calls = 2},
        Mode{.name = "Adam",
             .algorithm =
                 kernels::AdamOptions{.lr = 1e-3, .weight_decay = 0.1, .mode = kernels::AdamMode::kAdam}},
        Mode{.name = "Lion", .algorithm = kernels::LionOptions{.lr = 1e-3, .weight_decay = 0.1}},
        Mode{.name = "Momentum",
             .algorithm =
                 kernels::SgdOptions{.lr = 1e-2, .momentum = 0.9, .dampening = 0.2, .weight_decay = 0.1}},
        Mode{.name = "Adagrad",
             .algorithm = kernels::AdagradOptions{.lr = 1e-3, .lr_decay = 0.1, .weight_decay = 0.1}},
        Mode{.name = "Lamb", .algorithm = kernels::LambOptions{.adam = {.lr = 1e-3, .weight_decay = 0.1}}}),
    [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace penstock::zero::missed_updates_test
