#include "kernels/reduce.h"

#include <algorithm>
#include <numeric>

#include "kernels/thread_pool.h"
#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::reduce_test {
namespace {

// The definition in kernels/reduce.h, one element at a time.
double PartialByDefinition(const std::vector<float>& values, size_t begin, size_t end) {
  double s[16] = {};
  for (size_t i = begin; i < end; ++i) s[(i - begin) % 16] += static_cast<double>(values[i]) * values[i];
  for (int width = 8; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) s[j] += s[j + width];
  }
  return s[0];
}

SumOfSquares SumByDefinition(const std::vector<float>& values) {
  SumOfSquares sum;
  for (size_t i = 0; i < values.size(); i += kReduceBlock) {
    sum.Add(PartialByDefinition(values, i, std::min(values.size(), i + kReduceBlock)));
  }
  return sum;
}

TEST(SumOfSquares, AddsExactlyWhereDoublesWouldNot) {
  SumOfSquares sum;
  EXPECT_EQ(sum.Value(), 0.0);
  sum.Add(0x1p256);
  for (int i = 0; i < 1024; ++i) sum.Add(0x1p194);  // each far below half a last place of 2^256
  EXPECT_EQ(sum.Value(), 0x1p256 + 0x1p204);
  sum.Add(0x1p-298);
  EXPECT_EQ(sum.Value(), 0x1p256 + 0x1p204);
  SumOfSquares tiny;
  tiny.Add(0x1p-298);
  tiny.Add(0x1p-298);
  EXPECT_EQ(tiny.Value(), 0x1p-297);
}

TEST(SumOfSquares, RoundsOnceToNearestEven) {
  SumOfSquares tie;
  tie.Add(1.0);
  tie.Add(0x1p-53);
  EXPECT_EQ(tie.Value(), 1.0);  // a tie, to even
  tie.Add(0x1p-298);
  EXPECT_EQ(tie.Value(), 1.0 + 0x1p-52);  // a hair above the tie
  SumOfSquares odd;
  odd.Add(1.0 + 0x1p-52);
  odd.Add(0x1p-53);
  EXPECT_EQ(odd.Value(), 1.0 + 0x1p-51);
}

TEST(SumOfSquares, OrderOfAddingAndMergingDoesNotMatter) {
  std::mt19937_64 random(7);
  std::vector<double> parts(2000);
  for (double& part : parts) {
    part = std::ldexp(1.0 + static_cast<double>(random() >> 12) * 0x1p-52,
                      static_cast<int>(random() % 500) - 290);
  }
  SumOfSquares forward;
  for (const double part : parts) forward.Add(part);
  for (int round = 0; round < 10; ++round) {
    std::shuffle(parts.begin(), parts.end(), random);
    SumOfSquares left, right;
    for (size_t i = 0; i < parts.size(); ++i) (i < parts.size() / 3 ? left : right).Add(parts[i]);
    right.Merge(left);
    ASSERT_EQ(right.Value(), forward.Value());
  }
}

TEST(SumOfSquares, CarriesThroughAllLimbs) {
  SumOfSquares sum;  // 2 - 2^-298: a run of ones over several limbs
  for (int exponent = 0; exponent >= -298; --exponent) sum.Add(std::ldexp(1.0, exponent));
  EXPECT_EQ(sum.Value(), 2.0);  // rounded
  sum.Add(0x1p-298);            // exactly 2 now: one unit carries through them all
  sum.Add(0x1p-52);
  EXPECT_EQ(sum.Value(), 2.0);  // the tie between 2 and 2 + 2^-51, to even
  sum.Add(0x1p-298);
  EXPECT_EQ(sum.Value(), 2.0 + 0x1p-51);
}

TEST(SumOfSquares, WhatIsNotFiniteStaysSo) {
  SumOfSquares sum;
  sum.Add(1.0);
  EXPECT_TRUE(sum.Finite());
  SumOfSquares bad;
  bad.Add(std::numeric_limits<double>::quiet_NaN());
  sum.Merge(bad);
  EXPECT_FALSE(sum.Finite());
  EXPECT_EQ(sum.Value(), HUGE_VAL);
  EXPECT_EQ(sum.not_finite_blocks(), 1u);
}

