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
//   logits = soft_cap(head * norm(x) / logits_divisor)
//
// where a norm that has no name is none. A layer with a window looks at the last positions alone, its own
// included. A layer may have a mixture of experts for its inner network (Shazeer et al. 2017): a router
// scores the experts for each row, and a row's result is
//
//   scores = softmax(router n), or its sigmoid, in fp32; the `chosen` highest of them are the row's experts
//   sum over these, in the order of their numbers, of weight * down_e (activation(gate_e n) * up_e n)
//     + sigmoid(shared_router n) * the same of an expert that all rows share, where there is one
//
// where a weight is the expert's score, divided by the sum of the chosen ones' where the mixture normalizes,
// times a factor. A correction, where there is one, is added to the scores for the choice alone. Experts may
// be in groups, and the choice among some of these: those whose highest score, or sum of the two highest, is
// the highest (DeepSeek).
//
// With a pair limit l (gpt-oss) rows of the matrix up are a gate's and up's in turns, and of a pair (g, u) of
// up_e n comes min(g, l) sigmoid(1.702 min(g, l)) (u within [-l, l], + 1).
//
// Between any two of these a value is rounded to the compute type, as transformers has it.
#ifndef PENSTOCK_MODELS_FAMILIES_DECODER_H_
#define PENSTOCK_MODELS_FAMILIES_DECODER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/layer.h"
#include "models/weights/layout.h"

namespace penstock::models {

// By which angles positions turn the pairs of a head's elements: frequency times position.
struct Rotation {
  std::vector<float> frequencies;      // of the pairs that turn, which are the first of a head
  std::vector<float> far_frequencies;  // instead, in sequences of more than `near_positions`; empty: the same
  int64_t near_positions = 0;
  double scale = 1;  // of cosine and sine
};

// Attention to latents: of each position one vector of `rank` elements is kept, from which keys and values of
// all heads are made, and one of `turned` that its position has turned, which all heads' keys have in common.
//
//   q = query (norm(query_down n)), or query n; of each head `plain` elements, then `turned` that turn
//   c, r = down n; c = norm(c), r is turned
//   of each head the keys are (up_k c, r), the values up_v c, `value` elements
//
// where `up` has for each head the rows of up_k and then those of up_v. A record of the cache is (r, c): the
// scores are r . q_turned + c . (up_k^T q_plain), and of the latents that attention sums up_v makes a head's
// result. So neither keys nor values of any head exist.
struct LatentShape {
  int64_t rank = 0;        // 0: attention has keys and values of its own
  int64_t query_rank = 0;  // 0: queries have no latent
  int64_t plain = 0, turned = 0, value = 0;

  int64_t query_depth() const { return plain + turned; }
};

struct LatentFunction {
  std::string query_down, query_norm;  // empty: none
  std::string query, down, norm, up;
  double epsilon = 1e-6;         // of these norms
  bool turns_neighbours = true;  // positions turn elements 2 j and 2 j + 1, else j and j + turned / 2
};

// How large the mixtures of a decoder's layers are; all of them are alike.
struct MixtureShape {
  int64_t experts = 0, chosen = 0;  // of a layer, and of those for each row; 0: no layer has a mixture
  int64_t inner = 0;                // of an expert
  bool paired = false;              // its matrices before `inner` are one, of twice as many rows
};

// Numbers of a decoder. Layer i is block 1 + i of the model's description.
struct DecoderShape {
  int64_t layers = 0, width = 0;
  int64_t inner =
      0;  // of layers without a mixture, and of a shared expert: the larger one; 0: there is neither
  int64_t vocab = 0;
  int64_t inner_rows = 0;  // of the matrix before `inner`: twice as many where it is two in one
  int64_t rotations = 1;   // DecoderFunction::rotations, at least 1
  int64_t heads = 0, key_heads = 0, depth = 0;  // of attention; with latents one key head, of a record's size
  std::string token_table;                      // in block 0; a row for each token
  std::string position_table;                   // in block 0; empty: the model has none
  int64_t matrices_before_attention = 0;        // of a layer, in the order of its description
  int head_block = 0;                           // of the matrix that makes logits
  std::string head;                             // its name there
  MixtureShape mixture = {};
  LatentShape latent = {};

