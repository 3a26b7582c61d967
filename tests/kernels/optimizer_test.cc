// Every optimizer with every combination of parameter, gradient and state type, against one-element
// references.
#include "kernels/optimizer.h"

#include <algorithm>
#include <functional>

#include "kernels/split_master.h"
#include "kernels/thread_pool.h"
#include "tests/kernels/kernel_testing.h"
#include "tests/kernels/optimizer_reference.h"

namespace penstock::kernels::optimizer_test {
namespace {

constexpr ParamType kParams[] = {ParamType::kFp32, ParamType::kSplit, ParamType::kBf16, ParamType::kFp16};
constexpr DType kTypes[] = {DType::kFp32, DType::kBf16, DType::kFp16};
constexpr StateType kStateTypes[] = {StateType::kFp32, StateType::kBf16, StateType::k8Bit};

// The random 16 bits for a second moment, as kernels/optimizer.h's rounding draws them.
uint32_t DrawHigh(uint64_t seed, uint64_t element) {
  seed += 0x9E3779B97F4A7C15u;
  seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9u;
  seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EBu;
  seed ^= seed >> 31;
  uint32_t x = static_cast<uint32_t>(element) ^ static_cast<uint32_t>(seed ^ (seed >> 32));
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return (x ^ (x >> 16)) >> 16;
}

uint16_t StochasticBf16(float x, uint32_t draw) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) >= 0x7F800000u) return FloatToBf16(x);
  return static_cast<uint16_t>((bits + draw) >> 16);
}

// The arrays of an update in one place, in any types, at odd addresses.
struct Arrays {
  size_t n;
  UpdateArrays view;
  std::vector<unsigned char> param, copy, grad, m, v;
  std::vector<int16_t> master_low;
  std::vector<float> m_scales, v_scales;

  Arrays(size_t size, ParamType param_type, DType grad_type, StateType state_type, bool copies, Values kind,
         uint64_t seed)
      : n(size) {
    view.n = n;
    view.param_type = param_type;
    view.grad_type = grad_type;
    view.state_type = state_type;
    view.first_element = 512 * (seed % 5);
    view.seed = seed * 77;
    param.resize(n * 4 + 1);
    copy.resize(n * 2 + 1);
    grad.resize(n * 4 + 1);
    m.resize(n * 4 + 1);
    v.resize(n * 4 + 1);
    master_low.resize(n + 1);
    m_scales.resize(n / kStateBlock + 1);
    v_scales.resize(n / kStateBlock + 1);
    Point(copies);
    view.copy_type = seed % 2 == 0 ? DType::kBf16 : DType::kFp16;

    const std::vector<float> p0 = Random(n, kind, seed), g0 = Random(n, kind, seed + 1),
                             m0 = Random(n, kind, seed + 2);
    std::vector<float> v0 = Random(n, kind, seed + 3);
    for (float& x : v0) x = std::fabs(x);
    switch (param_type) {
      case ParamType::kFp32:
        std::copy_n(reinterpret_cast<const unsigned char*>(p0.data()), 4 * n, param.data() + 1);
        break;
      case ParamType::kSplit:
        SplitMaster(p0.data(), static_cast<uint16_t*>(view.param), view.master_low, n);
        break;
      default:
        Convert(DType::kFp32, p0.data(), param_type == ParamType::kBf16 ? DType::kBf16 : DType::kFp16,
                view.param, n);
    }
    Convert(DType::kFp32, g0.data(), grad_type, grad.data() + 1, n);
    if (state_type == StateType::k8Bit) {
      Quantize8(Code8::kSigned, m0.data(), m.data() + 1, m_scales.data(), n);
      Quantize8(Code8::kUnsigned, v0.data(), v.data() + 1, v_scales.data(), n);
    } else {
      const DType type = state_type == StateType::kFp32 ? DType::kFp32 : DType::kBf16;
      Convert(DType::kFp32, m0.data(), type, view.m, n);
      Convert(DType::kFp32, v0.data(), type, view.v, n);
    }
  }
  Arrays(const Arrays& other)
      : n(other.n),
        view(other.view),
        param(other.param),
        copy(other.copy),
        grad(other.grad),
        m(other.m),
        v(other.v),
        master_low(other.master_low),
        m_scales(other.m_scales),
        v_scales(other.v_scales) {
    Point(other.view.copy_out != nullptr);
  }
  Arrays& operator=(const Arrays&) = delete;

