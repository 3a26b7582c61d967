#include "models/text_sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace penstock::models {

int64_t TextSampler::Next(std::span<const float> logits, std::span<const int64_t> before) {
  if (options_.repetition_penalty == 1 || before.empty()) return Choose(logits);
  penalized_.assign(logits.begin(), logits.end());
  const auto penalty = static_cast<float>(options_.repetition_penalty);
  for (const int64_t token : before) {
    // Each once, however often it was there.
    const float logit = logits[static_cast<size_t>(token)];
    penalized_[static_cast<size_t>(token)] = logit < 0 ? logit * penalty : logit / penalty;
  }
  return Choose(penalized_);
}

int64_t TextSampler::Choose(std::span<const float> logits) {
  const auto value = [&](int64_t token) {
    const float logit = logits[static_cast<size_t>(token)];
    return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit;
  };
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), int64_t{0});
  const size_t kept = options_.temperature == 0 ? 1
                      : options_.top_k > 0      ? std::min(static_cast<size_t>(options_.top_k), logits.size())
                                                : logits.size();
  // By value, then by number: which tokens stay does not depend on how the library sorts.
  std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(kept), order_.end(),
                    [&](int64_t a, int64_t b) { return value(a) != value(b) ? value(a) > value(b) : a < b; });
  if (kept == 1) return order_.front();
  weights_.clear();
  const double highest = value(order_.front());
  double sum = 0;
  for (size_t i = 0; i < kept; ++i) {
    const double weight = std::exp((value(order_[i]) - highest) / options_.temperature);
    // Infinities make 0 / 0 of it: they are as likely as the highest.
    sum += std::isnan(weight) ? 1.0 : weight;
    weights_.push_back(sum);
  }
  if (options_.top_p < 1) {
    // The fewest that reach it; the one that does stays.
    const auto reached = std::lower_bound(weights_.begin(), weights_.end(), options_.top_p * sum);
    weights_.resize(std::min(static_cast<size_t>(reached - weights_.begin()) + 1, kept));
    sum = weights_.back();
  }
  const double at = static_cast<double>(random_() >> 11) * 0x1.0p-53 * sum;
  const auto chosen = std::upper_bound(weights_.begin(), weights_.end(), at);
  return order_[std::min(static_cast<size_t>(chosen - weights_.begin()), weights_.size() - 1)];
}

}  // namespace penstock::models
