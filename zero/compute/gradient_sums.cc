#include "zero/compute/gradient_sums.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {
namespace {

using kernels::DType;

DType KernelType(ElementType type) {
  return type == ElementType::kBf16 ? DType::kBf16 : type == ElementType::kFp16 ? DType::kFp16 : DType::kFp32;
}

}  // namespace

absl::Status GradientSums::Check(const FlatLayout& layout, std::span<const Gradient> gradients) const {
  int before = -1;
  for (const Gradient& gradient : gradients) {
    const TensorView& value = gradient.value;
    if (gradient.parameter <= before || gradient.parameter >= static_cast<int>(layout.parameters.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("a gradient of parameter ", gradient.parameter, " after that of ", before, ", of ",
                       layout.parameters.size(), ": each comes once, in ascending order"));
    }
    before = gradient.parameter;
    const Parameter& parameter = layout.parameters[static_cast<size_t>(before)];
    if (!parameter.trains) {
      return absl::InvalidArgumentError(
          absl::StrCat("a gradient of ", parameter.name, ", which is frozen: none is asked for"));
    }
    const bool typed = value.type == ElementType::kFp32 ||
                       (KernelType(value.type) == weights_ && KernelType(value.type) != DType::kFp32);
    if (!typed || value.elements() != parameter.elements) {
      return absl::InvalidArgumentError(absl::StrCat("gradient of ", parameter.name, " has type ",
                                                     std::string(NameOf(value.type)), " and ",
                                                     value.elements(), " elements"));
    }
    if (value.on_device != device_.has_own_memory()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "gradient of ", parameter.name, " is in the memory of ", value.on_device ? "a device" : "the host",
          ", and its sums are in that of ", device_.has_own_memory() ? device_.Describe() : "the host"));
    }
  }
  return absl::OkStatus();
}

void GradientSums::Convert(DType from, const void* in, DType to, void* out, size_t n) {
  if (device_.has_own_memory()) return device_.Convert(from, in, to, out, n);
  kernels::Convert(from, in, to, out, n, pool_);
}

void GradientSums::Add(DType type, const void* in, float* sums, size_t n) {
  if (device_.has_own_memory()) return device_.Accumulate(type, in, sums, n);
  switch (type) {
    case DType::kFp32:
      return kernels::AccumulateFp32(static_cast<const float*>(in), sums, n, pool_);
    case DType::kBf16:
      return kernels::AccumulateBf16(static_cast<const uint16_t*>(in), sums, n, pool_);
    case DType::kFp16:
      return kernels::AccumulateFp16(static_cast<const uint16_t*>(in), sums, n, pool_);
  }
}

// Zeros where no gradient is.
void GradientSums::Place(const FlatLayout& layout, std::span<const Gradient> gradients, int64_t first,
                         DType waits, std::byte* to) {
  const size_t width = kernels::BytesPerElement(waits);
  int64_t filled = first;
  const auto place = [&](int64_t element) { return to + static_cast<size_t>(element - first) * width; };
  const auto zero_to = [&](int64_t element) {
    if (element > filled) device_.Zero(place(filled), static_cast<size_t>(element - filled) * width);
  };
  for (const Gradient& gradient : gradients) {
    const Parameter& parameter = layout.parameters[static_cast<size_t>(gradient.parameter)];
    zero_to(parameter.offset);
    Convert(KernelType(gradient.value.type), gradient.value.data, waits, place(parameter.offset),
            static_cast<size_t>(parameter.elements));
    filled = parameter.offset + parameter.elements;
  }
  zero_to(layout.elements);
}

void GradientSums::Accumulate(const FlatLayout& layout, std::span<const Gradient> gradients, int64_t first,
                              float* sums) {
  for (const Gradient& gradient : gradients) {
    const Parameter& parameter = layout.parameters[static_cast<size_t>(gradient.parameter)];
    Add(KernelType(gradient.value.type), gradient.value.data, sums + (parameter.offset - first),
        static_cast<size_t>(parameter.elements));
  }
}

absl::Status GradientSums::Add(tiering::BlockIndex block, std::span<const Gradient> gradients,
                               const GradientPlace& place) {
  const FlatLayout& layout = *layouts_[block];
  RETURN_IF_ERROR(Check(layout, gradients));
  for (const Gradient& gradient : gradients) came_[block][static_cast<size_t>(gradient.parameter)] = 1;
  const bool first = addends_[block]++ == 0;
  const DType waits = place.accumulator != nullptr ? DType::kFp32 : weights_;
  if (!first && waits != DType::kFp32)
    return absl::InternalError("a second addend for a gradient that has no place to be summed");
  void* const to = place.accumulator != nullptr ? place.accumulator : place.gradient;
  return Guarded("summing a gradient", [&] {
    if (first) {
      Place(layout, gradients, place.first, waits, static_cast<std::byte*>(to));
    } else {
      Accumulate(layout, gradients, place.first, static_cast<float*>(to));
    }
  });
}

absl::Status GradientSums::Round(tiering::BlockIndex block, int64_t first, const float* sums,
                                 void* gradient) {
  Taken(block);
  return Guarded("rounding a gradient", [&] {
    device_.Convert(DType::kFp32, sums, weights_, gradient,
                    static_cast<size_t>(layouts_[block]->elements - first));
  });
}

std::vector<uint8_t> GradientSums::Came() const {
  std::vector<uint8_t> all;
  for (const tiering::BlockIndex block : layouts_.indices()) {
    const std::vector<Parameter>& parameters = layouts_[block]->parameters;
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (parameters[p].trains) all.push_back(came_[block][p]);
    }
  }
  return all;
}

void GradientSums::ForgetCame() {
  for (std::vector<uint8_t>& of_block : came_) std::fill(of_block.begin(), of_block.end(), uint8_t{0});
}

}  // namespace penstock::zero
