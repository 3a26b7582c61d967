// Attention of single queries (kernels/attention.h), written once over the 16-lane vectors. Included after
// elementwise_inl.h.
#include "kernels/simd/table.h"

namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE {

inline constexpr size_t kScoreBlock = 64;
inline constexpr float kLeastExponent = -86;  // whose power is a normal number

// exp(x) of x <= 0.
inline F ExpOfNegative(F x) {
  // Bits of negative numbers, as integers, grow as the numbers fall.
  const I bits = Or(Bits(x), SetI(0x80000000u));
  const F clamped = FromBits(MinS(bits, Bits(Set(kLeastExponent))));
  const F rounder = Set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
  const F rounded = Fma(clamped, Set(1.44269504f), rounder);
  const F n = Sub(rounded, rounder);
  F r = Fma(n, Set(-0.693359375f), clamped);
  r = Fma(n, Set(2.12194440e-4f), r);
  constexpr float kCoefficients[] = {
      1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f};
  F p = Set(1.9875691500e-4f);
  for (const float c : kCoefficients) p = Fma(p, r, Set(c));
  const F power = FromBits(AddI(Bits(p), Shl<23>(Bits(rounded))));
  return FromBits(Select(IsNan(bits), bits, Bits(power)));
}

// tanh(x): of magnitudes below 0.625 a polynomial (Cephes, tanhf), else (1 - e) / (1 + e) with e = exp(-2
// |x|).
inline F HyperbolicTangent(F x) {
  const I sign = And(Bits(x), SetI(0x80000000u));
  const F size = FromBits(Magnitude(Bits(x)));
  const F square = Mul(x, x);
  F p = Set(-5.70498872745e-3f);
  for (const float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
    p = Fma(p, square, Set(c));
  const F small = Fma(Mul(p, square), x, x);
  const F e = ExpOfNegative(Mul(size, Set(-2)));
  const F large = FromBits(Or(Bits(Div(Sub(Set(1), e), Add(Set(1), e))), sign));
  return FromBits(Select(GreaterS(Bits(Set(0.625f)), Bits(size)), Bits(small), Bits(large)));
}

// Of `count` positions, whose keys lie `record` elements apart.
template <int kType, size_t kAtOnce>
inline void Scores(const void* query, const unsigned char* keys, size_t record_bytes, size_t depth,
                   float scale, float* scores) {
  F sums[kAtOnce];
  for (size_t p = 0; p < kAtOnce; ++p) sums[p] = Set(0);
  ForVectors(depth, [&]<bool kTail>(size_t k, size_t lanes) {
    const F q = Element<kType>::template Load<kTail>(query, k, lanes);
    for (size_t p = 0; p < kAtOnce; ++p)
      sums[p] = Fma(q, Element<kType>::template Load<kTail>(keys + p * record_bytes, k, lanes), sums[p]);
  });
  for (size_t p = 0; p < kAtOnce; ++p) scores[p] = scale * SumOfLanes(sums[p]);
}

template <int kType>
inline void AttendHead(const AttentionArguments& a, size_t head) {
  constexpr size_t kWidth = kType == 0 ? 4 : 2;
  const size_t key_head = head / (a.heads / a.key_heads);
  const bool apart = a.value_depth == 0;  // values lie behind all keys
  const size_t value_depth = apart ? a.depth : a.value_depth;
  const size_t record_bytes = (apart ? 2 : 1) * a.key_heads * a.depth * kWidth;
  const size_t value_at = (apart ? a.key_heads * a.depth : a.depth - value_depth) * kWidth;
  const auto* const query = static_cast<const unsigned char*>(a.queries) + head * a.depth * kWidth;
  const auto* keys = static_cast<const unsigned char*>(a.records) + key_head * a.depth * kWidth;
  float* const out = a.out + head * value_depth;
  __builtin_memset(out, 0, value_depth * sizeof(float));
  alignas(64) float powers[kScoreBlock];
  float most = 0, sum = 0;
  for (size_t first = 0; first < a.positions; first += kScoreBlock, keys += kScoreBlock * record_bytes) {
    const size_t count = a.positions - first < kScoreBlock ? a.positions - first : kScoreBlock;
    size_t p = 0;
    for (; p + 4 <= count; p += 4)
      Scores<kType, 4>(query, keys + p * record_bytes, record_bytes, a.depth, a.scale, powers + p);
    for (; p < count; ++p)
      Scores<kType, 1>(query, keys + p * record_bytes, record_bytes, a.depth, a.scale, powers + p);
    if (a.cap > 0) {
      ForVectors(count, [&]<bool kTail>(size_t i, size_t n) {
        const F tangent = HyperbolicTangent(Div(LoadF<kTail>(powers + i, n), Set(a.cap)));
        StoreF<kTail>(powers + i, Mul(tangent, Set(a.cap)), n);
      });
    }
    const float before = most;
    if (first == 0) most = powers[0];
    for (p = 0; p < count; ++p) most = powers[p] > most ? powers[p] : most;
    alignas(64) float factors[16];
    StoreF<false>(factors, ExpOfNegative(Set(before - most)), 16);
    const float factor = first == 0 ? 0 : factors[0];
    F lanes = Set(0);
    ForVectors(count, [&]<bool kTail>(size_t i, size_t n) {
      StoreF<kTail>(powers + i, ExpOfNegative(Sub(LoadF<kTail>(powers + i, n), Set(most))), n);
      lanes = Add(lanes, LoadF<kTail>(powers + i, n));  // without what is beyond the last
    });
    sum = __builtin_fmaf(sum, factor, SumOfLanes(lanes));
    const unsigned char* const values = keys + value_at;
    ForVectors(value_depth, [&]<bool kTail>(size_t d, size_t n) {
      F mixed = Mul(LoadF<kTail>(out + d, n), Set(factor));
      for (size_t i = 0; i < count; ++i) {
        const F value = Element<kType>::template Load<kTail>(values + i * record_bytes, d, n);
        mixed = Fma(Set(powers[i]), value, mixed);
      }
      StoreF<kTail>(out + d, mixed, n);
    });
  }
  float factor = 1;
  if (a.sinks != nullptr) {
    const float sink = a.sinks[head], top = sink > most ? sink : most;
    alignas(64) float factors[16], power[16];
    StoreF<false>(factors, ExpOfNegative(Set(most - top)), 16);
    StoreF<false>(power, ExpOfNegative(Set(sink - top)), 16);
    factor = factors[0];
    sum = __builtin_fmaf(sum, factor, power[0]);
  }
  ForVectors(value_depth, [&]<bool kTail>(size_t d, size_t n) {
    const F mixed = Mul(LoadF<kTail>(out + d, n), Set(factor));
    StoreF<kTail>(out + d, Div(mixed, Set(sum)), n);
  });
}

template <int kType>
void Attend(const AttentionArguments& a) {
  const size_t group = a.heads / a.key_heads;
  for (size_t head = a.first * group; head < a.end * group; ++head) AttendHead<kType>(a, head);
}

}  // namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE
