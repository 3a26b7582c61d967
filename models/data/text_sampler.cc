#include "models/data/text_sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace penstock::models {
namespace {

constexpr double kLeastLogprob = -9999;
constexpr double kMostTokens = double{int64_t{1} << 40};

constexpr std::array<SamplingBound, 11> kBounds = {{
    {"logit_bias", -100, 100},
    {"repetition_penalty", 0, 1e6, true},
    {"presence_penalty", -2, 2},
    {"frequency_penalty", -2, 2},
    {"min_tokens", 0, kMostTokens, false, true},
    {"temperature", 0, 1e6},
    {"top_k", 0, 4294967296, false, true},
    {"top_p", 0, 1, true},
    {"min_p", 0, 1},
    {"logprobs", 0, 20, false, true},
    {"n", 1, 128, false, true},
}};

// Of numbers that are to be compared: a NaN is the least.
float Comparable(float logit) { return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit; }

// Numbers of the `count` largest in front. By value, then by number: which tokens stay does not depend on how
// the library sorts.
void SortLargest(std::span<const float> logits, size_t count, std::vector<int64_t>* order) {
  order->resize(logits.size());
  std::iota(order->begin(), order->end(), int64_t{0});
  std::partial_sort(order->begin(), order->begin() + static_cast<std::ptrdiff_t>(count), order->end(),
                    [&](int64_t a, int64_t b) {
                      const float of_a = Comparable(logits[static_cast<size_t>(a)]);
                      const float of_b = Comparable(logits[static_cast<size_t>(b)]);
                      return of_a != of_b ? of_a > of_b : a < b;
                    });
}

}  // namespace

std::string SamplingBound::words() const {
  if (above) return absl::StrCat("must be above ", least, " and at most ", most);
  return whole
             ? absl::StrCat("must be from ", static_cast<int64_t>(least), " to ", static_cast<int64_t>(most))
             : absl::StrCat("must be from ", least, " to ", most);
}

std::span<const SamplingBound> SamplingBounds() { return kBounds; }

const SamplingBound& SamplingBoundOf(std::string_view name) {
  const auto* const found = std::find_if(kBounds.begin(), kBounds.end(),
                                         [&](const SamplingBound& each) { return each.name == name; });
  PENSTOCK_CHECK(found != kBounds.end(), "an option of sampling has a bound");
  return *found;
}

std::span<const float> TextSampler::Processed(std::span<const float> logits, const TextBefore& before) {
  const SamplingOptions& o = options_;
  const std::span<const int64_t> text = before.tokens.subspan(before.prompt);
  const bool penalizes = !before.tokens.empty() && o.repetition_penalty != 1;
  const bool counts = !text.empty() && (o.presence_penalty != 0 || o.frequency_penalty != 0);
  const bool holds_on = !before.ends.empty() && static_cast<int64_t>(text.size()) < o.min_tokens;
  if (o.logit_bias.empty() && !penalizes && !counts && !holds_on) return logits;
  processed_.assign(logits.begin(), logits.end());
  for (const auto& [token, bias] : o.logit_bias) {
    if (token >= 0 && static_cast<size_t>(token) < processed_.size())
      processed_[static_cast<size_t>(token)] += static_cast<float>(bias);
  }
  if (penalizes) {
    if (!o.logit_bias.empty()) biased_ = processed_;
    // Each once, however often it was there.
    const std::span<const float> unpenalized = o.logit_bias.empty() ? logits : biased_;
    const auto penalty = static_cast<float>(o.repetition_penalty);
    for (const int64_t token : before.tokens) {
      const float logit = unpenalized[static_cast<size_t>(token)];
      processed_[static_cast<size_t>(token)] = logit < 0 ? logit * penalty : logit / penalty;
    }
  }
  if (counts) {
    std::map<int64_t, int64_t> times;
    for (const int64_t token : text) ++times[token];
    for (const auto& [token, n] : times) {
      processed_[static_cast<size_t>(token)] -=
          static_cast<float>(o.frequency_penalty * static_cast<double>(n) + o.presence_penalty);
    }
  }
  if (holds_on) {
    for (const int64_t token : before.ends) {
      if (token >= 0 && static_cast<size_t>(token) < processed_.size())
        processed_[static_cast<size_t>(token)] = -std::numeric_limits<float>::infinity();
    }
  }
  return processed_;
}

int64_t TextSampler::Next(std::span<const float> logits, const TextBefore& before) {
  return Choose(Processed(logits, before));
}

int64_t TextSampler::Choose(std::span<const float> logits) {
  const size_t kept = options_.temperature == 0 ? 1
                      : options_.top_k > 0      ? std::min(static_cast<size_t>(options_.top_k), logits.size())
                                                : logits.size();
  SortLargest(logits, kept, &order_);
  if (kept == 1) return order_.front();
  const auto value = [&](size_t i) { return Comparable(logits[static_cast<size_t>(order_[i])]); };
  weights_.clear();
  const double highest = value(0);
  double sum = 0;
  size_t likely = 0;  // that min_p leaves, where it counts alone
  for (size_t i = 0; i < kept; ++i) {
    double weight = std::exp((value(i) - highest) / options_.temperature);
    // Infinities make 0 / 0 of it: they are as likely as the highest.
    if (std::isnan(weight)) weight = 1;
    if (weight >= options_.min_p) likely = i + 1;
    sum += weight;
    weights_.push_back(sum);
  }
  size_t left = likely;
  if (options_.top_p < 1) {
    // The fewest that reach it; the one that does stays.
    const auto reached = std::lower_bound(weights_.begin(), weights_.end(), options_.top_p * sum);
    left = std::min(left, static_cast<size_t>(reached - weights_.begin()) + 1);
  }
  weights_.resize(left);
  sum = weights_.back();
  const double at = static_cast<double>(random_() >> 11) * 0x1.0p-53 * sum;
  const auto chosen = std::upper_bound(weights_.begin(), weights_.end(), at);
  return order_[std::min(static_cast<size_t>(chosen - weights_.begin()), weights_.size() - 1)];
}

TokenLogprobs LogprobsOf(std::span<const float> logits, int64_t token, int64_t top) {
  std::vector<int64_t> order;
  const size_t count = std::min(static_cast<size_t>(std::max<int64_t>(top, 1)), logits.size());
  SortLargest(logits, count, &order);
  const double highest = Comparable(logits[static_cast<size_t>(order.front())]);
  double sum = 0;
  for (const float logit : logits) {
    const double weight = std::exp(Comparable(logit) - highest);
    sum += std::isnan(weight) ? 1 : weight;
  }
  const double log_sum = std::log(sum);
  const auto logprob = [&](int64_t of) {
    const double value = Comparable(logits[static_cast<size_t>(of)]) - highest - log_sum;
    return std::isnan(value) ? kLeastLogprob : std::max(value, kLeastLogprob);
  };
  TokenLogprobs made = {.logprob = logprob(token), .top = {}};
  for (size_t i = 0; i < std::min(count, static_cast<size_t>(top)); ++i)
    made.top.emplace_back(order[i], logprob(order[i]));
  return made;
}

}  // namespace penstock::models
