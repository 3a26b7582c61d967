// Products of many rows (kernels/many_rows.h), written once over the 16-lane vectors. Lanes are rows.
// Included after product_inl.h.
#include "kernels/simd/table.h"

namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE {

// A tile of sums and what is multiplied into it fit into the registers (kVectors of 16 lanes).
inline constexpr size_t kManyOutputs = kVectors >= 32 ? 12 : kVectors >= 8 ? 6 : 2;
inline constexpr size_t kManyVectors = kVectors >= 32 ? 2 : 1;

// Sixteen rows, or fewer and zeros, of `count` columns: column by column.
template <int kType>
void TurnRows(const void* x, size_t rows, size_t stride, size_t count, float* out) {
  alignas(64) float strip[16];
  if (rows < 16) __builtin_memset(out, 0, count * 16 * sizeof(float));
  for (size_t row = 0; row < rows; ++row) {
    const auto* from = static_cast<const unsigned char*>(x) + row * stride * (kType == 0 ? 4 : 2);
    float* const to = out + row;
    ForVectors(count, [&]<bool kTail>(size_t k, size_t n) {
      StoreF<false>(strip, Element<kType>::template Load<kTail>(from, k, n), 16);
      for (size_t i = 0; i < n; ++i) to[(k + i) * 16] = strip[i];
    });
  }
}

// Sums [outputs][rows] as rows of the type.
template <int kType>
void TakeTurned(const float* sums, size_t sums_stride, size_t rows, size_t outputs, void* out,
                size_t out_stride) {
  alignas(64) float strip[16];
  ForVectors(outputs, [&]<bool kTail>(size_t first, size_t n) {
    for (size_t row = 0; row < rows; ++row) {
      for (size_t i = 0; i < n; ++i) strip[i] = sums[(first + i) * sums_stride + row];
      auto* const to = static_cast<unsigned char*>(out) + row * out_stride * (kType == 0 ? 4 : 2);
      Element<kType>::template Store<kTail>(to, first, LoadF<false>(strip, 16), n);
    }
  });
}

// Adds the terms of a strip to the sums of kOutputs outputs, of kOfRows vectors of rows.
template <size_t kOutputs, size_t kOfRows>
inline void AddManyTile(const ManyArguments& a, const float (*weights)[kManyRowsStrip], size_t output,
                        size_t vector) {
  F tile[kOutputs][kOfRows];
  float* const sums = a.sums + output * a.sums_stride + vector * 16;
  for (size_t n = 0; n < kOutputs; ++n) {
    for (size_t v = 0; v < kOfRows; ++v)
      tile[n][v] = a.first_column == 0 ? Set(0) : LoadF<false>(sums + n * a.sums_stride + v * 16, 16);
  }
  const float* const rows = a.packed + vector * 16 * a.count;
  for (size_t k = 0; k < a.count; ++k) {
    F x[kOfRows];
    for (size_t v = 0; v < kOfRows; ++v) x[v] = LoadF<false>(rows + (v * a.count + k) * 16, 16);
    for (size_t n = 0; n < kOutputs; ++n) {
      const F weight = Set(weights[n][k]);
      for (size_t v = 0; v < kOfRows; ++v) tile[n][v] = Fma(x[v], weight, tile[n][v]);
    }
  }
  for (size_t n = 0; n < kOutputs; ++n) {
    for (size_t v = 0; v < kOfRows; ++v) StoreF<false>(sums + n * a.sums_stride + v * 16, tile[n][v], 16);
  }
}

template <size_t kOutputs>
inline void AddManyOutputs(const ManyArguments& a, const float (*weights)[kManyRowsStrip], size_t output) {
  size_t v = 0;
  for (; v + kManyVectors <= a.vectors; v += kManyVectors)
    AddManyTile<kOutputs, kManyVectors>(a, weights, output, v);
  for (; v < a.vectors; ++v) AddManyTile<kOutputs, 1>(a, weights, output, v);
}

// What `Weights` (product_inl.h) has of the strip of an output.
template <class Weights>
struct StripOf {
  template <size_t kOutputs>
  static void Widen(const ManyArguments& a, size_t output, float (*strip)[kManyRowsStrip]) {
    ProductArguments of{};
    of.columns = a.columns;
    of.weights = a.weights;
    of.weights_stride = a.weights_stride;
    of.group = a.group;
    for (size_t n = 0; n < kOutputs; ++n) {
      const float* const widened = Weights::Widened(of, output + n, a.first_column, a.count, strip[n]);
      if (widened != strip[n]) __builtin_memcpy(strip[n], widened, a.count * sizeof(float));
    }
  }
};
template <int kType>
struct TurnedStrip {
  template <size_t kOutputs>
  static void Widen(const ManyArguments& a, size_t output, float (*strip)[kManyRowsStrip]) {
    alignas(64) float column[16];
    for (size_t k = 0; k < a.count; ++k) {
      const auto* weights =
          static_cast<const unsigned char*>(a.weights) + (a.first_column + k) * a.weights_stride;
      StoreF<false>(column, Element<kType>::template Load<true>(weights, output, kOutputs), 16);
      for (size_t n = 0; n < kOutputs; ++n) strip[n][k] = column[n];
    }
  }
};

template <class Strip>
void ManyProduct(const ManyArguments& a) {
  alignas(64) float strip[kManyOutputs][kManyRowsStrip];
  size_t n = a.first;
  for (; n + kManyOutputs <= a.end; n += kManyOutputs) {
    Strip::template Widen<kManyOutputs>(a, n, strip);
    AddManyOutputs<kManyOutputs>(a, strip, n);
  }
  for (; n < a.end; ++n) {
    Strip::template Widen<1>(a, n, strip);
    AddManyOutputs<1>(a, strip, n);
  }
}

}  // namespace penstock::kernels::PENSTOCK_SIMD_NAMESPACE
