// Passes of a driven engine that are given up at random moments, in every way that an owner can, kills among
// them: nothing leaks, and no bit is wrong afterwards.
//
// PENSTOCK_SOAK=40 makes a thousand of them, in each mode.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "plain_compute.h"
#include "tests/leaks.h"
#include "tests/soak.h"
#include "tests/zero/plain_batch.h"
#include "tests/zero/plain_owner.h"
#include "zero/compute/test_device.h"
#include "zero/engine/driven_engine.h"
#include "zero/engine/engine.h"

namespace penstock::zero::abandon_test {
namespace {

using testing_support::Owner;
using testing_support::PlainBatch;
using tiering::BlockIndex;
using tiering::StageIndex;

constexpr int kMicroBatches = 2;
constexpr plain::Shape kShape = {.layers = 5, .width = 192};

std::vector<Batch> Batches(int64_t step) {
  return {PlainBatch(kShape, 2 * step), PlainBatch(kShape, 2 * step + 1)};
}

absl::Status StateOf(Engine& engine, std::vector<float>* state) {
  for (const std::string& name : engine.ParameterNames()) {
    for (const StateKind kind : {StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment}) {
      const auto value = engine.ReadState(name, kind);
      if (!value.ok()) return value.status();
      const auto* const values = static_cast<const float*>(value->view.data);
      state->insert(state->end(), values, values + value->view.elements());
    }
  }
  return absl::OkStatus();
}

// What so many steps come to where nothing is given up.
std::vector<float> StateAfter(int64_t steps) {
  EngineOptions options;
  options.dtype = kernels::DType::kFp32;
  options.micro_batches = kMicroBatches;
  options.example = PlainBatch(kShape, 0);
  options.storage.offload = OffloadDevice::kNone;
  Owner owner(kShape, kMicroBatches);
  options.initial_values = owner.Options("").initial_values;
  auto engine = Engine::Create(std::make_shared<plain::PlainCompute>(kShape), options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  std::vector<float> state;
  for (int64_t step = 1; step <= steps; ++step) EXPECT_TRUE((*engine)->Step(Batches(step)).ok());
  EXPECT_TRUE(StateOf(**engine, &state).ok());
  return state;
}

// One that changes its mind.
class Fickle {
 public:
  // on_device: the engine has its blocks in the memory of a device.
  Fickle(EngineOptions options, uint64_t seed, bool on_device)
      : random_(seed), options_(std::move(options)), on_device_(on_device) {}

  absl::Status Open() {
    driven_.reset();
    owner_ = std::make_unique<Owner>(kShape, kMicroBatches);
    options_.initial_values = owner_->Options("").initial_values;
    if (on_device_) {
      options_.device = std::make_shared<TestDevice>(TestDeviceOptions{.latency_seconds = 1e-4});
      owner_->leaves = [](DrivenCompute::Result* result) {
        for (Gradient& gradient : result->gradients.front().second) gradient.value.on_device = true;
      };
    }
    absl::StatusOr<Measured> measured = owner_->Measure();
    if (!measured.ok()) return measured.status();
    auto driven = DrivenEngine::Create(*std::move(measured), options_);
    if (!driven.ok()) return driven.status();
    driven_ = *std::move(driven);
    driven_->compute().set_interrupted([this] { return interrupted_.load(); });
    options_.storage.overwrite = false;
    options_.resume.enabled = true;
    return absl::OkStatus();
  }
  DrivenEngine& driven() { return *driven_; }
  int64_t step() {
    int64_t step = 0;
    const absl::Status usable = driven_->Call([&](Engine& engine) {
      step = engine.step();
      return engine.usable();
    });
    PENSTOCK_CHECK(usable.ok(), usable.ToString().c_str());
    return step;
  }

  // The next step, whole or not. True: it was made.
  bool Pass(bool gives_up) {
    const int64_t next = step() + 1;
    if (!driven_->Begin(Below(3) > 0 ? Next::kTrain : Next::kUnknown).ok()) return false;
    const int kind = gives_up ? Below(7) : kKinds;
    const int moment = Below(kUses);
    std::thread other;
    if (kind == 0) {
      other = std::thread([this, wait = std::chrono::microseconds(Below(3000))] {
        std::this_thread::sleep_for(wait);
        driven_->compute().Fail(absl::AbortedError("by another thread"));
      });
    }
    Compute(Batches(next), kind, moment);
    if (other.joinable()) other.join();
    if (kind == 6) return false;  // its engine is closed in the middle of it
    interrupted_ = false;         // or Finish would not wait either
    const auto result = driven_->Finish();
    EXPECT_TRUE(result.ok() || kind != kKinds) << result.status();
    return result.ok();
  }
  bool Closes() const { return closes_; }
  void Close() {
    driven_.reset();
    closes_ = false;
  }
  int Below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }

 private:
  static constexpr int kKinds = 7;
  static constexpr int kUses = (2 * kShape.layers - 1) * kMicroBatches;

  void Compute(std::vector<Batch> batches, int kind, int moment) {
    for (int use = 0; use < kUses; ++use) {
      const int row = use / kMicroBatches, m = use % kMicroBatches;
      const bool forward = row + 1 < kShape.layers;
      const Direction direction = forward ? Direction::kForward : Direction::kBackward;
      const int stage = forward ? row : 2 * (kShape.layers - 1) - row;
      if (kind > 0 && kind < kKinds && use == moment && GiveUp(kind, direction, stage, m)) return;
      if (!owner_->One(driven_->compute(), direction, stage, m, &batches).ok()) return;
    }
  }
  // False: not here.
  bool GiveUp(int kind, Direction direction, int stage, int m) {
    DrivenCompute& compute = driven_->compute();
    if (kind == 2) return true;  // Finish comes too early
    if (kind == 3) {
      EXPECT_FALSE(compute.Enter(direction, StageIndex(stage), m + 1).ok());
      return true;
    }
    if (kind == 4) interrupted_ = true;
    if (kind == 6) closes_ = true;
    auto entered = compute.Enter(direction, StageIndex(stage), m);
    if (kind == 4 || kind == 1) return true;  // dropped
    if (!entered.ok()) return true;
    if (kind == 5) {
      DrivenCompute::Result wrong;
      wrong.gradients = {{BlockIndex(stage == 0 ? 1 : 0), {}}};
      EXPECT_FALSE(compute.Leave(*std::move(entered), std::move(wrong)).ok());
      return true;
    }
    return true;
  }

  std::mt19937_64 random_;
  EngineOptions options_;
  const bool on_device_;
  std::unique_ptr<Owner> owner_;
  std::unique_ptr<DrivenEngine> driven_;
  std::atomic<bool> interrupted_{false};
  bool closes_ = false;
};

struct Mode {
  std::string name;
  tiering::UpdateOrder order = tiering::UpdateOrder::kAuto;
  bool previews = false;
  bool on_device = false;
};

class AbandonTest : public testing::TestWithParam<Mode> {
 protected:
  ~AbandonTest() override { std::filesystem::remove_all(directory_); }

