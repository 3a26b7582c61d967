// Conversions, sums and 8-bit codes, written once over the 16-lane vectors. Included after one of vec_*.h,
// into that level's namespace; see kernels/float16.h, split_master.h, reduce.h and quantize.h for what each
// must do.
#include "kernels/simd/table.h"

namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE {

// The lambdas here hold vectors beside flags and are inlined: no one stores them.
// NOLINTBEGIN(clang-analyzer-optin.performance.Padding)

// Runs body.template operator()<kTail>(i, count) over [0, n) in vectors of 16, the last one possibly shorter.
template <class Body>
inline void ForVectors(size_t n, const Body& body) {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) body.template operator()<false>(i, 16);
  if (i < n) body.template operator()<true>(i, n - i);
}

inline I Magnitude(I bits) { return And(bits, SetI(0x7FFFFFFFu)); }
inline M IsNan(I bits) { return GreaterS(Magnitude(bits), SetI(0x7F800000u)); }

// bf16 in the low halves, rounded to nearest even; a NaN becomes quiet.
inline I RoundBf16(F x) {
  const I bits = Bits(x);
  const I upper = Shr<16>(bits);
  const I odd = And(upper, SetI(1));
  const I rounded = Shr<16>(AddI(bits, AddI(odd, SetI(0x7FFF))));
  return Select(IsNan(bits), Or(upper, SetI(0x40)), rounded);
}

// bf16 rounded up with the probability of the part cut off; `draw` has 16 random bits. Infinities and NaN as
// above.
inline I RoundBf16Stochastic(F x, I draw) {
  const I bits = Bits(x);
  const I rounded = Shr<16>(AddI(bits, draw));
  return Select(GreaterS(SetI(0x7F800000u), Magnitude(bits)), rounded, RoundBf16(x));
}

// Reads elements of a DType as fp32.
template <int kType>
struct Element;
template <>
struct Element<0> {
  template <bool kTail>
  static F Load(const void* p, size_t i, size_t count) {
    return LoadF<kTail>(static_cast<const float*>(p) + i, count);
  }
  template <bool kTail>
  static void Store(void* p, size_t i, F x, size_t count) {
    StoreF<kTail>(static_cast<float*>(p) + i, x, count);
  }
};
template <>
struct Element<1> {
  template <bool kTail>
  static F Load(const void* p, size_t i, size_t count) {
    return LoadBf16<kTail>(static_cast<const uint16_t*>(p) + i, count);
  }
  template <bool kTail>
  static void Store(void* p, size_t i, F x, size_t count) {
    StoreBf16<kTail>(static_cast<uint16_t*>(p) + i, x, count);
  }
};
template <>
struct Element<2> {
  template <bool kTail>
  static F Load(const void* p, size_t i, size_t count) {
    return LoadHalf<kTail>(static_cast<const uint16_t*>(p) + i, count);
  }
  template <bool kTail>
  static void Store(void* p, size_t i, F x, size_t count) {
    StoreHalf<kTail>(static_cast<uint16_t*>(p) + i, x, count);
  }
};

template <int kType>
void ToFp32(const uint16_t* in, float* out, size_t n) {
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    StoreF<kTail>(out + i, Element<kType>::template Load<kTail>(in, i, count), count);
  });
}
template <int kType>
void FromFp32(const float* in, uint16_t* out, size_t n) {
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    Element<kType>::template Store<kTail>(out, i, LoadF<kTail>(in + i, count), count);
  });
}
template <int kType>
void Accumulate(const void* in, float* acc, size_t n) {
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    const F sum = Add(LoadF<kTail>(acc + i, count), Element<kType>::template Load<kTail>(in, i, count));
    StoreF<kTail>(acc + i, sum, count);
  });
}
template <int kType>
void Scale(void* x, float factor, size_t n) {
  const F factors = Set(factor);
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    Element<kType>::template Store<kTail>(
        x, i, Mul(Element<kType>::template Load<kTail>(x, i, count), factors), count);
  });
}

inline void Split(const float* master, uint16_t* master_high, int16_t* master_low, size_t n) {
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    StoreSplit<kTail>(master_high + i, master_low + i, LoadF<kTail>(master + i, count), count);
  });
}
inline void Join(const uint16_t* master_high, const int16_t* master_low, float* master, size_t n) {
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    StoreF<kTail>(master + i, LoadSplit<kTail>(master_high + i, master_low + i, count), count);
  });
}

// The sixteen lanes of a partial sum, added in the order of kernels/reduce.h.
inline double CombineLanes(const D& sums) {
  double s[16];
  StoreD(s, sums);
  for (int width = 8; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) s[j] += s[j + width];
  }
  return s[0];
}

