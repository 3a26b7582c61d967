// The arithmetic type of what a safetensors file stores.
#ifndef PENSTOCK_MODELS_WEIGHTS_STORED_TYPE_H_
#define PENSTOCK_MODELS_WEIGHTS_STORED_TYPE_H_

#include <cstdint>

#include "kernels/float16.h"
#include "swap/safetensors.h"

namespace penstock::models {

// Values of a file are read as fp32 through buffers of this size.
inline constexpr int64_t kBufferElements = 64 << 10;  // 256 KiB

// Whether a file's values may be read so.
inline bool IsFloat(swap::Dtype dtype) {
  return dtype == swap::Dtype::kF32 || dtype == swap::Dtype::kBf16 || dtype == swap::Dtype::kF16;
}

// `dtype`: one of those; the opening of a file refuses all others.
inline kernels::DType StoredType(swap::Dtype dtype) {
  return dtype == swap::Dtype::kF32    ? kernels::DType::kFp32
         : dtype == swap::Dtype::kBf16 ? kernels::DType::kBf16
                                       : kernels::DType::kFp16;
}

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_STORED_TYPE_H_
