// Several ranks, each a process, over loopback: the losses of one rank, a commit of all or of none, and an
// end with a reason whatever happens to one of them.
#include "tests/zero/ranks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <random>

#include "tests/soak.h"
#include "tiering/advice/tier_table.h"
#include "zero/config/plan_bounds.h"
#include "zero/engine/rank_agreement.h"

namespace penstock::zero {
namespace {

using testing_support::Alone;
using testing_support::ExpectSameLosses;
using testing_support::RankOutcome;
using testing_support::RunOptions;
using testing_support::ToJson;
using testing_support::TrainRanks;
using testing_support::Untied;
using testing_support::UntiedRun;

TEST(Ranks, SameBitsAsOneRankWithTheirMicroBatches) {
  for (const torch::Dtype dtype : {torch::kBFloat16, torch::kFloat32, torch::kHalf}) {
    RunOptions run = UntiedRun(OffloadDevice::kNone, dtype);
    run.micro_batches = 3;
    const nlohmann::json one = Alone(run);
    run.micro_batches = 1;
    ExpectSameLosses(one, TrainRanks(3, run));
  }
}

TEST(Ranks, SameBitsInEveryOffloadModeAndOrderOfUpdate) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, torch::kBFloat16);
  run.clip = 0.15;  // of norms below and above it: updates made in backward are made again in some steps
  run.micro_batches = 2;
  const nlohmann::json one = Alone(run);
  run.micro_batches = 1;
  for (const tiering::UpdateOrder order : {tiering::UpdateOrder::kInNextForward,
                                           tiering::UpdateOrder::kInBackward, tiering::UpdateOrder::kAuto}) {
    RunOptions on_drive = run;
    on_drive.state_dir = testing_support::ScratchDirectory();
    on_drive.update_order = order;
    on_drive.tile_bytes = 1 << 16;
    on_drive.host_memory_bytes = 48 << 20;
    ExpectSameLosses(one, TrainRanks(2, on_drive));
    std::filesystem::remove_all(on_drive.state_dir);
  }
}

// ZeRO's stages 1 and 2: weights stay whole on every rank, and nothing of them is read from the drive; same
// bits.
TEST(Ranks, StagesOneAndTwoKeepWeightsWhole) {
  for (const int64_t stage : {1, 2}) {
    Config config;
    config.zero.stage = stage;
    RunOptions run = UntiedRun(OffloadDevice::kNvme, torch::kBFloat16);
    run.micro_batches = 2;
    run.state_dir = testing_support::ScratchDirectory();
    const nlohmann::json one = Alone(run);
    run.micro_batches = 1;
    run.state_dir = testing_support::ScratchDirectory();
    run.host_memory_bytes = 64 << 20;
    run.adjust = [config](EngineOptions& options) {
      options.bounds = PlanBoundsOf(config, options.world());
      options.planned = [](const EnginePlan& plan) {
        const tiering::TierLine weights = tiering::TiersOf(plan.graph, plan.plan).front();
        return weights.read_bytes == 0 ? absl::OkStatus() : absl::InternalError("weights that do not stay");
      };
    };
    ExpectSameLosses(one, TrainRanks(2, run));
    std::filesystem::remove_all(run.state_dir);
  }
}

// With tied embeddings a gradient has two addends a rank, and the sum another order: each of its fp32
// additions may round differently, so the losses agree to the precision of the sums and not to the bit.
TEST(Ranks, AGptHasTheLossesOfOneRank) {
  RunOptions run;
  run.dtype = torch::kFloat32;
  run.batch = 2;
  run.micro_batches = 4;
  run.steps = 4;
  const nlohmann::json one = Alone(run);
  ASSERT_EQ(one["status"], "");
  run.micro_batches = 1;
  const std::vector<RankOutcome> ranks = TrainRanks(4, run);
  for (const RankOutcome& rank : ranks) {
    ASSERT_EQ(rank.text(), "");
    EXPECT_EQ(rank.report["losses"], ranks.front().report["losses"]);
    EXPECT_EQ(rank.report["losses"][0], one["losses"][0]) << "nothing has been summed yet";
    for (size_t step = 1; step < 4; ++step) {
      const double expected = one["losses"][step], seen = rank.report["losses"][step];
      // A gradient's sum of 8 addends is right to 8 * 2^-24; one update of at most lr a parameter keeps that
      // ratio, but where m / sqrt(v) of a vanishing gradient turns it into any share of lr.
      EXPECT_NEAR(seen, expected, 1e-4 * expected) << step;
    }
  }
}

