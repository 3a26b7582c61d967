// `penstock estimate`: DeepSpeed-compatible memory estimates and the NVMe tier beyond them
// (tiering/advice/estimate.h).
#ifndef PENSTOCK_TOOLS_MACHINE_VERB_ESTIMATE_H_
#define PENSTOCK_TOOLS_MACHINE_VERB_ESTIMATE_H_

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

#include "absl/status/statusor.h"

namespace penstock::tools {

struct ModelSize {
  int64_t params = 0;
  int64_t largest_layer_params = 0;
  int64_t frozen_params = 0;         // of them, beside adapters
  int64_t largest_block_params = 0;  // where a vocabulary in tiles makes it another; 0: as of the layer
  int64_t vocabulary_tiles = 1;
};
// Adapters that are asked for.
struct AdapterWish {
  int64_t rank = 0;     // 0: none
  std::string targets;  // as --lora-targets has them; empty: the usual ones
};
// The size of what --model names: a preset, a config.json or a directory with one.
using ModelSizer =
    std::function<absl::StatusOr<ModelSize>(const std::string& model, const AdapterWish& adapters)>;

// A GPT as the presets describe it: learned positions, tied embedding, pre-LayerNorm blocks with biases. 12
// w^2 + 13 w parameters a layer, (vocab + context) w for the embeddings, 2 w for the last norm.
ModelSize GptSize(int64_t layers, int64_t width, int64_t context, int64_t vocab);

// argv[1..] are the flags after the verb. Without a sizer there is no --model. Returns the exit code: 0, or 2
// with one line on `err`.
int RunEstimate(int argc, const char* const* argv, std::ostream& out, std::ostream& err,
                const ModelSizer& sizer = nullptr);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_MACHINE_VERB_ESTIMATE_H_
