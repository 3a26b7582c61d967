// Small models whose weights a formula gives, here and in scripts/golden*.py: what transformers answers for
// them stands in tests/golden/.
#ifndef PENSTOCK_TESTS_TOOLS_GOLDEN_MODELS_H_
#define PENSTOCK_TESTS_TOOLS_GOLDEN_MODELS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "models/family.h"
#include "swap/safetensors.h"
#include "tests/tools/penstock_program.h"
#include "tools/penstock/train_settings.h"

namespace penstock::tools::testing_support {

inline nlohmann::json Golden(const std::string& name) {
  std::ifstream file(std::string(PENSTOCK_GOLDEN) + "/" + name);
  const nlohmann::json golden = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(golden.is_object()) << name;
  return golden;
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

// A directory as `from_pretrained` reads one, with these weights in so many files.
inline void WriteModel(const std::string& directory, const nlohmann::json& config, size_t files = 1) {
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
      infos.push_back({layout.tensors[t].name, swap::Dtype::kF32, layout.tensors[t].published_shape(), 0});
      index["weight_map"][layout.tensors[t].name] = name;
    }
    auto writer = swap::SafetensorsWriter::Create(directory + "/" + name, infos, {}, /*overwrite=*/true);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (size_t t = f; t < layout.tensors.size(); t += files) {
      const std::vector<float> values = Formula(layout.tensors[t].name, layout.tensors[t].elements());
      ASSERT_TRUE((*writer)->Append(std::as_bytes(std::span(values))).ok());
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

}  // namespace penstock::tools::testing_support

#endif  // PENSTOCK_TESTS_TOOLS_GOLDEN_MODELS_H_
