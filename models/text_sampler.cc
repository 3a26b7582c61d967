#include "models/text_sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace penstock::models {

int64_t TextSampler::Next(std::span<const float> logits) {
  const auto value = [&](int64_t token) {
    const float logit = logits[static_cast<size_t>(token)];
    return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit;
  };
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), int64_t{0});
  const size_t kept = temperature_ == 0 ? 1
                      : top_k_ > 0      ? std::min(static_cast<size_t>(top_k_), logits.size())
                                        : logits.size();
  // By value, then by number: which tokens stay does not depend on how the library sorts.
  std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(kept), order_.end(),
                    [&](int64_t a, int64_t b) { return value(a) != value(b) ? value(a) > value(b) : a < b; });
  if (kept == 1) return order_.front();
  weights_.clear();
  const double highest = value(order_.front());
  double sum = 0;
  for (size_t i = 0; i < kept; ++i) {
    const double weight = std::exp((value(order_[i]) - highest) / temperature_);
    // Infinities make 0 / 0 of it: they are as likely as the highest.
    sum += std::isnan(weight) ? 1.0 : weight;
    weights_.push_back(sum);
  }
  const double at = static_cast<double>(random_() >> 11) * 0x1.0p-53 * sum;
  const auto chosen = std::upper_bound(weights_.begin(), weights_.end(), at);
  return order_[std::min(static_cast<size_t>(chosen - weights_.begin()), kept - 1)];
}

}  // namespace penstock::models
