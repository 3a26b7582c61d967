#include "zero/engine/state_identity.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "zero/compute/optimizer.h"
#include "zero/config/json_field.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero {
namespace {

// Where an identity names the optimizer's states, and what runs had that name none.
constexpr const char* kOptimizer = "optimizer";
constexpr const char* kOptimizerStates = "optimizer_states";
constexpr const char* kBlockElements = "block_elements";
constexpr const char* kTrainedFrom = "trained_from";
constexpr const char* kFrozenElsewhere = "frozen_elsewhere";
constexpr const char* kEvaluatedOnly = "evaluated_only";

}  // namespace

nlohmann::json IdentityOf(const nlohmann::json& model, const EngineOptions& options, const TileFormat& format,
                          const tiering::ModelGraph& graph) {
  nlohmann::json elements = nlohmann::json::array();
  for (const tiering::BlockShape& block : graph.blocks) elements.push_back(block.elements);
  nlohmann::json identity = {{"model", model},
                             {"dtype", std::string(DTypeName(format.weights))},
                             {kOptimizer, OptimizerName(options.optimizer.algorithm)},
                             {kOptimizerStates, std::string(StateTypeName(format.states))},
                             {"seed", options.seed},
                             {kBlockElements, std::move(elements)}};
  // Where the frozen part of each block ends, if any has one: their parameters lie in another order then.
  nlohmann::json trained_from = nlohmann::json::array();
  for (const tiering::BlockShape& block : graph.blocks) trained_from.push_back(block.trained_from);
  if (std::any_of(graph.blocks.begin(), graph.blocks.end(),
                  [](const tiering::BlockShape& block) { return block.trained_from > 0; })) {
    identity[kTrainedFrom] = std::move(trained_from);
  }
  if (options.frozen != nullptr) identity[kFrozenElsewhere] = true;
  if (options.new_weights) identity[kEvaluatedOnly] = true;
  NameRank(options, &identity);
  return identity;
}

absl::Status CheckFrozenParts(const nlohmann::json& recorded, const nlohmann::json& ours,
                              const std::string& path) {
  if (!recorded.is_object() || !ours.contains(kTrainedFrom) || recorded.contains(kTrainedFrom))
    return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(path,
                   " holds a run whose blocks have what is frozen among what trains, as an older "
                   "Penstock laid them out or as other parameters were frozen: it goes on with that "
                   "one, or write its values out there and start a new run with them"));
}

void NameRank(const EngineOptions& options, nlohmann::json* identity) {
  if (options.world() > 1) identity->update({{"ranks", options.world()}, {"rank", options.rank()}});
}

nlohmann::json RecordedIdentity(const swap::Inspection& found, bool with_rank) {
  nlohmann::json theirs = ParseJsonObject(found.shape.identity, "").value_or(nlohmann::json());
  if (!theirs.is_object()) return theirs;
  if (!with_rank) theirs = WholeIdentity(found.shape.identity);
  theirs.emplace(kOptimizer, "adam");
  theirs.emplace(kOptimizerStates, std::string(StateTypeName(kernels::StateType::kFp32)));
  return theirs;
}

void AdoptOptimizer(const nlohmann::json& recorded, TileFormat* format, nlohmann::json* ours) {
  if (!recorded.is_object()) return;
  for (const char* key : {kOptimizer, kOptimizerStates, "seed"})
    (*ours)[key] = recorded.value(key, nlohmann::json());
  if (recorded.contains(kEvaluatedOnly)) (*ours)[kEvaluatedOnly] = recorded[kEvaluatedOnly];
  const auto text = [&](const char* key) {
    return recorded[key].is_string() ? recorded[key].get<std::string>() : std::string();
  };
  format->moments = MomentsByName(text(kOptimizer)).value_or(format->moments);
  format->states = ParseStateType(text(kOptimizerStates)).value_or(format->states);
}

absl::StatusOr<tiering::Precision> PrecisionOf(const nlohmann::json& identity, const std::string& path) {
  const auto text = [&](const char* key, const char* otherwise) {
    return JsonField<std::string>(identity, key).value_or(otherwise);
  };
  TileFormat format;
  const std::optional<kernels::DType> weights = ParseDType(text("dtype", ""));
  const std::optional<Moments> moments = MomentsByName(text(kOptimizer, "adam"));
  const std::optional<kernels::StateType> states = ParseStateType(text(kOptimizerStates, "fp32"));
  if (!weights.has_value() || !moments.has_value() || !states.has_value() ||
      !identity.contains(kBlockElements)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " does not say what its tiles hold"));
  }
  format.weights = *weights;
  format.moments = *moments;
  format.states = *states;
  return format.precision();
}

absl::StatusOr<std::vector<int64_t>> BlockElementsOf(const nlohmann::json& identity,
                                                     const std::string& path) {
  constexpr int64_t kMost = int64_t{1} << 50;
  const auto elements = JsonField<std::vector<int64_t>>(identity, kBlockElements);
  const auto possible = [](int64_t each) {
    return each > 0 && each <= kMost && each % tiering::kElementAlignment == 0;
  };
  if (elements.has_value() && !elements->empty() && std::all_of(elements->begin(), elements->end(), possible))
    return *elements;
  return absl::DataLossError(
      absl::StrCat(path, ": the sizes of its blocks are none that a model has: its identity is damaged"));
}

}  // namespace penstock::zero
