// The kernels of this room on CUDA devices: multi-tensor, fused, on the caller's streams.
//
// Same arithmetic as on the CPU, to the bit: the same order of operations, explicitly rounded (no
// contraction, no flush to zero), the same definition of sums (kernels/reduce.h), the same random bits. So a
// step may run on either. Built for sm_80 and sm_90, with PTX for later devices.
//
// Every function enqueues on `stream` and returns: no allocation, no synchronisation, no copy of its own.
// Arrays are in device memory, or in pinned host memory that the device can reach (unified addressing), which
// makes upload and download with a cast one pass. Descriptions of tensors (host arrays of UpdateArrays, ...)
// may be freed when the call returns. Any n (64 bit), any alignment; 16-byte aligned arrays use vector loads.
// Thread-safe.
//
// Functions return a CUDA error code (cudaError_t as int; 0: enqueued). Errors of the work itself surface, as
// always with CUDA, at the caller's next synchronisation.
#ifndef PENSTOCK_KERNELS_CUDA_CUDA_KERNELS_H_
#define PENSTOCK_KERNELS_CUDA_CUDA_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/adam.h"
#include "kernels/checksum.h"
#include "kernels/float16.h"
#include "kernels/optimizer.h"
#include "kernels/quantize.h"
#include "kernels/weight_code.h"

struct CUstream_st;

namespace penstock::kernels::cuda {

using Stream = CUstream_st*;  // a cudaStream_t; null is the default stream

// Whether a device with compute capability 8.0 or more is there; if not, *why says what is missing.
bool DeviceAvailable(std::string* why);
// "out of memory (2)" and the like.
std::string ErrorText(int error);

// What an update reads on the device, so that loss scaling and clipping need no round trip to the host.
struct DeviceControl {
  const float* grad_scale = nullptr;  // where not null: multiplied (in fp32) with the step's grad_scale first
  const int* skip = nullptr;          // where not null and not zero: the update does nothing
};

// Partial sums of a gradient: one double for each kReduceBlock elements. They equal the CPU's to the bit;
// added to a SumOfSquares on the host they give its value, in any order.
constexpr size_t PartialSums(size_t n) { return (n + 4096 - 1) / 4096; }

// partials[0 ... PartialSums(n)) of one tensor.
[[nodiscard]] int SquarePartials(DType type, const void* in, size_t n, double* partials, Stream stream);

// Turns partial sums (of all gradients, one after another) into what an update needs, in one fixed order (a
// plain sum in double: it may differ from SumOfSquares in the last place): norm = sqrt(sum) *
// inverse_loss_scale, *skip = not finite, *grad_scale = inverse_loss_scale * min(1, clip / (norm + 1e-6)), or
// without the minimum if clip <= 0. Outputs on the device; norm may be null.
[[nodiscard]] int ClipFactor(const double* partials, size_t count, float inverse_loss_scale, float clip,
                             float* grad_scale, int* skip, float* norm, Stream stream);

// Updates of `count` tensors, all with the same step; any mixture of types. Pointers in `tensors` are the
// device's.
[[nodiscard]] int ApplyUpdates(const AdamStep& step, const UpdateArrays* tensors, size_t count,
                               const DeviceControl& control, Stream stream);
[[nodiscard]] int ApplyUpdates(const AdagradStep& step, const UpdateArrays* tensors, size_t count,
                               const DeviceControl& control, Stream stream);
[[nodiscard]] int ApplyUpdates(const LionStep& step, const UpdateArrays* tensors, size_t count,
                               const DeviceControl& control, Stream stream);
[[nodiscard]] int ApplyUpdates(const SgdStep& step, const UpdateArrays* tensors, size_t count,
                               const DeviceControl& control, Stream stream);

// LAMB of one tensor, in three calls: moments, then the partial sums of the squares of parameters and
// directions, then (with the trust on the device, from LambTrusts) the update. States fp32 or bf16; 8-bit
// states are refused with cudaErrorInvalidValue.
[[nodiscard]] int LambMoments(const LambStep& step, const UpdateArrays& tensor, const DeviceControl& control,
                              Stream stream);
[[nodiscard]] int LambPartials(const LambStep& step, const UpdateArrays& tensor, double* param_partials,
                               double* update_partials, Stream stream);
[[nodiscard]] int LambTrusts(const LambStep& step, const double* param_partials,
                             const double* update_partials, size_t count, float* trust, Stream stream);
[[nodiscard]] int LambApply(const LambStep& step, const float* trust, const UpdateArrays& tensor,
                            const DeviceControl& control, Stream stream);

// Copies with a cast (or without: from == to). Either side may be pinned host memory.
[[nodiscard]] int Convert(DType from, const void* in, DType to, void* out, size_t n, Stream stream);
// acc[i] += in[i].
[[nodiscard]] int Accumulate(DType type, const void* in, float* acc, size_t n, Stream stream);
// `count` addends of one type, at least one, added in fp32 in their order in `sums`, and rounded once to
// `out`, which may be one of them. partials: where not null, SquarePartials of the result.
[[nodiscard]] inline int SumInOrder(DType type, const void* const* addends, size_t count, float* sums,
                                    DType to, void* out, size_t n, double* partials, Stream stream) {
  int error = Convert(type, addends[0], DType::kFp32, sums, n, stream);
  for (size_t i = 1; i < count && error == 0; ++i) error = Accumulate(type, addends[i], sums, n, stream);
  if (error == 0) error = Convert(DType::kFp32, sums, to, out, n, stream);
  if (error == 0 && partials != nullptr) error = SquarePartials(to, out, n, partials, stream);
  return error;
}
[[nodiscard]] int SplitMaster(const float* master, uint16_t* master_high, int16_t* master_low, size_t n,
                              Stream stream);
[[nodiscard]] int JoinMaster(const uint16_t* master_high, const int16_t* master_low, float* master, size_t n,
                             Stream stream);
[[nodiscard]] int Quantize8(Code8 code, const float* in, uint8_t* codes, float* scales, size_t n,
                            const Rounding& rounding, Stream stream);
[[nodiscard]] int Dequantize8(Code8 code, const uint8_t* codes, const float* scales, float* out, size_t n,
                              Stream stream);

// A row of any type to codes; kernels/weight_code.h. What is not finite is NaN in them, and told by nobody. A
// code that is not valid is refused with cudaErrorInvalidValue.
[[nodiscard]] int EncodeWeights(const WeightCode& code, DType from, const void* row, size_t columns,
                                void* out, Stream stream);
// `count` coded rows, one behind the other, to fp32, bf16 or fp16 [count, columns]; kernels/weight_code.h. A
// code that is not valid is refused with cudaErrorInvalidValue.
[[nodiscard]] int DecodeWeights(const WeightCode& code, const void* rows, size_t count, size_t columns,
                                DType to, void* out, Stream stream);

// *out = kernels::Checksum(in, bytes, seed), by one block of threads: meant to keep up with a drive, not with
// the device's memory (`kernels_bench`, CudaChecksum). `bytes` at least kLeastChecksumBytes; address and
// length are multiples of 8 (cudaErrorInvalidValue).
inline constexpr size_t kLeastChecksumBytes = 248;
[[nodiscard]] int Checksum(const void* in, size_t bytes, uint64_t seed, uint64_t* out, Stream stream);

}  // namespace penstock::kernels::cuda

#endif  // PENSTOCK_KERNELS_CUDA_CUDA_KERNELS_H_
