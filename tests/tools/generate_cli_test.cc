// `penstock generate` as a user runs it: directories and states, lists of prompts that are killed and gone on
// with, wrong flags.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "models/weights/weight_files.h"
#include "tests/tools/golden_models.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::generate_cli_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing_support::Arguments;
using testing_support::Lines;
using testing_support::Program;
using testing_support::Ran;
using testing_support::operator+;
using testing_support::ReadFile;
using testing_support::WriteFile;

class GenerateCliTest : public testing_support::ProgramTest {
 protected:
  // A model of bytes: text in, text out.
  std::string Model() {
    const std::string directory = dir_ + "/model";
    if (!std::filesystem::exists(directory)) {
      testing_support::WriteModel(directory, {{"model_type", "llama"},
                                              {"hidden_size", 64},
                                              {"intermediate_size", 128},
                                              {"num_hidden_layers", 4},
                                              {"num_attention_heads", 4},
                                              {"num_key_value_heads", 2},
                                              {"vocab_size", 256},
                                              {"max_position_embeddings", 256}});
    }
    return directory;
  }
  Arguments Generate(const Arguments& more) {
    return Arguments{"generate", Model(), "--threads", "1", "--quiet"} + more;
  }
  std::string Prompts(int count) {
    std::string lines;
    for (int i = 0; i < count; ++i)
      lines +=
          json({{"id", absl::StrCat("p", i)}, {"prompt", std::string(1 + i % 40, 'a' + i % 26)}}).dump() +
          "\n";
    WriteFile(dir_ + "/prompts.jsonl", lines);
    return dir_ + "/prompts.jsonl";
  }
  // By index; each there once, and nothing else.
  static std::map<int64_t, json> Made(const std::string& path) {
    std::map<int64_t, json> made;
    for (const std::string& line : Lines(ReadFile(path))) {
      json parsed = json::parse(line, nullptr, false);
      EXPECT_TRUE(parsed.is_object()) << line;
      if (!parsed.is_object()) continue;
      const auto index = parsed["index"].get<int64_t>();
      EXPECT_TRUE(made.emplace(index, std::move(parsed)).second) << index << " is there twice";
    }
    return made;
  }
};

TEST_F(GenerateCliTest, AListThatIsKilledIsGoneOnWithAndNothingIsLostOrMadeTwice) {
  const std::string prompts = Prompts(60);
  const Arguments list = Generate({"--prompts", prompts, "--tokens", "40", "--batch", "8", "--temperature",
                                   "0.8", "--kv", "nvme", "--host-memory", "48MiB"});
  const Ran whole = Run(list + Arguments{"--out", dir_ + "/whole.jsonl"});
  ASSERT_EQ(whole.code, 0) << whole.err;
  const auto expected = Made(dir_ + "/whole.jsonl");
  ASSERT_EQ(expected.size(), 60u);

  const std::string out = dir_ + "/killed.jsonl";
  std::mt19937 random(std::random_device{}());
  int kills = 0;
  for (int turn = 0; turn < 40; ++turn) {
    const size_t before = Lines(ReadFile(out)).size();
    if (before == 60) break;
    Program program(dir_, list + Arguments{"--out", out});
    // Until some more are there, then at any moment.
    WaitForLines(out, std::min<size_t>(before + 5, 60));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
    program.Signal(SIGKILL);
    kills += program.Wait().code == 1000 + SIGKILL ? 1 : 0;
    // What was there stays there, but for a torn line.
    const std::string text = ReadFile(out);
    if (turn == 1) WriteFile(out, text + "{\"index\": 59, \"te");
  }
  EXPECT_GT(kills, 0);
  const Ran rest = Run(list + Arguments{"--out", out});
  ASSERT_EQ(rest.code, 0) << rest.err;
  EXPECT_EQ(Made(out), expected);
  // Once more there is nothing to do, and with other options it is another list.
  const std::string bytes = ReadFile(out);
  EXPECT_EQ(Run(list + Arguments{"--out", out}).code, 0);
  EXPECT_EQ(ReadFile(out), bytes);
  const Ran other = Run(list + Arguments{"--out", out, "--seed", "5"});
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.err, HasSubstr("--overwrite"));
  EXPECT_EQ(ReadFile(out), bytes);
}

