// Several ranks, each with a device that has its own memory (the test-only one, whose bits are the
// processor's): the losses of ranks on processors, within every budget, and an end with a reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>

#include "swap/checkpoint.h"
#include "tests/soak.h"
#include "tests/zero/ranks.h"
#include "zero/compute/test_device.h"
#include "zero/engine/rank_agreement.h"

namespace penstock::zero::rank_devices_test {
namespace {

using testing_support::Alone;
using testing_support::ExpectSameLosses;
using testing_support::MakeTestDevice;
using testing_support::RankOutcome;
using testing_support::RunOptions;
using testing_support::ToJson;
using testing_support::TrainGpt;
using testing_support::TrainRanks;
using testing_support::UntiedRun;

constexpr int64_t kMiB = int64_t{1} << 20;

// A device has threads: it is made in the rank's own process.
std::vector<RankOutcome> TrainOnDevices(int world, const RunOptions& run,
                                        const TestDeviceOptions& device = {}) {
  return TrainRanks(world, run, [&](int, RunOptions* own) { own->device = MakeTestDevice(device); });
}

// From the words of a refusal, which all ranks must give.
int64_t LeastOf(const std::vector<RankOutcome>& refused) {
  const int64_t least = refused.front().report.value("least_host_memory_bytes", int64_t{0});
  EXPECT_GT(least, 0) << refused.front().text();
  for (const RankOutcome& rank : refused)
    EXPECT_EQ(rank.report["least_host_memory_bytes"], least) << rank.text();
  return least;
}

// A GPT: its embedding has two addends in every micro-batch.
RunOptions SmallRun(kernels::DType dtype, int micro_batches) {
  RunOptions run;
  run.dtype = dtype;
  run.batch = 2;
  run.micro_batches = micro_batches;
  run.clip = 0.3;
  run.steps = 4;
  run.evaluate_every = 2;
  return run;
}

// `devices` had the losses of `processors`, and neither budget was exceeded. Takes the state away.
void ExpectWithinBudgets(const RunOptions& run, const nlohmann::json& processors,
                         const std::vector<RankOutcome>& devices) {
  ExpectSameLosses(processors, devices);
  for (const RankOutcome& rank : devices) {
    EXPECT_LE(rank.report["peak_device_bytes"].get<int64_t>(), run.device_memory_budget_bytes);
    EXPECT_GT(rank.report["peak_device_bytes"].get<int64_t>(), 0);
    if (run.host_memory_budget_bytes > 0) {
      EXPECT_LE(rank.report["peak_managed_bytes"].get<int64_t>(), run.host_memory_budget_bytes);
    }
  }
  if (!run.state_dir.empty()) std::filesystem::remove_all(run.state_dir);
}

// One number of micro-batches tells of the types whose paths bf16 has gone already; `make soak` has all.
bool IsLeftOut(kernels::DType dtype, int micro_batches) {
  return tests::Soak() == 1 && dtype == (micro_batches == 1 ? kernels::DType::kFp16 : kernels::DType::kFp32);
}

TEST(RankDevices, EveryOffloadModeAndBudgetGivesTheBitsOfProcessors) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    for (const int micro_batches : {1, 2}) {
      if (IsLeftOut(dtype, micro_batches)) continue;
      SCOPED_TRACE(testing::Message() << dtype << ", " << micro_batches << " micro-batches");
      RunOptions run = SmallRun(dtype, micro_batches);
      run.model.dropout = 0.1;
      const std::vector<RankOutcome> processors = TrainRanks(2, run);
      run.device_memory_budget_bytes = 1;
      const int64_t least_device = LeastOf(TrainOnDevices(2, run));
      for (const OffloadDevice offload : {OffloadDevice::kNone, OffloadDevice::kNvme}) {
        for (const int64_t extra : {int64_t{0}, 64 * kMiB}) {
          if (extra == 0 && offload == OffloadDevice::kNone) continue;
          run.device_memory_budget_bytes = least_device + extra;
          run.host_memory_budget_bytes = 0;
          run.state_dir.clear();
          if (offload == OffloadDevice::kNvme) {
            run.state_dir = testing_support::ScratchDirectory();
            run.host_memory_budget_bytes = 1;
            run.host_memory_budget_bytes = LeastOf(TrainOnDevices(2, run)) + extra;
          }
          ExpectWithinBudgets(run, processors.front().report,
                              TrainOnDevices(2, run, {.latency_seconds = extra == 0 ? 1e-4 : 0}));
        }
      }
      // Devices that exchange with each other have other bounds, and the same bits.
      run.state_dir.clear();
      run.host_memory_budget_bytes = 0;
      run.device_memory_budget_bytes = 1;
      const int64_t least_linked = LeastOf(TrainOnDevices(2, run, {.linked = true}));
      for (const int64_t extra : {int64_t{0}, 64 * kMiB}) {
        run.device_memory_budget_bytes = least_linked + extra;
        run.state_dir = testing_support::ScratchDirectory();
        run.host_memory_budget_bytes = 1;
        run.host_memory_budget_bytes = LeastOf(TrainOnDevices(2, run, {.linked = true})) + extra;
        ExpectWithinBudgets(
            run, processors.front().report,
            TrainOnDevices(2, run, {.latency_seconds = extra == 0 ? 1e-4 : 0, .linked = true}));
      }
    }
  }
}

