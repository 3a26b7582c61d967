// What generation computes, as numbers and names: the function of a family whose layers are those of GPT-2 or
// Llama. The caller keeps the keys and values of the tokens before (the KV cache), and has the weights
// only while they are used.
//
//   x = embedding_scale * a row of the token table, and of the position table where there is one
//   for each layer
//     n = norm(x);  q, k, v = products with n, turned by their positions
//     x = x + residual_scale * norm(output * attention(q, k, v))
//     n = norm(x)
//     x = x + residual_scale * norm(down * (activation(gate n) * up n, or activation(up n) where there is no
//     gate))
//   logits = head * norm(x) / logits_divisor
//
// where a norm that has no name is none.
//
// Between any two of these a value is rounded to the compute type, as transformers has it.
#ifndef PENSTOCK_MODELS_DECODER_H_
#define PENSTOCK_MODELS_DECODER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/layer.h"
#include "models/layout.h"

namespace penstock::models {

// Numbers of a decoder. Layer i is block 1 + i of the model's description.
struct DecoderShape {
  int64_t layers = 0, width = 0, inner = 0, vocab = 0;
  int64_t heads = 0, key_heads = 0, depth = 0;  // of attention
  std::string token_table;                      // in block 0; a row for each token
  std::string position_table;                   // in block 0; empty: the model has none
  int64_t matrices_before_attention = 0;        // of a layer, in the order of its description
  int head_block = 0;                           // of the matrix that makes logits
  std::string head;                             // its name there
};

// What is computed with which parameters of a block. A matrix or a norm NAME is NAME.weight, with NAME.bias
// where the block has it; matrices are used in the order of the block's description.
struct DecoderFunction {
  enum class Norm : uint8_t { kRootMeanSquare, kLayer };
  Norm norm = Norm::kLayer;
  double epsilon = 1e-5;
  std::string attention_norm, attention_result_norm;  // of what attention takes, and gives; empty: none
  std::string inner_norm, inner_result_norm;          // the same of what is between
  std::string last_norm;                              // in the block of the head
  std::string joined;                                 // queries, keys and values in one matrix; or
  std::string query, key, value;                      // one for each
  std::string query_norm, key_norm;  // of each head, or of all: as long as its weight; empty: none
  std::string output;
  std::string gate;  // empty: none
  std::string up, down;
  kernels::Activation activation = kernels::Activation::kGelu;
  std::vector<double> scales;      // of the scores, by layer
  std::vector<float> frequencies;  // by which positions turn the pairs of a head; empty: they do not
  std::vector<bool> turns;         // by layer: whether they do there; empty: in all
  double embedding_scale = 1, residual_scale = 1, logits_divisor = 1;
};

struct Decoder {
  DecoderShape shape;
  DecoderFunction function;
  std::vector<BlockDescription> blocks;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DECODER_H_