// Two models of one architecture, and two states of as many steps, have texts of their own.
TEST_F(GenerateCliTest, AListOfOtherWeightsIsAnotherList) {
  const auto lists = [&](const std::string& which) {
    return Arguments{"generate", dir_ + "/" + which, "--threads", "1",     "--quiet",          "--prompts",
                     Prompts(3), "--tokens",         "4",         "--out", dir_ + "/out.jsonl"};
  };
  for (const std::string seed : {"1", "2"}) {
    ASSERT_EQ(Run({"train", "--model", "gpt-tiny", "--threads", "1", "--quiet", "--data", text_,
                   "--state-dir", dir_ + "/state" + seed, "--steps", "2", "--seed", seed})
                  .code,
              0);
  }
  std::filesystem::copy(Model(), dir_ + "/copy");
  std::filesystem::copy(Model(), dir_ + "/other");
  std::string weights = ReadFile(dir_ + "/other/model.safetensors");
  for (size_t i = weights.size() / 2; i < weights.size() / 2 + 4096; i += 2) weights[i] ^= 1;
  WriteFile(dir_ + "/other/model.safetensors", weights);
  std::filesystem::copy(dir_ + "/state1", dir_ + "/copy-of-state1");
  const std::pair<std::string, std::vector<std::string>> turns[] = {{"model", {"copy", "other"}},
                                                                    {"state1", {"copy-of-state1", "state2"}}};
  for (const auto& [first, others] : turns) {
    ASSERT_EQ(Run(lists(first) + Arguments{"--overwrite"}).code, 0);
    const std::string bytes = ReadFile(dir_ + "/out.jsonl");
    EXPECT_EQ(Run(lists(others[0])).code, 0) << "the same values";
    const Ran other = Run(lists(others[1]));
    EXPECT_EQ(other.code, 2) << others[1];
    EXPECT_THAT(other.err, HasSubstr("from another model"));
    EXPECT_EQ(ReadFile(dir_ + "/out.jsonl"), bytes);
  }
}

TEST_F(GenerateCliTest, AFileThatIsNotItsOwnIsLeftAsItIs) {
  // One line without an end, as a torn one has none.
  const std::string foreign = dir_ + "/settings.json";
  for (const char* text : {"{\"model\": \"mine\"}", "a", "{\"ind"}) {
    WriteFile(foreign, text);
    const Ran ran = Run(Generate({"--prompt", "a", "--tokens", "2", "--out", foreign}));
    if (std::string_view("{\"index\":").starts_with(text)) {
      EXPECT_EQ(ran.code, 0) << ran.err;  // the beginning of a line
      EXPECT_EQ(Made(foreign).size(), 1u);
      continue;
    }
    EXPECT_EQ(ran.code, 2) << text;
    EXPECT_THAT(ran.err, HasSubstr("--overwrite"));
    EXPECT_EQ(ReadFile(foreign), text);
  }
  // What has no end, and what cannot be gone on with.
  for (const char* device : {"/dev/full", "/dev/zero", "/dev/null"}) {
    const Ran ran = Run(Generate({"--prompt", "a", "--tokens", "2", "--out", device}));
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("no regular file"));
  }
}

