// Choosing the next token from logits. Pure and repeatable: the same seed gives the same choices.
#ifndef PENSTOCK_MODELS_TEXT_SAMPLER_H_
#define PENSTOCK_MODELS_TEXT_SAMPLER_H_

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace penstock::models {

class TextSampler {
 public:
  // `temperature` 0 takes the likeliest token (the first of equals); `top_k` 0 leaves all tokens in. Both are
  // at least 0.
  TextSampler(double temperature, int64_t top_k, uint64_t seed)
      : temperature_(temperature), top_k_(top_k), random_(seed) {}

  // `logits` is not empty. A NaN is never chosen unless nothing else is there.
  int64_t Next(std::span<const float> logits);

 private:
  const double temperature_;
  const int64_t top_k_;
  std::mt19937_64 random_;
  std::vector<int64_t> order_;
  std::vector<double> weights_;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_TEXT_SAMPLER_H_
