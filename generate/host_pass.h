// A pass in host memory, by this project's own kernels.
//
// A sequence's values depend on its own tokens alone, to the bit: a row is multiplied by kernels/product.h
// where it decodes and by kernels/many_rows.h where it is a prompt's, it attends by kernels/attention.h, and
// all else is kernels/layer.h's. None of them looks at the rows beside it.
#ifndef PENSTOCK_GENERATE_HOST_PASS_H_
#define PENSTOCK_GENERATE_HOST_PASS_H_

#include <memory>

#include "generate/pass.h"

namespace penstock::generate {

// `threads`: that share the work, the caller's included.
std::unique_ptr<PassRunner> MakeHostPass(const PassParts& parts, int threads);

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_HOST_PASS_H_
