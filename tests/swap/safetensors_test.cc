// safetensors: what is written is read back and is what other readers expect; what is malformed is refused by
// name.
#include "swap/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "tests/swap/scratch_directory.h"

namespace penstock::swap::safetensors_test {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> RandomBytes(uint64_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> data(bytes);
  for (auto& b : data) b = static_cast<std::byte>(random());
  return data;
}

std::string Slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class SafetensorsTest : public ::testing::Test {
 protected:
  void WriteRaw(const std::string& header, const std::string& data) {
    std::ofstream out(path_, std::ios::binary | std::ios::trunc);
    const uint64_t length = header.size();
    out.write(reinterpret_cast<const char*>(&length), 8);
    out << header << data;
  }
  std::string Refusal() {
    const auto reader = SafetensorsReader::Open(path_);
    EXPECT_TRUE(absl::IsDataLoss(reader.status())) << reader.status();
    return std::string(reader.status().message());
  }

  ScratchDirectory scratch_;
  std::string path_ = scratch_.Sub("model.safetensors");
};

TEST_F(SafetensorsTest, RoundTripOfManyTensorsInPieces) {
  const std::vector<TensorInfo> tensors = {{"wte.weight", Dtype::kF32, {37, 11}, 0},
                                           {"h.0.bias \"quoted\" \xc3\xa9", Dtype::kBf16, {7}, 0},
                                           {"empty", Dtype::kF16, {3, 0, 5}, 0},
                                           {"scalar", Dtype::kI64, {}, 0},
                                           {"mask", Dtype::kBool, {2, 2}, 0}};
  auto writer = SafetensorsWriter::Create(path_, tensors, {{"format", "pt"}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_EQ((*writer)->data_bytes(), 37u * 11 * 4 + 14 + 0 + 8 + 4);
  const auto data = RandomBytes((*writer)->data_bytes(), 1);
  for (uint64_t at = 0; at < data.size(); at += 100) {
    ASSERT_TRUE(
        (*writer)->Append(std::span(data).subspan(at, std::min<uint64_t>(100, data.size() - at))).ok());
  }
  EXPECT_FALSE(std::filesystem::exists(path_));  // not before it is whole
  ASSERT_TRUE((*writer)->Finish().ok());

  const auto reader = SafetensorsReader::Open(path_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->metadata().at("format"), "pt");
  ASSERT_EQ((*reader)->tensors().size(), tensors.size());
  for (const TensorInfo& expected : (*writer)->tensors()) {
    const TensorInfo* tensor = (*reader)->Find(expected.name);
    ASSERT_NE(tensor, nullptr) << expected.name;
    EXPECT_EQ(tensor->dtype, expected.dtype);
    EXPECT_EQ(tensor->shape, expected.shape);
    std::vector<std::byte> bytes(*tensor->Bytes());
    ASSERT_TRUE((*reader)->Read(*tensor, 0, bytes).ok());
    EXPECT_TRUE(
        std::equal(bytes.begin(), bytes.end(), data.begin() + static_cast<ptrdiff_t>(expected.offset)));
    EXPECT_FALSE((*reader)->Read(*tensor, 1, bytes).ok() && !bytes.empty());
  }
  EXPECT_EQ((*reader)->Find("nothing"), nullptr);
}

TEST_F(SafetensorsTest, TheBytesAreThoseOfTheFormat) {
  auto writer = SafetensorsWriter::Create(path_, {{"a", Dtype::kF32, {1, 2}, 0}});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE((*writer)->Append(RandomBytes(8, 1)).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  const std::string json = R"({"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})";
  std::string expected(8, '\0');
  expected[0] = static_cast<char>((json.size() + 7) / 8 * 8);
  expected += json;
  expected.resize(8 + (json.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(Slurp(path_).substr(0, expected.size()), expected);
  EXPECT_EQ(std::filesystem::file_size(path_), expected.size() + 8);
}

TEST_F(SafetensorsTest, AFileThatWasNotFinishedIsNotThere) {
  {
    auto writer = SafetensorsWriter::Create(path_, {{"a", Dtype::kF32, {100}, 0}});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->Append(RandomBytes(399, 1)).ok());
    EXPECT_TRUE(absl::IsFailedPrecondition((*writer)->Finish()));
    EXPECT_TRUE(absl::IsInvalidArgument((*writer)->Append(RandomBytes(2, 1))));
  }
  EXPECT_TRUE(std::filesystem::is_empty(scratch_.path()));
}

TEST_F(SafetensorsTest, AnotherFileIsReplacedOnlyWhenAsked) {
  std::ofstream(path_) << "mine";
  EXPECT_TRUE(absl::IsAlreadyExists(SafetensorsWriter::Create(path_, {{"a", Dtype::kU8, {1}, 0}}).status()));
  EXPECT_EQ(Slurp(path_), "mine");
  auto writer = SafetensorsWriter::Create(path_, {{"a", Dtype::kU8, {1}, 0}}, {}, /*overwrite=*/true);
  ASSERT_TRUE(writer.ok());
  EXPECT_EQ(Slurp(path_), "mine");  // until the new one is whole
  ASSERT_TRUE((*writer)->Append(RandomBytes(1, 1)).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  EXPECT_TRUE(SafetensorsReader::Open(path_).ok());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(scratch_.path()), {}), 1);
}

TEST_F(SafetensorsTest, TheWriterRefusesNonsense) {
  const auto refused = [&](std::vector<TensorInfo> tensors) {
    return absl::IsInvalidArgument(SafetensorsWriter::Create(path_, std::move(tensors)).status());
  };
  EXPECT_TRUE(refused({{"a", Dtype::kU8, {1}, 0}, {"a", Dtype::kU8, {1}, 0}}));
  EXPECT_TRUE(refused({{"__metadata__", Dtype::kU8, {1}, 0}}));
  EXPECT_TRUE(refused({{"a", Dtype::kF64, {uint64_t{1} << 40, uint64_t{1} << 40}, 0}}));
  EXPECT_TRUE(absl::IsNotFound(
      SafetensorsWriter::Create(scratch_.Sub("no/such/place"), {{"a", Dtype::kU8, {1}, 0}}).status()));
}

TEST_F(SafetensorsTest, MalformedFilesAreRefusedByName) {
  std::ofstream(path_) << "1234567";
  EXPECT_THAT(Refusal(), HasSubstr("too short"));
  WriteRaw("{}", "");
  EXPECT_TRUE(SafetensorsReader::Open(path_).ok());
  // As some writers have it, which other readers take.
  WriteRaw(R"({"__metadata__":null,"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678");
  EXPECT_TRUE(SafetensorsReader::Open(path_).ok()) << SafetensorsReader::Open(path_).status();
  std::ofstream(path_, std::ios::binary) << std::string(8, '\xff') + "{}";
  EXPECT_THAT(Refusal(), HasSubstr("a header of"));
  const auto one = [](const std::string& fields) { return R"({"a":{)" + fields + "}}"; };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[]", "is no JSON object"},
      {"{", "the JSON is malformed at byte 2"},
      {R"({"a":1})", "not an object"},
      {one(R"("shape":[2],"data_offsets":[0,8])"), "no dtype"},
      {one(R"("dtype":"F33","shape":[2],"data_offsets":[0,8])"), "unknown dtype F33"},
      {one(R"("dtype":"F32","data_offsets":[0,8])"), "no shape"},
      {one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), "whole numbers"},
      {one(R"("dtype":"F32","shape":[2.5],"data_offsets":[0,8])"), "whole numbers"},
      {one(R"("dtype":"F32","shape":[2])"), "no data_offsets"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), "no data_offsets"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,"8"])"), "no data_offsets"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), "bytes 8 to 0"},
      {one(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), "type and shape of 12"},
      {one(R"("dtype":"F32","shape":[4],"data_offsets":[0,16])"), "ends at byte 16 of 8"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), "have 4 bytes, the file 8"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), "starts at byte 4"},
      {one(R"("dtype":"F32","shape":[4611686018427387905,4],"data_offsets":[0,16])"), "too large"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "starts at byte"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       "twice"},
      {R"({"__metadata__":{"x":1}})", "not a string"},
      {R"({"__metadata__":[]})", "not an object"},
      {std::string(100000, '['), "nested more than 8 deep"},
      {R"({"__metadata__":)" + std::string(200000, '['), "nested more than 8 deep"},
  };
  for (const auto& [header, reason] : cases) {
    WriteRaw(header, "12345678");
    EXPECT_THAT(Refusal(), HasSubstr(reason)) << header.substr(0, 100);
  }
}

