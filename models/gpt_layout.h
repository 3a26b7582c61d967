// Where a GPT's parameters lie in its state, under the names and in the shapes of Hugging Face's GPT-2: pure
// numbers, so that a model too large for memory can be described without building a block of it.
//
// It says the same as zero::FlatLayout::Of the blocks of MakeGpt (a test holds the two together).
#ifndef PENSTOCK_MODELS_GPT_LAYOUT_H_
#define PENSTOCK_MODELS_GPT_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "models/gpt.h"

namespace penstock::models {

struct GptTensor {
  std::string name;  // Hugging Face's: "transformer.h.0.attn.c_attn.weight"
  int block = 0;
  int64_t offset = 0;       // in the block's run, in elements
  int64_t rows = 0;         // as stored, row by row: [rows, columns]
  int64_t columns = 0;      // 0: a vector of `rows`
  bool transposed = false;  // Hugging Face's Conv1D has it as [columns, rows]

  int64_t elements() const { return columns == 0 ? rows : rows * columns; }
  std::vector<uint64_t> published_shape() const;
};

struct GptLayout {
  std::vector<GptTensor> tensors;       // in the order of blocks and offsets
  std::vector<int64_t> block_elements;  // of each block's run, padding included
};

// `config` must pass ValidateGptConfig.
GptLayout LayoutOfGpt(const GptConfig& config);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_GPT_LAYOUT_H_
