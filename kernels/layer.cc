#include "kernels/layer.h"

#include <cmath>

#include "kernels/simd/table.h"

namespace penstock::kernels {
namespace {

float Widened(DType type, const void* x, size_t i) {
  return type == DType::kFp32 ? static_cast<const float*>(x)[i]
                              : Bf16ToFloat(static_cast<const uint16_t*>(x)[i]);
}
void Put(DType type, float value, void* out, size_t i) {
  if (type == DType::kFp32) {
    static_cast<float*>(out)[i] = value;
  } else {
    static_cast<uint16_t*>(out)[i] = FloatToBf16(value);
  }
}
float Rounded(DType type, float value) {
  return type == DType::kFp32 ? value : Bf16ToFloat(FloatToBf16(value));
}

NormArguments ArgumentsOf(const NormRows& in, void* out) {
  return {.x = in.x,
          .weight = in.weight,
          .bias = in.bias,
          .rows = in.rows,
          .columns = in.columns,
          .epsilon = in.epsilon,
          .from_one = in.from_one,
          .rounds_normal = in.rounds_normal,
          .out = out};
}

}  // namespace

void RootMeanSquareNorm(const NormRows& in, void* out) {
  Kernels().root_norm[static_cast<size_t>(in.type)](ArgumentsOf(in, out));
}

void LayerNorm(const NormRows& in, void* out) {
  Kernels().layer_norm[static_cast<size_t>(in.type)](ArgumentsOf(in, out));
}

void RotateHeads(const RotatedHeads& of, void* x, const float* cosine, const float* sine) {
  Kernels().rotate_heads[static_cast<size_t>(of.type)](
      {.x = x, .heads = of.heads, .depth = of.depth, .half = of.half, .cosine = cosine, .sine = sine});
}

void Activate(DType type, Activation activation, const void* x, const void* times, size_t n, void* out) {
  if (activation != Activation::kTanh) {
    return Kernels().activate[static_cast<size_t>(type)][static_cast<size_t>(activation)](x, times, n, out);
  }
  // No published model has it: the C library's is enough.
  for (size_t i = 0; i < n; ++i) {
    const float value = std::tanh(Widened(type, x, i));
    Put(type, times == nullptr ? value : Rounded(type, value) * Widened(type, times, i), out, i);
  }
}

// A number that is none stays so, as torch.clamp has it.
void SplitClampedPairs(DType type, const void* pairs, float limit, size_t n, void* first, void* second) {
  for (size_t i = 0; i < n; ++i) {
    const float a = Widened(type, pairs, 2 * i), b = Widened(type, pairs, 2 * i + 1);
    Put(type, a > limit ? limit : a, first, i);
    Put(type, (b > limit ? limit : b < -limit ? -limit : b) + 1, second, i);
  }
}

void ScaleElements(DType type, void* x, float factor, size_t n) {
  for (size_t i = 0; i < n; ++i) Put(type, Widened(type, x, i) * factor, x, i);
}

void DivideElements(DType type, void* x, float divisor, size_t n) {
  for (size_t i = 0; i < n; ++i) Put(type, Widened(type, x, i) / divisor, x, i);
}

void SoftCap(DType type, void* x, float cap, size_t n) {
  Kernels().soft_cap[static_cast<size_t>(type)](x, cap, n);
}

void AddElements(DType type, const void* a, const void* b, size_t n, void* out) {
  Kernels().add_elements[static_cast<size_t>(type)](a, b, n, out);
}

}  // namespace penstock::kernels
