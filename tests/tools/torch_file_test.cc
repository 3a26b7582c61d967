// Files of torch.save: what is in them, and that no file, however broken, does more than end in a line.
#include "models/weights/torch_file.h"

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
#include "tests/hostile_files.h"

namespace penstock::models::torch_file_test {
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
      const std::string bytes = expected["bytes"].get<std::string>().empty() ? "" : "a\xff";
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
  const std::string big =
      fuzz::TorchArchive({{"archive/data.pkl", "\x80\x02N."}, {"archive/byteorder", "bigger"}});
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
    EXPECT_THAT(file.status().message(), HasSubstr("describes more than is read"));
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

// Whatever a pickle makes is counted: marks, the stack, what is remembered, numbers, names and the items of
// lists, of a file of a few MB that would take hundreds.
TEST_F(TorchFileTest, NoShortPickleTakesMuchMemory) {
  const auto repeated = [](std::string_view what, int times) {
    std::string all;
    for (int i = 0; i < times; ++i) all += what;
    return all;
  };
  constexpr int kTimes = 3'000'000;
  std::string memo = "N";
  for (uint32_t i = 0; i < 1'600'000; ++i) {
    memo += 'r';
    memo.append(reinterpret_cast<const char*>(&i), sizeof(i));
  }
  const std::string list = "]q" + std::string("\0", 1);
  const std::pair<const char*, std::string> bombs[] = {
      {"marks", repeated("(", kTimes)},
      {"numbers", repeated(std::string_view("K\1", 2), kTimes / 5)},
      {"nothings", repeated("N", kTimes / 5)},
      {"lists", repeated("]", kTimes / 5)},
      {"duplicates", "N" + repeated("2", 2 * kTimes)},
      {"recalled", list + repeated(std::string_view("h\0", 2), 2 * kTimes)},
      {"remembered", memo},
      {"names", repeated("cm\nx\n0", 600'000)},
      {"items", list + repeated(std::string_view("h\0h\0a0", 6), kTimes)},
      {"dicts", "}q" + std::string("\0(", 2) + repeated(std::string_view("K\1h\0", 4), 600'000) + "u"},
  };
  int64_t before = 0;
  for (const auto& [what, pickle] : bombs) {
    const std::string path = Write(fuzz::TorchArchive({{"archive/data.pkl", "\x80\x02" + pickle + "N."}}));
    before = hostile::PeakBytes();
    const auto file = TorchFile::Open(path);
    EXPECT_TRUE(absl::IsInvalidArgument(file.status())) << what << ": " << file.status();
    EXPECT_LT(hostile::PeakBytes() - before, int64_t{64} << 20) << what;
  }
}

TEST_F(TorchFileTest, AChangedBitIsFoundInWhateverOrderItIsRead) {
  const std::string whole = Bytes("views");
  std::string path = Write(whole);
  auto file = TorchFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const TorchTensor flat = *(*file)->root()["flat"].tensor();
  const uint64_t bytes = static_cast<uint64_t>(flat.elements) * swap::DtypeBytes(flat.dtype);
  ASSERT_GE(bytes, 16u);
  const auto read = [&](uint64_t first, uint64_t count) {
    std::vector<std::byte> to(count);
    return (*file)->Read(flat, first, to);
  };
  EXPECT_TRUE(read(0, bytes).ok());
  EXPECT_TRUE((*file)->CheckRead().ok());
  for (const uint64_t at : {uint64_t{0}, bytes / 2, bytes - 1}) {
    std::string damaged = whole;
    damaged[flat.offset + at] ^= 4;
    path = Write(damaged);
    const auto open = [&] {
      file = TorchFile::Open(path);
      ASSERT_TRUE(file.ok()) << file.status();
    };
    const auto found = [](const absl::Status& status) {
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("do not match their checksum (CRC-32)"));
    };
    open();  // all at once, and whatever else lies in the storage
    absl::Status status = read(0, bytes);
    found(status.ok() ? (*file)->CheckRead() : status);
    open();  // from the end to the beginning, in pieces, some of them twice
    status = absl::OkStatus();
    for (uint64_t end = bytes; end > 0 && status.ok(); end -= std::min<uint64_t>(end, 3))
      status = read(end - std::min<uint64_t>(end, 5), std::min<uint64_t>(end, 5));
    found(status.ok() ? (*file)->CheckRead() : status);
    open();  // one byte of it
    status = read(bytes / 3, 1);
    found(status.ok() ? (*file)->CheckRead() : status);
    open();  // nothing of it
    EXPECT_TRUE((*file)->CheckRead().ok());
  }
  // The pickle, before anything is made of it.
  std::string damaged = whole;
  damaged[damaged.find("flat") + 1] ^= 1;
  EXPECT_TRUE(absl::IsDataLoss(TorchFile::Open(Write(damaged)).status()));
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
}  // namespace penstock::models::torch_file_test