// One of two ranks moves half the bytes: exactly, where the blocks' sizes are multiples of all parts.
TEST(Ranks, MoveHalfTheBytesEach) {
  RunOptions run = UntiedRun(OffloadDevice::kNvme, torch::kBFloat16);
  run.evaluate_every = 0;
  run.make_model = [] {
    Model model;
    model.identity = {{"model", "even"}};
    const int embedding =
        model.AddBlock("embedding", "", [] { return std::make_shared<torch::nn::EmbeddingImpl>(256, 128); });
    model.AddStage("embed", embedding, [](torch::nn::Module& module, const torch::Tensor& x, const Batch&) {
      return module.as<torch::nn::EmbeddingImpl>()->forward(x);
    });
    const int head = model.AddBlock("head", "", [] {
      return std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(128, 256).bias(false));
    });
    model.AddStage("loss", head, [](torch::nn::Module& module, const torch::Tensor& x, const Batch& batch) {
      const torch::Tensor logits = module.as<torch::nn::LinearImpl>()->forward(x).to(torch::kFloat32);
      return torch::cross_entropy_loss(logits.flatten(0, 1), batch.targets.flatten());
    });
    return model;
  };
  run.host_memory_bytes = 64 << 20;
  run.adjust = [](EngineOptions& options) { options.bounds.placement = tiering::Placement::kCpu; };
  run.update_order = tiering::UpdateOrder::kInNextForward;
  run.state_dir = testing_support::ScratchDirectory();
  const nlohmann::json one = Alone(run);
  ASSERT_EQ(one["status"], "");
  run.state_dir = testing_support::ScratchDirectory();
  const std::vector<RankOutcome> ranks = TrainRanks(2, run);
  std::filesystem::remove_all(run.state_dir);
  for (const RankOutcome& rank : ranks) {
    ASSERT_EQ(rank.text(), "");
    EXPECT_GT(rank.report["write_bytes"].get<int64_t>(), 0);
    EXPECT_EQ(2 * rank.report["write_bytes"].get<int64_t>(), one["write_bytes"].get<int64_t>());
    EXPECT_EQ(2 * rank.report["read_bytes"].get<int64_t>(), one["read_bytes"].get<int64_t>());
  }
}

// A run of two ranks whose processes die at random moments, each time started again with --resume, has the
// losses of one that was left alone.
TEST(Ranks, KilledAndResumedTheLossesAreThoseOfARunLeftAlone) {
  RunOptions run = UntiedRun(OffloadDevice::kNvme, torch::kBFloat16);
  run.evaluate_every = 0;
  run.steps = 14;
  run.host_memory_bytes = 48 << 20;
  run.tile_bytes = 1 << 16;
  run.state_dir = testing_support::ScratchDirectory();
  const std::vector<RankOutcome> whole = TrainRanks(2, run);
  std::filesystem::remove_all(run.state_dir);
  ASSERT_EQ(whole[0].text(), "");
  const auto expected = whole[0].report["losses"].get<std::vector<double>>();

  run.state_dir = testing_support::ScratchDirectory();
  const unsigned seed = tests::Soak() == 1 ? 5 : std::random_device()();  // make soak repeats it
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  int killed = 0;
  bool done = false;
  for (int life = 0; life < 12 && !done; ++life) {
    const int victim = static_cast<int>(random() % 2);
    const int64_t operations = life == 11 ? -1 : 60 + static_cast<int64_t>(random() % 300);
    const auto outcomes = TrainRanks(2, run, [&](int rank, RunOptions* own) {
      // Both have a commit after the first life, which is long enough for one.
      own->resume = life > 0;
      own->adjust = [rank, victim, operations, left = operations](EngineOptions& options) {
        if (rank != victim || operations < 0) return;
        options.observer = [count = left](tiering::OpId, const tiering::Op&, double, double) mutable {
          if (count-- == 0) kill(getpid(), SIGKILL);
        };
      };
    });
    const RankOutcome& survivor = outcomes[static_cast<size_t>(1 - victim)];
    if (outcomes[static_cast<size_t>(victim)].exit_code == -1) {
      ++killed;
      ASSERT_EQ(survivor.exit_code, 0) << "it did not end by itself";
      EXPECT_NE(survivor.text().find("rank " + std::to_string(victim) + " of 2 has gone"), std::string::npos)
          << survivor.text();
    } else {
      for (const RankOutcome& rank : outcomes) ASSERT_EQ(rank.text(), "") << "life " << life;
      done = true;
    }
    // Whatever steps were made have the losses of those steps.
    for (const RankOutcome& rank : outcomes) {
      if (!rank.report.is_object() || !rank.report.contains("losses")) continue;
      const int64_t from = std::max<int64_t>(0, rank.report["resumed_from"].get<int64_t>());
      const auto losses = rank.report["losses"].get<std::vector<double>>();
      for (size_t i = 0; i < losses.size(); ++i) {
        ASSERT_LT(static_cast<size_t>(from) + i, expected.size());
        EXPECT_EQ(losses[i], expected[static_cast<size_t>(from) + i])
            << "life " << life << ", step " << from + 1 + i;
      }
    }
  }
  EXPECT_TRUE(done);
  EXPECT_GT(killed, 1);
  std::filesystem::remove_all(run.state_dir);
}

