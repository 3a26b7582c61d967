// The versions of tiles on the drive (swap::Store).
#ifndef PENSTOCK_ZERO_COMPUTE_TILE_VERSION_H_
#define PENSTOCK_ZERO_COMPUTE_TILE_VERSION_H_

#include <cstdint>

namespace penstock::zero {

// A tile's version on the drive after the update of `step`. Between two of them there is room for versions
// that users write (Engine::WriteState).
inline constexpr uint64_t kVersionsPerStep = 1000;
inline uint64_t VersionAfter(int64_t step) { return (static_cast<uint64_t>(step) + 1) * kVersionsPerStep; }

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_TILE_VERSION_H_
