// What a test of the `penstock` program reads back: logs, states as `inspect --json` lays them out, exported
// tensors.
#ifndef PENSTOCK_TESTS_TOOLS_PENSTOCK_STATE_H_
#define PENSTOCK_TESTS_TOOLS_PENSTOCK_STATE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/split_master.h"
#include "swap/safetensors.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::testing_support {

using nlohmann::json;

// The text of every "loss" of a log, digit by digit.
inline std::vector<std::string> Losses(const std::string& log) {
  std::vector<std::string> losses;
  for (const std::string& line : Lines(ReadFile(log))) {
    std::smatch found;
    EXPECT_TRUE(std::regex_search(line, found, std::regex("\"loss\": *([^,}]+)"))) << line;
    losses.push_back(found[1]);
  }
  return losses;
}

// Elements of a block as the store has them, through what `inspect --json` says and nothing else.
class RawWeights {
 public:
  explicit RawWeights(json inspected) : inspected_(std::move(inspected)) {}

  float Fp32(int block, int64_t element) const { return Read<float>(block, element, 0); }
  float Joined(int block, int64_t element) const {
    return kernels::JoinOne(Read<uint16_t>(block, element, 0), Read<int16_t>(block, element, 1));
  }

 private:
  template <typename T>
  T Read(int block, int64_t element, size_t segment) const {
    for (const json& tile : inspected_["tiles"]) {
      const int64_t at = element - tile["first_element"].get<int64_t>();
      if (tile["block"] != block || at < 0 || at >= tile["elements"].get<int64_t>()) continue;
      std::ifstream file(tile["path"].get<std::string>(), std::ios::binary);
      file.seekg(tile["segments"][segment]["offset"].get<int64_t>() + at * static_cast<int64_t>(sizeof(T)));
      T value{};
      file.read(reinterpret_cast<char*>(&value), sizeof(value));
      EXPECT_TRUE(file.good());
      return value;
    }
    ADD_FAILURE() << "no tile has element " << element << " of block " << block;
    return T{};
  }

  const json inspected_;
};

template <typename T>
std::vector<T> Tensor(const swap::SafetensorsReader& file, const std::string& name,
                      const std::vector<uint64_t>& shape) {
  const swap::TensorInfo* info = file.Find(name);
  EXPECT_NE(info, nullptr) << name;
  if (info == nullptr) return {};
  EXPECT_EQ(info->shape, shape) << name;
  std::vector<T> values(*info->Bytes() / sizeof(T));
  EXPECT_TRUE(file.Read(*info, 0, std::as_writable_bytes(std::span<T>(values))).ok());
  return values;
}

// The bytes behind a safetensors header.
inline std::string TensorBytes(const std::string& path) {
  const std::string text = ReadFile(path);
  uint64_t header = 0;
  if (text.size() < sizeof(header)) return "";
  std::memcpy(&header, text.data(), sizeof(header));
  return text.substr(std::min(text.size(), sizeof(header) + header));
}

class CliTest : public ProgramTest {
 protected:
  json Inspect(const std::string& state) {
    const Ran ran = Run({"inspect", state, "--json"});
    EXPECT_EQ(ran.code, 0) << ran.err;
    return json::parse(ran.out);
  }
};

}  // namespace penstock::tools::testing_support

#endif  // PENSTOCK_TESTS_TOOLS_PENSTOCK_STATE_H_
