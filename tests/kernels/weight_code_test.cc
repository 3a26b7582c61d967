#include "kernels/weight_code.h"

#include <algorithm>

#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::weight_code_test {
namespace {

// What a coded row holds, by the words of the header.
struct Reference {
  std::vector<double> values, steps;
};
Reference ReferenceOf(const WeightCode& code, const std::vector<uint8_t>& row, size_t columns) {
  Reference all;
  const size_t groups = (columns + code.group - 1) / code.group;
  for (size_t i = 0; i < columns; ++i) {
    const size_t at = i / code.group * 2;
    const double scale = Bf16ToFloat(static_cast<uint16_t>(row[at] | row[at + 1] << 8));
    int q = 0;
    if (code.bits == 8) {
      q = row[2 * groups + i] - 128;
    } else {
      const uint8_t byte = row[2 * groups + i / 32 * 16 + i % 16];
      q = (i % 32 < 16 ? byte & 15 : byte >> 4) - 8;
    }
    all.values.push_back(scale * q);
    all.steps.push_back(scale);
  }
  return all;
}

std::vector<WeightCode> Codes() { return {{8, 32}, {8, 64}, {8, 128}, {4, 32}, {4, 64}, {4, 128}}; }
constexpr size_t kColumns[] = {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 200, 768, 1000};

TEST(WeightCodeTest, AValueComesBackWithinHalfAStepOfTheLeastScaleThatHoldsItsGroup) {
  for (const WeightCode& code : Codes()) {
    for (const size_t columns : kColumns) {
      for (const Values kind : {Values::kNormal, Values::kTiny, Values::kHuge, Values::kDenormal}) {
        const std::vector<float> in = Random(columns, kind, columns);
        std::vector<uint8_t> row(code.row_bytes(columns));
        ASSERT_TRUE(EncodeWeights(code, in.data(), columns, row.data()));
        const Reference reference = ReferenceOf(code, row, columns);
        for (size_t i = 0; i < columns; ++i) {
          EXPECT_LE(std::fabs(reference.values[i] - static_cast<double>(in[i])),
                    reference.steps[i] * 0.5000001)
              << code.bits << " bit, group " << code.group << ", " << i << " of " << columns;
          // No scale is larger than it must be: one bf16 above the exact quotient at the most.
          double largest = 0;
          const size_t begin = i / code.group * code.group;
          for (size_t j = begin; j < std::min(columns, begin + code.group); ++j)
            largest = std::max(largest, std::fabs(static_cast<double>(in[j])));
          EXPECT_LE(reference.steps[i], largest / (code.bits == 8 ? 127 : 7) * (1 + 0x1p-7) + 0x1p-133);
        }
      }
    }
  }
}

TEST(WeightCodeTest, EveryLevelDecodesEveryByteToTheBitsOfTheDefinition) {
  std::mt19937_64 random(5);
  for (const WeightCode& code : Codes()) {
    for (const size_t columns : kColumns) {
      std::vector<uint8_t> row(code.row_bytes(columns));
      for (uint8_t& byte : row) byte = static_cast<uint8_t>(random());
      for (size_t g = 0; g < (columns + code.group - 1) / code.group; ++g)
        row[2 * g + 1] = static_cast<uint8_t>(row[2 * g + 1] % 64);  // finite and positive
      const Reference reference = ReferenceOf(code, row, columns);
      for (const SimdLevel level : Levels()) {
        const AtLevel at(level);
        Misaligned<uint8_t> from(row, 3);
        Misaligned<float> wide(columns, 4);
        Misaligned<uint16_t> narrow(columns, 2), half(columns, 2);
        DecodeWeights(code, from.data(), columns, DType::kFp16, half.data());
        DecodeWeights(code, from.data(), columns, DType::kFp32, wide.data());
        DecodeWeights(code, from.data(), columns, DType::kBf16, narrow.data());
        ASSERT_TRUE(wide.GuardsIntact() && narrow.GuardsIntact() && half.GuardsIntact());
        for (size_t i = 0; i < columns; ++i) {
          const auto exact = static_cast<float>(reference.values[i]);
          ASSERT_EQ(std::bit_cast<uint32_t>(wide.Get()[i] + 0.0f), std::bit_cast<uint32_t>(exact + 0.0f))
              << i;
          const uint16_t expected = FloatToFp16(exact);  // -0 of what is less than the least fp16, or 0
          ASSERT_EQ(half.Get()[i] == 0x8000 ? 0 : half.Get()[i], expected == 0x8000 ? 0 : expected) << i;
          ASSERT_EQ(narrow.Get()[i] == 0x8000 ? 0 : narrow.Get()[i], FloatToBf16(exact + 0.0f)) << i;
        }
      }
    }
  }
}

TEST(WeightCodeTest, EveryLevelCodesEveryTypeToTheSameBytes) {
  for (const WeightCode& code : Codes()) {
    for (const size_t columns : kColumns) {
      for (const Values kind : {Values::kNormal, Values::kTiny, Values::kHuge, Values::kDenormal}) {
        const std::vector<float> random = Random(columns, kind, columns + 1);
        for (const DType type : {DType::kFp32, DType::kBf16, DType::kFp16}) {
          if (type == DType::kFp16 && kind == Values::kHuge) continue;  // infinities
          std::vector<uint16_t> narrow(columns);
          std::vector<float> wide(columns);
          Convert(DType::kFp32, random.data(), type,
                  type == DType::kFp32 ? static_cast<void*>(wide.data()) : narrow.data(), columns);
          if (type != DType::kFp32) Convert(type, narrow.data(), DType::kFp32, wide.data(), columns);
          // By the words of the header, one after the other.
          std::vector<uint8_t> expected(code.row_bytes(columns));
          const int most = code.bits == 8 ? 127 : 7;
          const size_t groups = (columns + code.group - 1) / code.group;
          std::fill(expected.begin(), expected.end(), static_cast<uint8_t>(code.bits == 8 ? 128 : 0x88));
          for (size_t g = 0; g < groups; ++g) {
            const size_t begin = g * code.group, end = std::min(columns, begin + code.group);
            float largest = 0;
            for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(wide[i]));
            const uint32_t up =
                std::bit_cast<uint32_t>(largest / static_cast<float>(most)) + uint32_t{0xFFFF};
            expected[2 * g] = static_cast<uint8_t>(up >> 16);
            expected[2 * g + 1] = static_cast<uint8_t>(up >> 24);
            const float scale = Bf16ToFloat(static_cast<uint16_t>(up >> 16));
            for (size_t i = begin; i < end; ++i) {
              const int q = scale == 0 ? 0 : static_cast<int>(std::nearbyint(wide[i] / scale));
              uint8_t& byte = expected[2 * groups + (code.bits == 8 ? i : i / 32 * 16 + i % 16)];
              if (code.bits == 8) {
                byte = static_cast<uint8_t>(q + 128);
              } else {
                byte =
                    static_cast<uint8_t>(i % 32 < 16 ? (byte & 0xF0) | (q + 8) : (byte & 15) | (q + 8) << 4);
              }
            }
          }
          for (const SimdLevel level : Levels()) {
            const AtLevel at(level);
            Misaligned<uint8_t> out(code.row_bytes(columns), 3);
            const bool finite =
                type == DType::kFp32
                    ? EncodeWeights(code, type, Misaligned<float>(wide, 4).data(), columns, out.data())
                    : EncodeWeights(code, type, Misaligned<uint16_t>(narrow, 2).data(), columns, out.data());
            ASSERT_TRUE(finite && out.GuardsIntact());
            ASSERT_EQ(out.Get(), expected) << code.bits << " bit, group " << code.group << ", " << columns;
          }
        }
      }
    }
  }
}

