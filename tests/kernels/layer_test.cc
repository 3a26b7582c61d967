#include "kernels/layer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::layer_test {
namespace {

constexpr DType kTypes[] = {DType::kFp32, DType::kBf16};
constexpr size_t kLengths[] = {1, 2, 15, 16, 17, 64, 100, 257};

// Elements of a type, from anything, and what they are in fp32.
struct Elements {
  Elements(DType of, std::vector<float> values) : type(of), wide(std::move(values)) {
    bytes.resize(wide.size() * BytesPerElement(type));
    Convert(DType::kFp32, wide.data(), type, bytes.data(), wide.size());
    Convert(type, bytes.data(), DType::kFp32, wide.data(), wide.size());
  }
  DType type;
  std::vector<float> wide;
  std::vector<uint8_t> bytes;
};

std::vector<float> Widened(DType type, const std::vector<uint8_t>& bytes) {
  std::vector<float> wide(bytes.size() / BytesPerElement(type));
  Convert(type, bytes.data(), DType::kFp32, wide.data(), wide.size());
  return wide;
}

// The bits of every level, which must be one.
std::vector<float> AtEveryLevel(DType type, size_t n, const std::function<void(void* out)>& compute) {
  std::vector<float> first;
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    std::vector<uint8_t> out(n * BytesPerElement(type) + 8, 0x5A);
    compute(out.data());
    for (size_t i = out.size() - 8; i < out.size(); ++i) EXPECT_EQ(out[i], 0x5A) << "behind the end";
    out.resize(out.size() - 8);
    const std::vector<float> wide = Widened(type, out);
    if (first.empty()) first = wide;
    EXPECT_TRUE(SameFloats(wide, first)) << "level " << static_cast<int>(level);
  }
  return first;
}

// Within what rounding to the type leaves.
void ExpectNear(DType type, float got, double exact, double scale) {
  const double each = type == DType::kFp32 ? 2e-6 : 9e-3;
  EXPECT_NEAR(got, exact, each * (std::fabs(exact) + scale));
}

TEST(LayerTest, NormsAreThoseOfTheRowsAtEveryLevel) {
  constexpr size_t kRows = 3;
  for (const DType type : kTypes) {
    for (const size_t n : kLengths) {
      SCOPED_TRACE(n);
      const Elements x(type, Random(kRows * n, Values::kNormal, n)),
          weight(type, Random(n, Values::kNormal, 2)), bias(type, Random(n, Values::kNormal, 3));
      const NormRows in = {type, x.bytes.data(), kRows, n, weight.bytes.data(), bias.bytes.data(), 1e-5F};
      const auto root = AtEveryLevel(type, kRows * n, [&](void* out) { RootMeanSquareNorm(in, out); });
      const auto layer = AtEveryLevel(type, kRows * n, [&](void* out) { LayerNorm(in, out); });
      for (size_t r = 0; r < kRows; ++r) {
        double sum = 0, squares = 0, variance = 0;
        for (size_t i = 0; i < n; ++i) sum += x.wide[r * n + i];
        const double mean = sum / static_cast<double>(n);
        for (size_t i = 0; i < n; ++i) {
          const double value = x.wide[r * n + i];
          squares += value * value;
          variance += (value - mean) * (value - mean);
        }
        for (size_t i = 0; i < n; ++i) {
          const double value = x.wide[r * n + i], w = weight.wide[i];
          ExpectNear(type, root[r * n + i], w * value / std::sqrt(squares / static_cast<double>(n) + 1e-5),
                     1e-2);
          const double normal = (value - mean) / std::sqrt(variance / static_cast<double>(n) + 1e-5);
          ExpectNear(type, layer[r * n + i], normal * w + bias.wide[i], 1);
        }
      }
    }
  }
}

