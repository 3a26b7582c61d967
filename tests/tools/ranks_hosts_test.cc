// Ranks on separate hosts: network namespaces of this machine behind a switch in one of their own, so that
// nothing outside is touched and everything goes with them.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/tools/penstock_state.h"
#include "tests/tools/rank_programs.h"

namespace penstock::tools::ranks_hosts_test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using namespace testing_support;

constexpr int kHosts = 3;

class HostsTest : public ProgramTest {
 protected:
  HostsTest() : name_("penstock" + std::to_string(getpid())) {}
  ~HostsTest() override {
    for (int k = 0; k < kHosts; ++k) (void)Ip("netns del " + Host(k));
    (void)Ip("netns del " + Switch());
  }

  // What this place cannot do is asked of each command itself: that `ip netns add` works says nothing of
  // `ip -n` (in a chroot whose / is no mount point) or of bridges.
  void SetUp() override {
    const std::string of_switch = "-n " + Switch();
    std::vector<std::string> commands = {"netns add " + Switch(), "netns exec " + Switch() + " true",
                                         of_switch + " link add sw type bridge",
                                         of_switch + " link set sw up"};
    for (int k = 0; k < kHosts; ++k) {
      const std::string host = Host(k), port = Port(k), of_host = "-n " + host;
      for (const std::string& command :
           {"netns add " + host,
            "link add net0 netns " + host + " type veth peer name " + port + " netns " + Switch(),
            of_switch + " link set " + port + " master sw up",
            of_host + " addr add " + Address(k) + "/24 dev net0", of_host + " link set net0 up",
            of_host + " link set lo up"})
        commands.push_back(command);
    }
    for (const std::string& command : commands) {
      std::string said;
      if (!Ip(command, &said)) {
        GTEST_SKIP() << "no hosts of network namespaces here: `ip " << command << "` says: " << said
                     << "(root, iproute2 and a kernel with veth and bridges make them)";
      }
    }
  }

  static bool Ip(const std::string& arguments, std::string* said = nullptr) {
    return Call("ip " + arguments, said);
  }
  // `said`: what the command printed.
  static bool Call(const std::string& command, std::string* said = nullptr) {
    FILE* const output = popen((command + " 2>&1").c_str(), "r");
    if (output == nullptr) return false;
    char piece[256];
    while (fgets(piece, sizeof(piece), output) != nullptr) {
      if (said != nullptr) *said += piece;
    }
    return pclose(output) == 0;
  }
  std::string Host(int k) const { return name_ + "h" + std::to_string(k); }
  std::string Switch() const { return name_ + "sw"; }
  static std::string Port(int k) { return "port" + std::to_string(k); }
  static std::string Address(int k) { return "10.77.0." + std::to_string(k + 1); }

  // What each of the first `hosts` sends in a second is this at most from now on; false: not here.
  bool LimitWires(int hosts, const std::string& rate) const {
    bool limited = true;
    for (int k = 0; k < hosts; ++k) {
      limited &= Call("tc -n " + Host(k) + " qdisc replace dev net0 root tbf rate " + rate +
                      " burst 32kb latency 50ms");
    }
    return limited;
  }
  // That host `k` has sent so far.
  int64_t BytesSent(int k) const {
    std::string said;
    EXPECT_TRUE(Ip("netns exec " + Host(k) + " cat /sys/class/net/net0/statistics/tx_bytes", &said)) << said;
    return std::strtoll(said.c_str(), nullptr, 10);
  }

