#include "zero/memory/values.h"

#include <cstddef>
#include <iterator>

namespace penstock::zero {
namespace {

struct TypeRow {
  std::string_view name;
  int64_t bytes = 0;
};

// By ElementType.
constexpr TypeRow kTypes[] = {{"fp32", 4},  {"bf16", 2},  {"fp16", 2}, {"fp64", 8},  {"int64", 8},
                              {"int32", 4}, {"int16", 2}, {"int8", 1}, {"uint8", 1}, {"bool", 1}};
static_assert(std::size(kTypes) == static_cast<size_t>(ElementType::kBool) + 1);

TypeRow RowOf(ElementType type) {
  const auto row = static_cast<size_t>(type);
  return row < std::size(kTypes) ? kTypes[row] : TypeRow{"?", 0};
}

}  // namespace

int64_t BytesOf(ElementType type) { return RowOf(type).bytes; }

std::string_view NameOf(ElementType type) { return RowOf(type).name; }

int64_t TensorView::elements() const {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

Batch Kept(Batch batch) {
  if (batch.owner != nullptr) return batch;
  auto memory = std::make_shared<std::vector<std::vector<std::byte>>>();
  for (auto& [name, view] : batch.tensors) {
    if (view.data == nullptr) continue;  // only its shape matters
    const auto* const bytes = static_cast<const std::byte*>(view.data);
    view.data = memory->emplace_back(bytes, bytes + view.bytes()).data();
  }
  batch.owner = std::move(memory);
  return batch;
}

}  // namespace penstock::zero
