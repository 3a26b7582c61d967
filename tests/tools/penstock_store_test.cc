// What users do with state directories beside training in them: keep less of it, kill it, move it, lose a
// disk.
#include <map>
#include <set>

#include "tests/tools/penstock_state.h"

namespace penstock::tools::penstock_store_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using namespace testing_support;

class StoreCliTest : public CliTest {
 protected:
  std::string Config(const std::string& penstock) {
    const std::string path = dir_ + "/config.json";
    WriteFile(path, R"({"penstock": )" + penstock + "}");
    return path;
  }
  // A run of 24 steps that some memory is left in, so that part of its state stays there.
  Arguments Partly(const std::string& state, const Arguments& more = {}) const {
    return Train(state,
                 Arguments{"--host-memory", "16MiB", "--seq", "32", "--batch", "2", "--steps", "24"} + more);
  }
  // The losses of that run, never stopped.
  std::vector<std::string> Whole() {
    const Ran ran = Run(Partly(dir_ + "/whole", {"--log", dir_ + "/whole.log"}));
    EXPECT_EQ(ran.code, 0) << ran.err;
    return Losses(dir_ + "/whole.log");
  }
};

TEST_F(StoreCliTest, WithDurabilityCheckpointAKillGoesBackToTheLastOne) {
  const std::vector<std::string> whole = Whole();
  const std::string state = dir_ + "/state", log = dir_ + "/log", report = dir_ + "/report",
                    kept = dir_ + "/kept";
  const Arguments arguments =
      Partly(state, {"--config", Config(R"({"durability": "checkpoint"})"), "--log", log, "--report", report,
                     "--checkpoint-dir", kept, "--checkpoint-every", "5"});
  Program killed(dir_, arguments);
  ASSERT_TRUE(WaitForLines(log, 13));
  killed.Signal(SIGKILL);
  EXPECT_EQ(killed.Wait().code, 1000 + SIGKILL);
  const size_t logged = Losses(log).size();
  ASSERT_LT(logged, 24u) << "it was over before the signal came";
  Arguments again = arguments + Arguments{"--resume"};
  again.erase(std::find(again.begin(), again.end(), "--quiet"));
  const Ran ran = Run(again);
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("durability: checkpoint: "));
  EXPECT_THAT(ran.out, HasSubstr("a kill goes back to the last of these"));
  // One line a step, those that came again too, with the same bits.
  EXPECT_EQ(Losses(log), whole);
  const json told = json::parse(ReadFile(report));
  EXPECT_EQ(told["durability"], "checkpoint");
  EXPECT_EQ(told["resumed_from_step"].get<int64_t>() % 5, 0);
  EXPECT_GT(told["resumed_from_step"].get<int64_t>(), 0);
  const auto saved = told["nvme_write_bytes_saved_per_step"].get<int64_t>();
  EXPECT_GT(saved, told["state_bytes_total"].get<int64_t>() / 8);
  // What `plan` said, and what the steps wrote between checkpoints.
  const Ran plan = Run({"plan", "--model", "gpt-tiny", "--dtype", "fp32", "--threads", "1", "--host-memory",
                        "16MiB", "--seq", "32", "--batch", "2", "--config", dir_ + "/config.json",
                        "--state-dir", dir_ + "/unused", "--json", "--no-probe"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_EQ(json::parse(plan.out)["durability"], "checkpoint");
  EXPECT_GT(json::parse(plan.out)["nvme_write_bytes_saved_per_step"].get<int64_t>(), 0);
  std::map<int64_t, int64_t> written;
  for (const std::string& line : Lines(ReadFile(log))) {
    const json step = json::parse(line);
    written[step["step"]] = step["nvme_write_bytes"];
  }
  const int64_t between = written[23];  // of it and the step before, none is kept
  int64_t most = 0;
  for (const auto& [step, bytes] : written) most = std::max(most, bytes);
  EXPECT_GE(most, between + saved / 2) << "the tiles that stay are written for a checkpoint";
}

TEST_F(StoreCliTest, WithOneVersionAKillCostsTheStateAndACheckpointBringsItBack) {
  const std::vector<std::string> whole = Whole();
  const std::string state = dir_ + "/state", log = dir_ + "/log", kept = dir_ + "/kept";
  const Arguments one = {"--config", Config(R"({"versions": 1})"), "--log", log};
  const Arguments checkpoints = {"--checkpoint-dir", kept, "--checkpoint-every", "5"};
  Program killed(dir_, Partly(state, one + checkpoints));
  ASSERT_TRUE(WaitForLines(log, 12));
  killed.Signal(SIGKILL);
  killed.Wait();
  ASSERT_LT(Losses(log).size(), 24u) << "it was over before the signal came";
  EXPECT_EQ(Inspect(state)["versions"], 1);
  if (Inspect(state)["overwriting"] == true) {  // all but for a moment after a checkpoint
    for (const Arguments& arguments :
         {Partly(state, one + Arguments{"--resume"}), Arguments{"verify", state, "--quiet"},
          Arguments{"export", state, dir_ + "/out"}}) {
      const Ran refused = Run(arguments);
      EXPECT_EQ(refused.code, 1) << refused.err;
      EXPECT_EQ(Lines(refused.err).size(), 1u) << refused.err;
      EXPECT_THAT(refused.err, HasSubstr("one version"));
      EXPECT_THAT(refused.err, HasSubstr("--checkpoint-dir"));
    }
  }
  Arguments again = Partly(state, one + checkpoints + Arguments{"--resume"});
  again.erase(std::find(again.begin(), again.end(), "--quiet"));
  Ran ran = Run(again);
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("one version of everything"));
  EXPECT_THAT(ran.out, HasSubstr("with one version a kill leaves nothing"));
  EXPECT_EQ(Losses(log), whole);
  // Stopped in order it is whole, and half the size.
  EXPECT_EQ(Run({"verify", state, "--quiet"}).code, 0);
  EXPECT_EQ(Inspect(state)["overwriting"], false);
  EXPECT_LT(Inspect(state)["disk_bytes"].get<int64_t>(),
            Inspect(dir_ + "/whole")["disk_bytes"].get<int64_t>() * 3 / 4);

  const Ran wrong = Run(Train(dir_ + "/x", {"--config", Config(R"({"versions": 1, "durability": "step"})")}));
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("penstock.versions"));
}

