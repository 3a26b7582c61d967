// Disks that fill up, before a run and in the middle of it, on small file systems of loop devices: it stops
// at the last commit with one line that says what is missing, or goes on without what can wait; with room
// again it goes on to the bits of a run that never stopped.
#include <map>

#include "tests/aio/loop_device.h"
#include "tests/tools/penstock_state.h"

namespace penstock::tools::penstock_full_disk_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using namespace testing_support;

constexpr int kSteps = 30;

class FullDiskTest : public CliTest {
 protected:
  Arguments Steps(const std::string& state, const Arguments& more = {}) const {
    return Train(state, Arguments{"--steps", std::to_string(kSteps), "--seq", "32"} + more);
  }
  // The losses of that run on a disk with room.
  std::vector<std::string> Whole(const Arguments& more = {}) {
    const Ran ran = Run(Steps(dir_ + "/whole", Arguments{"--log", dir_ + "/whole.log"} + more));
    EXPECT_EQ(ran.code, 0) << ran.err;
    return Losses(dir_ + "/whole.log");
  }
  // Starts it and fills the disk as soon as there is a line in its log, before there are `before`.
  Ran RunWhileTheDiskFills(const aio::LoopDevice& disk, const Arguments& arguments, const std::string& log,
                           size_t before) {
    Program program(dir_, arguments);
    EXPECT_TRUE(WaitForLines(log, 1));
    program.Signal(SIGSTOP);
    EXPECT_TRUE(disk.Fill());
    EXPECT_LT(Lines(ReadFile(log)).size(), before) << "it was too fast";
    program.Signal(SIGCONT);
    return program.Wait();
  }
  void ExpectOneLine(const Ran& ran, const std::vector<std::string>& regexes) {
    EXPECT_EQ(ran.code, 1);
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    for (const std::string& regex : regexes) EXPECT_THAT(ran.err, ContainsRegex(regex));
  }
  static size_t Names(const std::string& directory) {
    size_t names = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) ++names;
    return names;
  }
};

TEST_F(FullDiskTest, TooLittleRoomIsRefusedBeforeAnythingIsMade) {
  const aio::LoopDevice disk({.bytes = 8 << 20});
  if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
  const size_t names = Names(disk.directory());
  ExpectOneLine(Run(Steps(disk.directory() + "/deep/state")), {disk.directory(), "free", "too little"});
  EXPECT_EQ(Names(disk.directory()), names);
}

TEST_F(FullDiskTest, AFileSizeLimitIsAnErrorAndNotASignal) {
  const auto limited = [&](const Arguments& arguments, const char* blocks) {
    return Program(dir_, arguments, {"sh", "-c", std::string("ulimit -f ") + blocks + "; exec \"$@\"", "sh"})
        .Wait();
  };
  const std::string state = dir_ + "/state";
  ExpectOneLine(limited(Steps(state), "8"), {state, "File too large", "ulimit -f"});
  ASSERT_EQ(Run(Steps(state)).code, 0);
  ExpectOneLine(limited({"export", state, dir_ + "/out"}, "8"), {dir_ + "/out", "File too large"});
}

// As one file and in shards, with room for some of them.
TEST_F(FullDiskTest, AnExportWithoutRoomForItLeavesTheOldOneAsItWas) {
  const aio::LoopDevice disk({.bytes = 8 << 20, .journal = false});
  if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
  const std::string state = dir_ + "/state", out = disk.directory() + "/out";
  ASSERT_EQ(Run(Train(state, {"--steps", "1", "--seq", "32"})).code, 0);
  std::filesystem::create_directory(out);
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(out))
      files[entry.path().filename()] = ReadFile(entry.path());
    return files;
  };
  for (const Arguments& cut : {Arguments{"--max-shard", "250000"}, Arguments{}}) {
    disk.Free();
    ASSERT_EQ(Run(Arguments{"export", state, out, "--quiet", "--overwrite"} + cut).code, 0);
    const auto before = contents();
    // Room for half of it.
    ASSERT_TRUE(disk.Fill());
    std::filesystem::resize_file(disk.directory() + "/filler",
                                 std::filesystem::file_size(disk.directory() + "/filler") - 400'000);
    ExpectOneLine(Run(Arguments{"export", state, out, "--quiet", "--overwrite"} + cut),
                  {out, "disk|No space"});
    EXPECT_TRUE(contents() == before);
  }
}

// State is reserved beforehand: the log is what finds no room, and checkpoints.
TEST_F(FullDiskTest, FullForTheLogItStopsAtTheLastCommitAndRoomLetsItGoOn) {
  const aio::LoopDevice disk({.bytes = 32 << 20});
  if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
  const std::string state = disk.directory() + "/state", log = disk.directory() + "/log";
  // The first block of the log holds some ten lines.
  const Arguments arguments = Steps(state, {"--log", log, "--report", dir_ + "/report"});
  const Ran full = RunWhileTheDiskFills(disk, arguments, log, 8);
  ExpectOneLine(full, {"log: .* [0-9]+ bytes .*--resume"});
  EXPECT_EQ(json::parse(ReadFile(dir_ + "/report"))["status"], "failed");
  ASSERT_EQ(Run({"verify", state, "--quiet"}).code, 0);
  const size_t logged = Lines(ReadFile(log)).size();
  EXPECT_LT(logged, static_cast<size_t>(kSteps));
  // Still without room: the same line again, and no harm.
  ExpectOneLine(Run(arguments + Arguments{"--resume"}), {"log: .* [0-9]+ bytes .*--resume"});
  disk.Free();
  const Ran rest = Run(arguments + Arguments{"--resume"});
  ASSERT_EQ(rest.code, 0) << rest.err;
  EXPECT_GE(json::parse(ReadFile(dir_ + "/report"))["resumed_from_step"].get<size_t>(), logged - 1);
  EXPECT_EQ(Losses(log), Whole());
}

TEST_F(FullDiskTest, WithoutRoomForACheckpointTrainingGoesOnAndSaysSo) {
  const aio::LoopDevice disk({.bytes = 8 << 20, .journal = false});
  if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
  const std::string kept = disk.directory() + "/kept";
  Arguments arguments = Train(
      dir_ + "/state", {"--steps", "6", "--seq", "32", "--checkpoint-dir", kept, "--checkpoint-every", "1"});
  arguments.erase(std::find(arguments.begin(), arguments.end(), "--quiet"));
  const Ran ran = Run(arguments);
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out + ran.err,
              AllOf(HasSubstr("no checkpoint of step 6: "), HasSubstr(" too little (make room")));
  EXPECT_EQ(Inspect(dir_ + "/state")["step"], 6);
  for (const auto& entry : std::filesystem::directory_iterator(kept)) {
    EXPECT_NE(entry.path().filename().string()[0], '.') << entry.path();
  }
  EXPECT_EQ(Run({"verify", kept, "--quiet"}).code, 0) << "those that are there are whole";
}

// One line says so, and the state is whole at its last commit.
TEST_F(FullDiskTest, ADriveThatGoesAwayWhileACheckpointIsCopiedToItCostsNoStep) {
  const std::vector<std::string> expected = Whole();
  for (const bool pulled : {false, true}) {
    SCOPED_TRACE(pulled ? "pulled" : "unmounted");
    aio::LoopDevice disk({.bytes = 64 << 20});
    if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
    const std::string kept = disk.directory() + "/kept", state = dir_ + (pulled ? "/pulled" : "/unmounted");
    const Arguments arguments = Steps(state, {"--log", state + ".log"});
    Program program(dir_, arguments + Arguments{"--checkpoint-dir", kept, "--checkpoint-every", "20"});
    ASSERT_TRUE(WaitForFile(kept + "/.step-00000020.partial"));
    program.Signal(SIGSTOP);
    ASSERT_FALSE(std::filesystem::exists(kept + "/step-00000020")) << "it was too fast";
    const bool gone = pulled ? disk.GoAway() : umount2(disk.directory().c_str(), MNT_DETACH) == 0;
    program.Signal(SIGCONT);
    const Ran ran = program.Wait();
    if (!gone) GTEST_SKIP() << "this file system cannot be shut down";
    EXPECT_LE(Lines(ran.err).size(), 2u) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(kept));
    EXPECT_EQ(Run({"verify", state, "--quiet"}).code, 0);
    const Ran rest = Run(arguments + Arguments{"--resume"});
    EXPECT_EQ(rest.code, 0) << rest.err;
    EXPECT_EQ(Losses(state + ".log"), expected);
    if (!pulled) disk.Mount();  // to be unmounted
  }
}

// State in memory: the last step is on no disk before it is kept.
TEST_F(FullDiskTest, WithoutADriveARunSaysWhatItCannotKeepAndKeepsWhatItCan) {
  aio::LoopDevice disk({.bytes = 32 << 20});
  if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
  const std::string full_log = disk.directory() + "/log", state = dir_ + "/state";
  const Arguments in_memory = {"--offload", "cpu"};
  // Full for the log: it stops, the step is kept with its lines, and room lets it go on.
  const Arguments logged = Steps(state, in_memory + Arguments{"--log", full_log});
  const Ran stopped = RunWhileTheDiskFills(disk, logged, full_log, 8);
  EXPECT_EQ(stopped.code, 1);
  EXPECT_THAT(Lines(stopped.err).back(), ContainsRegex("log: .* [0-9]+ bytes .*--resume"));
  EXPECT_LT(Inspect(state)["step"].get<int>(), kSteps);
  // Full at the start: refused before there is anything to lose.
  const std::string log = dir_ + "/log", kept = disk.directory() + "/kept";
  const Arguments arguments =
      Steps(dir_ + "/unused", in_memory + Arguments{"--log", log, "--checkpoint-dir", kept});
  ExpectOneLine(Run(arguments),
                {"last step needs .* are free|cannot be (made|locked): .*No space left", "--checkpoint-dir"});
  EXPECT_EQ(ReadFile(log), "");
  disk.Free();
  const Ran rest = Run(logged + Arguments{"--resume"});
  ASSERT_EQ(rest.code, 0) << rest.err;
  EXPECT_EQ(Losses(full_log), Whole());
  // Full at the end: exit code and line say what is lost.
  const Ran lost = RunWhileTheDiskFills(disk, arguments, log, 28);
  EXPECT_EQ(lost.code, 1);
  EXPECT_THAT(Lines(lost.err).back(),
              AllOf(HasSubstr("step 30 is lost with this process"), HasSubstr("No space left on device")));
}

// A file system that cannot reserve: the state's own files are what finds no room, in the middle of a step,
// when a checkpoint first keeps a version and the third slots are written. With `power` the disk says so no
// later than in the commit.
TEST_F(FullDiskTest, WhereStateIsSparseAStepFindsNoRoomAndNothingIsLost) {
  const std::vector<std::string> whole = Whole();
  for (const char* sync : {"process", "power"}) {
    SCOPED_TRACE(sync);
    aio::LoopDevice disk({.bytes = 48 << 20, .extents = false, .journal = false});
    if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
    const std::string state = disk.directory() + "/state", log = dir_ + "/" + sync + ".log",
                      config = dir_ + "/config.json", kept = dir_ + "/kept-" + sync;
    WriteFile(config, std::string(R"({"penstock": {"sync": ")") + sync + R"("}})");
    const Arguments arguments = Steps(
        state, {"--log", log, "--config", config, "--checkpoint-dir", kept, "--checkpoint-every", "12"});
    const Ran full = RunWhileTheDiskFills(disk, arguments, log, 12);
    ExpectOneLine(full, {state, "[0-9]+ bytes", "No space left on device",
                         "of the state's .* on disk [0-9.]+ MiB are missing, and .* are free",
                         "with room, --resume goes on from step [0-9]+"});
    const size_t logged = Lines(ReadFile(log)).size();
    EXPECT_GE(logged, 12u);
    EXPECT_LT(logged, static_cast<size_t>(kSteps));
    EXPECT_EQ(Run({"verify", state, "--quiet"}).code, 0);
    EXPECT_GE(Inspect(state)["step"].get<size_t>(), logged);
    disk.Free();
    const Ran rest = Run(arguments + Arguments{"--resume"});
    ASSERT_EQ(rest.code, 0) << rest.err;
    EXPECT_EQ(Losses(log), whole);
    EXPECT_EQ(Run({"verify", state, "--quiet"}).code, 0);
  }
}

// Inputs of stages that go to the drive have room of their own, taken at the start and given back at the end.
TEST_F(FullDiskTest, RoomForSpilledInputsIsCountedAndTakenAtTheStart) {
  const Arguments shape = {"--steps", "5", "--seq", "128", "--batch", "32", "--accumulate", "2"};
  // The least memory, in which inputs do not stay.
  const Ran refused = Run(Train(dir_ + "/state", shape + Arguments{"--host-memory", "1MiB"}));
  std::smatch found;
  ASSERT_TRUE(std::regex_search(refused.err, found, std::regex("least that works is ([0-9]+) bytes")))
      << refused.err;
  const Arguments tight = shape + Arguments{"--host-memory", found[1]};
  Arguments plan = Train(dir_ + "/state", tight + Arguments{"--json", "--no-probe"});
  plan[0] = "plan";
  plan.erase(std::find(plan.begin(), plan.end(), "--quiet"));
  const Ran planned = Run(plan);
  ASSERT_EQ(planned.code, 0) << planned.err;
  const json told = json::parse(planned.out);
  int64_t inputs = 0;
  for (const json& line : told["tiers"]) {
    if (line["what"] == "saved activations") inputs = line["nvme_bytes"];
  }
  const auto disk_bytes = told["state_bytes_nvme"].get<int64_t>();
  ASSERT_GT(inputs, 3 << 20) << planned.out;
  ASSERT_EQ(Run(Train(dir_ + "/state", tight + Arguments{"--log", dir_ + "/whole.log"})).code, 0);
  EXPECT_EQ(std::filesystem::file_size(dir_ + "/state/penstock.store") + static_cast<uint64_t>(inputs),
            static_cast<uint64_t>(disk_bytes));
  EXPECT_EQ(Names(dir_ + "/state"), 1u) << "they have no names";

  aio::LoopDevice disk({.bytes = static_cast<uint64_t>(disk_bytes + (3 << 20)), .journal = false});
  if (!disk.skip().empty()) GTEST_SKIP() << disk.skip();
  const std::string state = disk.directory() + "/state", other = disk.directory() + "/other";
  const Arguments arguments = Train(state, tight + Arguments{"--log", dir_ + "/log"});
  // Room for the state, and not for the inputs: refused, and nothing is left.
  ASSERT_EQ(std::system(("fallocate -l " + std::to_string(inputs) + " " + other).c_str()), 0);
  ExpectOneLine(Run(arguments), {state, "too little"});
  EXPECT_FALSE(std::filesystem::exists(state));
  std::filesystem::remove(other);
  Program stopped(dir_, arguments);
  ASSERT_TRUE(WaitForLines(dir_ + "/log", 1));
  stopped.Signal(SIGTERM);
  ASSERT_EQ(stopped.Wait().code, 0);
  // Taken by something else between two lives of the run.
  ASSERT_TRUE(disk.Fill());
  ExpectOneLine(Run(arguments + Arguments{"--resume"}), {"inputs", "missing", "No space left on device"});
  EXPECT_EQ(Run({"verify", state, "--quiet"}).code, 0);
  disk.Free();
  const Ran rest = Run(arguments + Arguments{"--resume"});
  ASSERT_EQ(rest.code, 0) << rest.err;
  EXPECT_EQ(Losses(dir_ + "/log"), Losses(dir_ + "/whole.log"));
  EXPECT_EQ(Names(state), 1u);
}

}  // namespace
}  // namespace penstock::tools::penstock_full_disk_test