  void Point(bool copies) {
    view.param = param.data() + 1;
    view.master_low = master_low.data() + 1;
    view.copy_out = copies ? reinterpret_cast<uint16_t*>(copy.data() + 1) : nullptr;
    view.grad = grad.data() + 1;
    view.m = m.data() + 1;
    view.v = v.data() + 1;
    view.m_scales = m_scales.data();
    view.v_scales = v_scales.data();
  }

  std::vector<float> Params() const {
    std::vector<float> out(n);
    switch (view.param_type) {
      case ParamType::kFp32:
        std::copy_n(param.data() + 1, 4 * n, reinterpret_cast<unsigned char*>(out.data()));
        break;
      case ParamType::kSplit:
        JoinMaster(static_cast<const uint16_t*>(view.param), view.master_low, out.data(), n);
        break;
      default:
        Convert(view.param_type == ParamType::kBf16 ? DType::kBf16 : DType::kFp16, view.param, DType::kFp32,
                out.data(), n);
    }
    return out;
  }
  std::vector<float> Grads() const {
    std::vector<float> out(n);
    Convert(view.grad_type, view.grad, DType::kFp32, out.data(), n);
    return out;
  }
  std::vector<float> Moments(bool second) const {
    std::vector<float> out(n);
    const void* data = second ? view.v : view.m;
    if (view.state_type == StateType::k8Bit) {
      Dequantize8(second ? Code8::kUnsigned : Code8::kSigned, static_cast<const uint8_t*>(data),
                  second ? view.v_scales : view.m_scales, out.data(), n);
    } else {
      Convert(view.state_type == StateType::kFp32 ? DType::kFp32 : DType::kBf16, data, DType::kFp32,
              out.data(), n);
    }
    return out;
  }

  // What the given fp32 values become when stored in this object's types, read back.
  std::vector<float> StoredParams(std::vector<float> values) const {
    for (float& x : values) {
      if (view.param_type == ParamType::kBf16) x = Bf16ToFloat(FloatToBf16(x));
      if (view.param_type == ParamType::kFp16) x = Fp16ToFloat(FloatToFp16(x));
    }
    return values;
  }
  std::vector<float> StoredMoments(std::vector<float> values, bool second) const {
    if (view.state_type == StateType::kBf16) {
      for (size_t i = 0; i < n; ++i) {
        values[i] =
            Bf16ToFloat(second ? StochasticBf16(values[i], DrawHigh(view.seed, view.first_element + i))
                               : FloatToBf16(values[i]));
      }
    } else if (view.state_type == StateType::k8Bit) {
      const Code8 code = second ? Code8::kUnsigned : Code8::kSigned;
      std::vector<uint8_t> codes(n);
      std::vector<float> scales(n / kStateBlock + 1);
      const Rounding rounding = {.stochastic = true, .seed = view.seed, .first_element = view.first_element};
      Quantize8(code, values.data(), codes.data(), scales.data(), n, rounding);
      Dequantize8(code, codes.data(), scales.data(), values.data(), n);
    }
    return values;
  }
};

struct OptimizerCase {
  const char* name;
  std::function<void(const UpdateArrays&, SumOfSquares*, ThreadPool*)> apply;
  // One element; the float reference.
  std::function<void(float*, float, float*, float*)> one;
  std::function<void(Bounded*, Bounded, Bounded*, Bounded*)> oracle;
  bool has_m, has_v;
};

template <class Step>
OptimizerCase MakeCase(const char* name, const Step& step, bool has_m, bool has_v) {
  return {name,
          [step](const UpdateArrays& arrays, SumOfSquares* squares, ThreadPool* pool) {
            ApplyUpdate(step, arrays, squares, pool);
          },
          [step](float* p, float g, float* m, float* v) { UpdateOne<float>(step, p, g, m, v); },
          [step](Bounded* p, Bounded g, Bounded* m, Bounded* v) { UpdateOne<Bounded>(step, p, g, m, v); },
          has_m,
          has_v};
}

