// A Compute that fails anywhere, in steps and in evaluations: the engine is as it was before the call, and
// what is made again has the bits of a run in which nothing ever failed.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "plain_compute.h"
#include "tests/zero/plain_batch.h"
#include "zero/engine/engine.h"

namespace penstock::zero::give_up_test {
namespace {

using testing_support::PlainBatch;

// Fails at its n-th call from when it is told to, and must then be asked nothing by that thread until the
// next pass; another one may have begun to ask.
class Failing final : public plain::PlainCompute {
 public:
  using PlainCompute::PlainCompute;
  int calls_left = -1;  // none
  int asked_after_failure = 0;

  absl::Status Begin(const PassInfo& pass, std::vector<Batch> batches) override {
    failed_ = false;
    return PlainCompute::Begin(pass, std::move(batches));
  }

  absl::Status Forward(const StageUse& use, std::span<const Weights> weights) override {
    const absl::Status why = Why("forward", use);
    return why.ok() ? PlainCompute::Forward(use, weights) : why;
  }
  // After it as well: its gradients are there and are not taken.
  absl::Status Backward(const StageUse& use, std::span<const Weights> weights) override {
    RETURN_IF_ERROR(Why("backward", use));
    const absl::Status status = PlainCompute::Backward(use, weights);
    const absl::Status why = Why("backward, late", use);
    return why.ok() ? status : why;
  }
  absl::StatusOr<std::span<const Gradient>> Gradients(const StageUse& use,
                                                      tiering::BlockIndex block) override {
    RETURN_IF_ERROR(Why("gradients", use));
    return PlainCompute::Gradients(use, block);
  }
  absl::StatusOr<std::span<const TensorView>> SavedInputs(tiering::Position position,
                                                          int micro_batch) override {
    RETURN_IF_ERROR(Why("saved inputs", StageUse()));
    return PlainCompute::SavedInputs(position, micro_batch);
  }
  absl::StatusOr<std::span<const TensorView>> RestoreInputs(tiering::Position position,
                                                            int micro_batch) override {
    RETURN_IF_ERROR(Why("restored inputs", StageUse()));
    return PlainCompute::RestoreInputs(position, micro_batch);
  }
  absl::StatusOr<std::vector<double>> Losses() override {
    if (!failed_) RETURN_IF_ERROR(Why("losses", StageUse()));
    return PlainCompute::Losses();
  }

 private:
  absl::Status Why(const char* call, const StageUse& use) {
    const std::lock_guard lock(mutex_);  // inputs are moved beside compute
    if (failed_ && std::this_thread::get_id() == failed_on_) ++asked_after_failure;
    if (failed_) return absl::InternalError("asked after it had failed");
    if (calls_left < 0 || calls_left-- > 0) return absl::OkStatus();
    failed_ = true;
    failed_on_ = std::this_thread::get_id();
    return absl::AbortedError(absl::StrCat(call, " of stage ", use.stage.value(), " was made to fail"));
  }

  std::mutex mutex_;
  std::atomic<bool> failed_{false};
  std::thread::id failed_on_;
};

struct Mode {
  std::string name;
  OffloadDevice offload = OffloadDevice::kNvme;
  tiering::UpdateOrder order = tiering::UpdateOrder::kAuto;
  double clip = 0;
  Durability durability = Durability::kStep;
  int versions = 0;
  int64_t checkpoint_every = 0;
  bool least = false;  // of memory
  int micro_batches = 2;
  bool previews = false;
};

class GiveUpTest : public testing::TestWithParam<Mode> {
 protected:
  ~GiveUpTest() override { std::filesystem::remove_all(directory_); }

  EngineOptions Options() const {
    const Mode& mode = GetParam();
    EngineOptions options;
    options.dtype = kernels::DType::kFp32;
    options.micro_batches = GetParam().micro_batches;
    options.example = PlainBatch(shape_, 0);
    options.optimizer.algorithm = kernels::AdamOptions{.lr = 1e-3, .weight_decay = 0.01};
    options.optimizer.order = mode.order;
    options.optimizer.clip = mode.clip;
    if (mode.previews) {
      options.optimizer.prefer = tiering::Prefer::kTime;
      options.memory.bounds.previewed_share = 1;
    }
    options.storage.offload = mode.offload;
    if (mode.offload == OffloadDevice::kNvme) options.storage.state_dirs = {directory_ + "/state"};
    options.storage.overwrite = true;
    options.storage.durability = mode.durability;
    if (mode.versions > 0) options.storage.versions = mode.versions;
    if (mode.checkpoint_every > 0) {
      options.storage.checkpoints.parent = directory_ + "/kept";
      options.storage.checkpoints.every = mode.checkpoint_every;
      options.storage.checkpoints.keep = 1;
    }
    options.memory.tile_bytes = 16 << 10;
    options.memory.host_memory_budget_bytes = budget_;
    return options;
  }
  std::vector<Batch> Batches(int64_t step) const {
    std::vector<Batch> batches = {PlainBatch(shape_, 2 * step)};
    if (GetParam().micro_batches == 2) batches.push_back(PlainBatch(shape_, 2 * step + 1));
    return batches;
  }
  absl::Status State(Engine& engine, std::vector<float>* state) const {
    for (const std::string& name : engine.ParameterNames()) {
      for (const StateKind kind :
           {StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment}) {
        const auto value = engine.ReadState(name, kind);
        if (!value.ok()) return value.status();
        const auto* const values = static_cast<const float*>(value->view.data);
        state->insert(state->end(), values, values + value->view.elements());
      }
    }
    return absl::OkStatus();
  }

