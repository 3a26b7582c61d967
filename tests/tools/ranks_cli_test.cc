// `penstock train` as several ranks, started by the plain environment as torchrun would.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "gmock/gmock.h"
#include "tests/aio/loop_device.h"
#include "tests/tools/rank_programs.h"

namespace penstock::tools::ranks_cli_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using namespace testing_support;

class RanksTest : public ProgramTest {
 protected:
  std::vector<Program> Start(const std::vector<Arguments>& ranks) { return StartRanks(dir_, ranks); }
  static std::vector<Ran> Wait(std::vector<Program> programs) { return WaitForAll(std::move(programs)); }

  static std::vector<json> LogOf(const std::string& path) {
    std::vector<json> lines;
    for (const std::string& line : Lines(ReadFile(path))) lines.push_back(json::parse(line));
    return lines;
  }

  Arguments Small(const std::string& state, Arguments more = {}) const {
    return Train(state,
                 Arguments{"--seq", "32", "--host-memory", "128MiB", "--lr", "1e-3", "--warmup", "0"} + more);
  }
};

TEST_F(RanksTest, TrainStopResumeAndTheFlagsThatDoNotFit) {
  const std::string state = dir_ + "/state", alone = dir_ + "/alone";
  // The same sequences on one rank.
  ASSERT_EQ(Run(Small(alone, {"--steps", "6", "--batch", "4", "--log", dir_ + "/alone.jsonl"})).code, 0);
  const std::vector<json> one = LogOf(dir_ + "/alone.jsonl");
  ASSERT_EQ(one.size(), 6u);

  const std::string log = dir_ + "/log.jsonl", report = dir_ + "/report.json";
  const Arguments arguments = Small(state, {"--batch", "2", "--log", log, "--report", report});

  const Arguments six = arguments + Arguments{"--steps", "6"};
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
  const Arguments resume = arguments + Arguments{"--resume", "--steps", "8"};
  for (const Ran& ran : Wait(Start({resume, arguments + Arguments{"--resume", "--steps", "9"}}))) {
    EXPECT_EQ(ran.code, 2);
    EXPECT_THAT(ran.err,
                HasSubstr("rank 1 of 2 was not started like rank 0: --steps is 9 on rank 1 and 8 on rank 0"));
  }
  const Ran single = Run(resume);
  EXPECT_EQ(single.code, 2);
  EXPECT_THAT(single.err, HasSubstr("holds a run of 2 ranks: go on with 2"));
  const Arguments other = Small(alone, {"--resume", "--steps", "8"});
  for (const Ran& ran : Wait(Start({other, other}))) EXPECT_NE(ran.code, 0) << ran.err;

  // And what fits goes on.
  for (const Ran& ran : Wait(Start({resume, resume}))) EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(LogOf(log).size(), 8u);
  EXPECT_EQ(json::parse(ReadFile(report))["resumed_from_step"], 6);

  // A signal to one of them stops all after the same step, which is committed.
  std::vector<Program> programs = Start({arguments + Arguments{"--resume", "--steps", "100000"},
                                         arguments + Arguments{"--resume", "--steps", "100000"}});
  ASSERT_TRUE(WaitForLines(log, 10));
  programs[1].Signal(SIGTERM);
  for (const Ran& ran : Wait(std::move(programs))) EXPECT_EQ(ran.code, 0) << ran.err;
  const size_t stopped_at = LogOf(log).size();

  // Killed, the other one says so and ends with 1; then both go on, with no step lost or doubled.
  programs = Start({arguments + Arguments{"--resume", "--steps", "100000"},
                    arguments + Arguments{"--resume", "--steps", "100000"}});
  ASSERT_TRUE(WaitForLines(log, stopped_at + 3));
  programs[1].Signal(SIGKILL);
  const std::vector<Ran> ended = Wait(std::move(programs));
  EXPECT_EQ(ended[0].code, 1);
  EXPECT_THAT(ended[0].err, HasSubstr("rank 1 of 2 has gone"));
  EXPECT_EQ(Lines(ended[0].err).size(), 1u) << ended[0].err;
  const size_t killed_at = LogOf(log).size();
  const std::string last = std::to_string(killed_at + 3);
  for (const Ran& ran : Wait(Start({arguments + Arguments{"--resume", "--steps", last},
                                    arguments + Arguments{"--resume", "--steps", last}})))
    EXPECT_EQ(ran.code, 0) << ran.err;
  const std::vector<json> all = LogOf(log);
  ASSERT_EQ(all.size(), killed_at + 3);
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i]["step"], i + 1);
}

