#include "zero/memory/values.h"

namespace penstock::zero {

int64_t BytesOf(ElementType type) {
  switch (type) {
    case ElementType::kFp64:
    case ElementType::kInt64:
      return 8;
    case ElementType::kFp32:
    case ElementType::kInt32:
      return 4;
    case ElementType::kBf16:
    case ElementType::kFp16:
    case ElementType::kInt16:
      return 2;
    case ElementType::kInt8:
    case ElementType::kUInt8:
    case ElementType::kBool:
      return 1;
  }
  return 0;
}

std::string_view NameOf(ElementType type) {
  switch (type) {
    case ElementType::kFp64:
      return "fp64";
    case ElementType::kFp32:
      return "fp32";
    case ElementType::kBf16:
      return "bf16";
    case ElementType::kFp16:
      return "fp16";
    case ElementType::kInt64:
      return "int64";
    case ElementType::kInt32:
      return "int32";
    case ElementType::kInt16:
      return "int16";
    case ElementType::kInt8:
      return "int8";
    case ElementType::kUInt8:
      return "uint8";
    case ElementType::kBool:
      return "bool";
  }
  return "?";
}

int64_t TensorView::elements() const {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

}  // namespace penstock::zero
