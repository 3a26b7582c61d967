// The files of csv_monitor and tensorboard, byte for byte, and what becomes of them when a run goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "run/watch/csv_monitor.h"
#include "run/watch/event_file.h"
#include "run/watch/monitors.h"
#include "run/watch/prometheus_file.h"
#include "tests/tampered_call.h"

namespace penstock::tools::monitor_test {
namespace {

using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

constexpr const char* kLr = "Train/Samples/lr";

class MonitorTest : public testing::Test {
 protected:
  MonitorTest() {
    std::string name = (std::filesystem::temp_directory_path() / "monitor_test.XXXXXX").string();
    dir_ = ::mkdtemp(name.data());
  }
  ~MonitorTest() override { std::filesystem::remove_all(dir_); }
  static std::string Read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }
  static void Write(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }
  std::string Lr() const { return dir_ + "/Train_Samples_lr.csv"; }
  // Opens, begins and appends one value for each of `samples`.
  template <typename Sink>
  absl::Status Run(const run::MonitorOwner& owner, int64_t begin, const std::vector<int64_t>& samples) const {
    auto sink = Sink::Open(dir_, owner);
    if (!sink.ok()) return sink.status();
    if (absl::Status status = (*sink)->Begin(begin); !status.ok()) return status;
    for (const int64_t x : samples) {
      if (absl::Status status = (*sink)->Append(x, {{kLr, static_cast<double>(x) / 8}}); !status.ok())
        return status;
    }
    return absl::OkStatus();
  }
  std::vector<std::string> EventFiles() const {
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::directory_iterator(dir_)) {
      if (entry.path().filename().string().find("tfevents") != std::string::npos)
        paths.push_back(entry.path());
    }
    return paths;
  }
  std::vector<int64_t> Steps() const { return StepsIn(EventFiles().at(0)); }
  static std::vector<int64_t> StepsIn(const std::string& path) {
    std::vector<int64_t> steps;
    const std::string all = Read(path);
    for (std::string_view rest = all; !rest.empty();) {
      const auto record = run::ReadEventRecord(rest);
      EXPECT_TRUE(record.ok()) << record.status();
      if (!record.ok()) break;
      const auto event = run::ReadEvent(record->message);
      EXPECT_TRUE(event.ok());
      if (event->second == kLr) steps.push_back(event->first);
      rest.remove_prefix(record->bytes);
    }
    return steps;
  }
  std::string dir_;
};

TEST_F(MonitorTest, CsvFilesAreDeepSpeeds) {
  auto csv = run::CsvMonitor::Open(dir_ + "/job", {.run_id = "mine"});
  ASSERT_TRUE(csv.ok()) << csv.status();
  ASSERT_TRUE((*csv)->Begin(0).ok());
  ASSERT_TRUE((*csv)->Append(8, {{"Train/Samples/train_loss", 5.5}, {kLr, 3e-4}}).ok());
  ASSERT_TRUE((*csv)->Append(16, {{"Train/Samples/train_loss", std::nan("")}, {kLr, 1e-5}}).ok());
  ASSERT_TRUE((*csv)->Append(16, {{"Train/Samples/eval_loss", 2}}).ok());
  EXPECT_EQ(Read(dir_ + "/job/Train_Samples_train_loss.csv"), "step,train_loss\r\n8,5.5\r\n16,nan\r\n");
  EXPECT_EQ(Read(dir_ + "/job/Train_Samples_lr.csv"), "step,lr\r\n8,0.0003\r\n16,1e-05\r\n");
  EXPECT_EQ(Read(dir_ + "/job/Train_Samples_eval_loss.csv"), "step,eval_loss\r\n16,2.0\r\n");
}

