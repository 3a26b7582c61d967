// What a start may remove: what it was told to replace, as it was then, and nothing that it could not look
// at.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "base/file_lock.h"
#include "tests/tools/penstock_state.h"

namespace penstock::tools::penstock_keeping_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using namespace testing_support;

class KeepingTest : public ProgramTest {
 protected:
  Arguments Small(const std::string& state, const Arguments& more) const {
    return Train(state, Arguments{"--seq", "32", "--batch", "1"} + more);
  }
  json Inspect(const std::string& directory) {
    const Ran ran = Run({"inspect", directory, "--json"});
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.code == 0 ? json::parse(ran.out) : json();
  }
  static std::set<std::string> Names(const std::string& directory) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory))
      names.insert(entry.path().filename());
    return names;
  }
};

// An error of the disk while the checkpoints are looked for is none that says that there are none.
TEST_F(KeepingTest, AResumeThatCannotSeeTheCheckpointsRemovesNone) {
  const std::string kept = dir_ + "/kept", note = dir_ + "/note";
  const Arguments arguments = Small(dir_ + "/state", {"--offload", "cpu", "--checkpoint-dir", kept});
  ASSERT_EQ(Run(arguments + Arguments{"--steps", "3", "--checkpoint-every", "1"}).code, 0);
  const std::set<std::string> before = Names(kept);
  ASSERT_EQ(before.size(), 4u) << "three, and latest";
  struct Failure {
    const char* call;
    std::string path;
    int when;
  };
  const std::string newest = kept + "/step-00000003/penstock.store";
  for (const Failure& failure : {Failure{"readdir", kept, 1},
                                 {"readdir", kept, 4},
                                 {"readdir", kept, 9},
                                 {"readdir", kept, 16},
                                 {"open", kept, 1},
                                 {"open", kept, 2},
                                 {"stat", newest, 1},
                                 {"stat", newest, 3},
                                 {"stat", kept, 2}}) {
    std::filesystem::remove(note);
    Program program(
        dir_, arguments + Arguments{"--resume", "--steps", "3"},
        {"env", std::string("LD_PRELOAD=") + PENSTOCK_FAILING_CALLS, std::string("FAIL_CALL=") + failure.call,
         "FAIL_PATH=" + failure.path, "FAIL_WHEN=" + std::to_string(failure.when), "FAIL_NOTE=" + note});
    const Ran ran = program.Wait();
    SCOPED_TRACE(std::string(failure.call) + " " + failure.path + " " + std::to_string(failure.when));
    EXPECT_EQ(Names(kept), before);
    ASSERT_TRUE(std::filesystem::exists(note)) << "the call was never made: " << ran.err;
    EXPECT_THAT(ran.err, Not(HasSubstr("starting over")));
    if (ran.code == 0) continue;  // it was of no consequence
    EXPECT_TRUE(ran.code == 1 || ran.code == 2) << ran.code << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, AllOf(HasSubstr(kept), HasSubstr("Input/output error")));
  }
  EXPECT_EQ(Run(arguments + Arguments{"--resume", "--steps", "4"}).code, 0);
  EXPECT_EQ(Inspect(kept)["step"], 4);
}

// Nor is one while a rank's part of a checkpoint is looked for, whichever error it is.
TEST_F(KeepingTest, AResumeThatCannotSeeARanksPartDoesNotStartOver) {
  const std::string state = dir_ + "/state", kept = dir_ + "/kept", note = dir_ + "/note",
                    part = kept + "/rank-1", store = part + "/penstock.store";
  ASSERT_EQ(Run(Small(state, {"--steps", "1"})).code, 0);
  std::filesystem::create_directories(part);
  std::filesystem::rename(state + "/penstock.store", store);
  std::filesystem::remove_all(state);
  const Arguments arguments =
      Small(state, {"--offload", "cpu", "--checkpoint-dir", kept, "--resume", "--steps", "1"});
  const Ran missing = Run(arguments);
  EXPECT_EQ(missing.code, 1) << missing.err;
  EXPECT_THAT(missing.err, HasSubstr("the part of rank 0"));
  for (const int error : {EIO, ENOMEM, EMFILE, EINTR}) {
    std::filesystem::remove(note);
    Program program(
        dir_, arguments,
        {"env", std::string("LD_PRELOAD=") + PENSTOCK_FAILING_CALLS, "FAIL_CALL=open", "FAIL_PATH=" + store,
         "FAIL_WHEN=1", "FAIL_NOTE=" + note, "FAIL_ERROR=" + std::to_string(error)});
    const Ran ran = program.Wait();
    SCOPED_TRACE(error);
    ASSERT_TRUE(std::filesystem::exists(note)) << "the call was never made: " << ran.err;
    EXPECT_THAT(ran.err, AllOf(HasSubstr(store), Not(HasSubstr("starting over"))));
    EXPECT_TRUE(ran.code == 1 || ran.code == 2) << ran.code << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_EQ(Names(kept), (std::set<std::string>{"rank-1"}));
  }
}

