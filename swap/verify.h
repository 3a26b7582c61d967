// Reading a whole store back and checking every checksum of its last commit.
#ifndef PENSTOCK_SWAP_VERIFY_H_
#define PENSTOCK_SWAP_VERIFY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "swap/store.h"

namespace penstock::swap {

// A segment that does not match its checksum or cannot be read.
struct DamagedRange {
  std::string path;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t tile = 0;
  uint32_t segment = 0;
  uint64_t version = 0;
  std::string reason;
  std::string Text() const;  // one line with all of it
};

struct VerifyReport {
  uint64_t tiles = 0;
  uint64_t bytes = 0;  // checked, without padding
  double seconds = 0;
  std::vector<DamagedRange> damaged;  // in order of tiles; empty when the state is whole
  std::vector<std::string>
      notes;  // damage that was healed: copies of superblock and record (Recovered::damage)
  bool whole() const { return damaged.empty() && notes.empty(); }
};

// Checks the committed version of every tile. `memory` (from an arena, or any memory at a multiple of 4096)
// bounds what is in flight: 32 MiB reach the bandwidth of one drive. Blocks; the store's own thread; training
// may not write meanwhile. `progress`, if given, gets the bytes checked so far and the total about every
// 64 MiB; false cancels (kCancelled). kFailedPrecondition: nothing committed. Damage is no error of this
// function: it is in the report.
absl::StatusOr<VerifyReport> VerifyAll(
    Store& store, std::span<std::byte> memory,
    const std::function<bool(uint64_t done, uint64_t total)>& progress = nullptr);

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_VERIFY_H_
