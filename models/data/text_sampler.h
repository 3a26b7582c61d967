// Choosing the next token from logits. Pure and repeatable: the same seed gives the same choices.
#ifndef PENSTOCK_MODELS_DATA_TEXT_SAMPLER_H_
#define PENSTOCK_MODELS_DATA_TEXT_SAMPLER_H_

#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock::models {

// Applied in the order of the fields, which is transformers' where it has them; OpenAI's penalties precede
// the temperature. The defaults change nothing.
struct SamplingOptions {
  std::map<int64_t, double> logit_bias = {};  // added to the logits of these tokens
  // Divides logits above 0 of tokens of prompt and text, and multiplies those below.
  double repetition_penalty = 1;
  // OpenAI's, of tokens of the text: for each one, and for each time that it was chosen.
  double presence_penalty = 0, frequency_penalty = 0;
  int64_t min_tokens = 0;  // before which no token ends the text
  double temperature = 0;  // 0 takes the likeliest token, the first of equals
  int64_t top_k = 0;       // choose among this many of the likeliest tokens; 0: all
  double top_p = 1;        // of those, the likeliest that together have this much
  double min_p = 0;        // of those, the ones that have this part of the likeliest's probability
};

// What an option may be, by its name in Python and over HTTP. `above`: more than `least`.
struct SamplingBound {
  std::string_view name;
  double least = 0, most = 0;
  bool above = false, whole = false;

  bool holds(double value) const { return (above ? value > least : value >= least) && value <= most; }
  // "must be from 0 to 1".
  std::string words() const;
};
std::span<const SamplingBound> SamplingBounds();
const SamplingBound& SamplingBoundOf(std::string_view name);  // of a name that is there

// What was before the token that is chosen.
struct TextBefore {
  std::span<const int64_t> tokens = {};  // of prompt and text
  size_t prompt = 0;                     // of these, the prompt's
  std::span<const int64_t> ends = {};    // tokens that end a text
};

class TextSampler {
 public:
  // The options are within SamplingBounds(); tokens of logit_bias that there are no logits of are passed
  // over.
  TextSampler(const SamplingOptions& options, uint64_t seed) : options_(options), random_(seed) {}
  TextSampler(double temperature, int64_t top_k, uint64_t seed)
      : TextSampler({.temperature = temperature, .top_k = top_k}, seed) {}

  // `logits` is not empty. A NaN is never chosen unless nothing else is there.
  int64_t Next(std::span<const float> logits, const TextBefore& before = {});

 private:
  // The logits after bias, penalties and min_tokens.
  std::span<const float> Processed(std::span<const float> logits, const TextBefore& before);
  int64_t Choose(std::span<const float> logits);

  const SamplingOptions options_;
  std::mt19937_64 random_;
  std::vector<int64_t> order_;
  std::vector<float> processed_, biased_;
  std::vector<double> weights_;
};

// How likely the model takes a token and the likeliest ones, before any option changes that.
struct TokenLogprobs {
  double logprob = 0;                           // natural; at least -9999, which stands for no number too
  std::vector<std::pair<int64_t, double>> top;  // the likeliest first, of equals the first
};
// `top`: tokens beside the chosen one; at most all.
TokenLogprobs LogprobsOf(std::span<const float> logits, int64_t token, int64_t top);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DATA_TEXT_SAMPLER_H_
