// The arithmetic type of what a safetensors file stores.
#ifndef PENSTOCK_MODELS_STORED_TYPE_H_
#define PENSTOCK_MODELS_STORED_TYPE_H_

#include "kernels/float16.h"
#include "swap/safetensors.h"

namespace penstock::models {

// `dtype`: kF32, kBf16 or kF16; whoever opens a file has refused all others.
inline kernels::DType StoredType(swap::Dtype dtype) {
  return dtype == swap::Dtype::kF32    ? kernels::DType::kFp32
         : dtype == swap::Dtype::kBf16 ? kernels::DType::kBf16
                                       : kernels::DType::kFp16;
}

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_STORED_TYPE_H_
