#include "models/weights/scaled_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace penstock::models {
namespace {

constexpr int64_t kPiece = 512;  // numbers that are decoded at once

using Fp8Table = std::array<float, 256>;
const Fp8Table& Fp8Values() {
  static const Fp8Table table = [] {
    Fp8Table values{};
    for (size_t i = 0; i < 128; ++i) {
      const int exponent = static_cast<int>(i) >> 3, mantissa = static_cast<int>(i) & 7;
      const float value = i == 127        ? std::numeric_limits<float>::quiet_NaN()
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                          : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      values[i] = value;
      values[i + 128] = -value;
    }
    return values;
  }();
  return table;
}

constexpr std::array<float, 16> kFp4Values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// E8M0: powers of 2, and no number.
float Exponent(uint8_t e) {
  return e == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, static_cast<int>(e) - 127);
}

int64_t Blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

}  // namespace

const char* ScaledCodeName(ScaledCode code) { return code == ScaledCode::kFp8 ? "fp8" : "mxfp4"; }

ScaledMatrix::ScaledMatrix(int64_t columns, int64_t block_rows, int64_t block_columns,
                           std::vector<float> scales)
    : code_(ScaledCode::kFp8),
      columns_(columns),
      block_rows_(block_rows),
      block_columns_(block_columns),
      scales_(std::move(scales)) {}

ScaledMatrix::ScaledMatrix(int64_t columns, std::vector<uint8_t> exponents)
    : code_(ScaledCode::kMxfp4), columns_(columns), exponents_(std::move(exponents)) {}

ScaledMatrix ScaledMatrix::Plain(ScaledCode code, int64_t rows, int64_t columns) {
  if (code == ScaledCode::kFp8) return {columns, rows, columns, {1.0f}};
  return {columns, std::vector<uint8_t>(static_cast<size_t>(rows * Blocks(columns, kMxfp4Block)), 127)};
}

ScaledMatrix::ScaledMatrix(int64_t columns, const std::byte* exponents)
    : code_(ScaledCode::kMxfp4), columns_(columns), elsewhere_(reinterpret_cast<const uint8_t*>(exponents)) {}

std::vector<float> ScaledMatrix::Scales() const {
  if (code_ == ScaledCode::kFp8) return scales_;
  std::vector<float> scales;
  for (const uint8_t e : exponents_) scales.push_back(Exponent(e));
  return scales;
}

std::span<const float> NumbersOf(ScaledCode code) {
  if (code == ScaledCode::kFp8) return Fp8Values();
  return kFp4Values;
}

void ScaledMatrix::Decode(int64_t row, const std::byte* numbers, kernels::DType to, void* out) const {
  const auto* const codes = reinterpret_cast<const uint8_t*>(numbers);
  const Fp8Table& fp8 = Fp8Values();
  const auto first_scale = static_cast<size_t>(row / block_rows_ * Blocks(columns_, block_columns_));
  const uint8_t* const exponents = elsewhere_ != nullptr ? elsewhere_ : exponents_.data();
  std::array<float, kPiece> piece{};
  for (int64_t from = 0; from < columns_;) {
    // Of one scale.
    const int64_t block = from / block_columns_;
    const int64_t end = std::min({columns_, (block + 1) * block_columns_, from + kPiece});
    const auto n = static_cast<size_t>(end - from);
    float* const values = to == kernels::DType::kFp32 ? static_cast<float*>(out) + from : piece.data();
    if (code_ == ScaledCode::kFp8) {
      const float scale = scales_[first_scale + static_cast<size_t>(block)];
      for (size_t i = 0; i < n; ++i) values[i] = fp8[codes[static_cast<size_t>(from) + i]] * scale;
    } else {
      const float scale = Exponent(exponents[first_scale + static_cast<size_t>(block)]);
      for (size_t i = 0; i < n; i += 2) {
        const uint8_t both = codes[(static_cast<size_t>(from) + i) / 2];
        values[i] = kFp4Values[both & 15] * scale;
        values[i + 1] = kFp4Values[both >> 4] * scale;
      }
    }
    if (to == kernels::DType::kBf16) kernels::Fp32ToBf16(values, static_cast<uint16_t*>(out) + from, n);
    from = end;
  }
}

