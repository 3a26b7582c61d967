// Several ranks, each a process, over loopback: the losses of one rank, a commit of all or of none, and an
// end with a reason whatever happens to one of them.
#include "tests/zero/ranks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "run/plan_bounds.h"
#include "tests/soak.h"
#include "tiering/advice/tier_table.h"
#include "zero/ranks/agree.h"

namespace penstock::zero::ranks_test {
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
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    RunOptions run = UntiedRun(OffloadDevice::kNone, dtype);
    run.micro_batches = 3;
    const nlohmann::json one = Alone(run);
    run.micro_batches = 1;
    ExpectSameLosses(one, TrainRanks(3, run));
  }
}

TEST(Ranks, SameBitsInEveryOffloadModeAndOrderOfUpdate) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, kernels::DType::kBf16);
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
    on_drive.host_memory_budget_bytes = 48 << 20;
    ExpectSameLosses(one, TrainRanks(2, on_drive));
    std::filesystem::remove_all(on_drive.state_dir);
  }
}

// Of each type, and where sums of several micro-batches are exchanged: the ranks agree to the bit, in every
// mode, and the first loss shows the error of the weights alone. With 2 ranks half of all weights are off,
// each by 0.4% of the largest of its group at the most: the logits of these small models by less than 1%.
TEST(Ranks, CodedExchangesHaveTheSameBitsInEveryMode) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    for (const int micro_batches : {1, 2}) {
      RunOptions run = UntiedRun(OffloadDevice::kNone, dtype);
      run.micro_batches = micro_batches;
      const std::vector<RankOutcome> whole = TrainRanks(2, run);
      run.adjust = [](EngineOptions& options) { options.exchange = {.weights = true, .gradients = true}; };
      const std::vector<RankOutcome> coded = TrainRanks(2, run);
      ExpectSameLosses(coded.front().report, coded);
      const double expected = whole.front().report["losses"][0], seen = coded.front().report["losses"][0];
      EXPECT_NE(seen, expected);
      EXPECT_NEAR(seen, expected, 0.01 * expected);
      run.offload = OffloadDevice::kNvme;
      run.state_dir = testing_support::ScratchDirectory();
      run.tile_bytes = 1 << 16;
      run.host_memory_budget_bytes = 48 << 20;
      ExpectSameLosses(coded.front().report, TrainRanks(2, run));
      std::filesystem::remove_all(run.state_dir);
    }
  }
}

// The norms of a parameter are of all ranks' parts of it.
TEST(Ranks, LambHasTheTrustRatiosOfOneRank) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, kernels::DType::kBf16);
  run.optimizer = kernels::LambOptions{.adam = {.lr = 1e-2, .weight_decay = 0.1}, .corrects_rate = true};
  run.micro_batches = 3;
  const nlohmann::json one = Alone(run);
  run.micro_batches = 1;
  ExpectSameLosses(one, TrainRanks(3, run));
  run.offload = OffloadDevice::kNvme;
  run.state_dir = testing_support::ScratchDirectory();
  run.tile_bytes = 1 << 16;
  run.host_memory_budget_bytes = 48 << 20;
  ExpectSameLosses(one, TrainRanks(3, run));
  std::filesystem::remove_all(run.state_dir);
}

