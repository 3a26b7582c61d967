// Values that go between the engine and a Compute: views of memory that somebody else owns, without
// any library's tensors.
#ifndef PENSTOCK_ZERO_MEMORY_VALUES_H_
#define PENSTOCK_ZERO_MEMORY_VALUES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/memory/tensor_memory.h"

namespace penstock::zero {

enum class ElementType : uint8_t { kFp32, kBf16, kFp16, kFp64, kInt64, kInt32, kInt16, kInt8, kUInt8, kBool };
int64_t BytesOf(ElementType type);  // of one element
std::string_view NameOf(ElementType type);

// Contiguous, row by row. Owns nothing: the call that hands it over says how long it lives.
struct TensorView {
  void* data = nullptr;
  ElementType type = ElementType::kFp32;
  std::vector<int64_t> sizes;  // none: a scalar
  bool on_device = false;      // in the memory of the engine's device, which has its own; else in the host's

  int64_t elements() const;
  int64_t bytes() const { return elements() * BytesOf(type); }
};

// Of inputs that stages keep for backward: what has left for the next tier, and come back.
struct InputBytes {
  int64_t written = 0, read = 0;
};

// One micro-batch in host memory, by the names that the model knows. The first tensor is what counts as its
// size (Engine::EvaluatesAtOnce).
struct Batch {
  std::vector<std::pair<std::string, TensorView>> tensors;
  std::shared_ptr<const void> owner;  // keeps their memory until the pass is over; null: the caller does

  int64_t elements() const { return tensors.empty() ? 0 : tensors.front().second.elements(); }
};

// The same, in memory that it keeps, where the caller would have to.
Batch Kept(Batch batch);

// A value in host memory of its own.
struct HostTensor {
  HostBuffer memory;
  TensorView view;  // of `memory`
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_VALUES_H_
