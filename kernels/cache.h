// For measurements: what was just written is as far away as if a drive had brought it.
#ifndef PENSTOCK_KERNELS_CACHE_H_
#define PENSTOCK_KERNELS_CACHE_H_

#include <cstddef>

namespace penstock::kernels {

// Writes the bytes back and drops them from every cache of the machine, so that who reads them next waits for
// memory. Does nothing where the processor has no instruction for it.
void EvictFromCaches(const void* data, size_t bytes);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_CACHE_H_