// What a run takes on its disks is said three times and taken once.
TEST_F(StoreCliTest, AStateBehindItsLogIsNotTakenForWhole) {
  const std::string state = dir_ + "/state", log = dir_ + "/log", file = state + "/penstock.store";
  const Arguments arguments = {"--log", log, "--steps"};
  ASSERT_EQ(Run(Train(state, arguments + Arguments{"3"})).code, 0);
  const std::string logged = ReadFile(log);
  // Steps that the state has lost.
  std::filesystem::copy(state, dir_ + "/old", std::filesystem::copy_options::recursive);
  ASSERT_EQ(Run(Train(state, arguments + Arguments{"5", "--resume"})).code, 0);
  const std::string whole = ReadFile(log);
  std::filesystem::remove_all(state);
  std::filesystem::rename(dir_ + "/old", state);
  Ran ran = Run(Train(state, arguments + Arguments{"5", "--resume"}));
  EXPECT_EQ(ran.code, 1);
  EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("has step 5"));
  EXPECT_THAT(ran.err, HasSubstr("only step 3: commits were lost"));
  EXPECT_EQ(ReadFile(log), whole);
  // Taken at its word, it goes on.
  WriteFile(log, logged);
  EXPECT_EQ(Run(Train(state, arguments + Arguments{"5", "--resume"})).code, 0);
  EXPECT_EQ(Lines(ReadFile(log)).size(), 5u);
  // All of them: a file that was emptied looks like a run that was never committed.
  std::filesystem::resize_file(file, 0);
  ran = Run(Train(state, arguments + Arguments{"6", "--resume"}));
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.err, HasSubstr("has step 5"));
  EXPECT_THAT(ran.err, HasSubstr("none: commits were lost"));
  EXPECT_EQ(std::filesystem::file_size(file), 0u) << "nothing is written over what was lost";
  std::filesystem::remove(log);
  EXPECT_EQ(Run(Train(state, arguments + Arguments{"1", "--resume"})).code, 0);
  EXPECT_EQ(Lines(ReadFile(log)).size(), 1u);
}