TEST_F(GenerateCliTest, OverwriteReplacesNothingBeforeThereIsAText) {
  const std::string out = dir_ + "/out.jsonl";
  const Arguments to_file = {"--prompt", "a", "--tokens", "4", "--out", out};
  ASSERT_EQ(Run(Generate(to_file)).code, 0);
  const std::string first = ReadFile(out);
  ASSERT_FALSE(first.empty());
  const Arguments again = to_file + Arguments{"--overwrite"};
  for (const Arguments& refused :
       {Arguments{"--host-memory", "100K"}, Arguments{"--kv", "nvme", "--kv-dir", "/proc/none"},
        Arguments{"--report", dir_ + "/none/report.json"}}) {
    EXPECT_NE(Run(Generate(again + refused)).code, 0);
    EXPECT_EQ(ReadFile(out), first);
  }
  ASSERT_EQ(Run(Generate({"--prompt", "ab", "--tokens", "2", "--out", out, "--overwrite"})).code, 0);
  EXPECT_NE(ReadFile(out), first);
}

TEST_F(GenerateCliTest, NoOutputTakesThePlaceOfAModelsOrAStatesFile) {
  const std::string config = ReadFile(Model() + "/config.json");
  for (const Arguments& to : {Arguments{"--report", Model() + "/config.json"},
                              Arguments{"--out", Model() + "/model.safetensors", "--overwrite"}}) {
    const Ran ran = Run(Generate(Arguments{"--prompt", "a"} + to));
    EXPECT_EQ(ran.code, 2);
    EXPECT_THAT(ran.err, HasSubstr("is a file of a model or a state"));
  }
  EXPECT_EQ(ReadFile(Model() + "/config.json"), config);
  EXPECT_EQ(Run(Generate({"--prompt", "a"})).code, 0);
  const std::string state = dir_ + "/state";
  const Arguments train = {"train", "--model", "gpt-tiny", "--data",      text_, "--seq",
                           "16",    "--batch", "1",        "--state-dir", state, "--steps"};
  ASSERT_EQ(Run(train + Arguments{"1"}).code, 0);
  std::filesystem::create_symlink(state + "/penstock.store", dir_ + "/report.json");
  for (const char* to : {"/state/penstock.store", "/report.json"}) {
    const Ran ran = Run(train + Arguments{"2", "--resume", "--report", dir_ + to});
    EXPECT_EQ(ran.code, 2);
    EXPECT_THAT(ran.err, HasSubstr("is a file of a model or a state"));
  }
  // Beside a checkpoint of Penstock's, of its Python package's and of DeepSpeed's.
  for (const char* name : {"latest", "latest_universal", "parameters.json", "client_state-1.pt",
                           ".penstock.lock", "mp_rank_00_model_states.pt"}) {
    for (const char* flag : {"--report", "--log", "--trace", "--prometheus"}) {
      const Ran ran = Run(train + Arguments{"2", "--resume", flag, dir_ + "/kept/" + name});
      EXPECT_EQ(ran.code, 2);
      EXPECT_THAT(ran.err, HasSubstr("is a file of a model or a state"));
    }
  }
  EXPECT_EQ(Run({"export", state, state + "/penstock.store", "--overwrite"}).code, 2);
  EXPECT_EQ(Run({"verify", state}).code, 0);
}

