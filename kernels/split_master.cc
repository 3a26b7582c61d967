#include "kernels/split_master.h"

#include "kernels/parallel.h"
#include "kernels/simd/table.h"

namespace penstock::kernels {

void SplitMaster(const float* master, uint16_t* hi, int16_t* lo, size_t n, ThreadPool* pool) {
  const auto kernel = Kernels().split;
  ForPieces(n, pool,
            [=](size_t begin, size_t end) { kernel(master + begin, hi + begin, lo + begin, end - begin); });
}

void JoinMaster(const uint16_t* hi, const int16_t* lo, float* master, size_t n, ThreadPool* pool) {
  const auto kernel = Kernels().join;
  ForPieces(n, pool,
            [=](size_t begin, size_t end) { kernel(hi + begin, lo + begin, master + begin, end - begin); });
}

}  // namespace penstock::kernels