// Checkpoints of two ranks, and their state: read by every verb, and gone on from with another number.
TEST_F(RanksTest, CheckpointsAreReadByEveryVerbAndGoOnWithAnotherNumber) {
  const std::string state = dir_ + "/state", kept = dir_ + "/kept", log = dir_ + "/log.jsonl";
  const Arguments two = Small(state, {"--batch", "3", "--dtype", "fp32", "--steps", "4", "--log", log,
                                      "--checkpoint-dir", kept, "--checkpoint-every", "2"});
  for (const Ran& ran : Wait(Start({two, two}))) ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_TRUE(std::filesystem::exists(kept + "/step-00000004/rank-1/penstock.store"));

  const json seen = json::parse(Run({"inspect", kept, "--json"}).out);
  EXPECT_EQ(seen["ranks"], 2);
  EXPECT_EQ(seen["step"], 4);
  EXPECT_EQ(seen["files"].size(), 2u);
  std::map<int64_t, int64_t> elements;  // by block
  for (const json& tile : seen["tiles"]) {
    EXPECT_EQ(tile["first_element"].get<int64_t>() > 0 || tile["rank"] == 0, true);
    elements[tile["block"].get<int64_t>()] += tile["elements"].get<int64_t>();
  }
  for (const auto& [block, sum] : elements)
    EXPECT_GE(sum, seen["block_elements"][static_cast<size_t>(block)].get<int64_t>());
  for (const std::string& where : {kept, state}) {
    const json verified = json::parse(Run({"verify", where, "--json", "--quiet"}).out);
    EXPECT_EQ(verified["whole"], true);
    EXPECT_EQ(verified["ranks"], 2);
    EXPECT_EQ(Run({"export", where, dir_ + "/" + (where == kept ? "kept" : "state") + ".safetensors"}).code,
              0);
  }
  const std::string weights = ReadFile(dir_ + "/kept.safetensors");
  EXPECT_EQ(ReadFile(dir_ + "/state.safetensors").substr(2000), weights.substr(2000));

  // In place only with as many, unless that is said.
  const Ran single = Run(Small(state, {"--resume", "--steps", "6"}));
  EXPECT_EQ(single.code, 2);
  EXPECT_THAT(single.err, HasSubstr("or with another number by --resume --resume-ranks any"));
  const Arguments third = Small(state, {"--resume", "--steps", "6"});
  for (const Ran& ran : Wait(Start({third, third, third}))) {
    EXPECT_EQ(ran.code, 2);
    EXPECT_THAT(ran.err, HasSubstr("holds a run of 2 ranks: go on with 2, or with another number by"));
  }

  // One rank has the weights that two had, and what it says is what they say.
  const std::string one = dir_ + "/one";
  const Ran alone = Run(Small(one, {"--resume", "--checkpoint-dir", kept, "--steps", "4"}));
  ASSERT_EQ(alone.code, 0) << alone.err;
  EXPECT_EQ(Run({"export", one, dir_ + "/one.safetensors"}).code, 0);
  EXPECT_EQ(ReadFile(dir_ + "/one.safetensors").substr(2000), weights.substr(2000));
  const Arguments sample = {"sample", "", "--tokens", "12", "--threads", "1"};
  std::vector<std::string> said;
  for (const std::string& where : {kept, state, one}) {
    Arguments arguments = sample;
    arguments[1] = where;
    const Ran ran = Run(arguments);
    EXPECT_EQ(ran.code, 0) << ran.err;
    said.push_back(ran.out);
  }
  EXPECT_EQ(said[0], said[2]);
  EXPECT_EQ(said[1], said[2]);

  // With as many sequences a step as the two had.
  ASSERT_EQ(Run(Small(one, {"--resume", "--steps", "5", "--log", dir_ + "/one.jsonl"})).code, 0);
  EXPECT_EQ(LogOf(dir_ + "/one.jsonl").back()["tokens"], 2 * 3 * 32);

  // Three, whose parts no block divides into: the same steps, to the rounding of their sums.
  const std::string three = dir_ + "/three", log_of_three = dir_ + "/three.jsonl";
  const Arguments on =
      Small(three, {"--resume", "--checkpoint-dir", kept, "--steps", "6", "--log", log_of_three});
  for (const Ran& ran : Wait(Start({on, on, on}))) ASSERT_EQ(ran.code, 0) << ran.err;
  const Arguments stay = Small(state, {"--resume", "--steps", "6", "--log", log});
  for (const Ran& ran : Wait(Start({stay, stay}))) ASSERT_EQ(ran.code, 0) << ran.err;
  const std::vector<json> of_three = LogOf(log_of_three), of_two = LogOf(log);
  ASSERT_EQ(of_three.size(), 2u + (of_three.front()["step"] == 4 ? 1 : 0));
  ASSERT_EQ(of_two.size(), 6u);
  EXPECT_EQ(of_three.back()["tokens"], of_two.back()["tokens"]);
  EXPECT_NEAR(of_three.back()["loss"].get<double>(), of_two.back()["loss"].get<double>(), 1e-4);

  // A part that is damaged or not there is named, and costs exit code 1.
  const std::string part = kept + "/step-00000004/rank-1/penstock.store";
  std::fstream file(part, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(std::filesystem::file_size(part)) - 40000);
  file.write("damaged", 7);
  file.close();
  const Ran damaged = Run({"verify", kept});
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.out, HasSubstr("rank-1/penstock.store"));
  std::filesystem::remove_all(kept + "/step-00000004/rank-1");
  const Ran missing = Run({"export", kept, dir_ + "/none.safetensors"});
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.err, HasSubstr("the part of rank 1 of the run's 2 is missing"));
  // Likewise of the state, whichever part it is, by whoever reads it.
  std::filesystem::remove_all(state + "/rank-0");
  for (const Ran& ran :
       RunAll({{"export", state, dir_ + "/none.safetensors"},
               {"verify", state},
               {"inspect", state},
               {"sample", state, "--tokens", "2"},
               Small(dir_ + "/five", {"--offload", "cpu", "--resume", "--checkpoint-dir", state})})) {
    EXPECT_EQ(ran.code, 1) << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("the part of rank 0 of the run's 2 is missing"));
  }
}

