// SIGKILL at any moment, over and over: a run that is killed and resumed until it is done has the log of one
// never killed, to the last bit of every loss.
//
// The parent only forks: LibTorch's threads live in the children. A child is killed by itself after a random
// number of finished operations (so every stage of a step and of a commit is hit, with whatever else is in
// flight), or by the parent after a random time. The next child starts at once, while the kernel still
// finishes the last one's writes.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "models/families/stages.h"
#include "run/watch/train_log.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tests/soak.h"
#include "tests/zero/training.h"
#include "zero/engine/report.h"
#include "zero/engine/restore.h"

namespace penstock::zero::kill_test {
namespace {

using testing_support::RunOptions;

constexpr int kDone = 0, kFailed = 3;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// What must agree: step, loss, norm, rate and loss scale of every line; times may differ.
std::vector<std::string> Losses(const std::string& log) {
  std::vector<std::string> losses;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);)
    losses.push_back(line.substr(0, line.find(", \"in_backward\"")));
  return losses;
}

// Runs in a child: resumes or starts, trains to the end, logs. Kills itself after `operations` finished
// operations.
[[noreturn]] void Child(RunOptions run, const std::string& log_path, int64_t operations) {
  auto fail = [](const absl::Status& status) {
    std::cerr << status << std::endl;
    _exit(kFailed);
  };
  EngineOptions options = testing_support::OptionsOf(run);
  options.storage.overwrite = true;
  if (run.adjust) run.adjust(options);
  if (options.storage.durability == Durability::kCheckpoint) {
    // So that some tiles stay in memory and others do not.
    const absl::StatusOr<EnginePlan> roomy = PlanEngine(models::MakeGpt(run.model), options);
    if (!roomy.ok()) fail(roomy.status());
    options.memory.host_memory_budget_bytes = roomy->plan.least_host_memory_bytes + (5 << 19);
    options.hooks.planned = [](const EnginePlan& plan) {
      return plan.plan.late_write_bytes > 0 ? absl::OkStatus()
                                            : absl::InternalError("nothing stays in memory");
    };
  }
  int64_t left = operations;
  options.hooks.observer = [&left](tiering::OpId, const tiering::Op&, double, double) {
    if (left-- == 0) kill(getpid(), SIGKILL);
  };
  std::unique_ptr<run::TrainLog> log;
  options.hooks.describe = [](const StepResult& result) { return StepJson(result, 1); };
  options.hooks.committed = [&log](const StepResult& result) { return log->Append(StepJson(result, 1)); };
  const std::string& kept = run.checkpoints.parent;
  const absl::StatusOr<std::string> newest = swap::FindCheckpoint(kept.empty() ? "nowhere" : kept);
  if (run.offload == OffloadDevice::kNvme) {
    // One version that was being overwritten is of no use: its checkpoints are, once there are any.
    const swap::Holding holding = swap::Probe(run.state_dir, 10'000).holding;
    const bool overwritten = holding == swap::Holding::kOverwritten;
    if (newest.ok() && (overwritten || holding == swap::Holding::kNeverCommitted)) {
      if (absl::Status status = RestoreRun(*newest, options); !status.ok()) fail(status);
    } else if (overwritten) {
      std::filesystem::remove_all(run.state_dir);
    }
    options.resume.enabled = std::filesystem::exists(run.state_dir);
  } else if (run.resume_from.empty() && newest.ok()) {
    options.resume.enabled = true;
    options.storage.state_dirs = {*newest};
  }
  absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(models::MakeGpt(run.model), options);
  if (absl::IsNotFound(engine.status())) {  // killed before its first commit: start over
    options.resume.enabled = false;
    engine = CreateEngine(models::MakeGpt(run.model), options);
  }
  if (!engine.ok()) fail(engine.status());
  absl::StatusOr<std::unique_ptr<run::TrainLog>> opened =
      run::TrainLog::Open(log_path, {.run_id = "run", .resumes = true});
  if (!opened.ok()) fail(opened.status());
  log = std::move(*opened);
  if (absl::Status status = log->CutAfter((*engine)->step()); !status.ok()) fail(status);
  if (absl::Status status = log->AddMissing((*engine)->last_description()); !status.ok()) fail(status);
  while ((*engine)->step() < run.steps) {
    const int64_t step = (*engine)->step() + 1;
    std::vector<Batch> batches;
    for (int m = 0; m < run.micro_batches; ++m) batches.push_back(testing_support::MakeBatch(run, step, m));
    absl::StatusOr<StepResult> result =
        (*engine)->Step(std::move(batches), step < run.steps ? Next::kTrain : Next::kUnknown);
    if (!result.ok()) fail(result.status());
  }
  if (absl::Status status = (*engine)->Flush(); !status.ok()) fail(status);
  engine->reset();
  _exit(kDone);
}

// Runs one child; kills it after `kill_after_us` unless that is negative. Returns its wait status.
int RunChild(const RunOptions& run, const std::string& log, int64_t operations, int64_t kill_after_us) {
  const pid_t child = fork();
  if (child == 0) Child(run, log, operations);
  if (kill_after_us >= 0) {
    usleep(static_cast<useconds_t>(kill_after_us));
    kill(child, SIGKILL);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

// Every checkpoint is whole and leads to the same end; of those that were cut short nothing is left.
// `least`: so many of the two that are kept. One that is spread over several steps and does not come to its
// end in any life is not there.
void ExpectGoodCheckpoints(RunOptions run, const std::string& scratch, size_t least,
                           const std::vector<std::string>& plain) {
  for (const auto& entry : std::filesystem::directory_iterator(run.checkpoints.parent)) {
    EXPECT_NE(entry.path().filename().string()[0], '.') << entry.path();
  }
  const std::vector<swap::CheckpointEntry> kept = *swap::ListCheckpoints(run.checkpoints.parent);
  EXPECT_LE(kept.size(), 2u);
  ASSERT_GE(kept.size(), least);
  EXPECT_EQ(kept.back().step, static_cast<uint64_t>(run.steps)) << "that of the last step is made up for";
  run.checkpoints = {};
  run.adjust = nullptr;
  run.offload = OffloadDevice::kNone;
  run.state_dir.clear();
  for (const swap::CheckpointEntry& checkpoint : kept) {
    run.resume_from = checkpoint.path;
    const std::string log = scratch + "/from-" + checkpoint.name;
    const int status = RunChild(run, log, -1, -1);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kDone) << checkpoint.path;
    // The line of its own step comes first.
    const auto from = static_cast<ptrdiff_t>(checkpoint.step) - 1;
    EXPECT_EQ(Losses(ReadFile(log)), std::vector<std::string>(plain.begin() + from, plain.end()));
  }
}

TEST(Kill, KillsLeaveNoTraceInTheLog) {
  std::random_device entropy;
  const uint64_t seed = entropy();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const int enough = 30 * tests::Soak();
  int kills = 0;
  for (int round = 0; kills < enough || round < 5; ++round) {  // every kind at least once
    RunOptions run;
    run.model = {2, 32, 2, 16, 256, 0.1};
    run.batch = 2;
    run.seq = 16;
    run.steps = 24;
    run.micro_batches = 1 + round % 2;
    const kernels::DType dtypes[] = {kernels::DType::kFp16, kernels::DType::kBf16, kernels::DType::kFp32,
                                     kernels::DType::kBf16};
    run.dtype = dtypes[round % 4];
    if (round % 4 == 1) run.optimizer_states = kernels::StateType::k8Bit;
    // Of fp16: overflows at first, and then goes up and down.
    run.loss_scale = {.dynamic = true, .initial_scale = 0x1p22, .window = 3, .hysteresis = 1};
    const std::string scratch = testing_support::ScratchDirectory();
    run.offload = OffloadDevice::kNone;
    const int plain = RunChild(run, scratch + "/plain.jsonl", -1, -1);
    ASSERT_TRUE(WIFEXITED(plain) && WEXITSTATUS(plain) == kDone);
    // A drive; a drive and checkpoints; memory, whose checkpoints are all that outlives a kill; a drive of
    // which only checkpoints are durable, and which keeps one version.
    const int kind = round % 5;
    if (kind != 2) {
      run.offload = OffloadDevice::kNvme;
      run.state_dir = scratch + "/state";
    }
    if (kind != 0) run.checkpoints = {scratch + "/kept", 3, 2};
    if (kind == 0) {
      run.tile_bytes = 48 << 10;
      run.adjust = [](EngineOptions& options) {
        options.optimizer.prefer = tiering::Prefer::kTime;
        options.memory.bounds.previewed_share = 0.5;
        options.memory.bounds.placement = tiering::Placement::kCpu;
      };
    }
    if (kind >= 3) {
      run.tile_bytes = 48 << 10;
      run.adjust = [kind](EngineOptions& options) {
        options.storage.durability = Durability::kCheckpoint;
        options.storage.versions = kind == 4 ? 1 : 2;
        options.optimizer.order = tiering::UpdateOrder::kAuto;
      };
    }
    const uint64_t most = kind < 3 ? 120 : 800;  // operations: it must get from one checkpoint to the next
    for (int life = 0;; ++life) {
      // On a machine that is busy with others, lives that go nowhere become longer.
      const uint64_t longer = 1 + static_cast<uint64_t>(life) / 50;
      // The order of update may differ from life to life, as a plan may.
      run.update_order =
          random() % 2 == 0 ? tiering::UpdateOrder::kInBackward : tiering::UpdateOrder::kInNextForward;
      ASSERT_LT(life, 400) << "the run makes no progress";
      const bool by_itself = random() % 3 != 0;
      const int status = by_itself ? RunChild(run, scratch + "/log.jsonl",
                                              static_cast<int64_t>(random() % (most * longer)), -1)
                                   : RunChild(run, scratch + "/log.jsonl", -1,
                                              static_cast<int64_t>(random() % (400'000 * longer)));
      if (WIFSIGNALED(status)) {
        ASSERT_EQ(WTERMSIG(status), SIGKILL);
        ++kills;
        continue;
      }
      ASSERT_EQ(WEXITSTATUS(status), kDone) << "life " << life;
      break;
    }
    const std::vector<std::string> expected = Losses(ReadFile(scratch + "/plain.jsonl"));
    EXPECT_EQ(Losses(ReadFile(scratch + "/log.jsonl")), expected) << "kind " << kind;
    if (kind != 0) ExpectGoodCheckpoints(run, scratch, /*least=*/kind == 1 ? 1 : 2, expected);
    EXPECT_EQ(Losses(ReadFile(scratch + "/log.jsonl")).size(), 24u);
    std::filesystem::remove_all(scratch);
    if (HasFailure()) return;
  }
  RecordProperty("kills", kills);
}

}  // namespace
}  // namespace penstock::zero::kill_test
