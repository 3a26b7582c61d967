// Ranks over sockets of our own (zero/ranks/tcp_mesh.h): what is exchanged, who is told what; and a model
// that its owner drives, over several ranks. Ranks are threads here, but for the one that is killed.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "plain_compute.h"
#include "tests/zero/plain_batch.h"
#include "tests/zero/plain_owner.h"
#include "zero/engine/driven_engine.h"
#include "zero/engine/restore.h"
#include "zero/ranks/agree.h"
#include "zero/ranks/sharded_state.h"
#include "zero/ranks/tcp_mesh.h"
#include "zero/ranks/tcp_store.h"

namespace penstock::zero::tcp_ranks_test {
namespace {

using testing_support::Owner;
using testing_support::PlainBatch;

constexpr double kPatienceSeconds = 60;  // nothing here waits for it
constexpr const char* kSecret = "what the ranks of these tests know";

absl::StatusOr<std::shared_ptr<Comm>> Connect(int rank, int world, int port,
                                              std::shared_ptr<TcpStore> store) {
  RankEnvironment environment;
  environment.rank = environment.local_rank = rank;
  environment.world = environment.local_world = world;
  environment.master_port = port;
  WatchOver options{.comm = {.patience_seconds = kPatienceSeconds, .meeting_seconds = 30},
                    .secret = kSecret,
                    .store = std::move(store)};
  absl::StatusOr<std::unique_ptr<Comm>> comm = ConnectTcp(environment, options);
  if (!comm.ok()) return comm.status();
  return std::shared_ptr<Comm>(*std::move(comm));
}

std::shared_ptr<TcpStore> MeetingPoint() {
  return std::make_shared<TcpStore>("127.0.0.1", /*port=*/0, /*serves=*/true, std::chrono::seconds(20),
                                    *RankSecret::Of(kSecret));
}

// What `body` returns on each of `world` ranks.
template <typename T>
std::vector<T> OnRanks(int world, const std::function<T(std::shared_ptr<Comm>)>& body) {
  std::shared_ptr<TcpStore> store = MeetingPoint();
  const int port = store->port();
  std::vector<std::future<T>> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank, own = rank == 0 ? store : nullptr]() mutable {
      auto comm = Connect(rank, world, port, std::move(own));
      EXPECT_TRUE(comm.ok()) << comm.status();
      return comm.ok() ? body(*std::move(comm)) : T();
    }));
  }
  store.reset();
  std::vector<T> results;
  for (std::future<T>& rank : ranks) results.push_back(rank.get());
  return results;
}

std::byte Expected(int from, int to, size_t i) {
  return static_cast<std::byte>(static_cast<size_t>(from) * 31 + static_cast<size_t>(to) * 7 + i * i);
}

absl::Status Exchanged(Comm& comm, Channel channel, int64_t number, size_t bytes) {
  const auto world = static_cast<size_t>(comm.world());
  std::vector<std::vector<std::byte>> out(world), in(world, std::vector<std::byte>(bytes));
  std::vector<const void*> send;
  std::vector<void*> receive;
  for (size_t k = 0; k < world; ++k) {
    for (size_t i = 0; i < bytes; ++i) out[k].push_back(Expected(comm.rank(), static_cast<int>(k), i));
    send.push_back(out[k].data());
    receive.push_back(in[k].data());
  }
  absl::Status status = comm.AllToAll(channel, {.name = "bytes", .piece = number}, send, receive, bytes);
  for (size_t k = 0; k < world && status.ok(); ++k) {
    if (static_cast<int>(k) == comm.rank()) continue;
    for (size_t i = 0; i < bytes; ++i) {
      if (in[k][i] != Expected(static_cast<int>(k), comm.rank(), i))
        return absl::DataLossError(absl::StrCat("byte ", i, " of ", bytes, " from rank ", k));
    }
  }
  return status;
}

// Every size around the pieces, on all channels at once: nobody waits for another channel, and every byte
// arrives.
TEST(TcpRanks, AllBytesArriveOnAllChannelsAtOnce) {
  const std::vector<size_t> sizes = {1, 24, 4096, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 3 << 20};
  for (const absl::Status& status : OnRanks<absl::Status>(3, [&](std::shared_ptr<Comm> comm) {
         std::vector<std::future<absl::Status>> channels;
         for (int c = 0; c < kChannels; ++c) {
           channels.push_back(std::async(std::launch::async, [&, c] {
             absl::Status status;
             for (size_t i = 0; i < sizes.size() && status.ok(); ++i) {
               const size_t bytes = sizes[(i + static_cast<size_t>(c)) % sizes.size()];
               status = Exchanged(*comm, static_cast<Channel>(c), static_cast<int64_t>(i), bytes);
             }
             return status;
           }));
         }
         absl::Status status;
         for (auto& channel : channels) status.Update(channel.get());
         return status;
       }))
    EXPECT_TRUE(status.ok()) << status;
}