  // After a cable is back, a host may still hold that there is no way to another (a neighbour that failed to
  // answer while it was out), and its next connection is refused with "No route to host".
  void WaitUntilAllReachEachOther() const {
    const auto refused = [&](int from, int to) {  // by the host itself: it answers
      return std::system(("ip netns exec " + Host(from) + " bash -c '</dev/tcp/" + Address(to) +
                          "/9' 2>&1 | grep -q refused")
                             .c_str()) == 0;
    };
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    for (int from = 0; from < kHosts; ++from) {
      for (int to = 0; to < kHosts; ++to) {
        while (!refused(from, to)) {
          ASSERT_LT(std::chrono::steady_clock::now(), deadline) << Host(from) << " cannot reach " << Host(to);
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
      }
    }
  }

  std::vector<Program> Start(const Arguments& arguments, int hosts) const {
    RankHosts where{.master_address = Address(0), .master_port = "29500", .launchers = {}};
    for (int k = 0; k < hosts; ++k) where.launchers.push_back({"ip", "netns", "exec", Host(k)});
    return StartRanks(dir_, std::vector<Arguments>(static_cast<size_t>(hosts), arguments), where);
  }
  Arguments Small(const std::string& state, Arguments more) const {
    return Train(state, Arguments{"--seq", "32", "--host-memory", "128MiB", "--warmup", "0"} + more);
  }

 private:
  const std::string name_;
};

TEST_F(HostsTest, LossesAreThoseOfOneHost) {
  for (const int hosts : {2, kHosts}) {
    const std::string of_hosts = dir_ + "/" + std::to_string(hosts);
    const std::string apart = of_hosts + "-apart.jsonl", together = of_hosts + "-together.jsonl";
    const Arguments six = {"--steps", "6", "--overwrite"};
    for (const Ran& ran : WaitForAll(Start(Small(dir_ + "/apart", six + Arguments{"--log", apart}), hosts)))
      EXPECT_EQ(ran.code, 0) << ran.err;
    const Arguments arguments = Small(dir_ + "/together", six + Arguments{"--log", together});
    for (const Ran& ran :
         WaitForAll(StartRanks(dir_, std::vector<Arguments>(static_cast<size_t>(hosts), arguments))))
      EXPECT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(Losses(apart).size(), 6u);
    EXPECT_EQ(Losses(apart), Losses(together));
  }
}

// What goes through the cable, counted by the hosts: of the steps beyond the second.
TEST_F(HostsTest, ExchangesInFewerBitsAreAShareOfWhatTheWireCarries) {
  if (!LimitWires(2, "1gbit")) GTEST_SKIP() << "no tc with tbf here";
  const auto sent = [&](const std::string& steps, const Arguments& more) {
    const int64_t before = BytesSent(0) + BytesSent(1);
    const Arguments all = Arguments{"--overwrite", "--dtype", "fp32", "--steps", steps} + more;
    for (const Ran& ran : WaitForAll(Start(Small(dir_ + "/state", all), 2)))
      EXPECT_EQ(ran.code, 0) << ran.err;
    return BytesSent(0) + BytesSent(1) - before;
  };
  const auto of_ten_steps = [&](const Arguments& more) { return sent("12", more) - sent("2", more); };
  const int64_t whole = of_ten_steps({});
  const int64_t fewer = of_ten_steps({"--zero-quantized-weights", "--zero-quantized-gradients"});
  EXPECT_GT(fewer, 0);
  EXPECT_LE(fewer * 10, whole * 3) << fewer << " of " << whole;
}

TEST_F(HostsTest, AWireThatBecomesSlowChangesNoLoss) {
  const std::string even = dir_ + "/even.jsonl", slow = dir_ + "/slow.jsonl";
  const Arguments all = {"--overwrite", "--steps", "12", "--rank-timeout", "3"};
  for (const Ran& ran : WaitForAll(Start(Small(dir_ + "/state", all + Arguments{"--log", even}), 2)))
    EXPECT_EQ(ran.code, 0) << ran.err;
  std::vector<Program> programs = Start(Small(dir_ + "/state", all + Arguments{"--log", slow}), 2);
  ASSERT_TRUE(WaitForLines(slow, 3));
  if (!LimitWires(2, "20mbit")) GTEST_SKIP() << "no tc with tbf here";
  for (const Ran& ran : WaitForAll(std::move(programs))) EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(Losses(slow).size(), 12u);
  EXPECT_EQ(Losses(slow), Losses(even));
}

// A cable that is pulled: nothing is closed, nothing answers.
TEST_F(HostsTest, AHostThatIsCutOffIsNamedAllEndAndTheRunGoesOn) {
  for (const int cut : {0, 2}) {
    const std::string state = dir_ + "/state" + std::to_string(cut), log = state + ".jsonl";
    const Arguments arguments = Small(state, {"--log", log, "--rank-timeout", "3"});
    std::vector<Program> programs = Start(arguments + Arguments{"--steps", "100000"}, kHosts);
    ASSERT_TRUE(WaitForLines(log, 3));
    ASSERT_TRUE(Ip("-n " + Switch() + " link set " + Port(cut) + " down"));
    for (int k = 0; k < kHosts; ++k) {
      ASSERT_TRUE(programs[static_cast<size_t>(k)].EndsWithin(60)) << "rank " << k << " waits for ever";
      const Ran ran = programs[static_cast<size_t>(k)].Wait();
      EXPECT_EQ(ran.code, 1);
      if (k != cut) {
        EXPECT_THAT(ran.err, HasSubstr("rank " + std::to_string(cut) + " of 3 has not answered for 3 s"));
      } else {
        EXPECT_THAT(ran.err, HasSubstr("of 3 has not answered for 3 s")) << "it cannot know that it is alone";
      }
    }
    ASSERT_TRUE(Ip("-n " + Switch() + " link set " + Port(cut) + " up"));
    ASSERT_NO_FATAL_FAILURE(WaitUntilAllReachEachOther());
    const size_t lines = Lines(ReadFile(log)).size();
    const std::string steps = std::to_string(lines + 3);
    for (const Ran& ran : WaitForAll(Start(arguments + Arguments{"--resume", "--steps", steps}, kHosts)))
      EXPECT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(Lines(ReadFile(log)).size(), lines + 3);
  }
}

}  // namespace
}  // namespace penstock::tools::ranks_hosts_test
