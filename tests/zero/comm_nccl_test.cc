// Exchanges between devices, over a stand-in for NCCL that is as strict about their order as a device may be.
#include <gtest/gtest.h>

#include <array>
#include <condition_variable>
#include <cstring>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "tests/zero/fake_nccl.h"
#include "zero/ranks/comm.h"

namespace penstock::zero::comm_nccl_test {
namespace {

constexpr int kWorld = 3;

// What the hosts of one process say to each other.
class Hosts {
 public:
  void Post(Channel channel, uint64_t number, int from, int to, std::vector<char> bytes) {
    std::lock_guard lock(mutex_);
    mail_[{channel, number, from, to}] = std::move(bytes);
    there_.notify_all();
  }
  absl::Status Take(Channel channel, uint64_t number, int from, int to, void* memory) {
    std::unique_lock lock(mutex_);
    const Key key{channel, number, from, to};
    there_.wait(lock, [&] { return mail_.contains(key) || !failure_.ok(); });
    if (!failure_.ok()) return failure_;
    const std::vector<char>& bytes = mail_[key];
    std::memcpy(memory, bytes.data(), bytes.size());
    mail_.erase(key);
    return absl::OkStatus();
  }
  void Abort(const absl::Status& why) {
    std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = why;
    there_.notify_all();
  }
  absl::Status failure() {
    std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  using Key = std::tuple<Channel, uint64_t, int, int>;
  std::mutex mutex_;
  std::condition_variable there_;
  std::map<Key, std::vector<char>> mail_;
  absl::Status failure_;
};

class HostComm final : public Comm {
 public:
  HostComm(Hosts* hosts, int rank) : Comm(Environment(rank)), hosts_(hosts) {}
  static RankEnvironment Environment(int rank) {
    RankEnvironment environment;
    environment.rank = rank;
    environment.world = kWorld;
    return environment;
  }
  std::string name() const override { return "threads"; }
  absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel channel, const What& /*what*/,
                                                  std::span<const void* const> send,
                                                  std::span<void* const> receive, size_t bytes) override {
    uint64_t number = 0;
    {
      std::lock_guard lock(mutex_);
      number = ++begun_[channel];
    }
    for (int k = 0; k < world(); ++k) {
      const auto* const from = static_cast<const char*>(send[static_cast<size_t>(k)]);
      if (k != rank()) hosts_->Post(channel, number, rank(), k, std::vector<char>(from, from + bytes));
    }
    return std::make_unique<Coming>(this, channel, number,
                                    std::vector<void*>(receive.begin(), receive.end()));
  }
  void Abort(const absl::Status& why) override { hosts_->Abort(why); }
  absl::Status failure() override { return hosts_->failure(); }

 private:
  class Coming final : public Exchange {
   public:
    Coming(HostComm* of, Channel channel, uint64_t number, std::vector<void*> receive)
        : of_(of), channel_(channel), number_(number), receive_(std::move(receive)) {}
    absl::Status Wait() override {
      for (int k = 0; k < of_->world(); ++k) {
        if (k == of_->rank()) continue;
        absl::Status status =
            of_->hosts_->Take(channel_, number_, k, of_->rank(), receive_[static_cast<size_t>(k)]);
        if (!status.ok()) return status;
      }
      return absl::OkStatus();
    }

