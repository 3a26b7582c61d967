#include "kernels/adam.h"

#include <algorithm>

#include "kernels/split_master.h"
#include "kernels/thread_pool.h"
#include "tests/kernels/kernel_testing.h"
#include "tests/kernels/optimizer_reference.h"

namespace penstock::kernels::adam_test {
namespace {

struct State {
  std::vector<float> p, m, v, g;
};

// v is never negative; gradients are bf16 values, so that both entry points see the same ones.
State MakeState(size_t n, Values kind, uint64_t seed) {
  State s = {Random(n, kind, seed), Random(n, kind, seed + 1), Random(n, kind, seed + 2),
             Random(n, kind, seed + 3)};
  for (float& v : s.v) v = std::fabs(v);
  for (float& g : s.g) g = Bf16ToFloat(FloatToBf16(g));
  return s;
}

std::vector<AdamStep> Steps() {
  std::vector<AdamStep> steps;
  for (const int64_t update : {1, 2, 1000}) {
    for (const AdamMode mode : {AdamMode::kAdamW, AdamMode::kAdam}) {
      for (const double decay : {0.0, 0.1}) {
        const AdamOptions options = {
            .lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = decay, .mode = mode};
        steps.push_back(MakeAdamStep(options, update, update == 2 ? 0.37 : 1.0));
      }
    }
  }
  return steps;
}

State Reference(const AdamStep& step, State s) {
  for (size_t i = 0; i < s.p.size(); ++i) UpdateOne<float>(step, &s.p[i], s.g[i], &s.m[i], &s.v[i]);
  return s;
}

std::vector<uint16_t> Narrow(const std::vector<float>& wide) {
  std::vector<uint16_t> out(wide.size());
  for (size_t i = 0; i < wide.size(); ++i) out[i] = FloatToBf16(wide[i]);
  return out;
}

TEST(MakeAdamStep, ComputesItsConstantsInDouble) {
  const AdamStep step =
      MakeAdamStep({.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1}, 3, 0.5);
  EXPECT_EQ(step.grad_scale, 0.5f);
  EXPECT_EQ(step.one_minus_beta2,
            static_cast<float>(1.0 - 0.999));  // 1 - 0.999f would be off by 2e-5 of itself
  EXPECT_EQ(step.step_size, static_cast<float>(1e-3 / (1.0 - 0.9 * 0.9 * 0.9)));
  EXPECT_NEAR(step.sqrt_correction2, std::sqrt(1.0 - 0.999 * 0.999 * 0.999), 4e-9);
  EXPECT_EQ(step.decay, static_cast<float>(1.0 - 1e-4));
  EXPECT_EQ(step.weight_decay, 0.0f);
  const AdamStep l2 =
      MakeAdamStep({.weight_decay = 0.1, .mode = AdamMode::kAdam, .bias_correction = false}, 3);
  EXPECT_EQ(l2.decay, 1.0f);
  EXPECT_EQ(l2.weight_decay, 0.1f);
  EXPECT_EQ(l2.step_size, 1e-3f);
  EXPECT_EQ(l2.sqrt_correction2, 1.0f);
}

// Every level gives the bits of the documented order of operations, for every kind of value, length and
// alignment.
TEST(Adam, ExactBitsAtEveryLevelLengthAndAlignment) {
  const std::vector<AdamStep> steps = Steps();
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    for (size_t n = 0; n <= 257; ++n) {
      for (const Values kind : AllValues()) {
        const AdamStep& step = steps[(n + static_cast<size_t>(kind)) % steps.size()];
        const State before = MakeState(n, kind, n * 10);
        const State after = Reference(step, before);
        const size_t offset = (n * 11 + static_cast<size_t>(kind) * 4) % 64;
        Misaligned<float> p(before.p, offset), m(before.m, offset + 1), v(before.v, offset + 2),
            g(before.g, offset + 3);
        AdamWFp32(step, p.data(), m.data(), v.data(), g.data(), n);
        ASSERT_TRUE(SameFloats(p.Get(), after.p)) << SimdLevelName(level) << " n " << n;
        ASSERT_TRUE(SameFloats(m.Get(), after.m));
        ASSERT_TRUE(SameFloats(v.Get(), after.v));
        ASSERT_TRUE(SameFloats(g.Get(), before.g));
        ASSERT_TRUE(p.GuardsIntact() && m.GuardsIntact() && v.GuardsIntact() && g.GuardsIntact());

        Misaligned<uint16_t> master_high(n, offset + 5), grad(Narrow(before.g), offset + 7);
        Misaligned<int16_t> master_low(n, offset + 6);
        SplitMaster(before.p.data(), master_high.data(), master_low.data(), n);
        Misaligned<float> m2(before.m, offset), v2(before.v, offset + 9);
        AdamWSplit(step, master_high.data(), master_low.data(), m2.data(), v2.data(), grad.data(), n);
        std::vector<float> joined(n);
        JoinMaster(master_high.data(), master_low.data(), joined.data(), n);
        ASSERT_TRUE(SameFloats(joined, after.p)) << SimdLevelName(level) << " n " << n;
        ASSERT_TRUE(SameFloats(m2.Get(), after.m));
        ASSERT_TRUE(SameFloats(v2.Get(), after.v));
        ASSERT_TRUE(master_high.GuardsIntact() && master_low.GuardsIntact() && m2.GuardsIntact() &&
                    v2.GuardsIntact());
      }
    }
  }
}

// sqrt(v) / sqrt(1 - beta2^t) is multiplied out at the vector levels: it must be the quotient, whatever v and
// t. With m = 1, eps = 0 and step size 1, p ends as -1 / quotient, and two quotients one place apart
// give other ones for at least one of the two scales; v runs through squares of every mantissa (every eighth,
// to be quick), then all kinds.
TEST(Adam, DividesByTheCorrectionExactly) {
  const std::vector<float> specials = {
      0.0f,      std::numeric_limits<float>::denorm_min(), 1e-40f, 1e-38f, 3e38f,
      HUGE_VALF, std::numeric_limits<float>::quiet_NaN()};
  for (const SimdLevel level : Levels()) {
    if (level == SimdLevel::kPortable) continue;  // that one divides
    const AtLevel at(level);
    for (const int64_t t : {1, 2, 3, 7, 50, 1000, 100000}) {
      for (const double beta2 : {0.95, 0.999}) {
        AdamStep step = MakeAdamStep({.beta1 = 0.0, .beta2 = beta2, .eps = 0.0}, t);
        step.beta2 = 1.0f;  // v stays as it is with a gradient of zero
        step.beta1 = 1.0f;
        step.one_minus_beta1 = 0.0f;
        step.step_size = 1.0f;
        constexpr size_t kChunk = size_t{1} << 14;
        std::vector<float> v(kChunk), p(kChunk), m(kChunk), g(kChunk, 0.0f);
        for (uint32_t first = 0; first < 1u << 23; first += kChunk * 8) {
          for (size_t i = 0; i < kChunk; ++i) {
            const uint32_t mantissa = first + static_cast<uint32_t>(i) * 8 + static_cast<uint32_t>(t % 8);
            v[i] = i < specials.size() ? specials[i]
                                       : std::bit_cast<float>(0x3F800000u | (mantissa & 0x7FFFFFu));
            m[i] = 1.0f;
            p[i] = 0.0f;
          }
          AdamWFp32(step, p.data(), m.data(), v.data(), g.data(), kChunk);
          size_t wrong = 0;
          for (size_t i = 0; i < kChunk; ++i) {
            wrong += !SameFloat(p[i], 0.0f + -1.0f / (std::sqrt(v[i]) / step.sqrt_correction2));
          }
          ASSERT_EQ(wrong, 0u) << SimdLevelName(level) << " t " << t;
        }
      }
    }
  }
}

TEST(Adam, NoCutAndNoThreadCountChangesABit) {
  constexpr size_t kN = 100003;
  const AdamStep step = Steps()[2];
  const State before = MakeState(kN, Values::kNormal, 5);
  const State after = Reference(step, before);
  const std::vector<uint16_t> grad = Narrow(before.g);
  const auto check = [&](auto&& run) {
    State s = before;
    std::vector<uint16_t> master_high(kN);
    std::vector<int16_t> master_low(kN);
    SplitMaster(before.p.data(), master_high.data(), master_low.data(), kN);
    std::vector<float> m = before.m, v = before.v;
    run(&s, &master_high, &master_low, &m, &v);
    EXPECT_TRUE(SameFloats(s.p, after.p));
    EXPECT_TRUE(SameFloats(s.m, after.m));
    EXPECT_TRUE(SameFloats(s.v, after.v));
    JoinMaster(master_high.data(), master_low.data(), s.p.data(), kN);
    EXPECT_TRUE(SameFloats(s.p, after.p));
    EXPECT_TRUE(SameFloats(m, after.m));
    EXPECT_TRUE(SameFloats(v, after.v));
  };
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    check([&](State* s, auto* master_high, auto* master_low, auto* m, auto* v) {
      AdamWFp32(step, s->p.data(), s->m.data(), s->v.data(), s->g.data(), kN, &pool);
      AdamWSplit(step, master_high->data(), master_low->data(), m->data(), v->data(), grad.data(), kN, &pool);
    });
  }
  std::mt19937_64 random(3);
  for (int round = 0; round < 5; ++round) {
    std::vector<size_t> cuts = {0, kN};
    for (int i = 0; i < 20; ++i) cuts.push_back(random() % kN);
    std::sort(cuts.begin(), cuts.end());
    check([&](State* s, auto* master_high, auto* master_low, auto* m, auto* v) {
      for (size_t i = cuts.size() - 1; i-- > 0;) {
        const size_t b = cuts[i], n = cuts[i + 1] - cuts[i];
        AdamWFp32(step, s->p.data() + b, s->m.data() + b, s->v.data() + b, s->g.data() + b, n);
        AdamWSplit(step, master_high->data() + b, master_low->data() + b, m->data() + b, v->data() + b,
                   grad.data() + b, n);
      }
    });
  }
}