TEST(LayerTest, ANormWhoseWeightsCountFromOneIsRoundedOnceAndSoIsOneThatIsAskedTo) {
  for (const auto& [type, from_one] :
       {std::pair(DType::kFp32, true), {DType::kFp32, false}, {DType::kBf16, true}, {DType::kBf16, false}}) {
    for (const size_t n : kLengths) {
      const Elements x(type, Random(n, Values::kNormal, n)), weight(type, Random(n, Values::kNormal, 2));
      const NormRows in = {.type = type,
                           .x = x.bytes.data(),
                           .rows = 1,
                           .columns = n,
                           .weight = weight.bytes.data(),
                           .bias = nullptr,
                           .epsilon = 1e-5F,
                           .from_one = from_one,
                           .rounds_normal = false};
      const auto out = AtEveryLevel(type, n, [&](void* to) { RootMeanSquareNorm(in, to); });
      double squares = 0;
      for (const float value : x.wide) squares += static_cast<double>(value) * value;
      const double deviation = std::sqrt(squares / static_cast<double>(n) + 1e-5);
      for (size_t i = 0; i < n; ++i) {
        // Half a unit of bf16's last place is 2^-8 at most.
        const double exact = ((from_one ? 1.0 : 0.0) + weight.wide[i]) * x.wide[i] / deviation;
        EXPECT_NEAR(out[i], exact, std::fabs(exact) * (type == DType::kFp32 ? 1e-6 : 0x1p-8 + 1e-6));
      }
    }
  }
}

TEST(LayerTest, SoftCapsAreTangentsAtEveryLevel) {
  std::vector<float> values = Random(400, Values::kNormal, 1);
  for (size_t i = 0; i < values.size(); ++i) values[i] *= i % 3 == 0 ? 1 : i % 3 == 1 ? 60 : 1e-3F;
  values.insert(values.end(), {0.0F, 31.2F, 31.3F, -31.2F, 1e30F, -1e30F, 1e-30F});
  for (const DType type : kTypes) {
    for (const float cap : {1.0F, 30.0F, 50.0F}) {
      const Elements x(type, values);
      const auto out = AtEveryLevel(type, values.size(), [&](void* to) {
        std::memcpy(to, x.bytes.data(), x.bytes.size());
        SoftCap(type, to, cap, values.size());
      });
      for (size_t i = 0; i < values.size(); ++i) {
        const double exact = cap * std::tanh(static_cast<double>(x.wide[i]) / cap);
        EXPECT_NEAR(out[i], exact, std::fabs(exact) * (type == DType::kFp32 ? 3e-7 : 7e-3));
      }
    }
  }
  float nan = std::numeric_limits<float>::quiet_NaN();
  SoftCap(DType::kFp32, &nan, 30, 1);
  EXPECT_TRUE(std::isnan(nan));
}

TEST(LayerTest, ANormInPlaceIsTheSame) {
  const Elements weight(DType::kBf16, Random(40, Values::kNormal, 1));
  Elements x(DType::kBf16, Random(80, Values::kNormal, 2));
  std::vector<uint8_t> out(x.bytes.size());
  RootMeanSquareNorm({DType::kBf16, x.bytes.data(), 2, 40, weight.bytes.data(), nullptr, 1e-6F}, out.data());
  RootMeanSquareNorm({DType::kBf16, x.bytes.data(), 2, 40, weight.bytes.data(), nullptr, 1e-6F},
                     x.bytes.data());
  EXPECT_EQ(out, x.bytes);
}

double Exactly(Activation activation, double x) {
  switch (activation) {
    case Activation::kGelu:
      return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluNew:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
    case Activation::kQuickGelu:
      return x / (1 + std::exp(-1.702 * x));
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kTanh:
      break;
  }
  return std::tanh(x);
}

TEST(LayerTest, ActivationsAreThoseFunctionsAtEveryLevel) {
  std::vector<float> values = Random(400, Values::kNormal, 1);
  for (size_t i = 0; i < values.size(); ++i) values[i] *= i % 3 == 0 ? 1 : i % 3 == 1 ? 6 : 1e-3F;
  values.insert(values.end(), {0.0F, -0.0F, 80.0F, -80.0F, 1e4F, -1e4F});
  for (const DType type : kTypes) {
    const Elements x(type, values), times(type, Random(values.size(), Values::kNormal, 9));
    for (int a = 0; a <= static_cast<int>(Activation::kTanh); ++a) {
      const auto activation = static_cast<Activation>(a);
      SCOPED_TRACE(a);
      const size_t n = values.size();
      const auto plain = AtEveryLevel(
          type, n, [&](void* out) { Activate(type, activation, x.bytes.data(), nullptr, n, out); });
      const auto gated = AtEveryLevel(type, n, [&](void* out) {
        Activate(type, activation, x.bytes.data(), times.bytes.data(), n, out);
      });
      for (size_t i = 0; i < n; ++i) {
        // The two roundings inside of quick_gelu are those of the type, of which one is of 1.702 x.
        const double slack = activation == Activation::kQuickGelu ? 3 * std::fabs(x.wide[i])
                             : activation == Activation::kGelu    ? 0.01 + 0.3 * std::fabs(x.wide[i])
                                                                  : 0.01;
        ExpectNear(type, plain[i], Exactly(activation, x.wide[i]), slack);
        ExpectNear(type, gated[i], static_cast<double>(plain[i]) * times.wide[i], 0);
      }
    }
  }
}

TEST(LayerTest, AValueThatIsNoNumberStaysNone) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int a = 0; a <= static_cast<int>(Activation::kTanh); ++a) {
    float out = 0;
    Activate(DType::kFp32, static_cast<Activation>(a), &nan, nullptr, 1, &out);
    EXPECT_TRUE(std::isnan(out)) << a;
  }
}

TEST(LayerTest, HeadsAreTurnedByTheirAngles) {
  for (const DType type : kTypes) {
    for (const auto& [half, depth] : std::vector<std::pair<size_t, size_t>>{
             {1, 2}, {3, 6}, {16, 32}, {24, 48}, {64, 128}, {1, 3}, {12, 32}, {16, 49}}) {
      constexpr size_t kHeads = 3;
      const Elements x(type, Random(kHeads * depth, Values::kNormal, half));
      std::vector<float> cosine, sine;
      for (size_t i = 0; i < half; ++i) {
        const auto angle = static_cast<float>(i + 1);
        const Elements rounded(type, {std::cos(angle), std::sin(angle)});
        cosine.push_back(rounded.wide[0]);
        sine.push_back(rounded.wide[1]);
      }
      const auto turned = AtEveryLevel(type, x.wide.size(), [&](void* out) {
        std::memcpy(out, x.bytes.data(), x.bytes.size());
        RotateHeads({type, kHeads, depth, half}, out, cosine.data(), sine.data());
      });
      for (size_t h = 0; h < kHeads; ++h) {
        for (size_t i = 0; i < half; ++i) {
          const size_t first = h * depth + i, second = first + half;
          const double a = x.wide[first], b = x.wide[second], c = cosine[i], s = sine[i];
          ExpectNear(type, turned[first], a * c - b * s, std::fabs(a) + std::fabs(b));
          ExpectNear(type, turned[second], b * c + a * s, std::fabs(a) + std::fabs(b));
        }
        for (size_t i = 2 * half; i < depth; ++i) EXPECT_EQ(turned[h * depth + i], x.wide[h * depth + i]);
      }
    }
  }
}

TEST(LayerTest, SumsAreRoundedOnce) {
  for (const DType type : kTypes) {
    for (const size_t n : kLengths) {
      const Elements a(type, Random(n, Values::kNormal, 1)), b(type, Random(n, Values::kNormal, 2));
      const auto sum = AtEveryLevel(
          type, n, [&](void* out) { AddElements(type, a.bytes.data(), b.bytes.data(), n, out); });
      std::vector<float> exact;
      for (size_t i = 0; i < n; ++i) exact.push_back(a.wide[i] + b.wide[i]);
      EXPECT_TRUE(SameFloats(sum, Elements(type, exact).wide));
    }
  }
}

TEST(LayerTest, PairsAreSplitAndClamped) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> pairs = {1,    2,     8,     8,    -8,    -8,    7,    -7,
                                    kInf, -kInf, -kInf, kInf, 0.25F, -0.5F, kNan, kNan};
  for (const DType type : kTypes) {
    const Elements in(type, pairs);
    const size_t n = pairs.size() / 2;
    std::vector<uint8_t> first(n * BytesPerElement(type)), second(first.size());
    SplitClampedPairs(type, in.bytes.data(), 7, n, first.data(), second.data());
    EXPECT_TRUE(SameFloats(Widened(type, first), {1, 7, -8, 7, 7, -kInf, 0.25F, kNan}));
    EXPECT_TRUE(SameFloats(Widened(type, second), {3, 8, -6, -6, -6, 8, 0.5F, kNan}));
  }
}

}  // namespace
}  // namespace penstock::kernels::layer_test
