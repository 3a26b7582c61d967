// Runs of DeepSpeed's that go on here, and ours as its checkpoints. tests/golden/deepspeed.json has what
// DeepSpeed wrote and with which losses it went on (tests/golden/make_deepspeed.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "models/deepspeed/scattered_tensor.h"
#include "models/weights/torch_file.h"
#include "models/weights/torch_writer.h"
#include "swap/format.h"
#include "swap/inspect.h"
#include "swap/replace_parts.h"
#include "swap/safetensors.h"
#include "swap/write_stream.h"
#include "tests/tampered_call.h"
#include "tests/tools/penstock_program.h"
#include "tiering/plan/model_graph.h"
#include "zero/engine/new_state.h"

namespace penstock::tools::deepspeed_checkpoint_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing_support::Arguments;
using testing_support::Lines;
using testing_support::ProgramTest;
using testing_support::Ran;
using testing_support::operator+;
using testing_support::ReadFile;
using testing_support::WriteFile;

const json& Golden() {
  static const json& golden = *new json(json::parse(ReadFile(PENSTOCK_GOLDEN "/deepspeed.json")));
  return golden;
}

std::string Decoded(const json& text) {
  std::string bytes;
  EXPECT_TRUE(absl::Base64Unescape(text.get<std::string>(), &bytes));
  return bytes;
}

// A file of torch.save; `bytes`: of its tensors.
void WriteTorch(const std::string& path, const models::TorchPickle& pickle, const std::string& bytes) {
  std::filesystem::remove(path);
  auto engine = aio::Engine::Create({});
  ASSERT_TRUE(engine.ok()) << engine.status();
  aio::ArenaOptions options;
  options.lock = false;
  options.bytes = 2 * swap::kSectorBytes;
  auto arena = aio::Arena::Create(options);
  ASSERT_TRUE(arena.ok()) << arena.status();
  swap::WriteStream stream(**engine, std::span((*arena)->data(), options.bytes), swap::kSectorBytes);
  auto file = models::TorchWriter::Create(path, pickle, &stream);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE((*file)->Append(std::as_bytes(std::span(bytes))).ok());
  ASSERT_TRUE((*file)->Finish().ok());
}

template <typename T>
std::string BytesOf(std::initializer_list<T> values) {
  return std::string(reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T));
}

class DeepSpeedCheckpointTest : public ProgramTest {
 protected:
  DeepSpeedCheckpointTest() {
    WriteFile(dir_ + "/config.json", Golden()["model"].dump());
    WriteFile(dir_ + "/tokens.bin", Decoded(Golden()["text"]));
  }

  // As it lay there.
  std::string Checkpoint(const std::string& name) {
    const std::string directory = dir_ + "/" + name;
    for (const auto& [file, bytes] : Golden()["cases"][name]["files"].items()) {
      const std::filesystem::path path = directory + "/" + file;
      std::filesystem::create_directories(path.parent_path());
      WriteFile(path, Decoded(bytes));
    }
    return directory;
  }

  Arguments Import(const std::string& checkpoint, const std::string& state,
                   const Arguments& more = {}) const {
    return Arguments{"import-checkpoint",
                     checkpoint,
                     "--state-dir",
                     state,
                     "--model",
                     dir_ + "/config.json",
                     "--seq",
                     std::to_string(Golden()["seq"].get<int>()),
                     "--vocab",
                     std::to_string(Golden()["model"]["vocab_size"].get<int>()),
                     "--threads",
                     "1"} +
           more;
  }

  // Losses of the steps that follow, by step.
  std::map<int, double> GoOn(const std::string& state, int last) {
    const std::string log = state + ".log";
    const Ran ran =
        Run({"train", "--resume", "--state-dir", state, "--data", dir_ + "/tokens.bin", "--host-memory",
             "300MiB", "--steps", std::to_string(last), "--log", log, "--quiet"});
    EXPECT_EQ(ran.code, 0) << ran.err;
    std::map<int, double> losses;
    for (const std::string& line : Lines(ReadFile(log))) {
      const json step = json::parse(line);
      losses[step["step"].get<int>()] = step["loss"].get<double>();
    }
    return losses;
  }
};

TEST_F(DeepSpeedCheckpointTest, ARunGoesOnWithTheLossesOfDeepSpeed) {
  ASSERT_GE(Golden()["cases"].size(), 4u);
  for (const auto& [name, c] : Golden()["cases"].items()) {
    SCOPED_TRACE(name);
    const std::string state = dir_ + "/state of " + name;
    const Ran ran = Run(Import(Checkpoint(name), state));
    ASSERT_EQ(ran.code, 0) << ran.err;
    const std::map<int, double> losses = GoOn(state, c["losses"].back()["step"].get<int>());
    int compared = 0;
    for (const json& step : c["losses"]) {
      if (step["step"] <= Golden()["saved"]) continue;
      ASSERT_EQ(losses.count(step["step"].get<int>()), 1u);
      // bf16 arithmetic goes in another order.
      EXPECT_NEAR(losses.at(step["step"].get<int>()), step["loss"].get<double>(),
                  c["dtype"] == "fp32" ? 1e-5 : 0.02);
      ++compared;
    }
    EXPECT_GE(compared, 4);
    EXPECT_EQ(losses.size(), static_cast<size_t>(compared));
  }
}

// --overwrite is for what was there when the process was started, however late it comes to it.
TEST_F(DeepSpeedCheckpointTest, WhatWasTrainedSinceAnImportWasStartedStays) {
  const std::string checkpoint = Checkpoint(Golden()["cases"].begin().key()), state = dir_ + "/state",
                    gate = dir_ + "/gate";
  ASSERT_EQ(Run(Import(checkpoint, state)).code, 0);
  const auto step = [&] { return json::parse(Run({"inspect", state, "--json"}).out)["step"].get<int>(); };
  const int imported = step();
  testing_support::Program second(
      dir_, Import(checkpoint, state, {"--overwrite"}),
      {"sh", "-c", "until [ -e \"$0\" ]; do sleep 0.01; done; exec \"$@\"", gate});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // past the kernel's tick
  GoOn(state, imported + 1);
  WriteFile(gate, "");
  const Ran refused = second.Wait();
  EXPECT_EQ(refused.code, 2) << refused.err;
  EXPECT_EQ(Lines(refused.err).size(), 1u) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("another process has trained there since this one was started"));
  EXPECT_EQ(step(), imported + 1);
  EXPECT_EQ(Run(Import(checkpoint, state, {"--overwrite"})).code, 0);
  EXPECT_EQ(step(), imported);
}

TEST_F(DeepSpeedCheckpointTest, WhatIsExportedIsImportedBitForBit) {
  const std::string first = dir_ + "/first", second = dir_ + "/second", out = dir_ + "/universal";
  ASSERT_EQ(Run(Import(Checkpoint("zero3"), first)).code, 0);
  // The least memory: matrices are turned in strips.
  const Ran exported = Run({"export-checkpoint", first, out, "--host-memory", "1MiB"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  for (const std::string tag : {"two\nlines", "a\tb", "\x7f", "a ", " a"}) {
    const Ran refused = Run({"export-checkpoint", first, out, "--tag", tag});
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_EQ(std::count(refused.err.begin(), refused.err.end(), '\n'), 1) << refused.err;
  }
  const Ran named = Run({"export-checkpoint", first, out, "--tag", "latest_universal"});
  EXPECT_EQ(named.code, 2) << named.err;
  EXPECT_THAT(named.err, HasSubstr("neither latest nor latest_universal"));
  EXPECT_THAT(exported.out, HasSubstr("global_step4_universal: step 4, 16 tensors"));
  // With the config that DeepSpeed needs to go on from there.
  json config = Golden()["cases"]["zero3"]["config"];
  config["checkpoint"] = {{"load_universal", true}};
  WriteFile(dir_ + "/ds_config.json", config.dump());
  const Ran imported =
      Run(Import(out, second, {"--config", dir_ + "/ds_config.json", "--batch", "2", "--accumulate", "1"}));
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_THAT(imported.err, HasSubstr("checkpoint.load_universal: accepted and ignored: "));
  const std::map<int, double> losses = GoOn(first, 8);
  EXPECT_EQ(GoOn(second, 8), losses);
  EXPECT_EQ(losses.size(), 4u);
}

// What its config says of another machine is told, and is no part of the run.
TEST_F(DeepSpeedCheckpointTest, WhatIsOfAnotherMachineIsNotKept) {
  const std::string first = dir_ + "/first", second = dir_ + "/second", out = dir_ + "/universal";
  ASSERT_EQ(Run(Import(Checkpoint("zero3"), first)).code, 0);
  ASSERT_EQ(Run({"export-checkpoint", first, out}).code, 0);
  json config = Golden()["cases"]["zero3"]["config"];
  config["csv_monitor"] = {{"enabled", true}, {"output_path", dir_ + "/theirs"}, {"job_name", "run"}};
  models::TorchPickle pickle;
  pickle.Json({{"module", json::object()},
               {"optimizer", nullptr},
               {"lr_scheduler", {{"last_batch_iteration", 3}}},
               {"skipped_steps", 0},
               {"global_steps", 4},
               {"dp_world_size", 2},
               {"mp_world_size", 1},
               {"ds_config", config},
               {"ds_version", "0.19.8"}});
  WriteTorch(out + "/global_step4_universal/mp_rank_00_model_states.pt", pickle, "");
  const Ran imported = Run(Import(out, second));
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_THAT(imported.err,
              HasSubstr("what the checkpoint's ds_config says of memory, drives and monitors is "
                        "not kept: give train --config for it"));
  EXPECT_EQ(GoOn(second, 8), GoOn(first, 8));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/theirs"));
}

TEST_F(DeepSpeedCheckpointTest, AGroupOfParametersThatIsNoneIsNamed) {
  const std::string first = dir_ + "/first", out = dir_ + "/universal";
  ASSERT_EQ(Run(Import(Checkpoint("zero3"), first)).code, 0);
  ASSERT_EQ(Run({"export-checkpoint", first, out}).code, 0);
  const json groups = {{"param_groups", {1, 2}}};
  models::TorchPickle pickle;
  pickle.BeginDict();
  pickle.Text("param_groups");
  pickle.Json(groups["param_groups"]);
  pickle.Text("optimizer_state_dict");
  pickle.Json(groups);
  pickle.EndDict();
  WriteTorch(out + "/global_step4_universal/zero/optimizer_state.pt", pickle, "");
  const Ran refused = Run(Import(out, dir_ + "/second"));
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.err, HasSubstr("a group of param_groups is no dict"));
}

// Of a state that values from elsewhere replace, whichever single call fails, or is the last before a kill.
TEST_F(DeepSpeedCheckpointTest, UntilTheNewStateIsCommittedTheOldOneIsWhole) {
  const std::string directory = dir_ + "/state", kept = dir_ + "/kept";
  const auto write = [&](int64_t step) {
    zero::NewState state;
    state.store.directories = {directory};
    state.store.overwrite = true;
    state.store.lock_patience_ms = 5000;
    state.store.sync = swap::Sync::kPower;
    state.identity = "{}";
    state.format.weights = kernels::DType::kFp32;
    state.block_elements = {tiering::kElementAlignment};
    state.step = state.updates = step;
    return zero::WriteNewState(
        state,
        [&](zero::StateKind, int, int64_t, int64_t elements, float* to) {
          std::fill_n(to, elements, static_cast<float>(step));
          return absl::OkStatus();
        },
        [](uint64_t, uint64_t) {});
  };
  ASSERT_TRUE(write(1).ok());
  const std::string old = ReadFile(directory + "/penstock.store");
  std::filesystem::copy(directory, kept);
  std::vector<uint64_t> calls = NamingCalls();
  calls.insert(calls.end(), {SYS_fsync, SYS_fdatasync, SYS_fallocate, SYS_ftruncate});
  for (const int error : {EIO, 0}) {
    bool reached = true;
    int stayed = 0;
    for (size_t at = 0; reached; ++at) {
      SCOPED_TRACE(absl::StrCat("error ", error, " at ", at));
      std::filesystem::remove_all(directory);
      std::filesystem::copy(kept, directory);
      const Tampered ran =
          RunTampered({.calls = calls, .at = at, .error = error}, [&] { return write(2).ok() ? 0 : 1; });
      if (!ran.can) GTEST_SKIP() << "no process can be traced here";
      reached = ran.reached;
      // As the next start does.
      const absl::Status finished = swap::FinishReplacement({directory});
      ASSERT_TRUE(finished.ok()) << finished;
      const swap::Finding found = swap::Probe(directory, 5000);
      ASSERT_EQ(found.holding, swap::Holding::kRun) << found.text;
      if (found.step == 2) continue;
      EXPECT_NE(ran.code, 0);
      ++stayed;
      EXPECT_EQ(found.step, 1U);
      EXPECT_TRUE(ReadFile(directory + "/penstock.store") == old);
      EXPECT_FALSE(std::filesystem::exists(directory + "/.penstock.next"));
    }
    EXPECT_GT(stayed, 10);
  }
}

TEST_F(DeepSpeedCheckpointTest, ARunOfPythonsIsToldWhereItIsExported) {
  zero::NewState state;
  state.store.directories = {dir_ + "/driven"};
  state.identity = R"({"model": {"architecture": "driven", "parameters": 1, "fingerprint": "0"}})";
  state.format.weights = kernels::DType::kFp32;
  state.block_elements = {tiering::kElementAlignment};
  state.step = state.updates = 1;
  state.payload = R"({"run": {"run_id": "python"}, "schedule": null})";
  const absl::Status made = zero::WriteNewState(
      state,
      [](zero::StateKind, int, int64_t, int64_t elements, float* to) {
        std::fill_n(to, elements, 1.0F);
        return absl::OkStatus();
      },
      [](uint64_t, uint64_t) {});
  ASSERT_TRUE(made.ok()) << made;
  const Ran ran = Run({"export-checkpoint", dir_ + "/driven", dir_ + "/universal"});
  EXPECT_EQ(ran.code, 2) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("a run of a Python script"));
  EXPECT_THAT(ran.err, HasSubstr("engine.export_checkpoint"));
  EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
}

TEST_F(DeepSpeedCheckpointTest, WhatDoesNotFitIsNamedAndLeavesNothing) {
  const std::string checkpoint = Checkpoint("zero1"), tag = checkpoint + "/global_step4",
                    state = dir_ + "/state";
  const auto refused = [&](const Arguments& arguments, const std::string& why) {
    const Ran ran = Run(arguments);
    EXPECT_EQ(ran.code, 2) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr(why));
    EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    EXPECT_FALSE(std::filesystem::exists(state + "/penstock.store"));
  };
  json other = Golden()["model"];
  other["n_embd"] = 16;
  WriteFile(dir_ + "/other.json", other.dump());
  refused({"import-checkpoint", checkpoint, "--state-dir", state, "--model", dir_ + "/other.json"},
          "transformer.wte.weight is [29, 12] there and [29, 16] in this model");
  other = Golden()["model"];
  other["n_layer"] = 2;
  WriteFile(dir_ + "/other.json", other.dump());
  refused({"import-checkpoint", checkpoint, "--state-dir", state, "--model", dir_ + "/other.json"},
          "no parameter transformer.h.1.");
  refused({"import-checkpoint", checkpoint, "--state-dir", state}, "--model is needed");
  refused({"import-checkpoint", checkpoint, "--model", dir_ + "/config.json"}, "--state-dir is needed");
  WriteFile(dir_ + "/names.json", R"({"transformer.wte.weight": "embedding"})");
  refused(Import(checkpoint, state, {"--names", dir_ + "/names.json"}), "no parameter embedding");
  WriteFile(dir_ + "/names.json", R"({"wte": "embedding"})");
  refused(Import(checkpoint, state, {"--names", dir_ + "/names.json"}),
          "wte, which is no parameter of this model");
  refused(Import(checkpoint, state, {"--names", dir_ + "/none.json"}), "no such file");
  WriteFile(checkpoint + "/latest", "global_step9\n");
  std::filesystem::create_directory_symlink(tag, checkpoint + "/older");
  WriteFile(checkpoint + "/latest_universal", "older");
  refused(Import(checkpoint, state), "latest names global_step9, which is not there");
  std::filesystem::remove(checkpoint + "/latest_universal");
  for (const auto& [text, why] : std::vector<std::pair<std::string, std::string>>{
           {std::string("global_step4\0x", 14), "it has a zero byte in it"},
           {"global_step4\nglobal_step5", "it has more than one line"},
           {"../ckpt/global_step4", "it has a slash in it"},
           {"..", "it leads elsewhere"},
           {"", "it is empty"}}) {
    WriteFile(checkpoint + "/latest", text);
    refused(Import(checkpoint, state), checkpoint + "/latest names no checkpoint beside it");
    refused(Import(checkpoint, state), why);
  }
  WriteFile(checkpoint + "/latest", "global_step4");
  std::filesystem::remove(tag + "/zero_pp_rank_1_mp_rank_00_optim_states.pt");
  refused(Import(checkpoint, state), "of a run of 2 ranks, of which 1 are here");
  std::filesystem::rename(tag + "/zero_pp_rank_0_mp_rank_00_optim_states.pt",
                          tag + "/zero_pp_rank_1_mp_rank_00_optim_states.pt");
  refused(Import(checkpoint, state), "state of rank 0 is missing");
}

// As of every verb that reads one.
TEST_F(DeepSpeedCheckpointTest, APlaceWithoutACheckpointIsExitCode1) {
  const std::string empty = dir_ + "/empty", missing = dir_ + "/missing", state = dir_ + "/state";
  std::filesystem::create_directory(empty);
  for (const std::string& place : {empty, missing}) {
    for (const Arguments& arguments :
         {Import(place, state), Arguments{"inspect", place}, Arguments{"verify", place},
          Arguments{"export", place, dir_ + "/out"}, Arguments{"zero_to_fp32", place, dir_ + "/out"}}) {
      const Ran ran = Run(arguments);
      EXPECT_EQ(ran.code, 1) << ran.err;
      EXPECT_THAT(ran.err, testing::StartsWith("penstock " + arguments.front() + ": " + place + ": "));
      EXPECT_EQ(Lines(ran.err).size(), 1u) << ran.err;
    }
  }
  // And one that is of DeepSpeed is told the verbs that take it.
  const Ran ran = Run({"inspect", Checkpoint("zero2")});
  EXPECT_EQ(ran.code, 1) << ran.err;
  EXPECT_THAT(ran.err, AllOf(HasSubstr("import-checkpoint"), HasSubstr("zero_to_fp32")));
}

