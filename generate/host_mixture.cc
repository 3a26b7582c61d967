#include "generate/host_mixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "generate/expert_cache.h"
#include "kernels/layer.h"

namespace penstock::generate {
namespace {

using kernels::DType;

// How many of an expert's rows are among the first `single` of the pass.
int64_t SingleOf(const std::vector<RoutedRow>& rows, int64_t single) {
  return std::count_if(rows.begin(), rows.end(), [single](const RoutedRow& row) { return row.row < single; });
}

}  // namespace

HostMixture::HostMixture(const PassParts& parts, ProductScratch* scratch)
    : parts_(parts), f_(parts.decoder->function), shape_(parts.decoder->shape.mixture), scratch_(*scratch) {}

absl::StatusOr<HostRows> HostMixture::KeptProduct(int64_t layer, const std::string& name, const HostRows& x,
                                                  int64_t single) {
  const int tensor = parts_.kept->matrix(static_cast<int>(layer) + 1, name);
  ASSIGN_OR_RETURN(HostRows y, ProductWith(parts_.kept->vector(tensor), x, single, &scratch_));
  AddKept(parts_.kept->tensor(static_cast<int>(layer) + 1, name + ".bias"), &y);
  return y;
}

void HostMixture::AddKept(int tensor, HostRows* y) {
  if (tensor >= 0) scratch_.AddToRows(parts_.kept->vector(tensor), y);
}

absl::StatusOr<Routes> HostMixture::RoutesOf(int64_t layer, const HostRows& x, int64_t single) {
  const models::MixtureFunction& m = f_.mixture;
  HostRows wide;
  if (m.wide && x.type() != DType::kFp32) {
    ASSIGN_OR_RETURN(wide, scratch_.Converted(x, DType::kFp32));
  }
  ASSIGN_OR_RETURN(const HostRows scores, KeptProduct(layer, m.router, wide.rows() > 0 ? wide : x, single));
  const models::ModelLayout& layout = *parts_.layout;
  const int block = static_cast<int>(layer) + 1, router = parts_.kept->matrix(block, m.router);
  RoutingOptions options = {.chosen = shape_.chosen,
                            .normalizes = m.normalizes,
                            .rounds_weights = m.rounds_weights,
                            .sigmoid = m.sigmoid,
                            .groups = m.groups,
                            .chosen_groups = m.chosen_groups,
                            .sums_two = m.sums_two,
                            .scaling = m.scaling};
  if (!m.correction.empty()) {
    const int tensor = parts_.kept->tensor(block, m.correction);
    const HostRows& correction = parts_.kept->vector(tensor);
    options.correction = {correction.floats(), correction.elements()};
    options.correction_name = layout.tensors[static_cast<size_t>(tensor)].name;
  }
  return Route(scores, options, layout.tensors[static_cast<size_t>(router)].name);
}

absl::Status HostMixture::Choose(int64_t layer, const HostRows& x, int64_t single) {
  layer_ = layer;
  ASSIGN_OR_RETURN(routes_, RoutesOf(layer, x, single));
  return parts_.experts->Begin(layer, routes_.experts);
}

absl::Status HostMixture::Guess(int64_t layer, const HostRows& x, int64_t single) {
  ASSIGN_OR_RETURN(const Routes routes, RoutesOf(layer, x, single));
  return parts_.experts->Guess(layer, routes.likeliest);
}

absl::StatusOr<HostRows> HostMixture::Product(int tensor, const WeightUnit& unit, const std::byte* memory,
                                              const HostRows& x, int64_t single) {
  const auto part = std::find_if(unit.parts.begin(), unit.parts.end(),
                                 [tensor](const WeightPart& each) { return each.tensor == tensor; });
  PENSTOCK_CHECK(part != unit.parts.end(), "an expert's unit has its matrices");
  StoredMatrix matrix = StoredAs(*parts_.source, *parts_.layout, tensor);
  if (part->scales_bytes > 0) {
    matrix.scaled = std::make_shared<const models::ScaledMatrix>(matrix.columns, memory + part->scales_at);
  }
  ASSIGN_OR_RETURN(MatrixProduct product, MatrixProduct::Begin(x, single, matrix, &scratch_));
  RETURN_IF_ERROR(product.Add(memory + part->at, 0, part->elements));
  return product.Result();
}

absl::StatusOr<HostRows> HostMixture::ComputeExpert(size_t number, const std::byte* memory, const HostRows& x,
                                                    int64_t single) {
  const ExpertMatrices& matrices = parts_.order->experts[number];
  const WeightUnit& unit = parts_.source->experts()[number];
  HostRows gate;
  if (f_.mixture.pair_limit > 0) {
    ASSIGN_OR_RETURN(gate, ComputePairs(matrices, unit, memory, x, single));
  } else {
    ASSIGN_OR_RETURN(gate, Product(matrices.gate, unit, memory, x, single));
    ASSIGN_OR_RETURN(const HostRows up, Product(matrices.up, unit, memory, x, single));
    scratch_.ForRows(gate.rows(), gate.columns(), [&](size_t begin, size_t end) {
      const auto first = static_cast<int64_t>(begin);
      kernels::Activate(gate.type(), f_.activation, gate.row(first), up.row(first),
                        (end - begin) * static_cast<size_t>(gate.columns()), gate.row(first));
    });
  }
  ASSIGN_OR_RETURN(HostRows y, Product(matrices.down, unit, memory, gate, single));
  AddKept(matrices.down_bias, &y);
  return y;
}

absl::StatusOr<HostRows> HostMixture::ComputePairs(const ExpertMatrices& matrices, const WeightUnit& unit,
                                                   const std::byte* memory, const HostRows& x,
                                                   int64_t single) {
  ASSIGN_OR_RETURN(HostRows both, Product(matrices.up, unit, memory, x, single));
  AddKept(matrices.up_bias, &both);
  const int64_t inner = both.columns() / 2;
  ASSIGN_OR_RETURN(HostRows gate, HostRows::Of(x.type(), both.rows(), inner));
  ASSIGN_OR_RETURN(HostRows up, HostRows::Of(x.type(), both.rows(), inner));
  const auto limit = static_cast<float>(f_.mixture.pair_limit);
  scratch_.ForRows(both.rows(), both.columns(), [&](size_t begin, size_t end) {
    const auto first = static_cast<int64_t>(begin);
    const size_t elements = (end - begin) * static_cast<size_t>(inner);
    kernels::SplitClampedPairs(x.type(), both.row(first), limit, elements, gate.row(first), up.row(first));
    kernels::Activate(x.type(), kernels::Activation::kQuickGelu, gate.row(first), up.row(first), elements,
                      gate.row(first));
  });
  return gate;
}

absl::StatusOr<HostRows> HostMixture::Compute(const HostRows& x, int64_t single) {
  const int64_t width = x.columns();
  // Of each row, what its experts give, each times its weight.
  ASSIGN_OR_RETURN(HostRows results, HostRows::Of(x.type(), x.rows() * shape_.chosen, width));
  ExpertCache& experts = *parts_.experts;
  while (experts.left() > 0) {
    ASSIGN_OR_RETURN(const ExpertCache::Held held, experts.Next());
    const auto at = std::lower_bound(routes_.experts.begin(), routes_.experts.end(), held.expert);
    const std::vector<RoutedRow>& rows = routes_.rows[static_cast<size_t>(at - routes_.experts.begin())];
    const auto count = static_cast<int64_t>(rows.size());
    ASSIGN_OR_RETURN(HostRows of_expert, HostRows::Of(x.type(), count, width));
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(of_expert.row(i), x.row(rows[static_cast<size_t>(i)].row), x.row_bytes());
    const auto number = static_cast<size_t>(layer_ * shape_.experts + held.expert);
    ASSIGN_OR_RETURN(HostRows y, ComputeExpert(number, held.memory, of_expert, SingleOf(rows, single)));
    RETURN_IF_ERROR(experts.Release(held));
    scratch_.ForRows(count, width, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        std::byte* const row = y.row(static_cast<int64_t>(i));
        kernels::ScaleElements(y.type(), row, rows[i].weight, static_cast<size_t>(width));
        std::memcpy(results.row(rows[i].row * shape_.chosen + rows[i].number), row, y.row_bytes());
      }
    });
  }
  ASSIGN_OR_RETURN(HostRows sum, HostRows::Of(x.type(), x.rows(), width));
  scratch_.ForRows(x.rows(), width, [&](size_t begin, size_t end) {
    for (auto row = static_cast<int64_t>(begin); row < static_cast<int64_t>(end); ++row) {
      std::memcpy(sum.row(row), results.row(row * shape_.chosen), sum.row_bytes());
      for (int64_t k = 1; k < shape_.chosen; ++k) {
        kernels::AddElements(x.type(), sum.row(row), results.row(row * shape_.chosen + k),
                             static_cast<size_t>(width), sum.row(row));
      }
    }
  });
  return sum;
}

absl::Status HostMixture::ScaleShared(int64_t layer, const HostRows& x, int64_t single, HostRows* shared) {
  ASSIGN_OR_RETURN(const HostRows scores, KeptProduct(layer, f_.mixture.shared_router, x, single));
  for (int64_t row = 0; row < x.rows(); ++row) {
    float score = 0;
    kernels::Convert(scores.type(), scores.row(row), DType::kFp32, &score, 1);
    float scale = 1 / (1 + std::exp(-score));
    if (x.type() == DType::kBf16) scale = kernels::Bf16ToFloat(kernels::FloatToBf16(scale));
    kernels::ScaleElements(shared->type(), shared->row(row), scale, static_cast<size_t>(shared->columns()));
  }
  return absl::OkStatus();
}

}  // namespace penstock::generate