TEST_F(MonitorTest, AResumedRunAppendsAndRepeatsNoSample) {
  ASSERT_TRUE(Run<run::CsvMonitor>({.run_id = "mine"}, 0, {8, 16, 24}).ok());
  Write(Lr(), Read(Lr()) + "32,4");  // torn by a kill
  // It goes on from 16: 24 comes again, and 16 is handed over once more.
  ASSERT_TRUE(Run<run::CsvMonitor>({.run_id = "mine", .resumes = true}, 16, {16, 24, 32}).ok());
  EXPECT_EQ(Read(Lr()), "step,lr\r\n8,1.0\r\n16,2.0\r\n24,3.0\r\n32,4.0\r\n");
}

TEST_F(MonitorTest, AnotherRunsSamplesAreLeftAloneUnlessItIsReplaced) {
  ASSERT_TRUE(Run<run::CsvMonitor>({.run_id = "first"}, 0, {8}).ok());
  const std::string before = Read(Lr());
  for (const run::MonitorOwner& owner :
       {run::MonitorOwner{.run_id = "new"}, run::MonitorOwner{.run_id = "other", .resumes = true}}) {
    const absl::Status status = Run<run::CsvMonitor>(owner, 0, {4});
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("first"));
    EXPECT_EQ(Read(Lr()), before);
  }
  ASSERT_TRUE(Run<run::CsvMonitor>({.run_id = "new", .replaces = {"first"}}, 0, {4}).ok());
  EXPECT_EQ(Read(Lr()), "step,lr\r\n4,0.5\r\n");
}

TEST_F(MonitorTest, FilesOfOtherNamesAreSomebodyElses) {
  ASSERT_TRUE(Run<run::CsvMonitor>({.run_id = "first"}, 0, {8, 16}).ok());
  const std::vector<std::string> others = {dir_ + "/Train_other_tool.csv",
                                           dir_ + "/Train_Samples_lr.backup.csv"};
  for (const std::string& other : others) Write(other, "step,mine\r\n8,1\r\n16,2\r\n24,3\r\n");
  const std::string before = Read(others[0]);
  ASSERT_TRUE(Run<run::CsvMonitor>({.run_id = "first", .resumes = true}, 8, {}).ok());
  ASSERT_TRUE(Run<run::CsvMonitor>({.run_id = "second", .replaces = {"first"}}, 0, {4}).ok());
  for (const std::string& other : others) EXPECT_EQ(Read(other), before);
}

TEST_F(MonitorTest, OfTwoRunsThatBeginAtOnceInAnEmptyDirectoryOneHasIt) {
  auto first = run::CsvMonitor::Open(dir_, {.run_id = "first"});
  auto second = run::CsvMonitor::Open(dir_, {.run_id = "second"});
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE((*first)->Begin(0).ok());
  const absl::Status status = (*second)->Begin(0);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  ASSERT_TRUE((*first)->Append(8, {{kLr, 1}}).ok());
  first->reset();
  EXPECT_THAT(std::string((*second)->Begin(0).message()), HasSubstr("another run (first)"));
  EXPECT_EQ(Read(Lr()), "step,lr\r\n8,1.0\r\n");
  EXPECT_TRUE(Run<run::CsvMonitor>({.run_id = "first", .resumes = true}, 8, {16}).ok());
}

// A run that goes on from a checkpoint has the id of the one that goes on from its state.
TEST_F(MonitorTest, WhatIsWrittenIsNotCutByAnother) {
  const run::MonitorOwner owner = {.run_id = "mine", .resumes = true};
  auto csv = run::CsvMonitor::Open(dir_, owner);
  auto events = run::EventFile::Open(dir_, owner);
  ASSERT_TRUE(csv.ok() && events.ok());
  for (run::ScalarSink* sink :
       {static_cast<run::ScalarSink*>(csv->get()), static_cast<run::ScalarSink*>(events->get())}) {
    ASSERT_TRUE(sink->Begin(0).ok());
    for (const int64_t samples : {8, 16}) ASSERT_TRUE(sink->Append(samples, {{kLr, 1}}).ok());
  }
  const std::string before = Read(Lr());
  for (const absl::Status& status : {Run<run::CsvMonitor>(owner, 8, {}), Run<run::EventFile>(owner, 8, {})}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is written by another training"));
  }
  EXPECT_EQ(Read(Lr()), before);
  EXPECT_THAT(Steps(), ElementsAre(8, 16));
  // One that only looks may open them, and changes nothing.
  EXPECT_TRUE(run::CsvMonitor::Open(dir_, owner).ok());
  csv->reset();
  EXPECT_TRUE(Run<run::CsvMonitor>(owner, 8, {}).ok());
}

TEST_F(MonitorTest, WhatDeepSpeedWroteIsGoneOnWith) {
  const std::string theirs = "step,lr\r\n8,0.1\r\nstep,lr\r\n16,0.2\r\n";  // of two of its processes
  Write(Lr(), theirs);
  EXPECT_FALSE(Run<run::CsvMonitor>({.run_id = "mine"}, 0, {8}).ok()) << "a new run does not go on";
  EXPECT_FALSE(Run<run::CsvMonitor>({.run_id = "mine", .resumes = true}, 8, {16}).ok())
      << "16 is not to be cut";
  EXPECT_EQ(Read(Lr()), theirs);
  ASSERT_TRUE(Run<run::CsvMonitor>({.run_id = "mine", .resumes = true}, 16, {24}).ok());
  EXPECT_EQ(Read(Lr()), theirs + "24,3.0\r\n");
  Write(Lr(), "a diary\n");
  EXPECT_FALSE(Run<run::CsvMonitor>({.run_id = "mine", .resumes = true}, 16, {24}).ok());
  EXPECT_EQ(Read(Lr()), "a diary\n");
}

std::string Hex(const std::string& bytes) {
  std::ostringstream hex;
  for (const char c : bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    hex << kDigits[static_cast<uint8_t>(c) >> 4] << kDigits[static_cast<uint8_t>(c) & 15];
  }
  return hex.str();
}

// As tensorboard 2.21 writes these three events (its RecordWriter and protobuf's SerializeToString).
TEST(EventFile, RecordsAreTensorBoards) {
  EXPECT_EQ(Hex(run::EventRecord(run::FileVersionEvent(1700000000.25))),
            "1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9");
  EXPECT_EQ(
      Hex(run::EventRecord(run::ScalarEvent(1700000000.5, 300, {"Train/Samples/train_loss", 2.5}))),
      "2f000000000000006d5d1d500900002040fc54d94110ac022a210a1f0a18547261696e2f53616d706c65732f747261696e5f"
      "6c6f737315000020400bca208e");
  EXPECT_EQ(
      Hex(run::EventRecord(run::ScalarEvent(1700000001.0, int64_t{1} << 40, {kLr, 3e-4}))),
      "2b00000000000000861bc34b0900004040fc54d941108080808080202a190a170a10547261696e2f53616d706c65732f6c72"
      "1552499d390fdda947");
}

TEST(EventFile, DamageIsSeen) {
  const std::string record = run::EventRecord(run::ScalarEvent(1, 7, {kLr, 1}));
  ASSERT_TRUE(run::ReadEventRecord(record).ok());
  EXPECT_EQ(*run::ReadEvent(run::ReadEventRecord(record)->message),
            (std::pair<int64_t, std::string>{7, kLr}));
  for (size_t i = 0; i < record.size(); ++i) {
    std::string damaged = record;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x10);
    EXPECT_TRUE(absl::IsDataLoss(run::ReadEventRecord(damaged).status())) << i;
    EXPECT_TRUE(absl::IsOutOfRange(run::ReadEventRecord(record.substr(0, i)).status())) << i;
    // Whatever the message is, it is read or refused.
    (void)run::ReadEvent(std::string_view(damaged).substr(12, damaged.size() - 16));
    (void)run::ReadEvent(std::string_view(record).substr(12, i));
  }
}

TEST_F(MonitorTest, AnEventFileIsGoneOnWithFromItsLastWholeRecord) {
  ASSERT_TRUE(Run<run::EventFile>({.run_id = "mine"}, 0, {8, 16, 24}).ok());
  ASSERT_THAT(EventFiles(), SizeIs(1));
  const std::string path = EventFiles()[0];
  Write(path, Read(path) + run::EventRecord(run::ScalarEvent(1, 32, {kLr, 4})).substr(0, 30));
  ASSERT_TRUE(Run<run::EventFile>({.run_id = "mine", .resumes = true}, 16, {16, 24, 32}).ok());
  EXPECT_THAT(EventFiles(), ElementsAre(path));
  EXPECT_THAT(Steps(), ElementsAre(8, 16, 24, 32));
}

// Any bit, but in the last record: a file that is damaged is not taken for one that a kill cut short.
TEST_F(MonitorTest, AnEventFileWithAFlippedBitStaysAsItIsAndAnotherIsBegun) {
  ASSERT_TRUE(Run<run::EventFile>({.run_id = "mine"}, 0, {8, 16, 24, 32}).ok());
  const std::string path = EventFiles().at(0), whole = Read(path);
  for (size_t byte = 0; byte < whole.size(); byte += 5) {
    std::string damaged = whole;
    damaged[byte] = static_cast<char>(damaged[byte] ^ 0x04);
    Write(path, damaged);
    // Twice: the new file is the one that is gone on with.
    ASSERT_TRUE(Run<run::EventFile>({.run_id = "mine", .resumes = true}, 32, {40, 48}).ok()) << byte;
    ASSERT_TRUE(Run<run::EventFile>({.run_id = "mine", .resumes = true}, 40, {48, 56}).ok()) << byte;
    EXPECT_EQ(Read(path), damaged) << byte;
    std::vector<std::string> files = EventFiles();
    std::sort(files.begin(), files.end());
    ASSERT_THAT(files, SizeIs(2)) << byte;
    EXPECT_EQ(files[0], path);
    EXPECT_THAT(StepsIn(files[1]), ElementsAre(40, 48, 56)) << byte;
    std::filesystem::remove(files[1]);
  }
}

TEST_F(MonitorTest, WhatCannotBeReadIsNeitherCutNorTakenForNothing) {
  ASSERT_TRUE(Run<run::EventFile>({.run_id = "mine"}, 0, {8, 16, 24}).ok());
  ASSERT_TRUE(Run<run::CsvMonitor>({.run_id = "mine"}, 0, {8, 16, 24}).ok());
  const std::string path = EventFiles().at(0), events = Read(path), lines = Read(Lr());
  const run::MonitorOwner resumed{.run_id = "mine", .resumes = true};
  const std::string right = lines.substr(0, lines.find("24,"));
  for (const bool csv : {false, true}) {
    bool reached = true;
    for (size_t at = 0; reached; ++at) {
      Write(path, events);
      Write(Lr(), lines);
      const Tampered ran = RunTampered(
          {.calls = {SYS_read, SYS_pread64, SYS_readv, SYS_getdents64, SYS_openat}, .at = at, .error = EIO},
          [&] {
            return (csv ? Run<run::CsvMonitor>(resumed, 16, {}) : Run<run::EventFile>(resumed, 16, {})).ok()
                       ? 0
                       : 1;
          });
      if (!ran.can) GTEST_SKIP() << "no process can be traced here";
      reached = ran.reached;
      // A call of the C library's own (locale, time zone) may fail without harm: then the result is right.
      EXPECT_THAT(ran.code, AnyOf(reached ? 1 : 0, 0)) << at;
      const bool failed = ran.code != 0;
      if (csv && !failed) {
        EXPECT_EQ(Read(Lr()), right) << at;
      } else if (csv) {
        EXPECT_THAT(Read(Lr()), AnyOf(lines, right)) << at;
      } else {
        EXPECT_EQ(Read(path) == events, failed) << at;
      }
      EXPECT_THAT(EventFiles(), SizeIs(1)) << at;
    }
  }
}

// 96 for a 16: all behind it would go.
TEST_F(MonitorTest, AFlippedDigitOfASampleCutsNothing) {
  ASSERT_TRUE(Run<run::CsvMonitor>({.run_id = "mine"}, 0, {8, 16, 24, 32}).ok());
  std::string damaged = Read(Lr());
  damaged[damaged.find("16,")] = '9';
  Write(Lr(), damaged);
  const absl::Status status = Run<run::CsvMonitor>({.run_id = "mine", .resumes = true}, 24, {32});
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(Read(Lr()), damaged);
}

TEST_F(MonitorTest, ALongEventFileIsReadInPieces) {
  std::vector<int64_t> samples;
  for (int64_t x = 1; x <= 3000; ++x) samples.push_back(x);  // 200 KB
  ASSERT_TRUE(Run<run::EventFile>({.run_id = "mine"}, 0, samples).ok());
  ASSERT_TRUE(Run<run::EventFile>({.run_id = "mine", .resumes = true}, 2999, {2999, 3000}).ok());
  EXPECT_EQ(Steps(), samples);
}

TEST_F(MonitorTest, EventFilesOfOtherRunsStayAndThoseOfAReplacedOneGo) {
  const std::string first = "01234567-0123456789abcdef", second = "python-0123456789ab";
  ASSERT_TRUE(Run<run::EventFile>({.run_id = first}, 0, {8}).ok());
  ASSERT_TRUE(Run<run::EventFile>({.run_id = second}, 0, {8}).ok());
  EXPECT_THAT(EventFiles(), SizeIs(2));
  ASSERT_TRUE(Run<run::EventFile>({.run_id = "third", .replaces = {first, second}}, 0, {4}).ok());
  ASSERT_THAT(EventFiles(), ElementsAre(HasSubstr(".third")));
  EXPECT_THAT(Steps(), ElementsAre(4));
}

// Who replaces a run that a stranger made loses nothing but that run's files.
TEST_F(MonitorTest, AForgedIdOfARunNamesNoFileOfOthers) {
  const std::string name = "events.out.tfevents.123.host.";
  const std::vector<std::string> others = {name + "v2", name + "profile-empty"};
  for (const std::string& other : others) Write(dir_ + "/" + other, "others'");
  run::MonitorOwner owner{.run_id = "mine"};
  owner.replaces = {"v2", "profile-empty", "tfevents.123.host.v2", "", "-", "../../x"};
  ASSERT_TRUE(Run<run::EventFile>(owner, 0, {4}).ok());
  for (const std::string& other : others) EXPECT_TRUE(std::filesystem::exists(dir_ + "/" + other)) << other;
  for (const char* const id : {"", "..", "../../x", "a/b", "a b", "line\nbreak", "a.b"}) {
    const absl::Status refused = run::EventFile::Open(dir_ + "/new", {.run_id = id}).status();
    EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
  }
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/new"));
}

// What could not be looked at is not told as something else.
TEST_F(MonitorTest, AFileThatCannotBeLookedAtIsAnErrorOfTheDrive) {
  const std::string path = dir_ + "/file";
  Write(path, "");
  size_t failed = 0;
  for (size_t at = 0;; ++at) {
    const Tampered ran = RunTampered({.calls = {SYS_fstat, SYS_newfstatat}, .at = at, .error = EIO}, [&] {
      const absl::Status made = run::MakeDirectory("csv_monitor", dir_);
      const absl::Status opened = run::AppendFile::Open("csv_monitor", path).status();
      for (const absl::Status& status : {made, opened}) {
        if (!status.ok()) return status.message().find("Input/output error") != std::string::npos ? 1 : 2;
      }
      return 0;
    });
    if (!ran.can) GTEST_SKIP() << "no process can be traced here";
    EXPECT_LE(ran.code, 1) << at;
    failed += ran.code == 1 ? 1 : 0;
    if (!ran.reached) break;
  }
  EXPECT_GE(failed, 2u);
}

TEST_F(MonitorTest, WhatCannotBeADirectoryIsRefused) {
  Write(dir_ + "/file", "");
  const absl::Status status = run::CsvMonitor::Open(dir_ + "/file/job", {.run_id = "mine"}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("csv_monitor"), HasSubstr("/file/job")));
  EXPECT_FALSE(run::EventFile::Open(dir_ + "/file/job", {.run_id = "mine"}).ok());
}

TEST(Monitors, NamesAreDeepSpeeds) {
  const auto tags = [](const nlohmann::json& entry, bool scales_loss) {
    std::vector<std::string> names;
    for (const run::Scalar& scalar : run::ScalarsOf(entry, scales_loss)) names.push_back(scalar.tag);
    return names;
  };
  const nlohmann::json step = {{"step", 1}, {"loss", nullptr}, {"lr", 0.5}, {"loss_scale", 4}};
  EXPECT_THAT(tags(step, false), ElementsAre("Train/Samples/train_loss", "Train/Samples/lr"));
  EXPECT_THAT(tags(step, true),
              ElementsAre("Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/loss_scale"));
  EXPECT_TRUE(std::isnan(run::ScalarsOf(step, false)[0].value));
  EXPECT_THAT(tags({{"step", 1}, {"loss", 2}, {"windows", 3}}, true), ElementsAre("Train/Samples/eval_loss"));
}

TEST(Monitors, NoneIsOnUnlessTheConfigSaysSo) {
  const auto monitors = run::Monitors::Open(run::Config{}, {.run_id = "mine"}, false);
  ASSERT_TRUE(monitors.ok());
  EXPECT_FALSE(monitors->any());
}

// The text exposition format of Prometheus, as its manual has it.
TEST(PrometheusText, LabelsAreEscapedAndNumbersWritten) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(
      run::PrometheusText({{.name = "a_total",
                            .help = "Of all.",
                            .type = run::Metric::Type::kCounter,
                            .samples = {{.labels = {{"cause", "read"}}, .value = 0.1},
                                        {.labels = {{"cause", "x\"\\\n"}}, .value = 12345678901}}},
                           {.name = "b", .help = "H", .samples = {{.labels = {}, .value = -inf}}},
                           {.name = "c", .help = "H", .samples = {{.labels = {}, .value = std::nan("")}}}},
                          {{"run_id", "r"}}),
      "# HELP a_total Of all.\n# TYPE a_total counter\n"
      "a_total{run_id=\"r\",cause=\"read\"} 0.10000000000000001\n"
      "a_total{run_id=\"r\",cause=\"x\\\"\\\\\\n\"} 12345678901\n"
      "# HELP b H\n# TYPE b gauge\nb{run_id=\"r\"} -Inf\n"
      "# HELP c H\n# TYPE c gauge\nc{run_id=\"r\"} NaN\n");
}

TEST(PrometheusFile, WhatCannotBeWrittenIsToldOnceUntilItCan) {
  std::string directory = (std::filesystem::temp_directory_path() / "prometheus_test.XXXXXX").string();
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  run::PrometheusFile file(directory + "/run.prom", {});
  const std::vector<run::Metric> metrics = {
      {.name = "a", .help = "H", .samples = {{.labels = {}, .value = 1}}}};
  EXPECT_TRUE(file.Write(metrics).ok());
  for (int i = 0; i < 2; ++i) {
    std::filesystem::remove_all(directory);
    EXPECT_FALSE(file.Write(metrics).ok());
    EXPECT_TRUE(file.Write(metrics).ok()) << "told already";
    EXPECT_FALSE(std::filesystem::exists(directory));
    std::filesystem::create_directory(directory);
    EXPECT_TRUE(file.Write(metrics).ok());
    EXPECT_TRUE(std::filesystem::exists(directory + "/run.prom"));
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace penstock::tools::monitor_test