std::vector<OptimizerCase> Cases() {
  const AdamOptions l2 = {.lr = 1e-2, .weight_decay = 0.1, .mode = AdamMode::kAdam};
  return {
      MakeCase("AdamW", MakeAdamStep({.lr = 1e-2, .weight_decay = 0.1}, 3, 0.5), true, true),
      MakeCase("Adam", MakeAdamStep(l2, 3), true, true),
      MakeCase("Adagrad", MakeAdagradStep({.lr_decay = 0.1, .weight_decay = 0.1}, 3, 0.5), false, true),
      MakeCase("Adagrad without decay", MakeAdagradStep({}, 3), false, true),
      MakeCase("Lion", MakeLionStep({.lr = 1e-2, .weight_decay = 0.1}, 0.5), true, false),
      MakeCase("SGD", MakeSgdStep({.lr = 1e-2}, 3, 0.5), false, false),
      MakeCase("SGD with momentum",
               MakeSgdStep({.lr = 1e-2, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.1}, 3), true,
               false),
      MakeCase("SGD with Nesterov", MakeSgdStep({.lr = 1e-2, .momentum = 0.9, .nesterov = true}, 3), true,
               false),
  };
}

void ExpectUpdated(const OptimizerCase& c, const Arrays& before, const Arrays& after) {
  std::vector<float> p = before.Params(), m = before.Moments(false), v = before.Moments(true);
  const std::vector<float> g = before.Grads();
  for (size_t i = 0; i < before.n; ++i) c.one(&p[i], g[i], &m[i], &v[i]);
  ASSERT_TRUE(SameFloats(after.Params(), before.StoredParams(p)));
  ASSERT_TRUE(
      SameFloats(after.Moments(false), c.has_m ? before.StoredMoments(m, false) : before.Moments(false)));
  ASSERT_TRUE(
      SameFloats(after.Moments(true), c.has_v ? before.StoredMoments(v, true) : before.Moments(true)));
  ASSERT_EQ(after.grad, before.grad);
  if (before.view.copy_out != nullptr) {
    for (size_t i = 0; i < before.n; ++i) {
      const float copy = before.view.copy_type == DType::kBf16 ? Bf16ToFloat(FloatToBf16(p[i]))
                                                               : Fp16ToFloat(FloatToFp16(p[i]));
      uint16_t stored;
      std::memcpy(&stored, after.copy.data() + 1 + 2 * i, 2);
      const float got = before.view.copy_type == DType::kBf16 ? Bf16ToFloat(stored) : Fp16ToFloat(stored);
      ASSERT_TRUE(SameFloat(got, copy)) << i;
    }
  }
}