// Weights beside a state are soon older than it, and would be read in its place.
TEST_F(GenerateCliTest, NoModelIsWrittenWhereAStateOrCheckpointIsRead) {
  namespace fs = std::filesystem;
  const std::string state = dir_ + "/state", kept = dir_ + "/kept", memory = dir_ + "/memory";
  const Arguments train = {"train",   "--model", "gpt-tiny", "--data",  text_, "--seq",     "16",
                           "--batch", "1",       "--quiet",  "--steps", "1",   "--threads", "1"};
  ASSERT_EQ(
      Run(train + Arguments{"--state-dir", state, "--checkpoint-dir", kept, "--checkpoint-every", "1"}).code,
      0);
  ASSERT_EQ(Run(train + Arguments{"--state-dir", memory, "--offload", "cpu"}).code, 0);
  const std::string step = "/step-00000001";
  const auto tree = [&] {
    std::set<std::string> found;
    for (const auto& entry : fs::recursive_directory_iterator(dir_)) {
      const std::string path = entry.path();
      if (!absl::StrContains(path, "/program.")) found.insert(path);  // what the programs have printed
    }
    return found;
  };
  ASSERT_TRUE(fs::exists(kept + step));
  fs::create_directory_symlink(kept + step, dir_ + "/best");
  Model();
  const std::set<std::string> before = tree();
  for (const std::string& place :
       {state, kept, kept + step, dir_ + "/best", memory, memory + "/checkpoints"}) {
    SCOPED_TRACE(place);
    const Ran ran = Run({"export", state, place});
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("give another directory"));
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
  }
  for (const Arguments& other : {Arguments{"export", state, state + "/model.safetensors"},
                                 Arguments{"export", state, kept + step + "/weights.safetensors"},
                                 Arguments{"export-checkpoint", state, state},
                                 Arguments{"export-checkpoint", state, kept + step + "/below"},
                                 Arguments{"pack", Model(), kept + step + "/packed"}}) {
    const Ran ran = Run(other);
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("give another directory"));
  }
  EXPECT_EQ(tree(), before);
  // Where somebody has brought both together, neither is read for the other.
  const auto expect_asked = [&](const std::string& place) {
    for (const char* name : {"config.json", "model.safetensors"})
      fs::copy_file(Model() + "/" + name, place + "/" + name);
    for (const Arguments& reads :
         {Arguments{"generate", place, "--prompt", "a"}, Arguments{"plan", "--generate", place}}) {
      const Ran ran = Run(reads);
      EXPECT_EQ(ran.code, 2) << ran.err;
      EXPECT_THAT(ran.err, HasSubstr(place + ": which of two is meant"));
    }
    EXPECT_THAT(Run({"inspect", place}).out, HasSubstr("step"));
    for (const char* name : {"config.json", "model.safetensors"}) fs::remove(place + "/" + name);
  };
  for (const std::string& place : {state, kept + step}) expect_asked(place);
  // Beside checkpoints of their own names, as Trainer leaves it, the model is read, and a line says so.
  for (const std::string& place : {kept, memory}) {
    for (const char* name : {"config.json", "model.safetensors"})
      fs::copy_file(Model() + "/" + name, place + "/" + name);
    const Ran ran = Run({"plan", "--generate", place});
    EXPECT_EQ(ran.code, 0) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(place + ": the model of its config.json is read, and not the checkpoint " +
                                   place + (place == memory ? "/checkpoints" : "") + step));
    for (const char* name : {"config.json", "model.safetensors"}) fs::remove(place + "/" + name);
  }
  // A checkpoint of DeepSpeed's beside a state of ours likewise.
  ASSERT_EQ(Run({"export-checkpoint", state, dir_ + "/universal", "--tag", "tag"}).code, 0);
  fs::copy(dir_ + "/universal", state, fs::copy_options::recursive);
  const Ran both = Run({"export", state, dir_ + "/out.safetensors"});
  EXPECT_EQ(both.code, 2) << both.err;
  EXPECT_THAT(both.err, HasSubstr(state + ": which of two is meant"));
  EXPECT_EQ(Run({"export", state, dir_ + "/out.safetensors", "--tag", "tag"}).code, 0);
}

TEST_F(GenerateCliTest, TextEndsAtItsLengthOrAtAStopWord) {
  const Ran plain = Run(Generate({"--prompt", "hello", "--tokens", "60"}));
  ASSERT_EQ(plain.code, 0) << plain.err;
  const Ran streamed = Run(Generate({"--prompt", "hello", "--tokens", "60", "--stream", "--kv", "nvme"}));
  EXPECT_EQ(streamed.out, plain.out);
  ASSERT_GE(plain.out.size(), 30u);
  const std::string stop = plain.out.substr(20, 2);
  const std::string before = plain.out.substr(0, plain.out.find(stop));
  for (const Arguments& more : {Arguments{}, Arguments{"--stream"}}) {
    const Ran stopped =
        Run(Generate(Arguments{"--prompt", "hello", "--tokens", "60", "--stop", stop} + more));
    EXPECT_EQ(stopped.code, 0) << stopped.err;
    EXPECT_EQ(stopped.out, before + "\n");
  }
}

TEST_F(GenerateCliTest, ADeviceMakesTheSameTextAndTheReportSaysWhatItHad) {
  const Arguments words = {"--prompt", "hello", "--tokens", "60"};
  const Ran plain = Run(Generate(words));
  ASSERT_EQ(plain.code, 0) << plain.err;
  setenv("PENSTOCK_TEST_DEVICE", "capacity=256MiB", 1);
  const Arguments device = {"--device", "cuda", "--device-memory", "64MiB"};
  for (const std::string kv : {"device", "host", "nvme"}) {
    const std::string report = dir_ + "/" + kv + ".json";
    const Ran ran = Run(Generate(words + device + Arguments{"--kv", kv, "--report", report}));
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(ran.out, plain.out);
    const json said = json::parse(ReadFile(report));
    EXPECT_EQ(said["device"], "cuda");
    EXPECT_EQ(said["kv"], kv);
    EXPECT_EQ(said["device_memory_budget_bytes"], 64 << 20);
    EXPECT_GT(said["h2d_bytes"], 0);
    EXPECT_LE(said["device_planned_bytes"], said["device_memory_budget_bytes"]);
  }
  const Ran small = Run(Generate(words + Arguments{"--device", "cuda", "--device-memory", "1MiB"}));
  const Ran large = Run(Generate(words + Arguments{"--device", "cuda", "--device-memory", "1GiB"}));
  const Ran plan = Run(
      Arguments{"plan", "--generate", Model(), "--json", "--prompt-tokens", "8", "--tokens", "8"} + device);
  unsetenv("PENSTOCK_TEST_DEVICE");
  EXPECT_EQ(small.code, 2);
  EXPECT_THAT(small.err, HasSubstr("--device-memory 1.0 MiB is too small: the least that works here is"));
  EXPECT_EQ(large.code, 2);
  EXPECT_THAT(large.err, HasSubstr("the device has 268435456"));
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_EQ(json::parse(plan.out)["kv"], "device");
}

TEST_F(GenerateCliTest, AStateMakesTheTextsOfSample) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    const std::string state = dir_ + "/state-" + dtype;
    const Ran trained = Run({"train", "--model", "gpt-tiny", "--dtype", dtype, "--threads", "1", "--quiet",
                             "--data", text_, "--state-dir", state, "--steps", "12"});
    ASSERT_EQ(trained.code, 0) << trained.err;
    const Ran sampled = Run(
        {"sample", state, "--prompt", "the gate", "--tokens", "40", "--temperature", "0", "--threads", "1"});
    ASSERT_EQ(sampled.code, 0) << sampled.err;
    for (const std::string kv : {"host", "nvme"}) {
      const Ran generated = Run({"generate", state, "--prompt", "the gate", "--tokens", "40", "--kv", kv,
                                 "--threads", "1", "--quiet", "--report", dir_ + "/report.json"});
      ASSERT_EQ(generated.code, 0) << generated.err;
      EXPECT_EQ("the gate" + generated.out, sampled.out) << dtype << " " << kv;
    }
    const json report = json::parse(ReadFile(dir_ + "/report.json"));
    EXPECT_EQ(report["status"], "ok");
    EXPECT_EQ(report["tokens"], 40);
    EXPECT_EQ(report["kv"], "nvme");
  }
}

