// What a product of matrices reaches on this machine's processor: the measure that a step's work is held
// against.
#ifndef PENSTOCK_TOOLS_MACHINE_PRODUCT_RATE_H_
#define PENSTOCK_TOOLS_MACHINE_PRODUCT_RATE_H_

#include <string>

#include "kernels/float16.h"

namespace penstock::tools {

struct ProductRate {
  double flops_per_second = 0;  // a multiply-add is two
  std::string of;               // "1024 x 1024 in bf16"
};

// The best of some products in the type that blocks with such weights compute in, by LibTorch with its
// threads as they are set. As long as they become faster other work is in their way, and they go on: a third
// of a second where nothing is, two at the most, and some MiB for as long.
ProductRate MeasureProductRate(kernels::DType weights);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_MACHINE_PRODUCT_RATE_H_
