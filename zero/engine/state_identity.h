// What a run's state is made of, as its store records it (swap::StoreShape::identity): model, types,
// optimizer, seed and the sizes of its blocks. A run goes on only from state whose identity is its own.
#ifndef PENSTOCK_ZERO_ENGINE_STATE_IDENTITY_H_
#define PENSTOCK_ZERO_ENGINE_STATE_IDENTITY_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "swap/inspect.h"
#include "tiering/plan/model_graph.h"
#include "tiering/plan/plan.h"
#include "zero/compute/tile_format.h"
#include "zero/engine/engine.h"

namespace penstock::zero {

// Of the whole run, whatever the rank; NameRank says whose shard it is. One rank's state is named as it
// always was.
nlohmann::json IdentityOf(const nlohmann::json& model, const EngineOptions& options, const TileFormat& format,
                          const tiering::ModelGraph& graph);
void NameRank(const EngineOptions& options, nlohmann::json* identity);

// The identity of the run that is there, with or without whose shard it is. Older runs, which do not say it,
// have Adam's states in fp32.
nlohmann::json RecordedIdentity(const swap::Inspection& found, bool with_rank);

// kFailedPrecondition: `ours` has blocks that are frozen in part, and the recorded ones have another
// order (zero/compute/flat_layout.h).
absl::Status CheckFrozenParts(const nlohmann::json& recorded, const nlohmann::json& ours,
                              const std::string& path);

// An evaluation takes optimizer and seed of the run as they are.
void AdoptOptimizer(const nlohmann::json& recorded, TileFormat* format, nlohmann::json* ours);

// What an identity says of its tiles: the bytes of their elements (kFailedPrecondition: it does not say), and
// the elements of its blocks (kDataLoss: no model has such). `path` names it in errors.
absl::StatusOr<tiering::Precision> PrecisionOf(const nlohmann::json& identity, const std::string& path);
absl::StatusOr<std::vector<int64_t>> BlockElementsOf(const nlohmann::json& identity, const std::string& path);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_STATE_IDENTITY_H_
