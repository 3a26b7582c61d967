// Groups of parameters that go by rates of their own: against each group's rates over everything.
#include "zero/compute/parameter_groups.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "plain_compute.h"
#include "tests/zero/plain_batch.h"
#include "zero/compute/flat_layout.h"
#include "zero/compute/tile_format.h"
#include "zero/compute/update.h"
#include "zero/engine/engine.h"

namespace penstock::zero::parameter_groups_test {
namespace {

// A block's weights, states and gradient in host memory.
class Held {
 public:
  Held(const TileFormat& format, int64_t elements) : precision_(format.precision()), elements_(elements) {
    for (size_t s = 0; s < precision_.segment_bytes.size(); ++s)
      segments_.emplace_back(static_cast<size_t>(precision_.SegmentBytes(s, elements)));
    gradient_.resize(static_cast<size_t>(elements * precision_.gradient_bytes));
  }

  // The part from `first` on. Segments of 8 bit have their scales behind all codes: they are cut nowhere.
  TileMemory Part(int64_t first, int64_t elements) {
    TileMemory memory;
    memory.elements = elements;
    for (size_t s = 0; s < segments_.size(); ++s) {
      char* const at = segments_[s].data() + first * precision_.segment_bytes[s];
      (s == 0 ? memory.weights : memory.state.emplace_back()) = at;
    }
    memory.gradient = gradient_.data() + first * precision_.gradient_bytes;
    return memory;
  }
  void Fill(const TileFormat& format, std::mt19937_64& random) {
    std::normal_distribution<float> normal(0, 0.3F);
    std::vector<float> values(static_cast<size_t>(elements_));
    for (float& value : values) value = normal(random);
    FillTile(format, values.data(), Part(0, elements_));
    for (float& value : values) value = normal(random);
    kernels::Convert(kernels::DType::kFp32, values.data(),
                     precision_.gradient_bytes == 2 ? kernels::DType::kBf16 : kernels::DType::kFp32,
                     gradient_.data(), values.size());
  }
  std::vector<float> Masters(const TileFormat& format) {
    std::vector<float> values(static_cast<size_t>(elements_));
    ReadMasters(format, Part(0, elements_), values.data());
    return values;
  }
  std::vector<float> Moments(const TileFormat& format) {
    std::vector<float> values(static_cast<size_t>(elements_));
    ReadValues(format, Part(0, elements_), StateKind::kSecondMoment, 0, elements_, values.data());
    return values;
  }

 private:
  tiering::Precision precision_;
  int64_t elements_;
  std::vector<std::vector<char>> segments_;
  std::vector<char> gradient_;
};

TEST(ParameterGroups, EachParameterIsUpdatedByItsOwnGroup) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    TileFormat format;
    format.weights = below(2) == 0 ? kernels::DType::kFp32 : kernels::DType::kBf16;
    format.states = std::vector{kernels::StateType::kFp32, kernels::StateType::kBf16,
                                kernels::StateType::k8Bit}[static_cast<size_t>(below(3))];
    const int groups = 1 + static_cast<int>(below(4));
    std::vector<ParameterSpec> specs;
    for (int64_t p = 0, n = 1 + below(9); p < n; ++p) {
      specs.push_back({.name = std::to_string(p),
                       .sizes = {1 + below(900)},
                       .trains = below(4) != 0,
                       .group = static_cast<int>(below(groups))});
    }
    specs.back().group = groups - 1;
    const FlatLayout layout = FlatLayout::Of(specs);
    ASSERT_EQ(layout.groups(), groups);
    UpdateDecision decision{.step = 1, .update = 3};
    decision.groups.clear();
    for (int g = 0; g < groups; ++g) {
      decision.groups.push_back(MakeOptimizerStep(kernels::AdamOptions{},
                                                  {{.lr = 1e-3 * (g + 1), .beta1 = 0.8 + 0.01 * g}, 0.1 * g},
                                                  decision.update, 1.0));
    }
    Held held(format, layout.elements);
    held.Fill(format, random);
    std::vector<Held> by_group(static_cast<size_t>(groups), held);
    const std::vector<float> before = held.Masters(format);
    // In two tiles, where the states can be cut.
    const int64_t cut =
        format.states == kernels::StateType::k8Bit || layout.elements <= tiering::kElementAlignment
            ? layout.elements
            : tiering::kElementAlignment;
    UpdateTile(format, {decision, layout}, seed, {0, cut}, held.Part(0, cut));
    if (cut < layout.elements) {
      UpdateTile(format, {decision, layout}, seed, {cut, layout.elements - cut},
                 held.Part(cut, layout.elements - cut));
    }
    const std::vector<float> masters = held.Masters(format), moments = held.Moments(format);
    for (int g = 0; g < groups; ++g) {
      UpdateDecision of_all = decision;
      of_all.groups = {decision.of(g)};
      Held& expected = by_group[static_cast<size_t>(g)];
      UpdateTile(format, {of_all, layout}, seed, {0, layout.elements}, expected.Part(0, layout.elements));
      const std::vector<float> their_masters = expected.Masters(format), theirs = expected.Moments(format);
      for (const Parameter& parameter : layout.parameters) {
        if (parameter.group != g) continue;
        for (int64_t i = parameter.offset; i < parameter.offset + parameter.elements; ++i) {
          const auto at = static_cast<size_t>(i);
          ASSERT_EQ(masters[at], parameter.trains ? their_masters[at] : before[at]) << "seed " << seed;
          ASSERT_EQ(moments[at], theirs[at]) << "seed " << seed;
        }
      }
    }
  }
}

