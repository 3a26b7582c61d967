// --vocabulary-tiles: in how many blocks embedding and head of a model are
// (models/families/vocabulary_tiles.h).
#ifndef PENSTOCK_TOOLS_PENSTOCK_VOCABULARY_FLAGS_H_
#define PENSTOCK_TOOLS_PENSTOCK_VOCABULARY_FLAGS_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "models/families/family.h"
#include "tools/penstock/train_options.h"

namespace penstock::tools {

// Each is a stage twice.
inline constexpr int64_t kMostVocabularyTiles = 1024;

// Of a new run: the model in as many tiles as the flag says, or as are usual.
absl::StatusOr<std::shared_ptr<const models::LanguageModel>> InTiles(
    std::shared_ptr<const models::LanguageModel> model, const TrainOptions& flags);

// Of a run that goes on, which was made with `made`: `model` in the tiles of that one. kFailedPrecondition:
// the flag asks for others.
absl::StatusOr<std::shared_ptr<const models::LanguageModel>> InTilesOf(
    const models::LanguageModel& made, std::shared_ptr<const models::LanguageModel> model,
    const TrainOptions& flags);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_VOCABULARY_FLAGS_H_
