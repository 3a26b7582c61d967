// Matrices that are published in floating-point numbers of 8 or 4 bit, with their scales in a tensor of their
// own:
//
//   fp8     E4M3 (OCP 8-bit floating point, 2023: no infinities), a byte each, NAME; scales in fp32, bf16 or
//   fp16,
//           NAME_scale_inv (DeepSeek, Qwen) or NAME_scale (compressed-tensors, FBGEMM): one of all, one of
//           each row, or one of each block
//   mxfp4   E2M1, two to a byte, the first in the low half, NAME_blocks [rows, columns / 32, 16]; NAME_scales
//           [rows, columns / 32] are exponents of 2, plus 127 (OCP Microscaling formats, 2023; gpt-oss)
//
//   value = scale * number, in fp32, rounded to nearest even where it is decoded to bf16
//
// The numbers stay where they are published; scales are kept in memory, but those of experts, which are read
// with their numbers.
//
// Immutable; thread-safe.
#ifndef PENSTOCK_MODELS_WEIGHTS_SCALED_WEIGHTS_H_
#define PENSTOCK_MODELS_WEIGHTS_SCALED_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/float16.h"

namespace penstock::models {

enum class ScaledCode : uint8_t { kFp8, kMxfp4 };
const char* ScaledCodeName(ScaledCode code);  // "fp8", "mxfp4"

inline constexpr int64_t kMxfp4Block = 32;  // numbers of a row that share a scale

class ScaledMatrix {
 public:
  // fp8: `scales` row by row of blocks, each of block_rows x block_columns but for the last ones.
  ScaledMatrix(int64_t columns, int64_t block_rows, int64_t block_columns, std::vector<float> scales);
  // mxfp4: `columns` are a multiple of kMxfp4Block.
  ScaledMatrix(int64_t columns, std::vector<uint8_t> exponents);
  // mxfp4, with exponents that lie elsewhere and outlive it: [rows, columns / kMxfp4Block].
  ScaledMatrix(int64_t columns, const std::byte* exponents);
  // Of `rows` rows, with the scale 1.
  static ScaledMatrix Plain(ScaledCode code, int64_t rows, int64_t columns);

  ScaledCode code() const { return code_; }
  size_t row_bytes() const {
    return static_cast<size_t>(code_ == ScaledCode::kFp8 ? columns_ : columns_ / 2);
  }
  uint64_t scale_bytes() const { return scales_.size() * sizeof(float) + exponents_.size(); }
  int64_t block_rows() const { return block_rows_; }
  int64_t block_columns() const { return block_columns_; }
  // In fp32, row by row of blocks.
  std::vector<float> Scales() const;
  // A row's numbers to kFp32 or kBf16.
  void Decode(int64_t row, const std::byte* numbers, kernels::DType to, void* out) const;

 private:
  const ScaledCode code_;
  const int64_t columns_, block_rows_ = 1, block_columns_ = kMxfp4Block;
  const std::vector<float> scales_;
  const std::vector<uint8_t> exponents_;
  const uint8_t* const elsewhere_ = nullptr;  // exponents that are not its own
};

// The number of each code: 256 of fp8, 16 of mxfp4.
std::span<const float> NumbersOf(ScaledCode code);

// Rows and columns of weights that share a scale, by the shape of their scales; nullopt: such scales have no
// meaning for a matrix. `block`: what the model's config says; {0, 0}: nothing.
std::optional<std::pair<int64_t, int64_t>> ScaleBlock(const std::vector<uint64_t>& scales, int64_t rows,
                                                      int64_t columns, std::pair<int64_t, int64_t> block);

// What config.json's "quantization_config" says of weights.
struct Quantization {
  std::string method;                 // "quant_method"
  std::pair<int64_t, int64_t> block;  // of scales, rows and columns; {0, 0}: it does not say
};
// kInvalidArgument, in one line that names the form and what converts it: weights that are not read.
absl::Status ReadQuantization(const nlohmann::json& config, Quantization* read);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_SCALED_WEIGHTS_H_