// What was there before there were groups lies where it lay.
TEST(ParameterGroups, OneGroupChangesNoPlace) {
  const std::vector<ParameterSpec> specs = {{"a", {3, 5}}, {"b", {70}}, {"c", {1000}}, {"d", {1}}};
  const FlatLayout layout = FlatLayout::Of(specs);
  std::vector<int64_t> offsets;
  for (const Parameter& parameter : layout.parameters) offsets.push_back(parameter.offset);
  EXPECT_EQ(offsets, (std::vector<int64_t>{0, 64, 192, 1216}));
  EXPECT_EQ(layout.elements, 2048);
  EXPECT_EQ(layout.trained.size(), 1U);
  EXPECT_EQ(layout.trained_from, 0);
}

TEST(ParameterGroups, WhatIsFrozenLiesFirstAndTheRestBeginsApart) {
  const std::vector<ParameterSpec> specs = {{"a", {3, 5}}, {"b", {70}, false}, {"c", {1000}}, {"d", {1}}};
  const FlatLayout layout = FlatLayout::Of(specs);
  std::vector<int64_t> offsets;
  for (const Parameter& parameter : layout.parameters) offsets.push_back(parameter.offset);
  EXPECT_EQ(offsets, (std::vector<int64_t>{4096, 0, 4160, 5184}));
  EXPECT_EQ(layout.trained_from, 4096);
  EXPECT_EQ(layout.elements, 6144);
  ASSERT_EQ(layout.trained.size(), 1U);
  EXPECT_EQ(layout.trained.front().from, 4096);
  EXPECT_EQ(layout.InOrder(), (std::vector<size_t>{1, 0, 2, 3}));
}

TEST(ParameterGroups, AStarStandsForAnyCharacters) {
  for (const auto& [pattern, name] :
       std::vector<std::pair<std::string, std::string>>{{"h.0.bias", "h.0.bias"},
                                                        {"*.bias", "h.0.bias"},
                                                        {"*norm*", "h.0.norm.weight"},
                                                        {"*", ""},
                                                        {"*", "x"},
                                                        {"h.*.bias", "h.0.attn.bias"},
                                                        {"a*a", "aa"},
                                                        {"*ab*ab", "abab"},
                                                        {"*aab", "aaab"},
                                                        {"**b", "b"}})
    EXPECT_TRUE(NameMatches(pattern, name)) << pattern << " " << name;
  for (const auto& [pattern, name] :
       std::vector<std::pair<std::string, std::string>>{{"bias", "h.0.bias"},
                                                        {"*.bias", "bias"},
                                                        {"*.bias", "h.0.biases"},
                                                        {"a*a", "a"},
                                                        {"", "x"},
                                                        {"*ab*ab", "ab"},
                                                        {"h.*", "wte"}})
    EXPECT_FALSE(NameMatches(pattern, name)) << pattern << " " << name;
}

// Groups by name, in the engine: a model whose layers have a "weight" and a "bias" each.
class GroupsByNameTest : public testing::Test {
 protected:
  ~GroupsByNameTest() override { std::filesystem::remove_all(directory_); }