// ZeRO's stages 1 and 2: weights stay whole on every rank, and nothing of them is read from the drive; same
// bits.
TEST(Ranks, StagesOneAndTwoKeepWeightsWhole) {
  for (const int64_t stage : {1, 2}) {
    run::Config config;
    config.zero.stage = stage;
    RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
    run.micro_batches = 2;
    run.state_dir = testing_support::ScratchDirectory();
    const nlohmann::json one = Alone(run);
    run.micro_batches = 1;
    run.state_dir = testing_support::ScratchDirectory();
    run.host_memory_budget_bytes = 64 << 20;
    run.adjust = [config](EngineOptions& options) {
      options.memory.bounds = run::PlanBoundsOf(config, options.world());
      options.hooks.planned = [](const EnginePlan& plan) {
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
  run.dtype = kernels::DType::kFp32;
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
  RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
  run.evaluate_every = 0;
  run.make_model = [] {
    Model model;
    model.identity = {{"model", "even"}};
    const int embedding =
        model.AddBlock("embedding", "", [] { return std::make_shared<torch::nn::EmbeddingImpl>(256, 128); });
    model.AddStage("embed", embedding,
                   [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch&) {
                     return module.as<torch::nn::EmbeddingImpl>()->forward(x);
                   });
    const int head = model.AddBlock("head", "", [] {
      return std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(128, 256).bias(false));
    });
    model.AddStage(
        "loss", head, [](torch::nn::Module& module, const torch::Tensor& x, const TensorBatch& batch) {
          const torch::Tensor logits = module.as<torch::nn::LinearImpl>()->forward(x).to(torch::kFloat32);
          return torch::cross_entropy_loss(logits.flatten(0, 1), batch.targets.flatten());
        });
    return model;
  };
  run.host_memory_budget_bytes = 64 << 20;
  run.adjust = [](EngineOptions& options) { options.memory.bounds.placement = tiering::Placement::kCpu; };
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
  RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
  run.evaluate_every = 0;
  run.steps = 14;
  run.host_memory_budget_bytes = 48 << 20;
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
        options.hooks.observer = [count = left](tiering::OpId, const tiering::Op&, double, double) mutable {
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
  // Longer than ctest gives this program: who is not told at once hangs, and fails so.
  constexpr double kPatienceSeconds = 3600;
  for (const int victim : {0, 1}) {
    const auto outcomes = testing_support::RunProcesses(2, [&](int rank, int port) {
      const auto comm =
          testing_support::ConnectLoopback(rank, 2, port, {.patience_seconds = kPatienceSeconds});
      if (!comm.ok()) return nlohmann::json::object({{"status", std::string(comm.status().message())}});
      std::vector<std::byte> sent(kBytes), received(kBytes);
      const std::array<const void*, 2> send = {sent.data(), sent.data()};
      const std::array<void*, 2> receive = {received.data(), received.data()};
      const auto exchange = (*comm)->Begin(Channel::kReduceScatter, {"bytes"}, send, receive, kBytes);
      if (rank == victim) {
        usleep(3000);
        kill(getpid(), SIGKILL);
      }
      const absl::Status status = exchange.ok() ? (*exchange)->Wait() : exchange.status();
      return nlohmann::json::object({{"status", std::string(status.message())}});
    });
    const RankOutcome& survivor = outcomes[static_cast<size_t>(1 - victim)];
    EXPECT_NE(survivor.text().find("rank " + std::to_string(victim) + " of 2 has gone"), std::string::npos)
        << survivor.text();
  }
}

// A process that is stopped answers nobody: it is named, and the others end.
TEST(Ranks, OneThatHangsIsNamed) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, kernels::DType::kFp32);
  run.steps = 1000;
  const auto outcomes = TrainRanks(
      3, run,
      [](int rank, RunOptions* own) {
        if (rank != 2) return;
        own->adjust = [](EngineOptions& options) {
          options.hooks.committed = [](const StepResult&) { return absl::OkStatus(); };
          options.hooks.observer = [count = 200](tiering::OpId, const tiering::Op&, double, double) mutable {
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
  RunOptions run = UntiedRun(OffloadDevice::kNone, kernels::DType::kFp32);
  run.steps = 1000;
  const auto outcomes = TrainRanks(3, run, [](int rank, RunOptions* own) {
    if (rank != 1) return;
    own->make_model = [] {
      Model model = Untied();
      const StageFunction loss = model.stages.back().forward;
      model.stages.back().forward = [loss, count = 0](torch::nn::Module& module, const torch::Tensor& x,
                                                      const TensorBatch& batch) mutable {
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

// Ranks with different orders would wait for each other's blocks for ever; all are told, and go on as they
// were.
TEST(Ranks, OneOrderOfStagesOfAll) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, kernels::DType::kFp32);
  run.steps = 3;
  const auto outcomes = TrainRanks(2, run, [](int rank, RunOptions* own) {
    own->opened = [rank](Engine& engine) -> absl::Status {
      const int stages = static_cast<int>(engine.plan().graph.stages.size());
      std::vector<int> order(static_cast<size_t>(stages));
      std::iota(order.begin(), order.end(), 0);
      if (rank == 1) std::swap(order[1], order[3]);
      const absl::Status refused = engine.SetOrder(order);
      const bool named = refused.code() == absl::StatusCode::kInvalidArgument &&
                         absl::StrContains(refused.message(), "rank 1 of 2 [0, 3, 2, 1,");
      return named ? absl::OkStatus()
                   : absl::InternalError(absl::StrCat("not refused: ", refused.ToString()));
    };
  });
  for (const RankOutcome& rank : outcomes) {
    EXPECT_EQ(rank.text(), outcomes[0].text());
    EXPECT_EQ(rank.report["losses"].size(), 3u) << rank.text();
  }
}

// A rank that finds nobody listening yet tries again after a second: they wait for longer than that.
TEST(Ranks, WhoIsMissingIsNamed) {
  for (const int world : {3, 4}) {
    const auto outcomes = testing_support::RunProcesses(2, [world](int rank, int port) {
      const auto connected =
          testing_support::ConnectLoopback(rank, world, port, {.patience_seconds = 5, .meeting_seconds = 4});
      return nlohmann::json::object({{"status", std::string(connected.status().message())}});
    });
    const std::string who = world == 3 ? "rank 2 of 3" : "ranks 2, 3 of 4";
    EXPECT_NE(outcomes[0].text().find(who + " did not come"), std::string::npos) << outcomes[0].text();
  }
}

TEST(Ranks, FlagsThatDifferAreNamedOnAll) {
  const auto outcomes = testing_support::RunProcesses(3, [](int rank, int port) {
    auto comm = testing_support::ConnectLoopback(rank, 3, port);
    if (!comm.ok()) return nlohmann::json::object({{"status", std::string(comm.status().message())}});
    const nlohmann::json flags = {{"optimizer", {{"lr", rank == 2 ? 2 : 1}}}, {"steps", 4}};
    const absl::Status status = AgreeOnOptions(**comm, flags);
    (*comm)->Abort(status);
    return nlohmann::json::object({{"status", std::string(status.message())}});
  });
  for (const RankOutcome& rank : outcomes) {
    EXPECT_EQ(
        rank.text(),
        "rank 2 of 3 was not started like rank 0: optimizer.lr is 2 on rank 2 and 1 on rank 0; start all "
        "ranks with the same flags, config and files");
  }
}

// Exchanges that are not the same do not meet: nothing is received for something else, nobody waits for ever,
// and every rank is told what both are at.
TEST(Ranks, DifferentExchangesEndOnAllRanksAndBothAreNamed) {
  const auto exchange = [](Comm& comm, Channel channel, const What& what, size_t bytes) {
    std::vector<std::byte> memory(3 * bytes);
    return comm.AllGather(channel, what, memory.data(), bytes);
  };
  struct Case {
    const char* of;
    std::function<absl::Status(Comm&, bool odd)> body;
    std::vector<const char*> named;
  };
  const std::vector<Case> cases = {
      {"fewer bytes",
       [&](Comm& comm, bool odd) { return exchange(comm, Channel::kSetup, {"weights"}, odd ? 1000 : 4096); },
       {"rank 1 of 3 is at weights (1000 bytes)", "rank 0 at weights (4096 bytes)"}},
      {"more bytes",
       [&](Comm& comm, bool odd) { return exchange(comm, Channel::kSetup, {"weights"}, odd ? 9000 : 4096); },
       {"rank 1 of 3 is at weights (9000 bytes)", "rank 0 at weights (4096 bytes)"}},
      {"another block",
       [&](Comm& comm, bool odd) {
         return exchange(comm, Channel::kAllGather, {.name = "weights", .step = 7, .block = odd ? 3 : 2}, 64);
       },
       {"weights of block 3, step 7", "weights of block 2, step 7"}},
      {"other calls before",
       [&](Comm& comm, bool odd) {
         comm.Enter(odd ? "an evaluation of 4 batches" : "an evaluation of 16 batches");
         return exchange(comm, Channel::kReduceScatter, {.name = "losses", .step = 7, .calls = comm.calls()},
                         64);
       },
       {"rank 1 of 3 is at an evaluation of 4 batches", "rank 0 at an evaluation of 16 batches"}},
      {"on another channel",
       [&](Comm& comm, bool odd) {
         comm.Enter(odd ? "reading a parameter" : "step 8");
         return exchange(comm, odd ? Channel::kSetup : Channel::kAllGather, {"x"}, 64);
       },
       {"rank 1 of 3 is at reading a parameter", "rank 0 at step 8"}},
      {"nothing more",
       [&](Comm& comm, bool odd) {
         return odd ? absl::OkStatus() : exchange(comm, Channel::kAllGather, {"x"}, 64);
       },
       {"is at x (64 bytes)", "rank 1 at the end of the run"}},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.of);
    const auto outcomes = testing_support::RunProcesses(3, [&](int rank, int port) {
      const auto comm = testing_support::ConnectLoopback(rank, 3, port);
      if (!comm.ok()) return nlohmann::json::object({{"status", std::string(comm.status().message())}});
      // An exchange that is the same goes before it.
      const absl::Status first = exchange(**comm, Channel::kSetup, {"hello"}, 8);
      const absl::Status status = first.ok() ? each.body(**comm, rank == 1) : first;
      return nlohmann::json::object({{"status", std::string(status.message())}});
    });
    for (size_t k = 0; k < outcomes.size(); ++k) {
      EXPECT_EQ(outcomes[k].exit_code, 0) << "rank " << k << " did not end by itself";
      if (k == 1 && std::string_view(each.of) == "nothing more") continue;
      for (const char* named : each.named)
        EXPECT_NE(outcomes[k].text().find(named), std::string::npos) << outcomes[k].text();
    }
  }
}

// The same through the engine: one rank evaluates, or goes another way through the layers, and the others do
// not. No step is updated with what does not belong together.
TEST(Ranks, DifferentCallsOfTheEngineEndOnAllRanks) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, kernels::DType::kFp32);
  run.steps = 40;
  run.evaluate_every = 0;
  const auto expect = [&](const char* named, const std::function<void(RunOptions*)>& odd) {
    SCOPED_TRACE(named);
    for (const RankOutcome& rank : TrainRanks(2, run, [&](int rank, RunOptions*own) {
           if (rank == 1) odd(own);
         })) {
      EXPECT_EQ(rank.exit_code, 0);
      EXPECT_NE(rank.text().find("rank 1 of 2 is at "), std::string::npos) << rank.text();
      EXPECT_NE(rank.text().find(named), std::string::npos) << rank.text();
      EXPECT_LT(rank.report["losses"].size(), 40u);
    }
  };
  expect("an evaluation of", [](RunOptions* own) { own->evaluate_every = 3; });
  expect("an order of stages", [](RunOptions* own) {
    own->after_step = [](Engine& engine) {
      return engine.step() == 3 ? engine.SetOrder({0, 3, 4, 1, 2, 5, 6, 7, 8, 9}) : absl::OkStatus();
    };
  });
  expect("reading head.weight", [](RunOptions* own) {
    own->after_step = [](Engine& engine) {
      return engine.step() == 3 ? ReadStateTensor(engine, "head.weight", StateKind::kParameter).status()
                                : absl::OkStatus();
    };
  });
}

// A rank that gives signs of life and does not go on: the others end, at once where they are asked to.
TEST(Ranks, OneThatLivesAndDoesNotGoOnIsNotWaitedForForEver) {
  for (const bool asked : {false, true}) {
    RunOptions run = UntiedRun(OffloadDevice::kNone, kernels::DType::kFp32);
    run.steps = 1000;
    const CommOptions options = {.patience_seconds = asked ? 3.0 : 60.0,
                                 .longest_wait_seconds = asked ? 0.0 : 8.0};
    const auto outcomes = TrainRanks(
        3, run,
        [asked](int rank, RunOptions* own) {
          if (rank == 0 && asked) {
            own->adjust = [comm = own->comm](EngineOptions& engine) {
              engine.hooks.stops = [comm] { return comm->calls() != 0; };  // once it trains
            };
          }
          if (rank != 1) return;
          own->make_model = [comm = own->comm] {
            Model model = Untied();
            const StageFunction loss = model.stages.back().forward;
            model.stages.back().forward = [loss, comm](torch::nn::Module& module, const torch::Tensor& x,
                                                       const TensorBatch& batch) {
              // Not where the model is measured, which is before the first exchange of a step.
              if (comm->calls() != 0) {
                while (comm->failure().ok()) usleep(10000);
              }
              return loss(module, x, batch);
            };
            return model;
          };
        },
        options);
    for (const RankOutcome& rank : outcomes) {
      EXPECT_EQ(rank.exit_code, 0);
      EXPECT_NE(rank.text().find("rank 1 of 3 gives signs of life, but did not come to "), std::string::npos)
          << rank.text();
      EXPECT_EQ(rank.text().find("was asked to stop") != std::string::npos, asked) << rank.text();
    }
  }
}

// Killed in each of its phases: the other ends, and the run goes on with the losses of one left alone.
TEST(Ranks, KilledInAnyPhaseTheOtherEndsAndTheRunGoesOn) {
  RunOptions run = UntiedRun(OffloadDevice::kNvme, kernels::DType::kBf16);
  run.steps = 6;
  run.evaluate_every = 3;
  run.host_memory_budget_bytes = 48 << 20;
  run.state_dir = testing_support::ScratchDirectory();
  const std::vector<RankOutcome> whole = TrainRanks(2, run);
  std::filesystem::remove_all(run.state_dir);
  ASSERT_EQ(whole[0].text(), "");
  const auto expected = whole[0].report["losses"].get<std::vector<double>>();

  using Adjust = std::function<void(EngineOptions&)>;
  const auto at = [](tiering::OpKind kind, int count) -> Adjust {
    return [=](EngineOptions& options) {
      options.hooks.observer = [kind, left = count](tiering::OpId, const tiering::Op& op, double,
                                                    double) mutable {
        if (op.kind == kind && left-- == 0) kill(getpid(), SIGKILL);
      };
    };
  };
  const std::vector<std::pair<const char*, Adjust>> phases = {
      {"planned",
       [](EngineOptions& options) {
         options.hooks.planned = [](const EnginePlan&) -> absl::Status {
           kill(getpid(), SIGKILL);
           return absl::OkStatus();
         };
       }},
      {"initialised",
       [](EngineOptions& options) {
         options.hooks.log = [](const std::string& line) {
           if (line.find("initialised") == 0) kill(getpid(), SIGKILL);
         };
       }},
      {"commit", at(tiering::OpKind::kCommit, 2)},
      {"agreement", at(tiering::OpKind::kAgree, 2)},
      {"evaluation", at(tiering::OpKind::kEvaluated, 0)},
      {"last commit", at(tiering::OpKind::kCommit, 5)},
  };
  for (size_t i = 0; i < phases.size(); ++i) {
    SCOPED_TRACE(phases[i].first);
    const auto victim = static_cast<int>(i % 2);
    run.state_dir = testing_support::ScratchDirectory();
    const auto outcomes = TrainRanks(2, run, [&](int rank, RunOptions* own) {
      if (rank == victim) own->adjust = phases[i].second;
    });
    EXPECT_EQ(outcomes[static_cast<size_t>(victim)].exit_code, -1);
    const RankOutcome& survivor = outcomes[static_cast<size_t>(1 - victim)];
    EXPECT_EQ(survivor.exit_code, 0);
    EXPECT_NE(survivor.text().find("rank " + std::to_string(victim) + " of 2 has gone"), std::string::npos)
        << survivor.text();
    // Before the first commit there is nothing to go on from.
    const bool begun = i >= 2;
    const auto rest = TrainRanks(2, run, [&](int, RunOptions* own) {
      own->resume = begun;
      own->adjust = [begun](EngineOptions& options) { options.storage.overwrite = !begun; };
    });
    for (const RankOutcome& rank : rest) {
      ASSERT_EQ(rank.text(), "");
      const auto from = static_cast<size_t>(std::max<int64_t>(0, rank.report["resumed_from"].get<int64_t>()));
      const auto losses = rank.report["losses"].get<std::vector<double>>();
      ASSERT_EQ(from + losses.size(), expected.size());
      for (size_t step = 0; step < losses.size(); ++step)
        EXPECT_EQ(losses[step], expected[from + step]) << step;
    }
    std::filesystem::remove_all(run.state_dir);
  }
}

}  // namespace
}  // namespace penstock::zero::ranks_test
