// What another rank says of its model, its machine and its errors is held against what can be.
#include "zero/engine/rank_agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "tiering/plan/machine.h"
#include "tiering/plan/model_graph.h"

namespace penstock::zero::rank_agreement_test {
namespace {

using testing::HasSubstr;

RankEnvironment SecondOfTwo() {
  RankEnvironment environment;
  environment.rank = 1;
  environment.world = 2;
  return environment;
}

// Rank 1 of two, whose rank 0 answers with this rank's own bytes as `lie` changes them.
class LyingComm : public Comm {
 public:
  using Lie = std::function<void(std::span<std::byte> answer)>;
  explicit LyingComm(Lie lie) : Comm(SecondOfTwo()), lie_(std::move(lie)) {}
  std::string name() const override { return "a test"; }
  absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel /*channel*/, const What& /*what*/,
                                                  std::span<const void* const> send,
                                                  std::span<void* const> receive, size_t bytes) override {
    struct Done : Exchange {
      absl::Status Wait() override { return absl::OkStatus(); }
    };
    std::memcpy(receive[0], send[0], bytes);
    lie_({static_cast<std::byte*>(receive[0]), bytes});
    return std::make_unique<Done>();
  }
  void Abort(const absl::Status& /*why*/) override {}
  absl::Status failure() override { return absl::OkStatus(); }

 private:
  const Lie lie_;
};

template <typename T>
void Put(std::span<std::byte> answer, size_t at, T value) {
  std::memcpy(answer.data() + at, &value, sizeof(value));
}

tiering::ModelGraph Graph() {
  tiering::ModelGraph graph;
  graph.blocks.resize(2);
  graph.stages.resize(2);
  for (tiering::StageShape& stage : graph.stages) {
    stage.input_bytes = stage.forward_peak_bytes = stage.backward_peak_bytes = 1024;
    stage.forward_seconds = stage.backward_seconds = 1e-3;
  }
  return graph;
}

TEST(RankAgreement, SizesThatNoModelHasAreRefusedAndTheRankIsNamed) {
  for (const int64_t size : {int64_t{-1}, std::numeric_limits<int64_t>::min(), int64_t{1} << 60,
                             std::numeric_limits<int64_t>::max()}) {
    LyingComm comm([size](std::span<std::byte> answer) { Put(answer, 0, size); });
    tiering::ModelGraph graph = Graph();
    const absl::Status status = AgreeOnGraph(comm, &graph);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 has a model of impossible sizes"));
  }
  LyingComm honest([](std::span<std::byte>) {});
  tiering::ModelGraph graph = Graph();
  EXPECT_TRUE(AgreeOnGraph(honest, &graph).ok());
}

TEST(RankAgreement, TimesAndMachinesThatCannotBeAreRefused) {
  int exchanges = 0;
  LyingComm times([&exchanges](std::span<std::byte> answer) {
    if (exchanges++ == 1) Put(answer, 0, std::numeric_limits<double>::quiet_NaN());
  });
  tiering::ModelGraph graph = Graph();
  EXPECT_TRUE(absl::IsInvalidArgument(AgreeOnGraph(times, &graph)));

  for (const double rate : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    LyingComm comm([rate](std::span<std::byte> answer) {
      if (answer.size() == sizeof(tiering::MachineModel) + sizeof(int64_t)) Put(answer, 0, rate);
    });
    tiering::MachineModel machine;
    std::string unlike;
    const absl::Status status = AgreeOnMachine(comm, DeviceExchange(), *HostDevice(),
                                               /*host_memory_budget_bytes=*/0, true, &machine, &unlike);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("impossible machine"));
  }
}

TEST(RankAgreement, TheMachineIsThatOfTheSlowestHostAndUnlikeDrivesAreTold) {
  for (const auto& [theirs, told] : {std::pair{3e9, false}, {2.9e9, false}, {0.5e9, true}}) {
    LyingComm comm([rate = theirs](std::span<std::byte> answer) {
      if (answer.size() != sizeof(tiering::MachineModel) + sizeof(int64_t)) return;
      tiering::MachineModel other;
      other.read_bytes_per_s = rate;
      std::memcpy(answer.data(), &other, sizeof(other));
      const int64_t measured = 1;
      std::memcpy(answer.data() + sizeof(other), &measured, sizeof(measured));
    });
    tiering::MachineModel machine;
    machine.write_bytes_per_s = 2e9;
    std::string unlike;
    ASSERT_TRUE(AgreeOnMachine(comm, DeviceExchange(), *HostDevice(), /*host_memory_budget_bytes=*/0, true,
                               &machine, &unlike)
                    .ok());
    EXPECT_EQ(machine.read_bytes_per_s, theirs);
    EXPECT_EQ(machine.write_bytes_per_s, 2e9);
    const double shared = 2 * theirs * 3e9 / (theirs + 3e9);
    EXPECT_DOUBLE_EQ(2 * machine.mixed_rate(1e12), std::min(shared, 2.4e9));
    EXPECT_THAT(unlike, told
                            ? testing::StartsWith("unlike drives: rank 0 reads and writes 0.86 GB/s at once, "
                                                  "rank 1 2.40 GB/s")
                            : testing::Matcher<std::string>(testing::IsEmpty()));
  }
}

TEST(RankAgreement, AnErrorOfAnotherRankIsOneLine) {
  // All texts' lengths go first, then the texts.
  const std::string theirs = "13 disk full\n\x1b[31mrm -rf";
  LyingComm comm([&theirs](std::span<std::byte> answer) {
    if (answer.size() == sizeof(int64_t)) {
      Put(answer, 0, static_cast<int64_t>(theirs.size()));
    } else {
      std::memcpy(answer.data(), theirs.data(), std::min(answer.size(), theirs.size()));
    }
  });
  const absl::Status status =
      AgreeOnStatus(comm, Channel::kSetup, absl::InternalError(std::string(theirs.size() - 3, 'x')));
  EXPECT_EQ(status.message(), "rank 0: disk full??[31mrm -rf");
}

}  // namespace
}  // namespace penstock::zero::rank_agreement_test
