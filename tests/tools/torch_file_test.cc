// Files of torch.save: what is in them, and that no file, however broken, does more than end in a line.
#include "models/torch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "kernels/float16.h"
#include "tests/fuzz/torch_archive.h"

namespace penstock::models {
namespace {

using nlohmann::json;
using swap::Dtype;
using testing::HasSubstr;

double NumberOf(Dtype dtype, const std::byte* at) {
  const auto load = [&](auto value) {
    std::memcpy(&value, at, sizeof(value));
    return static_cast<double>(value);
  };
  switch (dtype) {
    case Dtype::kF64:
      return load(double{});
    case Dtype::kF32:
      return load(float{});
    case Dtype::kI64:
      return load(int64_t{});
    case Dtype::kI32:
      return load(int32_t{});
    case Dtype::kI16:
      return load(int16_t{});
    case Dtype::kI8:
      return load(int8_t{});
    case Dtype::kU8:
    case Dtype::kBool:
      return load(uint8_t{});
    case Dtype::kF16:
    case Dtype::kBf16: {
      uint16_t bits = 0;
      std::memcpy(&bits, at, sizeof(bits));
      return dtype == Dtype::kF16 ? kernels::Fp16ToFloat(bits) : kernels::Bf16ToFloat(bits);
    }
    default:
      ADD_FAILURE() << "not in the golden file";
      return 0;
  }
}

class TorchFileTest : public testing::Test {
 protected:
  TorchFileTest() {
    std::string name = (std::filesystem::current_path() / "torch_file_test.XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
    std::ifstream golden(PENSTOCK_GOLDEN "/torch_file.json");
    golden_ = json::parse(golden)["cases"];
  }
  ~TorchFileTest() override { std::filesystem::remove_all(directory_); }

  std::string Write(const std::string& bytes) const {
    const std::string path = directory_ + "/file.pt";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  std::string Bytes(const std::string& name, size_t which = 0) const {
    std::string bytes;
    EXPECT_TRUE(absl::Base64Unescape(golden_[name]["files"][which].get<std::string>(), &bytes));
    return bytes;
  }
  std::unique_ptr<TorchFile> Open(const std::string& name, size_t which = 0) const {
    auto file = TorchFile::Open(Write(Bytes(name, which)));
    EXPECT_TRUE(file.ok()) << name << ": " << file.status();
    return file.ok() ? *std::move(file) : nullptr;
  }

  // Holds a value against what torch says that it is.
  void Check(const TorchFile& file, TorchValue value, const json& expected, const std::string& where) const {
    SCOPED_TRACE(where);
    using Kind = TorchValue::Kind;
    if (expected.is_null()) {
      EXPECT_EQ(value.kind(), Kind::kNone);
    } else if (expected.is_boolean()) {
      EXPECT_EQ(value.boolean(), expected.get<bool>());
    } else if (expected.is_number_integer()) {
      EXPECT_EQ(value.integer(), expected.get<int64_t>());
    } else if (expected.is_number_float()) {
      EXPECT_EQ(value.number(), expected.get<double>());
    } else if (expected.is_string()) {
      EXPECT_EQ(value.text(), expected.get<std::string>());
    } else if (expected.contains("bytes")) {
      // As Latin-1 has it: "a", and the byte 255.
      const std::string bytes = expected["bytes"] == "" ? "" : "a\xff";
      EXPECT_EQ(value.text(), bytes);
    } else if (expected.contains("refused")) {
      EXPECT_EQ(value.tensor(), nullptr);
      EXPECT_THAT(std::string(value.name()), HasSubstr(expected["refused"].get<std::string>()));
    } else if (expected.contains("tensor")) {
      CheckTensor(file, value, expected);
    } else if (expected.contains("dict")) {
      ASSERT_EQ(value.kind(), Kind::kDict);
      const auto entries = value.entries();
      ASSERT_EQ(entries.size(), expected["dict"].size());
      for (size_t i = 0; i < entries.size(); ++i) {
        Check(file, entries[i].first, expected["dict"][i][0], where + ".key");
        Check(file, entries[i].second, expected["dict"][i][1],
              where + "." + std::string(entries[i].first.text()));
      }
    } else if (expected.contains("list")) {
      ASSERT_EQ(value.kind(), Kind::kList);
      ASSERT_EQ(value.size(), expected["list"].size());
      for (size_t i = 0; i < value.size(); ++i)
        Check(file, value[i], expected["list"][i], where + "[" + std::to_string(i) + "]");
    } else {
      ASSERT_EQ(value.kind(), Kind::kObject);
      EXPECT_TRUE(value.name().ends_with("." + expected["object"].get<std::string>())) << value.name();
      if (expected.contains("items")) Check(file, value[0], expected["items"][0], where + "()");
      const json attributes = expected.value("attributes", json::object());
      for (const auto& [name, attribute] : attributes.items())
        Check(file, value[name], attribute, where + "." + name);
    }
  }
  static void CheckTensor(const TorchFile& file, TorchValue value, const json& expected) {
    ASSERT_NE(value.tensor(), nullptr);
    const TorchTensor& tensor = *value.tensor();
    EXPECT_EQ(tensor.sizes, expected["sizes"].get<std::vector<int64_t>>());
    const uint64_t width = swap::DtypeBytes(tensor.dtype);
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.elements) * width);
    ASSERT_TRUE(file.Read(tensor, 0, bytes).ok());
    std::vector<double> values;
    for (size_t at = 0; at < bytes.size(); at += width)
      values.push_back(NumberOf(tensor.dtype, bytes.data() + at));
    EXPECT_EQ(values, expected["values"].get<std::vector<double>>());
    EXPECT_TRUE(absl::IsInvalidArgument(file.Read(tensor, bytes.size(), std::span(bytes.data(), 1))));
  }