template <int kType>
double BlockSquares(const void* in, size_t n) {
  D sums = ZeroD();
  size_t i = 0;
  for (; i + 16 <= n; i += 16) AddSquare(&sums, Element<kType>::template Load<false>(in, i, 16));
  if (i < n) AddSquare(&sums, Element<kType>::template Load<true>(in, i, n - i));
  return CombineLanes(sums);
}

template <int kType>
bool AllFinite(const void* in, size_t n) {
  I most = SetI(0);
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    most = MaxS(most, Magnitude(Bits(Element<kType>::template Load<false>(in, i, 16))));
  if (i < n) most = MaxS(most, Magnitude(Bits(Element<kType>::template Load<true>(in, i, n - i))));
  return ReduceMaxS(most) < 0x7F800000u;
}

// Random bits for stochastic rounding: a 32-bit mix (constants: Wellons, "hash-prospector", lowbias32) of the
// element's position and a key. The low half serves the first moment, the high half the second.
inline I Draw(uint32_t key, uint32_t position) {
  I x = Xor(AddI(SetI(position), Iota()), SetI(key));
  x = MulI(Xor(x, Shr<16>(x)), SetI(0x7FEB352Du));
  x = MulI(Xor(x, Shr<15>(x)), SetI(0x846CA68Bu));
  return Xor(x, Shr<16>(x));
}
// splitmix64's finalizer (Steele et al. 2014), folded.
inline uint32_t DrawKey(uint64_t seed) {
  seed += 0x9E3779B97F4A7C15u;
  seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9u;
  seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EBu;
  seed ^= seed >> 31;
  return static_cast<uint32_t>(seed ^ (seed >> 32));
}

// The two 8-bit formats: fp32 bits of the least normal value, what to subtract from (bits >> 20) to get its
// code, the factor that turns denormal values into codes, and the largest code.
template <int kCode>
struct Format8;
template <>
struct Format8<0> {  // Code8::kSigned: 4 exponent bits
  static constexpr uint32_t kLeastNormal = (127u - 14u) << 23, kOffset = (127u - 15u) << 3, kMost = 0x7F;
  static constexpr float kDenormals = 0x1p17f, kDenormalStep = 0x1p-17f;
};
template <>
struct Format8<1> {  // Code8::kUnsigned: 5 exponent bits
  static constexpr uint32_t kLeastNormal = (127u - 30u) << 23, kOffset = (127u - 31u) << 3, kMost = 0xFF;
  static constexpr float kDenormals = 0x1p33f, kDenormalStep = 0x1p-33f;
};

template <int kCode>
float Encode8(const float* in, uint8_t* codes, size_t n, const Rounding& rounding) {
  using Format = Format8<kCode>;
  I most = SetI(0);
  ForVectors(n, [&]<bool kTail>(size_t i, size_t count) {
    most = MaxS(most, Magnitude(Bits(LoadF<kTail>(in + i, count))));
  });
  // Magnitudes compare like their bits, and what is not finite is above all: it makes the scale a NaN.
  const uint32_t most_bits = ReduceMaxS(most);
  float largest;
  __builtin_memcpy(&largest, &most_bits, sizeof(largest));
  const bool finite = most_bits < 0x7F800000u;
  const float scale = finite ? largest / 1.875f : __builtin_nanf("");
  if (most_bits == 0 || !finite) {  // the scale says it all
    __builtin_memset(codes, 0, n);
    return scale;
  }
  const F scales = Set(scale);
  const uint32_t key = DrawKey(rounding.seed);
  const uint32_t position = static_cast<uint32_t>(rounding.first_element);
  const bool stochastic = rounding.stochastic;
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    const I bits = Bits(LoadF<kTail>(in + i, count));
    const I magnitude = Magnitude(bits);
    const I y = Bits(Div(FromBits(magnitude), scales));
    I draw = SetI(0x8000);
    if (stochastic) {
      draw = Draw(key, position + static_cast<uint32_t>(i));
      draw = kCode == 0 ? And(draw, SetI(0xFFFF)) : Shr<16>(draw);
    }
    const I normal = SubI(Shr<20>(AddI(y, Shl<4>(draw))), SetI(Format::kOffset));
    const F fraction = Mul(ToFloat(draw), Set(0x1p-16f));
    const I denormal = Truncate(Add(Mul(FromBits(y), Set(Format::kDenormals)), fraction));
    I code = Select(GreaterS(SetI(Format::kLeastNormal), y), denormal, normal);
    code = MinS(code, SetI(Format::kMost));
    if constexpr (kCode == 0) {
      code = Or(code, And(Shr<24>(bits), SetI(0x80)));
    } else {
      code = Select(GreaterS(magnitude, SetI(0)), MaxS(code, SetI(1)), code);
    }
    StoreU8<kTail>(codes + i, code, count);
  });
  return scale;
}

