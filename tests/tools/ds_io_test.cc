// ds_io and ds_nvme_tune: their arguments, their lines, their exit codes, and that what they say is so.
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/ds/ds_io_args.h"
#include "tools/ds/ds_io_bench.h"
#include "tools/ds/ds_io_tune.h"

namespace penstock::tools::ds_io_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using Arguments = std::vector<std::string>;

std::string WhyNot(const Arguments& arguments) {
  std::string help;
  const auto options = ParseDsIo(arguments, &help);
  return options.ok() ? "" : std::string(options.status().message());
}

std::string WhyNotTune(const Arguments& arguments) {
  std::string help;
  const auto options = ParseTune(arguments, &help);
  return options.ok() ? "" : std::string(options.status().message());
}

TEST(DsIoFlagsTest, EveryFlagOfTheOriginalIsTaken) {
  std::string help;
  const auto o = ParseDsIo({"--folder",
                            "/d",
                            "--io_size",
                            "400M",
                            "--fast_io_size",
                            "32M",
                            "--read",
                            "--multi_process",
                            "3",
                            "--block_size=8M",
                            "--queue_depth",
                            "64",
                            "--single_submit",
                            "--sequential_requests",
                            "--validate",
                            "--engine",
                            "libaio",
                            "--loops",
                            "5",
                            "--io_parallel",
                            "4",
                            "--torch_legacy_save",
                            "--use_accelerator_pin_memory",
                            "--warmup_loops",
                            "0",
                            "--include_warmup_time",
                            "--different_file_each_iteration",
                            "--json",
                            "f"},
                           &help);
  ASSERT_TRUE(o.ok()) << o.status();
  EXPECT_EQ(o->io_bytes, 400ull << 20);
  EXPECT_EQ(o->block_bytes, 8ull << 20);
  EXPECT_EQ(o->queue_depth, 64);
  EXPECT_EQ(o->Parallel(), 4u);
  EXPECT_TRUE(o->read && o->single_submit && o->sequential_requests && o->validate && o->include_warmup_time);
  EXPECT_EQ(o->Mapping().size(), 3u);
  const auto mapped = ParseDsIo({"--folder_to_device_mapping", "/a:0", "/b:1", "--io_size", "1M"}, &help);
  ASSERT_TRUE(mapped.ok());
  EXPECT_EQ(mapped->Mapping()[1], (std::pair<std::string, std::string>("1", "/b")));
  EXPECT_EQ(WhyNot({"--folder", "/d", "--io_s", "1K"}), "");  // a unique prefix, as argparse takes it
}

TEST(DsIoFlagsTest, WrongFlagsAreNamed) {
  EXPECT_THAT(WhyNot({}), HasSubstr("--io_size is required"));
  EXPECT_THAT(WhyNot({"--io_size", "1M"}), HasSubstr("--folder"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--folder_to_device_mapping", "b:0"}),
              HasSubstr("exclude"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder_to_device_mapping", "nocolon"}), HasSubstr("DIR:DEVICE"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder_to_device_mapping", "a:0", "b:0"}), HasSubstr("twice"));
  EXPECT_THAT(WhyNot({"--io_size", "0", "--folder", "a"}), HasSubstr("more than 0"));
  EXPECT_THAT(WhyNot({"--io_size", "-5", "--folder", "a"}), HasSubstr("not a size"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--queue_dept", "x"}), HasSubstr("--queue_depth"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--queue_depht", "1"}),
              HasSubstr("did you mean --queue_depth"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--lo"}), HasSubstr("expected one value"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--fo", "a"}), HasSubstr("ambiguous"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--read=1"}), HasSubstr("takes no value"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--block_size", "1000"}), HasSubstr("4096"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "stray"}), HasSubstr("stray"));
  EXPECT_EQ(WhyNot({"--io_size", "1M", "--folder", "a", "--gpu", "--use_gds"}), "");
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder_to_device_mapping", "a:x", "--gpu"}), HasSubstr("\"x\""));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--gpu", "--use_gds", "--slow_bounce_buffer"}),
              HasSubstr("no bounce buffer"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--slow_bounce_buffer"}), HasSubstr("needs --gpu"));
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--use_gds"}), HasSubstr("needs --gpu"));
  for (const char* engine : {"aio_basic", "torch_io", "torch_fastio"}) {
    EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--engine", engine}), HasSubstr("use aio_handle"))
        << engine;
  }
  EXPECT_THAT(WhyNot({"--io_size", "1M", "--folder", "a", "--engine", "warp"}), HasSubstr("none of"));
}

