// Wrong input to the `penstock` program: one clear line on stderr, the right exit code, nothing done.
#include <sys/statfs.h>

#include <regex>

#include "gmock/gmock.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::penstock_flags_test {
namespace {

using testing::HasSubstr;
using namespace testing_support;

struct Case {
  Arguments arguments;
  int code;
  std::vector<std::string> says;  // all of them stand in the line
};

class FlagsTest : public ProgramTest {
 protected:
  void Check(const std::vector<Case>& cases) {
    std::vector<Arguments> arguments;
    for (const Case& each : cases) arguments.push_back(each.arguments);
    const std::vector<Ran> ran = RunAll(arguments);
    for (size_t i = 0; i < cases.size(); ++i) {
      std::string command;
      for (const std::string& word : cases[i].arguments) command += " " + word;
      SCOPED_TRACE("penstock" + command);
      EXPECT_EQ(ran[i].code, cases[i].code) << ran[i].err;
      EXPECT_EQ(Lines(ran[i].err).size(), 1u) << ran[i].err;
      EXPECT_EQ(ran[i].err.rfind("penstock", 0), 0u) << ran[i].err;
      for (const std::string& text : cases[i].says) EXPECT_THAT(ran[i].err, HasSubstr(text));
    }
  }
};

TEST_F(FlagsTest, NumbersThatMakeNoSense) {
  const std::string state = dir_ + "/state";
  std::vector<Case> cases;
  for (const auto& [flag, value] : std::vector<std::pair<std::string, std::string>>{{"--steps", "0"},
                                                                                    {"--steps", "-4"},
                                                                                    {"--steps", "many"},
                                                                                    {"--batch", "0"},
                                                                                    {"--batch", "1.5"},
                                                                                    {"--accumulate", "0"},
                                                                                    {"--seq", "129"},
                                                                                    {"--lr", "nan"},
                                                                                    {"--lr", "-1"},
                                                                                    {"--warmup", "-1"},
                                                                                    {"--clip", "nan"},
                                                                                    {"--weight-decay", "-2"},
                                                                                    {"--seed", "-1"},
                                                                                    {"--vocab", "0"},
                                                                                    {"--host-memory", "-5"},
                                                                                    {"--host-memory", "lots"},
                                                                                    {"--host-memory", "0"},
                                                                                    {"--offload", "disk"},
                                                                                    {"--device", "tpu"}}) {
    cases.push_back({Train(state, {flag, value}), 2, {flag}});
  }
  const Arguments bare = {"train", "--data", text_, "--state-dir", state};
  cases.push_back({bare + Arguments{"--threads", "0"}, 2, {"--threads 0", "between"}});
  for (const char* const verb : {"train", "plan"}) {
    cases.push_back({{verb, "--data", text_, "--state-dir", state, "--host-memory", "0"},
                     2,
                     {"--host-memory: must be a size such as \"4GiB\" of 1 or more, not \"0\""}});
  }
  cases.push_back({bare + Arguments{"--dtype", "int3"}, 2, {"--dtype int3", "bf16"}});
  for (const char* const value : {"auto", "x", "nan"}) {
    const std::string flag = "--zero-quantized-weights";
    cases.push_back({bare + Arguments{flag + "=" + value}, 2, {flag, value}});
  }
  cases.push_back({bare + Arguments{"--model", "gpt-9t"}, 2, {"gpt-9t", "gpt-125m"}});
  cases.push_back({Train(state, {"--eval-data", text_, "--eval-every", "0"}), 2, {"--eval-every 0"}});
  Check(cases);
  EXPECT_FALSE(std::filesystem::exists(state));
}

TEST_F(FlagsTest, PlacesThatCannotBeWrittenToAreToldByCheckAndPlanAsByTheTraining) {
  const std::string file = dir_ + "/file", nothing = dir_ + "/nothing";
  WriteFile(file, "");
  std::filesystem::create_symlink(dir_ + "/not-there", nothing);
  std::vector<Case> cases;
  for (const Arguments& check : {Arguments{}, Arguments{"--check"}}) {
    for (const char* const flag : {"--report", "--log", "--trace", "--prometheus"}) {
      const std::string below = dir_ + "/nowhere/file", in_file = file + "/file";
      cases.push_back(
          {Train(dir_ + "/state", check + Arguments{flag, below}), 2, {flag, below, "is not there"}});
      cases.push_back(
          {Train(dir_ + "/state", check + Arguments{flag, dir_}), 2, {flag, "it is a directory"}});
      cases.push_back({Train(dir_ + "/state", check + Arguments{flag, in_file}), 2, {flag, in_file}});
    }
    cases.push_back({Train(file, check), 2, {"--state-dir " + file, "is not a directory"}});
    cases.push_back({Train(file + "/a/b", check), 2, {"--state-dir " + file + "/a/b", file + ": it is not"}});
    cases.push_back({Train(nothing + "/a", check), 2, {"--state-dir " + nothing, "is a link to nothing"}});
    cases.push_back({Train(dir_ + "/state",
                           check + Arguments{"--checkpoint-dir", file + "/kept", "--checkpoint-every", "2"}),
                     2,
                     {"--checkpoint-dir " + file + "/kept", "is not a directory"}});
  }
  const Arguments plan = {"plan", "--model", "gpt-tiny", "--no-probe"};
  for (const char* const flag : {"--trace", "--html"})
    cases.push_back({plan + Arguments{flag, dir_ + "/nowhere/file"}, 2, {flag, "is not there"}});
  cases.push_back({plan + Arguments{"--state-dir", file}, 2, {"--state-dir " + file, "is not a directory"}});
  Check(cases);
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/state"));
}

TEST_F(FlagsTest, FlagsThatDoNotExist) {
  const std::string state = dir_ + "/state";
  Check({{Train(state, {"--bathc", "3"}), 2, {"--bathc", "did you mean \"--batch\""}},
         {{"trian"}, 2, {"trian", "did you mean \"train\""}},
         {{"train"}, 2, {"--data"}},
         {Train(state, {"--resume", "--overwrite"}), 2, {"--resume", "--overwrite"}},
         {{"plan", "--jsn"}, 2, {"--jsn", "--json"}},
         {{"verify"}, 2, {"DIR"}},
         {{"inspect", "--josn", state}, 2, {"--josn", "--json"}},
         {{"export", state}, 2, {"OUT"}},
         {{"sample", state, "--tokens", "0"}, 2, {"--tokens 0"}},
         {{"sample", state, "--temperature", "-1"}, 2, {"--temperature -1"}},
         {{"sample", state, "--top-k", "-1"}, 2, {"--top-k -1"}}});
  EXPECT_FALSE(std::filesystem::exists(state));
  for (const char* verb : {"train", "plan", "sample", "export", "inspect", "verify", "estimate", "env"}) {
    const Ran help = Run({verb, "--help"});
    EXPECT_EQ(help.code, 0) << verb;
    EXPECT_EQ(help.err, "");
    EXPECT_GT(Lines(help.out).size(), 3u) << verb;
  }
}

TEST_F(FlagsTest, DataThatCannotBeLearnt) {
  const std::string state = dir_ + "/state";
  WriteFile(dir_ + "/empty", "");
  WriteFile(dir_ + "/short", "too short");
  const auto with = [&](const std::string& data) {
    return Arguments{"train", "--model", "gpt-tiny", "--state-dir", state, "--data", data};
  };
  Check({{with(dir_ + "/missing"), 2, {dir_ + "/missing", "No such file"}},
         {with(dir_ + "/empty"), 2, {dir_ + "/empty", "empty"}},
         {with(dir_ + "/short"), 2, {dir_ + "/short", "9 tokens", "129"}},
         {with(dir_), 2, {dir_}}});
  EXPECT_FALSE(std::filesystem::exists(state));
}

// What a run writes at its end, it takes away at its beginning.
TEST_F(FlagsTest, OneFileForTwoThings) {
  const std::string state = dir_ + "/state", other = dir_ + "/other-name", text = ReadFile(text_);
  std::filesystem::create_symlink(text_, other);
  std::vector<Case> cases;
  for (const char* flag : {"--report", "--log", "--trace", "--prometheus"}) {
    cases.push_back({Train(state, {flag, text_}), 2, {flag, text_, "that is read"}});
    cases.push_back({Train(state, {flag, other}), 2, {flag, other, "that is read"}});
  }
  const std::string weights = dir_ + "/weights";
  WriteFile(weights, "weights");
  cases.push_back({Train(state, {"--init-from", weights, "--log", weights}), 2, {weights, "that is read"}});
  for (const char* flag : {"--html", "--trace"}) {
    cases.push_back({{"plan", "--data", text_, flag, text_}, 2, {flag, text_, "that is read"}});
    cases.push_back({{"plan", "--init-from", weights, flag, weights}, 2, {flag, weights, "that is read"}});
  }
  const std::string twice = dir_ + "/new", again = dir_ + "/./new";
  cases.push_back({Train(state, {"--report", twice, "--trace", again}), 2, {twice, again, "are one file"}});
  Check(cases);
  EXPECT_EQ(ReadFile(text_), text);
  EXPECT_EQ(ReadFile(weights), "weights");
  EXPECT_FALSE(std::filesystem::exists(twice));
}

TEST_F(FlagsTest, DirectoriesThatCannotHoldState) {
  std::vector<Case> cases = {
      {Train(text_ + "/below"), 2, {text_ + "/below", text_ + ": it is not a directory"}},
      {{"verify", dir_ + "/nothing"}, 1, {dir_ + "/nothing"}},
      {{"inspect", dir_}, 1, {dir_}},
      {{"export", dir_, dir_ + "/out.safetensors"}, 1, {dir_}},
      {{"sample", dir_}, 1, {dir_}},
  };
  struct statfs info {};
  constexpr long kTmpfs = 0x01021994;
  const std::string tmpfs = "/dev/shm/penstock_flags_test." + std::to_string(::getpid());
  if (::statfs("/dev/shm", &info) == 0 && info.f_type == kTmpfs) {
    cases.push_back({Train(tmpfs), 2, {tmpfs, "tmpfs", "local disk"}});
  }
  Check(cases);
  EXPECT_FALSE(std::filesystem::exists(tmpfs + "/penstock.store"));
  std::filesystem::remove_all(tmpfs);
}

TEST_F(FlagsTest, DirectoriesOfAnotherRun) {
  const std::string state = dir_ + "/state";
  ASSERT_EQ(Run(Train(state, {"--steps", "2"})).code, 0);
  const std::string before = ReadFile(state + "/penstock.store");
  const auto resume = [&](Arguments more) {
    return Arguments{"train", "--data", text_, "--state-dir", state, "--resume", "--quiet"} + more;
  };
  Check(
      {{Train(state), 2, {state, "resume", "overwrite"}},
       {resume({"--model", "gpt-small"}), 2, {state}},
       {resume({"--seed", "2"}), 2, {"--seed 2", "1"}},
       {resume({"--dtype", "bf16"}), 2, {"bf16", "fp32"}},
       {resume({"--optimizer-states", "8bit"}), 2, {"--optimizer-states \"8bit\"", "created with \"fp32\""}},
       {resume({"--vocab", "300"}), 2, {"--vocab 300", "created with 0"}},
       {resume({"--seq", "129"}), 2, {"--seq 129", "context"}},
       {resume({"--lr", "-1"}), 2, {"--lr: must be a number from 0"}},
       {{"train", "--model", "gpt-tiny", "--data", text_, "--offload", "cpu", "--steps", "2", "--resume"},
        2,
        {"penstock-state/checkpoints holds none", "--checkpoint-dir"}}});
  EXPECT_TRUE(ReadFile(state + "/penstock.store") == before) << "a refused run has changed the state";
}

TEST_F(FlagsTest, BudgetTooSmallNamesTheLeastAndTheLeastWorks) {
  const Ran refused = Run(Train(dir_ + "/small", {"--host-memory", "1MiB"}));
  EXPECT_EQ(refused.code, 2);
  ASSERT_EQ(Lines(refused.err).size(), 1u) << refused.err;
  std::smatch found;
  ASSERT_TRUE(std::regex_search(refused.err, found, std::regex("least that works is ([0-9]+) bytes")))
      << refused.err;
  const int64_t least = std::stoll(found[1]);
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/small"));
  const std::vector<Ran> ran =
      RunAll({Train(dir_ + "/small", {"--steps", "3", "--host-memory", std::to_string(least)}),
              Train(dir_ + "/smaller", {"--steps", "3", "--host-memory", std::to_string(least - 1)})});
  EXPECT_EQ(ran[0].code, 0) << ran[0].err;
  EXPECT_EQ(ran[1].code, 2) << ran[1].err;
}

// Updates and I/O need the cores that threads which only wait would spin on.
TEST_F(FlagsTest, ThreadsThatWaitSleepUnlessTheUserSaysOtherwise) {
  const auto shown = [this](const std::string& policy) {
    Program program(dir_, {"--version"}, {"env", "-u", "OMP_WAIT_POLICY", "OMP_DISPLAY_ENV=verbose", policy});
    return program.Wait().err;
  };
  EXPECT_THAT(shown("A=B"), HasSubstr("GOMP_SPINCOUNT = '0'"));
  EXPECT_THAT(shown("OMP_WAIT_POLICY=active"), testing::Not(HasSubstr("GOMP_SPINCOUNT = '0'")));
}

TEST_F(FlagsTest, TwoRunsInOneDirectory) {
  const std::string state = dir_ + "/state", log = dir_ + "/log";
  Program first(dir_, Train(state, {"--steps", "1000000", "--log", log}));
  ASSERT_TRUE(WaitForLines(log, 1));
  Check({{Train(state, {"--resume"}), 2, {state, "another"}},
         {Train(state, {"--overwrite"}), 2, {state, "another"}},
         {{"verify", state}, 2, {state, "another"}}});
  EXPECT_EQ(Run({"inspect", state}).code, 0) << "looking is allowed";
  first.Signal(SIGTERM);
  const Ran ran = first.Wait();
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(Run({"verify", state}).code, 0);
}

}  // namespace
}  // namespace penstock::tools::penstock_flags_test