// Two ranks are killed, and one and three go on in the place of their state, with its losses to the rounding
// of sums; where a part is gone, from the newest checkpoint.
TEST_F(RanksTest, KilledTheyGoOnWithAnotherNumberWhereThatIsSaid) {
  const std::string state = dir_ + "/state", kept = dir_ + "/kept", log = dir_ + "/log.jsonl";
  const Arguments shape = {"--batch", "3", "--dtype", "fp32", "--steps", "40"};
  const Arguments unbroken = Small(dir_ + "/unbroken", shape + Arguments{"--log", dir_ + "/unbroken.jsonl"});
  for (const Ran& ran : Wait(Start({unbroken, unbroken}))) ASSERT_EQ(ran.code, 0) << ran.err;
  const std::vector<json> expected = LogOf(dir_ + "/unbroken.jsonl");
  const Arguments two =
      Small(state, shape + Arguments{"--log", log, "--checkpoint-dir", kept, "--checkpoint-every", "3"});
  std::vector<Program> programs = Start({two, two});
  ASSERT_TRUE(WaitForLines(log, 7));
  programs[1].Signal(SIGKILL);
  EXPECT_EQ(Wait(std::move(programs))[0].code, 1);
  const size_t killed_at = LogOf(log).size();
  ASSERT_LT(killed_at, 30u) << "it was over before the signal came";

  const auto copy = [&](const std::string& name) {
    std::filesystem::copy(state, dir_ + "/" + name, std::filesystem::copy_options::recursive);
    std::filesystem::copy(kept, dir_ + "/" + name + "-kept", std::filesystem::copy_options::recursive);
    return dir_ + "/" + name;
  };
  const std::string last = std::to_string(killed_at + 4);
  const auto go_on = [&](const std::string& place, int ranks, const Arguments& more) {
    const Arguments on = Small(place, Arguments{"--resume", "--dtype", "fp32", "--steps", last, "--log",
                                                place + ".jsonl", "--checkpoint-dir", place + "-kept"} +
                                          more);
    return ranks == 1 ? std::vector<Ran>{Run(on)}
                      : Wait(Start(std::vector<Arguments>(static_cast<size_t>(ranks), on)));
  };
  // No step after `step` is lost and none doubled; a new log begins with the line of the commit gone on from.
  const auto expect_from = [&](const std::vector<json>& seen, size_t step) {
    ASSERT_FALSE(seen.empty());
    const auto first = seen.front()["step"].get<size_t>();
    EXPECT_TRUE(first == step || first == step + 1) << first << " for " << step;
    EXPECT_EQ(seen.size(), killed_at + 4 - first + 1);
    for (size_t i = 0; i < seen.size(); ++i) {
      EXPECT_EQ(seen[i]["step"], first + i);
      const json& other = expected[first + i - 1];
      EXPECT_EQ(seen[i]["tokens"], other["tokens"]);
      EXPECT_NEAR(seen[i]["loss"].get<double>(), other["loss"].get<double>(), 1e-4);
    }
  };
  std::ofstream(dir_ + "/any.json") << R"({"penstock": {"resume_ranks": "any"}})";
  for (const int ranks : {1, 3}) {
    SCOPED_TRACE(ranks);
    const std::string place = copy(ranks == 1 ? "one" : "three");
    for (const Ran& ran : go_on(place, ranks, {})) {
      EXPECT_EQ(ran.code, 2);
      EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
      EXPECT_THAT(ran.err,
                  HasSubstr("holds a run of 2 ranks: go on with 2, or with another number by --resume "
                            "--resume-ranks any"));
    }
    // What only looks changes nothing.
    const Ran planned = Run({"plan", "--resume", "--resume-ranks", "any", "--state-dir", place});
    EXPECT_EQ(planned.code, 0) << planned.err;
    EXPECT_TRUE(std::filesystem::exists(place + "/rank-1/penstock.store"));
    const Arguments any =
        ranks == 1 ? Arguments{"--resume-ranks", "any"} : Arguments{"--config", dir_ + "/any.json"};
    // Nor does a start that is refused.
    for (const auto& [more, why] : std::vector<std::pair<Arguments, std::string>>{
             {{"--model", "gpt-small"}, "holds a run of another model"},
             {{"--host-memory", "64KiB"}, "is too small: the least that works is"}}) {
      for (const Ran& ran : go_on(place, ranks, any + more)) {
        EXPECT_EQ(ran.code, 2);
        EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
        EXPECT_THAT(ran.err, HasSubstr(why));
      }
    }
    EXPECT_TRUE(std::filesystem::exists(place + "/rank-1/penstock.store"));
    EXPECT_FALSE(std::filesystem::exists(place + "/rank-2"));
    for (const Ran& ran : go_on(place, ranks, any)) ASSERT_EQ(ran.code, 0) << ran.err;
    expect_from(LogOf(place + ".jsonl"), killed_at);
    EXPECT_EQ(std::filesystem::exists(place + "/rank-0"), ranks == 3);
    EXPECT_EQ(std::filesystem::exists(place + "/penstock.store"), ranks == 1);
    EXPECT_EQ(json::parse(Run({"verify", place, "--json", "--quiet"}).out)["whole"], true);
    // With as many it goes on as any other.
    for (const Ran& ran : go_on(place, ranks, any)) EXPECT_EQ(ran.code, 0) << ran.err;
  }

  // A part that cannot be read is not one that is gone, though there is a checkpoint.
  const std::string unread = copy("unread");
  std::filesystem::rename(unread + "/rank-1/penstock.store", unread + "/elsewhere");
  std::filesystem::create_symlink(unread + "/elsewhere", unread + "/rank-1/penstock.store");
  const Ran refused = go_on(unread, 1, {"--resume-ranks", "any"}).front();
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("could not read all parts, and none of them is taken for gone"));
  std::filesystem::rename(unread + "/elsewhere", unread + "/rank-1/penstock.store");
  for (const Ran& ran : go_on(unread, 1, {"--resume-ranks", "any"})) ASSERT_EQ(ran.code, 0) << ran.err;
  expect_from(LogOf(unread + ".jsonl"), killed_at);

  // The host of a rank is gone, and its part of the state with it.
  const std::string lost = copy("lost");
  std::filesystem::remove_all(lost + "/rank-1");
  const auto newest = std::stoul(json::parse(Run({"inspect", lost + "-kept", "--json"}).out)["step"].dump());
  // What only looks says what training would do, and a start that is refused leaves what is there.
  const Arguments looks = {"--resume", "--resume-ranks",   "any",         "--state-dir",
                           lost,       "--checkpoint-dir", lost + "-kept"};
  const Ran planned = Run(Arguments{"plan", "--json"} + looks);
  EXPECT_EQ(planned.code, 0) << planned.err;
  EXPECT_THAT(planned.err, HasSubstr("training cuts anew " + lost + ", a run of 2 ranks, for 1, from "));
  const Ran checked = Run(Arguments{"train", "--check"} + looks);
  EXPECT_EQ(checked.code, 0) << checked.err;
  EXPECT_THAT(checked.out, HasSubstr("since parts of it are gone"));
  const Ran small = go_on(lost, 1, {"--resume-ranks", "any", "--host-memory", "64KiB"}).front();
  EXPECT_EQ(small.code, 2);
  EXPECT_THAT(small.err, HasSubstr("is too small: the least that works is"));
  EXPECT_TRUE(std::filesystem::exists(lost + "/rank-0/penstock.store"));
  // Nor is another run's checkpoint taken for one of it.
  const Ran another = Run(Small(dir_ + "/another", {"--dtype", "fp32", "--steps", "2", "--checkpoint-every",
                                                    "2", "--checkpoint-dir", dir_ + "/another-kept"}));
  ASSERT_EQ(another.code, 0) << another.err;
  for (const int ranks : {1, 2}) {
    for (const Ran& ran :
         go_on(lost, ranks, {"--resume-ranks", "any", "--checkpoint-dir", dir_ + "/another-kept"})) {
      EXPECT_EQ(ran.code, 2) << ran.err;
      EXPECT_THAT(ran.err, AllOf(HasSubstr(lost + "/rank-0 is a part of run "),
                                 HasSubstr(dir_ + "/another-kept/step-00000002 a checkpoint of run "),
                                 HasSubstr("give the --checkpoint-dir of the former")));
    }
  }
  EXPECT_TRUE(std::filesystem::exists(lost + "/rank-0/penstock.store"));
  for (const Ran& ran : go_on(lost, 1, {"--resume-ranks", "any"})) ASSERT_EQ(ran.code, 0) << ran.err;
  expect_from(LogOf(lost + ".jsonl"), newest);
  EXPECT_FALSE(std::filesystem::exists(lost + "/rank-0"));
  const std::string nothing = copy("nothing");
  std::filesystem::remove_all(nothing + "/rank-0");
  std::filesystem::remove_all(nothing + "-kept");
  const Ran none = go_on(nothing, 1, {"--resume-ranks", "any"}).front();
  EXPECT_EQ(none.code, 1);
  EXPECT_EQ(Lines(none.err).size(), 1u) << none.err;
  EXPECT_THAT(none.err, HasSubstr("the part of rank 0 of the run's 2 is missing"));
  EXPECT_TRUE(std::filesystem::exists(nothing + "/rank-1/penstock.store"));
}

