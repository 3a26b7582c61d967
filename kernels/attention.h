// Attention of one position's queries to the keys and values of positions that lie in records, whose bits
// depend on these alone: not on the SIMD level, nor on what else is computed.
//
//   out[h] = sum over p of softmax(scale q[h] . key[p])[p] * value[p],   p < positions
//
// Definition. A record has the keys of all key heads and then their values, or keys alone, whose last
// value_depth elements are the values; all is widened to fp32, exactly. Query head h looks at key head
// h / (heads / key_heads). For each query head, in fp32:
//   scores   s[p] = scale * (q . key[p]), the product row by row as kernels/product.h has it; with a cap
//            s[p] = cap * tanh(s[p] / cap), as SoftCap of kernels/layer.h has it
//   blocks   of 64 positions, in order; m is the largest score so far, and a the factor
//            exp(m of before - m), in the first block 0 (Milakov and Gimelshein 2018, "Online normalizer
//            calculation for softmax")
//   sums     e[p] = exp(s[p] - m); lane j of 16 begins with +0 and adds e[p] of p = j, j + 16, ... of the
//            block; sum = fma(sum, a, the lanes added up as in kernels/reduce.h)
//   outputs  out[d] = a * out[d], then fma(e[p], value[p][d], out[d]) in the order of p
//   sink     with one, as a last block of a single score without a value: M is the larger of m and it, and a
//            the factor exp(m - M); sum = fma(sum, a, exp(sink - M)), out[d] = a * out[d]
//   end      the outputs are divided by sum
//   exp      of what is at most 0: below -86 it is that of -86. n = x * log2(e), rounded to an integer;
//            r = fma(n, -0.693359375, x), r = fma(n, 2.12194440e-4, r); a polynomial of degree 7 in r
//            (Cephes, expf) by Horner's rule, times 2^n
// A score that is not a number makes all of its head's outputs so.
//
// On the calling thread; a caller with several threads gives each some of the key heads. Nothing is
// allocated. Any alignment; thread-safe.
#ifndef PENSTOCK_KERNELS_ATTENTION_H_
#define PENSTOCK_KERNELS_ATTENTION_H_

#include <cstddef>

#include "kernels/float16.h"

namespace penstock::kernels {

struct AttentionRecords {
  DType type;        // of queries as well
  const void* data;  // the record of position 0; each has 2 * key_heads * depth elements, or half as many
  size_t positions;  // at least one
  size_t key_heads, depth;
  float cap = 0;  // of scores (soft-capping); 0: none
  // A score of each query head that has no value (Xiao et al. 2023, "attention sinks"); null: none has one.
  const float* sinks = nullptr;
  // Above 0: a record is keys alone, and so many of a key's last elements are its value.
  size_t value_depth = 0;
};

// `queries`: [heads, depth], of which those that look at key heads [first, end) are computed, into the same
// places of `out`, [heads, depth of a value] in fp32. `heads` is a multiple of key_heads.
void Attend(const AttentionRecords& records, const void* queries, size_t heads, float scale, size_t first,
            size_t end, float* out);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_ATTENTION_H_