  std::string directory_;
  json golden_;
};

TEST_F(TorchFileTest, WhatTorchSavedIsThere) {
  ASSERT_GE(golden_.size(), 7U);
  for (const auto& [name, golden] : golden_.items()) {
    for (size_t which = 0; which < golden["files"].size(); ++which) {
      const auto file = Open(name, which);
      ASSERT_NE(file, nullptr);
      Check(*file, file->root(), golden["value"], name);
    }
  }
}

TEST_F(TorchFileTest, WhatIsNotThereIsNothing) {
  const auto file = Open("views");
  EXPECT_FALSE(file->root()["none"]);
  EXPECT_EQ(file->root()["none"]["of"][3].tensor(), nullptr);
  EXPECT_EQ(file->root()["flat"].text(), "");
  EXPECT_EQ(file->root()["flat"].integer(), std::nullopt);
  EXPECT_TRUE(file->root()["flat"].entries().empty());
}

TEST_F(TorchFileTest, AFileThatIsCutShortIsRefused) {
  const std::string bytes = Bytes("deepspeed");
  for (size_t length = 0; length < bytes.size(); ++length) {
    const absl::Status status = TorchFile::Open(Write(bytes.substr(0, length))).status();
    ASSERT_TRUE(absl::IsDataLoss(status) || absl::IsInvalidArgument(status)) << length << ": " << status;
    ASSERT_THAT(status.message(), HasSubstr("file.pt: "));
  }
}

TEST_F(TorchFileTest, OthersAreRefusedByName) {
  EXPECT_THAT(TorchFile::Open(Write("\x80\x02}q.")).status().message(), HasSubstr("is no zip file"));
  EXPECT_THAT(TorchFile::Open(directory_).status().message(), HasSubstr("no regular file"));
  EXPECT_TRUE(absl::IsNotFound(TorchFile::Open(directory_ + "/none").status()));
  std::string big = Bytes("views");
  // Nothing else says "little" in it.
  big.replace(big.find("little"), 6, "bigger");
  EXPECT_THAT(TorchFile::Open(Write(big)).status().message(), HasSubstr("\"bigger\""));
  std::string renamed = Bytes("views");
  for (size_t at = 0; (at = renamed.find("data.pkl")) != std::string::npos;) renamed[at] = 'D';
  EXPECT_THAT(TorchFile::Open(Write(renamed)).status().message(), HasSubstr("without data.pkl"));
}

// Programs of a few bytes that would copy what they have again and again.
TEST_F(TorchFileTest, AShortPickleMakesNoLongMemory) {
  const auto refused = [&](const std::string& pickle) {
    const auto file = TorchFile::Open(Write(fuzz::TorchArchive({{"archive/data.pkl", pickle}})));
    EXPECT_TRUE(absl::IsInvalidArgument(file.status()));
    EXPECT_THAT(file.status().message(), HasSubstr("makes more of it than is read"));
  };
  std::string doubled(
      "\x80\x02"
      "cfoo\nBar\n)Rq\0K\1K\1s",
      20);
  for (int i = 0; i < 33; ++i) doubled += std::string("h\0b", 3);
  refused(doubled + ".");
  std::string listed(
      "\x80\x02"
      "cbuiltins\nlist\nq\0(",
      20);
  for (int i = 0; i < 200'000; ++i) listed += 'N';
  listed += std::string("lq\1", 3);
  for (int i = 0; i < 20'000; ++i) listed += std::string("h\0h\1\x85R0", 7);
  refused(listed + "N.");
  std::string named = std::string("\x80\x04\x8d", 3) + std::string("\0\0\x10\0\0\0\0\0", 8) +
                      std::string(1 << 20, 'x') + std::string("q\0", 2);
  for (int i = 0; i < 10'000; ++i)
    named += std::string(
        "h\0h\0\x93"
        "0",
        6);
  refused(named + "N.");
}

TEST_F(TorchFileTest, DamageNeverDoesMoreThanEndInALine) {
  std::mt19937 random(5);
  for (const auto& [name, golden] : golden_.items()) {
    const std::string bytes = Bytes(name);
    for (int turn = 0; turn < 400; ++turn) {
      std::string damaged = bytes;
      for (size_t i = 0, count = 1 + random() % 4; i < count; ++i)
        damaged[random() % damaged.size()] = static_cast<char>(random());
      const auto file = TorchFile::Open(Write(damaged));
      if (file.ok()) continue;
      ASSERT_EQ(file.status().message().find('\n'), absl::string_view::npos);
    }
  }
}

}  // namespace
}  // namespace penstock::models
