#include "kernels/product.h"

#include <cstring>
#include <vector>

#include "kernels/cpu_features.h"
#include "kernels/simd/table.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>
#endif

namespace penstock::kernels {
namespace {

// On this thread, numbers below 2^-126 count as zero, as they always do in bf16 products.
class FlushesToZero {
 public:
#if defined(__x86_64__)
  FlushesToZero() { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushesToZero() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushToZero = 1U << 15, kDenormalsAreZero = 1U << 6;
  const unsigned before_ = _mm_getcsr();
#endif
};

size_t Filled(size_t count, size_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// A few hundred products of every size down to what counts as zero, in bf16.
struct Sample {
  static constexpr size_t kRows = 7, kColumns = 70, kOutputs = 40;
  Sample() : values((kRows + kOutputs) * kColumns) {
    uint32_t random = 1;
    for (uint16_t& value : values) {
      random = random * 1664525 + 1013904223;
      const uint32_t exponent = (random >> 24) % 3 == 0 ? 30 + (random >> 8) % 60 : 112 + (random >> 8) % 24;
      value = static_cast<uint16_t>((random >> 31) << 15 | exponent << 7 | (random >> 16 & 0x7F));
    }
  }
  // `columns`: as the product wants them.
  std::vector<float> Multiply(void (*pack)(const uint16_t*, size_t, size_t, size_t, void*), size_t columns,
                              void (*product)(const ProductArguments&)) const {
    const FlushesToZero flushes;
    std::vector<float> packed(Filled(kRows, 16) * Filled(kColumns, 32)), y(kRows * kOutputs);
    pack(values.data(), kRows, kColumns, kColumns, packed.data());
    product({.x = packed.data(),
             .rows = kRows,
             .columns = columns,
             .x_stride = Filled(kColumns, 32),
             .weights = values.data() + kRows * kColumns,
             .weights_stride = kColumns * sizeof(uint16_t),
             .group = 0,
             .y = y.data(),
             .outputs = kOutputs,
             .y_stride = kOutputs});
    return y;
  }
  std::vector<uint16_t> values;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Whether this processor's products have the bits of the definition, which the makers' manuals do not
// promise: a sample of them beside multiply-adds. One level has the instructions.
bool UsesBf16Product(const KernelTable& kernels) {
  if (kernels.bf16_product == nullptr || !GetCpuFeatures().avx512_bf16) return false;
  static const bool exact = [&] {
    const Sample sample;
    return SameBits(sample.Multiply(kernels.pack_bf16, Sample::kColumns, kernels.bf16_product),
                    sample.Multiply(kernels.pack_pairs, Filled(Sample::kColumns, 32), kernels.pair_product));
  }();
  return exact;
}
// Of the best level, since what it finds holds for all.
bool HasTileProduct() {
  static const bool has = [] {
#if defined(__x86_64__)
    if (!GetCpuFeatures().amx_bf16) return false;
    constexpr int kAskForState = 0x1023, kTiles = 18;  // ARCH_REQ_XCOMP_PERM
    if (syscall(SYS_arch_prctl, kAskForState, kTiles) != 0) return false;
    const Sample sample;
    const KernelTable& kernels = kAvx512Kernels;
    return SameBits(sample.Multiply(kernels.pack_tiles, Sample::kColumns, kernels.amx_product[0]),
                    sample.Multiply(kernels.pack_tiles, Sample::kColumns, kernels.tile_product[0]));
#else
    return false;
#endif
  }();
  return has;
}

ProductArguments ArgumentsOf(const ProductInput& x, const void* weights, const ProductOutput& y) {
  return {.x = x.data,
          .rows = x.rows,
          .columns = x.columns,
          .x_stride = x.stride,
          .weights = weights,
          .weights_stride = 0,
          .group = 0,
          .y = y.data,
          .outputs = y.outputs,
          .y_stride = y.stride};
}

}  // namespace

void MultiplyRows(const ProductInput& x, DType type, const void* weights, const ProductOutput& y) {
  ProductArguments arguments = ArgumentsOf(x, weights, y);
  arguments.weights_stride = x.columns * BytesPerElement(type);
  Kernels().product[static_cast<size_t>(type)](arguments);
}

void MultiplyRows(const ProductInput& x, const WeightCode& code, const void* weights,
                  const ProductOutput& y) {
  ProductArguments arguments = ArgumentsOf(x, weights, y);
  arguments.weights_stride = code.row_bytes(x.columns);
  arguments.group = code.group;
  Kernels().coded_product[code.bits == 8 ? 0 : 1](arguments);
}

void MultiplyRowsTurned(const ProductInput& x, DType type, const void* weights, size_t weights_stride,
                        const ProductOutput& y) {
  ProductArguments arguments = ArgumentsOf(x, weights, y);
  arguments.weights_stride = weights_stride * BytesPerElement(type);
  Kernels().turned_product[static_cast<size_t>(type)](arguments);
}

PackedOrder FastPackedOrder() { return HasTileProduct() ? PackedOrder::kTiles : PackedOrder::kPairs; }

bool HasPackedProduct() {
#if defined(__x86_64__)
  return HasTileProduct() || UsesBf16Product(kAvx512Kernels);
#else
  return false;
#endif
}

size_t PackedRows::Bytes(size_t rows, size_t columns, PackedOrder order) {
  return order == PackedOrder::kTiles ? Filled(rows, 16) * Filled(columns, 32) * sizeof(uint16_t)
                                      : rows * Filled(columns, 32) * sizeof(float);
}

PackedRows::PackedRows(const uint16_t* x, size_t rows, size_t columns, size_t stride, void* memory,
                       PackedOrder order)
    : rows_(rows), columns_(columns), order_(order), kernels_(Kernels()), packed_(memory) {
  const bool tiles = order == PackedOrder::kTiles;
  native_ = tiles ? kernels_.amx_product[0] != nullptr && HasTileProduct() : UsesBf16Product(kernels_);
  (tiles     ? kernels_.pack_tiles
   : native_ ? kernels_.pack_bf16
             : kernels_.pack_pairs)(x, rows, columns, stride, memory);
}

ProductArguments PackedRows::Arguments(const void* weights, size_t weights_stride,
                                       const ProductOutput& y) const {
  const size_t filled = Filled(columns_, 32);
  return {.x = static_cast<const float*>(packed_),
          .rows = rows_,
          .columns = order_ == PackedOrder::kTiles || native_ ? columns_ : filled,
          .x_stride = filled,
          .weights = weights,
          .weights_stride = weights_stride,
          .group = 0,
          .y = y.data,
          .outputs = y.outputs,
          .y_stride = y.stride};
}

void PackedRows::Multiply(const void* weights, const ProductOutput& y) const {
  const FlushesToZero flushes;
  const ProductArguments arguments = Arguments(weights, columns_ * sizeof(uint16_t), y);
  if (order_ == PackedOrder::kTiles) {
    (native_ ? kernels_.amx_product : kernels_.tile_product)[0](arguments);
  } else {
    (native_ ? kernels_.bf16_product : kernels_.pair_product)(arguments);
  }
}

void PackedRows::Multiply(const WeightCode& code, const void* weights, const ProductOutput& y) const {
  const FlushesToZero flushes;
  ProductArguments arguments = Arguments(weights, code.row_bytes(columns_), y);
  arguments.group = code.group;
  (native_ ? kernels_.amx_product : kernels_.tile_product)[code.bits == 8 ? 1 : 2](arguments);
}

}  // namespace penstock::kernels
