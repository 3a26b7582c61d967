// Small models whose weights a formula gives, here and in tests/golden/make_*.py: what transformers answers
// for them stands in tests/golden/.
#ifndef PENSTOCK_TESTS_TOOLS_GOLDEN_MODELS_H_
#define PENSTOCK_TESTS_TOOLS_GOLDEN_MODELS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "kernels/float16.h"
#include "models/families/family.h"
#include "models/families/stages.h"
#include "swap/safetensors.h"
#include "tests/tools/penstock_program.h"
#include "tools/penstock/train_settings.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/libtorch/tensors.h"
#include "zero/config/lr_schedule.h"
#include "zero/engine/engine.h"

namespace penstock::tools::testing_support {

inline nlohmann::json Golden(const std::string& name) {
  std::ifstream file(std::string(PENSTOCK_GOLDEN) + "/" + name);
  const nlohmann::json golden = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(golden.is_object()) << name;
  return golden;
}

// All of Llama's family: cases and keys of all files.
inline nlohmann::json GoldenLlamas() {
  nlohmann::json all = Golden("llama.json");
  for (const char* name : {"llama_variants.json", "llama_windows.json"}) {
    const nlohmann::json more = Golden(name);
    for (const nlohmann::json& each : more["cases"]) all["cases"].push_back(each);
    all["keys"].update(more["keys"]);
  }
  return all;
}

// Exact in fp32, by the tensor's published name.
inline std::vector<float> Formula(const std::string& name, int64_t elements) {
  uint64_t salt = 0;
  for (size_t i = 0; i < name.size(); ++i) salt += (i + 1) * static_cast<unsigned char>(name[i]);
  salt %= 65521;
  const bool norm = absl::EndsWith(name, "norm.weight") ||
                    (absl::EndsWith(name, "weight") && absl::StrContains(name, ".ln_"));
  std::vector<float> values;
  for (int64_t e = 0; e < elements; ++e) {
    const uint64_t x = (static_cast<uint64_t>(e) * 2654435761u + salt * 40503 + 12345) % (uint64_t{1} << 32);
    double value = static_cast<double>(x >> 16) / 65536 - 0.5;
    if (norm) value = 1 + value / 4;
    values.push_back(static_cast<float>(value));
  }
  return values;
}

// A directory as `from_pretrained` reads one, with these weights in so many files, in fp32 or bf16.
inline void WriteModel(const std::string& directory, const nlohmann::json& config, size_t files = 1,
                       swap::Dtype dtype = swap::Dtype::kF32) {
  std::filesystem::create_directory(directory);
  WriteFile(directory + "/config.json", config.dump());
  const auto model = models::ModelFromJson(config);
  ASSERT_TRUE(model.ok()) << model.status();
  const models::ModelLayout layout = (*model)->Layout();
  nlohmann::json index = {{"weight_map", nlohmann::json::object()}};
  for (size_t f = 0; f < files; ++f) {
    const std::string name = files == 1 ? "model.safetensors" : "model-" + std::to_string(f) + ".safetensors";
    std::vector<swap::TensorInfo> infos;
    for (size_t t = f; t < layout.tensors.size(); t += files) {
      infos.push_back({layout.tensors[t].name, dtype, layout.tensors[t].published_shape(), 0});
      index["weight_map"][layout.tensors[t].name] = name;
    }
    auto writer = swap::SafetensorsWriter::Create(directory + "/" + name, infos, {}, /*overwrite=*/true);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (size_t t = f; t < layout.tensors.size(); t += files) {
      const std::vector<float> values = Formula(layout.tensors[t].name, layout.tensors[t].elements());
      std::vector<uint16_t> narrow;
      for (const float value : values) narrow.push_back(kernels::FloatToBf16(value));
      const bool whole = dtype == swap::Dtype::kF32;
      ASSERT_TRUE((*writer)
                      ->Append(whole ? std::as_bytes(std::span(values)) : std::as_bytes(std::span(narrow)))
                      .ok());
    }
    ASSERT_TRUE((*writer)->Finish().ok());
  }
  if (files > 1) WriteFile(directory + "/model.safetensors.index.json", index.dump());
}

// The batch that the scripts train on.
inline zero::TensorBatch GoldenTokens(int64_t batch, int64_t length, int64_t vocabulary) {
  zero::TensorBatch tokens = ExampleBatch(batch, length);
  auto inputs = tokens.inputs.accessor<int64_t, 2>(), targets = tokens.targets.accessor<int64_t, 2>();
  const auto token = [vocabulary](int64_t r, int64_t i) {
    return (7 * i + 5 * r + i * i * (r + 1)) % vocabulary;
  };
  for (int64_t r = 0; r < batch; ++r) {
    for (int64_t i = 0; i < length; ++i) {
      inputs[r][i] = token(r, i);
      targets[r][i] = token(r, i + 1);
    }
  }
  return tokens;
}

// Flags that train a golden case as the scripts did. `model`: its directory.
inline TrainOptions GoldenFlags(const nlohmann::json& golden, const std::string& model) {
  TrainOptions flags;
  flags.model = model;
  flags.dtype = "fp32";
  flags.threads = 1;
  flags.batch = golden["batch"].get<int64_t>();
  flags.seq = golden["length"].get<int64_t>();
  flags.lr = 0.002;
  flags.others["--weight-decay"] = 0.1;
  flags.warmup = 0;
  return flags;
}

// The engine of such flags; null: a failure has been added.
inline std::unique_ptr<zero::Engine> GoldenEngine(const TrainOptions& flags) {
  auto settings = ResolveTrainOptions(flags, /*needs_data=*/false);
  EXPECT_TRUE(settings.ok()) << settings.status();
  if (!settings.ok()) return nullptr;
  EXPECT_EQ(settings->model->tile_rows() > 0, flags.vocabulary_tiles.has_value());
  settings->engine.optimizer.schedule = *zero::LrSchedule::Create(zero::Constant{.lr = 0.002});
  auto engine = zero::CreateEngine(models::MakeModel(*settings->model), settings->engine);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

// Evaluates, and trains as transformers did: losses within 1e-5.
inline void ExpectTrainsAs(const nlohmann::json& golden, zero::Engine& engine) {
  const zero::TensorBatch batch =
      GoldenTokens(golden["batch"], golden["length"], golden["config"]["vocab_size"]);
  const auto evaluation = engine.Evaluate({batch});
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  EXPECT_NEAR(*evaluation, golden["evaluation"].get<double>(), 1e-5);
  for (size_t step = 0; step < golden["losses"].size(); ++step) {
    const auto result = engine.Step({batch});
    ASSERT_TRUE(result.ok()) << result.status();
    const double norm = golden["norms"][step];
    EXPECT_NEAR(result->loss, golden["losses"][step].get<double>(), 1e-5) << "step " << step;
    EXPECT_NEAR(result->grad_norm, norm, 1e-4 * norm) << "step " << step;
  }
}

}  // namespace penstock::tools::testing_support

#endif  // PENSTOCK_TESTS_TOOLS_GOLDEN_MODELS_H_