TEST(Reduce, EveryLevelTypeLengthAndAlignmentFollowsTheDefinition) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    for (const size_t n : [] {
           std::vector<size_t> lengths(258);
           std::iota(lengths.begin(), lengths.end(), 0);
           lengths.insert(lengths.end(), {4095, 4096, 4097, 8192, 30001});
           return lengths;
         }()) {
      const size_t offset = (n * 3) % 64;
      const std::vector<float> values = Random(n, n % 3 == 0 ? Values::kTiny : Values::kHuge, n);
      Misaligned<float> fp32(values, offset);
      SumOfSquares sum;
      AddSquaresFp32(fp32.data(), n, &sum);
      ASSERT_EQ(sum.Value(), SumByDefinition(values).Value()) << SimdLevelName(level) << " n " << n;

      std::vector<uint16_t> narrow(n);
      std::vector<float> widened(n);
      for (const DType type : {DType::kBf16, DType::kFp16}) {
        Convert(DType::kFp32, values.data(), type, narrow.data(), n);
        for (uint16_t& x : narrow) {
          if ((x & 0x7C00) == 0x7C00 && type == DType::kFp16) x = 0x3C01;  // keep them finite
        }
        Convert(type, narrow.data(), DType::kFp32, widened.data(), n);
        Misaligned<uint16_t> in(narrow, offset + 1);
        SumOfSquares narrow_sum;
        AddSquares(type, in.data(), n, &narrow_sum);
        ASSERT_EQ(narrow_sum.Value(), SumByDefinition(widened).Value());
        ASSERT_TRUE(narrow_sum.Finite());
      }
    }
  }
}

TEST(Reduce, CloseToTheExactSum) {
  const std::vector<float> values = Random(1000003, Values::kNormal, 11);
  SumOfSquares sum;
  AddSquaresFp32(values.data(), values.size(), &sum);
  long double exact = 0;
  for (const float x : values) exact += static_cast<long double>(x) * x;
  EXPECT_NEAR(sum.Value() / static_cast<double>(exact), 1.0, 1e-13);
}

TEST(Reduce, NoCutThreadCountOrOrderChangesABit) {
  const std::vector<float> values = Random(10 * kReduceBlock + 777, Values::kNormal, 12);
  const double whole = SumByDefinition(values).Value();
  for (int threads = 1; threads <= 5; ++threads) {
    ThreadPool pool(threads);
    SumOfSquares sum;
    AddSquaresFp32(values.data(), values.size(), &sum, &pool);
    ASSERT_EQ(sum.Value(), whole) << threads;
  }
  for (size_t cut = kReduceBlock; cut < values.size(); cut += kReduceBlock) {
    SumOfSquares sum;
    AddSquaresFp32(values.data() + cut, values.size() - cut, &sum);
    AddSquaresFp32(values.data(), cut, &sum);
    ASSERT_EQ(sum.Value(), whole) << cut;
  }
}

TEST(Reduce, OneBadElementAnywhereIsFound) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    for (const DType type : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (size_t n = 1; n <= 257; n += n < 40 ? 1 : 31) {
        const std::vector<float> good = Random(n, Values::kNormal, n);
        std::vector<unsigned char> bytes(n * BytesPerElement(type));
        Convert(DType::kFp32, good.data(), type, bytes.data(), n);
        ASSERT_TRUE(AllFinite(type, bytes.data(), n));
        for (size_t bad = 0; bad < n; ++bad) {
          for (const float value : {HUGE_VALF, -HUGE_VALF, std::numeric_limits<float>::quiet_NaN()}) {
            std::vector<float> values = good;
            values[bad] = value;
            Convert(DType::kFp32, values.data(), type, bytes.data(), n);
            ASSERT_FALSE(AllFinite(type, bytes.data(), n))
                << SimdLevelName(level) << " n " << n << " at " << bad;
            SumOfSquares sum;
            AddSquares(type, bytes.data(), n, &sum);
            ASSERT_FALSE(sum.Finite());
          }
        }
      }
    }
  }
  EXPECT_TRUE(AllFinite(DType::kFp32, nullptr, 0));
}

TEST(Reduce, TheLargestFiniteValuesAreFinite) {
  const std::vector<float> most(3 * kReduceBlock, std::numeric_limits<float>::max());
  SumOfSquares sum;
  AddSquaresFp32(most.data(), most.size(), &sum);
  EXPECT_TRUE(sum.Finite());
  const double square = static_cast<double>(most[0]) * most[0];
  EXPECT_NEAR(sum.Value() / (square * static_cast<double>(most.size())), 1.0, 1e-12);
}

TEST(Reduce, ScaleRoundsOnce) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    for (const DType type : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const size_t n : {0, 1, 15, 16, 17, 100}) {
        const std::vector<float> values = Random(n, Values::kSpecial, n + 5);
        std::vector<unsigned char> x(n * BytesPerElement(type) + 1), expected(n * BytesPerElement(type) + 1);
        Convert(DType::kFp32, values.data(), type, x.data(), n);
        std::vector<float> wide(n);
        Convert(type, x.data(), DType::kFp32, wide.data(), n);
        for (float& value : wide) value *= 0.37f;
        Convert(DType::kFp32, wide.data(), type, expected.data(), n);
        Scale(type, x.data(), 0.37f, n);
        std::vector<float> got(n), want(n);
        Convert(type, x.data(), DType::kFp32, got.data(), n);
        Convert(type, expected.data(), DType::kFp32, want.data(), n);
        ASSERT_TRUE(SameFloats(got, want));
      }
    }
  }
}

}  // namespace
}  // namespace penstock::kernels::reduce_test
