#include "tools/penstock/vocabulary_flags.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "models/families/family.h"
#include "models/families/vocabulary_tiles.h"
#include "tools/base/flag_check.h"

namespace penstock::tools {
namespace {

// nullopt: as many as are usual.
absl::StatusOr<std::optional<int64_t>> Asked(const models::LanguageModel& model, const TrainOptions& flags) {
  if (!flags.vocabulary_tiles.has_value() || *flags.vocabulary_tiles == "auto") return std::nullopt;
  int64_t tiles = 0;
  const int64_t most = std::min(model.vocabulary(), kMostVocabularyTiles);
  if (!absl::SimpleAtoi(*flags.vocabulary_tiles, &tiles) || tiles < 1 || tiles > most) {
    return WrongFlag(absl::StrCat("--vocabulary-tiles ", *flags.vocabulary_tiles,
                                  ": must be auto, or a number from 1 to ", most));
  }
  return tiles;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const models::LanguageModel>> InTiles(
    std::shared_ptr<const models::LanguageModel> model, const TrainOptions& flags) {
  ASSIGN_OR_RETURN(const std::optional<int64_t> asked, Asked(*model, flags));
  const int64_t tiles = asked.value_or(models::UsualVocabularyTiles(*model));
  const int64_t rows = models::RowsOfTiles(model->vocabulary(), tiles);
  auto tiled = models::WithVocabularyTiles(std::move(model), rows);
  if (tiled.ok()) return tiled;
  return WrongFlag(absl::StrCat("--vocabulary-tiles ", tiles, ": a head in tiles has no adapter (",
                                std::string(tiled.status().message()), "): --vocabulary-tiles 1 has one"));
}

absl::StatusOr<std::shared_ptr<const models::LanguageModel>> InTilesOf(
    const models::LanguageModel& made, std::shared_ptr<const models::LanguageModel> model,
    const TrainOptions& flags) {
  ASSIGN_OR_RETURN(const std::optional<int64_t> asked, Asked(made, flags));
  if (asked.has_value() &&
      models::VocabularyCut(made.vocabulary(), models::RowsOfTiles(made.vocabulary(), *asked)).tiles() !=
          models::VocabularyTiles(made)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--vocabulary-tiles ", *asked, ": this run's vocabulary is in ", models::VocabularyTiles(made),
        " since it was created, and its state is made of that; leave the flag out, or start "
        "another run in another --state-dir"));
  }
  return models::WithVocabularyTiles(std::move(model), made.tile_rows());
}

}  // namespace penstock::tools
