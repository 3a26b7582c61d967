// Checkpoints that several ranks write together: whole or not there, and good for going on with any other
// number of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "swap/checkpoint.h"
#include "tests/zero/ranks.h"
#include "zero/engine/change_ranks.h"
#include "zero/engine/restore.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero::rank_checkpoints_test {
namespace {

using testing_support::Alone;
using testing_support::RankOutcome;
using testing_support::RunOptions;
using testing_support::TrainRanks;
using testing_support::UntiedRun;

class RankCheckpointsTest : public testing::Test {
 protected:
  RankCheckpointsTest() : scratch_(testing_support::ScratchDirectory()) {}
  ~RankCheckpointsTest() override { std::filesystem::remove_all(scratch_); }

  // `run` on `world` ranks, or with one that has all their micro-batches: the report of the first.
  nlohmann::json Train(RunOptions run, int world, bool on_one) {
    run.keep_state = true;
    if (world == 1 || on_one) {
      run.micro_batches = world;
      return Alone(run);
    }
    const std::vector<RankOutcome> outcomes = TrainRanks(world, run);
    for (const RankOutcome& outcome : outcomes) EXPECT_EQ(outcome.text(), "");
    return outcomes.front().report;
  }

  // The same, going on from a checkpoint.
  nlohmann::json GoOn(RunOptions run, int world, bool on_one, const std::string& checkpoint) {
    run.checkpoints = {};
    run.stop_after = 0;
    if (run.offload != OffloadDevice::kNvme) {
      run.resume_from = checkpoint;
      return Train(run, world, on_one);
    }
    run.resume = true;
    run.keep_state = true;
    const auto restore = [&](int, RunOptions* own) {
      own->micro_batches = on_one ? world : 1;
      const absl::Status restored = RestoreRun(checkpoint, testing_support::OptionsOf(*own));
      if (!restored.ok()) own->state_dir = std::string(restored.message());
    };
    if (world > 1 && !on_one) {
      const std::vector<RankOutcome> outcomes = TrainRanks(world, run, restore);
      for (const RankOutcome& outcome : outcomes) EXPECT_EQ(outcome.text(), "");
      return outcomes.front().report;
    }
    return testing_support::RunProcesses(1,
                                         [&](int, int) {
                                           RunOptions own = run;
                                           restore(0, &own);
                                           return ToJson(testing_support::TrainGpt(own));
                                         })
        .front()
        .report;
  }

