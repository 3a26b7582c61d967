#include "tests/swap/count_allocations.h"

#include <cstdlib>
#include <new>

namespace {
thread_local uint64_t allocations = 0;
}  // namespace

#if !defined(__SANITIZE_ADDRESS__)
void* operator new(size_t bytes) {
  ++allocations;
  void* p = std::malloc(bytes == 0 ? 1 : bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
#endif

namespace penstock::swap {

bool CountsAllocations() {
#if defined(__SANITIZE_ADDRESS__)
  return false;
#else
  return true;
#endif
}

uint64_t AllocationsOfThisThread() { return allocations; }

}  // namespace penstock::swap
