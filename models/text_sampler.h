// Choosing the next token from logits. Pure and repeatable: the same seed gives the same choices.
#ifndef PENSTOCK_MODELS_TEXT_SAMPLER_H_
#define PENSTOCK_MODELS_TEXT_SAMPLER_H_

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace penstock::models {

struct SamplingOptions {
  double temperature = 0;         // 0 takes the likeliest token, the first of equals
  int64_t top_k = 0;              // choose among this many of the likeliest tokens; 0: all
  double top_p = 1;               // of those, the likeliest that together have this much; above 0, at most 1
  double repetition_penalty = 1;  // above 0: divides logits above 0 of tokens that were there, and multiplies
                                  // those below
};

class TextSampler {
 public:
  TextSampler(const SamplingOptions& options, uint64_t seed) : options_(options), random_(seed) {}
  // `temperature` 0 takes the likeliest token (the first of equals); `top_k` 0 leaves all tokens in. Both are
  // at least 0.
  TextSampler(double temperature, int64_t top_k, uint64_t seed)
      : TextSampler({.temperature = temperature, .top_k = top_k}, seed) {}

  // `logits` is not empty. A NaN is never chosen unless nothing else is there. `before`: the tokens that the
  // penalty counts, prompt and text. In transformers' order: penalty, temperature, top_k, top_p.
  int64_t Next(std::span<const float> logits, std::span<const int64_t> before = {});

 private:
  int64_t Choose(std::span<const float> logits);

  const SamplingOptions options_;
  std::mt19937_64 random_;
  std::vector<int64_t> order_;
  std::vector<float> penalized_;
  std::vector<double> weights_;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_TEXT_SAMPLER_H_
