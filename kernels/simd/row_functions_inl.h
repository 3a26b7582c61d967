// A layer's norms, activations, rotation and sums (kernels/layer.h), written once over the 16-lane vectors.
// Included after query_attention_inl.h, whose exp they use.
#include "kernels/simd/table.h"

namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE {

// As a value of the type, widened again.
template <int kType>
inline F RoundedTo(F x) {
  if constexpr (kType == 0) return x;
  return FromBits(Shl<16>(RoundBf16(x)));
}

template <int kType>
inline const unsigned char* RowOf(const void* x, size_t row, size_t columns) {
  return static_cast<const unsigned char*>(x) + row * columns * (kType == 0 ? 4 : 2);
}
template <int kType>
inline unsigned char* RowOf(void* x, size_t row, size_t columns) {
  return static_cast<unsigned char*>(x) + row * columns * (kType == 0 ? 4 : 2);
}

// 1 / sqrt(mean of squares of what is left of the elements, + epsilon).
template <int kType>
inline F InverseDeviation(const void* x, size_t columns, F less, float epsilon) {
  F squares = Set(0);
  ForVectors(columns, [&]<bool kTail>(size_t i, size_t n) {
    F value = Sub(Element<kType>::template Load<kTail>(x, i, n), less);
    if constexpr (kTail) {  // nothing of what is beyond the last
      alignas(64) float lanes[16] = {};
      StoreF<true>(lanes, value, n);
      value = LoadF<false>(lanes, 16);
    }
    squares = Fma(value, value, squares);
  });
  const float mean = SumOfLanes(squares) / static_cast<float>(columns);
  return Div(Set(1), Sqrt(Set(mean + epsilon)));
}

template <int kType>
void RootNorm(const NormArguments& a) {
  for (size_t row = 0; row < a.rows; ++row) {
    const unsigned char* const x = RowOf<kType>(a.x, row, a.columns);
    unsigned char* const out = RowOf<kType>(a.out, row, a.columns);
    const F scale = InverseDeviation<kType>(x, a.columns, Set(0), a.epsilon);
    ForVectors(a.columns, [&]<bool kTail>(size_t i, size_t n) {
      const F normal = Mul(Element<kType>::template Load<kTail>(x, i, n), scale);
      const F weight = Element<kType>::template Load<kTail>(a.weight, i, n);
      const F product = a.from_one        ? Mul(normal, Add(Set(1), weight))
                        : a.rounds_normal ? Mul(weight, RoundedTo<kType>(normal))
                                          : Mul(weight, normal);
      Element<kType>::template Store<kTail>(out, i, product, n);
    });
  }
}

template <int kType>
void LayerNormRows(const NormArguments& a) {
  for (size_t row = 0; row < a.rows; ++row) {
    const unsigned char* const x = RowOf<kType>(a.x, row, a.columns);
    unsigned char* const out = RowOf<kType>(a.out, row, a.columns);
    F sum = Set(0);
    ForVectors(a.columns, [&]<bool kTail>(size_t i, size_t n) {
      sum = Fma(Element<kType>::template Load<kTail>(x, i, n), Set(1), sum);
    });
    const F mean = Set(SumOfLanes(sum) / static_cast<float>(a.columns));
    const F scale = InverseDeviation<kType>(x, a.columns, mean, a.epsilon);
    ForVectors(a.columns, [&]<bool kTail>(size_t i, size_t n) {
      const F normal = Mul(Sub(Element<kType>::template Load<kTail>(x, i, n), mean), scale);
      const F weight = Element<kType>::template Load<kTail>(a.weight, i, n);
      const F bias = Element<kType>::template Load<kTail>(a.bias, i, n);
      Element<kType>::template Store<kTail>(out, i, Fma(normal, weight, bias), n);
    });
  }
}

template <int kType>
void Rotate(const HeadsArguments& a) {
  for (size_t head = 0; head < a.heads; ++head) {
    unsigned char* const first = RowOf<kType>(a.x, head, a.depth);
    unsigned char* const second = RowOf<kType>(first, 1, a.half);
    ForVectors(a.half, [&]<bool kTail>(size_t i, size_t n) {
      const F x = Element<kType>::template Load<kTail>(first, i, n);
      const F y = Element<kType>::template Load<kTail>(second, i, n);
      const F c = LoadF<kTail>(a.cosine + i, n), s = LoadF<kTail>(a.sine + i, n);
      Element<kType>::template Store<kTail>(first, i,
                                            Sub(RoundedTo<kType>(Mul(x, c)), RoundedTo<kType>(Mul(y, s))), n);
      Element<kType>::template Store<kTail>(second, i,
                                            Add(RoundedTo<kType>(Mul(y, c)), RoundedTo<kType>(Mul(x, s))), n);
    });
  }
}

// exp(-|x|).
inline F ExpOfMagnitude(F x) { return ExpOfNegative(FromBits(Or(Bits(x), SetI(0x80000000u)))); }
inline M IsNegative(F x) { return GreaterS(SetI(0), Bits(x)); }
inline F Choose(M m, F yes, F no) { return FromBits(Select(m, Bits(yes), Bits(no))); }

inline F Sigmoid(F x) {
  const F e = ExpOfMagnitude(x);
  return Div(Choose(IsNegative(x), e, Set(1)), Add(Set(1), e));
}

// The normal distribution's function.
inline F NormalBelow(F x) {
  const F z = FromBits(Magnitude(Bits(Mul(x, Set(0.70710678f)))));
  const F t = Div(Set(1), Fma(Set(0.3275911f), z, Set(1)));
  F p = Set(1.061405429f);
  for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = Fma(p, t, Set(c));
  const F beyond = Mul(Set(0.5f), Mul(Mul(p, t), ExpOfNegative(Sub(Set(0), Mul(z, z)))));
  return Choose(IsNegative(x), beyond, Sub(Set(1), beyond));
}

template <int kType, int kActivation>
inline F Activated(F x) {
  if constexpr (kActivation == 0) return Mul(x, NormalBelow(x));
  if constexpr (kActivation == 1) {
    const F cubed = Mul(Mul(x, x), x);
    return Mul(x, Sigmoid(Mul(Set(1.5957691f), Fma(Set(0.044715f), cubed, x))));
  }
  if constexpr (kActivation == 2)
    return Mul(x, RoundedTo<kType>(Sigmoid(RoundedTo<kType>(Mul(x, Set(1.702f))))));
  if constexpr (kActivation == 3) return Choose(IsNan(Bits(x)), x, FromBits(MaxS(Bits(x), SetI(0))));
  return Mul(x, Sigmoid(x));
}

template <int kType, int kActivation>
void ActivateElements(const void* x, const void* times, size_t n, void* out) {
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    F value = Activated<kType, kActivation>(Element<kType>::template Load<kTail>(x, i, count));
    if (times != nullptr)
      value = Mul(RoundedTo<kType>(value), Element<kType>::template Load<kTail>(times, i, count));
    Element<kType>::template Store<kTail>(out, i, value, count);
  });
}

template <int kType>
void SoftCapAll(void* x, float cap, size_t n) {
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    const F part = RoundedTo<kType>(Div(Element<kType>::template Load<kTail>(x, i, count), Set(cap)));
    const F tangent = RoundedTo<kType>(HyperbolicTangent(part));
    Element<kType>::template Store<kTail>(x, i, Mul(tangent, Set(cap)), count);
  });
}

template <int kType>
void AddAll(const void* a, const void* b, size_t n, void* out) {
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    const F sum = Add(Element<kType>::template Load<kTail>(a, i, count),
                      Element<kType>::template Load<kTail>(b, i, count));
    Element<kType>::template Store<kTail>(out, i, sum, count);
  });
}

}  // namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE
