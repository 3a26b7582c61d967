#include "generate/routing.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/float16.h"

namespace penstock::generate {
namespace {

using kernels::DType;

float Rounded(DType type, float value) {
  return type == DType::kBf16 ? kernels::Bf16ToFloat(kernels::FloatToBf16(value)) : value;
}

bool AreFinite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
}

// The softmax of a row, in place.
void Softmax(std::vector<float>* row) {
  const float most = *std::max_element(row->begin(), row->end());
  float sum = 0;
  for (float& value : *row) {
    value = std::exp(value - most);
    sum += value;
  }
  for (float& value : *row) value /= sum;
}

void Sigmoid(std::vector<float>* row) {
  for (float& value : *row) value = 1 / (1 + std::exp(-value));
}

// Leaves the experts of the groups that are chosen; of groups of equal scores the first.
void KeepGroups(const RoutingOptions& options, std::vector<float>* given) {
  if (options.chosen_groups == options.groups) return;
  const auto groups = static_cast<size_t>(options.groups), each = given->size() / groups;
  std::vector<float> scores(groups);
  for (size_t g = 0; g < groups; ++g) {
    std::vector<float> of(given->begin() + static_cast<std::ptrdiff_t>(g * each),
                          given->begin() + static_cast<std::ptrdiff_t>((g + 1) * each));
    const size_t summed = options.sums_two ? 2 : 1;
    std::partial_sort(of.begin(), of.begin() + static_cast<std::ptrdiff_t>(summed), of.end(),
                      std::greater<>());
    for (size_t i = 0; i < summed; ++i) scores[g] += of[i];
  }
  std::vector<size_t> order(groups);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  for (size_t i = static_cast<size_t>(options.chosen_groups); i < groups; ++i) {
    std::fill_n(given->begin() + static_cast<std::ptrdiff_t>(order[i] * each), each,
                -std::numeric_limits<float>::infinity());
  }
}

}  // namespace

absl::StatusOr<Routes> Route(const HostRows& scores, const RoutingOptions& options,
                             const std::string& where) {
  const int64_t experts = scores.columns();
  const auto chosen = static_cast<size_t>(options.chosen);
  std::vector<float> row(static_cast<size_t>(experts)), given(row.size());
  std::vector<int64_t> order(row.size());
  std::vector<std::vector<RoutedRow>> by_expert(row.size());
  if (!AreFinite(options.correction)) {
    return absl::DataLossError(
        absl::StrCat(options.correction_name,
                     ": corrections of the router's scores are not finite numbers: the tensor is damaged"));
  }
  for (int64_t i = 0; i < scores.rows(); ++i) {
    kernels::Convert(scores.type(), scores.row(i), DType::kFp32, row.data(), row.size());
    if (!AreFinite(row)) {
      return absl::DataLossError(
          absl::StrCat(where,
                       ": the router's scores are not finite numbers: its weights, or those of a layer "
                       "before it, are damaged, or too large for their type"));
    }
    given = row;
    if (options.sigmoid) {
      Sigmoid(&row);
    } else {
      Softmax(&row);
    }
    // Corrections are added to scores; without them what the router gives has their order.
    for (size_t e = 0; e < options.correction.size(); ++e) given[e] = row[e] + options.correction[e];
    KeepGroups(options, &given);
    std::iota(order.begin(), order.end(), int64_t{0});
    const auto higher = [&](int64_t a, int64_t b) {
      const float x = given[static_cast<size_t>(a)], y = given[static_cast<size_t>(b)];
      return x > y || (x == y && a < b);
    };
    const auto end = order.begin() + static_cast<std::ptrdiff_t>(chosen);
    std::partial_sort(order.begin(), end, order.end(), higher);
    float sum = 1;
    if (options.normalizes) {
      sum = 0;
      for (size_t k = 0; k < chosen; ++k) sum += row[static_cast<size_t>(order[k])];
      if (options.sigmoid) sum += 1e-20F;  // all of them may be 0
    }
    std::sort(order.begin(), end);
    for (size_t k = 0; k < chosen; ++k) {
      const auto expert = static_cast<size_t>(order[k]);
      const float weight = row[expert] / sum * static_cast<float>(options.scaling);
      by_expert[expert].push_back(
          {.row = i,
           .number = static_cast<int64_t>(k),
           .weight = options.rounds_weights ? Rounded(scores.type(), weight) : weight});
    }
  }
  Routes routes;
  for (int64_t e = 0; e < experts; ++e) {
    std::vector<RoutedRow>& rows = by_expert[static_cast<size_t>(e)];
    if (rows.empty()) continue;
    routes.experts.push_back(e);
    routes.rows.push_back(std::move(rows));
  }
  std::vector<float> weights;
  for (const std::vector<RoutedRow>& rows : routes.rows) {
    weights.push_back(std::accumulate(rows.begin(), rows.end(), 0.0F,
                                      [](float sum, const RoutedRow& row) { return sum + row.weight; }));
  }
  std::vector<size_t> by_weight(routes.experts.size());
  std::iota(by_weight.begin(), by_weight.end(), size_t{0});
  std::stable_sort(by_weight.begin(), by_weight.end(),
                   [&](size_t a, size_t b) { return weights[a] > weights[b]; });
  for (const size_t i : by_weight) routes.likeliest.push_back(routes.experts[i]);
  return routes;
}

}  // namespace penstock::generate