TEST(TcpRanks, ExchangesUnderWayEndInAnyOrder) {
  for (const absl::Status& status : OnRanks<absl::Status>(2, [](std::shared_ptr<Comm> comm) {
         constexpr size_t kBytes = 1 << 20;
         std::vector<std::vector<std::byte>> in(8, std::vector<std::byte>(2 * kBytes));
         std::vector<std::unique_ptr<Exchange>> under_way;
         for (size_t i = 0; i < in.size(); ++i) {
           std::byte* const mine = in[i].data() + static_cast<size_t>(comm->rank()) * kBytes;
           std::fill_n(mine, kBytes, static_cast<std::byte>(16 * comm->rank() + static_cast<int>(i)));
           const std::array<const void*, 2> send = {mine, mine};
           const std::array<void*, 2> receive = {in[i].data(), in[i].data() + kBytes};
           auto begun = comm->Begin(Channel::kReduceScatter, {.name = "i", .piece = static_cast<int64_t>(i)},
                                    send, receive, kBytes);
           if (!begun.ok()) return begun.status();
           under_way.push_back(*std::move(begun));
         }
         const auto other = static_cast<size_t>(1 - comm->rank());
         for (size_t i = in.size(); i-- > 0;) {
           if (absl::Status status = under_way[i]->Wait(); !status.ok()) return status;
           const auto expected = static_cast<std::byte>(16 * other + i);
           if (in[i][other * kBytes] != expected || in[i][other * kBytes + kBytes - 1] != expected)
             return absl::DataLossError(absl::StrCat("exchange ", i));
         }
         return absl::OkStatus();
       }))
    EXPECT_TRUE(status.ok()) << status;
}

// In the middle of a message, and where nobody waits for it: both others name the one that was killed.
TEST(TcpRanks, OneThatIsKilledIsNamedByTheOthers) {
  int ports[2];
  ASSERT_EQ(pipe(ports), 0);
  const pid_t victim = fork();  // before this process has threads
  if (victim == 0) {
    int port = 0;
    if (read(ports[0], &port, sizeof(port)) != sizeof(port)) _exit(1);
    auto comm = Connect(2, 3, port, nullptr);
    if (!comm.ok() || !Exchanged(**comm, Channel::kSetup, 0, 64).ok()) _exit(1);
    std::vector<std::byte> memory(3 << 24);
    const std::array<const void*, 3> send = {memory.data(), memory.data(), memory.data()};
    const std::array<void*, 3> receive = {memory.data(), memory.data() + (1 << 24),
                                          memory.data() + (2 << 24)};
    auto begun = (*comm)->Begin(Channel::kAllGather, {"much"}, send, receive, 1 << 24);
    kill(getpid(), SIGKILL);
  }
  std::shared_ptr<TcpStore> store = MeetingPoint();
  const int port = store->port();
  ASSERT_EQ(write(ports[1], &port, sizeof(port)), static_cast<ssize_t>(sizeof(port)));
  std::vector<std::future<absl::Status>> ranks;
  for (int rank : {0, 1}) {
    ranks.push_back(std::async(std::launch::async, [&, rank] {
      auto comm = Connect(rank, 3, port, rank == 0 ? store : nullptr);
      if (!comm.ok()) return comm.status();
      absl::Status status = Exchanged(**comm, Channel::kSetup, 0, 64);
      if (!status.ok()) return absl::InternalError(status.message());
      std::vector<std::byte> memory(3 << 24);
      return (*comm)->AllGather(Channel::kAllGather, {"much"}, memory.data(), 1 << 24);
    }));
  }
  for (auto& rank : ranks) {
    const absl::Status status = rank.get();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 2 of 3 has gone")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "go on from it with `resume`")) << status;
  }
  int ended = 0;
  waitpid(victim, &ended, 0);
  EXPECT_TRUE(WIFSIGNALED(ended));
  close(ports[0]);
  close(ports[1]);
}

// Whoever waits for somebody else learns of it too.
TEST(TcpRanks, AnErrorOfOneEndsTheWaitsOfAll) {
  const auto statuses = OnRanks<absl::Status>(3, [](std::shared_ptr<Comm> comm) {
    if (comm->rank() == 2) {
      comm->Abort(absl::InvalidArgumentError("the third rank's data is bad"));
      return comm->failure();
    }
    return Exchanged(*comm, Channel::kAllGather, comm->rank(), 1 << 20);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "the third rank's data is bad")) << status;
  }
}

TEST(TcpRanks, DifferentExchangesEndOnAllRanksAndBothAreNamed) {
  for (const absl::Status& status : OnRanks<absl::Status>(2, [](std::shared_ptr<Comm> comm) {
         return Exchanged(*comm, Channel::kSetup, 7, comm->rank() == 0 ? 1000 : 4096);
       })) {
    EXPECT_TRUE(absl::StrContains(status.message(), "piece 7 (1000 bytes)")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "piece 7 (4096 bytes)")) << status;
  }
}