TEST_F(StoreCliTest, PlanReportAndFilesHaveTheSameBytesWhateverTheVersions) {
  struct Case {
    const char* config;
    int versions;
    Arguments arguments;
  };
  const Arguments kept = {"--checkpoint-dir", dir_ + "/kept", "--checkpoint-every", "2"};
  for (const Case& c : {Case{"{}", 2, {}}, Case{R"({"versions": 1})", 1, {}}, Case{"{}", 3, kept}}) {
    SCOPED_TRACE(c.versions);
    const std::string state = dir_ + "/state" + std::to_string(c.versions), report = dir_ + "/report";
    const Arguments arguments =
        Arguments{"--config", Config(c.config), "--steps", "1", "--seq", "32"} + c.arguments;
    Arguments plan = Train(state, arguments + Arguments{"--json", "--no-probe"});
    plan[0] = "plan";
    plan.erase(std::find(plan.begin(), plan.end(), "--quiet"));
    const Ran planned = Run(plan);
    ASSERT_EQ(planned.code, 0) << planned.err;
    const json told = json::parse(planned.out);
    ASSERT_EQ(Run(Train(state, arguments + Arguments{"--report", report})).code, 0);
    EXPECT_EQ(told["versions"], c.versions);
    int64_t together = 0, tiles = 0;
    for (const json& line : told["tiers"]) {
      together += line["nvme_bytes"].get<int64_t>();
      if (line["what"] == "weights" || line["what"] == "optimizer state")
        tiles += line["nvme_bytes"].get<int64_t>();
      EXPECT_GE(line["nvme_bytes"], 0) << line;
    }
    EXPECT_EQ(tiles, c.versions * told["state_bytes_total"].get<int64_t>());
    EXPECT_EQ(together, told["state_bytes_nvme"].get<int64_t>());
    EXPECT_EQ(json::parse(ReadFile(report))["state_bytes_nvme"], told["state_bytes_nvme"]);
    EXPECT_EQ(std::filesystem::file_size(state + "/penstock.store"),
              told["state_bytes_nvme"].get<uint64_t>());
    EXPECT_EQ(Inspect(state)["disk_bytes"], told["state_bytes_nvme"]);
  }
}

// What names the parameters of a Python program's run.
TEST_F(StoreCliTest, ADescriptionThatWasChangedIsFound) {
  const std::string state = dir_ + "/state", path = state + "/parameters.json";
  ASSERT_EQ(Run(Train(state, {"--steps", "1"})).code, 0);
  const std::string digest = "60e9a258caaf1d7141ddfeb43291d73091efa8af3d8b48faa62678e150b3f2f3";
  for (const auto& [text, whole] :
       {std::pair<std::string, bool>{R"({"model": {}, "sha256": ")" + digest + "\"}\n", true},
        {R"({"model": {}})", true},  // an older one
        {R"({"modem": {}, "sha256": ")" + digest + "\"}", false},
        {R"({"model": {}, "sha25x": ")" + digest + "\"}", false},
        {R"({"model": {}, "sha256": ")" + digest + "0\"}", false},
        {R"({"model": {}, )", false},
        {"", false}}) {
    WriteFile(path, text);
    const Ran ran = Run({"verify", state}), told = Run({"verify", state, "--json"});
    EXPECT_EQ(ran.code, whole ? 0 : 1) << text;
    EXPECT_EQ(told.code, ran.code) << text;
    EXPECT_EQ(json::parse(told.out)["whole"], whole) << text;
    EXPECT_EQ(json::parse(told.out)["metadata_damage"].size(), whole ? 0u : 1u) << text;
    if (!whole) {
      EXPECT_THAT(ran.err, HasSubstr(path)) << text;
    }
  }
}

