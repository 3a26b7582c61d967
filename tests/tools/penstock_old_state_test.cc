// What earlier versions left on disk, opened by this one: tests/golden/state-*.json, one a version, which
// tests/golden/make_state.py makes with that version's program. Every file lies elsewhere than when it was
// written.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "tests/tools/penstock_state.h"

namespace penstock::tools::penstock_old_state_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using namespace testing_support;
namespace fs = std::filesystem;

// A BLAS of another processor rounds otherwise, and every step doubles what that makes. Bytes are compared
// exactly, by checksums and the export.
constexpr double kRounding = 5e-3;

std::string Fnv1a(const std::string& bytes) {
  uint64_t value = 0xcbf29ce484222325;
  for (const char byte : bytes) value = (value ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return absl::StrFormat("%016x", value);
}

// A file of the given length whose only bytes that are not zero are `parts`.
void Unpack(const std::string& path, const json& file) {
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream out(path, std::ios::binary);
  for (const auto& [offset, text] : file["parts"].items()) {
    std::string bytes;
    ASSERT_TRUE(absl::Base64Unescape(text.get<std::string>(), &bytes)) << path << " at " << offset;
    out.seekp(std::stoll(offset));
    out << bytes;
  }
  out.close();
  ASSERT_TRUE(out.good()) << path;
  fs::resize_file(path, file["length"].get<uintmax_t>());
}

// Whether all that `before` says is said by `now` too, which may say more. How much of a sparse file is
// allocated is no matter.
void ExpectSaid(const json& before, const json& now, const std::string& where) {
  if (before.is_object()) {
    for (const auto& [key, value] : before.items()) {
      if (key == "allocated_bytes") continue;
      ASSERT_TRUE(now.contains(key)) << where << " lacks " << key;
      ExpectSaid(value, now[key], where + "." + key);
    }
  } else if (before.is_array()) {
    ASSERT_EQ(before.size(), now.size()) << where;
    for (size_t i = 0; i < before.size(); ++i)
      ExpectSaid(before[i], now[i], where + "[" + std::to_string(i) + "]");
  } else {
    EXPECT_EQ(before, now) << where;
  }
}

class OldStateTest : public CliTest {
 protected:
  static std::vector<json> Versions() {
    std::vector<json> versions;
    for (const auto& entry : fs::directory_iterator(PENSTOCK_GOLDEN)) {
      if (!absl::StartsWith(entry.path().filename().string(), "state-")) continue;
      versions.push_back(json::parse(ReadFile(entry.path()), nullptr, /*allow_exceptions=*/false));
      EXPECT_TRUE(versions.back().is_object()) << entry.path();
    }
    EXPECT_FALSE(versions.empty());
    return versions;
  }

  // A new directory with the run's files; nothing of what was done to another one is in it.
  std::string Unpacked(const json& run) {
    const std::string directory = dir_ + "/unpacked" + std::to_string(unpacked_++);
    for (const auto& [path, file] : run["files"].items()) Unpack(directory + "/" + path, file);
    return directory;
  }

  // Steps on, and its log's lines.
  static std::vector<json> Resume(const std::string& directory, const json& arguments) {
    const Ran ran = Program(directory, arguments.get<Arguments>()).Wait();
    EXPECT_EQ(ran.code, 0) << ran.err;
    std::vector<json> steps;
    for (const std::string& line : Lines(ReadFile(directory + "/more.log")))
      steps.push_back(json::parse(line));
    return steps;
  }

 private:
  int unpacked_ = 0;
};

TEST_F(OldStateTest, IsReadAsItWasWritten) {
  for (const json& version : Versions()) {
    for (const json& run : version["runs"]) {
      const std::string directory = Unpacked(run);
      for (const json& asked : run["asked"]) {
        SCOPED_TRACE(version["made_with"].get<std::string>() + ": " + run["name"].get<std::string>() + ": " +
                     asked["open"].dump());
        const auto open = asked["open"].get<Arguments>();
        const Ran inspect = Program(directory, Arguments{"inspect"} + open + Arguments{"--json"}).Wait();
        ASSERT_EQ(inspect.code, 0) << inspect.err;
        ExpectSaid(asked["inspect"], json::parse(inspect.out), "inspect");
        const Ran verify = Program(directory, Arguments{"verify"} + open).Wait();
        EXPECT_EQ(verify.code, 0) << verify.err;
        EXPECT_THAT(verify.out, HasSubstr("every checksum matches"));
        const Ran exported =
            Program(directory, Arguments{"export"} + open + Arguments{"weights", "--quiet", "--overwrite"})
                .Wait();
        ASSERT_EQ(exported.code, 0) << exported.err;
        EXPECT_EQ(Fnv1a(TensorBytes(directory + "/weights")), asked["weights"].get<std::string>());
        const Ran sample =
            Program(directory, Arguments{"sample"} + open +
                                   Arguments{"--tokens", "5", "--prompt", "1", "--threads", "1"})
                .Wait();
        EXPECT_EQ(sample.code, 0) << sample.err;
      }
    }
  }
}

TEST_F(OldStateTest, GoesOnWithTheSameLosses) {
  for (const json& version : Versions()) {
    for (const json& run : version["runs"]) {
      for (const json& asked : run["asked"]) {
        SCOPED_TRACE(version["made_with"].get<std::string>() + ": " + run["name"].get<std::string>() + ": " +
                     asked["open"].dump());
        const std::string directory = Unpacked(run);
        const std::vector<json> steps = Resume(directory, asked["resume"]);
        ASSERT_EQ(steps.size(), asked["steps"].size());
        for (size_t i = 0; i < steps.size(); ++i) {
          const json &now = steps[i], &before = asked["steps"][i];
          EXPECT_EQ(now["step"], before["step"]);
          EXPECT_EQ(now["lr"], before["lr"]);
          EXPECT_EQ(now["loss_scale"], before["loss_scale"]);
          const double loss = before["loss"];
          EXPECT_NEAR(now["loss"], loss, kRounding * loss) << "step " << before["step"];
          // Of a run that began anew the first would be that of the first step.
          EXPECT_GT(std::abs(loss - run["losses"][0].get<double>()), 20 * kRounding * loss);
        }
      }
    }
  }
}

}  // namespace
}  // namespace penstock::tools::penstock_old_state_test