// All values of a file, by name.
std::map<std::string, std::vector<float>> ValuesOf(const std::string& path) {
  std::map<std::string, std::vector<float>> values;
  const auto reader = swap::SafetensorsReader::Open(path);
  EXPECT_TRUE(reader.ok()) << reader.status();
  if (!reader.ok()) return values;
  for (const swap::TensorInfo& tensor : (*reader)->tensors()) {
    EXPECT_EQ(tensor.dtype, swap::Dtype::kF32) << tensor.name;
    std::vector<float>& of = values[tensor.name];
    of.resize(*tensor.Bytes() / sizeof(float));
    EXPECT_TRUE((*reader)->Read(tensor, 0, std::as_writable_bytes(std::span(of))).ok()) << tensor.name;
  }
  return values;
}

// The module's own weights, as the first rank of stages 1 and 2 keeps them beside the parts of the masters.
std::map<std::string, std::vector<float>> ModuleOf(const std::string& path) {
  std::map<std::string, std::vector<float>> values;
  const auto file = models::TorchFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  if (!file.ok()) return values;
  for (const auto& [name, value] : (*file)->root()["module"].entries()) {
    const models::TorchTensor* const tensor = value.tensor();
    if (tensor == nullptr) continue;
    models::ScatteredTensor whole;
    models::ReadBuffer buffer;
    std::vector<float>& of = values[std::string(name.text())];
    of.resize(static_cast<size_t>(tensor->elements));
    EXPECT_TRUE(whole.Add(**file, *tensor, 0, tensor->elements).ok());
    EXPECT_TRUE(whole.Read(0, tensor->elements, of.data(), &buffer).ok());
  }
  return values;
}

// torch.load, which such a name is for, reads no safetensors.
TEST_F(DeepSpeedCheckpointTest, AFileByANameOfTorchsIsRefused) {
  for (const char* name : {"pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"}) {
    const Ran ran = Run({"zero_to_fp32", Checkpoint("zero2"), dir_ + "/" + name});
    EXPECT_EQ(ran.code, 2);
    EXPECT_THAT(ran.err, AllOf(HasSubstr(name), HasSubstr("call it .safetensors")));
    EXPECT_FALSE(std::filesystem::exists(dir_ + "/" + name));
  }
}

TEST_F(DeepSpeedCheckpointTest, ItsWeightsAreWrittenWhole) {
  std::map<std::string, std::map<std::string, std::vector<float>>> all;
  for (const auto& [name, c] : Golden()["cases"].items()) {
    SCOPED_TRACE(name);
    const std::string checkpoint = Checkpoint(name), out = dir_ + "/" + name + ".safetensors";
    const Ran ran = Run({"zero_to_fp32", checkpoint, out});
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_THAT(ran.out, HasSubstr("step 4 of " + checkpoint + "/global_step4"));
    all[name] = ValuesOf(out);
    // The same values as a run that goes on from it has, and under the same names; a tied one has two there.
    const std::string state = dir_ + "/state of " + name, again = dir_ + "/again.safetensors";
    ASSERT_EQ(Run(Import(checkpoint, state)).code, 0);
    ASSERT_EQ(Run({"export", state, again, "--overwrite"}).code, 0);
    const auto ours = ValuesOf(again);
    EXPECT_EQ(ours.size(), 16u);
    for (const auto& [tensor, values] : ours) EXPECT_EQ(all[name][tensor], values) << tensor;
    for (const auto& [tensor, values] : all[name]) {
      EXPECT_TRUE(ours.count(tensor) > 0 || tensor == "lm_head.weight") << tensor;
      EXPECT_FALSE(values.empty());
    }
  }
  for (const char* name : {"zero1", "zero2"}) {
    EXPECT_EQ(all[name], ModuleOf(dir_ + "/" + name + "/global_step4/mp_rank_00_model_states.pt")) << name;
  }
  // Of bf16 the module has the rounded ones.
  const auto rounded = ModuleOf(dir_ + "/zero1 bf16/global_step4/mp_rank_00_model_states.pt");
  const std::string bf16 = dir_ + "/bf16.safetensors";
  ASSERT_EQ(Run({"zero_to_fp32", dir_ + "/zero1 bf16", bf16, "--dtype", "bf16"}).code, 0);
  const auto reader = swap::SafetensorsReader::Open(bf16);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->tensors().size(), rounded.size());
  for (const swap::TensorInfo& tensor : (*reader)->tensors()) {
    std::vector<uint16_t> bits(*tensor.Bytes() / sizeof(uint16_t));
    ASSERT_TRUE((*reader)->Read(tensor, 0, std::as_writable_bytes(std::span(bits))).ok());
    const std::vector<float>& expected = rounded.at(tensor.name);
    ASSERT_EQ(bits.size(), expected.size()) << tensor.name;
    for (size_t i = 0; i < bits.size(); ++i)
      ASSERT_EQ(std::bit_cast<uint32_t>(expected[i]), uint32_t{bits[i]} << 16) << tensor.name << " " << i;
  }
}

// Of any model and optimizer: frozen parameters cut over ranks, buffers, a tied parameter, no moments.
TEST_F(DeepSpeedCheckpointTest, WhatIsNotTrainedIsWrittenToo) {
  const std::string tag = dir_ + "/ckpt/global_step3", out = dir_ + "/out";
  std::filesystem::create_directories(tag);
  WriteFile(dir_ + "/ckpt/latest", "global_step3");
  const auto one = [](models::TorchPickle* pickle, const char* key, const char* name, swap::Dtype dtype,
                      const std::vector<uint64_t>& sizes) {
    pickle->Text(key);
    pickle->BeginDict();
    pickle->Text(name);
    pickle->Tensor(dtype, sizes);
    pickle->EndDict();
  };
  const auto rank_file = [&](int rank, const char* ending) {
    return tag + "/zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_" + ending + "_states.pt";
  };
  json described = {{"global_steps", 3},
                    {"dp_world_size", 2},
                    {"mp_world_size", 1},
                    {"client_state", 0.5},
                    {"ds_version", "0.19.8"}};
  described["frozen_param_shapes"]["f"] = json::array({3});
  json& shapes = described["param_shapes"][0];
  shapes["v"] = json::array({3});
  shapes["w"] = json::array({2, 3});
  described["buffer_names"] = json::array({"count", "scale"});
  described["shared_params"]["tied"] = "v";
  const uint16_t ten = 0x4120, eleven = 0x4130, twelve = 0x4140;  // bf16
  for (const int rank : {0, 1}) {
    models::TorchPickle model;
    model.BeginDict();
    one(&model, "frozen_param_fragments", "f", swap::Dtype::kBf16, {2});
    model.Text("module");
    model.BeginDict();
    model.Text("scale");
    model.Tensor(swap::Dtype::kF16, {1});
    model.Text("count");
    model.Tensor(swap::Dtype::kI64, {2});
    model.EndDict();
    for (const auto& [key, value] : described.items()) {
      model.Text(key);
      model.Json(value);
    }
    model.EndDict();
    WriteTorch(rank_file(rank, "model"), model,
               (rank == 0 ? BytesOf({ten, eleven}) : BytesOf({twelve, uint16_t{0}})) +
                   BytesOf({uint16_t{0x4a80}}) + BytesOf({int64_t{14}, int64_t{15}}));
    models::TorchPickle optimizer;
    optimizer.BeginDict();
    optimizer.Text("optimizer_state_dict");
    optimizer.BeginDict();
    optimizer.Text("zero_stage");
    optimizer.Int(3);
    optimizer.Text("partition_count");
    optimizer.Int(2);
    optimizer.Text("fp32_flat_groups");
    optimizer.BeginList();
    optimizer.Tensor(swap::Dtype::kF32, {5});
    optimizer.EndList();
    optimizer.EndDict();
    optimizer.EndDict();
    WriteTorch(rank_file(rank, "optim"), optimizer,
               rank == 0 ? BytesOf({7.F, 8.F, 1.F, 2.F, 3.F}) : BytesOf({9.F, 0.F, 4.F, 5.F, 6.F}));
  }
  const Ran ran = Run({"zero_to_fp32", dir_ + "/ckpt", out});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  EXPECT_THAT(ran.out, HasSubstr("(ZeRO-3 of 2 ranks), 6 tensors, 18 values as fp32"));
  const auto reader = swap::SafetensorsReader::Open(out);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const auto values = [&](const char* name, const std::vector<uint64_t>& shape) {
    const swap::TensorInfo* const tensor = (*reader)->Find(name);
    EXPECT_NE(tensor, nullptr) << name;
    if (tensor == nullptr) return std::string();
    EXPECT_EQ(tensor->shape, shape) << name;
    std::string bytes(*tensor->Bytes(), '\0');
    EXPECT_TRUE((*reader)->Read(*tensor, 0, std::as_writable_bytes(std::span(bytes))).ok());
    return bytes;
  };
  EXPECT_EQ(values("w", {2, 3}), BytesOf({1.F, 2.F, 3.F, 4.F, 5.F, 6.F}));
  EXPECT_EQ(values("v", {3}), BytesOf({7.F, 8.F, 9.F}));
  EXPECT_EQ(values("tied", {3}), BytesOf({7.F, 8.F, 9.F}));
  EXPECT_EQ(values("f", {3}), BytesOf({10.F, 11.F, 12.F}));
  EXPECT_EQ(values("scale", {1}), BytesOf({13.F}));
  EXPECT_EQ(values("count", {2}), BytesOf({int64_t{14}, int64_t{15}}));
  // A file of the checkpoint is no place for its weights, by whatever name.
  std::filesystem::create_symlink(rank_file(0, "model"), dir_ + "/other-name");
  const std::string before = ReadFile(rank_file(0, "model"));
  for (const std::string& place : {rank_file(0, "model"), dir_ + "/other-name"}) {
    const Ran own = Run({"zero_to_fp32", dir_ + "/ckpt", place, "--overwrite"});
    EXPECT_EQ(own.code, 2) << own.err;
    EXPECT_THAT(own.err, HasSubstr(place.ends_with(".pt") ? ".pt a name of torch's files"
                                                          : "that is read: give another name"));
    EXPECT_EQ(ReadFile(rank_file(0, "model")), before);
  }
  // One rank's part is missing: no file, and why.
  std::filesystem::remove(rank_file(1, "model"));
  const Ran part = Run({"zero_to_fp32", dir_ + "/ckpt", out, "--overwrite"});
  EXPECT_EQ(part.code, 2) << part.err;
  EXPECT_THAT(part.err, HasSubstr("a part of f is missing: 1 of 2 ranks"));
  EXPECT_EQ(values("f", {3}), BytesOf({10.F, 11.F, 12.F})) << "what was there is there";
}

TEST_F(DeepSpeedCheckpointTest, WhichOfItsCheckpointsAndWhereTo) {
  const std::string checkpoint = Checkpoint("zero3"), out = dir_ + "/out";
  std::filesystem::create_directory(out);
  ASSERT_EQ(Run({"zero_to_fp32", checkpoint, out, "--quiet"}).code, 0);
  const auto values = ValuesOf(out + "/model.safetensors");
  const Ran there = Run({"zero_to_fp32", checkpoint, out});
  EXPECT_EQ(there.code, 2) << there.err;
  EXPECT_THAT(there.err, AllOf(testing::StartsWith("penstock zero_to_fp32: "), HasSubstr("--overwrite")));
  // The tag by its name, by its directory, without `latest`.
  std::filesystem::remove(checkpoint + "/latest");
  ASSERT_EQ(Run({"zero_to_fp32", checkpoint, out + "/a", "--tag", "global_step4"}).code, 0);
  ASSERT_EQ(Run({"export", checkpoint + "/global_step4", out + "/b"}).code, 0);
  EXPECT_EQ(ValuesOf(out + "/a"), values);
  EXPECT_EQ(ValuesOf(out + "/b"), values);
  const Ran other = Run({"zero_to_fp32", checkpoint, out + "/c", "--tag", "global_step5"});
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.err, HasSubstr("--tag global_step5: no checkpoint of DeepSpeed's of that name"));
  const Ran merged = Run({"zero_to_fp32", checkpoint + "/global_step4", out + "/c", "--merge"});
  EXPECT_EQ(merged.code, 2);
  EXPECT_THAT(merged.err, HasSubstr("--merge: "));
  // Cut short: no file, and no false one.
  const std::string file = checkpoint + "/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
  const Ran damaged = Run({"zero_to_fp32", checkpoint + "/global_step4", out + "/c"});
  EXPECT_EQ(damaged.code, 1) << damaged.err;
  EXPECT_FALSE(std::filesystem::exists(out + "/c"));
}