// Arguments of all kinds, thrown together: an answer in every case, and never options that make no sense.
TEST(DsIoFlagsTest, ParsingSurvivesAnything) {
  const Arguments pool = {"--folder",
                          "--io_size",
                          "--read",
                          "--multi_process",
                          "--block_size",
                          "--queue_depth",
                          "--engine",
                          "--loops",
                          "--io_parallel",
                          "--folder_to_device_mapping",
                          "--json",
                          "--validate",
                          "--",
                          "-",
                          "",
                          "--nvme_dir",
                          "--sweep_config",
                          "--log_dir",
                          "--=",
                          "--f",
                          "--io_size=",
                          "--io_size=4K",
                          "a",
                          "a:0",
                          ":",
                          "1",
                          "0",
                          "-1",
                          "1M",
                          "99999999999999999999",
                          "1e308",
                          "\xff\xfe",
                          "io_uring",
                          "--read=1",
                          "--lo"};
  std::mt19937_64 random(1);
  int good = 0;
  for (int i = 0; i < 50000; ++i) {
    Arguments arguments;
    if (i % 2 == 0) arguments = {"--folder", "a", "--io_size", "4K"};  // half of them begin well
    for (uint64_t n = random() % 9; n != 0; --n) {
      arguments.push_back(pool[random() % pool.size()]);
      if (random() % 20 == 0) arguments.back() += static_cast<char>(random() % 256);
    }
    std::string help;
    const auto options = ParseDsIo(arguments, &help);
    if (options.ok() && help.empty()) {
      ++good;
      ASSERT_GT(options->io_bytes, 0u);
      ASSERT_EQ(options->block_bytes % 4096, 0u);
      ASSERT_FALSE(options->Mapping().empty());
    }
    (void)ParseTune(arguments, &help);
  }
  EXPECT_GT(good, 10);
}

TEST(TuneFlagsTest, FlagsAndMistakes) {
  EXPECT_EQ(WhyNotTune({"--nvme_dir", "/a", "/b", "--no_read", "--io_size", "1G", "--flush_page_cache",
                        "--log_dir", "l", "--loops", "2", "--verbose", "--sweep_config", "s"}),
            "");
  EXPECT_THAT(WhyNotTune({}), HasSubstr("--nvme_dir is required"));
  EXPECT_THAT(WhyNotTune({"--nvme_dir", "a", "--no_read", "--no_write"}), HasSubstr("nothing to measure"));
  EXPECT_THAT(WhyNotTune({"--nvme_dir", "a", "b", "a"}), HasSubstr("a is named twice"));
  EXPECT_THAT(WhyNotTune({"--nvme_dir", "a", "--gds"}), HasSubstr("needs --gpu"));
  EXPECT_THAT(WhyNotTune({"--nvme_dir", "a", "--engine", "torch_io"}), HasSubstr("none of"));
}

