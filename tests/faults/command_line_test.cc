// The command line beside a machine whose file calls fail: for every call of start, resume, checkpoint,
// export, pack, report and log, a run in which that call fails with EIO, EACCES, ENOMEM or EINTR. And one
// that is killed at any call, or started twice at one instant.
//
// What must hold, whichever call it was: the program ends by itself, with one of its exit codes and, unless
// that is 0, a line that says why. Exit code 0 means the right result. And nothing that was acknowledged
// before is gone: what a command only reads is as it was, every checkpoint is whole, every logged step is
// there, and the run goes on, undisturbed, with the losses of a run that never met a fault.
//
// Each run is a forked child that calls the verb in this program, so that LibTorch is loaded once. The suite
// draws calls by a seed that it prints; PENSTOCK_SOAK=N draws N times as many.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "aio/profile.h"
#include "base/small_file.h"
#include "tests/faults/faulty_calls.h"
#include "tests/soak.h"
#include "tools/base/verbs.h"

// Drives are not measured here: each start would write most of a gigabyte. (The linker puts this in the place
// of aio::MeasureDevice: --wrap in CMakeLists.txt.)
namespace penstock::aio {
absl::StatusOr<DeviceProfile> MeasureNothing(const ProbeOptions& options) __asm__(
    "__wrap__ZN8penstock3aio13MeasureDeviceERKNS0_12ProbeOptionsE");
absl::StatusOr<DeviceProfile> MeasureNothing(const ProbeOptions& options) {
  DeviceProfile profile;
  profile.directory = options.directory;
  profile.device = "none";
  profile.read_bytes_per_s = profile.write_bytes_per_s = profile.mixed_bytes_per_s = 1e9;
  profile.saturating_bytes_in_flight = 1 << 20;
  return profile;
}
}  // namespace penstock::aio

namespace penstock::tools {
namespace {

namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;
using tests::FaultyCall;

struct Outcome {
  int code = -1;  // exit code; 1000 + n: ended by signal n; 2000: not at all
  std::string out, err, failed;
  std::vector<std::string> functions;  // of the counted calls
};

const std::map<std::string, int (*)(int, const char* const*, std::ostream&, std::ostream&)> kVerbs = {
    {"train", RunTrain},      {"plan", RunPlan},
    {"report", RunReport},    {"inspect", RunInspect},
    {"verify", RunVerify},    {"export", RunExport},
    {"pack", RunPack},        {"export-checkpoint", RunExportCheckpoint},
    {"sample", RunSample},    {"import-checkpoint", RunImportCheckpoint},
    {"generate", RunGenerate}};

std::string Read(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadSmallFile(path, uint64_t{1} << 30);
  return text.ok() ? *text : "";
}

// What a directory holds, by name, or a file as "": for files their bytes.
std::map<std::string, std::string> Contents(const std::string& directory) {
  std::map<std::string, std::string> contents;
  if (fs::is_regular_file(directory)) contents[""] = Read(directory);
  if (!fs::is_directory(directory)) return contents;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    const std::string name = fs::relative(entry.path(), directory);
    // What a failed run left under a hidden name is nobody's content; the next one removes it.
    if (name[0] == '.' || name.find("/.") != std::string::npos) continue;
    contents[name] = entry.is_regular_file() ? Read(entry.path()) : "";
  }
  return contents;
}

// What children wait for that are to begin together.
class Gate {
 public:
  Gate() { EXPECT_EQ(pipe(ends_.data()), 0); }
  ~Gate() {
    Open();
    close(ends_[0]);
  }
  // Of a child: returns when the parent opens it.
  void Wait() {
    Open();
    char none = 0;
    while (read(ends_[0], &none, 1) < 0 && errno == EINTR) {
    }
  }
  void Open() {
    if (ends_[1] >= 0) close(std::exchange(ends_[1], -1));
  }

 private:
  std::array<int, 2> ends_{};
};

// Begins a verb in a child, in the directory `work`, which is watched. It exists at once; `gate` and then
// `later`: and does nothing until that is open, and for so long.
pid_t StartVerb(const std::string& work, const std::string& notes, const Arguments& arguments,
                const FaultyCall& faulty, std::chrono::milliseconds later = {}, Gate* gate = nullptr) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (gate != nullptr) gate->Wait();
    std::this_thread::sleep_for(later);
    if (chdir(work.c_str()) != 0) _exit(99);
    const int null = open("/dev/null", O_RDWR);
    for (const int fd : {0, 1, 2}) dup2(null, fd);
    std::vector<const char*> argv;
    for (const std::string& each : arguments) argv.push_back(each.c_str());
    std::ostringstream out, err;
    signal(SIGPIPE, SIG_IGN);
    tests::WatchCalls({work}, faulty);
    const int code = kVerbs.at(arguments.front())(static_cast<int>(argv.size()), argv.data(), out, err);
    const std::string failed = tests::FailedCall();
    const std::vector<const char*> functions = tests::CountedFunctions();
    tests::WatchCalls({}, {});
    std::ofstream(notes + "/out") << out.str();
    std::ofstream(notes + "/err") << err.str();
    std::ofstream(notes + "/failed") << failed;
    std::ofstream list(notes + "/functions");
    for (const char* each : functions) list << each << "\n";
    list.close();
    _exit(code);
  }
  return child;
}

Outcome FinishVerb(pid_t child, const std::string& notes) {
  for (const char* name : {"out", "err", "failed", "functions"}) {
    std::error_code ignored;
    if (child < 0) fs::remove(notes + "/" + name, ignored);
  }
  Outcome outcome;
  int status = 0;
  // A minute and more of patience with a busy machine; a hang is a failure.
  bool ended = false;
  for (int i = 0; i < 120'000 && !ended; ++i) {
    ended = waitpid(child, &status, WNOHANG) == child;
    if (!ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!ended) {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    outcome.code = 2000;
    return outcome;
  }
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  outcome.out = Read(notes + "/out");
  outcome.err = Read(notes + "/err");
  outcome.failed = Read(notes + "/failed");
  std::istringstream list(Read(notes + "/functions"));
  for (std::string line; std::getline(list, line);) outcome.functions.push_back(line);
  return outcome;
}

Outcome RunVerb(const std::string& work, const std::string& notes, const Arguments& arguments,
                const FaultyCall& faulty) {
  return FinishVerb(StartVerb(work, notes, arguments, faulty), notes);
}

constexpr std::array<int, 4> kErrors = {EIO, EACCES, ENOMEM, EINTR};

std::string ErrorName(int error) {
  switch (error) {
    case EIO:
      return "EIO";
    case EACCES:
      return "EACCES";
    case ENOMEM:
      return "ENOMEM";
    default:
      return "EINTR";
  }
}

// A command, what stands before it, and what must be true afterwards.
struct Scenario {
  std::string name;
  Arguments command;
  // Of what the command must leave alone in every case (relative to the working directory).
  std::vector<std::string> inputs;
  // Of what it replaces as a whole: it is the old content or that of an undisturbed run.
  std::vector<std::string> outputs;
  bool trains = false;    // the run "s" with its log and its checkpoints in "c" goes on afterwards
  Arguments always = {};  // of every training, also of those before and after
  Arguments first = {};   // a command that is run before
  std::string made = {};  // a state or checkpoints that it makes, perhaps in the place of others
  int step = 0;           // which that one is of
};

void PrintTo(const Scenario& scenario, std::ostream* out) { *out << scenario.name; }

Arguments Train(const Arguments& more) {
  Arguments arguments = {"train",    "--model", "model.json", "--data", "text",     "--dtype",   "fp32",
                         "--seq",    "16",      "--batch",    "1",      "--quiet",  "--threads", "1",
                         "--warmup", "0",       "--log",      "log",    "--report", "report"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}
Arguments Without(const std::string& flag, Arguments arguments) {
  const auto found = std::find(arguments.begin(), arguments.end(), flag);
  arguments.erase(found, found + 2);
  return arguments;
}
Arguments OnDrive(int steps, const Arguments& more = {}) {
  Arguments arguments = Train({"--state-dir", "s", "--checkpoint-dir", "c", "--checkpoint-every", "2",
                               "--host-memory", "64M", "--steps", std::to_string(steps)});
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}
Arguments InMemory(int steps, const Arguments& more = {}) {
  Arguments arguments = Train({"--offload", "cpu", "--checkpoint-dir", "c", "--checkpoint-every", "2",
                               "--steps", std::to_string(steps)});
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class Workplace : public testing::Test {
 protected:
  static constexpr int kSteps = 8;

  Workplace() {
    std::string name = (fs::current_path() / "faults-XXXXXX").string();
    root_ = ::mkdtemp(name.data());
    work_ = root_ + "/work";
    notes_ = root_ + "/notes";
    fs::create_directories(notes_);
  }
  ~Workplace() override {
    std::error_code ignored;
    if (!HasFailure()) fs::remove_all(root_, ignored);
  }

  Outcome Run(const Arguments& arguments, const FaultyCall& faulty = {}) {
    return RunVerb(work_, notes_, arguments, faulty);
  }
  void MustRun(const Arguments& arguments) {
    const Outcome outcome = Run(arguments);
    ASSERT_EQ(outcome.code, 0) << arguments.front() << ": " << outcome.err << outcome.out;
  }

  void PutModelAndText() {
    fs::create_directories(work_);
    std::ofstream(work_ + "/monitors.json")
        << R"({"train_batch_size": 1, "csv_monitor": {"enabled": true, "output_path": "csv", "job_name": "j"},
               "tensorboard": {"enabled": true, "output_path": "board", "job_name": "j"}})";
    std::ofstream(work_ + "/model.json")
        << R"({"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 256})";
    std::string text;
    for (uint32_t i = 0, x = 1; i < 600; ++i) {
      x = x * 1664525u + 1013904223u;
      text += "abcdefgh ijkl\n"[(x >> 24) % 14];
    }
    std::ofstream(work_ + "/text") << text;
  }

  // What stands before the command of the scenario: a model, a text, a run of four steps on a drive or in
  // memory, its weights, an older output of the command.
  void Prepare(const Scenario& scenario) {
    PutModelAndText();
    const bool memory = scenario.name.find("InMemory") != std::string::npos;
    const bool fresh = scenario.name.find("Fresh") != std::string::npos;
    if (!fresh) MustRun(memory ? InMemory(4, scenario.always) : OnDrive(4, scenario.always));
    if (scenario.name.find("FromCheckpoint") != std::string::npos) fs::remove_all(work_ + "/s");
    const bool generates = scenario.command.front() == "generate";
    const bool packs = scenario.command.front() == "pack" || generates;
    const Arguments weights = {"export", "s", "weights", "--overwrite"};
    if (packs) {
      fs::create_directory(work_ + "/weights");
      MustRun(weights);
    }
    if (!scenario.first.empty()) MustRun(scenario.first);
    if (!scenario.outputs.empty() && scenario.outputs.front() == "out") {
      if (!packs) fs::create_directory(work_ + "/out");
      MustRun(scenario.command);
      // An older content, which only differs in what the run has learnt since.
      fs::rename(work_ + "/out", work_ + "/old-out");
      MustRun(OnDrive(6, {"--resume"}));
      if (packs) MustRun(weights);
      fs::rename(work_ + "/old-out", work_ + "/out");
    }
    fs::copy(work_, root_ + "/before", fs::copy_options::recursive);
  }
  void Restore() {
    fs::remove_all(work_);
    fs::copy(root_ + "/before", work_, fs::copy_options::recursive);
  }

  std::string root_, work_, notes_;
};

class CommandLine : public Workplace, public testing::WithParamInterface<Scenario> {
 protected:
  // After exit code 0 what was made is whole. After another the old is, or the new; on a drive, where it is
  // laid out over the old, there may be neither, and the same command makes it then.
  void CheckMade(const Scenario& scenario, bool succeeded) {
    const bool over =
        std::find(scenario.command.begin(), scenario.command.end(), "--overwrite") != scenario.command.end();
    const Outcome verified = Run({"verify", scenario.made});
    if (succeeded) {
      EXPECT_EQ(verified.code, 0) << verified.err;
      EXPECT_THAT(Run({"inspect", scenario.made, "--json"}).out,
                  testing::HasSubstr("\"step\": " + std::to_string(scenario.step) + ","));
    } else if (scenario.made == "c") {
      EXPECT_EQ(verified.code, 0) << "no checkpoint is left: " << verified.err;
    } else if (verified.code != 0) {
      // An empty file that could not be locked may be another's by now, and is left to who says --overwrite.
      Arguments command = scenario.command;
      if (!over) command.emplace_back("--overwrite");
      const Outcome again = Run(command);
      EXPECT_EQ(again.code, 0) << verified.err << "it is not made over it: " << again.err;
    }
  }
};