std::optional<std::pair<int64_t, int64_t>> ScaleBlock(const std::vector<uint64_t>& scales, int64_t rows,
                                                      int64_t columns, std::pair<int64_t, int64_t> block) {
  uint64_t all = 1;
  for (const uint64_t n : scales) all *= n;
  if (scales.size() > 2 || all == 0) return std::nullopt;
  if (all == 1) return std::pair(rows, columns);
  const auto is = [&](std::pair<int64_t, int64_t> of) {
    return scales.size() == 2 && of.first > 0 && of.second > 0 &&
           scales[0] == static_cast<uint64_t>(Blocks(rows, of.first)) &&
           scales[1] == static_cast<uint64_t>(Blocks(columns, of.second));
  };
  if (is(block)) return block;
  if (all == static_cast<uint64_t>(rows) && scales[0] == all) return std::pair(int64_t{1}, columns);
  constexpr std::pair<int64_t, int64_t> kUsual = {128, 128};
  if (block.first == 0 && is(kUsual)) return kUsual;
  return std::nullopt;
}

namespace {

// Who makes whole weights of other forms.
struct OtherForm {
  std::string_view method, name, converter;
};
constexpr OtherForm kOtherForms[] = {
    {"gptq", "GPTQ", "GPTQModel converts it: gptqmodel.utils.model_dequant.dequantize_model(DIR, OUT)"},
    {"awq", "AWQ", "GPTQModel converts it: gptqmodel.utils.model_dequant.dequantize_model(DIR, OUT)"},
    {"bitsandbytes", "bitsandbytes",
     "transformers converts it: AutoModelForCausalLM.from_pretrained(DIR).dequantize().save_pretrained(OUT)"},
    {"compressed-tensors", "compressed-tensors",
     "transformers converts it: AutoModelForCausalLM.from_pretrained(DIR, "
     "quantization_config=CompressedTensorsConfig(run_compressed=False)).save_pretrained(OUT)"},
};

absl::Status NotRead(const std::string& method, const std::string& form) {
  std::string name = method, converter = "the tool that made it converts it to whole weights";
  for (const OtherForm& other : kOtherForms) {
    if (other.method != method) continue;
    name = std::string(other.name);
    converter = std::string(other.converter);
  }
  if (!form.empty()) name = absl::StrCat(name, " ", form);
  return absl::InvalidArgumentError(absl::StrCat(
      "model: quantization_config: weights in ", name.empty() ? "a form without a quant_method" : name,
      " are not read (fp8, mxfp4 and those of `penstock pack` are); ", converter));
}

// [rows, columns] under a key.
std::pair<int64_t, int64_t> BlockIn(const nlohmann::json& of, const char* key) {
  const auto found = of.find(key);
  if (found == of.end() || !found->is_array() || found->size() != 2) return {0, 0};
  const nlohmann::json &rows = (*found)[0], &columns = (*found)[1];
  constexpr int64_t kMost = int64_t{1} << 32;
  if (!rows.is_number_integer() || !columns.is_number_integer()) return {0, 0};
  const std::pair<int64_t, int64_t> block = {rows.get<int64_t>(), columns.get<int64_t>()};
  const bool right = block.first > 0 && block.second > 0 && block.first < kMost && block.second < kMost;
  return right ? block : std::pair<int64_t, int64_t>{0, 0};
}

std::string TextIn(const nlohmann::json& of, const char* key) {
  const auto found = of.find(key);
  return found == of.end() || !found->is_string() ? "" : found->get<std::string>();
}

}  // namespace

absl::Status ReadQuantization(const nlohmann::json& config, Quantization* read) {
  *read = {};
  const auto found = config.find("quantization_config");
  if (found == config.end() || found->empty()) return absl::OkStatus();
  if (!found->is_object()) return absl::InvalidArgumentError("model: quantization_config is no object");
  read->method = TextIn(*found, "quant_method");
  read->block = BlockIn(*found, "weight_block_size");
  if (read->method == "fp8") {
    const std::string format = TextIn(*found, "fmt");
    if (!format.empty() && !absl::StartsWith(format, "e4m3")) return NotRead(read->method, format);
    return absl::OkStatus();
  }
  if (read->method == "fbgemm_fp8" || read->method == "mxfp4") return absl::OkStatus();
  if (read->method != "compressed-tensors") return NotRead(read->method, "");
  const std::string format = TextIn(*found, "format");
  if (format == "dense") return absl::OkStatus();
  if (format != "float-quantized" && format != "naive-quantized") return NotRead(read->method, format);
  const auto groups = found->find("config_groups");
  if (groups == found->end() || !groups->is_object()) return absl::OkStatus();
  for (const auto& [name, group] : groups->items()) {
    const auto weights = group.is_object() ? group.find("weights") : group.end();
    if (!group.is_object() || weights == group.end() || !weights->is_object()) continue;
    if (TextIn(*weights, "type") != "float" || weights->value("num_bits", nlohmann::json(8)) != 8)
      return NotRead(read->method, absl::StrCat(format, " of other than 8-bit floating point"));
    if (const auto block = BlockIn(*weights, "block_structure"); block.first > 0) read->block = block;
  }
  return absl::OkStatus();
}

}  // namespace penstock::models
