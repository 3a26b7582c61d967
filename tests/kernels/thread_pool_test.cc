#include "kernels/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace penstock::kernels::thread_pool_test {
namespace {

TEST(ThreadPool, CoversEveryElementOnceAtGrainBorders) {
  for (const int threads : {-3, 0, 1, 2, 3, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), std::max(threads, 1));
    for (const size_t n : {0, 1, 2, 15, 16, 17, 1000, 12345}) {
      for (const size_t grain : {0, 1, 16, 1000}) {
        std::vector<std::atomic<int>> hits(n);
        std::atomic<bool> borders = true;
        pool.ParallelFor(n, grain, [&](size_t begin, size_t end) {
          const size_t unit = std::max<size_t>(grain, 1);
          if (begin >= end || begin % unit != 0 || (end != n && end % unit != 0)) borders = false;
          for (size_t i = begin; i < end; ++i) ++hits[i];
        });
        EXPECT_TRUE(borders);
        for (size_t i = 0; i < n; ++i) ASSERT_EQ(hits[i], 1) << "n " << n << " grain " << grain << " i " << i;
      }
    }
  }
}

TEST(ThreadPool, UsesNoMoreThreadsThanGiven) {
  ThreadPool pool(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  for (int round = 0; round < 200; ++round) {
    pool.ParallelFor(64, 1, [&](size_t, size_t) {
      const std::lock_guard<std::mutex> lock(mutex);
      seen.insert(std::this_thread::get_id());
    });
  }
  EXPECT_LE(seen.size(), 3u);
}

TEST(ThreadPool, NestedCallsAndCallsFromManyThreadsFinish) {
  ThreadPool pool(3);
  std::atomic<size_t> total = 0;
  std::vector<std::thread> callers;
  callers.reserve(4);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        pool.ParallelFor(32, 1, [&](size_t begin, size_t end) {
          pool.ParallelFor(end - begin, 1, [&](size_t b, size_t e) { total += e - b; });
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4u * 100u * 32u);
}

TEST(ThreadPool, PinningToAnyCpuListWorks) {
  ThreadPool pool(3, {0, 100000, -1});
  std::atomic<size_t> total = 0;
  pool.ParallelFor(100, 1, [&](size_t begin, size_t end) { total += end - begin; });
  EXPECT_EQ(total, 100u);
}

TEST(ThreadPool, AForkedChildDoesTheWorkAlone) {
  auto pool = std::make_unique<ThreadPool>(3);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    std::atomic<size_t> total = 0;
    pool->ParallelFor(1000, 1, [&](size_t begin, size_t end) { total += end - begin; });
    pool.reset();
    _exit(total == 1000 ? 0 : 1);
  }
  int how = 0;
  ASSERT_EQ(waitpid(child, &how, 0), child);
  EXPECT_TRUE(WIFEXITED(how) && WEXITSTATUS(how) == 0) << how;
}

#if defined(__x86_64__)
TEST(ThreadPool, HelpersTakeOverTheFloatingPointMode) {
  ThreadPool pool(4);
  const unsigned before = _mm_getcsr();
  for (const unsigned mode :
       {before | 0x8040u, before}) {  // flush to zero, denormals are zero; then as it was
    _mm_setcsr(mode);
    std::atomic<bool> same = true;
    for (int round = 0; round < 50; ++round) {
      pool.ParallelFor(64, 1, [&](size_t, size_t) {
        if ((_mm_getcsr() & 0xFFC0u) != (mode & 0xFFC0u)) same = false;
      });
    }
    EXPECT_TRUE(same);
  }
  _mm_setcsr(before);
}
#endif

}  // namespace
}  // namespace penstock::kernels::thread_pool_test
