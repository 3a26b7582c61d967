// Parameters' state by name over several ranks: each has its part, all read the whole, and what they write is
// there on all of them or on none. That it is read right in every mode is part of ExpectSameLosses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tests/zero/ranks.h"
#include "tests/zero/training.h"
#include "zero/compute/test_device.h"
#include "zero/engine/engine.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero::rank_state_test {
namespace {

using testing::HasSubstr;
using testing_support::Alone;
using testing_support::ExpectSameLosses;
using testing_support::RankOutcome;
using testing_support::RunOptions;
using testing_support::TrainRanks;
using testing_support::UntiedRun;

class RankStateTest : public testing_support::ScratchTest {};

// Part of one block, and all of another whose size no number of ranks divides.
const char* const kNames[] = {"layer.2.up.weight", "layer.1.down.bias", "head.weight"};

absl::Status HalveAll(Engine& engine) {
  for (const char* name : kNames) {
    for (const StateKind kind : {StateKind::kParameter, StateKind::kFirstMoment}) {
      absl::StatusOr<torch::Tensor> value = ReadStateTensor(engine, name, kind);
      if (!value.ok()) return value.status();
      const torch::Tensor half = *value * 0.5;
      if (absl::Status status = WriteStateTensor(engine, name, kind, half); !status.ok()) return status;
      absl::StatusOr<torch::Tensor> now = ReadStateTensor(engine, name, kind);
      if (!now.ok()) return now.status();
      if (!torch::equal(*now, half))
        return absl::InternalError(name + std::string(" is not what was written"));
    }
  }
  return absl::OkStatus();
}

// Its head comes to its readers in more than one exchange.
Model WithLargeHead() {
  Model model = testing_support::Untied();
  model.blocks.back().build = [] { return std::make_shared<torch::nn::LinearImpl>(72, 2048); };
  return model;
}

struct Mode {
  const char* name;
  OffloadDevice offload;
  int versions = 0;
  bool devices = false;
};

TEST_F(RankStateTest, WhatIsWrittenIsThatOfOneRankInEveryMode) {
  for (const Mode& mode : {Mode{"memory", OffloadDevice::kNone}, Mode{"host memory", OffloadDevice::kCpu},
                           Mode{"drive", OffloadDevice::kNvme}, Mode{"one version", OffloadDevice::kNvme, 1},
                           Mode{"devices", OffloadDevice::kCpu, 0, true}}) {
    for (const int world : {2, 3}) {
      SCOPED_TRACE(testing::Message() << mode.name << ", " << world << " ranks");
      RunOptions run = UntiedRun(mode.offload, kernels::DType::kFp32);
      run.make_model = WithLargeHead;
      run.adjust = [mode](EngineOptions& options) {
        options.storage.versions = mode.versions;
        if (mode.versions == 1) options.storage.durability = Durability::kCheckpoint;
      };
      run.after_step = [](Engine& engine) {
        return engine.step() == 2 ? HalveAll(engine) : absl::OkStatus();
      };
      const bool drive = mode.offload == OffloadDevice::kNvme;
      run.micro_batches = world;
      if (drive) run.state_dir = scratch_ + "/one";
      const nlohmann::json one = Alone(run);
      run.micro_batches = 1;
      if (drive) run.state_dir = scratch_ + "/all";
      ExpectSameLosses(one, TrainRanks(world, run, [&](int, RunOptions* own) {
                         if (!mode.devices) return;
                         own->device = testing_support::MakeTestDevice({.linked = true});
                         own->device_memory_budget_bytes = 64 << 20;
                       }));
      std::filesystem::remove_all(scratch_ + "/all");
      std::filesystem::remove_all(scratch_ + "/one");
    }
  }
}

TEST_F(RankStateTest, AWriteThatNotAllHaveCommittedIsTakenBack) {
  RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
  run.evaluate_every = 0;
  run.steps = 5;
  run.state_dir = scratch_ + "/alone";
  const std::vector<RankOutcome> left_alone = TrainRanks(2, run);
  run.state_dir = scratch_ + "/run";
  run.stop_after = 2;
  for (const RankOutcome& rank : TrainRanks(2, run)) ASSERT_EQ(rank.text(), "");
  const std::string before = scratch_ + "/before", of_rank_1 = swap::RankDirectory(run.state_dir, 1);
  std::filesystem::copy(of_rank_1, before, std::filesystem::copy_options::recursive);
  run.resume = true;
  run.opened = [](Engine& engine) -> absl::Status {
    absl::StatusOr<torch::Tensor> value = ReadStateTensor(engine, "head.weight", StateKind::kParameter);
    if (!value.ok()) return value.status();
    return WriteStateTensor(engine, "head.weight", StateKind::kParameter, *value * 0.5);
  };
  for (const RankOutcome& rank : TrainRanks(2, run)) ASSERT_EQ(rank.text(), "");
  // As if rank 1 had been killed before it could commit.
  const auto commit_of = [&](int rank) {
    return swap::Inspect({swap::RankDirectory(run.state_dir, rank)})->record.sequence;
  };
  ASSERT_EQ(commit_of(0), commit_of(1));
  std::filesystem::remove_all(of_rank_1);
  std::filesystem::copy(before, of_rank_1, std::filesystem::copy_options::recursive);
  ASSERT_EQ(commit_of(0), commit_of(1) + 1);
  // Nor does anybody else read half of it.
  const auto parts = FindShards({run.state_dir});
  ASSERT_TRUE(parts.ok()) << parts.status();
  const auto inspections = InspectShards(*parts);
  ASSERT_TRUE(inspections.ok()) << inspections.status();
  for (const swap::Inspection& each : *inspections) {
    EXPECT_EQ(each.record.sequence, commit_of(1));
    EXPECT_EQ(each.record.step, 2u);
  }
  run.opened = nullptr;
  run.stop_after = 0;
  run.adjust = [](EngineOptions& options) {
    options.hooks.log = [path = options.storage.state_dirs.front() + "/../said"](const std::string& line) {
      std::ofstream(path, std::ios::app) << line << "\n";
    };
  };
  const std::vector<RankOutcome> resumed = TrainRanks(2, run);
  for (size_t k = 0; k < 2; ++k) {
    ASSERT_EQ(resumed[k].text(), "");
    const auto losses = left_alone[k].report["losses"].get<std::vector<double>>();
    EXPECT_EQ(resumed[k].report["losses"].get<std::vector<double>>(),
              std::vector<double>(losses.begin() + 2, losses.end()));
    EXPECT_EQ(resumed[k].report["state"], left_alone[k].report["state"]);
  }
  std::ifstream log(run.state_dir + "/said");
  const std::string lines(std::istreambuf_iterator<char>(log), {});
  EXPECT_THAT(lines, HasSubstr("written into the state after step 2 was not committed by all ranks"));
}

// One process that evaluates what two have kept has a part: it must not be given for the whole.
TEST_F(RankStateTest, APartIsNotReadAsTheWhole) {
  RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
  run.steps = 2;
  run.evaluate_every = 0;
  run.state_dir = scratch_ + "/run";
  for (const RankOutcome& rank : TrainRanks(2, run)) ASSERT_EQ(rank.text(), "");
  run.hashes_state = false;
  run.keep_state = true;
  run.adjust = [](EngineOptions& options) { options.trains = false; };
  run.opened = [](Engine& engine) {
    return ReadStateTensor(engine, "head.weight", StateKind::kParameter).status();
  };
  const nlohmann::json read = Alone(run);
  EXPECT_EQ(read["code"], static_cast<int>(absl::StatusCode::kFailedPrecondition)) << read;
  EXPECT_THAT(read["status"].get<std::string>(), HasSubstr("one rank's part"));
}

TEST_F(RankStateTest, WhatIsWrongIsToldToAllAndEndsNothing) {
  RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
  run.state_dir = scratch_ + "/plain";
  const std::vector<RankOutcome> plain = TrainRanks(2, run);
  run.state_dir = scratch_ + "/run";
  const auto outcomes = TrainRanks(2, run, [](int rank, RunOptions* own) {
    own->after_step = [rank](Engine& engine) -> absl::Status {
      if (engine.step() != 2) return absl::OkStatus();
      absl::StatusOr<torch::Tensor> value = ReadStateTensor(engine, "head.weight", StateKind::kParameter);
      if (!value.ok()) return value.status();
      const absl::Status differs =
          WriteStateTensor(engine, "head.weight", StateKind::kParameter, *value + rank);
      if (!absl::IsInvalidArgument(differs)) return absl::InternalError(differs.ToString());
      if (differs.message().find("ranks 0 and 1 were given different values for head.weight") ==
          std::string::npos)
        return absl::InternalError(differs.ToString());
      // Of one rank alone: the other hears of it.
      const torch::Tensor wrong = rank == 1 ? torch::ones(3) : *value;
      const absl::Status shape = WriteStateTensor(engine, "head.weight", StateKind::kParameter, wrong);
      if (!absl::IsInvalidArgument(shape)) return absl::InternalError(shape.ToString());
      const absl::Status name = WriteStateTensor(engine, "haed.weight", StateKind::kParameter, *value);
      if (!absl::IsNotFound(name)) return absl::InternalError(name.ToString());
      const absl::Status gradient = WriteStateTensor(engine, "head.weight", StateKind::kGradient, *value);
      if (!absl::IsFailedPrecondition(gradient)) return absl::InternalError(gradient.ToString());
      return absl::OkStatus();
    };
  });
  for (size_t k = 0; k < 2; ++k) {
    EXPECT_EQ(outcomes[k].text(), "");
    EXPECT_EQ(outcomes[k].report["losses"], plain[k].report["losses"]);
    EXPECT_EQ(outcomes[k].report["state"], plain[k].report["state"]);
  }
}

}  // namespace
}  // namespace penstock::zero::rank_state_test