// Something of somebody else's in a checkpoint would keep its directory: it is found before anything is
// replaced.
TEST_F(KeepingTest, AnOverwriteBesideSomethingElseInACheckpointReplacesNothing) {
  const std::string state = dir_ + "/state", kept = dir_ + "/kept";
  const Arguments arguments =
      Small(state, {"--checkpoint-dir", kept, "--checkpoint-every", "2", "--checkpoint-keep", "3"});
  ASSERT_EQ(Run(arguments + Arguments{"--steps", "4"}).code, 0);
  const std::set<std::string> before = Names(kept);
  for (const char* name : {"/notes.txt", "/evaluations"}) {
    const std::string strange = kept + "/step-00000004" + name;
    name[1] == 'n' ? WriteFile(strange, "4") : (void)std::filesystem::create_directory(strange);
    const Ran refused = Run(arguments + Arguments{"--overwrite", "--steps", "1"});
    EXPECT_EQ(refused.code, 2);
    EXPECT_EQ(Lines(refused.err).size(), 1u) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr(strange));
    EXPECT_EQ(Names(kept), before);
    EXPECT_EQ(Inspect(state)["step"], 4);
    EXPECT_EQ(Inspect(kept)["step"], 4);
    std::filesystem::remove(strange);
  }
  EXPECT_EQ(Run(arguments + Arguments{"--overwrite", "--steps", "1"}).code, 0);
  EXPECT_EQ(Inspect(state)["step"], 1);
}

// Both want to replace what was there when they were started. The later one waits for the lock, and finds
// another run there than it was told to replace, whether that one is finished or not.
TEST_F(KeepingTest, OfTwoThatOverwriteAtOneInstantOneHasTheDirectory) {
  for (const char* offload : {"nvme", "cpu"}) {
    const std::string state = dir_ + "/" + offload;
    const Arguments arguments = Small(state, {"--offload", offload});
    ASSERT_EQ(Run(arguments + Arguments{"--steps", "1"}).code, 0);
    for (int round = 0; round < 2; ++round) {  // tests/faults has the campaign
      // By an exec: loading the program takes longer than it is from one start to the other.
      Program first(dir_, arguments + Arguments{"--overwrite", "--steps", "2"}, {"env"});
      Program second(dir_, arguments + Arguments{"--overwrite", "--steps", "3"}, {"env"});
      const Ran two = first.Wait(), three = second.Wait();
      const Ran& refused = two.code == 0 ? three : two;
      EXPECT_EQ(std::min(two.code, three.code), 0) << two.err << three.err;
      EXPECT_EQ(refused.code, 2) << offload << ": " << two.err << three.err;
      EXPECT_EQ(Lines(refused.err).size(), 1u) << refused.err;
      EXPECT_EQ(Inspect(state)["step"], two.code == 0 ? 2 : 3);
    }
    // Afterwards it is there to be replaced.
    EXPECT_EQ(Run(arguments + Arguments{"--overwrite", "--steps", "1"}).code, 0);
    EXPECT_EQ(Inspect(state)["step"], 1);
  }
}

// What is in memory is not durable before its first checkpoint is: until then the old ones are all there is.
TEST_F(KeepingTest, AnOverwriteInMemoryKeepsTheOldCheckpointsUntilItHasOne) {
  const std::string kept = dir_ + "/kept", log = dir_ + "/log",
                    store = kept + "/step-00000003/penstock.store";
  const Arguments arguments = Small(dir_ + "/state", {"--offload", "cpu", "--checkpoint-dir", kept});
  const Arguments overwrite = arguments + Arguments{"--overwrite", "--log", log};
  ASSERT_EQ(Run(arguments + Arguments{"--steps", "3", "--checkpoint-every", "1"}).code, 0);
  const std::set<std::string> before = Names(kept);
  {
    Program program(dir_, overwrite + Arguments{"--steps", "100000", "--checkpoint-every", "100000"});
    ASSERT_TRUE(WaitForLines(log, 3));
    program.Signal(SIGKILL);
    program.Wait();
  }
  std::filesystem::remove(log);  // of a run that left nothing else
  EXPECT_EQ(Inspect(kept)["step"], 3);
  // A refusal removes none: one of them is being read.
  for (const char* offload : {"cpu", "nvme"}) {
    const int fd = ::open(store.c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_TRUE(*TryLockFile(fd, store, LockMode::kShared));
    const Ran refused =
        Run(Small(dir_ + "/state", {"--offload", offload, "--checkpoint-dir", kept, "--overwrite", "--steps",
                                    "1", "--checkpoint-every", "1"}));
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr("step-00000003/penstock.store is in use"));
    ::close(fd);
    for (const std::string& name : before) EXPECT_TRUE(Names(kept).contains(name)) << offload << ": " << name;
  }
  EXPECT_EQ(Inspect(kept)["step"], 3);
  EXPECT_EQ(Run(overwrite + Arguments{"--steps", "2"}).code, 0);
  EXPECT_EQ(Names(kept), (std::set<std::string>{"step-00000002", "latest"}));
  EXPECT_EQ(Inspect(kept)["step"], 2);
}

// Checkpoints of the abandoned future stand where new ones would go: with a drive as without.
TEST_F(KeepingTest, GoingBackBesideNewerCheckpointsIsRefused) {
  for (const char* offload : {"nvme", "cpu"}) {
    const std::string state = dir_ + "/" + offload, kept = state + "-kept";
    const Arguments arguments =
        Small(state, {"--offload", offload, "--steps", "6", "--checkpoint-every", "2"});
    ASSERT_EQ(Run(arguments + Arguments{"--checkpoint-dir", kept}).code, 0);
    std::filesystem::remove_all(state);
    const Arguments back = {"--resume", "--checkpoint-dir", kept + "/step-00000002"};
    const Ran refused = Run(arguments + back);
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_THAT(refused.err,
                AllOf(HasSubstr("step-00000006, which is newer"), HasSubstr("--checkpoint-dir")));
    EXPECT_EQ(Names(kept).size(), 4u) << "three, and latest";
  }
  // Without new ones there, nothing is in the way.
  const Ran back = Run(Small(
      dir_ + "/nvme", {"--steps", "3", "--resume", "--checkpoint-dir", dir_ + "/nvme-kept/step-00000002"}));
  EXPECT_EQ(back.code, 0) << back.err;
  EXPECT_EQ(Inspect(dir_ + "/nvme")["step"], 3);
  // A state that is behind them is no other case.
  const Ran behind = Run(Small(dir_ + "/nvme", {"--steps", "4", "--resume", "--checkpoint-every", "2",
                                                "--checkpoint-dir", dir_ + "/nvme-kept"}));
  EXPECT_EQ(behind.code, 2) << behind.err;
  EXPECT_THAT(behind.err, HasSubstr("step-00000006, which is newer"));
}

// A budget of wear is one of the run, not of the processes that could commit something.
TEST_F(KeepingTest, TheBudgetOfWearCountsWhatAKilledRunWroteBeforeItsFirstCheckpoint) {
  const std::string state = dir_ + "/state";
  const auto budget = [&](double terabytes) {
    WriteFile(dir_ + "/config.json",
              json{{"penstock", {{"wear_budget_tb", terabytes}, {"durability", "checkpoint"}}}}.dump());
  };
  const auto counted = [&] {
    return json::parse(ReadFile(state + "/.penstock.written"))["written_bytes"].get<int64_t>();
  };
  const Arguments arguments =
      Small(state, {"--config", dir_ + "/config.json", "--steps", "100000", "--checkpoint-dir",
                    dir_ + "/kept", "--checkpoint-every", "100000"});
  budget(1);
  int64_t before = 0;
  for (int life = 0; life < 3; ++life) {
    Program program(dir_, life == 0 ? arguments : arguments + Arguments{"--resume"});
    ASSERT_TRUE(WaitForFile(state + "/.penstock.written"));
    for (int i = 0; i < 12000 && counted() <= before + (1 << 20); ++i) ::usleep(5000);
    program.Signal(SIGKILL);
    program.Wait();
    ASSERT_GT(counted(), before) << "life " << life;
    before = counted();
  }
  // Used up: a start writes nothing to find that out.
  budget(static_cast<double>(before) * 1e-12 / 2);
  for (int i = 0; i < 2; ++i) {
    const Ran refused = Run(arguments + Arguments{"--resume"});
    EXPECT_EQ(refused.code, 1);
    EXPECT_THAT(refused.err, HasSubstr("penstock.wear_budget_tb: the run has written"));
    EXPECT_LT(refused.written_bytes, 1 << 20);
    EXPECT_EQ(counted(), before);
  }
  WriteFile(state + "/.penstock.written", "{}");
  const Ran damaged = Run(arguments + Arguments{"--resume"});
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.err, AllOf(HasSubstr(".penstock.written"), HasSubstr("remove it")));
  // Another run has a count of its own.
  budget(1);
  const Ran anew = Run(Small(state, {"--config", dir_ + "/config.json", "--steps", "1", "--overwrite"}));
  EXPECT_EQ(anew.code, 0) << anew.err;
  // A start that is refused leaves the count of the run that it was to replace.
  WriteFile(state + "/.penstock.written", R"({"run_id": "one", "written_bytes": 12345})");
  const std::string store = state + "/penstock.store";
  const int fd = ::open(store.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_TRUE(*TryLockFile(fd, store, LockMode::kShared));
  const Ran held = Run(Small(state, {"--config", dir_ + "/config.json", "--steps", "1", "--overwrite"}));
  EXPECT_EQ(held.code, 2) << held.err;
  ::close(fd);
  EXPECT_EQ(counted(), 12345);
}

}  // namespace
}  // namespace penstock::tools::penstock_keeping_test
