// A small persistent thread pool with an explicit budget: the only threads that the kernels ever use.
//
// No OpenMP here: LibTorch brings an OpenMP pool and OpenBLAS another, and pools that spin against each other
// cost far more than they gain. This one sleeps (on a futex, through std::atomic wait) whenever it has
// nothing to do, and takes no more threads than it was given.
//
// Every kernel takes a `ThreadPool*` last; nullptr (the default) means: on the calling thread alone. No
// kernel's result depends on the pool, its size, or how the work was cut.
#ifndef PENSTOCK_KERNELS_THREAD_POOL_H_
#define PENSTOCK_KERNELS_THREAD_POOL_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace penstock::kernels {

class ThreadPool {
 public:
  // `threads` counts the caller: ThreadPool(2) starts one thread, and work is shared by it and by the
  // caller of ParallelFor. Values below 1 mean 1. If the system refuses a thread, the pool is smaller: see
  // threads(). `cpus`, where given, pins the started thread i to cpus[i % size] (best effort: a refusal is
  // not an error); the caller is never pinned.
  explicit ThreadPool(int threads, std::vector<int> cpus = {});
  // Waits for the work in flight.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Threads that share the work, the caller included.
  int threads() const;

  // Cuts [0, n) into pieces whose inner borders are multiples of `grain`, runs `work(begin, end)` once for
  // each (a thread that is done takes the next piece: a busy core slows only its own), and returns when all
  // are done. `work` must not throw. Any thread may call; calls from several threads take turns, and a call
  // from inside `work` runs on the spot. The helpers take over the caller's floating-point mode (rounding,
  // flush-to-zero), so that it cannot make a piece differ. In a forked child, which has no helpers, the
  // calling thread does it all.
  void ParallelFor(size_t n, size_t grain, const std::function<void(size_t begin, size_t end)>& work);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_THREAD_POOL_H_
