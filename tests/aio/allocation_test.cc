// No heap allocation per request: every operator new of the process is counted while requests run.
#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/aio/test_support.h"

namespace {
std::atomic<uint64_t> g_allocations{0};

void* CountedAllocate(size_t bytes) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
}  // namespace

void* operator new(size_t bytes) { return CountedAllocate(bytes); }
void* operator new[](size_t bytes) { return CountedAllocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace penstock::aio::allocation_test {
namespace {

class AllocationTest : public testing::TestWithParam<BackendKind> {};

TEST_P(AllocationTest, NoneInSteadyState) {
  World w(GetParam());
  if (!w.skip.empty()) GTEST_SKIP() << w.skip;
  auto file = w.Open("a", 16 * kMiB);
  Region region = w.Allocate(16 * kMiB);
  std::vector<Request> requests(64);
  std::vector<Request*> pointers;
  std::atomic<int> completed{0};
  for (Request& request : requests) {
    request.set_on_complete([](Request&, void* count) { ++*static_cast<std::atomic<int>*>(count); },
                            &completed);
    pointers.push_back(&request);
  }
  const auto round = [&](uint64_t k) {
    for (size_t i = 0; i < requests.size(); ++i) {
      // Aligned and ragged, reads and writes, single and batched.
      const uint64_t offset = i * 256 * kKiB + (i % 8 == 0 ? 100 : 0);
      const uint64_t bytes = i % 4 == 0 ? 60'000 : 256 * kKiB - 4096;
      (i + k) % 2 == 0 ? requests[i].PrepareWrite(*file, offset, region.data() + i * 256 * kKiB, bytes)
                       : requests[i].PrepareRead(*file, offset, region.data() + i * 256 * kKiB, bytes);
      requests[i].set_priority(static_cast<Priority>(i % 3));
      if (k % 2 == 0 && !w.engine->Submit(&requests[i]).ok()) return false;
    }
    if (k % 2 == 1 && !w.engine->Submit(pointers).ok()) return false;
    return w.engine->WaitAll(pointers).ok() && w.engine->WaitSome(pointers, 64) == 64 &&
           w.engine->Drain().ok();
  };
  for (uint64_t k = 0; k < 4; ++k) ASSERT_TRUE(round(k));
  const uint64_t before = g_allocations;
  bool ok = true;
  for (uint64_t k = 0; k < 16; ++k) ok = ok && round(k);
  const uint64_t after = g_allocations;
  EXPECT_TRUE(ok);
  EXPECT_EQ(after - before, 0u);
  EXPECT_EQ(completed, 20 * 64);
}

INSTANTIATE_TEST_SUITE_P(Backends, AllocationTest,
                         testing::Values(BackendKind::kIoUring, BackendKind::kLibaio, BackendKind::kThreads,
                                         BackendKind::kNil),
                         [](const auto& suite) { return std::string(BackendName(suite.param)); });

}  // namespace
}  // namespace penstock::aio::allocation_test