TEST(Optimizer, EveryCombinationGivesTheBitsOfItsReference) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    uint64_t seed = 0;
    for (const OptimizerCase& c : Cases()) {
      for (const ParamType param : kParams) {
        for (const DType grad : kTypes) {
          for (const StateType state : kStateTypes) {
            for (const size_t n : {0, 1, 15, 16, 17, 255, 256, 257, 600}) {
              ++seed;
              const Values kind = seed % 4 == 0   ? Values::kSpecial
                                  : seed % 4 == 1 ? Values::kTiny
                                                  : Values::kNormal;
              const bool copies = param == ParamType::kFp32 && seed % 3 != 0;
              SCOPED_TRACE(::testing::Message()
                           << c.name << " " << SimdLevelName(level) << " param " << static_cast<int>(param)
                           << " grad " << static_cast<int>(grad) << " state " << static_cast<int>(state)
                           << " n " << n);
              const Arrays before(n, param, grad, state, copies, kind, seed);
              Arrays after(before);
              c.apply(after.view, nullptr, nullptr);
              ExpectUpdated(c, before, after);
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

// Bytes [begin, begin + n) of what an update writes, at addresses that are as far from a cache line as
// `offset` says.
class Destination {
 public:
  Destination(const Arrays& before, size_t offset) : view(before.view) {
    const auto take = [&](size_t bytes) {
      const size_t begin = (bytes_.size() + 63) / 64 * 64 + offset;
      bytes_.resize(begin + bytes);
      return begin;
    };
    const size_t n = before.n;
    const size_t param = take(4 * n), low = take(2 * n), copy = take(2 * n), m = take(4 * n), v = take(4 * n),
                 m_scales = take(4 * before.m_scales.size()), v_scales = take(4 * before.v_scales.size());
    bytes_.assign(bytes_.size() + 64, 0xAB);
    unsigned char* const first = bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64;
    view.param = first + param;
    view.master_low = reinterpret_cast<int16_t*>(first + low);
    if (view.copy_out != nullptr) view.copy_out = reinterpret_cast<uint16_t*>(first + copy);
    view.m = first + m;
    view.v = first + v;
    view.m_scales = reinterpret_cast<float*>(first + m_scales);
    view.v_scales = reinterpret_cast<float*>(first + v_scales);
    view.from = {before.view.param, before.view.master_low, before.view.m,
                 before.view.v,     before.view.m_scales,   before.view.v_scales};
  }

  UpdateArrays view;

 private:
  std::vector<unsigned char> bytes_;
};

TEST(Optimizer, ToAnotherPlaceHasTheBitsOfAnUpdateInPlace) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    uint64_t seed = 0;
    for (const OptimizerCase& c : Cases()) {
      for (const ParamType param : kParams) {
        for (const StateType state : kStateTypes) {
          for (const size_t n : {1, 16, 255, 600}) {
            for (const size_t offset : {0, 4, 32}) {
              ++seed;
              const bool copies = param == ParamType::kFp32 && seed % 3 != 0;
              const Arrays before(n, param, kTypes[seed % 3], state, copies, Values::kNormal, seed);
              Arrays in_place(before), source(before);
              c.apply(in_place.view, nullptr, nullptr);
              const Destination there(source, offset);
              c.apply(there.view, nullptr, nullptr);
              SCOPED_TRACE(::testing::Message()
                           << c.name << " " << SimdLevelName(level) << " param " << static_cast<int>(param)
                           << " state " << static_cast<int>(state) << " n " << n << " offset " << offset);
              const auto same = [&](const void* a, const void* b, size_t bytes) {
                return std::memcmp(a, b, bytes) == 0;
              };
              const UpdateArrays& a = in_place.view;
              const UpdateArrays& b = there.view;
              EXPECT_TRUE(same(a.param, b.param, n * (param == ParamType::kFp32 ? 4 : 2)));
              EXPECT_TRUE(!(param == ParamType::kSplit) || same(a.master_low, b.master_low, 2 * n));
              EXPECT_TRUE(!copies || same(a.copy_out, b.copy_out, 2 * n));
              EXPECT_TRUE(!c.has_m || same(a.m, b.m, StateBytes(state, n)));
              EXPECT_TRUE(!c.has_v || same(a.v, b.v, StateBytes(state, n)));
              EXPECT_TRUE(!c.has_m || same(a.m_scales, b.m_scales, 4 * StateScales(state, n)));
              EXPECT_TRUE(!c.has_v || same(a.v_scales, b.v_scales, 4 * StateScales(state, n)));
              EXPECT_EQ(source.param, before.param);
              EXPECT_EQ(source.master_low, before.master_low);
              EXPECT_EQ(source.m, before.m);
              EXPECT_EQ(source.v, before.v);
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(Optimizer, EveryLengthTo257) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    for (size_t n = 0; n <= 257; ++n) {
      const std::vector<OptimizerCase> cases = Cases();
      const OptimizerCase& c = cases[n % cases.size()];
      const Arrays before(n, kParams[n % 4], kTypes[n % 3], kStateTypes[(n / 3) % 3], n % 4 == 0,
                          Values::kNormal, n);
      Arrays after(before);
      c.apply(after.view, nullptr, nullptr);
      ExpectUpdated(c, before, after);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Optimizer, ThreadsCutsAndStatisticsChangeNothing) {
  constexpr size_t kN = 20 * kReduceBlock + 123;
  ThreadPool pool(3);
  for (const OptimizerCase& c : Cases()) {
    for (const StateType state : kStateTypes) {
      const ParamType param = state == StateType::kBf16 ? ParamType::kSplit : ParamType::kFp32;
      const Arrays before(kN, param, DType::kBf16, state, param == ParamType::kFp32, Values::kNormal, 6);
      Arrays alone(before), pooled(before), cut(before);
      c.apply(alone.view, nullptr, nullptr);
      SumOfSquares squares, pieces, expected;
      AddSquares(DType::kBf16, before.view.grad, kN, &expected);
      c.apply(pooled.view, &squares, &pool);
      for (size_t begin = 0; begin < kN;) {
        const size_t n = std::min(kN - begin, kReduceBlock * (1 + begin / kReduceBlock % 3));
        UpdateArrays saved = cut.view;
        const size_t width = state == StateType::kFp32 ? 4 : state == StateType::kBf16 ? 2 : 1;
        cut.view.n = n;
        cut.view.param =
            static_cast<unsigned char*>(saved.param) + begin * (param == ParamType::kFp32 ? 4 : 2);
        cut.view.master_low = saved.master_low + begin;
        if (saved.copy_out != nullptr) cut.view.copy_out = saved.copy_out + begin;
        cut.view.grad = static_cast<const uint16_t*>(saved.grad) + begin;
        cut.view.m = static_cast<unsigned char*>(saved.m) + begin * width;
        cut.view.v = static_cast<unsigned char*>(saved.v) + begin * width;
        cut.view.m_scales = saved.m_scales + begin / kStateBlock;
        cut.view.v_scales = saved.v_scales + begin / kStateBlock;
        cut.view.first_element = saved.first_element + begin;
        c.apply(cut.view, &pieces, nullptr);
        cut.view = saved;
        begin += n;
      }
      EXPECT_EQ(squares.Value(), expected.Value());
      EXPECT_EQ(pieces.Value(), expected.Value());
      for (const Arrays* other : {&pooled, &cut}) {
        EXPECT_EQ(other->param, alone.param) << c.name;
        EXPECT_EQ(other->master_low, alone.master_low) << c.name;
        EXPECT_EQ(other->copy, alone.copy) << c.name;
        EXPECT_EQ(other->m, alone.m) << c.name;
        EXPECT_EQ(other->v, alone.v) << c.name;
        EXPECT_EQ(other->m_scales, alone.m_scales) << c.name;
        EXPECT_EQ(other->v_scales, alone.v_scales) << c.name;
      }
    }
  }
}

// Large copies are stored past the caches where they are aligned: the same values, wherever they go.
TEST(Optimizer, LargeCopiesAreTheSame) {
  constexpr size_t kN = (size_t{1} << 20) + 77;
  ThreadPool pool(2);
  const std::vector<float> start = Random(kN, Values::kNormal, 1), g = Random(kN, Values::kNormal, 2);
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    for (const DType type : {DType::kBf16, DType::kFp16}) {
      for (const size_t offset : {0, 32, 2}) {
        std::vector<float> p = start, m(kN, 0.1f), v(kN, 0.2f);
        Misaligned<uint16_t> copy(kN, offset);
        UpdateArrays a;
        a.n = kN;
        a.param = p.data();
        a.copy_out = copy.data();
        a.copy_type = type;
        a.grad = g.data();
        a.m = m.data();
        a.v = v.data();
        ApplyUpdate(MakeAdamStep({}, 2), a, nullptr, offset == 0 ? &pool : nullptr);
        std::vector<uint16_t> expected(kN);
        Convert(DType::kFp32, p.data(), type, expected.data(), kN);
        EXPECT_EQ(copy.Get(), expected);
        EXPECT_TRUE(copy.GuardsIntact());
      }
    }
  }
}

TEST(Optimizer, WithinTheErrorBoundOfTheFloat64Oracle) {
  for (const OptimizerCase& c : Cases()) {
    for (const Values kind : {Values::kNormal, Values::kTiny, Values::kHuge, Values::kDenormal}) {
      const Arrays before(5000, ParamType::kFp32, DType::kFp32, StateType::kFp32, false, kind, 21);
      Arrays after(before);
      c.apply(after.view, nullptr, nullptr);
      const std::vector<float> p0 = before.Params(), g0 = before.Grads(), m0 = before.Moments(false),
                               v0 = before.Moments(true), p1 = after.Params(), m1 = after.Moments(false),
                               v1 = after.Moments(true);
      size_t tight = 0;
      for (size_t i = 0; i < before.n; ++i) {
        Bounded p(p0[i]), m(m0[i]), v(v0[i]);
        c.oracle(&p, g0[i], &m, &v);
        ASSERT_LE(std::fabs(p1[i] - p.value), p.error) << c.name << " " << i;
        ASSERT_LE(std::fabs(m1[i] - m.value), m.error) << c.name << " " << i;
        ASSERT_LE(std::fabs(v1[i] - v.value), v.error) << c.name << " " << i;
        tight += p.error <= 1e-5 * (std::fabs(p0[i]) + std::fabs(p.value - p0[i]));
      }
      if (kind == Values::kNormal) {
        EXPECT_GE(tight, before.n * 98 / 100) << c.name;
      }
    }
  }
}

TEST(Optimizer, StatisticsFindWhatIsNotFinite) {
  const OptimizerCase c = Cases()[0];
  Arrays a(10000, ParamType::kSplit, DType::kBf16, StateType::kFp32, false, Values::kNormal, 3);
  SumOfSquares squares;
  c.apply(a.view, &squares, nullptr);
  EXPECT_TRUE(squares.Finite());
  const uint16_t infinity = 0x7F80;
  std::memcpy(a.grad.data() + 1 + 2 * 9000, &infinity, 2);
  c.apply(a.view, &squares, nullptr);
  EXPECT_FALSE(squares.Finite());
}

// bf16 second moments under beta2 = 0.999: stochastic rounding must let them decay, as nearest would not.
TEST(Optimizer, Bf16SecondMomentsDecayInTheMean) {
  constexpr size_t kN = 4096;
  Arrays a(kN, ParamType::kFp32, DType::kFp32, StateType::kBf16, false, Values::kNormal, 3);
  std::fill(a.grad.begin(), a.grad.end(), static_cast<unsigned char>(0));
  std::vector<uint16_t> one(kN, FloatToBf16(1.0f));
  std::memcpy(a.view.v, one.data(), kN * 2);
  for (int t = 1; t <= 1000; ++t) {
    a.view.seed = static_cast<uint64_t>(t);
    ApplyUpdate(MakeAdamStep({}, t), a.view);
  }
  double mean = 0;
  for (const float v : a.Moments(true)) mean += v / kN;
  EXPECT_NEAR(mean, std::pow(0.999, 1000), 0.01);
}

// Logistic regression on noisy labels with AdamW, in mini-batches; returns the loss over all examples at the
// end.
double TrainLogistic(StateType state) {
  constexpr size_t kDim = 512, kExamples = 2048, kBatch = 64;
  const std::vector<float> x = Random(kDim * kExamples, Values::kNormal, 1),
                           truth = Random(kDim, Values::kNormal, 2),
                           noise = Random(kExamples, Values::kNormal, 3);
  const auto logit = [&](const std::vector<float>& w, size_t example) {
    double sum = 0;
    for (size_t j = 0; j < kDim; ++j) sum += static_cast<double>(w[j]) * x[example * kDim + j];
    return sum;
  };
  std::vector<float> label(kExamples);
  for (size_t i = 0; i < kExamples; ++i) label[i] = logit(truth, i) + 10.0 * noise[i] > 0 ? 1.0f : -1.0f;
  std::vector<float> w(kDim, 0.0f), g(kDim);
  std::vector<unsigned char> m(4 * kDim, 0), v(4 * kDim, 0);
  std::vector<float> m_scales(kDim / kStateBlock, 0.0f), v_scales(kDim / kStateBlock, 0.0f);
  UpdateArrays a;
  a.n = kDim;
  a.param = w.data();
  a.grad = g.data();
  a.state_type = state;
  a.m = m.data();
  a.v = v.data();
  a.m_scales = m_scales.data();
  a.v_scales = v_scales.data();
  for (int64_t t = 1; t <= 1500; ++t) {
    std::fill(g.begin(), g.end(), 0.0f);
    for (size_t k = 0; k < kBatch; ++k) {
      const size_t example = (static_cast<size_t>(t) * kBatch + k) % kExamples;
      const double pull = -label[example] / (1.0 + std::exp(label[example] * logit(w, example))) / kBatch;
      for (size_t j = 0; j < kDim; ++j) g[j] += static_cast<float>(pull * x[example * kDim + j]);
    }
    a.seed = static_cast<uint64_t>(t);
    const double lr = 1e-2 * (1.0 - static_cast<double>(t) / 1600.0);
    ApplyUpdate(MakeAdamStep({.lr = lr, .beta2 = 0.99, .weight_decay = 0.1}, t), a);
  }
  double loss = 0;
  for (size_t i = 0; i < kExamples; ++i) loss += std::log1p(std::exp(-label[i] * logit(w, i))) / kExamples;
  return loss;
}

TEST(Optimizer, CompactStatesReachTheSameLoss) {
  const double full = TrainLogistic(StateType::kFp32);
  EXPECT_LT(full, 0.5 * std::log(2.0));
  const double bf16 = TrainLogistic(StateType::kBf16), bits8 = TrainLogistic(StateType::k8Bit);
  RecordProperty("fp32", std::to_string(full));
  RecordProperty("bf16", std::to_string(bf16));
  RecordProperty("8bit", std::to_string(bits8));
  EXPECT_NEAR(bf16 / full, 1.0, 0.01);
  EXPECT_NEAR(bits8 / full, 1.0, 0.02);
}

TEST(Lamb, FollowsItsDefinition) {
  ThreadPool pool(3);
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    uint64_t seed = 0;
    for (const ParamType param : kParams) {
      for (const DType grad : kTypes) {
        for (const StateType state : kStateTypes) {
          for (const size_t n : {0, 1, 17, 257, 5000, 40000}) {
            if (n == 40000 && level != Levels().back()) continue;
            ++seed;
            LambOptions options;
            options.adam = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.01};
            const LambStep step = MakeLambStep(options, 3, 0.5);
            const Arrays before(n, param, grad, state, param == ParamType::kFp32, Values::kNormal, seed);
            Arrays after(before);
            LambNorms norms;
            SumOfSquares squares, expected_squares;
            ThreadPool* threads = seed % 2 == 0 ? &pool : nullptr;
            LambMoments(step, after.view, &norms, seed % 3 == 0 ? &squares : nullptr, threads);
            if (seed % 3 == 0) {
              AddSquares(grad, before.view.grad, n, &expected_squares);
              ASSERT_EQ(squares.Value(), expected_squares.Value());
            }
            std::vector<float> p = before.Params(), m = before.Moments(false), v = before.Moments(true);
            const std::vector<float> g = before.Grads();
            float unused = 0;
            AdamStep moments = step.adam;
            moments.decay = 1.0f;
            for (size_t i = 0; i < n; ++i) {
              unused = 0;
              UpdateOne<float>(moments, &unused, g[i], &m[i], &v[i]);
            }
            m = before.StoredMoments(m, false);
            v = before.StoredMoments(v, true);
            ASSERT_TRUE(SameFloats(after.Moments(false), m));
            ASSERT_TRUE(SameFloats(after.Moments(true), v));
            std::vector<float> u(n);
            for (size_t i = 0; i < n; ++i) u[i] = LambDirectionOne<float>(step, p[i], m[i], v[i]);
            LambNorms expected;
            AddSquaresFp32(p.data(), n, &expected.param);
            AddSquaresFp32(u.data(), n, &expected.update);
            ASSERT_EQ(norms.param.Value(), expected.param.Value()) << "n " << n;
            ASSERT_EQ(norms.update.Value(), expected.update.Value()) << "n " << n;
            const double trust = LambTrust(step, norms);
            LambApply(step, trust, after.view, threads);
            const float rate = static_cast<float>(static_cast<double>(step.adam.lr) * trust);
            for (size_t i = 0; i < n; ++i) p[i] = std::fma(u[i], -rate, p[i]);
            ASSERT_TRUE(SameFloats(after.Params(), before.StoredParams(p)));
          }
        }
      }
    }
  }
}

TEST(Lamb, TrustIsClampedAndOneWithoutNorms) {
  const LambStep step = MakeLambStep({}, 1);
  LambNorms norms;
  EXPECT_EQ(LambTrust(step, norms), 1.0);
  norms.param.Add(4.0);
  EXPECT_EQ(LambTrust(step, norms), 1.0);
  norms.update.Add(1.0);
  EXPECT_EQ(LambTrust(step, norms), 2.0);
  norms.param.Add(1e9);
  EXPECT_EQ(LambTrust(step, norms), 10.0);
  norms.update.Add(1e30);
  EXPECT_EQ(LambTrust(step, norms), 0.01);
}

// A tensor whose norm is lost must show it, not go on with a small step.
TEST(Lamb, TrustWithoutAFiniteNormIsNan) {
  const LambStep step = MakeLambStep({}, 1);
  for (const bool of_param : {false, true}) {
    for (const double other : {0.0, 4.0, HUGE_VAL}) {
      LambNorms norms;
      (of_param ? norms.param : norms.update).Add(HUGE_VAL);
      (of_param ? norms.update : norms.param).Add(other);
      EXPECT_TRUE(std::isnan(LambTrust(step, norms))) << of_param << ", " << other;
    }
  }
}

}  // namespace
}  // namespace penstock::kernels::optimizer_test
