// Which vector instructions the kernels use, chosen once at run time.
//
// Every kernel of this room is compiled three times (portable C++, AVX2 + FMA + F16C, AVX-512 F/BW/DQ/VL)
// into one binary. The best level that processor and operating system offer is chosen at the first call. The
// environment variable PENSTOCK_SIMD (portable, avx2 or avx512) lowers it: for comparing, and for ruling the
// vector code out when a bug is hunted. All levels give the same bits (see kernels/README.md), so the choice
// is about speed only.
//
// The AVX-512 BF16 conversion (vcvtneps2bf16) is reported here but not used: it flushes denormals to zero,
// which would break the promise above, and rounding with integer instructions is not what bounds a pass over
// memory.
#ifndef PENSTOCK_KERNELS_CPU_FEATURES_H_
#define PENSTOCK_KERNELS_CPU_FEATURES_H_

#include <string>

namespace penstock::kernels {

enum class SimdLevel { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// What the processor offers (and the operating system saves), whether used here or not.
struct CpuFeatures {
  bool avx2 = false;         // AVX2, FMA and F16C together
  bool avx512 = false;       // AVX-512 F, BW, DQ and VL together
  bool avx512_bf16 = false;  // makes bf16 matrix products fast; without it, bf16 compute is not advisable
  bool avx512_fp16 = false;
  bool amx_bf16 = false;  // products of tiles of bf16; each process asks before it uses them
};

// Looked up once; thread-safe.
const CpuFeatures& GetCpuFeatures();

// The best level this machine can run, whatever PENSTOCK_SIMD says.
SimdLevel BestSimdLevel();

// The level the kernels use now.
SimdLevel ActiveSimdLevel();

// Makes the kernels use `level`; returns false, and changes nothing, where the machine cannot run it. For
// tests and benchmarks. Safe to call while kernels run: a call in flight goes on at the level it started
// with.
bool SetSimdLevel(SimdLevel level);

// "portable", "avx2", "avx512".
const char* SimdLevelName(SimdLevel level);

// One line for reports: "avx512 (processor: avx2 avx512 avx512_bf16)".
std::string DescribeCpu();

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_CPU_FEATURES_H_
