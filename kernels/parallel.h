// Runs a piece of work on the calling thread or over a pool. Internal to this room.
#ifndef PENSTOCK_KERNELS_PARALLEL_H_
#define PENSTOCK_KERNELS_PARALLEL_H_

#include <cstddef>

#include "kernels/reduce.h"
#include "kernels/thread_pool.h"

namespace penstock::kernels {

// Elements below which waking a thread costs more than it gains, and the unit in which runs are cut: a
// multiple of kReduceBlock and kStateBlock.
inline constexpr size_t kGrain = 4 * kReduceBlock;

// work(begin, end) over [0, n), cut at multiples of kGrain; nothing for n = 0.
template <class Work>
void ForPieces(size_t n, ThreadPool* pool, const Work& work) {
  if (n == 0) return;
  if (pool == nullptr || n <= kGrain) {
    work(size_t{0}, n);
  } else {
    pool->ParallelFor(n, kGrain, work);
  }
}

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_PARALLEL_H_
