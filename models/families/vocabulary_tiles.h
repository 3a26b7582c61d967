// A vocabulary in tiles: the matrix of an embedding or a head as some blocks of rows, each of which is
// fetched, used and updated as any other block is. Neither the whole matrix is in memory, nor the logits of
// all tokens.
//
// The embedding is a stage for each tile, which puts the rows of its ids into what the stages before have:
// the bits of one look-up. Cross-entropy is a stage for each tile as well. What goes from one to the next is,
// of each target, the largest logit so far, the sum of exp(logit - largest), and its own logit once that was
// there: an online softmax (Milakov, Gimelshein 2018). Autograd goes back through the recurrence, so that a
// tile makes its logits once more in backward and no other tile's. Where embedding and head are one matrix,
// both stages of a tile use its block.
//
// In fp32 a loss is that of one matrix within rounding. In bf16 logits are rounded as those of one matrix,
// and what the tiles give the last layer as its gradient is summed in fp32.
#ifndef PENSTOCK_MODELS_FAMILIES_VOCABULARY_TILES_H_
#define PENSTOCK_MODELS_FAMILIES_VOCABULARY_TILES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "models/families/described_module.h"
#include "models/families/family.h"
#include "models/families/vocabulary_cut.h"
#include "zero/compute/libtorch/model.h"

namespace penstock::models {

// Their stages over a matrix that the blocks have by this name: the embedding's, of the model's first blocks;
void AddEmbeddingTiles(const VocabularyCut& cut, const std::string& matrix, int64_t padding,
                       zero::Model* model);
// "norm", of all positions or the last ones, whose result is what all tiles of the head take;
using LastNorm = std::function<at::Tensor(const DescribedModule& block, const at::Tensor& x)>;
void AddLastNorm(int block, LastNorm norm, Head head, zero::Model* model);
// and the head's, of `block` and those behind it. With a cap, logits are cap * tanh(logit / cap); 0: none.
void AddHeadTiles(const VocabularyCut& cut, const std::string& matrix, int block, Head head, double cap,
                  zero::Model* model);

// ---- What they compute.

// Rows `first` and on are `tile`'s: [..., width] with those of the ids that are there, and `before` elsewhere
// (undefined: zeros). The gradient of a row is summed in fp32 and rounded once; that of row `padding` is
// zero.
at::Tensor EmbedTile(const at::Tensor& tile, int64_t first, const at::Tensor& ids, int64_t padding,
                     const at::Tensor& before);

// `in`: {x}, or what the tile before returned. x: [n, width] in fp32, of which the product is made in the
// tile's type. Targets that are no token's, as -100, are passed over.
zero::Values LogitsOfTile(const at::Tensor& tile, int64_t first, const at::Tensor& targets,
                          const zero::Values& in, double cap = 0);
// Without targets: {x, logits} of the tiles so far, of the last tile all logits [n, vocabulary] alone.
zero::Values AppendLogits(const at::Tensor& tile, bool last, const zero::Values& in, double cap = 0);

// The mean over the targets, of what the last tile returned.
at::Tensor MeanLoss(const zero::Values& seen, const at::Tensor& targets);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_VOCABULARY_TILES_H_
