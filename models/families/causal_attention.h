// Causal self-attention, a block of queries at a time.
//
// The scores of a whole sequence are length^2 a head: at 2 x 1,024 tokens and 16 heads in bf16 64 MiB for
// each of the three or four tensors of that shape that autograd holds at once, a quarter of a budget of 1
// GiB. Here only a block of kQueryRows rows exists at a time, against the keys that those rows may see, so
// that the half of the products that the mask would throw away is never made; backward makes the
// probabilities again from queries and keys instead of keeping them (Rabe and Staats 2021, "Self-attention
// does not need O(n^2) memory"; Dao et al. 2022, FlashAttention, section 3.1). A row's scores are whole, so
// no running maximum is needed. gpt-350m at 4 x 1,024 tokens in 1 GiB: 26.6 bytes a parameter and step from
// the drive instead of 28.6, in the same time (2 vCPUs with AMX, 2026-11-23). Up to kWholeLength the scores
// are small, and one piece, kept for backward, is faster (gpt-125m, 4 x 256 tokens, in blocks: a step 5%
// slower).
//
// Made of LibTorch's own operations: the same on every device and from 1.13 on, and the same bits every time
// (the fused kernels of 2.x add up the queries' gradients in no fixed order on a GPU).
#ifndef PENSTOCK_MODELS_FAMILIES_CAUSAL_ATTENTION_H_
#define PENSTOCK_MODELS_FAMILIES_CAUSAL_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::models {

inline constexpr int64_t kQueryRows = 128;
inline constexpr int64_t kWholeLength = 256;

// dropout(softmax(scale q k^T, position j of row i only where j <= i)) v. All three and the result are
// [batch * heads, length, depth] of one floating type. k and v may have fewer heads (grouped queries,
// Ainslie et al. 2023): heads [g * n, g * n + n) of q then look at head g of k and v, which are not repeated.
// The gradients of k and v are sums over blocks, of products in that type, added up in fp32 or wider. Longer
// than kWholeLength: differentiable once. The memory that it takes grows with the length, but for a step down
// at kWholeLength.
//
// With a window, only where j > i - window. With a cap, scores are cap * tanh(score / cap) (soft-capping).
//
// `dropout` 0 draws nothing. Above, every probability is set to 0 with that chance and the rest grow by
// 1 / (1 - dropout); what fell out is kept for backward, a byte for each position that a row may see.
struct AttentionForm {
  double scale = 1;
  double dropout = 0;
  int64_t window = 0;  // 0: none
  double cap = 0;      // 0: none
};
at::Tensor CausalAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const AttentionForm& form);

// The same of the last positions alone, without gradients: q is [heads, rows, depth] of the last `rows` of
// the positions that k and v [key heads, seen, depth] have, in any strides; the result [heads, rows, depth].
at::Tensor AttentionOfLast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const AttentionForm& form);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_CAUSAL_ATTENTION_H_