   private:
    HostComm* const of_;
    const Channel channel_;
    const uint64_t number_;
    const std::vector<void*> receive_;
  };
  Hosts* const hosts_;
  std::mutex mutex_;
  std::map<Channel, uint64_t> begun_;
};

// Runs body(rank, comm) as ranks that have connected.
template <typename Body>
void AsRanks(Hosts* hosts, Body body) {
  ResetFakeNccl(kWorld);
  std::latch all_tried(kWorld);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.emplace_back([=, &all_tried] {
      const auto host = std::make_shared<HostComm>(hosts, rank);
      const absl::StatusOr<std::shared_ptr<Comm>> comm = ConnectNccl(host);
      all_tried.arrive_and_wait();
      ASSERT_TRUE(comm.ok()) << comm.status();
      body(rank, **comm);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

void Stray(std::mt19937* random) {
  for (unsigned i = (*random)() % 8; i > 0; --i) std::this_thread::yield();
}

// What a lane exchanges: a number for each (rank, lane, exchange).
int Number(int rank, int lane, int exchange) { return (rank * 2 + lane) * 10000 + exchange; }

absl::Status ExpectOver(Exchange& exchange, const std::array<int, kWorld>& received, int rank, int lane,
                        int number) {
  absl::Status status = exchange.Wait();
  for (int k = 0; status.ok() && k < kWorld; ++k) {
    if (k == rank) continue;
    EXPECT_EQ(received[static_cast<size_t>(k)], Number(k, lane, number));
  }
  return status;
}

// Two exchanges are under way at a time, as when gradients are reduced.
absl::Status RunLane(Comm& comm, int lane, int exchanges, uint32_t seed) {
  std::mt19937 random(seed);
  std::array<std::array<int, kWorld>, 2> received{};
  std::array<int, 2> sent{};
  std::unique_ptr<Exchange> coming;
  for (int i = 0; i <= exchanges; ++i) {
    std::unique_ptr<Exchange> next;
    if (i < exchanges) {
      auto& place = received[static_cast<size_t>(i % 2)];
      int& mine = sent[static_cast<size_t>(i % 2)];
      mine = Number(comm.rank(), lane, i);
      const std::vector<const void*> send(kWorld, &mine);
      std::vector<void*> receive;
      for (int& each : place) receive.push_back(&each);
      Stray(&random);
      auto begun = comm.Begin(lane == 0 ? Channel::kAllGather : Channel::kReduceScatter, {"numbers"}, send,
                              receive, sizeof(int));
      if (!begun.ok()) return begun.status();
      next = std::move(*begun);
    }
    if (coming != nullptr) {
      const absl::Status over =
          ExpectOver(*coming, received[static_cast<size_t>((i - 1) % 2)], comm.rank(), lane, i - 1);
      if (!over.ok()) return over;
    }
    coming = std::move(next);
  }
  return absl::OkStatus();
}

TEST(CommNccl, LanesThatComeInAnyOrderAreEnqueuedInOne) {
  for (uint32_t seed = 0; seed < 4; ++seed) {
    Hosts hosts;
    AsRanks(&hosts, [&](int rank, Comm& comm) {
      // On one rank the gathers come first, on another one the reductions.
      absl::Status other;
      const int first = (rank + static_cast<int>(seed)) % 2;
      std::thread lane(
          [&] { other = RunLane(comm, 1 - first, 100, seed * 100 + static_cast<uint32_t>(rank)); });
      const absl::Status own = RunLane(comm, first, 100, seed * 100 + 50 + static_cast<uint32_t>(rank));
      lane.join();
      EXPECT_TRUE(own.ok()) << own;
      EXPECT_TRUE(other.ok()) << other;
    });
    EXPECT_EQ(FakeCommunicators(), 1);
    if (HasFailure()) return;
  }
}

TEST(CommNccl, WhoWaitsForATurnHearsThatARankIsLost) {
  Hosts hosts;
  AsRanks(&hosts, [&](int rank, Comm& comm) {
    if (rank == 2) {
      comm.Abort(absl::UnavailableError("rank 2 of 3 has ended"));
      return;
    }
    absl::Status reduced;
    std::thread lane([&] { reduced = RunLane(comm, 1, 1, 1); });
    const absl::Status gathered = RunLane(comm, 0, 1, 2);
    lane.join();
    EXPECT_EQ(gathered.message(), "rank 2 of 3 has ended");
    EXPECT_EQ(reduced.message(), "rank 2 of 3 has ended");
  });
}

// What NCCL would take for each other's, or wait for: another block's exchange, one of another size.
TEST(CommNccl, WhoExchangesSomethingElseThanTheOthersEndsAllOfIt) {
  for (const bool of_size : {false, true}) {
    for (const Channel channel : {Channel::kAllGather, Channel::kReduceScatter}) {
      Hosts hosts;
      AsRanks(&hosts, [&](int rank, Comm& comm) {
        const bool odd = rank == 1;
        const What what{.name = "the weights", .step = 4, .block = odd && !of_size ? 6 : 5};
        std::array<int, 2 * kWorld> numbers{};
        std::vector<const void*> send(kWorld, numbers.data());
        std::vector<void*> receive(kWorld, numbers.data());
        const absl::Status status =
            comm.AllToAll(channel, what, send, receive, odd && of_size ? 4 : sizeof(int) * 2);
        EXPECT_EQ(status.message(),
                  of_size
                      ? "rank 1 of 3 is at the weights of block 5, step 4 (4 bytes) between devices and "
                        "rank 0 at the weights of block 5, step 4 (8 bytes): they do not do the same; give "
                        "all ranks the same flags, data and calls"
                      : "rank 1 of 3 is at the weights of block 6, step 4 (8 bytes) between devices and "
                        "rank 0 at the weights of block 5, step 4 (8 bytes): they do not do the same; give "
                        "all ranks the same flags, data and calls");
      });
    }
  }
}

}  // namespace
}  // namespace penstock::zero::comm_nccl_test
