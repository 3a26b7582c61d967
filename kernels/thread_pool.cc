#include "kernels/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace penstock::kernels {
namespace {

// Pieces per thread: enough that a thread slowed by a neighbour leaves work to the others, few enough that
// each streams through long runs of memory.
constexpr size_t kPiecesPerThread = 8;

uint32_t FloatMode() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~uint32_t{_MM_EXCEPT_MASK};  // modes, not sticky flags
#else
  return static_cast<uint32_t>(std::fegetround());
#endif
}

void SetFloatMode(uint32_t mode) {
#if defined(__x86_64__)
  _mm_setcsr(mode);
#else
  std::fesetround(static_cast<int>(mode));
#endif
}

}  // namespace

struct ThreadPool::Impl {
  const pid_t process = getpid();  // whose the helpers are: a forked child has none
  std::mutex turn;                 // held by the caller whose work runs
  std::vector<std::thread> helpers;

  // The work in flight. Written by the caller before `generation` moves, read by helpers after.
  const std::function<void(size_t, size_t)>* work = nullptr;
  size_t n = 0;
  size_t piece = 0;
  uint32_t float_mode = 0;
  std::atomic<size_t> next = 0;

  std::atomic<uint32_t> generation = 0;  // moves when work is there, or at the end
  std::atomic<uint32_t> busy = 0;        // helpers that have not finished this generation
  bool stop = false;

  void Drain() {
    while (true) {
      const size_t begin = next.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= n) return;
      (*work)(begin, std::min(n, begin + piece));
    }
  }

  void Help();
};

namespace {
// The pool whose work this thread is inside, to run nested calls on the spot.
thread_local const void* current_pool = nullptr;

class Inside {
 public:
  explicit Inside(const void* pool) : before_(std::exchange(current_pool, pool)) {}
  ~Inside() { current_pool = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  const void* before_;
};
}  // namespace

void ThreadPool::Impl::Help() {
  const Inside inside(this);
  uint32_t seen = 0;
  while (true) {
    generation.wait(seen, std::memory_order_acquire);
    seen = generation.load(std::memory_order_acquire);
    if (stop) return;
    SetFloatMode(float_mode);
    Drain();
    if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) busy.notify_one();
  }
}

ThreadPool::ThreadPool(int threads, std::vector<int> cpus) : impl_(std::make_unique<Impl>()) {
  for (int i = 1; i < threads; ++i) {
    try {
      impl_->helpers.emplace_back([impl = impl_.get()] { impl->Help(); });
    } catch (const std::system_error&) {
      break;  // fewer threads; the work is the same
    }
    const pthread_t thread = impl_->helpers.back().native_handle();
    pthread_setname_np(thread, "penstock-kernel");
    if (!cpus.empty()) {
      const int cpu = cpus[static_cast<size_t>(i - 1) % cpus.size()];
      cpu_set_t set;
      CPU_ZERO(&set);
      if (cpu >= 0 && cpu < CPU_SETSIZE) {
        CPU_SET(static_cast<size_t>(cpu), &set);
        pthread_setaffinity_np(thread, sizeof(set), &set);
      }
    }
  }
}

ThreadPool::~ThreadPool() {
  if (impl_->process != getpid()) {
    (void)impl_.release();  // threads that are not here cannot be joined
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(impl_->turn);
    impl_->stop = true;
    impl_->generation.fetch_add(1, std::memory_order_release);
    impl_->generation.notify_all();
  }
  for (std::thread& helper : impl_->helpers) helper.join();
}

int ThreadPool::threads() const { return static_cast<int>(impl_->helpers.size()) + 1; }

void ThreadPool::ParallelFor(size_t n, size_t grain,
                             const std::function<void(size_t begin, size_t end)>& work) {
  if (n == 0) return;
  grain = std::max<size_t>(grain, 1);
  Impl& impl = *impl_;
  const size_t threads = impl.helpers.size() + 1;
  if (threads == 1 || n <= grain || current_pool == &impl || impl.process != getpid()) {
    work(0, n);
    return;
  }
  const std::lock_guard<std::mutex> lock(impl.turn);
  const size_t share = (n + threads * kPiecesPerThread - 1) / (threads * kPiecesPerThread);
  impl.work = &work;
  impl.n = n;
  impl.piece = (share + grain - 1) / grain * grain;
  impl.float_mode = FloatMode();
  impl.next.store(0, std::memory_order_relaxed);
  impl.busy.store(static_cast<uint32_t>(impl.helpers.size()), std::memory_order_relaxed);
  impl.generation.fetch_add(1, std::memory_order_release);
  impl.generation.notify_all();
  {
    const Inside inside(&impl);
    impl.Drain();
  }
  for (uint32_t left = impl.busy.load(std::memory_order_acquire); left != 0;
       left = impl.busy.load(std::memory_order_acquire)) {
    impl.busy.wait(left, std::memory_order_acquire);
  }
}

}  // namespace penstock::kernels
