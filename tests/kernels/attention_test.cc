#include "kernels/attention.h"

#include <algorithm>
#include <limits>

#include "kernels/layer.h"
#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::attention_test {
namespace {

struct Case {
  DType type;
  size_t heads, key_heads, depth, positions;
  float scale;
  Values kind = Values::kNormal;
  float cap = 0;
  std::vector<float> sinks = {};  // of the heads
  size_t value_depth = 0;

  size_t of_value() const { return value_depth > 0 ? value_depth : depth; }
  size_t record() const { return (value_depth > 0 ? 1 : 2) * key_heads * depth; }
  // Where values begin behind their keys.
  size_t value_at() const { return value_depth > 0 ? depth - value_depth : key_heads * depth; }
};

// What an element of `type` holds after `value` was put there, and its bytes.
std::vector<uint8_t> Store(DType type, std::vector<float>* values) {
  std::vector<uint8_t> bytes(values->size() * BytesPerElement(type));
  for (size_t i = 0; i < values->size(); ++i) {
    float& value = (*values)[i];
    if (type == DType::kFp32) {
      std::memcpy(&bytes[4 * i], &value, 4);
      continue;
    }
    const uint16_t half = type == DType::kBf16 ? FloatToBf16(value) : FloatToFp16(value);
    value = type == DType::kBf16 ? Bf16ToFloat(half) : Fp16ToFloat(half);
    std::memcpy(&bytes[2 * i], &half, 2);
  }
  return bytes;
}

struct Input {
  explicit Input(const Case& c)
      : queries(Random(c.heads * c.depth, c.kind, c.positions)),
        records(Random(c.positions * c.record(), c.kind, c.depth + 7)),
        query_bytes(Store(c.type, &queries)),
        record_bytes(Store(c.type, &records)) {}
  std::vector<float> queries, records;
  std::vector<uint8_t> query_bytes, record_bytes;
};

float SumOfSixteen(float* s) {
  for (const int width : {8, 4, 2, 1}) {
    for (int j = 0; j < width; ++j) s[j] += s[j + width];
  }
  return s[0];
}

float Exp(float x) {
  if (std::isnan(x)) return x;
  x = std::max(x, -86.0f);
  const float n = std::fmaf(x, 1.44269504f, 12582912.0f) - 12582912.0f;
  float r = std::fmaf(n, -0.693359375f, x);
  r = std::fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  for (const float c :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f})
    p = std::fmaf(p, r, c);
  return std::ldexp(p, static_cast<int>(n));
}

// The definition, word by word.
std::vector<float> Definition(const Case& c, const Input& in) {
  std::vector<float> out(c.heads * c.of_value(), 0);
  for (size_t h = 0; h < c.heads; ++h) {
    const size_t g = h / (c.heads / c.key_heads);
    const auto key = [&](size_t p) { return &in.records[p * c.record() + g * c.depth]; };
    float* const of_head = &out[h * c.of_value()];
    float most = 0, sum = 0;
    for (size_t first = 0; first < c.positions; first += 64) {
      const size_t count = std::min<size_t>(64, c.positions - first);
      float e[64];
      for (size_t p = 0; p < count; ++p) {
        float lanes[16] = {};
        for (size_t d = 0; d < (c.depth + 15) / 16 * 16; ++d) {
          lanes[d % 16] = d < c.depth
                              ? std::fmaf(in.queries[h * c.depth + d], key(first + p)[d], lanes[d % 16])
                              : std::fmaf(0, 0, lanes[d % 16]);
        }
        e[p] = c.scale * SumOfSixteen(lanes);
        if (c.cap > 0) SoftCap(DType::kFp32, &e[p], c.cap, 1);
      }
      const float before = most;
      if (first == 0) most = e[0];
      for (size_t p = 0; p < count; ++p) most = e[p] > most ? e[p] : most;
      const float factor = first == 0 ? 0 : Exp(before - most);
      float lanes[16] = {};
      for (size_t p = 0; p < count; ++p) {
        e[p] = Exp(e[p] - most);
        lanes[p % 16] += e[p];
      }
      sum = std::fmaf(sum, factor, SumOfSixteen(lanes));
      for (size_t d = 0; d < c.of_value(); ++d) {
        of_head[d] *= factor;
        for (size_t p = 0; p < count; ++p)
          of_head[d] = std::fmaf(e[p], key(first + p)[c.value_at() + d], of_head[d]);
      }
    }
    if (!c.sinks.empty()) {
      const float top = c.sinks[h] > most ? c.sinks[h] : most, factor = Exp(most - top);
      sum = std::fmaf(sum, factor, Exp(c.sinks[h] - top));
      for (size_t d = 0; d < c.of_value(); ++d) of_head[d] *= factor;
    }
    for (size_t d = 0; d < c.of_value(); ++d) of_head[d] /= sum;
  }
  return out;
}

void ExpectDefinition(const Case& c) {
  const Input in(c);
  const std::vector<float> expected = Definition(c, in);
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    Misaligned<uint8_t> queries(in.query_bytes, 2), records(in.record_bytes, 2);
    Misaligned<float> out(std::vector<float>(expected.size(), 7.0f), 12);
    for (size_t head = 0; head < c.key_heads; ++head) {  // each by itself, the last first
      const size_t first = c.key_heads - 1 - head;
      Attend({c.type, records.data(), c.positions, c.key_heads, c.depth, c.cap,
              c.sinks.empty() ? nullptr : c.sinks.data(), c.value_depth},
             queries.data(), c.heads, c.scale, first, first + 1, out.data());
    }
    ASSERT_TRUE(out.GuardsIntact());
    ASSERT_TRUE(SameFloats(out.Get(), expected))
        << SimdLevelName(level) << ", " << c.heads << " heads of " << c.depth << ", " << c.positions;
  }
}

constexpr DType kTypes[] = {DType::kFp32, DType::kBf16, DType::kFp16};

TEST(AttentionTest, EveryLevelHasTheBitsOfTheDefinition) {
  for (const DType type : kTypes) {
    for (const size_t positions : {1, 3, 15, 16, 17, 63, 64, 65, 128, 200}) {
      for (const size_t depth : {1, 16, 24, 33, 64}) {
        ExpectDefinition({type, 4, 2, depth, positions, 0.3f});
        ExpectDefinition({type, 3, 3, depth, positions, 4.0f});
        ExpectDefinition({type, 4, 2, depth, positions, 2.0f, Values::kNormal, 5.0f});
        ExpectDefinition(
            {type, 4, 2, depth, positions, 0.5f, Values::kNormal, 0, {-40.0f, 0.3f, 2.5f, 60.0f}});
        for (const size_t of_value : {depth, depth - depth / 3}) {
          ExpectDefinition({type, 4, 1, depth, positions, 0.3f, Values::kNormal, 0, {}, of_value});
          ExpectDefinition({type, 4, 2, depth, positions, 0.3f, Values::kNormal, 3.0f, {}, of_value});
        }
      }
    }
    for (const Values kind : AllValues()) ExpectDefinition({type, 2, 1, 20, 70, 0.5f, kind});
  }
}

TEST(AttentionTest, ItIsTheSoftmaxOfTheScores) {
  for (const float scale : {0.05f, 1.0f, 30.0f}) {
    const Case c = {DType::kBf16, 6, 2, 40, 300, scale};
    const Input in(c);
    std::vector<float> out(c.heads * c.depth);
    Attend({c.type, in.record_bytes.data(), c.positions, c.key_heads, c.depth}, in.query_bytes.data(),
           c.heads, scale, 0, c.key_heads, out.data());
    for (size_t h = 0; h < c.heads; ++h) {
      const auto record = [&](size_t p) { return &in.records[(p * 2 * c.key_heads + h / 3) * c.depth]; };
      std::vector<double> s(c.positions);
      for (size_t p = 0; p < c.positions; ++p) {
        for (size_t d = 0; d < c.depth; ++d)
          s[p] += double{in.queries[h * c.depth + d]} * double{record(p)[d]} * double{scale};
      }
      const double most = *std::max_element(s.begin(), s.end());
      double sum = 0;
      for (double& score : s) sum += score = std::exp(score - most);
      for (size_t d = 0; d < c.depth; ++d) {
        double mixed = 0;
        for (size_t p = 0; p < c.positions; ++p)
          mixed += s[p] / sum * double{record(p)[c.key_heads * c.depth + d]};
        // The scores' own rounding, as much as exp makes of it, and that of the sums.
        EXPECT_NEAR(out[h * c.depth + d], mixed, 2e-6 * (1 + double{scale} * 40)) << scale;
      }
    }
  }
}

TEST(AttentionTest, ASinkTakesItsShareOfTheSoftmaxAndGivesNoValue) {
  const Case c = {DType::kFp32, 2, 1, 24, 150, 1.0f};
  const Input in(c);
  std::vector<float> plain(2 * c.depth), out(plain.size());
  const AttentionRecords records = {c.type, in.records.data(), c.positions, 1, c.depth};
  Attend(records, in.queries.data(), 2, c.scale, 0, 1, plain.data());
  const float sinks[] = {1.5f, -2.0f};
  AttentionRecords with = records;
  with.sinks = sinks;
  Attend(with, in.queries.data(), 2, c.scale, 0, 1, out.data());
  for (size_t h = 0; h < 2; ++h) {
    double sum = 0;
    for (size_t p = 0; p < c.positions; ++p) {
      double score = 0;
      for (size_t d = 0; d < c.depth; ++d)
        score += double{in.queries[h * c.depth + d]} * double{in.records[p * 2 * c.depth + d]};
      sum += std::exp(score);
    }
    const double share = sum / (sum + std::exp(double{sinks[h]}));
    for (size_t d = 0; d < c.depth; ++d)
      EXPECT_NEAR(out[h * c.depth + d], share * double{plain[h * c.depth + d]}, 1e-4);
  }
}

TEST(AttentionTest, AScoreThatIsNotANumberMakesAllOfItsHeadSo) {
  constexpr size_t kDepth = 16;
  const Case c = {DType::kFp32, 2, 2, kDepth, 130, 1.0f};
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    Input in(c);
    in.records[100 * 4 * kDepth + kDepth] = std::numeric_limits<float>::quiet_NaN();  // the second's key
    std::vector<float> out(2 * kDepth);
    Attend({c.type, in.records.data(), c.positions, 2, kDepth}, in.queries.data(), 2, 1.0f, 0, 2, out.data());
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i >= kDepth) << i;
  }
}

}  // namespace
}  // namespace penstock::kernels::attention_test
