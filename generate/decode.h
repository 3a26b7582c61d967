// Coded weights back to what products are computed in.
#ifndef PENSTOCK_GENERATE_DECODE_H_
#define PENSTOCK_GENERATE_DECODE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/float16.h"
#include "kernels/thread_pool.h"
#include "kernels/weight_code.h"

namespace penstock::generate {

// Elements of a coded matrix that are decoded at once, in whole rows: caches hold them until they are
// multiplied. The same for every budget, since products of other shapes may have other bits.
inline constexpr int64_t kDecodedElements = int64_t{1} << 19;
inline int64_t DecodedRows(int64_t columns) { return std::max<int64_t>(kDecodedElements / columns, 1); }

// Of those that a device decodes at once: a unit, where it has 8 bits.
inline constexpr int64_t kDeviceDecodedElements = int64_t{8} << 20;

// `rows` coded rows at `from`, as kFp32 or kBf16; on the calling thread where there is no pool.
void DecodeRows(const kernels::WeightCode& code, const std::byte* from, int64_t rows, int64_t columns,
                kernels::DType to, void* out, kernels::ThreadPool* pool = nullptr);

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_DECODE_H_
