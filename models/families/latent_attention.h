// Attention to latents (multi-head latent attention, DeepSeek-V2, 2024), as the families of Llama publish it:
// deepseek_v2 and deepseek_v3. What config.json says of it, and its parameters. What is computed stands in
// models/families/decoder.h.
#ifndef PENSTOCK_MODELS_FAMILIES_LATENT_ATTENTION_H_
#define PENSTOCK_MODELS_FAMILIES_LATENT_ATTENTION_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "models/families/decoder.h"
#include "models/families/model_keys.h"

namespace penstock::models {

struct LatentConfig {
  LatentShape shape;
  bool turns_neighbours = true;  // LatentFunction's
};

bool IsLatentType(std::string_view model_type);

// The keys of config.json that are about latents. In a model of a type without latents none may ask for them.
void ReadLatent(std::string_view model_type, ModelKeys* keys, LatentConfig* latent);
// What transformers reads back.
void WriteLatent(std::string_view model_type, const LatentConfig& latent, nlohmann::ordered_json* json);
absl::Status CheckLatent(const LatentConfig& latent);

// The matrices and norms of a layer's attention but for the last matrix, in the order of their use.
void ForLatentParameters(const LatentShape& latent, int64_t width, int64_t heads, bool bias,
                         absl::FunctionRef<void(const char* name, int64_t in, int64_t out, bool bias)> matrix,
                         absl::FunctionRef<void(const char* name, int64_t width)> norm);
// Parameters of these matrices.
int64_t LatentParameters(const LatentShape& latent, int64_t width, int64_t heads);

LatentFunction LatentFunctionOf(const LatentConfig& latent);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_LATENT_ATTENTION_H_