  const std::string scratch_;
};

// W ranks to step 2, and on with W' from their checkpoint, against one rank with W and then W' micro-batches:
// the same bits, whatever the parts, tiles and types, from memory or a drive to either.
TEST_F(RankCheckpointsTest, GoOnWithAnyNumberOfRanks) {
  struct Case {
    int from, to;
    OffloadDevice first, then;
    kernels::DType dtype;
    kernels::StateType states;
  };
  using kernels::StateType;
  const OffloadDevice none = OffloadDevice::kNone, nvme = OffloadDevice::kNvme;
  for (const Case& c : {Case{2, 1, nvme, none, kernels::DType::kBf16, StateType::k8Bit},
                        Case{1, 3, none, nvme, kernels::DType::kBf16, StateType::k8Bit},
                        Case{2, 3, nvme, nvme, kernels::DType::kBf16, StateType::k8Bit},
                        Case{3, 2, none, none, kernels::DType::kFp32, StateType::kFp32},
                        Case{4, 3, nvme, none, kernels::DType::kFp16, StateType::kBf16},
                        Case{3, 4, nvme, nvme, kernels::DType::kFp32, StateType::kFp32},
                        Case{2, 2, none, nvme, kernels::DType::kBf16, StateType::kFp32}}) {
    SCOPED_TRACE(testing::Message() << c.from << " to " << c.to);
    std::vector<nlohmann::json> ends;
    for (const bool on_one : {true, false}) {
      const std::string where =
          scratch_ + "/" + std::to_string(c.from) + std::to_string(c.to) + (on_one ? "-one" : "-ranks");
      RunOptions run = UntiedRun(c.first, c.dtype);
      run.optimizer_states = c.states;
      run.tile_bytes = 1 << 16;
      run.evaluate_every = 0;
      run.stop_after = 2;
      run.checkpoints = {where + "/kept", 2, 0};
      if (c.first == nvme) run.state_dir = where + "/state";
      ASSERT_EQ(Train(run, c.from, on_one)["status"], "");
      const absl::StatusOr<std::string> checkpoint = swap::FindCheckpoint(where + "/kept");
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
      EXPECT_EQ(FindShards({*checkpoint})->size(), on_one ? 1u : static_cast<size_t>(c.from));
      run.offload = c.then;
      run.state_dir = c.then == nvme ? where + "/then" : "";
      run.tile_bytes = 3 << 15;
      ends.push_back(GoOn(run, c.to, on_one, *checkpoint));
      ASSERT_EQ(ends.back()["status"], "");
      EXPECT_EQ(ends.back()["resumed_from"], 2);
      EXPECT_EQ(ends.back()["losses"].size(), 2u);
    }
    EXPECT_EQ(ends[0]["losses"], ends[1]["losses"]);
    EXPECT_EQ(ends[0]["norms"], ends[1]["norms"]);
  }
}

// W ranks to step 2, and on with W' in the same directory, against one rank with W and then W' micro-batches:
// the same bits, also where an earlier change was killed before its parts counted.
TEST_F(RankCheckpointsTest, TheStateItselfGoesOnWithAnyNumberOfRanks) {
  for (const auto& [from, to] : {std::pair{2, 1}, {1, 3}, {2, 3}, {3, 2}}) {
    SCOPED_TRACE(testing::Message() << from << " to " << to);
    const std::string where = scratch_ + "/" + std::to_string(from) + std::to_string(to);
    RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
    run.tile_bytes = 1 << 16;
    run.evaluate_every = 0;
    run.stop_after = 2;
    RunOptions one = run;
    one.checkpoints = {where + "/kept", 2, 0};
    one.state_dir = where + "/one";
    ASSERT_EQ(Train(one, from, true)["status"], "");
    one.state_dir = where + "/then";
    const nlohmann::json alone = GoOn(one, to, true, where + "/kept/step-00000002");
    ASSERT_EQ(alone["status"], "");

    run.state_dir = where + "/state";
    ASSERT_EQ(Train(run, from, false)["status"], "");
    std::filesystem::create_directories(where + "/state/.penstock.next/rank-0");
    run.stop_after = 0;
    run.resume = run.keep_state = true;
    const auto change = [&](int, RunOptions* own) {
      const EngineOptions options = testing_support::OptionsOf(*own);
      const absl::StatusOr<OtherRanks> other = FindOtherRanks(options.comm.get(), {where + "/state"}, "");
      absl::Status changed = other.status();
      if (changed.ok() && other->ranks != from) changed = absl::InternalError("another number was found");
      if (changed.ok()) changed = ChangeRanks(other->from, {where + "/state"}, options);
      if (!changed.ok()) own->state_dir = std::string(changed.message());
    };
    nlohmann::json on;
    if (to > 1) {
      const std::vector<RankOutcome> outcomes = TrainRanks(to, run, change);
      for (const RankOutcome& outcome : outcomes) EXPECT_EQ(outcome.text(), "");
      on = outcomes.front().report;
    } else {
      on = testing_support::RunProcesses(1,
                                         [&](int, int) {
                                           RunOptions own = run;
                                           own.micro_batches = to;
                                           change(0, &own);
                                           return ToJson(testing_support::TrainGpt(own));
                                         })
               .front()
               .report;
    }
    EXPECT_EQ(on["resumed_from"], 2);
    EXPECT_EQ(on["losses"], alone["losses"]);
    EXPECT_EQ(on["norms"], alone["norms"]);
    const absl::StatusOr<ShardDirectories> parts = FindShards({where + "/state"});
    ASSERT_TRUE(parts.ok()) << parts.status();
    EXPECT_EQ(parts->size(), static_cast<size_t>(to));
    EXPECT_FALSE(std::filesystem::exists(where + "/state/.penstock.next"));
    EXPECT_FALSE(std::filesystem::exists(where + "/state/rank-" + std::to_string(to)));
  }
}

// Another start may change the number of ranks between the plan and the opening of the state; and parts may
// be of two runs, at the same step.
TEST_F(RankCheckpointsTest, RanksTrainNothingButThePartsThatTheyPlannedForOfOneRun) {
  RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
  run.tile_bytes = 1 << 16;
  run.evaluate_every = 0;
  const auto part = [&](const std::string& name, int rank) {
    return scratch_ + "/" + name + "/rank-" + std::to_string(rank);
  };
  for (const auto& [name, ranks] : {std::pair{"state", 2}, {"three", 3}, {"mixed", 2}, {"another", 2}}) {
    RunOptions made = run;
    made.stop_after = 2;
    made.state_dir = scratch_ + "/" + name;
    ASSERT_EQ(Train(made, ranks, false)["status"], "");
  }
  run.resume = run.keep_state = true;
  run.state_dir = scratch_ + "/state";
  const auto replaced = TrainRanks(2, run, [&](int rank, RunOptions* own) {
    own->adjust = [&, rank](EngineOptions& options) {
      options.hooks.planned = [&, rank](const EnginePlan&) {
        std::filesystem::rename(part("state", rank), part("state", 10 + rank));
        std::filesystem::rename(part("three", rank), part("state", rank));
        return absl::OkStatus();
      };
    };
  });
  for (const RankOutcome& outcome : replaced)
    EXPECT_THAT(outcome.text(),
                testing::HasSubstr("another process has replaced the run while this one started"));

  std::filesystem::remove_all(part("mixed", 1));
  std::filesystem::rename(part("another", 1), part("mixed", 1));
  run.state_dir = scratch_ + "/mixed";
  for (const RankOutcome& outcome : TrainRanks(2, run))
    EXPECT_THAT(outcome.text(), testing::HasSubstr("bring the parts of one run together"));
}

// Processes killed at random moments, most of them while a checkpoint is on its way: what has a name is
// whole, and the run goes on with the bits of one left alone, also where only checkpoints are durable.
TEST_F(RankCheckpointsTest, KilledAnyTimeTheyAreWholeOrNotThere) {
  for (const Durability durability : {Durability::kStep, Durability::kCheckpoint}) {
    SCOPED_TRACE(static_cast<int>(durability));
    RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
    run.evaluate_every = 0;
    run.steps = 12;
    run.tile_bytes = 1 << 15;
    run.host_memory_budget_bytes = 48 << 20;
    const auto plain = [&] {
      RunOptions alone = run;
      alone.offload = OffloadDevice::kNone;
      alone.host_memory_budget_bytes = 0;
      return Train(alone, 2, true)["losses"].get<std::vector<double>>();
    }();
    const std::string where = scratch_ + "/" + std::to_string(static_cast<int>(durability));
    run.state_dir = where + "/state";
    run.checkpoints = {where + "/kept", 2, 2};
    std::mt19937 random(11);
    int killed = 0;
    bool done = false;
    for (int life = 0; life < 6 && !done; ++life) {
      const int victim = static_cast<int>(random() % 2);
      const int64_t operations = life == 5 ? -1 : 150 + static_cast<int64_t>(random() % 400);
      const auto outcomes = TrainRanks(2, run, [&](int rank, RunOptions* own) {
        own->resume = life > 0;
        own->adjust = [&, rank](EngineOptions& options) {
          options.storage.durability = durability;
          if (rank != victim || operations < 0) return;
          options.hooks.observer = [count = operations](tiering::OpId, const tiering::Op&, double,
                                                        double) mutable {
            if (count-- == 0) kill(getpid(), SIGKILL);
          };
        };
      });
      if (outcomes[static_cast<size_t>(victim)].exit_code == -1) {
        ++killed;
        EXPECT_EQ(outcomes[static_cast<size_t>(1 - victim)].exit_code, 0) << "it did not end by itself";
      } else {
        for (const RankOutcome& outcome : outcomes) ASSERT_EQ(outcome.text(), "") << "life " << life;
        done = true;
      }
      const auto all = swap::ListCheckpoints(where + "/kept");
      ASSERT_TRUE(all.ok()) << all.status();
      for (const swap::CheckpointEntry& entry : *all) {
        const absl::StatusOr<ShardDirectories> parts = FindShards({entry.path});
        ASSERT_TRUE(parts.ok()) << parts.status();
        ASSERT_EQ(parts->size(), 2u);
        const auto inspections = InspectShards(*parts);
        ASSERT_TRUE(inspections.ok()) << inspections.status();
        for (const swap::Inspection& part : *inspections) EXPECT_EQ(part.record.step, entry.step);
      }
      for (const RankOutcome& rank : outcomes) {
        if (!rank.report.is_object() || !rank.report.contains("losses")) continue;
        const int64_t from = std::max<int64_t>(0, rank.report["resumed_from"].get<int64_t>());
        EXPECT_EQ(durability == Durability::kCheckpoint ? from % 2 : 0, 0);
        const auto losses = rank.report["losses"].get<std::vector<double>>();
        for (size_t i = 0; i < losses.size(); ++i)
          ASSERT_EQ(losses[i], plain.at(static_cast<size_t>(from) + i)) << "life " << life;
      }
    }
    EXPECT_TRUE(done);
    EXPECT_GT(killed, 1);
    const auto all = swap::ListCheckpoints(where + "/kept");
    ASSERT_TRUE(all.ok()) << all.status();
    EXPECT_LE(all->size(), 2u);
    run.offload = OffloadDevice::kNone;
    run.state_dir.clear();
    run.host_memory_budget_bytes = 0;
    for (const swap::CheckpointEntry& entry : *all) {
      const nlohmann::json rest = GoOn(run, 2, true, entry.path);
      ASSERT_EQ(rest["status"], "");
      EXPECT_EQ(rest["losses"].get<std::vector<double>>(),
                std::vector<double>(plain.begin() + static_cast<ptrdiff_t>(entry.step), plain.end()));
    }
    for (const auto& left : std::filesystem::directory_iterator(where + "/kept"))
      EXPECT_EQ(left.path().filename().string().find(".step"), std::string::npos) << left.path();
  }
}

// What several ranks keep is evaluated by one process, block by block.
TEST_F(RankCheckpointsTest, OneProcessEvaluatesTheStateOfSeveral) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32}) {
    RunOptions run = UntiedRun(OffloadDevice::kNvme, dtype);
    run.steps = run.evaluate_every = 3;
    run.tile_bytes = 1 << 16;
    run.host_memory_budget_bytes = 48 << 20;
    run.state_dir = scratch_ + "/state-" + std::to_string(static_cast<int>(dtype));
    const nlohmann::json trained = Train(run, 3, false);
    ASSERT_EQ(trained["evaluations"].size(), 1u);
    const auto evaluated = testing_support::RunProcesses(1, [&](int, int) {
      EngineOptions options = testing_support::OptionsOf(run);
      options.trains = false;
      absl::StatusOr<std::unique_ptr<Engine>> engine = CreateEngine(run.make_model(), options);
      if (!engine.ok()) return nlohmann::json{{"status", std::string(engine.status().message())}};
      std::vector<Batch> held_out;
      for (int m = 0; m < 5; ++m) held_out.push_back(testing_support::MakeBatch(run, -1, m));
      absl::StatusOr<double> loss = (*engine)->Evaluate(held_out);
      if (!loss.ok()) return nlohmann::json{{"status", std::string(loss.status().message())}};
      return nlohmann::json{{"status", ""}, {"loss", *loss}};
    });
    ASSERT_EQ(evaluated.front().text(), "");
    EXPECT_EQ(evaluated.front().report["loss"], trained["evaluations"][0]);
  }
}

