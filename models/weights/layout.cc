#include "models/weights/layout.h"

#include <algorithm>

#include "base/check.h"
#include "base/status_macros.h"
#include "tiering/plan/model_graph.h"

namespace penstock::models {

std::vector<uint64_t> PublishedTensor::published_shape() const {
  if (shape.has_value()) return *shape;
  const auto r = static_cast<uint64_t>(rows), c = static_cast<uint64_t>(columns);
  if (columns == 0) return {r};
  return transposed ? std::vector<uint64_t>{c, r} : std::vector<uint64_t>{r, c};
}

int64_t ModelLayout::parameters() const {
  int64_t sum = 0;
  for (const PublishedTensor& tensor : tensors) sum += tensor.elements();
  return sum;
}

int64_t ModelLayout::largest_block_parameters() const {
  std::vector<int64_t> of_block(block_elements.size());
  for (const PublishedTensor& tensor : tensors) {
    for (int64_t at = 0; at < tensor.elements();) {
      const TensorPlace place = PlaceOf(tensor, at);
      of_block[static_cast<size_t>(place.block)] += place.elements;
      at += place.elements;
    }
  }
  return of_block.empty() ? 0 : *std::max_element(of_block.begin(), of_block.end());
}

std::optional<TensorPiece> PieceOf(const PublishedTensor& tensor, int block, int64_t first,
                                   int64_t elements) {
  const int64_t each = tensor.rows_of_block > 0 ? tensor.rows_of_block * tensor.columns : tensor.elements();
  const int64_t begin = (block - tensor.block) * each;  // of what the block has
  if (block < tensor.block || begin >= tensor.elements()) return std::nullopt;
  const int64_t all = std::min(each, tensor.elements() - begin);
  const int64_t from = std::max(tensor.offset, first);
  const int64_t end = std::min(tensor.offset + all, first + elements);
  if (from >= end) return std::nullopt;
  return TensorPiece{begin + from - tensor.offset, begin + end - tensor.offset, from - first};
}

TensorPlace PlaceOf(const PublishedTensor& tensor, int64_t element) {
  const int64_t each = tensor.rows_of_block > 0 ? tensor.rows_of_block * tensor.columns : tensor.elements();
  const int64_t tile = element / each, in_tile = element % each;
  return {.block = tensor.block + static_cast<int>(tile),
          .first = tensor.offset + in_tile,
          .elements = std::min(each - in_tile, tensor.elements() - element)};
}

absl::Status ForTensorsIn(const ModelLayout& layout, int block, int64_t first, int64_t elements,
                          absl::FunctionRef<absl::Status(size_t tensor, const TensorPiece& piece)> use) {
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    const std::optional<TensorPiece> piece = PieceOf(layout.tensors[i], block, first, elements);
    if (piece.has_value()) RETURN_IF_ERROR(use(i, *piece));
  }
  return absl::OkStatus();
}

ModelLayout LayoutOf(const std::vector<BlockDescription>& blocks) {
  ModelLayout layout;
  for (const BlockDescription& block : blocks) {
    const int number = static_cast<int>(layout.block_elements.size());
    int64_t offset = 0;
    bool after_frozen = false;
    for (const ParameterDescription& p : block.parameters) {
      if (after_frozen && !p.frozen) offset = tiering::AlignUp(offset, tiering::kPartAlignment);
      after_frozen = p.frozen;
      if (p.is_tile() && p.first_row > 0) {
        const PublishedTensor& whole = layout.tensors.back();
        PENSTOCK_CHECK(whole.name == p.published && whole.offset == offset &&
                           p.first_row == (number - whole.block) * whole.rows_of_block,
                       "rows of a matrix that do not go on where the block before ends");
      } else {
        layout.tensors.push_back({.name = p.published,
                                  .block = number,
                                  .offset = offset,
                                  .rows = p.is_tile() ? p.published_rows : p.rows,
                                  .columns = p.columns,
                                  .transposed = p.transposed,
                                  .rows_of_block = p.is_tile() ? p.rows : 0,
                                  .other_places = p.other_places});
      }
      offset = tiering::AlignUp(offset + p.elements(), kParameterAlignment);
    }
    layout.block_elements.push_back(tiering::AlignUp(offset, tiering::kElementAlignment));
  }
  return layout;
}

}  // namespace penstock::models