  struct Run {
    std::vector<double> losses, evaluations;
    std::vector<float> state;
    int gave_up = 0;
    double speculative_share = 0;
  };
  // `seed` 0: nothing fails.
  void Train(uint64_t seed, Run* run) {
    std::mt19937_64 random(seed);
    const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
    auto compute = std::make_shared<Failing>(shape_);
    auto engine = Engine::Create(compute, Options());
    ASSERT_TRUE(engine.ok()) << engine.status();
    const int calls = GetParam().micro_batches * shape_.layers * 4;  // about as many as a step makes
    while ((*engine)->step() < kSteps) {
      const int64_t step = (*engine)->step() + 1;
      const bool fails = seed != 0 && draw(2) == 0;
      compute->calls_left = fails ? draw(calls) : -1;
      const bool evaluates = step % 3 == 0;
      const bool announces = step < kSteps && (seed != 0 ? draw(3) > 0 : !evaluates);
      const auto result = (*engine)->Step(Batches(step), announces ? Next::kTrain : Next::kUnknown);
      compute->calls_left = -1;
      if (!result.ok()) {
        ASSERT_EQ(result.status().code(), absl::StatusCode::kAborted) << result.status();
        ASSERT_TRUE((*engine)->usable().ok()) << (*engine)->usable();
        ASSERT_EQ((*engine)->step(), step - 1);
        ++run->gave_up;
        if (draw(4) == 0) {
          ASSERT_TRUE((*engine)->Flush().ok());
        }
        if (draw(4) == 0) {
          std::vector<float> state;
          ASSERT_TRUE(State(**engine, &state).ok());
        }
        continue;
      }
      run->losses.push_back(result->loss);
      run->speculative_share = std::max(run->speculative_share, result->speculative_share);
      if (!evaluates) continue;
      compute->calls_left = seed != 0 ? draw(2 * shape_.layers) : -1;
      auto evaluated = (*engine)->Evaluate(Batches(1000));
      compute->calls_left = -1;
      if (!evaluated.ok()) {
        ASSERT_EQ(evaluated.status().code(), absl::StatusCode::kAborted) << evaluated.status();
        evaluated = (*engine)->Evaluate(Batches(1000));
        ++run->gave_up;
      }
      ASSERT_TRUE(evaluated.ok()) << evaluated.status();
      run->evaluations.push_back(*evaluated);
    }
    ASSERT_EQ(compute->asked_after_failure, 0);
    ASSERT_TRUE((*engine)->Flush().ok());
    const absl::Status read = State(**engine, &run->state);
    ASSERT_TRUE(read.ok()) << read;
  }

  // Goes on with the run to its end, failing now and then. In a process of its own.
  bool TrainOn(const EngineOptions& options, uint64_t seed) {
    std::mt19937_64 random(seed);
    auto compute = std::make_shared<Failing>(shape_);
    auto engine = Engine::Create(compute, options);
    if (!engine.ok()) return false;
    while ((*engine)->step() < kSteps) {
      const int64_t step = (*engine)->step() + 1;
      compute->calls_left = random() % 3 > 0 ? static_cast<int>(random() % 40) : -1;
      const auto result = (*engine)->Step(Batches(step), step < kSteps ? Next::kTrain : Next::kUnknown);
      if (!result.ok() && !absl::IsAborted(result.status())) return false;
    }
    return (*engine)->Flush().ok();
  }

