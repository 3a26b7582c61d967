// Threads and BLAS of LibTorch, chosen on purpose.
//
// LibTorch 1.13 has two pools that do not know each other: its own OpenMP threads (elementwise work, and
// oneDNN's bf16 products) and OpenBLAS's (fp32 products). Both are given the same number here; the number
// changes the bits of some sums, so a run records it and a resumed run restores it. Waiting threads should
// sleep, not spin, since updates and I/O need the cores too: programs set OMP_WAIT_POLICY=passive before
// libgomp reads it (tools/penstock/penstock.cc).
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_THREADS_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_THREADS_H_

#include <string>

namespace penstock::zero {

// For this thread and for OpenBLAS. LibTorch's number is per thread: the engine sets it on its compute thread
// too.
void SetIntraOpThreads(int threads);
int IntraOpThreads();  // what LibTorch computes with on this thread

struct BlasInfo {
  std::string name;  // "OpenBLAS 0.3.21 SkylakeX (pthreads)"; "reference BLAS" where nothing better answers
  bool optimized = false;
};
BlasInfo DescribeBlas();

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_THREADS_H_