  EngineOptions Options() const {
    EngineOptions options;
    options.dtype = kernels::DType::kFp32;
    options.micro_batches = kMicroBatches;
    options.storage.state_dirs = {directory_};
    options.storage.overwrite = true;
    options.memory.tile_bytes = 64 << 10;
    options.optimizer.order = GetParam().order;
    if (GetParam().previews) {
      options.optimizer.prefer = tiering::Prefer::kTime;
      options.memory.bounds.previewed_share = 1;
      options.memory.bounds.placement = tiering::Placement::kCpu;
    }
    return options;
  }

  const std::string directory_ =
      (std::filesystem::current_path() / absl::StrCat("abandon-", getpid())).string();
};

TEST_P(AbandonTest, NothingLeaksAndNoBitIsWrong) {
  const int wanted = 25 * tests::Soak();
  Fickle owner(Options(), 3, GetParam().on_device);
  ASSERT_TRUE(owner.Open().ok());
  int given_up = 0;
  std::unique_ptr<tests::Held> before;
  while (given_up < wanted) {
    const bool gives_up = owner.Below(4) > 0;
    if (!owner.Pass(gives_up)) ++given_up;
    if (owner.Closes()) {
      owner.Close();
      ASSERT_TRUE(owner.Open().ok());
    }
    if (given_up == wanted / 3 && before == nullptr) before = std::make_unique<tests::Held>();
  }
  const tests::Held after;
  EXPECT_EQ(after.descriptors, before->descriptors);
  EXPECT_LE(tests::ThreadsOnceAtMost(before->threads), before->threads);
  EXPECT_LE(after.resident_bytes, before->resident_bytes + (8 << 20));
  while (owner.step() < 3) ASSERT_TRUE(owner.Pass(false));
  std::vector<float> state;
  ASSERT_TRUE(owner.driven().Call([&](Engine& engine) { return StateOf(engine, &state); }).ok());
  EXPECT_EQ(state, StateAfter(owner.step()));
}

TEST_P(AbandonTest, AKillAmongThemLosesNothing) {
  const int wanted = 25 * tests::Soak();
  void* const shared =
      mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* const given_up = new (shared) std::atomic<int>(0);
  EngineOptions options = Options();
  {
    Fickle first(options, 1, GetParam().on_device);
    ASSERT_TRUE(first.Open().ok());
  }
  options.storage.overwrite = false;
  options.resume.enabled = true;
  std::mt19937_64 random(17);
  int kills = 0;
  for (bool over = false; !over;) {
    const uint64_t seed = random();
    const int before = given_up->load();
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Fickle owner(options, seed, GetParam().on_device);
      if (!owner.Open().ok()) _exit(1);
      while (given_up->load() < wanted) {
        if (!owner.Pass(owner.Below(4) > 0)) given_up->fetch_add(1);
        if (!owner.Closes()) continue;
        owner.Close();
        if (!owner.Open().ok()) _exit(2);
      }
      _exit(testing::Test::HasFailure() ? 3 : 0);
    }
    if (given_up->load() < wanted / 5 * 4) {
      // Every other kill comes at any moment, also before the first pass; the rest let it come to one,
      // however slow this build is.
      for (int waits = 0; kills % 2 == 1 && given_up->load() == before && waits < 3000; ++waits)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      std::this_thread::sleep_for(std::chrono::microseconds(80'000 + random() % 120'000));
      kill(child, SIGKILL);
    }
    int how = 0;
    ASSERT_EQ(waitpid(child, &how, 0), child);
    ASSERT_TRUE(WIFSIGNALED(how) || WEXITSTATUS(how) == 0) << how;
    kills += WIFSIGNALED(how) ? 1 : 0;
    over = !WIFSIGNALED(how);
  }
  EXPECT_GT(kills, 0);
  Fickle last(options, 2, GetParam().on_device);
  ASSERT_TRUE(last.Open().ok());
  while (last.step() < 3) ASSERT_TRUE(last.Pass(false));
  std::vector<float> state;
  ASSERT_TRUE(last.driven().Call([&](Engine& engine) { return StateOf(engine, &state); }).ok());
  EXPECT_EQ(state, StateAfter(last.step()));
  munmap(shared, sizeof(std::atomic<int>));
}

INSTANTIATE_TEST_SUITE_P(
    Modes, AbandonTest,
    testing::Values(
        Mode{"Auto"}, Mode{.name = "InBackward", .order = tiering::UpdateOrder::kInBackward},
        Mode{.name = "OnADevice", .on_device = true},
        Mode{.name = "NextForward", .order = tiering::UpdateOrder::kInNextForward},
        Mode{.name = "Previewed", .order = tiering::UpdateOrder::kInNextForward, .previews = true}),
    [](const auto& mode) { return mode.param.name; });

}  // namespace
}  // namespace penstock::zero::abandon_test