  EngineOptions Options(const std::vector<ParameterGroup>& groups = {}) const {
    EngineOptions options;
    options.dtype = kernels::DType::kFp32;
    options.example = testing_support::PlainBatch(shape_, 0);
    options.storage.state_dirs = {directory_};
    options.storage.overwrite = true;
    options.memory.tile_bytes = 16 << 10;
    options.optimizer.algorithm = kernels::AdamOptions{.lr = 1e-3, .weight_decay = 0.1};
    options.optimizer.clip = 0;
    options.optimizer.groups = groups;
    return options;
  }
  absl::StatusOr<std::unique_ptr<Engine>> Open(const EngineOptions& options) const {
    return Engine::Create(std::make_shared<plain::PlainCompute>(shape_), options);
  }
  using Values = std::map<std::string, std::vector<float>>;
  // Trains to `step`, with these rates if there are any; the parameters.
  Values Train(const EngineOptions& options, int64_t step, const std::vector<GroupRates>& rates = {}) const {
    Values values;
    auto engine = Open(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    if (!engine.ok()) return values;
    while ((*engine)->step() < step) {
      StepOptions with((*engine)->step() + 1 < step ? Next::kTrain : Next::kUnknown);
      with.groups = rates;
      const auto result = (*engine)->Step({testing_support::PlainBatch(shape_, (*engine)->step())}, with);
      EXPECT_TRUE(result.ok()) << result.status();
      if (!result.ok()) return values;
    }
    EXPECT_TRUE((*engine)->Flush().ok());
    for (const std::string& name : (*engine)->ParameterNames()) {
      const auto value = (*engine)->ReadState(name, StateKind::kParameter);
      EXPECT_TRUE(value.ok()) << value.status();
      const auto* const first = static_cast<const float*>(value->view.data);
      values[name].assign(first, first + value->view.elements());
    }
    return values;
  }

  const plain::Shape shape_ = {.layers = 4, .width = 72};
  const std::string directory_ =
      (std::filesystem::current_path() / ("groups-" + std::to_string(getpid()))).string();
  const std::vector<ParameterGroup> biases_ = {{.names = {"*.bias"}, .lr_factor = 0.5, .weight_decay = 0.0}};
};

TEST_F(GroupsByNameTest, EachGoesByItsOwnRates) {
  const Values rest = Train(Options(), 1);
  const Values half = Train(Options(), 1, {{{.lr = 0.5e-3}, 0.0}});
  const Values grouped = Train(Options(biases_), 1);
  ASSERT_EQ(grouped.size(), 8U);
  for (const auto& [name, values] : grouped) {
    const bool bias = name.ends_with(".bias");
    EXPECT_EQ(values, (bias ? half : rest).at(name)) << name;
    EXPECT_NE(values, (bias ? rest : half).at(name)) << name;
  }
  // The same, step by step, from who trains.
  const std::vector<GroupRates> by_hand = {{{.lr = 1e-3}, 0.1}, {{.lr = 0.5e-3}, 0.0}};
  EXPECT_EQ(Train(Options(biases_), 4, by_hand), Train(Options(biases_), 4));
  // Groups that go by what all go by change nothing.
  EXPECT_EQ(Train(Options({{.names = {"*.bias"}}}), 4), Train(Options(), 4));
}

TEST_F(GroupsByNameTest, ARunRecordsThemAndMayHaveOthersFromAnyStepOn) {
  const Values whole = Train(Options(biases_), 6);
  (void)Train(Options(biases_), 3);
  EngineOptions resumed = Options();
  resumed.storage.overwrite = false;
  resumed.resume.enabled = true;
  EXPECT_EQ(Train(resumed, 6), whole);
  (void)Train(Options(), 3);
  EngineOptions changed = resumed;
  changed.optimizer.new_groups = biases_;
  const Values later = Train(changed, 4);
  EXPECT_NE(later, Train(Options(), 4));
  (void)Train(Options(), 3);
  (void)Train(changed, 4);
  const Values recorded = Train(resumed, 6);
  (void)Train(Options(), 3);
  EXPECT_EQ(Train(changed, 6), recorded);
}

TEST_F(GroupsByNameTest, WhatNamesNothingAndWhatNoOptimizerHasIsRefusedBeforeAnythingIsMade) {
  const auto refused = [&](const std::vector<ParameterGroup>& groups, const std::string& why,
                           kernels::StateType states = kernels::StateType::kFp32) {
    EngineOptions options = Options(groups);
    options.optimizer.states = states;
    const absl::Status status = Open(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(std::string(status.message()).find(why), std::string::npos) << status;
    EXPECT_FALSE(std::filesystem::exists(directory_));
  };
  refused({{.names = {"*.bias", "*.bais"}}}, "\"*.bais\" stands for no parameter");
  refused({{.names = {}}}, "names none");
  refused({{.names = {"*"}, .lr_factor = -1}}, "0 or more");
  refused({{.names = {"*"}, .weight_decay = std::nan("")}}, "0 or more");
  refused(biases_, "shares a scale", kernels::StateType::k8Bit);
  auto engine = Open(Options(biases_));
  ASSERT_TRUE(engine.ok()) << engine.status();
  StepOptions wrong;
  wrong.groups = {{}, {{.lr = -1}}};
  EXPECT_EQ((*engine)->Step({testing_support::PlainBatch(shape_, 0)}, wrong).status().code(),
            absl::StatusCode::kInvalidArgument);
  // Rates of groups without parameters may follow those of the others.
  StepOptions more;
  more.groups = {{}, {}, {}};
  EXPECT_TRUE((*engine)->Step({testing_support::PlainBatch(shape_, 0)}, more).ok());
}

}  // namespace
}  // namespace penstock::zero::parameter_groups_test