// One step against the formula in double. The bound is derived operation by operation
// (optimizer_reference.h); for ordinary values it must be a few units in the last place, or it would prove
// nothing.
TEST(Adam, WithinTheErrorBoundOfTheFloat64Oracle) {
  for (const AdamStep& step : Steps()) {
    for (const Values kind : {Values::kNormal, Values::kTiny, Values::kHuge, Values::kDenormal}) {
      const State before = MakeState(20000, kind, 77);
      State after = before;
      AdamWFp32(step, after.p.data(), after.m.data(), after.v.data(), after.g.data(), after.p.size());
      const bool ordinary = kind == Values::kNormal && step.mode == AdamMode::kAdamW;
      for (size_t i = 0; i < before.p.size(); ++i) {
        Bounded p(before.p[i]), m(before.m[i]), v(before.v[i]);
        UpdateOne<Bounded>(step, &p, before.g[i], &m, &v);
        ASSERT_LE(std::fabs(after.m[i] - m.value), m.error) << i;
        ASSERT_LE(std::fabs(after.v[i] - v.value), v.error) << i;
        ASSERT_LE(std::fabs(after.p[i] - p.value), p.error) << i;
        if (ordinary) {  // v is a sum of non-negative terms: no cancellation; p and m may cancel
          ASSERT_LE(Ulps(after.v[i], v.value), 3.0);
          const double terms = std::fabs(before.p[i]) + std::fabs(p.value - before.p[i]);
          ASSERT_LE(p.error, 12 * 0x1p-23 * terms) << "the bound says nothing";
          ASSERT_LE(m.error, 6 * 0x1p-23 * (std::fabs(before.m[i]) + std::fabs(before.g[i])));
        }
      }
    }
  }
}

