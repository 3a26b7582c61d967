// AdamW of arrays beyond every cache, beside a loop that only moves the same streams: part of `make
// bench-check`. Memory's speed drifts, so the two take turns, and the best quarter of their pairs is judged:
// a neighbour makes one of a pair slower by chance, a defect makes the update slower in all of them.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "bench/kernels_streams.h"
#include "kernels/optimizer.h"
#include "kernels/thread_pool.h"

namespace penstock::kernels {
namespace {

constexpr size_t kElements = size_t{64} << 20, kGrain = 16384;
constexpr int kPairs = 20, kThreads = 2;
constexpr double kBar = 0.95;

// An array of kElements on huge pages, where the system gives them; zeros are as good as any other values.
class Array {
 public:
  explicit Array(size_t width) : bytes_(width * kElements + kHuge) {
    start_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start_ == MAP_FAILED) return;
    madvise(start_, bytes_, MADV_HUGEPAGE);
    data_ =
        static_cast<unsigned char*>(start_) + (kHuge - reinterpret_cast<uintptr_t>(start_) % kHuge) % kHuge;
    for (size_t i = 0; i < width * kElements; i += 4096) data_[i] = 0;
  }
  ~Array() {
    if (start_ != MAP_FAILED) munmap(start_, bytes_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  unsigned char* data() const { return data_; }  // null: there is no memory for it
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  static constexpr size_t kHuge = size_t{2} << 20;
  size_t bytes_;
  void* start_ = MAP_FAILED;
  unsigned char* data_ = nullptr;
};

double SecondsOf(const std::function<void()>& pass) {
  const auto start = std::chrono::steady_clock::now();
  pass();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The update's speed as a share of the streams', with plain stores or those past the caches, whichever are
// faster.
double ShareOfStreams(const bench::StreamSet& streams, ThreadPool* pool,
                      const std::function<void()>& update) {
  const auto move = [&](bool non_temporal) {
    pool->ParallelFor(kElements, kGrain, [&](size_t begin, size_t end) {
      bench::MoveStreams(streams, non_temporal, begin, end);
    });
  };
  const auto best = [&](bool non_temporal) {
    double seconds = SecondsOf([&] { move(non_temporal); });
    for (int i = 0; i < 3; ++i) seconds = std::min(seconds, SecondsOf([&] { move(non_temporal); }));
    return seconds;
  };
  const bool non_temporal = best(true) < best(false);
  std::vector<double> shares;
  for (int pair = 0; pair < kPairs; ++pair) {
    const double limit = SecondsOf([&] { move(non_temporal); });
    shares.push_back(limit / SecondsOf(update));
  }
  std::sort(shares.begin(), shares.end());
  std::printf("of the streams: median %.3f, best quarter %.3f\n", shares[kPairs / 2], shares[kPairs * 3 / 4]);
  return shares[kPairs * 3 / 4];
}

const AdamStep kStep = MakeAdamStep({.lr = 1e-5, .beta2 = 0.95, .weight_decay = 0.1}, 100, 0.5);

TEST(AdamW, Fp32KeepsUpWithItsStreams) {
  const Array p(4), m(4), v(4), g(4);
  for (const Array* array : {&p, &m, &v, &g}) {
    if (array->data() == nullptr) GTEST_SKIP() << "no memory for arrays beyond the caches";
  }
  ThreadPool pool(kThreads);
  const bench::StreamSet streams = {4, 3, {p.data(), m.data(), v.data(), g.data()}, {4, 4, 4, 4}, nullptr};
  EXPECT_GE(ShareOfStreams(streams, &pool,
                           [&] {
                             AdamWFp32(kStep, p.as<float>(), m.as<float>(), v.as<float>(), g.as<float>(),
                                       kElements, &pool);
                           }),
            kBar);
}

TEST(AdamW, SplitMastersKeepUpWithTheirStreams) {
  const Array m(4), v(4), high(2), low(2), g(2);
  for (const Array* array : {&m, &v, &high, &low, &g}) {
    if (array->data() == nullptr) GTEST_SKIP() << "no memory for arrays beyond the caches";
  }
  ThreadPool pool(kThreads);
  const bench::StreamSet streams = {
      5, 4, {m.data(), v.data(), high.data(), low.data(), g.data()}, {4, 4, 2, 2, 2}, nullptr};
  EXPECT_GE(ShareOfStreams(streams, &pool,
                           [&] {
                             AdamWSplit(kStep, high.as<uint16_t>(), low.as<int16_t>(), m.as<float>(),
                                        v.as<float>(), g.as<uint16_t>(), kElements, &pool);
                           }),
            kBar);
}

}  // namespace
}  // namespace penstock::kernels