TEST(WeightCodeTest, RoundingTakesTheNearestOfAllCodes) {
  for (const int bits : {8, 4}) {
    const WeightCode code{bits, 64};
    const int most = bits == 8 ? 127 : 7;
    const std::vector<float> in = Random(64, Values::kNormal, 9);
    std::vector<uint8_t> row(code.row_bytes(64));
    ASSERT_TRUE(EncodeWeights(code, in.data(), 64, row.data()));
    const Reference reference = ReferenceOf(code, row, 64);
    for (size_t i = 0; i < 64; ++i) {
      double best = HUGE_VAL;
      for (int q = -most; q <= most; ++q)
        best = std::min(best, std::fabs(q * reference.steps[i] - static_cast<double>(in[i])));
      EXPECT_NEAR(std::fabs(reference.values[i] - static_cast<double>(in[i])), best,
                  reference.steps[i] * 1e-6);
    }
  }
}

TEST(WeightCodeTest, ZerosStayZerosAndAGroupThatIsNotFiniteIsNan) {
  for (const WeightCode& code : Codes()) {
    std::vector<float> in(100, 0.0f), out(100, 1.0f);
    std::vector<uint8_t> row(code.row_bytes(100));
    ASSERT_TRUE(EncodeWeights(code, in.data(), 100, row.data()));
    DecodeWeights(code, row.data(), 100, DType::kFp32, out.data());
    EXPECT_EQ(out, in);
    for (const float bad : {HUGE_VALF, -HUGE_VALF, std::numeric_limits<float>::quiet_NaN()}) {
      in[99] = bad;
      EXPECT_FALSE(EncodeWeights(code, in.data(), 100, row.data()));
      for (const SimdLevel level : Levels()) {
        const AtLevel at(level);
        EXPECT_FALSE(EncodeWeights(code, in.data(), 100, row.data()));
        DecodeWeights(code, row.data(), 100, DType::kFp32, out.data());
        for (size_t i = 0; i < 100; ++i)
          EXPECT_EQ(std::isnan(out[i]), i / code.group == 99 / code.group) << i << ": " << out[i];
      }
    }
    in[99] = 0;
  }
}

}  // namespace
}  // namespace penstock::kernels::weight_code_test
