// The example model: a GPT with pre-LayerNorm, causal attention, learned positions and a tied embedding
// (Radford et al. 2019), as blocks for the engine.
//
// Block 0 holds the token embedding, the positions and the last LayerNorm; it is the first stage (embed) and
// the last (logits and loss). Blocks 1..L are the layers. Sums that bf16 would spoil (LayerNorm,
// cross-entropy, the embedding's gradient) are computed in fp32; matrix products in the compute type.
#ifndef PENSTOCK_MODELS_GPT_H_
#define PENSTOCK_MODELS_GPT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "zero/compute/model.h"

namespace penstock::tools {

struct GptConfig {
  int64_t layers = 4;
  int64_t width = 64;
  int64_t heads = 4;
  int64_t context = 128;  // longest sequence
  int64_t vocab = 256;
  double dropout = 0;

  int64_t Parameters() const;
  nlohmann::json ToJson() const;
};

// A preset's name, or the path of a JSON file with Hugging Face's GPT-2 keys (n_layer, n_embd, n_head,
// n_positions, vocab_size, resid_pdrop). kInvalidArgument: no such preset (names the presets), or an
// impossible shape.
absl::StatusOr<GptConfig> ParseGptConfig(const std::string& preset_or_path);
absl::StatusOr<GptConfig> GptConfigFromJson(const nlohmann::json& json);
absl::Status ValidateGptConfig(const GptConfig& config);

enum class GptHead : uint8_t {
  kLoss,        // the last stage is the mean cross-entropy against Batch::targets
  kLastLogits,  // the last stage gives fp32 logits [batch, vocab] of the last position
};

zero::Model MakeGpt(const GptConfig& config, GptHead head = GptHead::kLoss);

}  // namespace penstock::tools

#endif  // PENSTOCK_MODELS_GPT_H_
