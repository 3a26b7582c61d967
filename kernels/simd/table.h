// The table of single-threaded kernels that each SIMD level provides, and the plain arguments they take.
// Internal to this room. Seen by the files compiled for wider instruction sets, so: no inline code here, and
// no header with any.
#ifndef PENSTOCK_KERNELS_SIMD_TABLE_H_
#define PENSTOCK_KERNELS_SIMD_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/adam.h"
#include "kernels/optimizer.h"

namespace penstock::kernels {

// Which optimizer's kernel: the first index of KernelTable::update.
enum Optimizer { kOptAdam, kOptAdagrad, kOptLion, kOptSgd, kOptimizers };
inline constexpr int kParamTypes = 4;
inline constexpr int kDTypes = 3;
// States that a kernel reads and writes element by element; 8-bit states are decoded to fp32 around it.
inline constexpr int kDirectStateTypes = 2;

// Elements first_element ... of an update; all pointers already point at the first one.
struct UpdateChunk {
  size_t n;
  void* param;
  int16_t* master_low;
  uint16_t* copy_out;
  bool copy_is_fp16;
  // Store the copy around the caches: copy_out is aligned to 32 bytes, and nobody reads it soon. The
  // caller of the kernels of a piece calls stream_fence after the last: a fence after each chunk stalls.
  bool stream_copy;
  const void* grad;
  void* m;
  void* v;
  UpdateSource from;  // with `param` null all is read where it is written
  // Store the parameter, or the states, around the caches: they are aligned to 64 bytes (fp32) or 32, and
  // `from` is not null. As for the copy, the caller calls stream_fence.
  bool stream_param, stream_states;
  uint64_t first_element;
  uint64_t seed;
  double* squares;  // where not null: takes the partial sum of this chunk's gradient, n <= kReduceBlock
};

// A product of kernels/product.h; strides of x and y in elements, of weights in bytes.
struct ProductArguments {
  const float* x;
  size_t rows, columns, x_stride;
  const void* weights;
  size_t weights_stride, group;
  float* y;
  size_t outputs, y_stride;
};

// Of kernels/many_rows.h: outputs [first, end), and columns [first_column, first_column + count) of them.
inline constexpr size_t kManyRowsStrip = 256;  // a multiple of every code block's
struct ManyArguments {
  const float* packed;  // `vectors` of turned rows, [count][16] each
  size_t vectors, columns, first_column, count;
  const void* weights;
  size_t weights_stride, group;  // in bytes; of a code
  size_t first, end;
  float* sums;  // [outputs][rows]; what stands there is added to, unless these are the first columns
  size_t sums_stride;
};

// Of kernels/layer.h.
struct NormArguments {
  const void* x;
  const void* weight;
  const void* bias;
  size_t rows, columns;
  float epsilon;
  bool from_one, rounds_normal;
  void* out;
};

struct HeadsArguments {
  void* x;
  size_t heads, depth, half;
  const float* cosine;
  const float* sine;
};

// Of kernels/attention.h.
struct AttentionArguments {
  const void* queries;
  size_t heads;
  const void* records;
  size_t positions, key_heads, depth;
  float scale, cap;
  const float* sinks;
  size_t value_depth;
  size_t first, end;
  float* out;
};

using UpdateFn = void (*)(const void* step, const UpdateChunk& chunk);
// LAMB's moments: reads m, v and the gradient, writes m and v.
using LambMomentsFn = void (*)(const LambStep& step, const UpdateChunk& chunk);
// LAMB's direction from the moments as stored: u, and p as fp32.
using LambDirectionFn = void (*)(const LambStep& step, const UpdateChunk& chunk, float* u, float* p);
// p = fma(u, -rate, p).
using LambApplyFn = void (*)(const LambStep& step, float rate, const UpdateChunk& chunk);

struct KernelTable {
  void (*stream_fence)();  // what was stored around the caches may be looked at by other threads
  // Conversions; [type] is the DType of the 16-bit side (kFp32 unused: null).
  void (*to_fp32[kDTypes])(const uint16_t* in, float* out, size_t n);
  void (*from_fp32[kDTypes])(const float* in, uint16_t* out, size_t n);
  void (*accumulate[kDTypes])(const void* in, float* acc, size_t n);
  void (*split)(const float* master, uint16_t* master_high, int16_t* master_low, size_t n);
  void (*join)(const uint16_t* master_high, const int16_t* master_low, float* master, size_t n);

