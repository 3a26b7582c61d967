#include "run/elasticity.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace penstock::run {
namespace {

// The numbers that have more divisors than any smaller one, as far as DeepSpeed knows them, which leaves some
// out.
constexpr std::array<int64_t, 38> kHighlyComposite = {
    1,     2,     4,     6,      12,     24,     36,     48,     60,     120,    180,    240,   360,
    720,   840,   1260,  1680,   2520,   5040,   7560,   10080,  15120,  20160,  25200,  27720, 45360,
    50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720};

std::set<int64_t> Candidates(const std::vector<int64_t>& micro_batches, int64_t most) {
  std::vector<int64_t> bases = micro_batches;
  int64_t common = 1;
  for (const int64_t micro : micro_batches) {
    if (common <= most) common = std::lcm(common, micro);  // beyond that it is none anyway
  }
  bases.push_back(common);
  std::set<int64_t> candidates;
  for (const int64_t base : bases) {
    if (base > most) continue;
    const auto above = std::upper_bound(kHighlyComposite.begin(), kHighlyComposite.end(), most / base);
    candidates.insert(base * *std::prev(above));
  }
  return candidates;
}

std::set<int64_t> RanksOf(int64_t batch, const std::vector<int64_t>& micro_batches, int64_t least,
                          int64_t most) {
  std::set<int64_t> ranks;
  for (const int64_t micro : micro_batches) {
    if (batch % micro != 0) continue;
    const int64_t passes = batch / micro;
    for (int64_t divisor = 1; divisor * divisor <= passes; ++divisor) {
      if (passes % divisor != 0) continue;
      for (const int64_t count : {divisor, passes / divisor}) {
        if (count >= least && count <= most) ranks.insert(count);
      }
    }
  }
  return ranks;
}

}  // namespace

bool ElasticBatch::Allows(int64_t world) const {
  return std::binary_search(ranks.begin(), ranks.end(), world);
}

std::string ElasticBatch::RanksText() const {
  constexpr size_t kShown = 12;
  if (ranks.size() <= kShown + 1) return absl::StrJoin(ranks, ", ");
  return absl::StrCat(absl::StrJoin(ranks.begin(), ranks.begin() + kShown, ", "), " and ",
                      ranks.size() - kShown, " more up to ", ranks.back());
}

absl::StatusOr<ElasticBatch> ComputeElasticBatch(const ElasticityConfig& config) {
  if (!config.max_train_batch_size.has_value() || config.micro_batch_sizes.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "elasticity.", config.micro_batch_sizes.empty() ? "micro_batch_sizes" : "max_train_batch_size",
        ": missing; it chooses a batch size from both of them"));
  }
  const int64_t most = *config.max_train_batch_size, least_ranks = config.min_gpus.value_or(1),
                most_ranks = config.max_gpus.value_or(10'000);
  for (const int64_t micro : config.micro_batch_sizes) {
    if (micro > most) {
      return absl::InvalidArgumentError(absl::StrCat("elasticity.micro_batch_sizes: ", micro,
                                                     " is more than max_train_batch_size, ", most));
    }
  }
  if (most_ranks < least_ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("elasticity.max_gpus: ", most_ranks, " is less than min_gpus, ", least_ranks));
  }
  ElasticBatch best;
  for (const int64_t batch : Candidates(config.micro_batch_sizes, most)) {
    const std::set<int64_t> ranks = RanksOf(batch, config.micro_batch_sizes, least_ranks, most_ranks);
    // They rise, so that of equals the first is the smallest.
    const bool better = config.prefer_larger_batch.value_or(true) ? ranks.size() >= best.ranks.size()
                                                                  : ranks.size() > best.ranks.size();
    if (!ranks.empty() && better) best = {batch, {ranks.begin(), ranks.end()}};
  }
  if (best.ranks.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("elasticity: no number of ranks from min_gpus ", least_ranks, " to max_gpus ",
                     most_ranks, " can share a batch of at most ", most, "; give other bounds"));
  }
  return best;
}

absl::StatusOr<int64_t> ElasticMicroBatch(const ElasticityConfig& config, const ElasticBatch& batch,
                                          int64_t world) {
  int64_t largest = 0;
  if (batch.Allows(world)) {
    for (const int64_t micro : config.micro_batch_sizes) {
      if (batch.train_batch / world % micro == 0) largest = std::max(largest, micro);
    }
  }
  if (largest > 0) return largest;
  return absl::InvalidArgumentError(absl::StrCat("elasticity: ", world, world == 1 ? " rank" : " ranks",
                                                 " cannot share the batch of ", batch.train_batch,
                                                 " evenly; start ", batch.RanksText()));
}

}  // namespace penstock::run