// States in bf16 and 8 bit: what inspect shows adds up, verify finds a flipped bit in each segment, export is
// the masters, and what was exported comes back.
TEST_F(StoreCliTest, CompactStatesAreInspectedVerifiedAndExported) {
  for (const std::string dtype : {"bf16", "fp32"}) {
    for (const std::string states : {"bf16", "8bit"}) {
      SCOPED_TRACE(dtype + " weights, " + states + " states");
      const std::string name = dtype + "-" + states, state = dir_ + "/" + name, out = dir_ + "/out-" + name;
      const Ran trained = Run(Train(state, {"--dtype", dtype, "--optimizer-states", states, "--steps", "3",
                                            "--seq", "32", "--batch", "2"}));
      ASSERT_EQ(trained.code, 0) << trained.err;
      const json told = Inspect(state);
      EXPECT_EQ(told["dtype"], dtype);
      EXPECT_EQ(told["optimizer_states"], states);
      EXPECT_THAT(Run({"inspect", state}).out, HasSubstr("states " + states));
      int64_t bytes = 0, elements = 0;
      for (const json& tile : told["tiles"]) {
        const auto of_tile = tile["elements"].get<int64_t>();
        elements += of_tile;
        EXPECT_EQ(tile["segments"].size(), dtype == "bf16" ? 4u : 3u);
        for (const json& segment : tile["segments"]) bytes += segment["bytes"].get<int64_t>();
        // Two bytes for each of m and v, or one and a scale for every block of them.
        const auto m = tile["segments"].back()["bytes"].get<int64_t>();
        EXPECT_GE(m, states == "bf16" ? 2 * of_tile : of_tile);
        EXPECT_LE(m, states == "bf16" ? 2 * of_tile : of_tile * 5 / 4);
      }
      EXPECT_EQ(bytes, told["state_bytes"].get<int64_t>());
      EXPECT_LT(bytes, 10 * elements);

      EXPECT_EQ(Run({"verify", state, "--quiet"}).code, 0);
      const json& segments = told["tiles"][0]["segments"];
      for (size_t s = 0; s < segments.size(); ++s) {
        const auto at = segments[s]["offset"].get<int64_t>() + segments[s]["bytes"].get<int64_t>() - 1;
        const auto flip = [&] {
          std::fstream file(state + "/penstock.store", std::ios::in | std::ios::out | std::ios::binary);
          file.seekg(at);
          const char byte = static_cast<char>(file.get() ^ 1);
          file.seekp(at);
          file.put(byte);
          ASSERT_TRUE(file.good());
        };
        flip();
        const Ran damaged = Run({"verify", state, "--quiet"});
        EXPECT_EQ(damaged.code, 1);
        EXPECT_THAT(damaged.out, HasSubstr("tile 0 segment " + std::to_string(s)));
        flip();
      }

      std::filesystem::create_directory(out);
      ASSERT_EQ(Run({"export", state, out, "--quiet"}).code, 0);
      auto file = swap::SafetensorsReader::Open(out + "/model.safetensors");
      ASSERT_TRUE(file.ok()) << file.status();
      const RawWeights raw(told);
      const std::vector<float> wte = Tensor<float>(**file, "transformer.wte.weight", {256, 64});
      for (int64_t i = 0; i < 256 * 64; i += 37) {
        EXPECT_EQ(wte[static_cast<size_t>(i)], dtype == "bf16" ? raw.Joined(0, i) : raw.Fp32(0, i)) << i;
      }
      // Back again: a step that changes nothing, and out once more.
      const Ran ran = Run({"train",
                           "--data",
                           text_,
                           "--init-from",
                           out,
                           "--steps",
                           "1",
                           "--lr",
                           "0",
                           "--quiet",
                           "--threads",
                           "1",
                           "--weight-decay",
                           "0",
                           "--dtype",
                           dtype,
                           "--optimizer-states",
                           states,
                           "--state-dir",
                           state + "-again"});
      ASSERT_EQ(ran.code, 0) << ran.err;
      ASSERT_EQ(Run({"export", state + "-again", out + "-again"}).code, 0);
      EXPECT_TRUE(TensorBytes(out + "/model.safetensors") == TensorBytes(out + "-again"));
    }
  }
}

TEST_F(StoreCliTest, ExportedShardsHaveAnIndexAndComeBack) {
  const std::string state = dir_ + "/state", one = dir_ + "/one", many = dir_ + "/many";
  ASSERT_EQ(Run(Train(state, {"--steps", "2", "--seq", "32", "--batch", "2"})).code, 0);
  std::filesystem::create_directory(one);
  std::filesystem::create_directory(many);
  ASSERT_EQ(Run({"export", state, one, "--quiet"}).code, 0);
  const Arguments cut = {"export", state, many, "--quiet", "--max-shard", "100000", "--host-memory", "4MiB"};
  ASSERT_EQ(Run(cut).code, 0);
  const json index = json::parse(ReadFile(many + "/model.safetensors.index.json"));
  auto whole = swap::SafetensorsReader::Open(one + "/model.safetensors");
  ASSERT_TRUE(whole.ok()) << whole.status();
  std::map<std::string, size_t> files;
  int64_t bytes = 0;
  for (const auto& [name, file] : index["weight_map"].items()) {
    ++files[file];
    const swap::TensorInfo* info = (*whole)->Find(name);
    ASSERT_NE(info, nullptr) << name;
    auto shard = swap::SafetensorsReader::Open(many + "/" + file.get<std::string>());
    ASSERT_TRUE(shard.ok()) << shard.status();
    EXPECT_TRUE(Tensor<float>(**shard, name, info->shape) == Tensor<float>(**whole, name, info->shape))
        << name;
    bytes += static_cast<int64_t>(*info->Bytes());
  }
  EXPECT_EQ(index["metadata"]["total_size"], bytes);
  EXPECT_EQ(index["weight_map"].size(), (*whole)->tensors().size());
  EXPECT_GT(files.size(), 5u);
  for (const auto& [file, tensors] : files) {
    EXPECT_THAT(file, testing::MatchesRegex("model-[0-9]{5}-of-[0-9]{5}.safetensors"));
    EXPECT_TRUE(tensors == 1 || std::filesystem::file_size(many + "/" + file) < 110'000) << file;
  }
  // A run starts from them as from one file.
  const Ran started =
      Run(Train(dir_ + "/again", {"--init-from", many, "--steps", "1", "--lr", "0", "--weight-decay", "0"}));
  ASSERT_EQ(started.code, 0) << started.err;
  ASSERT_EQ(Run({"export", dir_ + "/again", dir_ + "/again.safetensors", "--quiet"}).code, 0);
  EXPECT_TRUE(TensorBytes(dir_ + "/again.safetensors") == TensorBytes(one + "/model.safetensors"));

  // What is there is not replaced unasked, and not left beside what replaces it.
  for (const Arguments& arguments : {cut, Arguments{"export", state, many, "--quiet"}}) {
    const Ran refused = Run(arguments);
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr("model.safetensors.index.json is there already"));
  }
  ASSERT_EQ(Run({"export", state, many, "--quiet", "--overwrite"}).code, 0);
  EXPECT_FALSE(std::filesystem::exists(many + "/model.safetensors.index.json"));
  EXPECT_EQ(Run({"export", state, many, "--max-shard", "0"}).code, 2);
  // Of an export that fails nothing is left.
  const json last = Inspect(state)["tiles"].back()["segments"][0];
  std::fstream file(state + "/penstock.store", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(last["offset"].get<int64_t>());
  file.put('x');
  file.close();
  std::filesystem::remove_all(many);
  std::filesystem::create_directory(many);
  const Ran damaged = Run(cut);
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.err, HasSubstr("checksum"));
  EXPECT_TRUE(std::filesystem::is_empty(many));
}

