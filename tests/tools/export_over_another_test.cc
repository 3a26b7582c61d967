// Exports into a directory that holds an older one, killed at every change of a name, and two at once. (The
// one that is killed is no program of its own: a traced start takes half a second.)
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/soak.h"
#include "tests/tampered_call.h"
#include "tests/tools/penstock_state.h"
#include "tools/base/verbs.h"

namespace penstock::tools::export_over_another_test {
namespace {

using nlohmann::json;
using namespace testing_support;

class ExportOverAnotherTest : public CliTest {};

// The step of the export in a directory that a reader finds; -1: none to begin with, -2: parts of several.
int ExportedStep(const std::string& directory) {
  std::set<std::string> files;
  const std::string index = directory + "/model.safetensors.index.json";
  if (std::filesystem::exists(index)) {
    const json map = json::parse(ReadFile(index))["weight_map"];
    for (const json& file : map) files.insert(file);
  } else if (std::filesystem::exists(directory + "/model.safetensors")) {
    files.insert("model.safetensors");
  }
  std::set<std::string> steps;
  for (const std::string& file : files) {
    auto shard = swap::SafetensorsReader::Open(directory + "/" + file);
    steps.insert(shard.ok() ? (*shard)->metadata().at("penstock_step") : shard.status().ToString());
  }
  return steps.empty() ? -1 : steps.size() == 1 ? std::stoi(*steps.begin()) : -2;
}

// Of one file and of shards, over one file and over shards, fewer and as many.
TEST_F(ExportOverAnotherTest, AnExportThatIsKilledOverAnotherNeverMixesTheTwo) {
  const std::string first = dir_ + "/first", second = dir_ + "/second", out = dir_ + "/out";
  ASSERT_EQ(Run(Train(first, {"--steps", "1", "--seq", "32"})).code, 0);
  ASSERT_EQ(Run(Train(second, {"--steps", "2", "--seq", "32"})).code, 0);
  const Arguments one = {}, few = {"--max-shard", "400000"}, many = {"--max-shard", "250000"};
  const auto export_to = [&](const std::string& state, const std::string& to, const Arguments& cut) {
    std::filesystem::create_directory(to);
    EXPECT_EQ(Run(Arguments{"export", state, to, "--quiet"} + cut).code, 0);
    return to;
  };
  const auto names = [](const std::string& directory) {
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(directory))
      found.insert(entry.path().filename());
    return found;
  };
  int number = 0;
  for (const auto& [before, after] : {std::pair{few, few}, {many, few}, {one, few}, {few, one}}) {
    ++number;
    const std::string old = export_to(first, dir_ + "/old" + std::to_string(number), before);
    const std::string fresh = export_to(second, dir_ + "/fresh" + std::to_string(number), after);
    bool reached = true;
    for (size_t at = 0; reached; ++at) {
      std::filesystem::remove_all(out);
      std::filesystem::copy(old, out);
      const Arguments arguments = Arguments{"export", second, out, "--quiet", "--overwrite"} + after;
      const Tampered ran = RunTampered({.calls = NamingCalls(), .at = at}, [&] {
        std::vector<const char*> argv;
        for (const std::string& word : arguments) argv.push_back(word.c_str());
        std::ostringstream told;
        return RunExport(static_cast<int>(argv.size()), argv.data(), told, told);
      });
      if (!ran.can) GTEST_SKIP() << "no process can be traced here";
      reached = ran.reached;
      const int step = ExportedStep(out);
      EXPECT_TRUE(step == -1 || step == 1 || step == 2) << at << ": " << step;
      if (reached) continue;
      EXPECT_EQ(ran.code, 0);
      EXPECT_EQ(step, 2);
      EXPECT_EQ(names(out), names(fresh)) << "what the older one had more of is gone";
      EXPECT_GE(at, 3U);
    }
  }
}

// Whichever comes later: all files are of one of them, and nothing of the other's is left.
TEST_F(ExportOverAnotherTest, OfTwoExportsAtOnceTheLaterOneStands) {
  const std::string first = dir_ + "/first", second = dir_ + "/second", out = dir_ + "/out";
  ASSERT_EQ(Run(Train(first, {"--steps", "1", "--seq", "32"})).code, 0);
  ASSERT_EQ(Run(Train(second, {"--steps", "2", "--seq", "32"})).code, 0);
  std::filesystem::create_directory(out);
  const auto start = [&](const std::string& state, const char* shard) {
    return Program(dir_, {"export", state, out, "--quiet", "--overwrite", "--max-shard", shard});
  };
  const int rounds = 4 * tests::Soak();
  for (int round = 0; round < rounds; ++round) {
    Program one = start(first, round % 2 == 0 ? "400000" : "250000"), two = start(second, "400000");
    for (Program* program : {&one, &two}) {
      const Ran ran = program->Wait();
      EXPECT_EQ(ran.code, 0) << ran.err;
    }
    EXPECT_GT(ExportedStep(out), 0) << "round " << round;
    const json index = json::parse(ReadFile(out + "/model.safetensors.index.json"));
    std::set<std::string> shards, there;
    for (const auto& [tensor, shard] : index["weight_map"].items()) shards.insert(shard);
    for (const auto& entry : std::filesystem::directory_iterator(out)) {
      const std::string name = entry.path().filename();
      if (name.ends_with(".safetensors") || name.starts_with(".")) there.insert(name);
    }
    EXPECT_EQ(there, shards) << "round " << round;
  }
}

}  // namespace
}  // namespace penstock::tools::export_over_another_test