TEST(Adam, NonFiniteGradientsSpoilOnlyTheirOwnElement) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    const AdamStep step = Steps()[0];
    State s = MakeState(64, Values::kNormal, 9);
    const State clean = Reference(step, s);
    s.g[20] = std::numeric_limits<float>::quiet_NaN();
    s.g[45] = HUGE_VALF;
    AdamWFp32(step, s.p.data(), s.m.data(), s.v.data(), s.g.data(), 64);
    for (size_t i = 0; i < 64; ++i) {
      EXPECT_EQ(std::isnan(s.p[i]), i == 20 || i == 45);
      if (i != 20 && i != 45) {
        EXPECT_EQ(s.p[i], clean.p[i]);
      }
    }
  }
}

// A quadratic bowl: the whole thing has to go downhill, for many steps.
TEST(Adam, FindsAMinimum) {
  constexpr size_t kN = 100;
  const std::vector<float> target = Random(kN, Values::kNormal, 1);
  std::vector<uint16_t> master_high(kN, 0), grad(kN);
  std::vector<int16_t> master_low(kN, 0);
  std::vector<float> m(kN, 0), v(kN, 0), p(kN);
  for (int64_t t = 1; t <= 3000; ++t) {
    JoinMaster(master_high.data(), master_low.data(), p.data(), kN);
    for (size_t i = 0; i < kN; ++i) grad[i] = FloatToBf16(p[i] - target[i]);
    const AdamStep step = MakeAdamStep({.lr = t < 2000 ? 1e-2 : 1e-4}, t);
    AdamWSplit(step, master_high.data(), master_low.data(), m.data(), v.data(), grad.data(), kN);
  }
  for (size_t i = 0; i < kN; ++i) EXPECT_NEAR(JoinOne(master_high[i], master_low[i]), target[i], 2e-3);
}

}  // namespace
}  // namespace penstock::kernels::adam_test
