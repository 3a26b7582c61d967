#include "kernels/quantize.h"

#include <algorithm>

#include "kernels/thread_pool.h"
#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::quantize_test {
namespace {

// f(code) by its definition: a small binary float with 3 bits of mantissa.
double ValueOf(Code8 code, uint8_t bits) {
  const bool is_signed = code == Code8::kSigned;
  const int magnitude = is_signed ? bits & 0x7F : bits;
  const int top = is_signed ? 15 : 31;  // the exponent field of 1.0
  const int field = magnitude >> 3, mantissa = magnitude & 7;
  const double value =
      field == 0 ? std::ldexp(mantissa, 1 - top - 3) : std::ldexp(8 + mantissa, field - top - 3);
  return is_signed && (bits & 0x80) ? -value : value;
}

TEST(Quantize8, DecodesByTheDefinition) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    for (const Code8 code : {Code8::kSigned, Code8::kUnsigned}) {
      std::vector<uint8_t> codes(kStateBlock);
      for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
      const float scale = 0.75f;
      std::vector<float> out(codes.size());
      Dequantize8(code, codes.data(), &scale, out.data(), codes.size());
      for (size_t i = 0; i < codes.size(); ++i) EXPECT_EQ(out[i], 0.75 * ValueOf(code, codes[i])) << i;
    }
  }
}

TEST(Quantize8, TakesTheNearestValue) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    for (const Code8 code : {Code8::kSigned, Code8::kUnsigned}) {
      std::vector<double> values;
      for (int bits = 0; bits < (code == Code8::kSigned ? 128 : 256); ++bits) {
        values.push_back(ValueOf(code, static_cast<uint8_t>(bits)));
      }
      ASSERT_TRUE(std::is_sorted(values.begin(), values.end()));
      ASSERT_EQ(values.back(), 1.875);
      std::mt19937_64 random(4);
      std::vector<float> in(kStateBlock), out(kStateBlock);
      std::vector<uint8_t> codes(kStateBlock);
      for (int round = 0; round < 50; ++round) {
        for (float& x : in)
          x = std::ldexp(static_cast<float>(random() % 1000000), -static_cast<int>(random() % 45));
        in[17] = 1e7f;
        float scale = 0;
        Quantize8(code, in.data(), codes.data(), &scale, kStateBlock);
        EXPECT_EQ(scale, 1e7f / 1.875f);
        Dequantize8(code, codes.data(), &scale, out.data(), kStateBlock);
        for (size_t i = 0; i < kStateBlock; ++i) {
          const double y = static_cast<double>(in[i]) / scale;
          double best = HUGE_VAL;
          for (size_t k = 0; k < values.size(); ++k) {
            if (k == 0 && code == Code8::kUnsigned && in[i] != 0) continue;  // never to zero
            best = std::min(best, std::fabs(values[k] - y));
          }
          const double got = std::fabs(ValueOf(code, codes[i]) - y);
          EXPECT_LE(got, best + 1e-6 * y) << SimdLevelName(level) << " " << y << " code " << int{codes[i]};
        }
      }
    }
  }
}

TEST(Quantize8, EveryLevelGivesTheSameCodes) {
  ThreadPool pool(3);
  for (const Values kind : AllValues()) {
    for (const bool stochastic : {false, true}) {
      for (size_t n = 0; n <= 600; n += n < 257 ? 1 : 49) {
        const std::vector<float> in = Random(n, kind, n + 1);
        const Rounding rounding = {.stochastic = stochastic, .seed = n, .first_element = 3 * kStateBlock};
        for (const Code8 code : {Code8::kSigned, Code8::kUnsigned}) {
          std::vector<uint8_t> expected(n);
          std::vector<float> expected_scales(n / kStateBlock + 1), decoded(n);
          {
            const AtLevel at(SimdLevel::kPortable);
            Quantize8(code, in.data(), expected.data(), expected_scales.data(), n, rounding);
            Dequantize8(code, expected.data(), expected_scales.data(), decoded.data(), n);
          }
          for (const SimdLevel level : Levels()) {
            const AtLevel at(level);
            Misaligned<float> moved(in, n % 64), back(n, (n + 2) % 64);
            Misaligned<uint8_t> codes(n, (n + 1) % 64);
            std::vector<float> scales(n / kStateBlock + 1);
            Quantize8(code, moved.data(), codes.data(), scales.data(), n, rounding, &pool);
            Dequantize8(code, codes.data(), scales.data(), back.data(), n, &pool);
            ASSERT_TRUE(SameFloats(scales, expected_scales));
            ASSERT_TRUE(SameFloats(back.Get(), decoded));
            ASSERT_TRUE(codes.GuardsIntact() && back.GuardsIntact());
            const std::vector<uint8_t> got = codes.Get();
            for (size_t i = 0; i < n; ++i) {
              ASSERT_EQ(got[i], expected[i]) << SimdLevelName(level) << " n " << n << " i " << i;
            }
          }
        }
      }
    }
  }
}

