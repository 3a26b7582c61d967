#include "kernels/product.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>

#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::product_test {
namespace {

// The definition, word by word.
float RowByRow(const float* x, const float* w, size_t columns) {
  float s[16] = {};
  for (size_t k = 0; k < (columns + 15) / 16 * 16; ++k)
    s[k % 16] = k < columns ? std::fmaf(x[k], w[k], s[k % 16]) : std::fmaf(0, 0, s[k % 16]);
  for (const int width : {8, 4, 2, 1}) {
    for (int j = 0; j < width; ++j) s[j] += s[j + width];
  }
  return s[0];
}
float ColumnByColumn(const float* x, const float* w, size_t columns) {
  float sum = 0;
  for (size_t k = 0; k < columns; ++k) sum = std::fmaf(x[k], w[k], sum);
  return sum;
}

// What is smaller than the least normal number counts as zero.
float Flushed(float value) {
  return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
}
float InPairs(const float* x, const float* w, size_t columns) {
  float s[16] = {};
  for (size_t i = 0; i < (columns + 31) / 32 * 32; i += 32) {
    for (int j = 0; j < 16; ++j) {
      for (const size_t k : {i + 2 * static_cast<size_t>(j) + 1, i + 2 * static_cast<size_t>(j)})
        s[j] = Flushed(k < columns ? std::fmaf(Flushed(x[k]), Flushed(w[k]), s[j]) : std::fmaf(0, 0, s[j]));
    }
  }
  for (const int width : {8, 4, 2, 1}) {
    for (int j = 0; j < width; ++j) s[j] = Flushed(s[j] + s[j + width]);
  }
  return s[0];
}

float InTiles(const float* x, const float* w, size_t columns) {
  float sum = 0;
  for (size_t i = 0; i < columns; i += 32) {
    float part[2] = {};
    for (size_t k = i; k < std::min(columns, i + 32); ++k)
      part[k % 2] = Flushed(std::fmaf(Flushed(x[k]), Flushed(w[k]), part[k % 2]));
    sum = Flushed(sum + Flushed(part[0] + part[1]));
  }
  return sum;
}

struct Matrix {
  size_t outputs, columns;
  std::vector<float> exact;    // [outputs, columns]
  std::vector<uint8_t> bytes;  // as it is stored
};

std::vector<uint8_t> Stored(DType type, const std::vector<float>& exact) {
  std::vector<uint8_t> bytes(exact.size() * BytesPerElement(type));
  for (size_t i = 0; i < exact.size(); ++i) {
    const uint16_t half = type == DType::kBf16 ? FloatToBf16(exact[i]) : FloatToFp16(exact[i]);
    if (type == DType::kFp32) {
      std::memcpy(&bytes[4 * i], &exact[i], 4);
    } else {
      std::memcpy(&bytes[2 * i], &half, 2);
    }
  }
  return bytes;
}

// Values that `type` holds exactly.
Matrix Plain(DType type, size_t outputs, size_t columns, Values kind, uint64_t seed) {
  Matrix matrix{outputs, columns, Random(outputs * columns, kind, seed), {}};
  for (float& value : matrix.exact) {
    if (type == DType::kBf16) value = Bf16ToFloat(FloatToBf16(value));
    if (type == DType::kFp16) value = Fp16ToFloat(FloatToFp16(value));
  }
  matrix.bytes = Stored(type, matrix.exact);
  return matrix;
}

Matrix Coded(const WeightCode& code, size_t outputs, size_t columns, uint64_t seed, float factor = 1) {
  Matrix matrix{outputs, columns, std::vector<float>(outputs * columns), {}};
  std::vector<float> values = Random(outputs * columns, Values::kNormal, seed);
  for (float& value : values) value *= factor;
  matrix.bytes.resize(outputs * code.row_bytes(columns));
  for (size_t n = 0; n < outputs; ++n) {
    uint8_t* const row = matrix.bytes.data() + n * code.row_bytes(columns);
    EXPECT_TRUE(EncodeWeights(code, &values[n * columns], columns, row));
    DecodeWeights(code, row, columns, DType::kFp32, &matrix.exact[n * columns]);
  }
  return matrix;
}

// [columns, outputs], a row of it `stride` elements from the next.
std::vector<float> Turned(const Matrix& matrix, size_t stride) {
  std::vector<float> turned(matrix.columns * stride);
  for (size_t n = 0; n < matrix.outputs; ++n) {
    for (size_t k = 0; k < matrix.columns; ++k) turned[k * stride + n] = matrix.exact[n * matrix.columns + k];
  }
  return turned;
}

using Run = std::function<void(const ProductInput&, const void*, const ProductOutput&)>;
using Definition = float (*)(const float*, const float*, size_t);

// At every level, for rows that do not lie side by side, to the bits of the definition. `x`: [rows, columns +
// 3].
void ExpectDefinition(const Matrix& matrix, const std::vector<uint8_t>& stored, const std::vector<float>& x,
                      size_t rows, Definition definition, const Run& run) {
  const size_t x_stride = matrix.columns + 3, y_stride = matrix.outputs + 5;
  std::vector<float> expected(rows * y_stride, 7.0f);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t n = 0; n < matrix.outputs; ++n)
      expected[r * y_stride + n] =
          definition(&x[r * x_stride], &matrix.exact[n * matrix.columns], matrix.columns);
  }
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    Misaligned<float> in(x, 4), out(std::vector<float>(expected.size(), 7.0f), 12);
    Misaligned<uint8_t> weights(stored, 2);
    run({in.data(), rows, matrix.columns, x_stride}, weights.data(), {out.data(), matrix.outputs, y_stride});
    ASSERT_TRUE(out.GuardsIntact());
    ASSERT_TRUE(SameFloats(out.Get(), expected))
        << SimdLevelName(level) << ", " << rows << " rows, " << matrix.outputs << " x " << matrix.columns;
  }
}

void ExpectDefinition(const Matrix& matrix, const std::vector<uint8_t>& stored, size_t rows, Values kind,
                      Definition definition, const Run& run) {
  const std::vector<float> x = Random(rows * (matrix.columns + 3), kind, rows + matrix.columns);
  ExpectDefinition(matrix, stored, x, rows, definition, run);
}

constexpr size_t kRows[] = {1, 2, 3, 4, 5, 7, 16, 17, 33, 49, 65};
constexpr size_t kOutputs[] = {1, 3, 4, 6, 16, 17, 48, 70};
constexpr size_t kColumns[] = {1, 15, 16, 33, 200, 1023, 1024, 1100, 2049};
constexpr DType kTypes[] = {DType::kFp32, DType::kBf16, DType::kFp16};

TEST(ProductTest, EveryLevelHasTheBitsOfTheDefinitionForEveryTypeAndShape) {
  for (const DType type : kTypes) {
    for (const size_t columns : kColumns) {
      for (const size_t outputs : kOutputs) {
        const Matrix matrix = Plain(type, outputs, columns, Values::kNormal, columns);
        const size_t rows = kRows[(columns + outputs) % std::size(kRows)];
        ExpectDefinition(matrix, matrix.bytes, rows, Values::kNormal, RowByRow,
                         [type](const ProductInput& x, const void* w, const ProductOutput& y) {
                           MultiplyRows(x, type, w, y);
                         });
        const size_t stride = outputs + 9;
        ExpectDefinition(matrix, Stored(type, Turned(matrix, stride)), rows, Values::kNormal, ColumnByColumn,
                         [type, stride](const ProductInput& x, const void* w, const ProductOutput& y) {
                           MultiplyRowsTurned(x, type, w, stride, y);
                         });
      }
    }
  }
}

TEST(ProductTest, EveryNumberOfRowsHasTheBitsOfTheDefinition) {
  const Matrix matrix = Plain(DType::kBf16, 9, 130, Values::kNormal, 1);
  for (const size_t rows : kRows) {
    ExpectDefinition(matrix, matrix.bytes, rows, Values::kNormal, RowByRow,
                     [](const ProductInput& x, const void* w, const ProductOutput& y) {
                       MultiplyRows(x, DType::kBf16, w, y);
                     });
    ExpectDefinition(matrix, Stored(DType::kBf16, Turned(matrix, 9)), rows, Values::kNormal, ColumnByColumn,
                     [](const ProductInput& x, const void* w, const ProductOutput& y) {
                       MultiplyRowsTurned(x, DType::kBf16, w, 9, y);
                     });
  }
}

