#include "kernels/split_master.h"

#include "kernels/parallel.h"
#include "kernels/simd/table.h"

namespace penstock::kernels {

void SplitMaster(const float* master, uint16_t* master_high, int16_t* master_low, size_t n,
                 ThreadPool* pool) {
  const auto kernel = Kernels().split;
  ForPieces(n, pool, [=](size_t begin, size_t end) {
    kernel(master + begin, master_high + begin, master_low + begin, end - begin);
  });
}

void JoinMaster(const uint16_t* master_high, const int16_t* master_low, float* master, size_t n,
                ThreadPool* pool) {
  const auto kernel = Kernels().join;
  ForPieces(n, pool, [=](size_t begin, size_t end) {
    kernel(master_high + begin, master_low + begin, master + begin, end - begin);
  });
}

}  // namespace penstock::kernels
