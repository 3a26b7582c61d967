// What generation computes where LibTorch does, on a device: a decoder's function (models/families/decoder.h)
// in LibTorch's operations. The caller keeps the keys and values of the tokens before (the KV cache), and has
// the weights only while they are used.
//
//   x = decoder->Embed(rows of the token table, rows of the position table);
//   for each layer: x = decoder->Layer(i, layer_access, x, places);
//   logits = decoder->Logits(head_access, x);
//
// `x` is [rows, width]: one row for each token, of any number of sequences, side by side.
//
// Immutable; any number of threads may use one.
#ifndef PENSTOCK_MODELS_FAMILIES_TENSOR_DECODER_H_
#define PENSTOCK_MODELS_FAMILIES_TENSOR_DECODER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "models/families/causal_attention.h"

namespace penstock::models {

// The weights of one block and the caches of one layer. A matrix may be asked for once, in the order of the
// block's description; vectors at any time.
class BlockAccess {
 public:
  virtual ~BlockAccess() = default;
  // A vector, by name.
  virtual at::Tensor Get(std::string_view name) const = 0;
  // x times NAME.weight (or NAME, where the block calls it that), plus NAME.bias where there is one.
  virtual at::Tensor Linear(std::string_view name, const at::Tensor& x) = 0;
  // Keeps k and v [rows, key heads, depth] with the earlier ones of their sequences, and attends: q is
  // [rows, heads, depth], the result [rows, heads * depth]. `wide`: scores and sums in fp32.
  virtual at::Tensor Attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionForm& form, bool wide) = 0;
};

// Where the rows of a pass are in their sequences.
struct RowPlaces {
  at::Tensor positions;  // [rows], int64
  // [rows, 1], bool: whether a row's sequence is longer than DecoderFunction::NearPositions. Undefined: none
  // is.
  at::Tensor far;
};

class TensorDecoder {
 public:
  virtual ~TensorDecoder() = default;

  // `tokens`, `positions`: [rows, width] of the tables; `positions` undefined where the model has none.
  virtual at::Tensor Embed(const at::Tensor& tokens, const at::Tensor& positions) const = 0;
  virtual at::Tensor Layer(int64_t layer, BlockAccess& block, const at::Tensor& x,
                           const RowPlaces& places) const = 0;
  // fp32 [rows, vocab].
  virtual at::Tensor Logits(BlockAccess& block, const at::Tensor& x) const = 0;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_TENSOR_DECODER_H_