TEST_F(GenerateCliTest, DamageOfAStateIsFound) {
  const std::string state = dir_ + "/state";
  ASSERT_EQ(Run({"train", "--model", "gpt-tiny", "--dtype", "bf16", "--threads", "1", "--quiet", "--data",
                 text_, "--state-dir", state, "--steps", "2"})
                .code,
            0);
  const Ran inspected = Run({"inspect", state, "--json"});
  ASSERT_EQ(inspected.code, 0) << inspected.err;
  const json tile = json::parse(inspected.out)["tiles"][2];
  std::fstream file(tile["path"].get<std::string>(), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(tile["segments"][0]["offset"].get<int64_t>() + 100);
  file.write("damage", 6);
  file.close();
  const Ran generated = Run({"generate", state, "--prompt", "a", "--tokens", "4", "--quiet"});
  EXPECT_EQ(generated.code, 1);
  EXPECT_THAT(generated.err, HasSubstr("checksum"));
}

TEST_F(GenerateCliTest, APlanSaysWhatGeneratingWouldTakeAndWhatWouldChangeIt) {
  const Arguments plan = {"plan", "--generate", Model(), "--threads", "1", "--prompt-tokens",
                          "20",   "--tokens",   "8"};
  const Ran ran = Run(plan + Arguments{"--json", "--batch", "1", "--host-memory", "64MiB"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const json told = json::parse(ran.out);
  EXPECT_EQ(told["weights"], 16);
  EXPECT_EQ(told["batch"], 1);
  EXPECT_GT(told["predicted_tokens_per_second"].get<double>(), 0);
  EXPECT_LE(told["planned_bytes"].get<int64_t>(), int64_t{64} << 20);
  std::vector<std::string> changes;
  for (const json& what : told["what_if"]) changes.push_back(what["change"]);
  EXPECT_THAT(changes,
              testing::ElementsAre("twice the memory", "half of the memory", "a drive of twice the speed",
                                   "packed in 8 bit", "packed in 4 bit", "1 text at once", "8 texts at once",
                                   "32 texts at once", "128 texts at once"));
  // In the least memory, which is what generate asks for, too.
  const std::string least = told["least_host_memory_bytes"].dump();
  const Ran tight = Run(plan + Arguments{"--batch", "1", "--host-memory", least});
  ASSERT_EQ(tight.code, 0) << tight.err;
  EXPECT_THAT(tight.out, HasSubstr("half of the memory"));
  EXPECT_THAT(tight.out, HasSubstr("is too small: the least that works here is"));
  EXPECT_EQ(Run(Generate({"--prompt", "twenty letters of it", "--tokens", "8", "--batch", "1",
                          "--host-memory", least}))
                .code,
            0);
  for (const auto& [flags, line] : std::vector<std::pair<Arguments, std::string>>{
           {{"--tokens", "4000"}, "the model takes 256"},
           {{"--host-memory", "1KiB"}, "is too small"},
           {{"--kv", "floppy"}, "must be auto, device, host or nvme"},
           {{"--sequences", "0"}, "must be 1 or more"}}) {
    const Ran refused = Run(Arguments{"plan", "--generate", Model(), "--threads", "1"} + flags);
    EXPECT_EQ(refused.code, 2) << line;
    EXPECT_THAT(refused.err, HasSubstr(line));
  }
}

TEST_F(GenerateCliTest, WrongWordsAreNamedAndWhatWouldDoIsSaid) {
  const std::vector<std::pair<Arguments, std::string>> wrong = {
      {{"generate", Model()}, "--prompt"},
      {{"generate"}, "is needed"},
      {{"generate", dir_ + "/nowhere", "--prompt", "a"}, "nowhere"},
      {Generate({"--prompt", "a", "--batch", "none"}), "--batch none"},
      {Generate({"--prompt", "a", "--kv", "gpu"}), "--kv gpu"},
      {Generate({"--prompt", "a", "--prompt-lookup", "65"}), "--prompt-lookup 65"},
      {Generate({"--prompt", "a", "--prompt-lookup", "4", "--kv", "nvme"}), "keys and values in memory"},
      {Generate({"--prompt", "a", "--kv", "device"}), "--device cuda"},
      {Generate({"--prompt", "a", "--device", "tpu"}), "--device tpu"},
      {Generate({"--prompt", "a", "--device-memory", "1GiB"}), "--device-memory"},
      {Generate({"--prompt", "a", "--device-memory", "much"}), "--device-memory much"},
      {Generate({"--prompt", "a", "--top-p", "0"}), "--top-p 0"},
      {Generate({"--prompt", "a", "--tokens", "0"}), "--tokens 0"},
      {Generate({"--prompt", std::string(300, 'a')}), "300 tokens"},
      {Generate({"--prompt", "a", "--host-memory", "1MiB"}), "the least that works here is"},
      {Generate({"--prompts", dir_ + "/none.jsonl"}), "none.jsonl"},
      {Generate({"--prompt", "a", "--stream", "--out", dir_ + "/x"}), "--stream"},
  };
  for (const auto& [arguments, says] : wrong) {
    const Ran ran = Run(arguments);
    EXPECT_EQ(ran.code, absl::StrContains(says, "nowhere") ? 1 : 2) << says << ": " << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(says));
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
  }
  WriteFile(dir_ + "/bad.json", "[{\"prompt\": \"a\"}, {\"text\": \"a\"}]");
  EXPECT_THAT(Run(Generate({"--prompts", dir_ + "/bad.json"})).err, HasSubstr("bad.json, element 2"));
  WriteFile(dir_ + "/cut.json", "[{\"prompt\": \"a\"}, {\"prompt\": \"b\"");
  EXPECT_THAT(Run(Generate({"--prompts", dir_ + "/cut.json"})).err, HasSubstr("it was cut short"));
  WriteFile(dir_ + "/p.parquet", "PAR1");
  EXPECT_THAT(Run(Generate({"--prompts", dir_ + "/p.parquet"})).err, HasSubstr("read_parquet"));
  WriteFile(dir_ + "/bad.jsonl", "{\"prompt\": \"a\"}\n{\"text\": \"a\"}\n");
  const Ran bad = Run(Generate({"--prompts", dir_ + "/bad.jsonl"}));
  EXPECT_EQ(bad.code, 2);
  EXPECT_THAT(bad.err, HasSubstr("bad.jsonl, line 2"));
  for (const auto& [record, says] : std::vector<std::pair<std::string, std::string>>{
           {R"({"prompt": "a", "max_token": 3})",
            R"(line 2: unknown key "max_token" (did you mean "max_tokens"?))"},
           {R"({"promt": "a"})", R"(line 2: unknown key "promt" (did you mean "prompt"?))"},
           {R"({"prompt": "a", "temperature": 1})",
            R"(line 2: unknown key "temperature": there are "prompt")"},
           {R"({"tokens": [1, 1180591620717411303424]})",
            "line 2: token 1.1805916207174113e+21 is not one of"},
           {R"({"tokens": [18446744073709551615]})", "line 2: token 18446744073709551615 is not one of"},
           {R"({"tokens": [1099511627776]})", "line 2: token 1099511627776 is not one of the model's "},
       }) {
    WriteFile(dir_ + "/key.jsonl", "{\"prompt\": \"a\", \"id\": {\"any\": 1}}\n" + record + "\n");
    const Ran ran = Run(Generate({"--prompts", dir_ + "/key.jsonl"}));
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(says));
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
  }
  const Ran nowhere = Run(Generate({"--prompt", "a", "--kv", "nvme", "--kv-dir", dir_ + "/nowhere"}));
  EXPECT_EQ(nowhere.code, 1);
  EXPECT_THAT(nowhere.err, HasSubstr("nowhere"));
}

TEST_F(GenerateCliTest, PromptsInOneArrayAreThoseOfLines) {
  const std::string lines = Prompts(7);
  std::string array;
  for (const std::string& line : Lines(ReadFile(lines))) array += (array.empty() ? "[" : ",\n") + line;
  WriteFile(dir_ + "/prompts.json", array + "]");
  const Arguments flags = {"--tokens", "4", "--out"};
  ASSERT_EQ(Run(Generate({"--prompts", lines}) + flags + Arguments{dir_ + "/a.out"}).code, 0);
  const Ran ran = Run(Generate({"--prompts", dir_ + "/prompts.json"}) + flags + Arguments{dir_ + "/b.out"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(Made(dir_ + "/b.out").size(), 7u);
  for (const auto& [index, made] : Made(dir_ + "/a.out"))
    EXPECT_EQ(Made(dir_ + "/b.out")[index]["tokens"], made["tokens"]);
}

// As in transformers: what generation_config.json names replaces what config.json names.
TEST_F(GenerateCliTest, GenerationConfigSaysWhatEndsATextAndConfigOnlyWithoutIt) {
  const auto tokens = [&] {
    const Ran ran = Run(Generate({"--prompt", "once", "--tokens", "24", "--json"}));
    EXPECT_EQ(ran.code, 0) << ran.err;
    return json::parse(ran.out, nullptr, false)["tokens"].get<std::vector<int64_t>>();
  };
  const std::vector<int64_t> all = tokens();
  ASSERT_EQ(all.size(), 24u);
  const auto before = [&](int64_t end) {
    return static_cast<size_t>(std::find(all.begin(), all.end(), end) - all.begin());
  };
  int64_t never = 0;
  while (before(never) < all.size()) ++never;
  json config = json::parse(ReadFile(Model() + "/config.json"));
  config["eos_token_id"] = all[5];
  WriteFile(Model() + "/config.json", config.dump());
  const size_t short_length = tokens().size();
  EXPECT_LE(short_length, before(all[5]) + 1);
  WriteFile(Model() + "/generation_config.json", json{{"eos_token_id", {never}}}.dump());
  EXPECT_EQ(tokens().size(), 24u);
  WriteFile(Model() + "/generation_config.json", json{{"eos_token_id", {never, all[5]}}}.dump());
  EXPECT_EQ(tokens().size(), short_length);
  WriteFile(Model() + "/generation_config.json", json{{"do_sample", false}}.dump());
  EXPECT_EQ(tokens().size(), short_length);
}

TEST_F(GenerateCliTest, WeightsOfAnotherFormAndPointersToThemAreNamed) {
  const std::string weights = Model() + "/model.safetensors";
  WriteFile(weights, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n");
  EXPECT_THAT(Run(Generate({"--prompt", "a"})).err, HasSubstr("git lfs pull"));
  std::filesystem::rename(weights, Model() + "/pytorch_model.bin");
  const Ran torch = Run(Generate({"--prompt", "a"}));
  EXPECT_NE(torch.code, 0);
  EXPECT_THAT(torch.err, HasSubstr("pytorch_model.bin, which is not read; transformers converts it"));
  WriteFile(dir_ + "/text.txt", std::string(4096, 'a'));
  const Ran train =
      Run({"train", "--model", Model(), "--data", dir_ + "/text.txt", "--state-dir", dir_ + "/s"});
  EXPECT_EQ(train.code, 2);
  EXPECT_THAT(train.err, HasSubstr("pytorch_model.bin"));
}

TEST_F(GenerateCliTest, ADirectoryThatCannotBeListedIsNotOneWithoutWeights) {
  std::filesystem::create_symlink("loop", dir_ + "/loop");
  EXPECT_THAT(models::HasOtherWeights(dir_ + "/loop").status().message(), HasSubstr("symbolic links"));
  EXPECT_FALSE(models::HasOtherWeights(dir_ + "/none").value());
  EXPECT_THAT(models::WhyNoWeights(dir_ + "/loop"), HasSubstr("symbolic links"));
}

}  // namespace
}  // namespace penstock::tools::generate_cli_test
