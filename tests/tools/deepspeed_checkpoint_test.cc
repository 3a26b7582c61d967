// Runs of DeepSpeed's that go on here, and ours as its checkpoints. tests/golden/deepspeed.json has what
// DeepSpeed wrote and with which losses it went on (scripts/golden-deepspeed).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "absl/strings/escaping.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "models/torch_file.h"
#include "models/torch_writer.h"
#include "swap/format.h"
#include "swap/write_stream.h"
#include "tests/tools/penstock_program.h"
#include "tiering/plan/model_graph.h"
#include "zero/engine/new_state.h"

namespace penstock::tools {
namespace {

using nlohmann::json;
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
    const Ran ran = Run({"train", "--resume", "--state-dir", state, "--data", dir_ + "/tokens.bin",
                         "--host-memory", "300M", "--steps", std::to_string(last), "--log", log, "--quiet"});
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

TEST_F(DeepSpeedCheckpointTest, WhatIsExportedIsImportedBitForBit) {
  const std::string first = dir_ + "/first", second = dir_ + "/second", out = dir_ + "/universal";
  ASSERT_EQ(Run(Import(Checkpoint("zero3"), first)).code, 0);
  // The least memory: matrices are turned in strips.
  const Ran exported = Run({"export-checkpoint", first, out, "--host-memory", "1M"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  const Ran named = Run({"export-checkpoint", first, out, "--tag", "latest_universal"});
  EXPECT_EQ(named.code, 2) << named.err;
  EXPECT_THAT(named.err, HasSubstr("neither latest nor latest_universal"));
  EXPECT_THAT(exported.out, HasSubstr("global_step4_universal: step 4, 16 tensors"));
  WriteFile(dir_ + "/ds_config.json", Golden()["cases"]["zero3"]["config"].dump());
  const Ran imported =
      Run(Import(out, second, {"--config", dir_ + "/ds_config.json", "--batch", "2", "--accumulate", "1"}));
  ASSERT_EQ(imported.code, 0) << imported.err;
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
  auto engine = aio::Engine::Create({});
  ASSERT_TRUE(engine.ok()) << engine.status();
  aio::ArenaOptions options;
  options.lock = false;
  options.bytes = 2 * swap::kSectorBytes;
  auto arena = aio::Arena::Create(options);
  ASSERT_TRUE(arena.ok()) << arena.status();
  swap::WriteStream stream(**engine, std::span((*arena)->data(), options.bytes), swap::kSectorBytes);
  auto file = models::TorchWriter::Create(out + "/global_step4_universal/mp_rank_00_model_states.pt", pickle,
                                          &stream);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE((*file)->Finish().ok());
  const Ran imported = Run(Import(out, second));
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_THAT(imported.err,
              HasSubstr("what the checkpoint's ds_config says of memory, drives and monitors is "
                        "not kept: give train --config for it"));
  EXPECT_EQ(GoOn(second, 8), GoOn(first, 8));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/theirs"));
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
  refused(Import(dir_, state), "no checkpoint of DeepSpeed");
  WriteFile(checkpoint + "/latest", "global_step9\n");
  std::filesystem::create_directory_symlink(tag, checkpoint + "/older");
  WriteFile(checkpoint + "/latest_universal", "older");
  refused(Import(checkpoint, state), "latest names global_step9, which is not there");
  std::filesystem::remove(checkpoint + "/latest_universal");
  WriteFile(checkpoint + "/latest", "global_step4");
  std::filesystem::remove(tag + "/zero_pp_rank_1_mp_rank_00_optim_states.pt");
  refused(Import(checkpoint, state), "of a run of 2 ranks, of which 1 are here");
  std::filesystem::rename(tag + "/zero_pp_rank_0_mp_rank_00_optim_states.pt",
                          tag + "/zero_pp_rank_1_mp_rank_00_optim_states.pt");
  refused(Import(checkpoint, state), "state of rank 0 is missing");
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

TEST_F(DeepSpeedCheckpointTest, AShapeThatIsNobodysIsRefusedUnlessItsValuesAreElsewhere) {
  const std::string checkpoint = Checkpoint("universal"), state = dir_ + "/state";
  const std::string tag = checkpoint + "/global_step4_universal", file = tag + "/mp_rank_00_model_states.pt";
  // The list of shapes has a parameter that the model does not have, and that has no values.
  const std::string name = "transformer.wpe.weight", other = "transformer.wpx.weight";
  std::string bytes = ReadFile(file);
  int replaced = 0;
  for (size_t at = bytes.find(name); at != std::string::npos; at = bytes.find(name, at)) {
    bytes.replace(at, name.size(), other);
    ++replaced;
  }
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

}  // namespace
}  // namespace penstock::tools