TEST_F(DeepSpeedCheckpointTest, NamesOfAnotherModelAreMapped) {
  // The universal format names parameters by directories.
  const std::string checkpoint = Checkpoint("universal"), state = dir_ + "/state";
  std::string zero;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint)) {
    if (entry.is_directory() && std::filesystem::exists(entry.path() / "zero")) zero = entry.path() / "zero";
  }
  std::filesystem::rename(zero + "/transformer.wpe.weight", zero + "/places");
  WriteFile(dir_ + "/names.json", R"({"transformer.wpe.weight": "places"})");
  const Ran ran = Run(Import(checkpoint, state, {"--names", dir_ + "/names.json"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  const json step = Golden()["cases"]["universal"]["losses"][4];
  EXPECT_NEAR(GoOn(state, 5).at(5), step["loss"].get<double>(), 1e-5);
}

uint32_t Crc32(std::string_view bytes) {
  uint32_t crc = 0xffffffffU;
  for (const char c : bytes) {
    crc ^= static_cast<uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0xedb88320U : 0U);
  }
  return ~crc;
}

// Changes data.pkl of a file of torch.save, a ZIP file that compresses nothing, to something as long, and the
// checksums with it.
template <typename Change>
void ChangePickle(std::string* file, const Change& change) {
  const auto number = [&](size_t at) {
    uint32_t value = 0;
    std::memcpy(&value, file->data() + at, sizeof(value));
    return value;
  };
  const size_t name = file->rfind("/data.pkl"), entry = file->rfind("PK\1\2", name);
  ASSERT_NE(entry, std::string::npos);
  const uint32_t crc = number(entry + 16), bytes = number(entry + 20), header = number(entry + 42);
  uint16_t lengths[2];  // of the name, and of what follows it
  std::memcpy(lengths, file->data() + header + 26, sizeof(lengths));
  const size_t begin = header + 30 + lengths[0] + lengths[1];
  std::string pickle = file->substr(begin, bytes);
  ASSERT_EQ(Crc32(pickle), crc);
  change(&pickle);
  ASSERT_EQ(pickle.size(), bytes);
  file->replace(begin, bytes, pickle);
  const uint32_t now = Crc32(pickle);
  for (const size_t from : {size_t{header}, begin + bytes, entry}) {
    // The checksum is within the first 16 bytes of a header, a descriptor, and an entry, if it is in there.
    for (size_t at = from; at < from + 20; ++at) {
      if (number(at) == crc) std::memcpy(file->data() + at, &now, sizeof(now));
    }
  }
}

TEST_F(DeepSpeedCheckpointTest, AShapeThatIsNobodysIsRefusedUnlessItsValuesAreElsewhere) {
  const std::string checkpoint = Checkpoint("universal"), state = dir_ + "/state";
  const std::string tag = checkpoint + "/global_step4_universal", file = tag + "/mp_rank_00_model_states.pt";
  // The list of shapes has a parameter that the model does not have, and that has no values.
  const std::string name = "transformer.wpe.weight", other = "transformer.wpx.weight";
  std::string bytes = ReadFile(file);
  int replaced = 0;
  ChangePickle(&bytes, [&](std::string* pickle) {
    for (size_t at = pickle->find(name); at != std::string::npos; at = pickle->find(name, at)) {
      pickle->replace(at, name.size(), other);
      ++replaced;
    }
  });
  ASSERT_GT(replaced, 0);
  WriteFile(file, bytes);
  const Ran ran = Run(Import(checkpoint, state));
  EXPECT_EQ(ran.code, 2) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("transformer.wpx.weight has no place in this model"));
  EXPECT_FALSE(std::filesystem::exists(state + "/penstock.store"));
  // Nor does it help that --names maps another one.
  std::filesystem::rename(tag + "/zero/transformer.wte.weight", tag + "/zero/words");
  WriteFile(dir_ + "/names.json", R"({"transformer.wte.weight": "words"})");
  const Ran mapped = Run(Import(checkpoint, state, {"--names", dir_ + "/names.json"}));
  EXPECT_EQ(mapped.code, 2) << mapped.err;
  EXPECT_THAT(mapped.err, HasSubstr("transformer.wpx.weight has no place in this model"));
}

TEST_F(DeepSpeedCheckpointTest, ADamagedFileIsRefusedAndTheOldRunStays) {
  const std::string checkpoint = Checkpoint("zero1"), state = dir_ + "/state";
  ASSERT_EQ(Run(Import(checkpoint, state)).code, 0);
  const Ran there = Run(Import(checkpoint, state));
  EXPECT_EQ(there.code, 2) << there.err;
  const std::string file = checkpoint + "/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
  const Ran ran = Run(Import(checkpoint, state, {"--overwrite"}));
  EXPECT_EQ(ran.code, 1) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("cut short"));
  EXPECT_EQ(Run({"verify", state}).code, 0);
}

// What only shows when the values are read.
TEST_F(DeepSpeedCheckpointTest, AFlippedBitOfAValueIsRefusedAndTheOldRunStays) {
  const std::string checkpoint = Checkpoint("zero1"), state = dir_ + "/state";
  ASSERT_EQ(Run(Import(checkpoint, state)).code, 0);
  const std::string before = ReadFile(state + "/penstock.store");
  const std::string file = checkpoint + "/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt";
  std::string bytes = ReadFile(file);
  bytes[bytes.size() / 2] ^= 1;  // a tensor's
  WriteFile(file, bytes);
  const Ran ran = Run(Import(checkpoint, state, {"--overwrite"}));
  EXPECT_EQ(ran.code, 1) << ran.err;
  EXPECT_THAT(ran.err, AllOf(HasSubstr(file), HasSubstr("CRC")));
  EXPECT_TRUE(ReadFile(state + "/penstock.store") == before);
}

}  // namespace
}  // namespace penstock::tools::deepspeed_checkpoint_test