// --- what strangers say, and ranks that say what no rank does

// Each stranger that said nothing took five seconds of the ranks' time to meet.
TEST(TcpRanks, SilentStrangersDoNotHoldTheMeetingOfRanks) {
  const std::shared_ptr<TcpStore> store = MeetingPoint();
  const RankSecret secret = *RankSecret::Of(kSecret);
  const auto make = [&](int rank) {
    TcpStore own("127.0.0.1", store->port(), /*serves=*/false, std::chrono::seconds(20), secret);
    return MakeTcpMesh({.rank = rank,
                        .world = 2,
                        .address = "127.0.0.1",
                        .store = &own,
                        .prefix = "mesh/",
                        .secret = &secret,
                        .wait = std::chrono::seconds(60)});
  };
  std::future<std::unique_ptr<Mesh>> first = std::async(std::launch::async, make, 0);
  store->Wait("mesh/at/0", std::chrono::seconds(60));
  const std::string at = store->Get("mesh/at/0");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(at.substr(at.rfind(' ') + 1))));
  std::vector<Socket> strangers;
  for (int i = 0; i < 20; ++i) {
    strangers.emplace_back(socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(connect(strangers.back().fd(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    if (i % 2 == 0) {
      ASSERT_EQ(send(strangers.back().fd(), "PST", 3, 0), 3);
    }
  }
  const std::unique_ptr<Mesh> second = make(1), other = first.get();
  std::string sent = "hello", received = ".....";
  const auto sends = other->Send(1, sent.data(), sent.size());
  const auto receives = second->Receive(0, received.data(), received.size());
  sends->Start(1);
  receives->Start(1);
  EXPECT_TRUE(receives->Wait());
  EXPECT_EQ(received, sent);
}

// A rank whose sign of life has an index that no channel has: rank 0 read behind its memory.
TEST(TcpRanks, ASignOfLifeThatNoRankSendsHarmsNobody) {
  for (const absl::Status& status : OnRanks<absl::Status>(2, [](std::shared_ptr<Comm> comm) {
         absl::Status status;
         if (comm->rank() == 1) {
           TcpStore store("127.0.0.1", comm->environment().master_port, /*serves=*/false,
                          std::chrono::seconds(20), *RankSecret::Of(kSecret));
           store.Set("penstock//beat/1",
                     R"({"beat":1,"calls":{},"exchanges":[{"is":"x","calls":0,"channel":400000000,)"
                     R"("number":1}],"begun":[0,0,0,0,0],"ended":true})");
           std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // rank 0 looks at it meanwhile
           store.Set("penstock//beat/1", std::string(60000, '['));
         }
         for (int i = 0; i < 3 && status.ok(); ++i) status = Exchanged(*comm, Channel::kSetup, i, 64);
         return status;
       }))
    EXPECT_TRUE(status.ok()) << status;
}

// Why somebody failed is told to all: in one line, of bounded length, with an exit code of ours.
TEST(TcpRanks, WhatIsNotedOfAFailureIsOneLineWithAKnownCode) {
  for (const std::string& noted :
       {"0 line\nline \x1b[31m" + std::string(50000, 'x'), std::string("77 code"), std::string("-1 code"),
        std::string("99999999999999999999 code"), std::string("\n")}) {
    for (const absl::Status& status : OnRanks<absl::Status>(2, [&](std::shared_ptr<Comm> comm) {
           if (comm->rank() == 1) {
             TcpStore store("127.0.0.1", comm->environment().master_port, /*serves=*/false,
                            std::chrono::seconds(20), *RankSecret::Of(kSecret));
             store.Set("penstock//failed", noted);
           }
           absl::Status status;
           // Until it has heard of it.
           for (int i = 0; status.ok(); ++i) status = Exchanged(*comm, Channel::kSetup, i, 64);
           return status;
         })) {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_EQ(status.message().find_first_of("\n\x1b"), std::string_view::npos) << status;
      EXPECT_LT(status.message().size(), 2500u);
    }
  }
}

TEST(TcpRanks, ARankWithAnotherSecretIsToldSoAtOnceAndRankZeroSaysThatItCame) {
  const std::shared_ptr<TcpStore> store = MeetingPoint();
  RankEnvironment environment;
  environment.world = 2;
  environment.master_port = store->port();
  std::future<absl::Status> first = std::async(std::launch::async, [&] {
    return ConnectTcp(environment, {.comm = {.meeting_seconds = 3}, .secret = kSecret, .store = store})
        .status();
  });
  RankEnvironment other = environment;
  other.rank = 1;
  const absl::Status refused = ConnectTcp(other, {.secret = "another secret, as long"}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "PENSTOCK_RANKS_SECRET")) << refused;
  const absl::Status alone = first.get();
  EXPECT_EQ(alone.code(), absl::StatusCode::kUnavailable) << alone;
  EXPECT_TRUE(absl::StrContains(alone.message(), "1 connections were refused")) << alone;
  EXPECT_EQ(ConnectTcp(other, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TcpRanks, ATextThatIsTooLongIsRefusedOnAllRanks) {
  for (const absl::Status& status : OnRanks<absl::Status>(2, [](std::shared_ptr<Comm> comm) {
         const std::string mine(comm->rank() == 1 ? (16 << 20) + 1 : 1, 'x');
         return comm->AllTexts(Channel::kSetup, {"a text"}, mine).status();
       })) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 of 2")) << status;
  }
}

// --- a model that its owner drives

class DrivenRanksTest : public testing::Test {
 protected:
  DrivenRanksTest() { std::filesystem::remove_all(directory_); }
  ~DrivenRanksTest() override { std::filesystem::remove_all(directory_); }

  struct Trained {
    absl::Status status;
    std::vector<double> losses, norms;
    std::vector<bool> skipped;
    std::vector<float> state;
    std::string checkpoint;
    tiering::ExchangedBytes gathered, reduced;
    bool operator==(const Trained& other) const { return losses == other.losses && state == other.state; }
  };
  struct Training {
    int64_t from = 1, to = 4;
    int of_one = 1;  // micro-batches of this process
    std::string checkpoint = "", restore_from = "";
    std::function<StepOptions(int64_t step)> step = nullptr;
    std::function<void(EngineOptions*)> adjust = nullptr;
    std::function<void(int64_t step, DrivenCompute::Result*)> leaves = nullptr;
    bool overwrites = true;  // false: goes on with what is there
    std::vector<StateKind> state = {StateKind::kParameter, StateKind::kSecondMoment};
  };

  // Micro-batch m of rank k is number m * W + k of the step, which has no more than `kAll` of them.
  static constexpr int kAll = 6;
  Trained Train(const std::shared_ptr<Comm>& comm, const std::string& name, const Training& training) const {
    const int rank = comm != nullptr ? comm->rank() : 0, world = comm != nullptr ? comm->world() : 1;
    Owner owner(shape_, training.of_one);
    EngineOptions options = owner.Options(absl::StrCat(directory_, "/", name));
    if (comm != nullptr) options.storage.state_dirs = RankDirectories(options.storage.state_dirs, rank);
    options.comm = comm;
    options.storage.overwrite = training.overwrites;
    options.resume.enabled = !training.overwrites;
    if (training.adjust) training.adjust(&options);
    Trained trained;
    int64_t at = 0;
    if (training.leaves) owner.leaves = [&](DrivenCompute::Result* result) { training.leaves(at, result); };
    trained.status = [&]() -> absl::Status {
      if (!training.restore_from.empty()) {
        if (absl::Status restored = RestoreRun(training.restore_from, options); !restored.ok())
          return restored;
        options.resume.enabled = true;
        options.storage.overwrite = false;
      }
      absl::StatusOr<Measured> measured = owner.Measure();
      if (!measured.ok()) return measured.status();
      auto driven = DrivenEngine::Create(*std::move(measured), options);
      if (!driven.ok()) return driven.status();
      for (int64_t step = training.from; step <= training.to; ++step) {
        at = step;
        std::vector<Batch> batches;
        for (int m = 0; m < training.of_one; ++m)
          batches.push_back(PlainBatch(shape_, kAll * step + m * world + rank));
        absl::Status status =
            (*driven)->Begin(training.step ? training.step(step) : StepOptions(Next::kTrain));
        if (status.ok()) status = owner.Compute((*driven)->compute(), std::move(batches));
        const auto result = (*driven)->Finish();
        if (!result.ok()) return result.status();
        if (!status.ok()) return status;
        trained.losses.push_back(result->loss);
        trained.norms.push_back(result->grad_norm);
        trained.skipped.push_back(result->skipped);
      }
      return (*driven)->Call([&](Engine& engine) -> absl::Status {
        trained.gathered = engine.gathered();
        trained.reduced = engine.reduced();
        for (const std::string& parameter : engine.ParameterNames()) {
          for (const StateKind kind : training.state) {
            const auto value = engine.ReadState(parameter, kind);
            if (!value.ok()) return value.status();
            const auto* const values = static_cast<const float*>(value->view.data);
            trained.state.insert(trained.state.end(), values, values + value->view.elements());
          }
        }
        if (training.checkpoint.empty()) return absl::OkStatus();
        const auto path = engine.Checkpoint(training.checkpoint);
        if (path.ok()) trained.checkpoint = *path;
        return path.status();
      });
    }();
    return trained;
  }

  const plain::Shape shape_ = {.layers = 5, .width = 80};
  const std::string directory_ =
      (std::filesystem::current_path() / absl::StrCat("driven-ranks-", getpid())).string();
};

// One addend a rank: the sum over W ranks is that of W micro-batches, to the bit; in memory as well.
TEST_F(DrivenRanksTest, TheBitsAreThoseOfOneProcessWithAllMicroBatches) {
  for (const int world : {2, 3}) {
    const Trained one = Train(nullptr, "one", {.of_one = world});
    ASSERT_TRUE(one.status.ok()) << one.status;
    for (const OffloadDevice offload : {OffloadDevice::kNvme, OffloadDevice::kNone}) {
      const Training training{.adjust = [&](EngineOptions* options) { options->storage.offload = offload; }};
      for (const Trained& rank : OnRanks<Trained>(world, [&](std::shared_ptr<Comm> comm) {
             return Train(comm, absl::StrCat("of-", world), training);
           })) {
        EXPECT_TRUE(rank.status.ok()) << rank.status;
        EXPECT_TRUE(rank == one) << world << " ranks";
      }
    }
  }
}

// Also of state that is in memory alone, whose parts know each other by nothing that is on a drive.
TEST_F(DrivenRanksTest, ACheckpointThatIsAskedForGoesOnWithAnotherNumberOfRanks) {
  const Trained through = Train(nullptr, "through", {.to = 6, .of_one = kAll});
  ASSERT_TRUE(through.status.ok()) << through.status;
  for (const OffloadDevice offload : {OffloadDevice::kNvme, OffloadDevice::kNone}) {
    const std::string kept = absl::StrCat(directory_, "/kept-", static_cast<int>(offload));
    const auto in = [offload](EngineOptions* options) { options->storage.offload = offload; };
    std::string path;
    for (const Trained& rank : OnRanks<Trained>(3, [&](std::shared_ptr<Comm> comm) {
           return Train(comm, "three", {.to = 3, .of_one = 2, .checkpoint = kept, .adjust = in});
         })) {
      ASSERT_TRUE(rank.status.ok()) << rank.status;
      EXPECT_TRUE(std::filesystem::exists(rank.checkpoint + "/rank-2")) << rank.checkpoint;
      path = rank.checkpoint;
    }
    for (const Trained& rank : OnRanks<Trained>(2, [&](std::shared_ptr<Comm> comm) {
           return Train(comm, absl::StrCat("two-", static_cast<int>(offload)),
                        {.from = 4, .to = 6, .of_one = 3, .restore_from = path});
         })) {
      ASSERT_TRUE(rank.status.ok()) << rank.status;
      // A rank adds its own before all ranks add theirs: within rounding.
      ASSERT_EQ(rank.losses.size(), 3u);
      for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(rank.losses[i], through.losses[3 + i], 1e-7);
      ASSERT_EQ(rank.state.size(), through.state.size());
      for (size_t i = 0; i < rank.state.size(); ++i) ASSERT_NEAR(rank.state[i], through.state[i], 1e-5) << i;
    }
  }
}

// What a directory has against a checkpoint is told to all, and training goes on.
TEST_F(DrivenRanksTest, ACheckpointThatIsThereAlreadyEndsNobody) {
  const std::string kept = directory_ + "/kept";
  for (const absl::Status& rank : OnRanks<absl::Status>(2, [&](std::shared_ptr<Comm> comm) {
         Owner owner(shape_, 1);
         EngineOptions options = owner.Options(directory_ + "/two");
         options.storage.state_dirs = RankDirectories(options.storage.state_dirs, comm->rank());
         options.comm = comm;
         auto driven = DrivenEngine::Create(*owner.Measure(), options);
         if (!driven.ok()) return driven.status();
         const auto step = [&](int64_t number) -> absl::Status {
           absl::Status status = (*driven)->Begin();
           if (status.ok()) status = owner.Compute((*driven)->compute(), {PlainBatch(shape_, number)});
           return status.ok() ? (*driven)->Finish().status() : status;
         };
         const auto keep = [&] {
           return (*driven)->Call([&](Engine& engine) { return engine.Checkpoint(kept).status(); });
         };
         absl::Status status = step(1);
         if (status.ok()) status = keep();
         if (!status.ok()) return status;
         if (const absl::Status again = keep(); !absl::IsAlreadyExists(again))
           return absl::InternalError(absl::StrCat("not refused: ", again.ToString()));
         status = step(2);
         return status.ok() ? keep() : status;
       }))
    EXPECT_TRUE(rank.ok()) << rank;
}

// Said on one rank alone it is a commit of all, or a resumed run would not know which commits belong
// together.
TEST_F(DrivenRanksTest, WhatOneRankSaysOfAStepIsCommittedByAll) {
  for (const int64_t described : OnRanks<int64_t>(2, [&](std::shared_ptr<Comm> comm) -> int64_t {
         const int rank = comm->rank();
         Owner owner(shape_, 1);
         EngineOptions options = owner.Options(directory_ + "/two");
         options.storage.state_dirs = RankDirectories(options.storage.state_dirs, rank);
         options.comm = comm;
         int said = 0;
         options.hooks.describe = [&](const StepResult&) { return nlohmann::json(said); };
         {
           auto driven = DrivenEngine::Create(*owner.Measure(), options);
           if (!driven.ok() || !(*driven)->Begin().ok()) return -1;
           if (!owner.Compute((*driven)->compute(), {PlainBatch(shape_, rank)}).ok() ||
               !(*driven)->Finish().ok())
             return -2;
           const auto describe = [](Engine& engine) { return engine.CommitDescription(); };
           if (!(*driven)->Call(describe).ok()) return -3;
           if (rank == 1) said = 5;
           if (!(*driven)->Call(describe).ok()) return -4;
           const auto anew = [&](Engine& engine) {
             return engine.CommitDescription(nlohmann::json(rank == 1 ? 8 : 0));
           };
           if (!(*driven)->Call(anew).ok()) return -6;
         }
         options.storage.overwrite = false;
         options.resume.enabled = true;
         auto driven = DrivenEngine::Create(*owner.Measure(), options);
         int64_t found = -5;
         if (!driven.ok()) return found;
         (void)(*driven)->Call([&](Engine& engine) {
           found = engine.last_description().get<int64_t>() + (rank == 0 ? 8 : 0);
           return absl::OkStatus();
         });
         return found;
       }))
    EXPECT_EQ(described, 8);
}

// Each would update its part of the weights by its own rate.
TEST_F(DrivenRanksTest, AStepAtAnotherRateIsRefusedOnAllRanksAndBothAreNamed) {
  for (const Trained& rank : OnRanks<Trained>(2, [&](std::shared_ptr<Comm> comm) {
         const int own = comm->rank();
         return Train(comm, "two",
                      {.of_one = 3, .step = [own](int64_t step) {
                         StepOptions options;
                         options.groups = {{.rates = {.lr = step == 3 && own == 1 ? 0.25 : 0.5}}};
                         return options;
                       }});
       })) {
    EXPECT_EQ(rank.losses.size(), 2u);
    EXPECT_TRUE(absl::StrContains(rank.status.message(), "step 3 (learning rate 0.25")) << rank.status;
    EXPECT_TRUE(absl::StrContains(rank.status.message(), "step 3 (learning rate 0.5")) << rank.status;
  }
}

// Its owner's error is everybody's: nobody waits for the rank that gave up.
TEST_F(DrivenRanksTest, APassThatOneRankGivesUpEndsOnAll) {
  for (const absl::Status& status : OnRanks<absl::Status>(2, [&](std::shared_ptr<Comm> comm) {
         Owner owner(shape_, 1);
         EngineOptions options = owner.Options(directory_ + "/two");
         options.storage.state_dirs = RankDirectories(options.storage.state_dirs, comm->rank());
         options.comm = comm;
         auto driven = DrivenEngine::Create(*owner.Measure(), options);
         if (!driven.ok()) return driven.status();
         absl::Status status = (*driven)->Begin();
         if (comm->rank() == 1) (*driven)->compute().Fail(absl::CancelledError("the owner's forward raised"));
         if (status.ok()) status = owner.Compute((*driven)->compute(), {PlainBatch(shape_, comm->rank())});
         const absl::Status finished = (*driven)->Finish().status();
         return finished.ok() ? status : finished;
       }))
    EXPECT_TRUE(absl::StrContains(status.message(), "the owner's forward raised")) << status;
}

// --- exchanges in fewer bits

// Counts what is exchanged of weights and gradients.
class CountingComm : public Comm {
 public:
  struct Bytes {
    std::atomic<int64_t> weights{0}, gradients{0};
  };
  CountingComm(std::shared_ptr<Comm> of, Bytes* bytes)
      : Comm(of->environment()), of_(std::move(of)), bytes_(bytes) {}
  std::string name() const override { return of_->name(); }
  void Enter(const std::string& call) override { of_->Enter(call); }
  uint64_t calls() const override { return of_->calls(); }
  void WatchStops(std::function<bool()> stops) override { of_->WatchStops(std::move(stops)); }
  absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel channel, const What& what,
                                                  std::span<const void* const> send,
                                                  std::span<void* const> receive, size_t bytes) override {
    const std::string name = what.name;
    if (name == "the weights") bytes_->weights += static_cast<int64_t>(bytes) * (world() - 1);
    if (name == "the gradient") bytes_->gradients += static_cast<int64_t>(bytes) * (world() - 1);
    return of_->Begin(channel, what, send, receive, bytes);
  }
  void Abort(const absl::Status& why) override { of_->Abort(why); }
  absl::Status failure() override { return of_->failure(); }

 private:
  const std::shared_ptr<Comm> of_;
  Bytes* const bytes_;
};

class CodedExchangeTest : public DrivenRanksTest {
 protected:
  static constexpr double kRate = 0.05;
  // Half a step of a group whose largest value is 1; its scale is rounded up to bf16.
  static constexpr double kHalfStep8 = 1.0 / 254 * (1 + 0x1p-7), kHalfStep4 = 1.0 / 14 * (1 + 0x1p-7);

  // Plain steps down the gradient, which show its errors as they are.
  static void Plain(EngineOptions* options) {
    options->optimizer.algorithm = kernels::SgdOptions{.lr = kRate};
    options->optimizer.clip = 0;
  }
  Training Coded(bool weights, bool gradients, int64_t steps) const {
    Training training{.to = steps, .state = {StateKind::kParameter}};
    training.adjust = [=](EngineOptions* options) {
      Plain(options);
      options->exchange = {.weights = weights, .gradients = gradients};
    };
    return training;
  }
  // Rank 0's, when all have trained alike.
  Trained OfRanks(int world, const std::string& name, const Training& training,
                  CountingComm::Bytes* bytes = nullptr) const {
    const std::vector<Trained> ranks = OnRanks<Trained>(world, [&](std::shared_ptr<Comm> comm) {
      if (bytes != nullptr && comm->rank() == 0) comm = std::make_shared<CountingComm>(comm, bytes);
      return Train(comm, absl::StrCat(name, "-", world), training);
    });
    for (const Trained& rank : ranks) {
      EXPECT_TRUE(rank.status.ok()) << rank.status;
      EXPECT_TRUE(rank == ranks.front()) << "ranks differ";
      EXPECT_EQ(rank.skipped, ranks.front().skipped);
    }
    return ranks.front();
  }
  static double Distance(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += std::pow(static_cast<double>(a[i]) - b[i], 2);
    return std::sqrt(sum);
  }
};

// A rank takes its own addend as it is, and each other's within half a step of the largest of its group: an
// element of the sum is off by at most (W - 1) A / 14 (1 + 2^-7), A being the largest addend there is, and
// after one step of rate r its weight by r times that. The loss of the next step differs by the gradient
// times that difference, |g| |d| at most, and a second-order term that is less than that here.
TEST_F(CodedExchangeTest, GradientsInFourBitsAreWithinTheirBound) {
  for (const int world : {2, 3}) {
    std::mutex mutex;
    double largest = 0;
    Training whole = Coded(false, false, 1);
    whole.leaves = [&](int64_t, DrivenCompute::Result* result) {
      const std::lock_guard lock(mutex);
      for (const auto& [block, gradients] : result->gradients) {
        for (const Gradient& gradient : gradients) {
          const auto* const values = static_cast<const float*>(gradient.value.data);
          for (int64_t i = 0; i < gradient.value.elements(); ++i)
            largest = std::max(largest, std::fabs(static_cast<double>(values[i])));
        }
      }
    };
    const Trained exact = OfRanks(world, "whole", whole);
    const Trained coded = OfRanks(world, "coded", Coded(false, true, 1));
    EXPECT_EQ(coded.losses, exact.losses) << "nothing has been summed yet";
    const double bound = kRate * (world - 1) * largest * kHalfStep4;
    double worst = 0;
    ASSERT_EQ(coded.state.size(), exact.state.size());
    for (size_t i = 0; i < coded.state.size(); ++i)
      worst = std::max(worst, std::fabs(static_cast<double>(coded.state[i]) - exact.state[i]));
    EXPECT_LE(worst, bound + 1e-7);
    EXPECT_GT(worst, bound / 50) << "is anything coded?";
    const Trained exact_on = OfRanks(world, "whole", Coded(false, false, 2));
    const Trained coded_on = OfRanks(world, "coded", Coded(false, true, 2));
    const double distance = Distance(coded.state, exact.state);
    EXPECT_NE(coded_on.losses[1], exact_on.losses[1]);
    EXPECT_NEAR(coded_on.losses[1], exact_on.losses[1], 2 * exact_on.norms[1] * distance) << world;
  }
}

// Each rank computes with its own part as it is and with the others' within half a step, A / 254 (1 + 2^-7):
// its weights are off by at most that times the root of their number, as a whole, and its loss by the
// gradient times that; second order as above.
TEST_F(CodedExchangeTest, WeightsInEightBitsAreWithinTheirBound) {
  for (const int world : {2, 3}) {
    const Trained none = OfRanks(world, "whole", Coded(false, false, 1));
    const Trained coded = OfRanks(world, "coded", Coded(true, false, 1));
    double largest = 0;  // before the step, which moves a weight by less than this leaves room for
    for (const float value : none.state) largest = std::max(largest, std::fabs(static_cast<double>(value)));
    largest += kRate * none.norms[0];
    const double distance = largest * kHalfStep8 * std::sqrt(static_cast<double>(none.state.size()));
    EXPECT_NE(coded.losses[0], none.losses[0]) << "is anything coded?";
    EXPECT_NEAR(coded.losses[0], none.losses[0], 2 * none.norms[0] * distance);
  }
}

// fp32: 4 bits and a 16-bit scale of 128 elements are 0.129 of it, 8 bits 0.254.
TEST_F(CodedExchangeTest, TheWireCarriesNoMoreThanItsShare) {
  for (const int world : {2, 3}) {
    CountingComm::Bytes whole, coded;
    // The last step announces none, whose exchanges would come after the engine's count.
    const auto steps = [this](bool codes) {
      Training training = Coded(codes, codes, 3);
      training.step = [](int64_t step) { return StepOptions(step < 3 ? Next::kTrain : Next::kUnknown); };
      return training;
    };
    const Trained exact = OfRanks(world, "whole", steps(false), &whole);
    const Trained fewer = OfRanks(world, "coded", steps(true), &coded);
    ASSERT_GT(whole.weights.load(), 0);
    ASSERT_GT(whole.gradients.load(), 0);
    EXPECT_EQ(coded.weights * 4 * 128, whole.weights * 130);
    EXPECT_EQ(coded.gradients * 4 * 128, whole.gradients * 66);
    EXPECT_EQ(exact.gathered.bytes, whole.weights);
    EXPECT_EQ(exact.gathered.whole_bytes, whole.weights);
    EXPECT_EQ(fewer.gathered.bytes, coded.weights);
    EXPECT_EQ(fewer.gathered.whole_bytes, whole.weights);
    EXPECT_EQ(fewer.reduced.bytes, coded.gradients);
    EXPECT_EQ(fewer.reduced.whole_bytes, whole.gradients);
  }
}

// Where state lives, how it is cut and in which order it is updated change nothing; nor does an end in the
// middle.
TEST_F(CodedExchangeTest, TheBitsAreTheSameEachTimeInEveryModeAndAfterARestart) {
  for (const int world : {2, 3}) {
    const Trained once = OfRanks(world, "once", Coded(true, true, 4));
    EXPECT_TRUE(OfRanks(world, "twice", Coded(true, true, 4)) == once);
    for (const OffloadDevice offload : {OffloadDevice::kNone, OffloadDevice::kNvme}) {
      Training training = Coded(true, true, 4);
      training.adjust = [=, plain = training.adjust](EngineOptions* options) {
        plain(options);
        options->storage.offload = offload;
        options->memory.tile_bytes = 1 << 16;
        options->optimizer.order = tiering::UpdateOrder::kInBackward;
        options->memory.bounds.placement = tiering::Placement::kCpu;
      };
      EXPECT_TRUE(OfRanks(world, "otherwise", training) == once) << static_cast<int>(offload);
    }
    OfRanks(world, "in-two", Coded(true, true, 2));
    Training rest = Coded(true, true, 4);
    rest.from = 3;
    rest.overwrites = false;
    const Trained resumed = OfRanks(world, "in-two", rest);
    EXPECT_EQ(resumed.state, once.state);
    EXPECT_EQ(resumed.losses, std::vector<double>(once.losses.begin() + 2, once.losses.end()));
  }
}

// It is one rank's, and in codes of no finite scale: all skip the step, and go on from the weights before.
TEST_F(CodedExchangeTest, AGradientThatIsNotFiniteSkipsTheStepOnAllRanks) {
  for (const float bad : {HUGE_VALF, -HUGE_VALF, std::numeric_limits<float>::quiet_NaN()}) {
    Trained before = OfRanks(3, "before", Coded(true, true, 2));
    std::vector<Trained> ranks = OnRanks<Trained>(3, [&](std::shared_ptr<Comm> comm) {
      Training training = Coded(true, true, 3);
      training.leaves = [&, own = comm->rank()](int64_t step, DrivenCompute::Result* result) {
        if (step != 3 || own != 1) return;
        const TensorView& view = result->gradients.front().second.front().value;
        // The last element is in another rank's part.
        static_cast<float*>(view.data)[view.elements() - 1] = bad;
      };
      return Train(comm, "bad", training);
    });
    for (const Trained& rank : ranks) {
      ASSERT_TRUE(rank.status.ok()) << rank.status;
      EXPECT_EQ(rank.skipped, std::vector<bool>({false, false, true})) << bad;
      EXPECT_EQ(rank.state, before.state);
    }
  }
}

TEST_F(CodedExchangeTest, RanksThatWantOtherCodesEndTogether) {
  for (const Trained& rank : OnRanks<Trained>(2, [&](std::shared_ptr<Comm> comm) {
         return Train(comm, "two", Coded(false, comm->rank() == 1, 1));
       })) {
    EXPECT_TRUE(absl::StrContains(rank.status.message(), "have planned differently")) << rank.status;
  }
}

}  // namespace
}  // namespace penstock::zero::tcp_ranks_test
