// Counts heap allocations by replacing operator new (count_allocations.cc), for promises that there are none.
#ifndef PENSTOCK_TESTS_SWAP_COUNT_ALLOCATIONS_H_
#define PENSTOCK_TESTS_SWAP_COUNT_ALLOCATIONS_H_

#include <cstdint>

namespace penstock::swap {

// False under AddressSanitizer, which has to keep its own operator new.
bool CountsAllocations();
// How often this thread has called operator new so far.
uint64_t AllocationsOfThisThread();

}  // namespace penstock::swap

#endif  // PENSTOCK_TESTS_SWAP_COUNT_ALLOCATIONS_H_