TEST_F(StoreCliTest, MovedDirectoriesAreFineAndALostOrSwappedOneIsNamed) {
  const std::string a = dir_ + "/a", b = dir_ + "/b", other = dir_ + "/other";
  const Arguments both = {"--state-dir", b, "--steps", "3"};
  for (const Ran& ran :
       RunAll({Train(a, both), Train(other, {"--state-dir", dir_ + "/other2", "--steps", "2"})}))
    ASSERT_EQ(ran.code, 0) << ran.err;
  const auto resume = [&](const Arguments& dirs, const std::string& steps) {
    Arguments arguments = {"train", "--data", text_, "--resume", "--quiet", "--steps", steps};
    for (const std::string& dir : dirs) arguments = arguments + Arguments{"--state-dir", dir};
    return Run(arguments);
  };
  const auto expect_named = [&](const Ran& ran, int code, const std::string& what) {
    EXPECT_EQ(ran.code, code) << ran.err;
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(what));
  };
  // One of two: lost. One of another run: swapped. One that is not there, one too many.
  expect_named(resume({a}, "4"), 1, "2 directories");
  expect_named(resume({b}, "4"), 1, "2 directories");
  expect_named(resume({a, dir_ + "/other2"}, "4"), 1, "different runs");
  expect_named(resume({a, dir_ + "/gone"}, "4"), 1, "2 directories");
  expect_named(resume({a, b, other}, "4"), 1, "different runs");
  EXPECT_EQ(Run({"verify", a, b, "--quiet"}).code, 0) << "nothing was harmed";

  // Both at other paths, and the other way round.
  std::filesystem::rename(a, dir_ + "/x");
  std::filesystem::rename(b, dir_ + "/y");
  const Ran moved = resume({dir_ + "/y", dir_ + "/x"}, "5");
  ASSERT_EQ(moved.code, 0) << moved.err;
  // To more disks: a state of one directory is a checkpoint as well.
  const std::string one = dir_ + "/one";
  ASSERT_EQ(Run(Train(one, {"--steps", "3", "--log", dir_ + "/one.log"})).code, 0);
  const Arguments more = {"train",
                          "--data",
                          text_,
                          "--resume",
                          "--quiet",
                          "--steps",
                          "5",
                          "--checkpoint-dir",
                          one,
                          "--state-dir",
                          dir_ + "/p",
                          "--state-dir",
                          dir_ + "/q",
                          "--log",
                          dir_ + "/more.log"};
  const Ran spread = Run(more);
  ASSERT_EQ(spread.code, 0) << spread.err;
  const Ran shown = Run({"inspect", "--json", dir_ + "/p", dir_ + "/q"});
  ASSERT_EQ(shown.code, 0) << shown.err;
  EXPECT_EQ(json::parse(shown.out)["files"].size(), 2u);
  EXPECT_EQ(json::parse(shown.out)["step"], 5);
  EXPECT_EQ(Inspect(one)["step"], 3) << "it is left as it was";
  ASSERT_EQ(resume({one}, "5").code, 0);
}

}  // namespace
}  // namespace penstock::tools::penstock_store_test
