// Initial weights from files as they are published: names, shapes, types, shards, and what is refused.
#include "models/weights/weight_import.h"

#include <fstream>
#include <span>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/float16.h"
#include "models/families/gpt.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::weight_import_test {
namespace {

using testing::HasSubstr;

const models::GptConfig kConfig{2, 12, 3, 7, 11, 0};

// What the file holds at [row, column] as published: exact in every type.
float ValueOf(size_t tensor, uint64_t element) {
  return static_cast<float>(static_cast<int64_t>((element * 7 + tensor * 13) % 251) - 125) / 64;
}

struct Written {
  std::string name;
  swap::Dtype dtype = swap::Dtype::kF32;
  std::vector<uint64_t> shape;
  std::vector<float> values;
};

class WeightImportTest : public testing_support::ProgramTest {
 protected:
  WeightImportTest() {
    const models::ModelLayout layout = models::LayoutOfGpt(kConfig);
    for (size_t t = 0; t < layout.tensors.size(); ++t) {
      Written written{layout.tensors[t].name, swap::Dtype::kF32, layout.tensors[t].published_shape(), {}};
      for (int64_t e = 0; e < layout.tensors[t].elements(); ++e) {
        written.values.push_back(ValueOf(t, static_cast<uint64_t>(e)));
      }
      tensors_.push_back(std::move(written));
    }
  }

  static void Write(const std::string& path, const std::vector<Written>& tensors) {
    std::vector<swap::TensorInfo> infos;
    for (const Written& tensor : tensors) infos.push_back({tensor.name, tensor.dtype, tensor.shape, 0});
    auto writer = swap::SafetensorsWriter::Create(path, infos, {}, /*overwrite=*/true);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (const Written& tensor : tensors) {
      std::vector<std::byte> bytes(tensor.values.size() * swap::DtypeBytes(tensor.dtype));
      const auto type = tensor.dtype == swap::Dtype::kF16    ? kernels::DType::kFp16
                        : tensor.dtype == swap::Dtype::kBf16 ? kernels::DType::kBf16
                                                             : kernels::DType::kFp32;
      kernels::Convert(kernels::DType::kFp32, tensor.values.data(), type, bytes.data(), tensor.values.size());
      ASSERT_TRUE((*writer)->Append(bytes).ok());
    }
    ASSERT_TRUE((*writer)->Finish().ok());
  }

  // Every element is where the model has it, however the blocks are cut.
  static void ExpectWhole(const std::string& path) {
    auto import = models::WeightImport::Open(path, models::LayoutOfGpt(kConfig));
    ASSERT_TRUE(import.ok()) << import.status();
    const models::ModelLayout layout = models::LayoutOfGpt(kConfig);
    for (const int64_t cut : {1, 5, 64, 1000, 100000}) {
      for (size_t b = 0; b < layout.block_elements.size(); ++b) {
        std::vector<float> run(static_cast<size_t>(layout.block_elements[b]), 9e9f);
        for (int64_t first = 0; first < layout.block_elements[b]; first += cut) {
          const int64_t n = std::min(cut, layout.block_elements[b] - first);
          ASSERT_TRUE((*import)->Read(static_cast<int>(b), first, n, run.data() + first).ok());
        }
        std::vector<float> expected(run.size(), 0.0f);
        for (size_t t = 0; t < layout.tensors.size(); ++t) {
          const models::PublishedTensor& tensor = layout.tensors[t];
          if (tensor.block != static_cast<int>(b)) continue;
          for (int64_t e = 0; e < tensor.elements(); ++e) {
            const int64_t published =
                tensor.transposed ? (e % tensor.columns) * tensor.rows + e / tensor.columns : e;
            expected[static_cast<size_t>(tensor.offset + e)] = ValueOf(t, static_cast<uint64_t>(published));
          }
        }
        ASSERT_EQ(run, expected) << "block " << b << " in pieces of " << cut;
        if (cut == 1 && b == 1) break;  // a request an element is slow
      }
    }
  }
  static std::string Refusal(const std::string& path,
                             absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    const auto import = models::WeightImport::Open(path, models::LayoutOfGpt(kConfig));
    EXPECT_EQ(import.status().code(), code) << import.status();
    const std::string message(import.status().message());
    EXPECT_EQ(message.find('\n'), std::string::npos);
    return message;
  }

