// `penstock train` as several ranks, started by the plain environment as torchrun would.
#include <arpa/inet.h>
#include <sys/socket.h>

#include <nlohmann/json.hpp>

#include "gmock/gmock.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using namespace testing_support;

class RanksTest : public ProgramTest {
 protected:
  static std::string FreePort() {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
    close(fd);
    return std::to_string(ntohs(address.sin_port));
  }

  // One process for each list of words.
  std::vector<Program> Start(const std::vector<Words>& ranks) {
    const std::string port = FreePort();
    std::vector<Program> programs;
    for (size_t k = 0; k < ranks.size(); ++k) {
      const std::string rank = std::to_string(k), world = std::to_string(ranks.size());
      setenv("RANK", rank.c_str(), 1);
      setenv("WORLD_SIZE", world.c_str(), 1);
      setenv("LOCAL_RANK", rank.c_str(), 1);
      setenv("LOCAL_WORLD_SIZE", world.c_str(), 1);
      setenv("MASTER_ADDR", "127.0.0.1", 1);
      setenv("MASTER_PORT", port.c_str(), 1);
      programs.emplace_back(dir_, ranks[k]);
    }
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
      unsetenv(name);
    return programs;
  }
  static std::vector<Ran> Wait(std::vector<Program> programs) {
    std::vector<Ran> results;
    for (Program& program : programs) results.push_back(program.Wait());
    return results;
  }

  static std::vector<json> LogOf(const std::string& path) {
    std::vector<json> lines;
    for (const std::string& line : Lines(ReadFile(path))) lines.push_back(json::parse(line));
    return lines;
  }

  Words Small(const std::string& state, Words more = {}) const {
    return Train(state,
                 Words{"--seq", "32", "--host-memory", "128M", "--lr", "1e-3", "--warmup", "0"} + more);
  }
};

TEST_F(RanksTest, TrainStopResumeAndTheWordsThatDoNotFit) {
  const std::string state = dir_ + "/state", alone = dir_ + "/alone";
  // The same sequences on one rank.
  ASSERT_EQ(Run(Small(alone, {"--steps", "6", "--batch", "4", "--log", dir_ + "/alone.jsonl"})).code, 0);
  const std::vector<json> one = LogOf(dir_ + "/alone.jsonl");
  ASSERT_EQ(one.size(), 6u);

  const std::string log = dir_ + "/log.jsonl", report = dir_ + "/report.json";
  const Words words = Small(state, {"--batch", "2", "--log", log, "--report", report});

  const Words six = words + Words{"--steps", "6"};
  for (const Ran& ran : Wait(Start({six, six}))) EXPECT_EQ(ran.code, 0) << ran.err;
  const std::vector<json> two = LogOf(log);
  ASSERT_EQ(two.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(two[i]["tokens"], 4 * 32);
    EXPECT_EQ(two[i]["tokens"], one[i]["tokens"]);
    // Two ranks' sums of fp32 gradients, halves first, against those of one batch.
    EXPECT_NEAR(two[i]["loss"].get<double>(), one[i]["loss"].get<double>(), 1e-3) << i;
  }
  const json said = json::parse(ReadFile(report));
  EXPECT_EQ(said["world_size"], 2);
  EXPECT_EQ(said["status"], "ok");
  EXPECT_TRUE(std::filesystem::exists(state + "/rank-0"));
  EXPECT_TRUE(std::filesystem::exists(state + "/rank-1"));

  // What does not fit is refused on all ranks, with exit code 2, before anything is touched.
  const Words resume = words + Words{"--resume", "--steps", "8"};
  for (const Ran& ran : Wait(Start({resume, words + Words{"--resume", "--steps", "9"}}))) {
    EXPECT_EQ(ran.code, 2);
    EXPECT_THAT(ran.err,
                HasSubstr("rank 1 of 2 was not started like rank 0: --steps is 9 on rank 1 and 8 on rank 0"));
  }
  const Ran single = Run(resume);
  EXPECT_EQ(single.code, 2);
  EXPECT_THAT(single.err, HasSubstr("holds a run of several ranks"));
  const Words other = Small(alone, {"--resume", "--steps", "8"});
  for (const Ran& ran : Wait(Start({other, other}))) EXPECT_NE(ran.code, 0) << ran.err;

  // And what fits goes on.
  for (const Ran& ran : Wait(Start({resume, resume}))) EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(LogOf(log).size(), 8u);
  EXPECT_EQ(json::parse(ReadFile(report))["resumed_from_step"], 6);

  // A signal to one of them stops all after the same step, which is committed.
  std::vector<Program> programs =
      Start({words + Words{"--resume", "--steps", "100000"}, words + Words{"--resume", "--steps", "100000"}});
  ASSERT_TRUE(WaitForLines(log, 10));
  programs[1].Signal(SIGTERM);
  for (const Ran& ran : Wait(std::move(programs))) EXPECT_EQ(ran.code, 0) << ran.err;
  const size_t stopped_at = LogOf(log).size();

  // Killed, the other one says so and ends with 1; then both go on, with no step lost or doubled.
  programs =
      Start({words + Words{"--resume", "--steps", "100000"}, words + Words{"--resume", "--steps", "100000"}});
  ASSERT_TRUE(WaitForLines(log, stopped_at + 3));
  programs[1].Signal(SIGKILL);
  const std::vector<Ran> ended = Wait(std::move(programs));
  EXPECT_EQ(ended[0].code, 1);
  EXPECT_THAT(ended[0].err, HasSubstr("rank 1 of 2 has gone"));
  EXPECT_EQ(Lines(ended[0].err).size(), 1u) << ended[0].err;
  const size_t killed_at = LogOf(log).size();
  const std::string last = std::to_string(killed_at + 3);
  for (const Ran& ran :
       Wait(Start({words + Words{"--resume", "--steps", last}, words + Words{"--resume", "--steps", last}})))
    EXPECT_EQ(ran.code, 0) << ran.err;
  const std::vector<json> all = LogOf(log);
  ASSERT_EQ(all.size(), killed_at + 3);
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i]["step"], i + 1);
}

}  // namespace
}  // namespace penstock::tools