// Of parts in two directories, one of which is not there now, none makes room for an older checkpoint.
TEST_F(RanksTest, PartsOfWhichADriveIsAwayAreNotReplacedByACheckpoint) {
  const std::string a = dir_ + "/a", b = dir_ + "/b", away = dir_ + "/away", kept = dir_ + "/kept";
  const Arguments drives = {"--state-dir", b, "--checkpoint-dir", kept};
  const Arguments two = Small(a, drives + Arguments{"--steps", "6", "--checkpoint-every", "4"});
  for (const Ran& ran : Wait(Start({two, two}))) ASSERT_EQ(ran.code, 0) << ran.err;
  const Arguments one = Small(a, drives + Arguments{"--steps", "7", "--resume", "--resume-ranks", "any"});
  std::filesystem::rename(b, away);
  const Ran refused = Run(one);
  EXPECT_EQ(refused.code, 2);
  EXPECT_EQ(Lines(refused.err).size(), 1u) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("has a half of the state whose other half is not in " + b));
  EXPECT_TRUE(std::filesystem::exists(a + "/rank-1/penstock.store"));
  std::filesystem::remove_all(b);  // made anew by the start that was refused, if at all
  std::filesystem::rename(away, b);
  const Ran ran = Run(one);
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(json::parse(Run({"inspect", a, b, "--json"}).out)["step"], 7);
}

