// Optimizer kernels, written once over the 16-lane vectors, for each combination of parameter, gradient and
// state type. Included after elementwise_inl.h. The order of operations is that of kernels/adam.h and
// kernels/optimizer.h.
namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE {

// The lambdas here hold vectors beside flags and are inlined: no one stores them.
// NOLINTBEGIN(clang-analyzer-optin.performance.Padding)

// The chunk, with the addresses that an update in place reads.
inline UpdateChunk WithSource(UpdateChunk c) {
  if (c.from.param == nullptr) c.from = {.param = c.param, .master_low = c.master_low, .m = c.m, .v = c.v};
  return c;
}

// How a parameter is read and written; the index is a ParamType.
template <int kParam>
struct Param;
template <>
struct Param<0> {
  template <bool kTail>
  static F Load(const UpdateChunk& c, size_t i, size_t count) {
    return LoadF<kTail>(static_cast<const float*>(c.from.param) + i, count);
  }
  template <bool kTail>
  static void Store(const UpdateChunk& c, size_t i, F p, size_t count) {
    if (!kTail && c.stream_param) {
      StreamF(static_cast<float*>(c.param) + i, p);
    } else {
      StoreF<kTail>(static_cast<float*>(c.param) + i, p, count);
    }
    if (c.copy_out == nullptr) return;
    if (!kTail && c.stream_copy) {
      if (c.copy_is_fp16) {
        StreamHalf(c.copy_out + i, p);
      } else {
        StreamBf16(c.copy_out + i, p);
      }
    } else if (c.copy_is_fp16) {
      Element<2>::Store<kTail>(c.copy_out, i, p, count);
    } else {
      Element<1>::Store<kTail>(c.copy_out, i, p, count);
    }
  }
};
template <>
struct Param<1> {
  template <bool kTail>
  static F Load(const UpdateChunk& c, size_t i, size_t count) {
    return LoadSplit<kTail>(static_cast<const uint16_t*>(c.from.param) + i, c.from.master_low + i, count);
  }
  template <bool kTail>
  static void Store(const UpdateChunk& c, size_t i, F p, size_t count) {
    StoreSplit<kTail>(static_cast<uint16_t*>(c.param) + i, c.master_low + i, p, count, c.stream_param);
  }
};
template <int kType>
struct MasterlessParam {
  template <bool kTail>
  static F Load(const UpdateChunk& c, size_t i, size_t count) {
    return Element<kType>::template Load<kTail>(c.from.param, i, count);
  }
  template <bool kTail>
  static void Store(const UpdateChunk& c, size_t i, F p, size_t count) {
    Element<kType>::template Store<kTail>(c.param, i, p, count);
  }
};
template <>
struct Param<2> : MasterlessParam<1> {};
template <>
struct Param<3> : MasterlessParam<2> {};

// How states are written; the index is a StateType (fp32 or bf16).
template <int kState>
struct States;
template <>
struct States<0> {
  explicit States(const UpdateChunk&) {}
  template <bool kTail>
  void StoreM(const UpdateChunk& c, size_t i, F m, size_t count) const {
    Store<kTail>(static_cast<float*>(c.m) + i, m, count, c.stream_states);
  }
  template <bool kTail>
  void StoreV(const UpdateChunk& c, size_t i, F v, size_t count) const {
    Store<kTail>(static_cast<float*>(c.v) + i, v, count, c.stream_states);
  }

 private:
  template <bool kTail>
  static void Store(float* at, F x, size_t count, bool stream) {
    if (!kTail && stream) {
      StreamF(at, x);
    } else {
      StoreF<kTail>(at, x, count);
    }
  }
};
template <>
struct States<1> {
  explicit States(const UpdateChunk& c)
      : key(DrawKey(c.seed)), position(static_cast<uint32_t>(c.first_element)) {}
  template <bool kTail>
  void StoreM(const UpdateChunk& c, size_t i, F m, size_t count) const {
    if (!kTail && c.stream_states) {
      StreamBf16(static_cast<uint16_t*>(c.m) + i, m);
    } else {
      Element<1>::Store<kTail>(c.m, i, m, count);
    }
  }
  template <bool kTail>
  void StoreV(const UpdateChunk& c, size_t i, F v, size_t count) const {
    const I draw = Shr<16>(Draw(key, position + static_cast<uint32_t>(i)));
    if (!kTail && c.stream_states) {
      Stream16(static_cast<uint16_t*>(c.v) + i, RoundBf16Stochastic(v, draw));
    } else {
      Store16<kTail>(static_cast<uint16_t*>(c.v) + i, RoundBf16Stochastic(v, draw), count);
    }
  }
  uint32_t key, position;
};

// The optimizers: what one vector of elements goes through. kM, kV: which states it has.
struct Adam {
  using Step = AdamStep;
  static constexpr bool kM = true, kV = true;
  explicit Adam(const AdamStep& s)
      : l2(s.mode == AdamMode::kAdam),
        scale(Set(s.grad_scale)),
        beta1(Set(s.beta1)),
        rest1(Set(s.one_minus_beta1)),
        beta2(Set(s.beta2)),
        rest2(Set(s.one_minus_beta2)),
        eps(Set(s.eps)),
        decay(Set(l2 ? s.weight_decay : s.decay)),
        step(Set(-s.step_size)),
        root2(Set(s.sqrt_correction2)),
        inverse_root2(Set(1.0f / s.sqrt_correction2)) {}
  void Moments(F g, F* m, F* v) const {
    *m = Fma(g, rest1, Mul(*m, beta1));
    *v = Fma(Mul(g, rest2), g, Mul(*v, beta2));
  }
  F Denominator(F v) const { return Add(DivByConstant(Sqrt(v), root2, inverse_root2), eps); }
  void operator()(F* p, F g, F* m, F* v) const {
    g = Mul(g, scale);
    if (l2) {
      g = Fma(*p, decay, g);
    } else {
      *p = Mul(*p, decay);
    }
    Moments(g, m, v);
    *p = Add(*p, Div(Mul(step, *m), Denominator(*v)));
  }
  bool l2;
  F scale, beta1, rest1, beta2, rest2, eps, decay, step, root2, inverse_root2;
};

struct Adagrad {
  using Step = AdagradStep;
  static constexpr bool kM = false, kV = true;
  explicit Adagrad(const AdagradStep& s)
      : scale(Set(s.grad_scale)),
        step(Set(-s.step_size)),
        eps(Set(s.eps)),
        decay(Set(s.weight_decay)),
        decays(s.weight_decay != 0.0f) {}
  void operator()(F* p, F g, F*, F* v) const {
    g = Mul(g, scale);
    if (decays) g = Fma(*p, decay, g);
    *v = Fma(g, g, *v);
    *p = Add(*p, Div(Mul(step, g), Add(Sqrt(*v), eps)));
  }
  F scale, step, eps, decay;
  bool decays;
};

// 1 with x's sign; 0 for zeros; x itself if it is a NaN.
inline F Sign(F x) {
  const I bits = Bits(x);
  const I one = Or(And(bits, SetI(0x80000000u)), SetI(0x3F800000u));
  const I sign = Select(GreaterS(Magnitude(bits), SetI(0)), one, SetI(0));
  return FromBits(Select(IsNan(bits), bits, sign));
}

struct Lion {
  using Step = LionStep;
  static constexpr bool kM = true, kV = false;
  explicit Lion(const LionStep& s)
      : scale(Set(s.grad_scale)),
        rate(Set(-s.lr)),
        beta1(Set(s.beta1)),
        rest1(Set(s.one_minus_beta1)),
        beta2(Set(s.beta2)),
        rest2(Set(s.one_minus_beta2)),
        decay(Set(s.decay)) {}
  void operator()(F* p, F g, F* m, F*) const {
    g = Mul(g, scale);
    const F c = Fma(g, rest1, Mul(*m, beta1));
    *p = Fma(rate, Sign(c), Mul(*p, decay));
    *m = Fma(g, rest2, Mul(*m, beta2));
  }
  F scale, rate, beta1, rest1, beta2, rest2, decay;
};

struct Sgd {
  using Step = SgdStep;
  static constexpr bool kM = true, kV = false;
  explicit Sgd(const SgdStep& s)
      : scale(Set(s.grad_scale)),
        rate(Set(-s.lr)),
        momentum(Set(s.momentum)),
        rest(Set(s.one_minus_dampening)),
        decay(Set(s.weight_decay)),
        decays(s.weight_decay != 0.0f),
        moves(s.momentum != 0.0f),
        nesterov(s.nesterov) {}
  void operator()(F* p, F g, F* m, F*) const {
    g = Mul(g, scale);
    if (decays) g = Fma(*p, decay, g);
    if (moves) {
      *m = Fma(g, rest, Mul(*m, momentum));
      g = nesterov ? Fma(*m, momentum, g) : *m;
    }
    *p = Fma(g, rate, *p);
  }
  F scale, rate, momentum, rest, decay;
  bool decays, moves, nesterov;
};

// How many bytes ahead of its own loads an update of n elements asks for each of its streams; 0: it leaves
// that to the processor. Measured, as shares of the bare streams: AMD's own prefetching (Zen 4) is enough for
// streams of one width, and with streams of different widths leaves a tenth. Intel's (Sapphire Rapids) leaves
// 7% in both cases; half a KiB is too near there and costs more than it brings, 2 KiB bring all of it. Pieces
// of 8-bit states are shorter than that.
inline size_t PrefetchDistance(bool mixed_widths, [[maybe_unused]] size_t n) {
#if defined(__x86_64__)
  static const bool intel = __builtin_cpu_is("intel") != 0;
  if (intel && n > 1024) return 2048;
#endif
  return mixed_widths ? 512 : 0;
}

// Asks for a byte of an array: by an address and not a pointer, as near the end it is outside.
inline void PrefetchByte(const void* array, size_t byte) {
  Prefetch(reinterpret_cast<uintptr_t>(array) + byte);
}

template <class Opt, int kParam, int kGrad, int kState>
void Update(const void* step, const UpdateChunk& chunk) {
  const UpdateChunk c = WithSource(chunk);  // a local copy: the compiler sees that no store changes a pointer
  const Opt opt(*static_cast<const typename Opt::Step*>(step));
  const States<kState> states(c);
  const bool has_m = Opt::kM && c.m != nullptr;  // SGD without momentum has none
  const bool sums_up = c.squares != nullptr;
  D sums = ZeroD();
  const size_t ahead = PrefetchDistance(kParam != 0 || kGrad != 0, c.n);
  ForVectors(c.n, [=, &sums]<bool kTail>(size_t i, size_t count) {
    if (!kTail && ahead != 0) {
      PrefetchByte(c.from.param, (kParam == 0 ? 4 : 2) * i + ahead);
      if constexpr (kParam == 1) PrefetchByte(c.from.master_low, 2 * i + ahead);
      PrefetchByte(c.grad, (kGrad == 0 ? 4 : 2) * i + ahead);
      if constexpr (Opt::kM) PrefetchByte(c.from.m, (kState == 0 ? 4 : 2) * i + ahead);
      if constexpr (Opt::kV) PrefetchByte(c.from.v, (kState == 0 ? 4 : 2) * i + ahead);
    }
    const F g = Element<kGrad>::template Load<kTail>(c.grad, i, count);
    if (sums_up) AddSquare(&sums, g);
    F p = Param<kParam>::template Load<kTail>(c, i, count);
    F m = Set(0), v = Set(0);
    if constexpr (Opt::kM) {
      if (has_m) m = Element<kState>::template Load<kTail>(c.from.m, i, count);
    }
    if constexpr (Opt::kV) v = Element<kState>::template Load<kTail>(c.from.v, i, count);
    opt(&p, g, &m, &v);
    Param<kParam>::template Store<kTail>(c, i, p, count);
    if constexpr (Opt::kM) {
      if (has_m) states.template StoreM<kTail>(c, i, m, count);
    }
    if constexpr (Opt::kV) states.template StoreV<kTail>(c, i, v, count);
  });
  if (sums_up) *c.squares = CombineLanes(sums);
}

template <int kGrad, int kState>
void LambMoments(const LambStep& step, const UpdateChunk& chunk) {
  const UpdateChunk c = chunk;
  const Adam adam(step.adam);
  const States<kState> states(c);
  ForVectors(c.n, [=]<bool kTail>(size_t i, size_t count) {
    const F g = Mul(Element<kGrad>::template Load<kTail>(c.grad, i, count), adam.scale);
    F m = Element<kState>::template Load<kTail>(c.m, i, count);
    F v = Element<kState>::template Load<kTail>(c.v, i, count);
    adam.Moments(g, &m, &v);
    states.template StoreM<kTail>(c, i, m, count);
    states.template StoreV<kTail>(c, i, v, count);
  });
}

struct LambDirection {
  explicit LambDirection(const LambStep& s)
      : adam(s.adam), correction1(Set(s.inverse_correction1)), decay(Set(s.weight_decay)) {}
  F operator()(F p, F m, F v) const { return Fma(p, decay, Div(Mul(m, correction1), adam.Denominator(v))); }
  Adam adam;
  F correction1, decay;
};

template <int kParam, int kState>
void LambDirections(const LambStep& step, const UpdateChunk& chunk, float* u, float* p_out) {
  const UpdateChunk c = WithSource(chunk);
  const LambDirection direction(step);
  ForVectors(c.n, [=]<bool kTail>(size_t i, size_t count) {
    const F p = Param<kParam>::template Load<kTail>(c, i, count);
    const F m = Element<kState>::template Load<kTail>(c.m, i, count);
    const F v = Element<kState>::template Load<kTail>(c.v, i, count);
    StoreF<kTail>(u + i, direction(p, m, v), count);
    StoreF<kTail>(p_out + i, p, count);
  });
}

template <int kParam, int kState>
void LambApply(const LambStep& step, float rate, const UpdateChunk& chunk) {
  const UpdateChunk c = WithSource(chunk);
  const LambDirection direction(step);
  const F rates = Set(-rate);
  ForVectors(c.n, [=]<bool kTail>(size_t i, size_t count) {
    const F p = Param<kParam>::template Load<kTail>(c, i, count);
    const F m = Element<kState>::template Load<kTail>(c.m, i, count);
    const F v = Element<kState>::template Load<kTail>(c.v, i, count);
    Param<kParam>::template Store<kTail>(c, i, Fma(direction(p, m, v), rates, p), count);
  });
}

// NOLINTEND(clang-analyzer-optin.performance.Padding)

}  // namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE
