// Mixtures of experts, as the families of Llama publish them: Mixtral, Qwen 2 MoE, Qwen 3 MoE, OLMoE,
// Granite MoE, gpt-oss, DeepSeek V2 and V3. What config.json says of them, and their parameters. What is
// computed stands in models/families/decoder.h.
//
// Files have an expert's matrices each under a name of its own, or those of all experts of a layer in tensors
// of three dimensions (transformers 5): [experts, 2 * inner, width], the gate before the matrix up, and
// [experts, width, inner]. Both are read in place. gpt-oss's are turned, [experts, width, 2 * inner] with the
// gate's columns and up's in turns, or in mxfp4 with these as rows.
#ifndef PENSTOCK_MODELS_FAMILIES_MIXTURE_H_
#define PENSTOCK_MODELS_FAMILIES_MIXTURE_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "models/families/decoder.h"
#include "models/families/family.h"
#include "models/families/model_keys.h"
#include "models/weights/layout.h"

namespace penstock::models {

struct MixtureConfig {
  int64_t experts = 0, chosen = 0;  // of a layer, and of those for each row; 0: no layer has a mixture
  int64_t inner = 0;                // of an expert
  int64_t shared_inner = 0;         // of the expert that all rows share; 0: there is none
  bool normalizes = false;          // the weights of the chosen ones sum to 1
  double pair_limit = 0;            // MixtureFunction::pair_limit
  int64_t groups = 1, chosen_groups = 1;
  double scaling = 1;
  std::vector<bool> layers;  // by layer: whether it has one

  bool Has(int64_t layer) const { return experts > 0 && layers[static_cast<size_t>(layer)]; }
};

// The keys of config.json that are about mixtures. In a model of a type without mixtures none may ask for
// one. `layers` and `inner` are the model's, which `keys` has read before.
void ReadMixture(std::string_view model_type, int64_t layers, int64_t inner, ModelKeys* keys,
                 MixtureConfig* mixture);
// What transformers reads back.
void WriteMixture(std::string_view model_type, const MixtureConfig& mixture, nlohmann::ordered_json* json);

// Appends the parameters of a layer's mixture: routers, the shared expert, and expert after expert.
// `prefix`: of published names, "model.layers.3.".
void AddMixture(std::string_view model_type, const MixtureConfig& mixture, const std::string& prefix,
                int64_t width, double deviation, BlockDescription* block);

MixtureFunction MixtureFunctionOf(std::string_view model_type, const MixtureConfig& mixture);

// The published names of the matrices that choose experts: none of a model without mixtures.
std::set<std::string> RoutersOf(const LanguageModel& model);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_MIXTURE_H_