// One version on each of two ranks: killed, the state is refused by all, and comes back from the newest
// checkpoint with the losses of a run left alone.
TEST_F(RanksTest, WithOneVersionAKillCostsTheStateAndACheckpointBringsItBack) {
  const std::string kept = dir_ + "/kept", log = dir_ + "/log.jsonl", config = dir_ + "/one.json";
  std::ofstream(config) << R"({"penstock": {"versions": 1}})";
  const auto arguments = [&](const std::string& state, const std::string& to, const Arguments& more) {
    return Train(state, Arguments{"--config", config, "--host-memory", "9MiB", "--seq", "32", "--batch", "2",
                                  "--steps", "24", "--log", to} +
                            more);
  };
  const Arguments whole = arguments(dir_ + "/whole", dir_ + "/whole.jsonl", {});
  for (const Ran& ran : Wait(Start({whole, whole}))) ASSERT_EQ(ran.code, 0) << ran.err;
  const Arguments checkpoints = {"--checkpoint-dir", kept, "--checkpoint-every", "4"};
  const Arguments first = arguments(dir_ + "/state", log, checkpoints);
  std::vector<Program> programs = Start({first, first});
  ASSERT_TRUE(WaitForLines(log, 10));
  programs[1].Signal(SIGKILL);
  EXPECT_EQ(Wait(std::move(programs))[0].code, 1);
  ASSERT_LT(LogOf(log).size(), 24u) << "it was over before the signal came";
  bool overwriting = false;
  for (const char* part : {"/state/rank-0", "/state/rank-1"})
    overwriting |= json::parse(Run({"inspect", dir_ + part, "--json"}).out)["overwriting"] == true;
  if (overwriting) {  // all but for a moment after a checkpoint
    const Arguments without = arguments(dir_ + "/state", log, {"--resume"});
    std::vector<std::string> refusals;
    for (const Ran& ran : Wait(Start({without, without}))) {
      EXPECT_EQ(ran.code, 1);
      EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
      EXPECT_THAT(ran.err, HasSubstr("one version of its state"));
      EXPECT_THAT(ran.err, HasSubstr("--checkpoint-dir"));
      refusals.push_back(ran.err.substr(ran.err.find("the run keeps")));
    }
    EXPECT_EQ(refusals[0], refusals[1]);
  }
  const Arguments again = arguments(dir_ + "/state", log, checkpoints + Arguments{"--resume"});
  for (const Ran& ran : Wait(Start({again, again}))) ASSERT_EQ(ran.code, 0) << ran.err;
  const std::vector<json> expected = LogOf(dir_ + "/whole.jsonl"), seen = LogOf(log);
  ASSERT_EQ(seen.size(), expected.size());
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i]["step"], i + 1);
    EXPECT_EQ(seen[i]["loss"], expected[i]["loss"]) << i;
  }
  EXPECT_EQ(json::parse(Run({"inspect", dir_ + "/state", "--json"}).out)["versions"], 1);
  // Ended in good order all have the same step, and go on from it.
  const Arguments more = arguments(dir_ + "/state", log, {"--resume"});
  for (const Ran& ran : Wait(Start({more, more}))) EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(LogOf(log).size(), 24u);
}

