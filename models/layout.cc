#include "models/layout.h"

#include <algorithm>

#include "base/status_macros.h"
#include "tiering/plan/model_graph.h"

namespace penstock::models {

std::vector<uint64_t> PublishedTensor::published_shape() const {
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
  for (const PublishedTensor& tensor : tensors)
    of_block[static_cast<size_t>(tensor.block)] += tensor.elements();
  return of_block.empty() ? 0 : *std::max_element(of_block.begin(), of_block.end());
}

std::optional<TensorPiece> PieceOf(const PublishedTensor& tensor, int block, int64_t first,
                                   int64_t elements) {
  const int64_t from = std::max(tensor.offset, first);
  const int64_t end = std::min(tensor.offset + tensor.elements(), first + elements);
  if (tensor.block != block || from >= end) return std::nullopt;
  return TensorPiece{from - tensor.offset, end - tensor.offset, from - first};
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
      layout.tensors.push_back({p.published, number, offset, p.rows, p.columns, p.transposed});
      offset = tiering::AlignUp(offset + p.elements(), kParameterAlignment);
    }
    layout.block_elements.push_back(tiering::AlignUp(offset, tiering::kElementAlignment));
  }
  return layout;
}

}  // namespace penstock::models
