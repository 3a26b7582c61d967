// Blocks of which only a part trains, as with LoRA, driven by their owner: the bits are those of a run that
// keeps state for everything, and what is frozen costs none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/float16.h"
#include "swap/inspect.h"
#include "zero/compute/frozen_source.h"
#include "zero/engine/driven_engine.h"
#include "zero/engine/restore.h"

namespace penstock::zero::frozen_parts_test {
namespace {

using testing::HasSubstr;
using tiering::BlockIndex;
using tiering::StageIndex;

constexpr int kBlocks = 3, kMicroBatches = 2;
constexpr int64_t kSteps = 6;

// A frozen base around two adapters of different groups; one block that trains whole. `plain_first`: the
// first block is all base.
std::vector<ParameterSpec> Specs(int block, bool frozen, bool plain_first) {
  if (block == 1) return {{"weight", {37, 90}}};
  if (block == 0 && plain_first)
    return {{"base.0", {300, 100}, !frozen, 2}, {"base.1", {90, 50}, !frozen, 2}};
  return {{"base.0", {300, 100}, !frozen, 2},
          {"a", {70, 30}, true, 0},
          {"base.1", {90, 50}, !frozen, 2},
          {"b", {45}, true, 1}};
}
// Exact in every type.
float Initial(int block, size_t parameter, int64_t element) {
  return static_cast<float>((element * 37 + block * 11 + static_cast<int64_t>(parameter) * 5) % 129 - 64) /
         64;
}

struct Result {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<float>> values, moments;  // moments of what trains
  int64_t read_bytes = 0, written_bytes = 0;                  // by the last step
};

// Its gradients follow from all weights, so that one that lies in a wrong place shows.
class Owner {
 public:
  // `input_gradients`: of what goes into the first stage (ModelGraph).
  Owner(bool frozen, kernels::DType dtype, bool plain_first = false, bool input_gradients = false)
      : dtype_(dtype),
        input_gradients_(input_gradients),
        last_backward_(frozen && plain_first && !input_gradients ? 1 : 0) {
    for (int b = 0; b < kBlocks; ++b)
      layouts_.push_back(std::make_shared<const FlatLayout>(FlatLayout::Of(Specs(b, frozen, plain_first))));
  }

  Measured Given() const {
    Measured measured;
    measured.identity = {{"architecture", "adapters"}};
    measured.graph.input_gradients = input_gradients_;
    for (int b = 0; b < kBlocks; ++b) {
      const FlatLayout& layout = *layouts_[At(b)];
      measured.graph.blocks.push_back({.name = "block." + std::to_string(b),
                                       .elements = layout.elements,
                                       .trains = layout.Trains(),
                                       .trained_from = layout.trained_from});
      measured.layouts.push_back(layouts_[At(b)]);
      measured.parameters += layout.parameter_elements;
    }
    // The first block is used twice.
    for (const int b : {0, 1, 2, 0})
      measured.graph.stages.push_back({.name = "stage", .block = BlockIndex(b)});
    return measured;
  }