// Whatever differs between ranks is refused on all of them with exit code 2, before anything is touched.
TEST_F(RanksTest, PartsOfTwoStepsAreRefusedByEveryVerb) {
  const std::string kept = dir_ + "/kept", newest = kept + "/step-00000004";
  const Arguments two = Small(
      dir_ + "/state", {"--batch", "2", "--steps", "4", "--checkpoint-dir", kept, "--checkpoint-every", "2"});
  for (const Ran& ran : Wait(Start({two, two}))) ASSERT_EQ(ran.code, 0) << ran.err;
  std::filesystem::copy(
      kept + "/step-00000002/rank-1", newest + "/rank-1",
      std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  for (const Arguments& arguments :
       {Arguments{"inspect", newest}, Arguments{"inspect", newest, "--json"},
        Arguments{"verify", newest, "--quiet"},
        Arguments{"export", newest, dir_ + "/out.safetensors", "--quiet"},
        Small(dir_ + "/one", {"--batch", "4", "--steps", "6", "--checkpoint-dir", kept, "--resume"})}) {
    const Ran ran = Run(arguments);
    EXPECT_EQ(ran.code, 1) << arguments.front() << ": " << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("rank-1 is of step 2, and ")) << arguments.front();
    EXPECT_THAT(ran.err, HasSubstr("rank-0 of step 4")) << arguments.front();
  }
}

TEST_F(RanksTest, WhatDiffersIsNamedOnAllRanksBeforeAnythingIsMade) {
  std::string other = ReadFile(text_);
  other[other.size() / 3] ^= 1;
  WriteFile(dir_ + "/other", other);                  // a byte of it
  WriteFile(dir_ + "/held", other.substr(0, 700));    // 21 windows
  WriteFile(dir_ + "/longer", other.substr(0, 900));  // 28
  WriteFile(dir_ + "/clips", R"({"gradient_clipping": 0.5})");
  WriteFile(dir_ + "/decays", R"({"gradient_clipping": 0.25})");
  const std::string state = dir_ + "/state";
  const Arguments arguments = Small(state, {"--steps", "4", "--batch", "2"});
  struct Case {
    Arguments first, second;
    std::vector<const char*> named;
  };
  // Another text in place of the text: two would be mixed.
  const auto with = [&](const Arguments& more) {
    if (more.empty() || more[0] != "--data") return arguments + more;
    Arguments all = arguments;
    *std::find(all.begin(), all.end(), text_) = more[1];
    return all;
  };
  for (const Case& each : std::vector<Case>{
           {{"--eval-data", dir_ + "/held"},
            {"--eval-data", dir_ + "/longer"},
            {"--eval-data.", "on rank 1 and"}},
           {{}, {"--data", dir_ + "/other"}, {"--data.content is", "on rank 1 and"}},
           {{}, {"--data", dir_ + "/missing"}, {dir_.c_str(), "missing"}},
           {{}, {"--seed", "2"}, {"--seed is 2 on rank 1"}},
           {{"--overwrite"}, {"--resume"}, {"--overwrite is not on rank 1, and true on rank 0"}},
           {{"--eval-data", dir_ + "/held"},
            {"--eval-data", dir_ + "/held", "--eval-every", "2"},
            {"--eval-every"}},
           {{"--rank-timeout", "60"},
            {"--rank-timeout", "60", "--accumulate", "2"},
            {"--accumulate is 2 on rank 1"}},
       }) {
    SCOPED_TRACE(each.named[0]);
    for (const Ran& ran : Wait(Start({with(each.first), with(each.second)}))) {
      EXPECT_EQ(ran.code, 2) << ran.err;
      EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
      EXPECT_THAT(ran.err, HasSubstr("rank 1"));
      for (const char* named : each.named) EXPECT_THAT(ran.err, HasSubstr(named));
    }
    EXPECT_FALSE(std::filesystem::exists(state));
  }
  // One name for the config, and another file under it on each host.
  const std::string config = dir_ + "/config.json";
  const Arguments configured = arguments + Arguments{"--config", config};
  const std::vector<Arguments> hosts = {
      {"unshare", "--mount", "sh", "-c",
       "mount --bind " + dir_ + "/clips " + config + " && exec \"$0\" \"$@\""},
      {"unshare", "--mount", "sh", "-c",
       "mount --bind " + dir_ + "/decays " + config + " && exec \"$0\" \"$@\""}};
  WriteFile(config, "{}");
  if (geteuid() != 0 || std::system("unshare --mount true 2>/dev/null") != 0) return;
  for (const Ran& ran : Wait(StartRanks(dir_, {configured, configured}, {.launchers = hosts}))) {
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("clip is 0.25 on rank 1 and 0.5 on rank 0"));
  }
}

TEST_F(RanksTest, ARefusedStartLeavesNoDirectoryBehind) {
  const std::string state = dir_ + "/new/state", kept = dir_ + "/kept";
  for (const Arguments& more :
       {Arguments{"--host-memory", "1MiB"}, Arguments{"--report", dir_ + "/none/report"},
        Arguments{"--checkpoint-dir", kept, "--host-memory", "1MiB"}}) {
    const Arguments refused = Small(state, Arguments{"--steps", "2"} + more);
    for (const Ran& ran : Wait(Start({refused, refused}))) EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_FALSE(std::filesystem::exists(dir_ + "/new")) << more[0];
    EXPECT_FALSE(std::filesystem::exists(kept)) << more[0];
  }
  // What was there stays.
  std::filesystem::create_directories(state);
  const Arguments refused = Small(state, {"--steps", "2", "--host-memory", "1MiB"});
  for (const Ran& ran : Wait(Start({refused, refused}))) EXPECT_EQ(ran.code, 2) << ran.err;
  EXPECT_TRUE(std::filesystem::is_empty(state));
}

// Ranks know each other by a secret: of their state directory, for its owner alone, or of the environment.
TEST_F(RanksTest, RanksKnowEachOtherByASecretAndRefuseOthers) {
  const std::string state = dir_ + "/state", given = dir_ + "/given";
  const Arguments arguments = Small(state, {"--steps", "2"});
  for (const Ran& ran : Wait(Start({arguments, arguments}))) EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(std::filesystem::status(state + "/.penstock.ranks-secret").permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  // The same one for all in the environment, and no file is needed.
  const auto with = [](const std::string& secret) {
    return Arguments{"env", "PENSTOCK_RANKS_SECRET=" + secret};
  };
  const Arguments other = Small(given, {"--steps", "2"});
  const Arguments known = with("the secret of this run");
  for (const Ran& ran : Wait(StartRanks(dir_, {other, other}, {.launchers = {known, known}})))
    EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_FALSE(std::filesystem::exists(given + "/.penstock.ranks-secret"));
  // Another one, and a file that others may read.
  const Arguments missed = other + Arguments{"--overwrite", "--rank-timeout", "3"};
  const std::vector<Ran> ranks =
      Wait(StartRanks(dir_, {missed, missed}, {.launchers = {known, with("the secret of another")}}));
  EXPECT_EQ(ranks[1].code, 2);
  EXPECT_THAT(ranks[1].err, HasSubstr("do not know one secret: start all ranks with one --state-dir"));
  EXPECT_EQ(ranks[0].code, 1);
  EXPECT_THAT(ranks[0].err,
              HasSubstr("1 connections were refused, which did not know the secret of this run"));
  std::filesystem::permissions(state + "/.penstock.ranks-secret", std::filesystem::perms::group_read,
                               std::filesystem::perm_options::add);
  for (const Ran& ran : Wait(Start({arguments, arguments}))) {
    EXPECT_NE(ran.code, 0);
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("chmod 600"));
  }
}

// Processors of several kinds train together, and a line says what that means.
TEST_F(RanksTest, UnlikeProcessorsTrainTogether) {
  Arguments arguments = Small(dir_ + "/state", {"--steps", "2"});
  arguments.erase(std::find(arguments.begin(), arguments.end(), "--quiet"));
  const RankHosts hosts = {.launchers = {{"env"}, {"env", "PENSTOCK_SIMD=portable"}}};
  const std::vector<Ran> ranks = Wait(StartRanks(dir_, {arguments, arguments}, hosts));
  for (const Ran& ran : ranks) EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ranks[0].out, HasSubstr("unlike processors: rank 1 computes with "));
}

