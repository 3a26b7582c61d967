// What a decoder's layer computes beside its matrix products and attention: norms, activations, rotation by
// positions, sums. Of fp32 or bf16: values are widened, computed with in fp32, and rounded once to the type
// where nothing else is said. A row's bits, or an element's, depend on that row or element alone: not on the
// SIMD level, nor on where it stands.
//
// Definition, beside what stands with each: a sum over a row is taken lane by lane, lane j of 16 beginning
// with +0 and taking the elements j, j + 16, ... in that order by fused multiply-adds; then the lanes are
// added up as in kernels/reduce.h. sigmoid(x) is 1 / (1 + e) of x >= 0 and e / (1 + e) below, with e =
// exp(-|x|) as kernels/attention.h has it.
//
// On the calling thread. Any alignment; thread-safe; no allocation. `out` may be one of the inputs.
#ifndef PENSTOCK_KERNELS_LAYER_H_
#define PENSTOCK_KERNELS_LAYER_H_

#include <cstddef>
#include <cstdint>

#include "kernels/float16.h"

namespace penstock::kernels {

// By Hugging Face's names.
enum class Activation : uint8_t {
  kGelu,       // "gelu": x times the normal distribution's function (Abramowitz and Stegun 7.1.26, to 1e-7)
  kGeluNew,    // "gelu_new": its approximation by tanh, x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
  kQuickGelu,  // "quick_gelu": x * sigmoid(1.702 x), 1.702 x and the sigmoid rounded to the type
  kRelu,
  kSilu,  // x * sigmoid(x)
  kTanh,
};

// Rows without gaps; a vector for all of them.
struct NormRows {
  DType type;
  const void* x;
  size_t rows, columns;
  const void* weight;
  const void* bias;  // null for RootMeanSquareNorm
  float epsilon;
  // Of RootMeanSquareNorm: the weight is what is added to 1; and whether what the weight multiplies is
  // rounded before that.
  bool from_one = false, rounds_normal = true;
};
// x / sqrt(mean of x^2 + epsilon), rounded to the type; that times the weight (Zhang and Sennrich 2019). With
// `from_one` it is not rounded before it is multiplied by 1 + the weight, as Gemma has it, and without
// `rounds_normal` not before it is multiplied by the weight, as gpt-oss has it.
void RootMeanSquareNorm(const NormRows& in, void* out);
// fma((x - mean) / sqrt(mean of (x - mean)^2 + epsilon), weight, bias) (Ba et al. 2016).
void LayerNorm(const NormRows& in, void* out);

// Heads of a token, of `depth` elements each, of which the first 2 * half turn.
struct RotatedHeads {
  DType type;
  size_t heads, depth, half;
};
// Turns the pairs (j, j + half) of each head, in place, by angles of which cosine and sine [half] are of the
// type already: every product is rounded, and so is their sum (Su et al. 2021).
void RotateHeads(const RotatedHeads& of, void* x, const float* cosine, const float* sine);

// activation(x), and where `times` is not null the rounded result times it.
void Activate(DType type, Activation activation, const void* x, const void* times, size_t n, void* out);

// Of n pairs that lie one behind the other, the first of each, at most `limit`, to `first`; and the second,
// within [-limit, limit], plus 1, to `second`. Neither is one of the inputs.
void SplitClampedPairs(DType type, const void* pairs, float limit, size_t n, void* first, void* second);

void AddElements(DType type, const void* a, const void* b, size_t n, void* out);
void ScaleElements(DType type, void* x, float factor, size_t n);    // x = x * factor
void DivideElements(DType type, void* x, float divisor, size_t n);  // x = x / divisor
// x = cap * tanh(x / cap), each of the three steps rounded to the type. tanh is within 2 units in the last
// place of fp32.
void SoftCap(DType type, void* x, float cap, size_t n);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_LAYER_H_