  std::vector<Written> tensors_;
};

TEST_F(WeightImportTest, EveryTypeAndBothSpellingsOfNames) {
  Write(dir_ + "/a.safetensors", tensors_);
  ExpectWhole(dir_ + "/a.safetensors");
  for (size_t t = 0; t < tensors_.size(); ++t) {
    tensors_[t].name = tensors_[t].name.substr(std::string("transformer.").size());
    tensors_[t].dtype = t % 3 == 0 ? swap::Dtype::kF16 : t % 3 == 1 ? swap::Dtype::kBf16 : swap::Dtype::kF32;
  }
  tensors_.push_back({"h.0.attn.bias", swap::Dtype::kF32, {1, 1, 7, 7}, std::vector<float>(49)});
  tensors_.push_back({"lm_head.weight", swap::Dtype::kF32, tensors_[0].shape, tensors_[0].values});
  std::reverse(tensors_.begin(), tensors_.end());
  std::filesystem::create_directory(dir_ + "/published");
  Write(dir_ + "/published/model.safetensors", tensors_);
  ExpectWhole(dir_ + "/published");
}

TEST_F(WeightImportTest, Shards) {
  std::filesystem::create_directory(dir_ + "/sharded");
  nlohmann::json index = {{"weight_map", nlohmann::json::object()}};
  std::vector<std::vector<Written>> shards(3);
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const std::string file = "model-0000" + std::to_string(t % 3) + ".safetensors";
    index["weight_map"][tensors_[t].name] = file;
    shards[t % 3].push_back(tensors_[t]);
  }
  for (size_t s = 0; s < 3; ++s) {
    Write(dir_ + "/sharded/model-0000" + std::to_string(s) + ".safetensors", shards[s]);
  }
  const std::string path = dir_ + "/sharded/model.safetensors.index.json";
  testing_support::WriteFile(path, index.dump());
  ExpectWhole(dir_ + "/sharded");
  ExpectWhole(path);
  nlohmann::json broken = index;
  broken["weight_map"]["transformer.wte.weight"] = "model-00009.safetensors";
  testing_support::WriteFile(path, broken.dump());
  EXPECT_THAT(Refusal(path), HasSubstr("model-00009.safetensors is missing"));
  broken["weight_map"]["transformer.wte.weight"] = "../a.safetensors";
  testing_support::WriteFile(path, broken.dump());
  EXPECT_THAT(Refusal(path), HasSubstr("no file name for transformer.wte.weight"));
  broken["weight_map"]["transformer.wte.weight"] = "model-00001.safetensors";
  testing_support::WriteFile(path, broken.dump());
  EXPECT_THAT(Refusal(path), HasSubstr("has no tensor transformer.wte.weight"));
  testing_support::WriteFile(path, "{\"weight_map\": 3}");
  EXPECT_THAT(Refusal(path), HasSubstr("no weight_map"));
  testing_support::WriteFile(path, "[");
  EXPECT_THAT(Refusal(path), HasSubstr("the JSON is malformed at byte 2"));
}

TEST_F(WeightImportTest, WhatDoesNotFitIsNamed) {
  const std::string path = dir_ + "/w.safetensors";
  EXPECT_THAT(Refusal(path), HasSubstr("no such file"));
  EXPECT_THAT(Refusal(dir_), HasSubstr("neither model.safetensors nor"));
  testing_support::WriteFile(path, "not what it says");
  Refusal(path, absl::StatusCode::kDataLoss);
  std::vector<Written> some = tensors_;
  some.pop_back();
  Write(path, some);
  EXPECT_THAT(Refusal(path), HasSubstr("no tensor transformer.h.1.mlp.c_proj.bias"));
  some = tensors_;
  some[0].shape = {22, 6};
  Write(path, some);
  EXPECT_THAT(Refusal(path), HasSubstr("transformer.wte.weight is [22, 6] there and [11, 12] in this model"));
  some = tensors_;
  some.push_back({"transformer.h.2.ln_1.weight", swap::Dtype::kF32, {12}, std::vector<float>(12)});
  Write(path, some);
  EXPECT_THAT(Refusal(path), HasSubstr("transformer.h.2.ln_1.weight has no place in this model"));
  some.back() = {"lm_head.weight", swap::Dtype::kF32, tensors_[0].shape, tensors_[0].values};
  some.back().values[131] += 1;
  Write(path, some);
  EXPECT_THAT(Refusal(path), HasSubstr("lm_head.weight is not the input embedding"));
  some = tensors_;
  some[3].dtype = swap::Dtype::kI32;
  Write(path, some);
  EXPECT_THAT(Refusal(path), HasSubstr("of type I32"));
}

}  // namespace
}  // namespace penstock::tools::weight_import_test