// A long evaluation keeps no stop waiting: all ranks end it after the same batch.
TEST_F(RanksTest, ASignalDuringAnEvaluationStopsAllOfThem) {
  const std::string held_out = dir_ + "/held-out", state = dir_ + "/state", log = dir_ + "/log.jsonl";
  std::string text = ReadFile(text_);
  while (text.size() < (16u << 20)) text += text;  // half a million windows: longer than anybody waits
  WriteFile(held_out, text);
  const Arguments arguments = Small(state, {"--steps", "2", "--eval-data", held_out, "--log", log});
  std::vector<Program> programs = Start({arguments, arguments});
  ASSERT_TRUE(WaitForLines(log, 2)) << "the last step is committed, and what is left is the evaluation";
  programs[1].Signal(SIGTERM);
  for (const Ran& ran : Wait(std::move(programs))) EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(LogOf(log).size(), 2u) << "no evaluation was finished";
}

// --check says what one of several ranks would be told, and needs none of the others for it.
TEST_F(RanksTest, ACheckCountsTheRanks) {
  const std::string config = dir_ + "/config.json";
  WriteFile(config, R"({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2})");
  const Arguments arguments = Small(dir_ + "/state", {"--config", config, "--check"});
  const auto check = [&](const Arguments& ranks) {
    return Program(dir_, arguments, Arguments{"env"} + ranks).Wait();
  };
  const Arguments meeting = {"MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + std::to_string(tests::FreePort()),
                             "RANK=1", "LOCAL_RANK=1"};
  const Ran alone = check({}), three = check(meeting + Arguments{"WORLD_SIZE=3"});
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_EQ(three.code, 0) << three.err;
  EXPECT_THAT(three.out, HasSubstr("the flags and the config are right"));
  EXPECT_NE(three.out, alone.out) << "a rank of three has a third of the state";
  const Ran two = check(meeting + Arguments{"WORLD_SIZE=2"});
  EXPECT_EQ(two.code, 2);
  EXPECT_THAT(two.err, HasSubstr("a train batch of 6 does not divide by 2 ranks"));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/state"));
}

// The disk of one rank has no room for its commit: all end with its line, and with room all go on.
TEST_F(RanksTest, AFullDiskOfOneRankEndsAllAndWithRoomTheyGoOn) {
  // Without extents nothing is reserved: state is written when it is.
  const aio::LoopDevice disk({.bytes = 32 << 20, .extents = false, .journal = false});
  if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
  const Arguments steps = {"--steps", "30"};
  const Arguments whole = Small(dir_ + "/whole", steps + Arguments{"--log", dir_ + "/whole.jsonl"});
  for (const Ran& ran : Wait(Start({whole, whole}))) ASSERT_EQ(ran.code, 0) << ran.err;
  const std::string state = dir_ + "/state", log = dir_ + "/log.jsonl";
  std::filesystem::create_directories(state);
  std::filesystem::create_directories(disk.directory() + "/part");
  std::filesystem::create_directory_symlink(disk.directory() + "/part", state + "/rank-1");
  const Arguments arguments = Small(state, steps + Arguments{"--log", log});
  std::vector<Program> programs = Start({arguments, arguments});
  ASSERT_TRUE(disk.Fill());
  for (const Ran& ran : Wait(std::move(programs))) {
    EXPECT_EQ(ran.code, 1) << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("rank 1"));
    EXPECT_THAT(ran.err, HasSubstr("rank-1"));
  }
  disk.Free();
  const Arguments rest = arguments + Arguments{"--resume"};
  for (const Ran& ran : Wait(Start({rest, rest}))) ASSERT_EQ(ran.code, 0) << ran.err;
  const std::vector<json> expected = LogOf(dir_ + "/whole.jsonl"), seen = LogOf(log);
  ASSERT_EQ(seen.size(), expected.size());
  for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i]["loss"], expected[i]["loss"]) << i;
}

// Rank 0 keeps the meeting point: while it answers nobody, the others cannot even ask who failed.
TEST_F(RanksTest, AStoppedRankZeroIsNamedWhileItIsStopped) {
  const std::string log = dir_ + "/log.jsonl";
  const Arguments arguments =
      Small(dir_ + "/state", {"--steps", "100000", "--log", log, "--rank-timeout", "3"});
  std::vector<Program> programs = Start({arguments, arguments, arguments});
  ASSERT_TRUE(WaitForLines(log, 3));
  programs[0].Signal(SIGSTOP);
  for (const size_t k : {1u, 2u}) {
    ASSERT_TRUE(programs[k].EndsWithin(60)) << "rank " << k << " waits for ever";
    const Ran ran = programs[k].Wait();
    EXPECT_EQ(ran.code, 1);
    EXPECT_THAT(ran.err, HasSubstr("rank 0 of 3 has not answered for 3 s"));
  }
  programs[0].Signal(SIGCONT);
  EXPECT_EQ(programs[0].Wait().code, 1);
}

}  // namespace
}  // namespace penstock::tools::ranks_cli_test