// A part that is another run's, or not there, is named.
TEST_F(RankCheckpointsTest, PartsThatDoNotBelongTogetherAreNamed) {
  RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
  run.steps = 2;
  run.evaluate_every = 0;
  for (const char* name : {"/a", "/b"}) {
    run.state_dir = scratch_ + name;
    ASSERT_EQ(Train(run, 2, false)["status"], "");
  }
  const std::string a = scratch_ + "/a", b = scratch_ + "/b";
  std::filesystem::rename(a + "/rank-1", a + "/away");
  const auto missing = FindShards({a});
  EXPECT_TRUE(absl::IsDataLoss(missing.status())) << missing.status();
  EXPECT_THAT(std::string(missing.status().message()),
              testing::HasSubstr("rank 1 of the run's 2 is missing"));
  std::filesystem::rename(b + "/rank-1", a + "/rank-1");
  const auto mixed = InspectShards(*FindShards({a}));
  EXPECT_TRUE(absl::IsDataLoss(mixed.status())) << mixed.status();
  EXPECT_THAT(std::string(mixed.status().message()), testing::HasSubstr(a + "/rank-1 is not the part"));
}

// Parts of two checkpoints of one run never pass as one: neither of two steps, whose commits have the same
// number, nor of one step that was written twice.
TEST_F(RankCheckpointsTest, PartsOfTwoCheckpointsAreRefused) {
  const auto copy_part = [](const std::string& from, const std::string& to) {
    std::filesystem::copy(
        from + "/rank-1", to + "/rank-1",
        std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  };
  const auto refusal = [](const std::string& checkpoint) {
    const auto inspections = InspectShards(*FindShards({checkpoint}));
    EXPECT_TRUE(absl::IsDataLoss(inspections.status())) << inspections.status();
    return std::string(inspections.status().message());
  };
  RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
  run.stop_after = 4;
  run.evaluate_every = 0;
  run.state_dir = scratch_ + "/state";
  run.checkpoints = {scratch_ + "/kept", 2, 0};
  ASSERT_EQ(Train(run, 2, false)["status"], "");
  const std::string second = scratch_ + "/kept/" + swap::CheckpointName(2),
                    fourth = scratch_ + "/kept/" + swap::CheckpointName(4);
  // The same step once more, by a process that goes on from it.
  run.resume = true;
  run.stop_after = 0;
  run.checkpoints = {scratch_ + "/again", 4, 0};
  ASSERT_EQ(Train(run, 2, false)["status"], "");
  const std::string again = scratch_ + "/again/" + swap::CheckpointName(4);
  for (const std::string& whole : {second, fourth, again})
    EXPECT_TRUE(InspectShards(*FindShards({whole})).ok()) << whole;

  copy_part(fourth, again);
  EXPECT_THAT(refusal(again), testing::HasSubstr(again + "/rank-1 is of step 4 in another checkpoint than "));
  copy_part(second, fourth);
  EXPECT_THAT(refusal(fourth),
              testing::HasSubstr(fourth + "/rank-1 is of step 2, and " + fourth + "/rank-0 of step 4"));
}

}  // namespace
}  // namespace penstock::zero::rank_checkpoints_test
