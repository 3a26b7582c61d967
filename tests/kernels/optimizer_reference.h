// The optimizers' formulas once more, one element at a time, over any number type: with float they say the
// exact bits that the kernels must give; with Bounded they are the float64 oracle with a rigorous error
// bound.
#ifndef PENSTOCK_TESTS_KERNELS_OPTIMIZER_REFERENCE_H_
#define PENSTOCK_TESTS_KERNELS_OPTIMIZER_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/optimizer.h"

namespace penstock::kernels {

// A real number computed in double, and how far an fp32 computation of it may be off: every operation adds
// half a unit in the last place (2^-24 of the magnitude, or half the least denormal) to what its operands
// bring.
struct Bounded {
  double value = 0;
  double error = 0;
  Bounded() = default;
  Bounded(float x) : value(x) {}  // NOLINT(google-explicit-constructor): constants of a step are exact
  Bounded(double v, double e) : value(v), error(e) {
    const double most = std::fabs(value) + error;
    error += most * 0x1p-24 * (1 + 1e-6) + 0x1p-150;
    if (!(most < static_cast<double>(std::numeric_limits<float>::max())))
      error = HUGE_VAL;  // may overflow in fp32
  }
};
inline Bounded Neg(Bounded a) {
  a.value = -a.value;
  return a;
}
inline Bounded Add(Bounded a, Bounded b) { return {a.value + b.value, a.error + b.error}; }
inline double ProductError(Bounded a, Bounded b) {
  return std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + a.error * b.error;
}
inline Bounded Mul(Bounded a, Bounded b) { return {a.value * b.value, ProductError(a, b)}; }
inline Bounded Fma(Bounded a, Bounded b, Bounded c) {
  return {a.value * b.value + c.value, ProductError(a, b) + c.error};
}
inline Bounded Div(Bounded a, Bounded b) {
  const double least = std::fabs(b.value) - b.error;
  if (!(least > 0)) return {0.0, HUGE_VAL};
  return {a.value / b.value, (a.error + std::fabs(a.value / b.value) * b.error) / least};
}
inline Bounded Sqrt(Bounded a) {
  const double root = std::sqrt(std::max(a.value, 0.0));
  const double above = std::sqrt(std::max(a.value, 0.0) + a.error) - root;
  const double below = root - std::sqrt(std::max(a.value - a.error, 0.0));
  return {root, std::max(above, below)};
}
inline Bounded Sign(Bounded a) {
  if (std::fabs(a.value) <= a.error && a.error > 0) return {0.0, HUGE_VAL};  // undecided
  return {a.value > 0 ? 1.0 : a.value < 0 ? -1.0 : 0.0, 0.0};
}

inline float Neg(float a) { return -a; }
inline float Add(float a, float b) { return a + b; }
inline float Mul(float a, float b) { return a * b; }
inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float Div(float a, float b) { return a / b; }
inline float Sqrt(float a) { return std::sqrt(a); }
inline float Sign(float a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a == 0 ? 0.0f : a; }

template <class T>
void UpdateOne(const AdamStep& s, T* p, T g, T* m, T* v) {
  g = Mul(g, T(s.grad_scale));
  if (s.mode == AdamMode::kAdam) {
    g = Fma(*p, T(s.weight_decay), g);
  } else {
    *p = Mul(*p, T(s.decay));
  }
  *m = Fma(g, T(s.one_minus_beta1), Mul(*m, T(s.beta1)));
  *v = Fma(Mul(g, T(s.one_minus_beta2)), g, Mul(*v, T(s.beta2)));
  const T d = Add(Div(Sqrt(*v), T(s.sqrt_correction2)), T(s.eps));
  *p = Add(*p, Div(Mul(Neg(T(s.step_size)), *m), d));
}

template <class T>
void UpdateOne(const AdagradStep& s, T* p, T g, T*, T* v) {
  g = Mul(g, T(s.grad_scale));
  if (s.weight_decay != 0.0f) g = Fma(*p, T(s.weight_decay), g);
  *v = Fma(g, g, *v);
  *p = Add(*p, Div(Mul(Neg(T(s.step_size)), g), Add(Sqrt(*v), T(s.eps))));
}

template <class T>
void UpdateOne(const LionStep& s, T* p, T g, T* m, T*) {
  g = Mul(g, T(s.grad_scale));
  const T c = Fma(g, T(s.one_minus_beta1), Mul(*m, T(s.beta1)));
  *p = Fma(Neg(T(s.lr)), Sign(c), Mul(*p, T(s.decay)));
  *m = Fma(g, T(s.one_minus_beta2), Mul(*m, T(s.beta2)));
}

template <class T>
void UpdateOne(const SgdStep& s, T* p, T g, T* m, T*) {
  g = Mul(g, T(s.grad_scale));
  if (s.weight_decay != 0.0f) g = Fma(*p, T(s.weight_decay), g);
  if (s.momentum != 0.0f) {
    *m = Fma(g, T(s.one_minus_dampening), Mul(*m, T(s.momentum)));
    g = s.nesterov ? Fma(*m, T(s.momentum), g) : *m;
  }
  *p = Fma(g, Neg(T(s.lr)), *p);
}

// LAMB's direction from updated moments.
template <class T>
T LambDirectionOne(const LambStep& s, T p, T m, T v) {
  const T d = Add(Div(Sqrt(v), T(s.adam.sqrt_correction2)), T(s.adam.eps));
  return Fma(p, T(s.weight_decay), Div(Mul(m, T(s.inverse_correction1)), d));
}

}  // namespace penstock::kernels

#endif  // PENSTOCK_TESTS_KERNELS_OPTIMIZER_REFERENCE_H_