TEST(SweepTest, IsTheProductInTheOrderOfItsKeys) {
  const auto points = ReadSweep(
      R"({"block_size": ["1M", 8388608], "queue_depth": [32, "64"], "sequential_requests": [true, "false"], "io_parallel": [2]})");
  ASSERT_TRUE(points.ok()) << points.status();
  ASSERT_EQ(points->size(), 8u);
  EXPECT_EQ((*points)[0].block_bytes, 1ull << 20);
  EXPECT_TRUE((*points)[0].sequential);
  EXPECT_FALSE((*points)[1].sequential);
  EXPECT_EQ((*points)[2].queue_depth, 64u);
  EXPECT_EQ((*points)[7].block_bytes, 8ull << 20);
  EXPECT_EQ((*points)[7].parallel, 2u);
  for (const char* spelling : {"intra_op_parallelism", "num_threads", "thread_count"}) {
    const auto one = ReadSweep(std::string("{\"") + spelling + "\": [4]}");
    ASSERT_TRUE(one.ok()) << one.status();
    EXPECT_EQ((*one)[0].parallel, 4u);
  }
}

TEST(SweepTest, MistakesAreNamed) {
  for (const char* bad : {"", "[]", "{}", "3", "{\"block_size\": 1}", "{\"block_size\": []}",
                          "{\"block_size\": [1000]}", "{\"queue_depth\": [0]}", "{\"queue_depth\": [1.5]}",
                          "{\"queue_depth\": [null]}", "{\"blocksize\": [\"1M\"]}",
                          "{\"single_submit\": [2]}", "{\"queue_depth\": [4096], \"io_parallel\": [2]}"}) {
    const auto points = ReadSweep(bad);
    EXPECT_TRUE(absl::IsInvalidArgument(points.status())) << bad;
    EXPECT_THAT(std::string(points.status().message()), HasSubstr("sweep config")) << bad;
  }
}

TunePoint Point(uint64_t block_mib, uint64_t depth, double gbps) {
  TunePoint point;
  point.block_bytes = block_mib << 20;
  point.queue_depth = depth;
  point.read_bytes_per_s = gbps * 1e9;
  return point;
}

TEST(SweepTest, WhatSaturatesIsChosenAndNotTheLastPercent) {
  const std::vector<TunePoint> points = {Point(1, 1, 2.0), Point(1, 4, 3.5), Point(1, 8, 3.52),
                                         Point(4, 1, 3.4), Point(1, 64, 3.6)};
  EXPECT_EQ(Choose(points).in_flight_bytes(), 4ull << 20);
  EXPECT_EQ(Choose(points).queue_depth, 4u);
  const TunePoint advice = Recommend(Point(4, 1, 5));
  EXPECT_EQ(advice.in_flight_bytes(), 8ull << 20);
  EXPECT_GE(advice.queue_depth, 4u);
}

TEST(SweepTest, TheBlockIsReadyToPaste) {
  TunePoint point = Point(1, 16, 1);
  point.sequential = true;
  const json block = json::parse(AioBlock(point));
  EXPECT_EQ(block["aio"]["block_size"], 1 << 20);
  EXPECT_EQ(block["aio"]["queue_depth"], 16);
  EXPECT_EQ(block["aio"]["intra_op_parallelism"], 1);
  EXPECT_TRUE(block["aio"]["single_submit"].is_boolean());
  EXPECT_EQ(block["aio"]["overlap_events"], false);
}

// --- The programs
// --------------------------------------------------------------------------------------------------------

struct Outcome {
  int code = -1;
  std::string out;
  std::string err;
};

class ProgramTest : public testing::Test {
 protected:
  ProgramTest() {
    char name[] = "ds-io-test-XXXXXX";
    directory_ = std::filesystem::absolute(mkdtemp(name)).string();
  }
  ~ProgramTest() override { std::filesystem::remove_all(directory_); }

  static std::string Slurp(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  Outcome Run(const std::string& command) {
    const std::string out = directory_ + "/out", err = directory_ + "/err";
    const int status = std::system((command + " >" + out + " 2>" + err).c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, Slurp(out), Slurp(err)};
  }

  std::string directory_;
};

// No std::regex: g++ 12 warns about it falsely under the address sanitizer.
double NumberAfter(const std::string& text, const std::string& label) {
  const size_t at = text.find(label + " = ");
  return at == std::string::npos ? -1 : std::strtod(text.c_str() + at + label.size() + 3, nullptr);
}

TEST_F(ProgramTest, ReadsAndWritesAndSaysTheFourLines) {
  for (const bool read : {true, false}) {
    const std::string op = read ? "Read" : "Write";
    const Outcome run = Run(std::string(DS_IO) + " --folder " + directory_ +
                            " --io_size 32M --queue_depth 8 --validate --json " + directory_ + "/j.json" +
                            (read ? " --read" : ""));
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(run.err, "");
    EXPECT_THAT(run.out, HasSubstr("args = Namespace(folder='"));
    EXPECT_THAT(run.out, HasSubstr("Configuring 1 process to folder mapping\n[0]: process 0 <----> "));
    EXPECT_THAT(run.out, HasSubstr("tid 0: task_latency_sec = ["));
    EXPECT_THAT(run.out, HasSubstr("validated, 33554432 bytes"));
    const double task = NumberAfter(run.out, "Task " + op + " Latency"),
                 speed = NumberAfter(run.out, "Task " + op + " Speed");
    EXPECT_GT(task, 0);
    EXPECT_NEAR(task * speed, 3 * 32.0 / 1024, 1e-9);
    EXPECT_GE(NumberAfter(run.out, "E2E " + op + " Latency"), task);
    EXPECT_GT(NumberAfter(run.out, "E2E " + op + " Speed"), 0);
    const json j = json::parse(Slurp(directory_ + "/j.json"));
    EXPECT_EQ(j["op"], read ? "read" : "write");
    EXPECT_EQ(j["bytes"], 3 * (32 << 20));
    EXPECT_EQ(j["seconds"].size(), 3u);
    EXPECT_EQ(j["errors"], 0);
    EXPECT_LE(j["gbps_min"], j["gbps_median"]);
    EXPECT_LE(j["gbps_median"], j["gbps_max"]);
    EXPECT_GT(j["latency_us"]["p50"], 0);
    EXPECT_LE(j["latency_us"]["p50"], j["latency_us"]["p999"]);
    EXPECT_TRUE(std::filesystem::exists(
        directory_ + (read ? "/_aio_read_33554432.pt.0_0" : "/_aio_write_33554432.pt.0_0")));
    if (read) {
      EXPECT_EQ(j["device_read_bytes"], 3 * (32 << 20));
    }
  }
}

TEST_F(ProgramTest, EveryShapeOfSubmissionAndEveryEngine) {
  for (const std::string flags :
       {"--single_submit", "--sequential_requests", "--single_submit --sequential_requests",
        "--engine libaio", "--engine threads", "--engine io_uring", "--io_parallel 4",
        "--include_warmup_time --warmup_loops 2", "--different_file_each_iteration", "--multi_process 3",
        "--block_size 64K"}) {
    for (const std::string op : {"", " --read"}) {
      const Outcome run = Run(std::string(DS_IO) + " --folder " + directory_ +
                              " --io_size 3000001 --queue_depth 4 --validate " + flags + op);
      ASSERT_EQ(run.code, 0) << flags << op << ": " << run.err;
      EXPECT_THAT(run.out, HasSubstr(op.empty() ? "E2E Write Speed = " : "E2E Read Speed = ")) << flags;
    }
  }
}

TEST_F(ProgramTest, SeveralDirectories) {
  std::filesystem::create_directories(directory_ + "/a");
  std::filesystem::create_directories(directory_ + "/b");
  const Outcome run = Run(std::string(DS_IO) + " --read --io_size 4M --folder_to_device_mapping " +
                          directory_ + "/a:x " + directory_ + "/b:y --json " + directory_ + "/j.json");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("Configuring 2 process to folder mapping"));
  EXPECT_THAT(run.out, HasSubstr("[1]: process y <----> "));
  EXPECT_EQ(json::parse(Slurp(directory_ + "/j.json"))["bytes"], 2 * 3 * (4 << 20));
}

TEST_F(ProgramTest, ExitCodes) {
  EXPECT_EQ(Run(std::string(DS_IO) + " --help").code, 0);
  EXPECT_EQ(Run(std::string(DS_IO)).code, 2);
  EXPECT_EQ(Run(std::string(DS_IO) + " --folder x --io_size 1M --engine torch_io").code, 2);
  EXPECT_EQ(Run(std::string(DS_NVME_TUNE) + " --help").code, 0);
  EXPECT_EQ(Run(std::string(DS_NVME_TUNE)).code, 2);
  // One of three processes cannot work: the others do not wait for it for ever, and the failure has a name.
  const Outcome missing = Run(std::string(DS_IO) + " --io_size 4M --folder_to_device_mapping " + directory_ +
                              ":0 /nonexistent:1 " + directory_ + ":2 --json " + directory_ + "/j.json");
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.err, HasSubstr("/nonexistent/_aio_write_4194304.pt.1_0: No such file or directory"));
  EXPECT_GT(json::parse(Slurp(directory_ + "/j.json"))["errors"], 0);
  const Outcome tune = Run(std::string(DS_NVME_TUNE) + " --nvme_dir /nonexistent --log_dir " + directory_ +
                           "/logs --no_profile");
  EXPECT_EQ(tune.code, 1);
  EXPECT_THAT(tune.err, HasSubstr("/nonexistent"));
  if (std::filesystem::exists("/dev/shm")) {
    const Outcome memory = Run(std::string(DS_IO) + " --folder /dev/shm --io_size 4M");
    EXPECT_EQ(memory.code, 1);
    EXPECT_THAT(memory.err, HasSubstr("tmpfs"));
  }
}

// A result that cannot be stored is still said.
// The signal that the kernel sends with the error would end the program without a word.
TEST_F(ProgramTest, AFileSizeLimitIsAnErrorWithAWayOut) {
  const std::string limit = "ulimit -f 4096; ";  // in 512 bytes
  for (const std::string engine : {"io_uring", "libaio", "threads"}) {
    const Outcome run = Run("( " + limit + "exec " + DS_IO + " --folder " + directory_ +
                            " --io_size 8M --engine " + engine + " )");
    EXPECT_EQ(run.code, 1) << engine << ": " << run.err;
    EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
    EXPECT_THAT(run.err, HasSubstr("File too large")) << engine;
    EXPECT_THAT(run.err, HasSubstr("ulimit -f")) << engine;
  }
  const Outcome tune = Run("( " + limit + "exec " + DS_NVME_TUNE + " --nvme_dir " + directory_ +
                           " --io_size 16M --log_dir " + directory_ + "/log )");
  EXPECT_EQ(tune.code, 1) << tune.err;
  EXPECT_THAT(tune.err, HasSubstr("ulimit -f"));
}

TEST_F(ProgramTest, AnUnwritableJsonCostsNoMeasurement) {
  const Outcome run = Run(std::string(DS_IO) + " --folder " + directory_ + " --io_size 4M --json /nowhere/j");
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.out, HasSubstr("E2E Write Speed = "));
  EXPECT_THAT(run.err, HasSubstr("--json /nowhere/j: write: No such file or directory"));
  const Outcome tune = Run(std::string(DS_NVME_TUNE) + " --nvme_dir " + directory_ +
                           " --io_size 4M --no_profile --json /nowhere/j --log_dir " + directory_ + "/logs");
  EXPECT_EQ(tune.code, 1);
  EXPECT_THAT(tune.out, HasSubstr("\"aio\""));
  EXPECT_THAT(tune.err, HasSubstr("--json /nowhere/j: write: No such file or directory"));
}

// Refused before anything is measured, whatever was there.
TEST_F(ProgramTest, NoResultTakesThePlaceOfAnotherFile) {
  const std::string text = directory_ + "/text.json", sweep = directory_ + "/sweep.json";
  const std::string words = R"({"block_size": ["1M"], "queue_depth": [2]})";
  std::ofstream(text) << R"({"name": "mine"})";
  std::ofstream(sweep) << words;
  const std::string io = std::string(DS_IO) + " --folder " + directory_ + " --io_size 1M --json ";
  const std::string tune = std::string(DS_NVME_TUNE) + " --nvme_dir " + directory_ +
                           " --io_size 1M --log_dir " + directory_ + "/logs --sweep_config " + sweep;
  for (const std::string& command :
       {io + text, tune + " --no_profile --json " + text, tune + " --no_profile --json " + sweep,
        tune + " --profile " + text, tune + " --profile " + sweep, io + directory_ + "/penstock.store",
        tune + " --profile " + directory_ + "/new --json " + directory_ + "/new"}) {
    const Outcome run = Run(command);
    EXPECT_EQ(run.code, 2) << command;
    EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
    EXPECT_EQ(run.out, "");
  }
  EXPECT_EQ(Slurp(text), R"({"name": "mine"})");
  EXPECT_EQ(Slurp(sweep), words);
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/logs"));
  // A file that the benchmark makes itself, before and after.
  const std::string data = directory_ + "/_aio_write_1048576.pt.0_0";
  for (const int code : {1, 2}) {
    EXPECT_EQ(Run(io + data).code, code);
    EXPECT_EQ(std::filesystem::file_size(data), 1u << 20);
  }
}

// A file with holes is read at the speed of memory: that is said.
TEST_F(ProgramTest, ReadsThatReachNoDeviceAreSaid) {
  std::ofstream{directory_ + "/_aio_read_16777216.pt.0_0"}.flush();
  std::filesystem::resize_file(directory_ + "/_aio_read_16777216.pt.0_0", 16 << 20);
  const Outcome run = Run(std::string(DS_IO) + " --folder " + directory_ + " --io_size 16M --read");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr("cache or a hole"));
}

// Memory on a device, with stand-ins for CUDA's runtime and cuFile (tests/tools/fake_cuda.cc) where the real
// ones would be: the stand-in device counts what reaches it, and the comparison is with what it holds.
TEST_F(ProgramTest, TransfersToADeviceGoThroughItsMemory) {
  const std::string fake = "LD_LIBRARY_PATH=" + std::string(FAKE_CUDA_DIRECTORY) + " ";
  for (const std::string flags : {"", " --slow_bounce_buffer", " --use_gds", " --use_gds --io_parallel 3"}) {
    for (const std::string op : {"", " --read"}) {
      const Outcome run = Run(fake + DS_IO + " --folder " + directory_ + " --io_size 8M --multi_process 2" +
                              " --block_size 64K --queue_depth 4 --validate --gpu" + flags + op);
      ASSERT_EQ(run.code, 0) << flags << op << ": " << run.err;
      EXPECT_THAT(run.out, HasSubstr("Configuring 2 gpu to folder mapping"));
      EXPECT_THAT(run.out, HasSubstr("validated, 8388608 bytes"));
    }
  }
  for (const std::string flags : {"", " --gds"}) {
    const Outcome tune = Run(fake + DS_NVME_TUNE + " --nvme_dir " + directory_ + " --io_size 16M --gpu" +
                             flags + " --no_profile --log_dir " + directory_ + "/logs");
    ASSERT_EQ(tune.code, 0) << tune.err;
    EXPECT_THAT(tune.out, HasSubstr("\"aio\""));
  }
  // What fails there is told in one line, whatever it is.
  for (const auto& [fault, told] :
       std::vector<std::pair<std::string, std::string>>{{"devices", "no CUDA device"},
                                                        {"malloc", "cudaMalloc"},
                                                        {"register", "cudaHostRegister"},
                                                        {"copy", "cudaMemcpyAsync"},
                                                        {"driver", "cuFileDriverOpen"},
                                                        {"handle", "cannot be used with cuFile"},
                                                        {"transfer", "cuFileRead"}}) {
    const bool gds = fault == "driver" || fault == "handle" || fault == "transfer";
    const Outcome run = Run("FAKE_CUDA_FAULT=" + fault + " " + fake + DS_IO + " --folder " + directory_ +
                            " --io_size 8M --read --gpu" + (gds ? " --use_gds" : ""));
    EXPECT_EQ(run.code, 1) << fault;
    EXPECT_THAT(run.err, testing::StartsWith("ds_io: error: ")) << fault;
    EXPECT_THAT(run.err, HasSubstr(told)) << fault;
    EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
  }
}

TEST_F(ProgramTest, WithoutADeviceTheLineSaysSo) {
  // An empty directory first in the search path hides no library; where there is a device this is no test.
  const Outcome run = Run(std::string(DS_IO) + " --folder " + directory_ + " --io_size 4M --gpu");
  if (run.code == 0) GTEST_SKIP() << "there is a CUDA device here";
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, testing::ContainsRegex("no CUDA (runtime|device)"));
  EXPECT_THAT(run.err, HasSubstr("leave out --gpu"));
  const Outcome tune = Run(std::string(DS_NVME_TUNE) + " --nvme_dir " + directory_ +
                           " --io_size 4M --gpu --log_dir " + directory_);
  EXPECT_EQ(tune.code, 1);
  EXPECT_THAT(tune.err, testing::ContainsRegex("no CUDA (runtime|device)"));
}

TEST_F(ProgramTest, TuneMeasuresAndEndsWithTheBlock) {
  const std::string sweep = directory_ + "/sweep.json";
  std::ofstream(sweep)
      << R"({"block_size": ["1M", "512K"], "queue_depth": [2, 8], "sequential_requests": [true, false]})";
  for (const std::string& flags : {" --sweep_config " + sweep, " --no_read --sweep_config " + sweep,
                                   " --no_write --sweep_config " + sweep, std::string()}) {
    const Outcome run =
        Run(std::string(DS_NVME_TUNE) + " --nvme_dir " + directory_ + " --io_size 16M --log_dir " +
            directory_ + "/logs --json " + directory_ + "/j.json --profile " + directory_ + "/profiles.json" +
            (flags.empty() ? "" : " --no_profile") + flags);
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_THAT(run.out, HasSubstr("Running DeepNVMe performance tuning on ['" + directory_ + "']"));
    EXPECT_THAT(run.out, HasSubstr("Best performance (GB/sec): read = "));
    EXPECT_THAT(run.out, HasSubstr("Plan: "));
    const json block = json::parse(run.out.substr(run.out.find("{\n")));
    EXPECT_GE(block["aio"]["queue_depth"], 2);
    EXPECT_TRUE(block["aio"]["overlap_events"].is_boolean());
    const json j = json::parse(Slurp(directory_ + "/j.json"));
    EXPECT_GE(j["points"].size(), flags.empty() ? 5u : 8u);
    EXPECT_FALSE(std::filesystem::exists(directory_ + "/profiles.json") && !flags.empty());
  }
  const std::string log =
      Slurp(directory_ + "/logs/_aio_bench_read_logs/read_block_sequential_ftd1_d8_bs512K_p1.txt");
  EXPECT_GT(NumberAfter(log, "E2E Read Speed"), 0);
  const json profiles = json::parse(Slurp(directory_ + "/profiles.json"));
  EXPECT_GT(profiles["profiles"][0]["knee_bytes"], 0);
  // Nothing is left of the test data.
  for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
    EXPECT_THAT(entry.path().filename().string(), testing::Not(HasSubstr(".ds_nvme_tune")));
  }
}

}  // namespace
}  // namespace penstock::tools::ds_io_test
