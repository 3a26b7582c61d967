#include "models/families/vocabulary_cut.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "models/families/family.h"

namespace penstock::models {
namespace {

constexpr int64_t kLeastTile = int64_t{32} << 20;
constexpr int64_t kLeastTiled = int64_t{64} << 20;

}  // namespace

int64_t UsualTiles(int64_t vocabulary, int64_t width, int64_t layer_parameters) {
  const int64_t parameters = vocabulary * width;
  if (parameters < kLeastTiled || parameters < 2 * layer_parameters) return 1;
  const int64_t each = std::max(layer_parameters, kLeastTile);
  return (parameters + each - 1) / each;
}

void ReadTileRows(int64_t vocabulary, ModelKeys* keys, int64_t* rows) {
  keys->Whole(kTileRowsKey, rows);
  if (keys->Find(kTileRowsKey) != nullptr && (*rows < 1 || *rows >= vocabulary))
    keys->Wrong(kTileRowsKey, "not 1 or more, and fewer than the vocabulary has");
}

void AddTiles(const VocabularyCut& cut, const std::string& name, const ParameterDescription& matrix,
              std::vector<BlockDescription>* blocks) {
  for (int tile = 0; tile < cut.tiles(); ++tile) {
    ParameterDescription rows = matrix;
    rows.rows = cut.rows(tile);
    rows.first_row = cut.first(tile);
    rows.published_rows = matrix.rows;
    // Blocks of one kind have the same shapes.
    const char* const kind = cut.rows(tile) == cut.rows(0) ? " tile" : " last tile";
    blocks->push_back({.name = absl::StrCat(name, ".", tile),
                       .kind = absl::StrCat(name, kind),
                       .parameters = {std::move(rows)}});
  }
}

}  // namespace penstock::models