// Its message breaks off in the middle: the other has begun to receive it.
TEST(Ranks, OneThatIsKilledWhileItSendsIsNamedAtOnce) {
  constexpr size_t kBytes = size_t{64} << 20;  // more than sockets hold
  for (const int victim : {0, 1}) {
    const auto outcomes = testing_support::RunProcesses(2, [&](int rank, int port) {
      const auto comm = ConnectGloo(testing_support::LoopbackRank(rank, 2, port), {});
      if (!comm.ok()) return nlohmann::json::object({{"status", std::string(comm.status().message())}});
      std::vector<std::byte> sent(kBytes), received(kBytes);
      const std::array<const void*, 2> send = {sent.data(), sent.data()};
      const std::array<void*, 2> receive = {received.data(), received.data()};
      const auto start = std::chrono::steady_clock::now();
      const auto exchange = (*comm)->Begin(Channel::kReduce, send, receive, kBytes);
      if (rank == victim) {
        usleep(3000);
        kill(getpid(), SIGKILL);
      }
      const absl::Status status = exchange.ok() ? (*exchange)->Wait() : exchange.status();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      return nlohmann::json::object({{"status", std::string(status.message())}, {"seconds", took.count()}});
    });
    const RankOutcome& survivor = outcomes[static_cast<size_t>(1 - victim)];
    EXPECT_NE(survivor.text().find("rank " + std::to_string(victim) + " of 2 has gone"), std::string::npos)
        << survivor.text();
    EXPECT_LT(survivor.report["seconds"], 15) << "half of the patience";
  }
}

// A process that is stopped answers nobody: it is named, and the others end.
TEST(Ranks, OneThatHangsIsNamed) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, torch::kFloat32);
  run.steps = 1000;
  const auto outcomes = TrainRanks(3, run,
                                   [](int rank, RunOptions* own) {
                                     if (rank != 2) return;
                                     own->adjust = [](EngineOptions& options) {
                                       options.committed = [](const StepResult&) { return absl::OkStatus(); };
                                       options.observer = [count = 200](tiering::OpId, const tiering::Op&,
                                                                        double, double) mutable {
                                         if (count-- != 0) return;
                                         // Continued, by its own child, when the others have given up.
                                         if (const pid_t parent = getpid(); fork() == 0) {
                                           sleep(7);
                                           kill(parent, SIGCONT);
                                           _exit(0);
                                         }
                                         raise(SIGSTOP);
                                       };
                                     };
                                   },
                                   {.patience_seconds = 3});
  for (int rank : {0, 1}) {
    EXPECT_EQ(outcomes[static_cast<size_t>(rank)].exit_code, 0);
    EXPECT_NE(outcomes[static_cast<size_t>(rank)].text().find("rank 2 of 3 has not answered for 3 s"),
              std::string::npos)
        << outcomes[static_cast<size_t>(rank)].text();
  }
}

// An error of one rank ends all, and all say whose it was.
TEST(Ranks, AnErrorOfOneIsToldToAll) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, torch::kFloat32);
  run.steps = 1000;
  const auto outcomes = TrainRanks(3, run, [](int rank, RunOptions* own) {
    if (rank != 1) return;
    own->make_model = [] {
      Model model = Untied();
      const StageFunction loss = model.stages.back().forward;
      model.stages.back().forward = [loss, count = 0](torch::nn::Module& module, const torch::Tensor& x,
                                                      const Batch& batch) mutable {
        TORCH_CHECK(++count < 12, "the twelfth loss is bad");
        return loss(module, x, batch);
      };
      return model;
    };
  });
  for (const RankOutcome& rank : outcomes) {
    EXPECT_EQ(rank.exit_code, 0);
    EXPECT_NE(rank.text().find("the twelfth loss is bad"), std::string::npos) << rank.text();
  }
  EXPECT_NE(outcomes[0].text().find("rank 1 of 3 failed"), std::string::npos) << outcomes[0].text();
}

// A rank that finds nobody listening yet tries again after a second: they wait for longer than that.
TEST(Ranks, WhoIsMissingIsNamed) {
  for (const int world : {3, 4}) {
    const auto outcomes = testing_support::RunProcesses(2, [world](int rank, int port) {
      const auto connected = ConnectGloo(testing_support::LoopbackRank(rank, world, port),
                                         {.patience_seconds = 5, .meeting_seconds = 4});
      return nlohmann::json::object({{"status", std::string(connected.status().message())}});
    });
    const std::string who = world == 3 ? "rank 2 of 3" : "ranks 2, 3 of 4";
    EXPECT_NE(outcomes[0].text().find(who + " did not come"), std::string::npos) << outcomes[0].text();
  }
}

TEST(Ranks, WordsThatDifferAreNamedOnAll) {
  const auto outcomes = testing_support::RunProcesses(3, [](int rank, int port) {
    auto comm = ConnectGloo(testing_support::LoopbackRank(rank, 3, port), {});
    if (!comm.ok()) return nlohmann::json::object({{"status", std::string(comm.status().message())}});
    const nlohmann::json words = {{"optimizer", {{"lr", rank == 2 ? 2 : 1}}}, {"steps", 4}};
    const absl::Status status = AgreeOnWords(**comm, words);
    (*comm)->Abort(status);
    return nlohmann::json::object({{"status", std::string(status.message())}});
  });
  for (const RankOutcome& rank : outcomes) {
    EXPECT_EQ(rank.text(),
              "rank 2 of 3 was not started like rank 0: optimizer.lr is 2 on rank 2 and 1 on rank 0");
  }
}

}  // namespace
}  // namespace penstock::zero
