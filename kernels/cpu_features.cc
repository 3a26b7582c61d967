#include "kernels/cpu_features.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/simd/table.h"

namespace penstock::kernels {
namespace {

const KernelTable& TableOf(SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return kAvx512Kernels;
  if (level == SimdLevel::kAvx2) return kAvx2Kernels;
#endif
  static_cast<void>(level);
  return kPortableKernels;
}

CpuFeatures Detect() {
  CpuFeatures features;
#if defined(__x86_64__)
  // The compiler's run-time library asks the operating system (xgetbv) as well as the processor; it does not
  // know every feature by name in every compiler, so some are read from the processor, and AMX asked of
  // Linux.
  __builtin_cpu_init();
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & (1u << 29)) != 0;
  const bool seventh = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0;
  const bool fp16 = seventh && (edx & (1u << 23)) != 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  const bool amx = seventh && (~edx & (kAmxBf16 | kAmxTile)) == 0;
  features.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  features.avx512 = features.avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
  features.avx512_bf16 = features.avx512 && __builtin_cpu_supports("avx512bf16");
  features.avx512_fp16 = features.avx512 && fp16;
  constexpr int kGetSupportedState = 0x1021;  // ARCH_GET_XCOMP_SUPP, Linux 5.16 and later
  constexpr uint64_t kTileState = 3u << 17;   // the tiles and their configuration
  uint64_t saved = 0;
  features.amx_bf16 = features.avx512 && amx && syscall(SYS_arch_prctl, kGetSupportedState, &saved) == 0 &&
                      (saved & kTileState) == kTileState;
#endif
  return features;
}

SimdLevel InitialLevel() {
  SimdLevel level = BestSimdLevel();
  const char* wish = std::getenv("PENSTOCK_SIMD");
  if (wish != nullptr) {
    for (const SimdLevel lower : {SimdLevel::kPortable, SimdLevel::kAvx2}) {
      if (lower < level && std::strcmp(wish, SimdLevelName(lower)) == 0) level = lower;
    }
  }
  return level;
}

std::atomic<SimdLevel>& Level() {
  static std::atomic<SimdLevel> level = InitialLevel();
  return level;
}

}  // namespace

const CpuFeatures& GetCpuFeatures() {
  static const CpuFeatures features = Detect();
  return features;
}

SimdLevel BestSimdLevel() {
  const CpuFeatures& features = GetCpuFeatures();
  return features.avx512 ? SimdLevel::kAvx512 : features.avx2 ? SimdLevel::kAvx2 : SimdLevel::kPortable;
}

SimdLevel ActiveSimdLevel() { return Level().load(std::memory_order_relaxed); }

bool SetSimdLevel(SimdLevel level) {
  if (level > BestSimdLevel()) return false;
  Level().store(level, std::memory_order_relaxed);
  return true;
}

const char* SimdLevelName(SimdLevel level) {
  switch (level) {
    case SimdLevel::kAvx512:
      return "avx512";
    case SimdLevel::kAvx2:
      return "avx2";
    case SimdLevel::kPortable:
      break;
  }
  return "portable";
}

std::string DescribeCpu() {
  const CpuFeatures& features = GetCpuFeatures();
  std::string line = std::string(SimdLevelName(ActiveSimdLevel())) + " (processor:";
  if (features.avx2) line += " avx2";
  if (features.avx512) line += " avx512";
  if (features.avx512_bf16) line += " avx512_bf16";
  if (features.avx512_fp16) line += " avx512_fp16";
  if (features.amx_bf16) line += " amx_bf16";
  if (!features.avx2) line += " baseline";
  return line + ")";
}

const KernelTable& Kernels() { return TableOf(ActiveSimdLevel()); }

}  // namespace penstock::kernels