TEST(ProductTest, CodedRowsAreMultipliedAsWhatTheyHold) {
  for (const int bits : {8, 4}) {
    for (const size_t group : {32, 64, 96, 1056, 4096}) {
      const WeightCode code{bits, group};
      for (const size_t columns : kColumns) {
        const Matrix matrix = Coded(code, 6, columns, group + columns);
        ExpectDefinition(matrix, matrix.bytes, 3, Values::kNormal, RowByRow,
                         [&code](const ProductInput& x, const void* w, const ProductOutput& y) {
                           MultiplyRows(x, code, w, y);
                         });
      }
    }
  }
}

// Rounds x to bf16, for the definition and for the product.
void ExpectPackedDefinition(const Matrix& matrix, const std::optional<WeightCode>& code, size_t rows,
                            Values kind, PackedOrder order) {
  const size_t x_stride = matrix.columns + 3;
  const std::vector<uint8_t> bytes =
      Stored(DType::kBf16, Random(rows * x_stride, kind, rows + matrix.columns));
  std::vector<float> rounded(rows * x_stride);
  const auto* narrow = reinterpret_cast<const uint16_t*>(bytes.data());
  for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = Bf16ToFloat(narrow[i]);
  ExpectDefinition(matrix, matrix.bytes, rounded, rows, order == PackedOrder::kTiles ? InTiles : InPairs,
                   [&](const ProductInput& x, const void* w, const ProductOutput& y) {
                     std::vector<std::byte> memory(PackedRows::Bytes(x.rows, x.columns, order));
                     const PackedRows packed(narrow, x.rows, x.columns, x_stride, memory.data(), order);
                     code.has_value() ? packed.Multiply(*code, w, y) : packed.Multiply(w, y);
                   });
}
void ExpectPackedDefinitions(const Matrix& matrix, size_t rows, Values kind) {
  for (const PackedOrder order : {PackedOrder::kPairs, PackedOrder::kTiles})
    ExpectPackedDefinition(matrix, std::nullopt, rows, kind, order);
}

TEST(ProductTest, PackedRowsHaveTheBitsOfTheirDefinitionsAtEveryLevel) {
  for (const size_t columns : kColumns) {
    for (const size_t outputs : kOutputs) {
      const Matrix matrix = Plain(DType::kBf16, outputs, columns, Values::kNormal, columns);
      for (const size_t rows : {kRows[(columns + outputs) % std::size(kRows)], size_t{1}})
        ExpectPackedDefinitions(matrix, rows, Values::kNormal);
    }
  }
  const Matrix matrix = Plain(DType::kBf16, 9, 130, Values::kNormal, 1);
  for (const size_t rows : kRows) ExpectPackedDefinitions(matrix, rows, Values::kNormal);
  for (const Values kind : AllValues()) ExpectPackedDefinitions(Plain(DType::kBf16, 5, 70, kind, 3), 6, kind);
}

TEST(ProductTest, CodedRowsAreMultipliedWithPackedOnesAsBf16) {
  for (const int bits : {8, 4}) {
    for (const size_t group : {32, 96, 1056}) {
      const WeightCode code{bits, group};
      for (const size_t columns : kColumns) {
        const size_t outputs = kOutputs[(columns + group) % std::size(kOutputs)];
        Matrix matrix = Coded(code, outputs, columns, group + columns);
        for (float& value : matrix.exact) value = Bf16ToFloat(FloatToBf16(value));
        for (const size_t rows : {size_t{3}, kRows[(columns + group) % std::size(kRows)]})
          ExpectPackedDefinition(matrix, code, rows, Values::kNormal, PackedOrder::kTiles);
      }
      // Products that count as zero, and what is not finite.
      for (const Values kind : AllValues()) {
        Matrix matrix = Coded(code, 17, 100, group, 1e-30f);
        for (float& value : matrix.exact) value = Bf16ToFloat(FloatToBf16(value));
        ExpectPackedDefinition(matrix, code, 5, kind, PackedOrder::kTiles);
      }
    }
  }
}