template <int kCode>
void Decode8(const uint8_t* codes, float scale, float* out, size_t n) {
  using Format = Format8<kCode>;
  const F scales = Set(scale);
  ForVectors(n, [=]<bool kTail>(size_t i, size_t count) {
    const I code = LoadU8<kTail>(codes + i, count);
    const I magnitude = And(code, SetI(Format::kMost));
    const I normal = Shl<20>(AddI(magnitude, SetI(Format::kOffset)));
    const I denormal = Bits(Mul(ToFloat(magnitude), Set(Format::kDenormalStep)));
    I value = Select(GreaterS(SetI(8), magnitude), denormal, normal);
    if constexpr (kCode == 0) value = Or(value, Shl<24>(And(code, SetI(0x80))));
    StoreF<kTail>(out + i, Mul(FromBits(value), scales), count);
  });
}

// A group of weights to codes, by kernels/weight_code.h; the bf16 bits of its scale, a NaN's where a value is
// not finite. What the last block of codes is padded with is q = 0.
template <int kBits, int kType>
uint16_t EncodeWeightGroup(const void* in, size_t n, uint8_t* codes) {
  constexpr int kMost = kBits == 8 ? 127 : 7, kZero = kMost + 1;
  const size_t padded = (n + 31) / 32 * 32;
  I most = SetI(0);
  ForVectors(n, [&]<bool kTail>(size_t i, size_t count) {
    most = MaxS(most, Magnitude(Bits(Element<kType>::template Load<kTail>(in, i, count))));
  });
  const uint32_t most_bits = ReduceMaxS(most);  // magnitudes compare like their bits
  const bool finite = most_bits < 0x7F800000u;
  float step = 0;
  if (finite) __builtin_memcpy(&step, &most_bits, sizeof(step));
  step /= static_cast<float>(kMost);
  uint32_t scale_bits = 0;
  __builtin_memcpy(&scale_bits, &step, sizeof(scale_bits));
  scale_bits = (scale_bits + 0xFFFFu) & 0xFFFF0000u;  // up to a bf16
  if (scale_bits == 0 || !finite) {
    __builtin_memset(codes, kBits == 8 ? kZero : kZero | kZero << 4, padded * kBits / 8);
    return finite ? 0 : 0x7FC0;
  }
  const F scale = FromBits(SetI(scale_bits));
  const auto code = [=](size_t i) {
    if (i >= n) return SetI(kZero);
    const F value = i + 16 <= n ? Element<kType>::template Load<false>(in, i, 16)
                                : Element<kType>::template Load<true>(in, i, n - i);
    // 1.5 * 2^23 has units in its last place: the sum is rounded to nearest, ties to even, and its low bits
    // count from there.
    const I rounded = Bits(Add(Div(value, scale), Set(0x1.8p23f)));
    return AddI(SubI(rounded, SetI(0x4B400000u)), SetI(kZero));
  };
  if constexpr (kBits == 8) {
    for (size_t i = 0; i < padded; i += 16) StoreU8<false>(codes + i, code(i), 16);
  } else {
    for (size_t i = 0; i < padded; i += 32)
      StoreU8<false>(codes + i / 2, Or(code(i), Shl<4>(code(i + 16))), 16);
  }
  return static_cast<uint16_t>(scale_bits >> 16);
}

// Rows of coded weights, by the layout in kernels/weight_code.h. Padding is read with the last block.
template <int kBits, int kType>
void DecodeWeightRow(const uint8_t* scales, const uint8_t* codes, size_t group, void* out, size_t n) {
  for (size_t begin = 0; begin < n; begin += group, scales += 2) {
    uint16_t half;
    __builtin_memcpy(&half, scales, 2);
    const F scale = FromBits(SetI(static_cast<uint32_t>(half) << 16));
    const size_t end = n - begin < group ? n : begin + group;
    const auto put = [=](I code, size_t i) {
      const F value = Mul(ToFloat(SubI(code, SetI(kBits == 8 ? 128 : 8))), scale);
      if (i + 16 <= end) {
        Element<kType>::template Store<false>(out, i, value, 16);
      } else if (i < end) {
        Element<kType>::template Store<true>(out, i, value, end - i);
      }
    };
    if constexpr (kBits == 8) {
      for (size_t i = begin; i < end; i += 16) put(LoadU8<false>(codes + i, 16), i);
    } else {
      for (size_t i = begin; i < end; i += 32) {
        const I both = LoadU8<false>(codes + i / 2, 16);
        put(And(both, SetI(15)), i);
        put(Shr<4>(both), i + 16);
      }
    }
  }
}

// NOLINTEND(clang-analyzer-optin.performance.Padding)

}  // namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE
