#include "tools/machine/verb_env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tools/machine/env_probe.h"
#include "tools/machine/nvme_health.h"

namespace penstock::tools::verb_env_test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

struct Result {
  int code = -1;
  std::string out;
  std::string err;
};

Result Env(std::vector<std::string> arguments) {
  std::vector<const char*> argv = {"env"};
  for (const std::string& word : arguments) argv.push_back(word.c_str());
  std::ostringstream out;
  std::ostringstream err;
  Result result;
  result.code = RunEnv(static_cast<int>(argv.size()), argv.data(), out, err);
  result.out = out.str();
  result.err = err.str();
  return result;
}

class EnvTest : public testing::Test {
 protected:
  EnvTest() {
    std::string name = (std::filesystem::current_path() / "env_test.XXXXXX").string();
    dir_ = ::mkdtemp(name.data());
  }
  ~EnvTest() override { std::filesystem::remove_all(dir_); }
  std::string dir_;
};

// The page as NVMe 1.4 lays it out, figure 194.
TEST(NvmeHealth, ASmartLogSaysWhatWasWritten) {
  std::array<std::byte, 512> log{};
  log[3] = std::byte{100};
  log[5] = std::byte{7};
  log[32] = std::byte{2};         // data units read
  log[48 + 2] = std::byte{0x01};  // 65,536 of them written
  log[160] = std::byte{3};
  NvmeHealth health = ParseSmartLog(log);
  EXPECT_EQ(health.read_bytes, 2 * 512'000.0);
  EXPECT_EQ(health.written_bytes, 65'536 * 512'000.0);
  EXPECT_EQ(WearText(health),
            "0.03355 TB written, 7% of its life used, 100% of its spare left, 3 media errors");
  log[48 + 8] = std::byte{1};  // of 128 bits
  EXPECT_EQ(ParseSmartLog(log).written_bytes, (std::ldexp(1.0, 64) + 65'536) * 512'000);
}

TEST(NvmeHealth, WhatIsNoControllerIsAnError) {
  EXPECT_FALSE(ReadNvmeHealth("/nowhere/nvme0").ok());
  EXPECT_FALSE(ReadNvmeHealth("/dev/null").ok());
}

TEST_F(EnvTest, TheDrivesOwnCountOfWearIsOneQuietLine) {
  const nlohmann::json json = nlohmann::json::parse(Env({"--dir", dir_, "--json"}).out);
  int lines = 0;
  for (const auto& [name, item] : json["io"].items()) {
    if (name.find("_wear") == std::string::npos) continue;
    ++lines;
    EXPECT_EQ(item["state"], "ok") << item;
  }
  EXPECT_EQ(lines, std::max<int>(1, static_cast<int>(NvmeControllers().size())));
}

TEST_F(EnvTest, JsonHasEverySectionAndLeavesNothingBehind) {
  const Result result = Env({"--dir", dir_, "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json json = nlohmann::json::parse(result.out);
  for (const char* section : {"kernel", "cpu", "memory", "io", "directory", "torch", "cuda"}) {
    ASSERT_TRUE(json.contains(section)) << section;
    for (const auto& [name, item] : json[section].items()) {
      ASSERT_TRUE(item["value"].is_string()) << name;
      const std::string state = item["state"];
      EXPECT_TRUE(state == "ok" || state == "limited" || state == "missing") << state;
      // What is not all right says what that costs.
      EXPECT_EQ(item.contains("cost") && !item["cost"].get<std::string>().empty(), state != "ok")
          << section << "." << name;
    }
  }
  EXPECT_TRUE(json["kernel"].contains("release"));
  EXPECT_TRUE(json["cpu"].contains("simd"));
  EXPECT_TRUE(json["memory"].contains("memlock"));
  EXPECT_TRUE(json["memory"].contains("arena"));
  EXPECT_TRUE(json["io"].contains("best_backend"));
  EXPECT_TRUE(json["io"].contains("io_uring_rings") != json["io"].contains("registered_buffers"));
  EXPECT_TRUE(json["directory"].contains("direct_io"));
  EXPECT_TRUE(json["torch"].contains("blas"));
  EXPECT_TRUE(json["cuda"].contains("nccl"));
  EXPECT_TRUE(json["cuda"].contains("gds"));
  if (json["directory"]["direct_io"]["state"] == "ok") {
    // The plainest backend works wherever direct I/O does.
    EXPECT_NE(json["io"]["threads"]["state"], "missing") << json["io"]["threads"];
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir_));
}

TEST_F(EnvTest, TextHasALineAnItem) {
  const Result result = Env({"--dir", dir_});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, StartsWith("kernel\n  release"));
  EXPECT_THAT(result.out, HasSubstr("\ndirectory\n  path"));
  EXPECT_THAT(result.out, HasSubstr(dir_));
}

TEST_F(EnvTest, WrongFlagsAndDirectories) {
  const std::string file = dir_ + "/file";
  std::ofstream(file) << "x";
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--dirr", dir_},
       "penstock env: unknown flag --dirr (did you mean \"--dir\"?); see penstock env --help\n"},
      {{"--dir", dir_ + "/absent"}, "penstock env: directory " + dir_ + "/absent: No such file"},
      {{"--dir", file}, "penstock env: directory " + file + ": is not a directory\n"},
      {{"word"}, "penstock env: unexpected word \"word\""},
      {{"--dir"}, "penstock env: "},
  };
  for (const auto& [arguments, says] : cases) {
    const Result result = Env(arguments);
    EXPECT_EQ(result.code, 2) << says;
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, StartsWith(says));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST_F(EnvTest, ItemsAreUniqueByName) {
  const auto items = ProbeEnvironment(dir_);
  ASSERT_TRUE(items.ok()) << items.status();
  std::set<std::string> names;
  for (const EnvItem& item : *items) {
    EXPECT_TRUE(names.insert(item.section + "." + item.name).second) << item.section << "." << item.name;
    EXPECT_FALSE(item.value.empty()) << item.name;
  }
}

TEST(EnvParts, BracketedChoice) {
  EXPECT_EQ(BracketedChoice("always [madvise] never"), "madvise");
  EXPECT_EQ(BracketedChoice("[none] mq-deadline"), "none");
  EXPECT_EQ(BracketedChoice("none"), "");
  EXPECT_EQ(BracketedChoice("] ["), "");
  EXPECT_EQ(BracketedChoice(""), "");
}

TEST(EnvParts, MemInfoValue) {
  constexpr std::string_view kInfo =
      "MemTotal:       24689 kB\nMemFree: 12 kB\nHugePages_Total:       7\nBad: x kB\n";
  EXPECT_EQ(MemInfoValue(kInfo, "MemTotal"), 24689 * 1024);
  EXPECT_EQ(MemInfoValue(kInfo, "HugePages_Total"), 7);
  EXPECT_EQ(MemInfoValue(kInfo, "Mem"), -1);
  EXPECT_EQ(MemInfoValue(kInfo, "Bad"), -1);
  EXPECT_EQ(MemInfoValue(kInfo, "Absent"), -1);
  EXPECT_EQ(MemInfoValue("", "MemTotal"), -1);
}

TEST(EnvParts, MappedFile) {
  constexpr std::string_view kMaps =
      "55d0-55d1 r--p 00000000 fe:01 123   /usr/bin/penstock\n"
      "7f00-7f01 rw-p 00000000 00:00 0 \n"
      "7f10-7f11 r-xp 00000000 fe:01 456   /usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3\n"
      "7ffd-7ffe rw-p 00000000 00:00 0     [stack]\n";
  EXPECT_EQ(MappedFile(kMaps, "openblas"), "/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3");
  EXPECT_EQ(MappedFile(kMaps, "mkl"), "");
  EXPECT_EQ(MappedFile(kMaps, "fe:01"), "");  // names only
}

// Exit code and output of the program of DeepSpeed's name.
std::pair<int, std::string> DsReport(const std::string& flags) {
  FILE* const pipe = popen((std::string(DS_REPORT) + " " + flags + " 2>&1").c_str(), "r");
  std::string text;
  char buffer[4096];
  for (size_t n = 0; pipe != nullptr && (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    text.append(buffer, n);
  return {pipe == nullptr ? -1 : WEXITSTATUS(pclose(pipe)), text};
}

TEST(DsReport, TellsWhatEnvTellsAndTakesDeepSpeedsFlags) {
  const auto [code, text] = DsReport("--hide_operator_status --json --hide_errors_and_warnings");
  EXPECT_EQ(code, 0) << text;
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  ASSERT_TRUE(json.is_object()) << text;
  EXPECT_GT(json.size(), 2u);
#ifdef PENSTOCK_PROGRAM
  // With LibTorch: it is told of the program that trains.
  EXPECT_EQ(json["torch"]["blas"]["state"], "ok") << json["torch"];
  EXPECT_EQ(text.find("cannot train"), std::string::npos);
#endif
  const auto [wrong, line] = DsReport("--hide_operators");
  EXPECT_EQ(wrong, 2);
  EXPECT_THAT(line, HasSubstr("--hide_operators"));
}

}  // namespace
}  // namespace penstock::tools::verb_env_test
