#include "kernels/weight_code.h"

#include <algorithm>

#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels {
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
        Misaligned<uint16_t> narrow(columns, 2);
        DecodeWeights(code, from.data(), columns, DType::kFp32, wide.data());
        DecodeWeights(code, from.data(), columns, DType::kBf16, narrow.data());
        ASSERT_TRUE(wide.GuardsIntact() && narrow.GuardsIntact());
        for (size_t i = 0; i < columns; ++i) {
          const auto exact = static_cast<float>(reference.values[i]);
          ASSERT_EQ(std::bit_cast<uint32_t>(wide.Get()[i] + 0.0f), std::bit_cast<uint32_t>(exact + 0.0f))
              << i;
          ASSERT_EQ(narrow.Get()[i] == 0x8000 ? 0 : narrow.Get()[i], FloatToBf16(exact + 0.0f)) << i;
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

TEST(WeightCodeTest, ZerosStayZerosAndWhatIsNotFiniteIsRefused) {
  for (const WeightCode& code : Codes()) {
    std::vector<float> in(100, 0.0f), out(100, 1.0f);
    std::vector<uint8_t> row(code.row_bytes(100));
    ASSERT_TRUE(EncodeWeights(code, in.data(), 100, row.data()));
    DecodeWeights(code, row.data(), 100, DType::kFp32, out.data());
    EXPECT_EQ(out, in);
    for (const float bad : {HUGE_VALF, -HUGE_VALF, std::numeric_limits<float>::quiet_NaN()}) {
      in[99] = bad;
      EXPECT_FALSE(EncodeWeights(code, in.data(), 100, row.data()));
    }
    in[99] = 0;
  }
}

}  // namespace
}  // namespace penstock::kernels