TEST(Quantize8, StochasticRoundingIsRightInTheMean) {
  for (const Code8 code : {Code8::kSigned, Code8::kUnsigned}) {
    for (const float x : {0.3f, 0.01234f, 1e-3f, 2e-5f}) {
      std::vector<float> in(kStateBlock, x), out(kStateBlock);
      in[0] = 1.0f;
      std::vector<uint8_t> codes(kStateBlock);
      float scale = 0;
      double mean = 0;
      constexpr int kRounds = 400;
      for (int round = 0; round < kRounds; ++round) {
        const Rounding rounding = {.stochastic = true, .seed = static_cast<uint64_t>(round)};
        Quantize8(code, in.data(), codes.data(), &scale, kStateBlock, rounding);
        Dequantize8(code, codes.data(), &scale, out.data(), kStateBlock);
        for (size_t i = 1; i < kStateBlock; ++i) mean += out[i];
      }
      mean /= kRounds * (kStateBlock - 1.0);
      EXPECT_NEAR(mean / x, 1.0, 2e-3) << x;
    }
  }
}

TEST(Quantize8, ZerosSpecialsAndTinyBlocks) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    std::vector<float> in(kStateBlock, 0.0f), out(kStateBlock, 5.0f);
    std::vector<uint8_t> codes(kStateBlock, 9);
    float scale = 5;
    for (const Code8 code : {Code8::kSigned, Code8::kUnsigned}) {
      std::fill(in.begin(), in.end(), 0.0f);
      Quantize8(code, in.data(), codes.data(), &scale, in.size());
      EXPECT_EQ(scale, 0.0f);
      EXPECT_EQ(std::count(codes.begin(), codes.end(), 0), static_cast<int>(kStateBlock));
      Dequantize8(code, codes.data(), &scale, out.data(), out.size());
      EXPECT_EQ(std::count(out.begin(), out.end(), 0.0f), static_cast<int>(kStateBlock));

      for (const float bad : {HUGE_VALF, std::numeric_limits<float>::quiet_NaN()}) {
        in[3] = bad;
        Quantize8(code, in.data(), codes.data(), &scale, in.size());
        EXPECT_EQ(std::count(codes.begin(), codes.end(), 0), static_cast<int>(kStateBlock));
        Dequantize8(code, codes.data(), &scale, out.data(), out.size());
        EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::isnan(x); }));
      }
      std::fill(in.begin(), in.end(), 0.0f);
      for (const float most : {std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::max()}) {
        in[3] = most;
        Quantize8(code, in.data(), codes.data(), &scale, in.size());
        Dequantize8(code, codes.data(), &scale, out.data(), out.size());
        EXPECT_NEAR(out[3] / most, 1.0, most < 1 ? 1.0 : 1e-6);
        EXPECT_EQ(out[4], 0.0f);
      }
      in[3] = 0.0f;
    }
    // A second moment that is there stays there, however small beside its block's largest.
    in[0] = 1.0f;
    in[1] = 1e-30f;
    for (const bool stochastic : {false, true}) {
      const Rounding rounding = {.stochastic = stochastic, .seed = 1};
      Quantize8(Code8::kUnsigned, in.data(), codes.data(), &scale, in.size(), rounding);
      EXPECT_EQ(codes[1], 1);
      EXPECT_EQ(codes[2], 0);
    }
  }
}

}  // namespace
}  // namespace penstock::kernels::quantize_test
