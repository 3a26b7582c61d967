// How the matrix of an embedding or a head is cut into blocks of rows (models/families/vocabulary_tiles.h has
// what they compute).
#ifndef PENSTOCK_MODELS_FAMILIES_VOCABULARY_CUT_H_
#define PENSTOCK_MODELS_FAMILIES_VOCABULARY_CUT_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "models/families/model_keys.h"
#include "models/weights/layout.h"

namespace penstock::models {

// How the rows are cut: evenly, the last tile has what is left.
class VocabularyCut {
 public:
  // `rows`: of a tile; 0, or all there are: one tile.
  VocabularyCut(int64_t vocabulary, int64_t rows)
      : vocabulary_(vocabulary), rows_(rows > 0 && rows < vocabulary ? rows : vocabulary) {}
  int tiles() const { return static_cast<int>((vocabulary_ + rows_ - 1) / rows_); }
  int64_t first(int tile) const { return tile * rows_; }
  int64_t rows(int tile) const { return std::min(rows_, vocabulary_ - first(tile)); }
  // The name of a tile's stage: "loss.2"; of the only one "loss".
  std::string StageOf(const std::string& name, int tile) const {
    return tiles() == 1 ? name : name + "." + std::to_string(tile);
  }

 private:
  int64_t vocabulary_, rows_;
};

// Rows of a tile where the vocabulary is cut into `tiles`: rounded up, so the last one may have fewer.
inline int64_t RowsOfTiles(int64_t vocabulary, int64_t tiles) { return (vocabulary + tiles - 1) / tiles; }

// How many tiles a matrix of [vocabulary, width] should be, beside layers of at most `layer_parameters`: 1
// unless it is far larger than one of them and than what a small budget holds. Few tiles are fast: each costs
// two or three stages of its own, so one is as large as a layer, or 32 million parameters.
int64_t UsualTiles(int64_t vocabulary, int64_t width, int64_t layer_parameters);

// kTileRowsKey, where a state says it.
void ReadTileRows(int64_t vocabulary, ModelKeys* keys, int64_t* rows);

// Blocks NAME.0, NAME.1, ... for the rows of `matrix`, which is described whole.
void AddTiles(const VocabularyCut& cut, const std::string& name, const ParameterDescription& matrix,
              std::vector<BlockDescription>* blocks);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_VOCABULARY_CUT_H_
