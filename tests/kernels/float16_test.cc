#include "kernels/float16.h"

#include <algorithm>

#include "kernels/thread_pool.h"
#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::float16_test {
namespace {

// The nearest value of a 16-bit type by its definition: the neighbours in the type's own order, the even one
// on ties.
uint16_t NearestByDefinition(double x, float (*widen)(uint16_t), uint16_t infinity) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  // Codes of one sign are ordered like their values: bisect for the largest code not above the magnitude.
  uint32_t low = 0, high = infinity;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (static_cast<double>(widen(static_cast<uint16_t>(middle))) <= magnitude ? low : high) = middle;
  }
  const double below = widen(static_cast<uint16_t>(low));
  // What the next step would be if the type went on: infinity counts as twice the last binade's step above.
  const double step = low + 1 < infinity ? static_cast<double>(widen(static_cast<uint16_t>(low + 1))) - below
                                         : below - static_cast<double>(widen(static_cast<uint16_t>(low - 1)));
  const double over = magnitude - below;
  const bool up = over > step / 2 || (over == step / 2 && low % 2 == 1);
  return static_cast<uint16_t>(sign | (low + (up ? 1u : 0u)));
}

TEST(Float16, EverySixteenBitPatternWidensAndComesBack) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    std::vector<float> wide(all.size());
    std::vector<uint16_t> back(all.size());
    Bf16ToFp32(all.data(), wide.data(), all.size());
    Fp32ToBf16(wide.data(), back.data(), all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), i << 16) << SimdLevelName(level);
      ASSERT_EQ(back[i], std::isnan(wide[i]) ? i | 0x40 : i);
    }
    Fp16ToFp32(all.data(), wide.data(), all.size());
    Fp32ToFp16(wide.data(), back.data(), all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(Fp16ToFloat(all[i])));
      ASSERT_EQ(back[i], std::isnan(wide[i]) ? i | 0x200 : i);
      // binary16 by its definition.
      const int exponent = (all[i] >> 10) & 31, mantissa = all[i] & 1023;
      if (exponent < 31) {
        const double value =
            exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
        ASSERT_EQ(wide[i], all[i] & 0x8000 ? -value : value);
      } else {
        ASSERT_EQ(std::isnan(wide[i]), mantissa != 0);
        ASSERT_EQ(std::isinf(wide[i]), mantissa == 0);
      }
    }
  }
}

TEST(Float16, NarrowingIsRoundToNearestEven) {
  for (const Values kind : AllValues()) {
    const std::vector<float> in = Random(20000, kind, 1);
    for (const float x : in) {
      if (std::isnan(x)) {
        EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(x))) && std::isnan(Fp16ToFloat(FloatToFp16(x))));
        continue;
      }
      ASSERT_EQ(FloatToBf16(x), NearestByDefinition(x, Bf16ToFloat, 0x7F80)) << std::hexfloat << x;
      ASSERT_EQ(FloatToFp16(x), NearestByDefinition(x, Fp16ToFloat, 0x7C00)) << std::hexfloat << x;
    }
  }
}

TEST(Float16, ValuesAtAndBesideEveryHalfwayPoint) {
  for (uint32_t code = 0; code < 0x7C00; ++code) {
    const float low = Fp16ToFloat(static_cast<uint16_t>(code));
    const double step = code + 1 < 0x7C00 ? Fp16ToFloat(static_cast<uint16_t>(code + 1)) - low : 32.0;
    const float half = static_cast<float>(low + step / 2);
    for (const float x : {half, std::nextafter(half, 0.0f), std::nextafter(half, HUGE_VALF), -half}) {
      ASSERT_EQ(FloatToFp16(x), NearestByDefinition(x, Fp16ToFloat, 0x7C00)) << std::hexfloat << x;
    }
  }
}

// Every kernel equals the one-value functions on every length, alignment and level, and writes nothing
// beside.
TEST(Float16, AnyLengthAnyAlignmentAnyLevel) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    for (size_t n = 0; n <= 257; ++n) {
      const size_t offset = (n * 7) % 64;
      const std::vector<float> values = Random(n, n % 2 == 0 ? Values::kAnyBits : Values::kSpecial, n);
      Misaligned<float> wide(values, offset);
      Misaligned<uint16_t> bf16(n, offset + 1), fp16(n, offset + 2);
      Fp32ToBf16(wide.data(), bf16.data(), n);
      Fp32ToFp16(wide.data(), fp16.data(), n);
      ASSERT_TRUE(bf16.GuardsIntact() && fp16.GuardsIntact()) << n;
      const std::vector<uint16_t> got_bf16 = bf16.Get(), got_fp16 = fp16.Get();
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(got_bf16[i], FloatToBf16(values[i])) << SimdLevelName(level) << " n " << n << " i " << i;
        ASSERT_EQ(got_fp16[i], FloatToFp16(values[i])) << SimdLevelName(level) << " n " << n << " i " << i;
      }
      Misaligned<float> sum(values, offset);
      AccumulateBf16(bf16.data(), sum.data(), n);
      AccumulateFp16(fp16.data(), sum.data(), n);
      AccumulateFp32(wide.data(), sum.data(), n);
      ASSERT_TRUE(sum.GuardsIntact());
      const std::vector<float> sums = sum.Get();
      for (size_t i = 0; i < n; ++i) {
        const float expected =
            ((values[i] + Bf16ToFloat(got_bf16[i])) + Fp16ToFloat(got_fp16[i])) + values[i];
        ASSERT_TRUE(SameFloat(sums[i], expected)) << SimdLevelName(level) << " n " << n << " i " << i;
      }
      Misaligned<float> back(n, offset + 3);
      Bf16ToFp32(bf16.data(), back.data(), n);
      ASSERT_TRUE(back.GuardsIntact());
      const std::vector<float> widened = back.Get();
      for (size_t i = 0; i < n; ++i) ASSERT_TRUE(SameFloat(widened[i], Bf16ToFloat(got_bf16[i])));
    }
  }
}

TEST(Float16, ConvertAgreesWithItsPartsAndWithAPool) {
  ThreadPool pool(3);
  constexpr size_t kN = 100001;
  const std::vector<float> wide = Random(kN, Values::kNormal, 3);
  std::vector<uint16_t> bf16(kN), fp16(kN), other(kN);
  Convert(DType::kFp32, wide.data(), DType::kBf16, bf16.data(), kN, &pool);
  Convert(DType::kBf16, bf16.data(), DType::kFp16, fp16.data(), kN, &pool);
  Convert(DType::kFp16, fp16.data(), DType::kFp16, other.data(), kN, &pool);
  for (size_t i = 0; i < kN; ++i) {
    ASSERT_EQ(bf16[i], FloatToBf16(wide[i]));
    ASSERT_EQ(fp16[i], FloatToFp16(Bf16ToFloat(bf16[i])));
    ASSERT_EQ(other[i], fp16[i]);
  }
}

}  // namespace
}  // namespace penstock::kernels::float16_test