  static constexpr int64_t kSteps = 12;
  const plain::Shape shape_ = {.layers = 5, .width = 64};
  const std::string directory_ =
      (std::filesystem::current_path() / absl::StrCat("give-up-", getpid())).string();
  int64_t budget_ = 0;
};

TEST_P(GiveUpTest, AStepThatFailsAnywhereIsMadeAgainWithTheSameBits) {
  if (GetParam().least) {
    budget_ = 1 << 30;
    auto plan = Engine::MakePlan(*std::make_unique<plain::PlainCompute>(shape_), Options());
    ASSERT_TRUE(plan.ok()) << plan.status();
    budget_ = plan->plan.least_host_memory_bytes;
  }
  Run whole;
  Train(0, &whole);
  if (HasFatalFailure()) return;
  const char* const soak = std::getenv("PENSTOCK_SOAK");
  const bool early = GetParam().order == tiering::UpdateOrder::kInBackward && GetParam().clip == 0;
  EXPECT_TRUE(!early || whole.speculative_share > 0);
  const int rounds = 4 * (soak != nullptr ? std::max(1, std::atoi(soak)) : 1);
  int gave_up = 0;
  for (int round = 1; round <= rounds; ++round) {
    SCOPED_TRACE(absl::StrCat("seed ", round));
    Run run;
    Train(static_cast<uint64_t>(round), &run);
    if (HasFatalFailure()) return;
    EXPECT_EQ(run.losses, whole.losses);
    EXPECT_EQ(run.evaluations, whole.evaluations);
    EXPECT_EQ(run.state, whole.state);
    gave_up += run.gave_up;
  }
  EXPECT_GT(gave_up, 2 * rounds);
}

// What a process that is killed, in the middle of giving a step up or not, leaves behind.
class GiveUpKillTest : public GiveUpTest {};

TEST_P(GiveUpKillTest, AKillAmongFailuresLosesNothing) {
  Run whole;
  Train(0, &whole);
  if (HasFatalFailure()) return;
  const char* const soak = std::getenv("PENSTOCK_SOAK");
  std::mt19937_64 random(11);
  for (int round = 0; round < (soak != nullptr ? std::max(1, std::atoi(soak)) : 1); ++round) {
    EngineOptions options = Options();
    ASSERT_TRUE(Engine::Create(std::make_shared<Failing>(shape_), options).ok());
    options.storage.overwrite = false;
    options.resume.enabled = true;
    bool over = false;
    for (int kills = 0; !over; ++kills) {
      const uint64_t seed = random();
      const pid_t child = fork();
      ASSERT_GE(child, 0);
      if (child == 0) _exit(TrainOn(options, seed) ? 0 : 1);
      if (kills < 12) {
        std::this_thread::sleep_for(std::chrono::microseconds(2000 + random() % 40000));
        kill(child, SIGKILL);
      }
      int how = 0;
      ASSERT_EQ(waitpid(child, &how, 0), child);
      ASSERT_TRUE(WIFSIGNALED(how) || WEXITSTATUS(how) == 0);
      over = !WIFSIGNALED(how);
    }
    auto engine = Engine::Create(std::make_shared<Failing>(shape_), options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    EXPECT_EQ((*engine)->step(), kSteps);
    std::vector<float> state;
    ASSERT_TRUE(State(**engine, &state).ok());
    EXPECT_EQ(state, whole.state);
  }
}

std::vector<Mode> Modes() {
  return {Mode{"InMemory", OffloadDevice::kNone},
          Mode{"StatesInMemory", OffloadDevice::kCpu},
          Mode{.name = "InMemoryOne", .offload = OffloadDevice::kNone, .micro_batches = 1},
          Mode{.name = "LeastOne", .least = true, .micro_batches = 1},
          Mode{.name = "InBackwardOne", .order = tiering::UpdateOrder::kInBackward, .micro_batches = 1},
          Mode{"OnDrive", OffloadDevice::kNvme},
          Mode{.name = "Least", .least = true},
          Mode{.name = "InBackward", .order = tiering::UpdateOrder::kInBackward},
          Mode{.name = "InBackwardLeast", .order = tiering::UpdateOrder::kInBackward, .least = true},
          Mode{.name = "InBackwardClipped", .order = tiering::UpdateOrder::kInBackward, .clip = 0.02},
          Mode{.name = "NextForwardClipped", .order = tiering::UpdateOrder::kInNextForward, .clip = 0.02},
          Mode{.name = "PreviewedLeast", .clip = 0.02, .least = true, .previews = true},
          Mode{.name = "OneVersion", .versions = 1, .checkpoint_every = 4},
          Mode{.name = "ByCheckpoint", .durability = Durability::kCheckpoint, .checkpoint_every = 4},
          Mode{.name = "Checkpoints", .checkpoint_every = 2}};
}

// Those that keep two versions on a drive: what a killed process leaves is whole.
std::vector<Mode> KillModes() {
  std::vector<Mode> modes = Modes();
  std::erase_if(modes,
                [](const Mode& mode) { return mode.offload != OffloadDevice::kNvme || mode.versions == 1; });
  return modes;
}

std::string NameOfMode(const testing::TestParamInfo<Mode>& mode) { return mode.param.name; }

INSTANTIATE_TEST_SUITE_P(Modes, GiveUpTest, testing::ValuesIn(Modes()), NameOfMode);
INSTANTIATE_TEST_SUITE_P(Modes, GiveUpKillTest, testing::ValuesIn(KillModes()), NameOfMode);

}  // namespace
}  // namespace penstock::zero::give_up_test
