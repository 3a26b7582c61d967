// The CUDA kernels beside a device-to-device copy in the same run.
#ifndef PENSTOCK_BENCH_KERNELS_CUDA_BENCH_H_
#define PENSTOCK_BENCH_KERNELS_CUDA_BENCH_H_

namespace penstock::bench {

// Registers them where a device is; elsewhere says on stderr, in one line, why they are left out.
void RegisterCudaBenchmarks();

}  // namespace penstock::bench

#endif  // PENSTOCK_BENCH_KERNELS_CUDA_BENCH_H_
