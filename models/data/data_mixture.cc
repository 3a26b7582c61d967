#include "models/data/data_mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"

namespace penstock::models {
namespace {

// What weights by size go by.
double TokensOf(const Dataset& text) {
  return static_cast<double>(text.rows() > 0 ? text.rows() * text.seq() : text.tokens());
}

// kCycle in whole numbers, in the proportion of `shares`, whose sum is 1: the largest remainders are rounded
// up.
std::vector<int64_t> Apportion(const std::vector<double>& shares) {
  std::vector<int64_t> counts;
  std::vector<size_t> order(shares.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto exact = [&](size_t i) { return shares[i] * static_cast<double>(DataMixture::kCycle); };
  counts.reserve(shares.size());
  for (size_t i = 0; i < shares.size(); ++i) counts.push_back(static_cast<int64_t>(exact(i)));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return exact(a) - std::floor(exact(a)) > exact(b) - std::floor(exact(b));
  });
  const int64_t left = DataMixture::kCycle - std::accumulate(counts.begin(), counts.end(), int64_t{0});
  for (int64_t i = 0; i < left; ++i) ++counts[order[static_cast<size_t>(i) % order.size()]];
  return counts;
}

absl::Status CheckWeights(size_t texts, const std::vector<double>& weights) {
  if (weights.size() != texts) {
    return absl::InvalidArgumentError(absl::StrCat(texts, texts == 1 ? " text and " : " texts and ",
                                                   weights.size(), " weights: give one for each"));
  }
  for (const double weight : weights) {
    if (!std::isfinite(weight) || weight <= 0)
      return absl::InvalidArgumentError(absl::StrCat("a weight of ", weight, ": it must be above 0"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<DataMixture>> DataMixture::Of(std::vector<std::unique_ptr<Dataset>> texts,
                                                             const std::vector<double>& weights) {
  std::vector<double> shares = weights;
  if (shares.empty()) {
    for (const auto& text : texts) shares.push_back(TokensOf(*text));
  }
  RETURN_IF_ERROR(CheckWeights(texts.size(), shares));
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (double& share : shares) share /= sum;
  std::vector<int64_t> counts = Apportion(shares);
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(texts[i]->path(), " would have ", shares[i] * 100,
                                                   "% of the sequences, less than one in ", kCycle,
                                                   ": give it more weight, or leave it out"));
  }
  return std::unique_ptr<DataMixture>(new DataMixture(std::move(texts), std::move(counts)));
}

absl::StatusOr<uint64_t> DataMixture::Fingerprint() const {
  if (texts_.size() == 1) return texts_.front()->Fingerprint();
  std::vector<uint64_t> words;
  for (size_t i = 0; i < texts_.size(); ++i) {
    ASSIGN_OR_RETURN(const uint64_t print, texts_[i]->Fingerprint());
    words.insert(words.end(), {print, static_cast<uint64_t>(counts_[i])});
  }
  return kernels::Checksum(words.data(), words.size() * sizeof(uint64_t));
}

absl::StatusOr<std::unique_ptr<DataMixture>> DataMixture::HoldOut(double share) {
  std::vector<std::unique_ptr<Dataset>> held;
  for (const auto& text : texts_) {
    ASSIGN_OR_RETURN(held.emplace_back(), text->HoldOut(share));
  }
  return std::unique_ptr<DataMixture>(new DataMixture(std::move(held), counts_));
}

absl::Status DataMixture::Fill(const BatchPlace& place, int64_t batch, uint64_t seed, int64_t* tokens,
                               int64_t* targets) const {
  if (texts_.size() == 1) return texts_.front()->Fill(place, batch, seed, tokens, targets);
  RETURN_IF_ERROR(texts_.front()->CheckPlace(place, batch, /*needs_rows=*/true));
  const int64_t seq = texts_.front()->seq();
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t row = (place.micro_batch * place.world + place.rank) * batch + i;
    const int64_t number = (place.step - 1) * place.rows + row;  // of all sequences of the run
    const int64_t cycle = number / kCycle;
    int64_t at = RowOfEpoch(seed, cycle, number % kCycle, kCycle);
    size_t text = 0;
    while (at >= counts_[text]) at -= counts_[text++];
    const int64_t index = cycle * counts_[text] + at;
    RETURN_IF_ERROR(texts_[text]->FillSequence({.step = place.step, .row = row, .index = index}, seed,
                                               tokens + i * seq, targets + i * seq));
  }
  return absl::OkStatus();
}

int64_t DataMixture::EvalWindows() const {
  int64_t windows = 0;
  for (const auto& text : texts_) windows += text->EvalWindows();
  return windows;
}

absl::Status DataMixture::FillEval(int64_t window, int64_t* tokens, int64_t* targets) const {
  for (const auto& text : texts_) {
    if (window < text->EvalWindows()) return text->FillEval(window, 1, tokens, targets);
    window -= text->EvalWindows();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("window ", window, " beyond the last of ", texts_.back()->path()));
}

}  // namespace penstock::models
