// Kills at any moment of a run whose buffers change, and ranks, which do not serve them. The parent only
// forks: LibTorch's threads live in the children.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "tests/soak.h"
#include "tests/zero/ranks.h"
#include "tests/zero/wide_training.h"

namespace penstock::zero::changing_buffers_kill_test {
namespace {

using testing_support::MakeWideModel;
using testing_support::WideBatches;
using testing_support::WideShape;

constexpr int64_t kSteps = 8;

WideShape Shape() {
  WideShape shape;
  shape.statistics = shape.inner_losses = true;
  return shape;
}

// Trains to the end, or is killed by itself after so many operations. At the end the losses of evaluations
// are in `log`: they read what all steps have left.
[[noreturn]] void Child(const std::string& directory, const std::string& log, int64_t operations) {
  const auto fail = [](const absl::Status& status) {
    std::cerr << status << std::endl;
    _exit(3);
  };
  const Model model = MakeWideModel(Shape());
  EngineOptions options = directory.empty() ? testing_support::WideOptions(Shape())
                                            : testing_support::WideOnADrive(Shape(), model, directory);
  options.hooks.observer = [&operations](tiering::OpId, const tiering::Op&, double, double) {
    if (operations-- == 0) kill(getpid(), SIGKILL);
  };
  options.resume.enabled = !directory.empty() && std::filesystem::exists(directory);
  absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(model, options);
  if (absl::IsNotFound(engine.status())) {  // killed before its first commit: start over
    options.resume.enabled = false;
    engine = CreateEngine(model, options);
  }
  if (!engine.ok()) fail(engine.status());
  while ((*engine)->step() < kSteps) {
    const int64_t step = (*engine)->step() + 1;
    const auto result =
        (*engine)->Step(WideBatches(Shape(), step), step < kSteps ? Next::kTrain : Next::kUnknown);
    if (!result.ok()) fail(result.status());
  }
  std::ofstream file(log);
  for (const int64_t step : {1000, 1001}) {
    const absl::StatusOr<std::vector<double>> losses = (*engine)->EvaluateEach(WideBatches(Shape(), step));
    if (!losses.ok()) fail(losses.status());
    for (const double loss : *losses) file << std::hexfloat << loss << "\n";
  }
  if (const absl::Status status = (*engine)->Flush(); !status.ok()) fail(status);
  file.close();
  engine->reset();
  _exit(0);
}

int RunChild(const std::string& directory, const std::string& log, int64_t operations) {
  const pid_t child = fork();
  if (child == 0) Child(directory, log, operations);
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class ChangingBuffersKill : public testing_support::ScratchTest {};

TEST_F(ChangingBuffersKill, KilledRunsEndWithTheBitsOfOneNeverKilled) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const std::string plain = scratch_ + "/plain", log = scratch_ + "/log";
  ASSERT_EQ(RunChild("", plain, -1), 0);
  ASSERT_FALSE(ReadFile(plain).empty());
  for (int kills = 0; kills < 12 * tests::Soak();) {
    std::filesystem::remove_all(scratch_ + "/state");
    std::filesystem::remove(log);
    for (int life = 0;; ++life) {
      ASSERT_LT(life, 100) << "the run makes no progress";
      const int status = RunChild(scratch_ + "/state", log, static_cast<int64_t>(random() % 900));
      if (!WIFSIGNALED(status)) {
        ASSERT_EQ(status, 0);
        break;
      }
      ++kills;
    }
    ASSERT_EQ(ReadFile(log), ReadFile(plain));
  }
}

TEST_F(ChangingBuffersKill, SeveralRanksAreRefused) {
  const auto ranks = testing_support::RunProcesses(2, [](int rank, int port) {
    absl::StatusOr<std::unique_ptr<Comm>> comm = testing_support::ConnectLoopback(rank, 2, port);
    if (!comm.ok()) return nlohmann::json{{"status", std::string(comm.status().message())}};
    EngineOptions options = testing_support::WideOptions(Shape());
    options.comm = std::move(*comm);
    const absl::Status status = CreateEngine(MakeWideModel(Shape()), options).status();
    return nlohmann::json{{"status", std::string(status.message())}};
  });
  for (const testing_support::RankOutcome& rank : ranks) {
    EXPECT_EQ(rank.exit_code, 0);
    EXPECT_NE(rank.text().find("train it with one rank"), std::string::npos) << rank.text();
  }
}

}  // namespace
}  // namespace penstock::zero::changing_buffers_kill_test