  absl::Status Values(int block, int64_t first, int64_t n, float* to) const {
    std::fill_n(to, n, 0.0F);
    const FlatLayout& layout = *layouts_[At(block)];
    for (size_t p = 0; p < layout.parameters.size(); ++p) {
      const Parameter& parameter = layout.parameters[p];
      for (int64_t i = 0; i < parameter.elements; ++i) {
        const int64_t at = parameter.offset + i - first;
        if (at >= 0 && at < n) to[at] = Initial(block, p, i);
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<StepResult> Step(DrivenEngine& driven, int64_t step) {
    const auto rates = [](double lr) { return GroupRates{{.lr = lr}, 0.0}; };
    StepOptions options(step < kSteps ? Next::kTrain : Next::kUnknown);
    options.groups = {rates(1e-2), rates(5e-3), rates(0)};
    absl::Status status = driven.Begin(options);
    for (int s = 0; status.ok() && s < kBlocks; ++s) {
      for (int m = 0; status.ok() && m < kMicroBatches; ++m)
        status = Use(driven.compute(), Direction::kForward, s, m, step);
    }
    for (int s = kBlocks; status.ok() && s >= last_backward_; --s) {
      for (int m = 0; status.ok() && m < kMicroBatches; ++m)
        status = Use(driven.compute(), Direction::kBackward, s, m, step);
    }
    absl::StatusOr<StepResult> result = driven.Finish();
    return status.ok() || result.ok() ? result : status;
  }

  absl::Status Use(DrivenCompute& compute, Direction direction, int stage, int m, int64_t step) {
    auto entered = compute.Enter(direction, StageIndex(stage), m);
    if (!entered.ok()) return entered.status();
    if (direction == Direction::kForward) return compute.Leave(*std::move(entered), {});
    const Weights& weights = entered->weights().front();
    const FlatLayout& layout = *layouts_[At(weights.block.value())];
    std::vector<float> run(At(layout.elements));
    kernels::Convert(dtype_, weights.data, kernels::DType::kFp32, run.data(), run.size());
    DrivenCompute::Result result;
    double sum = 0;
    std::vector<std::vector<float>> kept;
    std::vector<Gradient> gradients;
    for (size_t p = 0; p < layout.parameters.size(); ++p) {
      const Parameter& parameter = layout.parameters[p];
      const float* const own = run.data() + parameter.offset;
      for (int64_t i = 0; i < parameter.elements; ++i) sum += own[i] * static_cast<double>(i % 7);
      if (parameter.name.starts_with("base") && !gives_frozen) continue;
      std::vector<float>& gradient = kept.emplace_back();
      for (int64_t i = 0; i < parameter.elements; ++i) {
        const auto noise = static_cast<float>((i * 37 + step * 101 + m * 13 + stage) % 97 - 48);
        const float other = run[At(layout.parameters.front().offset + i % 1000)];
        gradient.push_back(0.01F * noise + 0.05F * own[i] + 0.02F * other);
      }
      gradients.push_back({static_cast<int>(p), {gradient.data(), ElementType::kFp32, parameter.sizes}});
    }
    if (layout.Trains()) result.gradients = {{weights.block, std::move(gradients)}};
    if (stage == kBlocks) result.loss = sum;
    return compute.Leave(*std::move(entered), std::move(result));
  }

  bool gives_frozen = false;

 private:
  static size_t At(int64_t i) { return static_cast<size_t>(i); }
  const kernels::DType dtype_;
  const bool input_gradients_;
  const int last_backward_;  // the first stage whose block trains
  std::vector<std::shared_ptr<const FlatLayout>> layouts_;
};

// What is frozen, as files would bring it.
class ValuesSource : public FrozenSource {
 public:
  ValuesSource(const Owner& owner, kernels::DType dtype) : owner_(owner), dtype_(dtype) {}
  int64_t BytesOf(BlockIndex, int64_t elements) const override { return elements / 2; }
  std::string PlaceOf(BlockIndex) const override { return "elsewhere"; }
  std::unique_ptr<Read> MakeRead() const override { return std::make_unique<Read>(); }
  absl::Status Start(aio::Engine&, Read*, BlockIndex block, int64_t first, int64_t elements, std::byte* to,
                     Done done, void* context) override {
    if (fails) return absl::DataLossError("elsewhere: lost");
    std::vector<float> values(static_cast<size_t>(elements));
    absl::Status status = owner_.Values(block.value(), first, elements, values.data());
    if (!status.ok()) return status;
    kernels::Convert(kernels::DType::kFp32, values.data(), dtype_, to, values.size());
    ++reads;
    done(context);
    return absl::OkStatus();
  }
  absl::Status Finish(Read*) override { return absl::OkStatus(); }

  int reads = 0;
  bool fails = false;

 private:
  const Owner& owner_;
  const kernels::DType dtype_;
};

class FrozenPartsTest : public testing::Test {
 protected:
  ~FrozenPartsTest() override { std::filesystem::remove_all(directory_); }

  EngineOptions Options(kernels::DType dtype, OffloadDevice offload) const {
    EngineOptions options;
    options.dtype = dtype;
    options.micro_batches = kMicroBatches;
    options.storage.offload = offload;
    if (offload == OffloadDevice::kNvme) options.storage.state_dirs = {directory_ + "/state"};
    options.storage.overwrite = true;
    options.memory.tile_bytes = 64 << 10;
    options.optimizer.loss_scale = {.dynamic = false, .initial_scale = 1};
    options.optimizer.clip = 0;
    return options;
  }
  static std::unique_ptr<DrivenEngine> Open(Owner& owner, EngineOptions options) {
    options.initial_values = [&owner](int block, int64_t first, int64_t n, float* to) {
      return owner.Values(block, first, n, to);
    };
    auto engine = DrivenEngine::Create(owner.Given(), std::move(options));
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  static void Train(Owner& owner, DrivenEngine& driven, int64_t from, Result* result) {
    for (int64_t step = from; step <= kSteps; ++step) {
      const auto made = owner.Step(driven, step);
      ASSERT_TRUE(made.ok()) << made.status();
      result->losses.push_back(made->loss);
      result->norms.push_back(made->grad_norm);
      result->read_bytes = made->nvme_read_bytes;
      result->written_bytes = made->nvme_write_bytes;
    }
    const absl::Status read = driven.Call([&](Engine& engine) -> absl::Status {
      for (const std::string& name : engine.ParameterNames()) {
        for (const StateKind kind : {StateKind::kParameter, StateKind::kSecondMoment}) {
          const auto value = engine.ReadState(name, kind);
          if (!value.ok()) return value.status();
          const auto* const values = static_cast<const float*>(value->view.data);
          (kind == StateKind::kParameter ? result->values : result->moments)[name].assign(
              values, values + value->view.elements());
        }
      }
      return absl::OkStatus();
    });
    ASSERT_TRUE(read.ok()) << read;
  }
  static Result TrainAll(bool frozen, const EngineOptions& options) {
    Owner owner(frozen, options.dtype);
    Result result;
    if (const auto driven = Open(owner, options); driven != nullptr) Train(owner, *driven, 1, &result);
    return result;
  }
  // The run that `options` names had three steps: resumed, it ends as one that was never stopped.
  static void ExpectGoesOn(EngineOptions options, const Result& expected) {
    options.storage.overwrite = false;
    options.resume.enabled = true;
    Owner owner(true, options.dtype);
    const auto driven = Open(owner, options);
    ASSERT_NE(driven, nullptr);
    Result rest;
    Train(owner, *driven, 4, &rest);
    EXPECT_EQ(rest.values, expected.values);
    EXPECT_EQ(rest.moments, expected.moments);
  }
  static void ExpectSame(const Result& result, const Result& expected) {
    EXPECT_EQ(result.losses, expected.losses);
    EXPECT_EQ(result.norms, expected.norms);
    EXPECT_EQ(result.values, expected.values);
    EXPECT_EQ(result.moments, expected.moments);
  }

  const std::string directory_ =
      (std::filesystem::current_path() / ("frozen-parts-" + std::to_string(getpid()))).string();
};

// A run that keeps state for all of it, and gives the base no gradient and a rate of 0, has the same bits.
TEST_F(FrozenPartsTest, TheBitsAreThoseOfARunThatKeepsStateForEverything) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    for (const double clip : {0.0, 1.0}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(dtype) << ", clip " << clip);
      EngineOptions options = Options(dtype, OffloadDevice::kNone);
      options.optimizer.clip = clip;
      const Result expected = TrainAll(true, options);
      const Result everything = TrainAll(/*frozen=*/false, options);
      ASSERT_EQ(everything.norms.size(), expected.norms.size());
      // Squares are summed by where they lie, and what is clipped follows from that.
      for (size_t i = 0; i < expected.norms.size(); ++i)
        EXPECT_NEAR(everything.norms[i], expected.norms[i], 1e-6 * expected.norms[i]);
      if (clip == 0) {
        EXPECT_EQ(everything.losses, expected.losses);
        EXPECT_EQ(everything.values, expected.values);
        EXPECT_EQ(everything.moments, expected.moments);
      }
      options.storage.offload = OffloadDevice::kCpu;
      ExpectSame(TrainAll(true, options), expected);
      options.storage.offload = OffloadDevice::kNvme;
      options.storage.state_dirs = {directory_ + "/state"};
      for (const auto order : {tiering::UpdateOrder::kInNextForward, tiering::UpdateOrder::kInBackward}) {
        options.optimizer.order = order;
        options.memory.host_memory_budget_bytes = 0;
        ExpectSame(TrainAll(true, options), expected);
        Owner owner(true, dtype);
        options.memory.host_memory_budget_bytes = Open(owner, options)->plan().plan.least_host_memory_bytes;
        ExpectSame(TrainAll(true, options), expected);
      }
    }
  }
}

// The same, where backward ends behind the first stage.
TEST_F(FrozenPartsTest, AFrozenBlockThatComesFirstIsLeftOutOfBackward) {
  const auto train = [](bool frozen, const EngineOptions& options, bool input_gradients = false) {
    Owner owner(frozen, options.dtype, /*plain_first=*/true, input_gradients);
    Result result;
    if (const auto driven = Open(owner, options); driven != nullptr) Train(owner, *driven, 1, &result);
    return result;
  };
  EngineOptions options = Options(kernels::DType::kBf16, OffloadDevice::kNone);
  const Result expected = train(/*frozen=*/true, options), everything = train(/*frozen=*/false, options);
  EXPECT_EQ(everything.losses, expected.losses);
  EXPECT_EQ(everything.values, expected.values);
  ExpectSame(train(/*frozen=*/true, options, /*input_gradients=*/true), expected);
  options.storage.offload = OffloadDevice::kNvme;
  options.storage.state_dirs = {directory_ + "/state"};
  Owner owner(true, options.dtype, /*plain_first=*/true);
  // A block that is frozen whole has no state, like what is frozen of the others.
  int64_t frozen = 0, trained = 0;
  for (const tiering::BlockShape& block : owner.Given().graph.blocks) {
    const int64_t to = block.trains ? block.trained_from : block.elements;
    frozen += to;
    trained += block.elements - to;
  }
  EXPECT_EQ(Open(owner, options)->plan().state_bytes, trained * 12 + frozen * 2);
  const auto inspection = swap::Inspect(options.storage.state_dirs);
  ASSERT_TRUE(inspection.ok()) << inspection.status();
  EXPECT_EQ(static_cast<int64_t>(inspection->state_bytes), trained * 12 + frozen * 2);
  options.memory.host_memory_budget_bytes = Open(owner, options)->plan().plan.least_host_memory_bytes;
  ExpectSame(train(true, options), expected);
}

TEST_F(FrozenPartsTest, WhatIsFrozenIsReadTwiceAStepAndNeverWritten) {
  EngineOptions options = Options(kernels::DType::kBf16, OffloadDevice::kNvme);
  options.memory.bounds.placement = tiering::Placement::kCpu;
  Owner owner(true, options.dtype);
  options.memory.host_memory_budget_bytes = Open(owner, options)->plan().plan.least_host_memory_bytes;
  const auto driven = Open(owner, options);
  ASSERT_NE(driven, nullptr);
  int64_t frozen = 0, trained = 0;
  for (const tiering::BlockShape& block : owner.Given().graph.blocks) {
    frozen += block.trained_from;
    trained += block.elements - block.trained_from;
  }
  EXPECT_GE(frozen, 6 * trained);
  EXPECT_EQ(driven->plan().state_bytes, trained * 12 + frozen * 2);
  Result result;
  Train(owner, *driven, 1, &result);
  // The update of the last step but one rides on the last, and gradients may go by way of the drive.
  EXPECT_GT(result.written_bytes, 0);
  EXPECT_LE(result.written_bytes, trained * (12 + 2));
  EXPECT_LE(result.read_bytes, frozen * 2 * 3 + trained * (12 + 2 + 4));  // one block is used in three passes
  // Its tiles have one segment, in the version that they were made in.
  const auto inspection = swap::Inspect(options.storage.state_dirs);
  ASSERT_TRUE(inspection.ok()) << inspection.status();
  EXPECT_EQ(static_cast<int64_t>(inspection->state_bytes), driven->plan().state_bytes);
  int64_t alone = 0;
  for (const swap::TilePlacement& tile : inspection->shape.tiles) {
    if (tile.layout.segment_bytes.size() == 1) alone += static_cast<int64_t>(tile.layout.segment_bytes[0]);
  }
  EXPECT_EQ(alone, frozen * 2);
}

TEST_F(FrozenPartsTest, ARunThatIsKilledGoesOnFromItsLastCommit) {
  EngineOptions options = Options(kernels::DType::kBf16, OffloadDevice::kNvme);
  options.optimizer.clip = 1;
  const Result expected = TrainAll(true, options);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Owner owner(true, options.dtype);
    const auto driven = Open(owner, options);
    for (int64_t step = 1; step <= 3; ++step) {
      if (driven == nullptr || !owner.Step(*driven, step).ok()) _exit(1);
    }
    if (!driven->Call([](Engine& engine) { return engine.Flush(); }).ok() || !driven->Begin().ok()) _exit(1);
    (void)owner.Use(driven->compute(), Direction::kForward, 0, 0, 4);
    kill(getpid(), SIGKILL);
  }
  int how = 0;
  ASSERT_EQ(waitpid(child, &how, 0), child);
  ASSERT_TRUE(WIFSIGNALED(how));
  ExpectGoesOn(options, expected);
}

// Made of a run on a drive and of one in memory, gone on with on a drive and in memory.
TEST_F(FrozenPartsTest, ACheckpointIsGoneOnWithElsewhere) {
  for (const OffloadDevice made_in : {OffloadDevice::kNvme, OffloadDevice::kCpu}) {
    EngineOptions options = Options(kernels::DType::kFp16, made_in);
    const Result expected = TrainAll(true, options);
    std::string path;
    {
      Owner owner(true, options.dtype);
      const auto driven = Open(owner, options);
      for (int64_t step = 1; step <= 3; ++step) ASSERT_TRUE(owner.Step(*driven, step).ok());
      ASSERT_TRUE(driven
                      ->Call([&](Engine& engine) -> absl::Status {
                        const auto kept = engine.Checkpoint(directory_ + "/kept");
                        if (kept.ok()) path = *kept;
                        return kept.status();
                      })
                      .ok());
    }
    for (const OffloadDevice goes_on_in : {OffloadDevice::kNvme, OffloadDevice::kCpu}) {
      EngineOptions again = Options(options.dtype, goes_on_in);
      again.storage.state_dirs = {goes_on_in == OffloadDevice::kCpu ? path : directory_ + "/again"};
      if (goes_on_in == OffloadDevice::kNvme) {
        ASSERT_TRUE(RestoreRun(path, again).ok());
      }
      ExpectGoesOn(again, expected);
    }
    std::filesystem::remove_all(directory_);
  }
}

TEST_F(FrozenPartsTest, WhatHasNoStateIsRefusedByNameAndItsValueCanBeWritten) {
  const EngineOptions options = Options(kernels::DType::kBf16, OffloadDevice::kNvme);
  Owner owner(true, options.dtype);
  const auto driven = Open(owner, options);
  ASSERT_NE(driven, nullptr);
  std::vector<float> values(90 * 50, 0.25F);
  const TensorView view = {values.data(), ElementType::kFp32, {90, 50}};
  const absl::Status called = driven->Call([&](Engine& engine) -> absl::Status {
    const absl::Status moment = engine.WriteState("block.0.base.1", StateKind::kFirstMoment, view);
    EXPECT_THAT(moment.message(), HasSubstr("block.0.base.1 is frozen: it has no first moment"));
    absl::Status written = engine.WriteState("block.0.base.1", StateKind::kParameter, view);
    if (!written.ok()) return written;
    const auto read = engine.ReadState("block.0.base.1", StateKind::kParameter);
    if (!read.ok()) return read.status();
    EXPECT_EQ(std::memcmp(read->view.data, values.data(), values.size() * sizeof(float)), 0);
    return absl::OkStatus();
  });
  ASSERT_TRUE(called.ok()) << called;
  owner.gives_frozen = true;
  const absl::Status step = owner.Step(*driven, 1).status();
  EXPECT_EQ(step.code(), absl::StatusCode::kInvalidArgument) << step;
  EXPECT_THAT(step.message(), HasSubstr("base.0, which is frozen"));
}

TEST_F(FrozenPartsTest, WhatIsFrozenMayComeFromElsewhereAndIsThenNoPartOfTheState) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    const Result expected = TrainAll(true, Options(dtype, OffloadDevice::kNone));
    EngineOptions options = Options(dtype, OffloadDevice::kNvme);
    Owner owner(true, dtype);
    const auto source = std::make_shared<ValuesSource>(owner, dtype);
    options.frozen = source;
    options.memory.host_memory_budget_bytes = Open(owner, options)->plan().plan.least_host_memory_bytes;
    {
      const auto driven = Open(owner, options);
      ASSERT_NE(driven, nullptr);
      int64_t trained = 0;
      for (const tiering::BlockShape& block : owner.Given().graph.blocks)
        trained += block.elements - block.trained_from;
      EXPECT_EQ(driven->plan().state_bytes, driven->plan().format.precision().UnpaddedBytes(trained));
      Result whole;
      Train(owner, *driven, 1, &whole);
      ExpectSame(whole, expected);
      EXPECT_GT(source->reads, 10);
      std::vector<float> values(90 * 50, 0.25F);
      const TensorView view = {values.data(), ElementType::kFp32, {90, 50}};
      const absl::Status written = driven->Call(
          [&](Engine& engine) { return engine.WriteState("block.0.base.1", StateKind::kParameter, view); });
      EXPECT_THAT(written.message(), HasSubstr("is frozen and read from elsewhere, which is not written"));
    }
    // Its tiles are those of what trains, and a run goes on with them.
    {
      const auto driven = Open(owner, options);
      for (int64_t step = 1; step <= 3; ++step) ASSERT_TRUE(owner.Step(*driven, step).ok());
      ASSERT_TRUE(driven->Call([](Engine& engine) { return engine.Flush(); }).ok());
    }
    options.storage.overwrite = false;
    options.resume.enabled = true;
    EngineOptions without = options;
    without.frozen = nullptr;
    EXPECT_THAT(std::string(DrivenEngine::Create(owner.Given(), without).status().message()),
                HasSubstr("frozen_elsewhere"));
    options.memory.host_memory_budget_bytes = 0;  // what is frozen is cut anew
    const auto driven = Open(owner, options);
    ASSERT_NE(driven, nullptr);
    Result rest;
    Train(owner, *driven, 4, &rest);
    EXPECT_EQ(rest.values, expected.values);
    EXPECT_EQ(rest.moments, expected.moments);
    source->fails = true;
    EngineOptions in_memory = Options(dtype, OffloadDevice::kCpu);
    in_memory.frozen = source;
    EXPECT_EQ(DrivenEngine::Create(owner.Given(), in_memory).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

// As an older Penstock left them too: what is frozen lies among what trains.
TEST_F(FrozenPartsTest, AStateInAnotherOrderIsRefusedInALine) {
  EngineOptions options = Options(kernels::DType::kBf16, OffloadDevice::kNvme);
  TrainAll(/*frozen=*/false, options);
  options.storage.overwrite = false;
  options.resume.enabled = true;
  Owner owner(true, options.dtype);
  const absl::Status refused = DrivenEngine::Create(owner.Given(), options).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("have what is frozen among what trains"));
}

}  // namespace
}  // namespace penstock::zero::frozen_parts_test