TEST_F(SafetensorsTest, MutatedHeadersNeverCrashAndNeverPassTheEnd) {
  std::string good = "{\"__metadata__\":{\"format\":\"pt\"}";
  for (int i = 0; i < 8; ++i) {
    absl::StrAppend(&good, ",\"t", i, "\":{\"dtype\":\"F16\",\"shape\":[4,", i, "],\"data_offsets\":[",
                    4 * i * (i - 1), ",", 4 * i * (i + 1), "]}");
  }
  good += "}";
  const uint64_t data_bytes = 4 * 7 * 8;
  ASSERT_TRUE(ParseSafetensorsHeader(good, data_bytes).ok())
      << ParseSafetensorsHeader(good, data_bytes).status();
  std::mt19937_64 random(9);
  const std::string alphabet = "0123456789{}[]\",:-eE.\\ \x00\xff";
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bad = good;
    for (int edits = 1 + static_cast<int>(random() % 4); edits > 0; --edits) {
      const size_t at = random() % bad.size();
      switch (random() % 3) {
        case 0:
          bad[at] = alphabet[random() % alphabet.size()];
          break;
        case 1:
          bad.erase(at, 1 + random() % 5);
          break;
        default:
          bad.insert(at, 1, alphabet[random() % alphabet.size()]);
          break;
      }
    }
    const auto header = ParseSafetensorsHeader(bad, data_bytes);
    if (!header.ok()) continue;
    ++accepted;
    uint64_t total = 0;
    for (const TensorInfo& tensor : header->tensors) {
      ASSERT_TRUE(tensor.Bytes().ok());
      ASSERT_LE(tensor.offset + *tensor.Bytes(), data_bytes);
      total += *tensor.Bytes();
    }
    ASSERT_EQ(total, data_bytes);
  }
  EXPECT_GT(accepted, 10);  // names and spaces may change
}

}  // namespace
}  // namespace penstock::swap::safetensors_test
