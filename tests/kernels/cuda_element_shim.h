// The CUDA kernels' element functions, run on the host over arrays: what a machine without a device can test.
#ifndef PENSTOCK_TESTS_KERNELS_CUDA_ELEMENT_SHIM_H_
#define PENSTOCK_TESTS_KERNELS_CUDA_ELEMENT_SHIM_H_

#include <cstddef>
#include <cstdint>

#include "kernels/optimizer.h"

namespace penstock::kernels::cuda {

// fp32 arrays, no copy-out.
void UpdateOnHost(const AdamStep& step, float* p, const float* g, float* m, float* v, size_t n);
void UpdateOnHost(const AdagradStep& step, float* p, const float* g, float* m, float* v, size_t n);
void UpdateOnHost(const LionStep& step, float* p, const float* g, float* m, float* v, size_t n);
void UpdateOnHost(const SgdStep& step, float* p, const float* g, float* m, float* v, size_t n);
void ConvertOnHost(const float* in, uint16_t* bf16, uint16_t* fp16, uint16_t* master_high,
                   int16_t* master_low, size_t n);
void WidenOnHost(const uint16_t* bf16, const uint16_t* fp16, const uint16_t* master_high,
                 const int16_t* master_low, float* from_bf16, float* from_fp16, float* joined, size_t n);
// One block of at most kStateBlock elements; returns the scale.
float EncodeOnHost(Code8 code, const float* in, uint8_t* codes, size_t n, const Rounding& rounding);
void DecodeOnHost(Code8 code, const uint8_t* codes, float scale, float* out, size_t n);

// The checksum's steps in the order of the kernel.
uint64_t ChecksumOnHost(const uint64_t* in, size_t bytes, uint64_t seed);

}  // namespace penstock::kernels::cuda

#endif  // PENSTOCK_TESTS_KERNELS_CUDA_ELEMENT_SHIM_H_