// What comes in fewer bits is coded where it is exchanged: by the processor, or by devices that exchange with
// each other, where state may live as well.
TEST(RankDevices, CodedExchangesHaveTheBitsOfProcessors) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    RunOptions run = SmallRun(dtype, 2);
    run.adjust = [](EngineOptions& options) { options.exchange = {.weights = true, .gradients = true}; };
    const std::vector<RankOutcome> processors = TrainRanks(2, run);
    for (const bool linked : {false, true}) {
      run.device_memory_budget_bytes = 1;
      const int64_t least = LeastOf(TrainOnDevices(2, run, {.linked = linked}));
      for (const int64_t extra : {int64_t{0}, 64 * kMiB}) {
        SCOPED_TRACE(testing::Message() << dtype << (linked ? ", linked, " : ", ") << extra);
        run.device_memory_budget_bytes = least + extra;
        ExpectSameLosses(processors.front().report, TrainOnDevices(2, run, {.linked = linked}));
      }
    }
  }
}

// State on devices that exchange with each other: each has its part, wherever else it is kept.
TEST(RankDevices, StateLivesOnLinkedDevices) {
  for (const kernels::DType dtype : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    for (const int micro_batches : {1, 2}) {
      if (IsLeftOut(dtype, micro_batches)) continue;
      RunOptions run = SmallRun(dtype, micro_batches);
      run.poison_step = 3;
      run.announce_always = true;  // and so some steps are called off
      run.shuffles = micro_batches == 2;
      run.tile_bytes = 64 << 10;
      const std::vector<RankOutcome> processors = TrainRanks(2, run);
      for (const double ratio : {0.0, 0.5}) {
        for (const auto& [offload, durability] : {std::pair{OffloadDevice::kCpu, Durability::kStep},
                                                  {OffloadDevice::kNvme, Durability::kStep},
                                                  {OffloadDevice::kNvme, Durability::kCheckpoint}}) {
          SCOPED_TRACE(testing::Message() << dtype << ", " << micro_batches << " micro-batches, ratio "
                                          << ratio << ", " << Name(offload) << ", " << Name(durability));
          run.state_dir = offload == OffloadDevice::kNvme ? testing_support::ScratchDirectory() : "";
          run.offload = offload;
          run.adjust = [ratio, durability](EngineOptions& options) {
            options.storage.durability = durability;
            options.memory.bounds.processor_share = ratio;
          };
          const std::vector<RankOutcome> ranks = TrainOnDevices(2, run, {.linked = true});
          ExpectSameLosses(processors.front().report, ranks);
          for (const RankOutcome& rank : ranks) EXPECT_GT(rank.report["on_device_share"], 0.3);
          if (!run.state_dir.empty()) std::filesystem::remove_all(run.state_dir);
        }
      }
    }
  }
}