  // Elements that the cache keeps of a position in a layer.
  int64_t record_elements() const { return latent.rank > 0 ? depth : 2 * key_heads * depth; }
};

// The parameters of a mixture, by name in the layer's block. Those of expert e are EXPERTS.e.GATE.weight and
// so on (ExpertParameter), with .bias where the block has it; so has the router.
struct MixtureFunction {
  std::vector<bool> layers;             // by layer: whether it has one; empty: none has
  std::string router;                   // [experts, width]
  std::string experts, gate, up, down;  // gate: empty with a pair limit
  double pair_limit = 0;                // 0: none
  bool normalizes = false;
  bool rounds_weights = true;  // to the compute type, before they multiply
  bool sigmoid = false;        // of scores, instead of softmax
  bool wide = false;           // router and correction are kept in fp32, and scores are made in it
  std::string correction;      // a vector, whole; empty: none
  int64_t groups = 1, chosen_groups = 1;
  bool sums_two = false;  // a group's score is the sum of its two highest
  double scaling = 1;     // of weights
  // Of the expert that all rows share; empty: there is none. The router may be missing alone.
  std::string shared_router, shared_gate, shared_up, shared_down;

  bool Has(int64_t layer) const { return !layers.empty() && layers[static_cast<size_t>(layer)]; }
  std::string ExpertParameter(int64_t expert, const std::string& matrix,
                              const std::string& kind = "weight") const {
    return experts + "." + std::to_string(expert) + "." + matrix + "." + kind;
  }
  // Whether a matrix of this name is small, and used before a layer's other matrices: it stays in memory.
  bool IsRouter(const std::string& name) const {
    return !layers.empty() && (name == router + ".weight" || name == shared_router + ".weight");
  }
  // Whether a parameter of this name is kept in fp32, whatever the compute type.
  bool IsWide(const std::string& name) const {
    return wide && (name == router + ".weight" || name == correction);
  }
};

// What is computed with which parameters of a block. A matrix or a norm NAME is NAME.weight, with NAME.bias
// where the block has it; matrices are used in the order of the block's description.
struct DecoderFunction {
  enum class Norm : uint8_t { kRootMeanSquare, kLayer };
  Norm norm = Norm::kLayer;
  double epsilon = 1e-5;
  bool norms_from_one = false;  // what is published of a norm's weights is added to 1
  bool rounds_normal = true;    // what a norm's weights multiply is rounded to the compute type before
  std::string attention_norm, attention_result_norm;  // of what attention takes, and gives; empty: none
  std::string inner_norm, inner_result_norm;          // the same of what is between
  std::string last_norm;                              // in the block of the head
  std::string joined;                                 // queries, keys and values in one matrix; or
  std::string query, key, value;                      // one for each
  std::string query_norm, key_norm;  // of each head, or of all: as long as its weight; empty: none
  std::string output;
  std::string sinks;  // of attention, a number for each head (kernels/attention.h); empty: none
  std::string gate;   // empty: none
  std::string up, down;
  MixtureFunction mixture;  // instead of gate, up and down, in the layers that have one
  LatentFunction latent;    // instead of query, key and value, where DecoderShape::latent has a rank
  bool gate_in_up = false;  // the first half of what `up` gives is the gate
  kernels::Activation activation = kernels::Activation::kGelu;
  std::vector<double> scales;    // of the scores, by layer
  std::vector<int64_t> windows;  // by layer: positions that it looks at; 0: all before it; empty: all
  std::vector<Rotation> rotations;
  std::vector<int> rotation;  // by layer: of `rotations`; -1: positions turn nothing there; empty: in all
  double embedding_scale = 1, residual_scale = 1, logits_divisor = 1;
  bool rounds_embedding_scale = false;  // to the compute type, before it multiplies
  double score_cap = 0, logit_cap = 0;  // soft caps: cap * tanh(x / cap); 0: none

  int64_t Window(int64_t layer) const { return windows.empty() ? 0 : windows[static_cast<size_t>(layer)]; }
  // -1: none.
  int RotationOf(int64_t layer) const {
    return rotation.empty() ? static_cast<int>(rotations.size()) - 1 : rotation[static_cast<size_t>(layer)];
  }
  // Above 0: a sequence that grows beyond so many positions is turned by other frequencies, all of it.
  int64_t NearPositions() const {
    for (const Rotation& each : rotations) {
      if (!each.far_frequencies.empty()) return each.near_positions;
    }
    return 0;
  }
};

struct Decoder {
  DecoderShape shape;
  DecoderFunction function;
  std::vector<BlockDescription> blocks;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_DECODER_H_
