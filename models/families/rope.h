// Rotary positions (Su et al. 2021) in the kinds that transformers 5 has: read from a config.json in both
// spellings, rope_scaling and rope_parameters, and written as rope_scaling.
#ifndef PENSTOCK_MODELS_FAMILIES_ROPE_H_
#define PENSTOCK_MODELS_FAMILIES_ROPE_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "models/families/decoder.h"
#include "models/families/model_keys.h"

namespace penstock::models {

// How positions turn queries and keys.
struct Rope {
  enum class Kind : uint8_t {
    kDefault,
    kLinear,    // all frequencies divided by `factor`
    kDynamic,   // by the length, beyond the context that the model was made for; longer ones are not computed
    kYarn,      // the low ones divided, with a ramp between them and the high ones (Peng et al. 2023)
    kLongRope,  // each divided by a factor of its own, of two lists by the length (Ding et al. 2024)
    kLlama3,    // the low ones divided, with another ramp
  };
  Kind kind = Kind::kDefault;
  double theta = 10000;
  double part = 1;                         // of a head's elements that turn
  std::optional<double> factor;            // kYarn, kLongRope: absent, the context over the original one
  std::optional<double> attention_factor;  // of cosine and sine; absent: as the papers have it
  double low = 1, high = 4;                // kLlama3
  double fast = 32, slow = 1;              // kYarn
  std::optional<double> mscale;            // kYarn
  std::optional<double>
      mscale_all_dim;  // of any kind but kDefault; kYarn and DeepSeek's attention look at it
  bool truncate = true;
  int64_t original_context = 0;
  std::vector<double> short_factors, long_factors;  // kLongRope

  // Elements of a head of `depth` that turn.
  int64_t Turning(int64_t depth) const;
  // `positions`: the model's max_position_embeddings. Frequencies are in fp32, as transformers has them.
  Rotation RotationOf(int64_t depth, int64_t positions) const;
  // With mscale_all_dim: what DeepSeek multiplies scores by; else 1.
  double AllDimensionsScale(int64_t positions) const;

  // rope_scaling, or null where the kind is kDefault.
  nlohmann::ordered_json ToJson() const;

 private:
  // `factor`, or what stands for it.
  double DivisorOf(int64_t positions) const;
};

// What a model_type takes.
struct RopeKinds {
  bool takes_part = false;  // partial_rotary_factor
  bool phi3 = false;        // default and longrope alone, which "su" and "yarn" are there, too
};

// The keys rope_theta, rope_scaling, rope_parameters, original_max_position_embeddings and
// partial_rotary_factor. What is not computed is refused by name; so is an unknown key in one of these
// objects, since it may change the function.
void ReadRope(const RopeKinds& kinds, int64_t positions, ModelKeys* keys, Rope* rope);

// The same of a model whose layers with a window have positions of their own (Gemma 3): rope_parameters has
// full_attention and sliding_attention, or else rope_theta and rope_scaling are of the former and
// rope_local_base_freq of the latter.
void ReadRopes(int64_t positions, ModelKeys* keys, Rope* full, Rope* sliding);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_ROPE_H_