// And back: from their checkpoint processors go on, and from those of processors devices, with the same bits.
TEST(RankDevices, CheckpointsGoFromDevicesToProcessorsAndBack) {
  RunOptions run;
  run.offload = OffloadDevice::kCpu;
  run.batch = 2;
  run.steps = 6;
  run.tile_bytes = 64 << 10;
  const auto losses = [](const std::vector<RankOutcome>& ranks) {
    for (const RankOutcome& rank : ranks) EXPECT_EQ(rank.text(), "");
    return ranks.front().report["losses"].get<std::vector<double>>();
  };
  const std::vector<double> whole = losses(TrainRanks(2, run));
  const auto train = [&](bool devices) {
    return losses(devices ? TrainOnDevices(2, run, {.linked = true}) : TrainRanks(2, run));
  };
  for (const bool devices_first : {true, false}) {
    const std::string kept = testing_support::ScratchDirectory();
    run.adjust = [](EngineOptions& options) {
      if (options.device->has_own_memory()) options.memory.bounds.processor_share = 0;
    };
    run.checkpoints = {kept, 2, 0};
    run.stop_after = 4;
    const std::vector<double> first = train(devices_first);
    run.checkpoints = {};
    run.stop_after = 0;
    run.resume_from = *swap::FindCheckpoint(kept);
    std::vector<double> both = first;
    const std::vector<double> rest = train(!devices_first);
    run.resume_from.clear();
    both.insert(both.end(), rest.begin(), rest.end());
    EXPECT_EQ(both, whole);
    std::filesystem::remove_all(kept);
  }
}

// Where a gradient has one addend a rank, also those of one rank with all micro-batches.
TEST(RankDevices, SameBitsAsOneProcessorWithTheirMicroBatchesInEveryOrderOfUpdate) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, kernels::DType::kBf16);
  run.clip = 0.12;  // of norms below and above it: updates made in backward are made again in some steps
  run.micro_batches = 3;
  const nlohmann::json one = Alone(run);
  run.micro_batches = 1;
  run.host_memory_budget_bytes = 64 * kMiB;
  run.tile_bytes = 1 << 16;
  for (const tiering::UpdateOrder order :
       {tiering::UpdateOrder::kInNextForward, tiering::UpdateOrder::kInBackward}) {
    run.state_dir = testing_support::ScratchDirectory();
    run.update_order = order;
    // Not linked, or linked with state on processors, or half of it on devices.
    for (const double ratio : {-1.0, 1.0, 0.5}) {
      run.adjust = [ratio](EngineOptions& options) {
        if (ratio >= 0) options.memory.bounds.processor_share = ratio;
      };
      const std::vector<RankOutcome> ranks =
          TrainOnDevices(3, run, {.bytes_per_s = 2e9, .linked = ratio >= 0});
      ExpectSameLosses(one, ranks);
      if (order == tiering::UpdateOrder::kInBackward) {
        EXPECT_GT(ranks.front().report["in_backward"], 0);
        EXPECT_FALSE(ranks.front().report["redone"].empty());
      }
      std::filesystem::remove_all(run.state_dir);
    }
  }
}

// Each rank's part from its own drive past host memory, where devices exchange and all of them can.
TEST(RankDevices, PartsComeStraightFromTheDriveWhereAllCan) {
  RunOptions run = SmallRun(kernels::DType::kBf16, 1);
  run.model.layers = 12;
  run.model.width = 128;
  run.update_order = tiering::UpdateOrder::kInNextForward;
  run.offload = OffloadDevice::kNvme;
  run.state_dir = testing_support::ScratchDirectory();
  run.device_memory_budget_bytes = 1;
  constexpr int64_t kSlack = 64 << 10;  // what measuring a stage's tensors may differ by
  const int64_t least = LeastOf(TrainOnDevices(2, run)) + kSlack;
  const int64_t least_linked = LeastOf(TrainOnDevices(2, run, {.linked = true})) + kSlack;
  run.adjust = [](EngineOptions& options) {
    options.storage.gds = true;
    options.memory.bounds.processor_share = 1;
    options.memory.bounds.resident_elements = 0;
  };
  const auto straight = [&](const std::function<TestDeviceOptions(int rank)>& device) {
    run.state_dir = testing_support::ScratchDirectory();
    const std::vector<RankOutcome> ranks =
        TrainRanks(2, run, [&](int rank, RunOptions* own) { own->device = MakeTestDevice(device(rank)); });
    RunOptions in_memory = run;
    in_memory.adjust = nullptr;
    in_memory.offload = OffloadDevice::kNone;
    in_memory.device_memory_budget_bytes = 0;
    in_memory.state_dir.clear();
    ExpectSameLosses(TrainRanks(2, in_memory).front().report, ranks);
    std::filesystem::remove_all(run.state_dir);
    std::vector<int64_t> bytes;
    for (const RankOutcome& rank : ranks) bytes.push_back(rank.report["gds_read_bytes"]);
    return bytes;
  };
  // Not in the first forward alone, to which everything is new: every backward reads what the step before
  // wrote.
  run.device_memory_budget_bytes = least_linked;
  std::vector<int64_t> bytes[2];
  for (const int more : {0, 1}) {
    run.steps += more;
    bytes[more] = straight([](int) { return TestDeviceOptions{.gds = true, .linked = true}; });
  }
  constexpr int64_t kPartBytes = 12 * 12 * 128 * 128;  // a rank's half of the layers, 2 bytes each, about
  for (const size_t rank : {0u, 1u}) EXPECT_GT(bytes[1][rank] - bytes[0][rank], kPartBytes / 4) << rank;
  const std::vector<int64_t> none = {0, 0};
  EXPECT_EQ(straight([](int rank) { return TestDeviceOptions{.gds = rank == 0, .linked = true}; }), none);
  run.device_memory_budget_bytes = least;
  EXPECT_EQ(straight([](int) { return TestDeviceOptions{.gds = true}; }), none) << "gathered in host memory";
}

TEST(RankDevices, ACopyThatFailsOnOneEndsAllInItsWords) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, kernels::DType::kFp32);
  run.steps = 1000;
  for (const bool linked : {false, true}) {
    const std::vector<RankOutcome> ranks = TrainRanks(2, run, [linked](int rank, RunOptions* own) {
      own->device = MakeTestDevice({.fail_copy = rank == 1 ? 40 : 0, .linked = linked});
    });
    for (const RankOutcome& rank : ranks) {
      EXPECT_EQ(rank.exit_code, 0);
      EXPECT_THAT(rank.text(), testing::HasSubstr("was made to fail"));
    }
    EXPECT_THAT(ranks[0].text(), testing::HasSubstr("rank 1 of 2 failed"));
  }
}

// One that is killed while the devices exchange: the other ends and names it.
TEST(RankDevices, OneThatIsKilledWhileDevicesExchangeIsNamed) {
  RunOptions run = UntiedRun(OffloadDevice::kNone, kernels::DType::kBf16);
  run.steps = 1000;
  for (const tiering::OpKind kind : {tiering::OpKind::kAllGather, tiering::OpKind::kReduceScatter}) {
    const std::vector<RankOutcome> ranks = TrainRanks(2, run, [kind](int rank, RunOptions* own) {
      own->device = MakeTestDevice({.linked = true});
      own->adjust = [kind, rank](EngineOptions& options) {
        options.memory.bounds.processor_share = 0;
        if (rank == 0) return;
        options.hooks.observer = [kind, left = 20](tiering::OpId, const tiering::Op& op, double,
                                                   double) mutable {
          if (op.kind == kind && left-- == 0) kill(getpid(), SIGKILL);
        };
      };
    });
    EXPECT_EQ(ranks[1].exit_code, -1);
    EXPECT_EQ(ranks[0].exit_code, 0);
    EXPECT_THAT(ranks[0].text(), testing::HasSubstr("rank 1 of 2 has gone"));
  }
}

// They exchange with each other where each rank has one of its own, all of one kind.
TEST(RankDevices, ExchangeWithEachOtherWhereEachRankHasItsOwn) {
  const auto ways = testing_support::RunProcesses(3, [](int rank, int port) {
    auto connected = testing_support::ConnectLoopback(rank, 3, port);
    if (!connected.ok())
      return nlohmann::json::object({{"status", std::string(connected.status().message())}});
    const std::shared_ptr<Comm> comm = std::move(*connected);
    nlohmann::json seen;
    const auto way = [&](const char* name, const TestDeviceOptions& options) {
      TestDevice device(options);
      const auto devices = ConnectDevices(comm, device);
      if (devices.ok()) seen[name] = {devices->how, devices->comm != nullptr};
    };
    way("own", {.identity = std::to_string(rank), .linked = true});
    way("shared", {.identity = rank == 1 ? "a" : "b", .linked = true});
    way("one without", {.linked = rank != 1});
    return seen;
  });
  for (const RankOutcome& rank : ways) {
    EXPECT_EQ(
        rank.report,
        (nlohmann::json{{"own", {"between devices, over test", true}},
                        {"shared", {"through host memory: ranks 0 and 2 share one device", false}},
                        {"one without",
                         {"through host memory: the device of rank 1 cannot exchange with others", false}}}));
  }
}

// Where there is no device, or no NCCL, all ranks are told, and none waits.
TEST(RankDevices, WithoutNcclAllRanksAreToldAndNoneWaits) {
  const auto ranks = testing_support::RunProcesses(2, [](int rank, int port) {
    auto comm = testing_support::ConnectLoopback(rank, 2, port);
    if (!comm.ok()) return nlohmann::json::object({{"status", std::string(comm.status().message())}});
    const auto devices = ConnectNccl(std::move(*comm));
    return nlohmann::json{{"status", devices.ok() ? "" : std::string(devices.status().message())}};
  });
  if (ranks.front().text().empty()) GTEST_SKIP() << "each rank has a device here";
  for (const RankOutcome& rank : ranks) {
    EXPECT_EQ(rank.exit_code, 0);
    EXPECT_FALSE(rank.text().empty());
    EXPECT_EQ(rank.text(), ranks.front().text());
  }
}

// Without a budget each takes its share of the device that it computes on.
TEST(RankDevices, RanksOfOneDeviceShareItsMemory) {
  const auto budgets = testing_support::RunProcesses(3, [](int rank, int port) {
    auto comm = testing_support::ConnectLoopback(rank, 3, port);
    if (!comm.ok()) return nlohmann::json::object({{"status", std::string(comm.status().message())}});
    const TestDevice shared({.capacity_bytes = 90 * kMiB, .identity = rank < 2 ? "one" : "another"});
    const TestDevice own({.capacity_bytes = (90 + rank) * kMiB});
    nlohmann::json seen;
    seen["shared"] = AgreeOnDeviceBudget(**comm, shared, 0).value_or(-1);
    seen["own"] = AgreeOnDeviceBudget(**comm, own, 0).value_or(-1);
    seen["given"] = AgreeOnDeviceBudget(**comm, shared, rank == 1 ? 20 * kMiB : 0).value_or(-1);
    return seen;
  });
  for (const RankOutcome& rank : budgets) {
    EXPECT_EQ(rank.report, (nlohmann::json{{"shared", 45 * kMiB}, {"own", 90 * kMiB}, {"given", 20 * kMiB}}));
  }
}

}  // namespace
}  // namespace penstock::zero::rank_devices_test