  // Partial sum of one reduction block (n <= kReduceBlock), by the definition in kernels/reduce.h.
  double (*block_squares[kDTypes])(const void* in, size_t n);
  bool (*all_finite[kDTypes])(const void* in, size_t n);
  void (*scale[kDTypes])(void* x, float factor, size_t n);

  // One block (n <= kStateBlock) of 8-bit values; [code] is a Code8. encode returns the scale.
  float (*encode8[2])(const float* in, uint8_t* codes, size_t n, const Rounding& rounding);
  void (*decode8[2])(const uint8_t* codes, float scale, float* out, size_t n);
  // One group of coded weights, and the bf16 bits of its scale; [bits 8 or 4].
  uint16_t (*encode_weights[2][kDTypes])(const void* in, size_t n, uint8_t* codes);
  // A row of coded weights; [bits 8 or 4].
  void (*decode_weights[2][kDTypes])(const uint8_t* scales, const uint8_t* codes, size_t group, void* out,
                                     size_t n);

  void (*product[kDTypes])(const ProductArguments& arguments);
  void (*coded_product[2])(const ProductArguments& arguments);  // [bits 8 or 4]
  // Packed rows of bf16 (kernels/product.h), and products with them; columns are filled up to a multiple
  // of 32. The first two are null where the level has no instructions for them; `x` is what they have packed,
  // without a stride.
  void (*pack_bf16)(const uint16_t* x, size_t rows, size_t columns, size_t stride, void* packed);
  void (*bf16_product)(const ProductArguments& arguments);
  // Widened to fp32; `columns` and `x_stride` are filled up.
  void (*pack_pairs)(const uint16_t* x, size_t rows, size_t columns, size_t stride, void* packed);
  void (*pair_product)(const ProductArguments& arguments);
  // In the order of tiles; `x` is what pack_tiles has packed (kernels/simd/product_inl_tiles.h), `columns`
  // are not filled up. [plain, 8 bits, 4 bits]; the second is null where the level has no instructions for
  // it.
  void (*pack_tiles)(const uint16_t* x, size_t rows, size_t columns, size_t stride, void* packed);
  void (*tile_product[3])(const ProductArguments& arguments);
  void (*amx_product[3])(const ProductArguments& arguments);
  void (*turned_product[kDTypes])(const ProductArguments& arguments);
  void (*attend[kDTypes])(const AttentionArguments& arguments);

  // Up to sixteen rows of `count` columns, column by column; and sums [outputs][rows] back to rows.
  void (*turn_rows[kDTypes])(const void* x, size_t rows, size_t stride, size_t count, float* out);
  void (*take_turned[kDTypes])(const float* sums, size_t sums_stride, size_t rows, size_t outputs, void* out,
                               size_t out_stride);
  void (*many_product[kDTypes])(const ManyArguments& arguments);
  void (*coded_many_product[2])(const ManyArguments& arguments);  // [bits 8 or 4]
  void (*turned_many_product[kDTypes])(const ManyArguments& arguments);

  // Of kernels/layer.h; [Activation] without the last one. Of fp32 and bf16.
  void (*root_norm[2])(const NormArguments& arguments);
  void (*layer_norm[2])(const NormArguments& arguments);
  void (*rotate_heads[2])(const HeadsArguments& arguments);
  void (*activate[2][5])(const void* x, const void* times, size_t n, void* out);
  void (*add_elements[2])(const void* a, const void* b, size_t n, void* out);
  void (*soft_cap[2])(void* x, float cap, size_t n);

  UpdateFn update[kOptimizers][kParamTypes][kDTypes][kDirectStateTypes];
  LambMomentsFn lamb_moments[kDTypes][kDirectStateTypes];
  LambDirectionFn lamb_direction[kParamTypes][kDirectStateTypes];
  LambApplyFn lamb_apply[kParamTypes][kDirectStateTypes];

  // XXH3 with the level's instructions; `state` points at an XXH3_state_t.
  uint64_t (*checksum)(const void* data, size_t bytes, uint64_t seed);
  void (*checksum_update)(void* state, const void* data, size_t bytes);
};

extern const KernelTable kPortableKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

// The table of the active level.
const KernelTable& Kernels();

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_SIMD_TABLE_H_