std::vector<std::string> LogLines(const std::string& path) {
  std::vector<std::string> lines;
  std::istringstream stream(Read(path));
  for (std::string line; std::getline(stream, line);) {
    // What differs from run to run stands behind the loss.
    const size_t loss = line.find("\"loss\"");
    lines.push_back(loss == std::string::npos ? line : line.substr(0, line.find(',', loss)));
  }
  return lines;
}

// A text without what a clock and a file system's allocator say.
std::string WithoutRates(const std::string& text) {
  return std::regex_replace(
      text, std::regex("[0-9.]+ (s|ms|[kMG]B/s|[KMG]iB/s)\\b|\"allocated_bytes\": [0-9]+"), "");
}

uint64_t Seed() {
  const char* const given = std::getenv("PENSTOCK_FAULT_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
}

// Numbers of calls, from 1: by turns one of each function, in random order; once more where all were drawn.
class DrawnCalls {
 public:
  DrawnCalls(const std::vector<std::string>& functions, std::mt19937_64& random) {
    std::map<std::string, std::vector<int64_t>> by_function;
    for (size_t i = 0; i < functions.size(); ++i)
      by_function[functions[i]].push_back(static_cast<int64_t>(i) + 1);
    size_t most = 0;
    for (auto& [function, numbers] : by_function) {
      std::shuffle(numbers.begin(), numbers.end(), random);
      most = std::max(most, numbers.size());
    }
    for (size_t round = 0; round < most; ++round) {
      for (const auto& [function, numbers] : by_function) {
        if (round < numbers.size()) drawn_.push_back(numbers[round]);
      }
    }
  }
  size_t size() const { return drawn_.size(); }
  int64_t operator[](size_t i) const { return drawn_[i % drawn_.size()]; }

 private:
  std::vector<int64_t> drawn_;
};

TEST_P(CommandLine, NoFailingCallLosesWhatWasAcknowledged) {
  const Scenario& scenario = GetParam();
  ASSERT_NO_FATAL_FAILURE(Prepare(scenario));
  // The run without faults: how many calls there are, and what comes out.
  const Outcome quiet = Run(scenario.command);
  ASSERT_EQ(quiet.code, 0) << quiet.err;
  const int64_t calls = static_cast<int64_t>(quiet.functions.size());
  ASSERT_GT(calls, 0);
  std::map<std::string, std::map<std::string, std::string>> right;
  for (const std::string& output : scenario.outputs) right[output] = Contents(work_ + "/" + output);
  const bool memory = scenario.name.find("InMemory") != std::string::npos;
  Arguments on = memory ? InMemory(kSteps, {"--resume"}) : OnDrive(kSteps, {"--resume"});
  on.insert(on.end(), scenario.always.begin(), scenario.always.end());
  std::vector<std::string> right_log;
  if (scenario.trains) {
    MustRun(on);
    right_log = LogLines(work_ + "/log");
    ASSERT_EQ(right_log.size(), static_cast<size_t>(kSteps));
  }
  Restore();
  std::map<std::string, std::map<std::string, std::string>> before;
  for (const auto* list : {&scenario.inputs, &scenario.outputs}) {
    for (const std::string& each : *list) before[each] = Contents(work_ + "/" + each);
  }
  const std::vector<std::string> logged = LogLines(work_ + "/log");
  const std::map<std::string, std::string> checkpoints = Contents(work_ + "/c");

  // Which calls fail: all of them in a long run, some of every function otherwise.
  const uint64_t seed = Seed();
  std::printf("%s: %d calls; PENSTOCK_FAULT_SEED=%llu\n", scenario.name.c_str(), static_cast<int>(calls),
              static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const int64_t wanted = int64_t{12} * tests::Soak();
  const DrawnCalls drawn(quiet.functions, random);
  std::vector<FaultyCall> faults;
  for (size_t i = 0; static_cast<int64_t>(faults.size()) < wanted; ++i) {
    // Each call fails with each error, once alone and once for good. (A call that is interrupted for ever is
    // one that nobody can make.)
    const size_t round = i / drawn.size(), call = i % drawn.size(), error = (round + call) % kErrors.size();
    if (round == 2 * kErrors.size()) break;
    const bool lasting = (round / kErrors.size() + call) % 2 == 1;
    if (lasting && kErrors[error] == EINTR) continue;
    faults.push_back({drawn[i], kErrors[error], lasting});
  }

  for (const FaultyCall& fault : faults) {
    Restore();
    const Outcome outcome = Run(scenario.command, fault);
    const std::string what = scenario.name + ", call " + std::to_string(fault.number) + " (" +
                             outcome.failed + "), " + ErrorName(fault.error) +
                             (fault.lasting ? " and later ones" : "") + ": exit " +
                             std::to_string(outcome.code) + ": " + outcome.err;
    SCOPED_TRACE(what);
    EXPECT_LE(outcome.code, 2) << "neither an abort nor a hang";
    if (outcome.code != 0) {
      EXPECT_NE(outcome.err, "") << "an error says why";
    }
    for (const std::string& input : scenario.inputs) {
      EXPECT_TRUE(Contents(work_ + "/" + input) == before[input]) << input << " has changed";
    }
    for (const std::string& output : scenario.outputs) {
      const auto now = Contents(work_ + "/" + output);
      if (outcome.code == 0) {
        EXPECT_TRUE(now == right[output]) << output << " is not what exit code 0 says";
      } else {
        // Where a rename fails for good, the old files are beside it, and the error names them.
        const bool told = outcome.err.find("could not be given their names again") != std::string::npos;
        EXPECT_TRUE(told || now == before[output] || now == right[output])
            << output << " is neither old nor new";
      }
    }
    if (outcome.code == 0 && !scenario.trains && scenario.command.front() != "report") {
      EXPECT_EQ(WithoutRates(outcome.out), WithoutRates(quiet.out));
    }
    if (!scenario.made.empty()) CheckMade(scenario, outcome.code == 0);
    if (!scenario.trains) {
      if (HasFailure()) return;
      continue;
    }
    // What was acknowledged: lines of the log, and checkpoints.
    const std::vector<std::string> log = LogLines(work_ + "/log");
    ASSERT_GE(log.size(), logged.size()) << "logged steps are gone";
    const std::map<std::string, std::string> now = Contents(work_ + "/c");
    for (const auto& [name, bytes] : checkpoints) {
      if (name == "latest" || name[0] == '.') continue;
      const auto found = now.find(name);
      ASSERT_TRUE(found != now.end()) << "of the checkpoints, " << name << " is gone";
      EXPECT_TRUE(found->second == bytes) << "of the checkpoints, " << name << " has changed";
    }
    // The run goes on as if nothing had been. (One that never began is begun with the horizon of the
    // command.)
    if (scenario.name.find("Fresh") != std::string::npos) {
      Arguments again = scenario.command;
      again.emplace_back("--resume");
      const Outcome begun = Run(again);
      ASSERT_EQ(begun.code, 0) << "it does not begin: " << begun.err;
    }
    const Outcome after = Run(on);
    ASSERT_EQ(after.code, 0) << "it does not go on: " << after.err;
    const std::vector<std::string> whole = LogLines(work_ + "/log");
    ASSERT_EQ(whole.size(), right_log.size());
    EXPECT_EQ(whole, right_log);
    if (HasFailure()) return;
  }
}

// Every name below a directory, hidden ones too.
std::vector<std::string> AllNames(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    names.push_back(fs::relative(entry.path(), directory));
  std::sort(names.begin(), names.end());
  return names;
}

// What a command replaces is the old or the new, whole, and what the kill left is gone with the next one.
class Kills : public CommandLine {};

TEST_P(Kills, AKillAtAnyCallLeavesTheOldOrTheNewAndTheNextOneClearsUp) {
  const Scenario& scenario = GetParam();
  ASSERT_NO_FATAL_FAILURE(Prepare(scenario));
  const std::string out = work_ + "/out";
  const auto before = Contents(out);
  const Outcome quiet = Run(scenario.command);
  ASSERT_EQ(quiet.code, 0) << quiet.err;
  const auto right = Contents(out);
  ASSERT_TRUE(before != right);
  const std::vector<std::string> names = AllNames(work_);
  const uint64_t seed = Seed();
  std::mt19937_64 random(seed);
  const DrawnCalls drawn(quiet.functions, random);
  std::printf("%s: %zu calls; PENSTOCK_FAULT_SEED=%llu\n", scenario.name.c_str(), drawn.size(),
              static_cast<unsigned long long>(seed));
  const size_t wanted = std::min(drawn.size(), size_t{12} * static_cast<size_t>(tests::Soak()));
  for (size_t i = 0; i < wanted; ++i) {
    const int64_t number = drawn[i];
    SCOPED_TRACE(scenario.name + ", killed at call " + std::to_string(number) + " (" +
                 quiet.functions[static_cast<size_t>(number - 1)] + ")");
    Restore();
    const Outcome killed = Run(scenario.command, {.number = number, .kills = true});
    ASSERT_EQ(killed.code, 1000 + SIGKILL) << killed.err;
    for (const std::string& input : scenario.inputs) {
      EXPECT_TRUE(Contents(work_ + "/" + input) == Contents(root_ + "/before/" + input)) << input;
    }
    const auto now = Contents(out);
    EXPECT_TRUE(now == before || now == right) << "what is there is neither old nor new";
    const Outcome again = Run(scenario.command);
    ASSERT_EQ(again.code, 0) << again.err;
    EXPECT_TRUE(Contents(out) == right);
    EXPECT_EQ(AllNames(work_), names) << "what the kill left is not cleared up";
    if (HasFailure()) return;
  }
}

Arguments operator+(Arguments all, const Arguments& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// All that a training writes beside its state.
const Arguments kMonitors = {"--config",     "monitors.json",     "--prometheus",
                             "figures.prom", "--checkpoint-keep", "3"};

const Scenario kPack = {"Pack",
                        {"pack", "weights", "out", "--quiet", "--overwrite"},
                        {"weights", "s", "c", "log"},
                        {"out"},
                        false};
const Scenario kExportCheckpoint = {"ExportCheckpoint",
                                    {"export-checkpoint", "s", "out", "--tag", "mine", "--overwrite"},
                                    {"s", "c", "log"},
                                    {"out"},
                                    false};

INSTANTIATE_TEST_SUITE_P(Verbs, Kills, testing::Values(kExportCheckpoint, kPack),
                         [](const auto& each) { return each.param.name; });

// Both exist before either has replaced anything, and the one may begin long after the other: whichever has
// the directory keeps it.
TEST_F(Workplace, OfTwoThatOverwriteAtOneInstantOneHasTheDirectory) {
  PutModelAndText();
  fs::create_directories(notes_ + "/second");
  const uint64_t seed = Seed();
  std::printf("PENSTOCK_FAULT_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const int rounds = 3 * tests::Soak();
  for (const bool memory : {false, true}) {
    const auto train = [&](int steps) {
      Arguments arguments = memory ? InMemory(steps, {"--overwrite"}) : OnDrive(steps, {"--overwrite"});
      const auto log = std::find(arguments.begin(), arguments.end(), "--log");
      arguments.erase(log, log + 4);  // and the report: neither is what they compete for
      return arguments;
    };
    MustRun(train(1));
    for (int round = 0; round < rounds; ++round) {
      const std::chrono::milliseconds later(random() % 3 == 0 ? random() % 400 : random() % 40);
      SCOPED_TRACE(testing::Message() << (memory ? "in memory, " : "on a drive, ") << "round " << round
                                      << ", " << later.count() << " ms later");
      Gate gate;
      const pid_t first = StartVerb(work_, notes_, train(2), {}, {}, &gate);
      const pid_t second = StartVerb(work_, notes_ + "/second", train(3), {}, later, &gate);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // a start is known to a tick of 10 ms
      gate.Open();
      const Outcome two = FinishVerb(first, notes_), three = FinishVerb(second, notes_ + "/second");
      const Outcome& refused = two.code == 0 ? three : two;
      ASSERT_EQ(std::min(two.code, three.code), 0) << two.err << three.err;
      ASSERT_EQ(refused.code, 2) << two.err << three.err;
      EXPECT_EQ(std::count(refused.err.begin(), refused.err.end(), '\n'), 1) << refused.err;
      const Outcome inspected = Run({"inspect", memory ? "c" : "s", "--json"});
      ASSERT_EQ(inspected.code, 0) << inspected.err;
      EXPECT_THAT(inspected.out, testing::HasSubstr(two.code == 0 ? "\"step\": 2," : "\"step\": 3,"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Verbs, CommandLine,
    testing::Values(
        Scenario{"FreshOnDrive", OnDrive(4), {"text", "model.json"}, {}, true},
        Scenario{"ResumeOnDrive", OnDrive(6, {"--resume"}), {"text", "model.json"}, {}, true},
        Scenario{"ResumeInMemory", InMemory(6, {"--resume"}), {"text", "model.json"}, {}, true},
        Scenario{"Inspect", {"inspect", "s", "--json"}, {"s", "c", "log"}, {}, false},
        Scenario{"InspectCheckpoint", {"inspect", "c", "--json"}, {"s", "c", "log"}, {}, false},
        Scenario{"Verify", {"verify", "s"}, {"s", "c", "log"}, {}, false},
        Scenario{"Export", {"export", "s", "out", "--overwrite"}, {"s", "c", "log"}, {"out"}, false},
        Scenario{"ExportShards",
                 {"export", "s", "out", "--max-shard", "20K", "--overwrite"},
                 {"s", "c", "log"},
                 {"out"},
                 false},
        kExportCheckpoint, kPack,
        Scenario{"ResumeFromCheckpoint", OnDrive(6, {"--resume"}), {"text", "model.json"}, {}, true},
        Scenario{"ResumeWithMonitors",
                 OnDrive(6, {"--resume"}) + kMonitors,
                 {"text", "model.json", "monitors.json"},
                 {},
                 true,
                 kMonitors},
        Scenario{"Overwrite", OnDrive(4, {"--overwrite"}), {"text", "model.json"}, {}, false, {}, {}, "s", 4},
        Scenario{"OverwriteInMemory",
                 InMemory(2, {"--overwrite"}),
                 {"text", "model.json"},
                 {},
                 false,
                 {},
                 {},
                 "c",
                 2},
        Scenario{"InitFrom",
                 Without("--log", Train({"--offload", "cpu", "--checkpoint-dir", "other", "--steps", "1",
                                         "--init-from", "start"})),
                 {"text", "model.json", "start", "s", "c"},
                 {},
                 false,
                 {},
                 {"export", "s", "start"}},
        Scenario{"Sample",
                 {"sample", "s", "--prompt", "ab", "--tokens", "4", "--threads", "1"},
                 {"s", "c", "log"},
                 {},
                 false},
        Scenario{"Generate",
                 {"generate", "weights", "--prompt", "ab", "--tokens", "4", "--threads", "1", "--quiet",
                  "--out", "out", "--overwrite"},
                 {"weights", "s", "c", "log"},
                 {"out"},
                 false},
        Scenario{"GeneratePacked",
                 {"generate", "packed", "--prompt", "ab", "--tokens", "4", "--threads", "1", "--quiet"},
                 {"packed", "s", "c", "log"},
                 {},
                 false,
                 {},
                 {"pack", "weights", "packed", "--weights", "8"}},
        Scenario{"Import",
                 {"import-checkpoint", "theirs", "--state-dir", "imported", "--model", "model.json", "--data",
                  "text", "--threads", "1"},
                 {"theirs", "s", "c", "log"},
                 {},
                 false,
                 {},
                 {"export-checkpoint", "s", "theirs", "--tag", "mine"},
                 "imported",
                 4},
        Scenario{"ImportOver",
                 {"import-checkpoint", "theirs", "--state-dir", "s", "--model", "model.json", "--data",
                  "text", "--threads", "1", "--overwrite"},
                 {"theirs", "c", "log"},
                 {},
                 false,
                 {},
                 {"export-checkpoint", "s", "theirs", "--tag", "mine"},
                 "s",
                 4},
        Scenario{
            "Report", {"report", "report", "--html", "page"}, {"s", "c", "log", "report"}, {"page"}, false}),
    [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace penstock::tools