TEST(ProductTest, WhatIsNotFiniteOrHardlyThereIsNoException) {
  for (const Values kind : AllValues()) {
    for (const DType type : kTypes) {
      const Matrix matrix = Plain(type, 5, 37, kind, 3);
      ExpectDefinition(matrix, matrix.bytes, 6, kind, RowByRow,
                       [type](const ProductInput& x, const void* w, const ProductOutput& y) {
                         MultiplyRows(x, type, w, y);
                       });
      ExpectDefinition(matrix, Stored(type, Turned(matrix, 5)), 6, kind, ColumnByColumn,
                       [type](const ProductInput& x, const void* w, const ProductOutput& y) {
                         MultiplyRowsTurned(x, type, w, 5, y);
                       });
    }
  }
}

// What the definition is for.
TEST(ProductTest, ARowHasTheSameBitsAloneAndAmongOthersAndWhereverTheOutputsAreCut) {
  constexpr size_t kMost = 19, kInner = 700, kOuter = 150;
  const Matrix matrix = Plain(DType::kBf16, kOuter, kInner, Values::kNormal, 4);
  const std::vector<float> x = Random(kMost * kInner, Values::kNormal, 5);
  std::vector<float> all(kMost * kOuter);
  MultiplyRows({x.data(), kMost, kInner, kInner}, DType::kBf16, matrix.bytes.data(),
               {all.data(), kOuter, kOuter});
  for (size_t row = 0; row < kMost; ++row) {
    std::vector<float> alone(kOuter);
    for (size_t n = 0; n < kOuter; n += 11) {
      const size_t outputs = std::min<size_t>(11, kOuter - n);
      MultiplyRows({&x[row * kInner], 1, kInner, kInner}, DType::kBf16, &matrix.bytes[n * kInner * 2],
                   {&alone[n], outputs, kOuter});
    }
    EXPECT_TRUE(SameFloats(alone.data(), &all[row * kOuter], kOuter)) << row;
  }
}
TEST(ProductTest, APackedRowHasTheSameBitsAloneAndAmongOthers) {
  constexpr size_t kMost = 70, kInner = 700, kOuter = 150;
  const Matrix matrix = Plain(DType::kBf16, kOuter, kInner, Values::kNormal, 4);
  const std::vector<uint8_t> bytes = Stored(DType::kBf16, Random(kMost * kInner, Values::kNormal, 5));
  const auto* x = reinterpret_cast<const uint16_t*>(bytes.data());
  for (const PackedOrder order : {PackedOrder::kPairs, PackedOrder::kTiles}) {
    std::vector<float> all(kMost * kOuter), alone(kOuter);
    std::vector<std::byte> memory(PackedRows::Bytes(kMost, kInner, order));
    PackedRows(x, kMost, kInner, kInner, memory.data(), order)
        .Multiply(matrix.bytes.data(), {all.data(), kOuter, kOuter});
    for (size_t row = 0; row < kMost; ++row) {
      const PackedRows packed(x + row * kInner, 1, kInner, kInner, memory.data(), order);
      for (size_t n = 0; n < kOuter; n += 11)
        packed.Multiply(&matrix.bytes[n * kInner * 2], {&alone[n], std::min<size_t>(11, kOuter - n), kOuter});
      EXPECT_TRUE(SameFloats(alone.data(), &all[row * kOuter], kOuter)) << row;
    }
  }
}

// On a machine with AMX the instruction is used, not only its definition.
TEST(ProductTest, TilesAreTheOrderOfWhoHasThem) {
  if (!GetCpuFeatures().amx_bf16) {
    EXPECT_EQ(FastPackedOrder(), PackedOrder::kPairs);
    return;
  }
#if defined(__x86_64__)
  constexpr int kAskForState = 0x1023, kTileState = 18;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kAskForState, kTileState) != 0) GTEST_SKIP() << "the system refuses AMX";
#endif
  EXPECT_EQ(FastPackedOrder(), PackedOrder::kTiles);
}

}  // namespace
}  // namespace penstock::kernels::product_test
