// A new run's state made of values that come from elsewhere, tile by tile: what `penstock train --resume`
// goes on with.
#ifndef PENSTOCK_ZERO_ENGINE_NEW_STATE_H_
#define PENSTOCK_ZERO_ENGINE_NEW_STATE_H_

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "swap/store.h"
#include "zero/compute/tile_format.h"

namespace penstock::zero {

struct NewState {
  swap::StoreOptions store;  // directories, sync, slots, overwrite
  std::string identity;      // of the run (zero/engine/state_identity.h)
  TileFormat format;
  std::vector<int64_t> block_elements;
  int64_t tile_bytes = 0;  // of all segments, at the most; 0: 4 MiB
  int64_t step = 0, updates = 0;
  std::string payload;  // of the first commit
  // Called when all was read, before it is committed; what it returns is as if a read had. Empty: nothing is.
  std::function<absl::Status()> check = nullptr;
};

// Elements [first, first + elements) of a block's masters or moments, as fp32. Called on a thread for each
// kind, tile after tile, while the caller waits.
using ReadState =
    std::function<absl::Status(StateKind kind, int block, int64_t first, int64_t elements, float* to)>;

// Reads all that WriteNewState would, and calls state.check: for callers that replace a run, which must not
// be given up for a source that cannot be read or is damaged. Memory: a tile's fp32 values of each kind.
// Errors: as `read`.
absl::Status ReadWhole(const NewState& state, const ReadState& read);

// Makes the store, writes every tile and commits `step`. Masters and moments are read on threads of their
// own, while the tile before is brought into form and those before that are on their way to the drive.
// Memory: three tiles, and the fp32 values of three. A store that could not be finished is removed.
//
// A run that it replaces stays whole until the new state is committed, where drives and quotas have room for
// both: that one is made beside it, and takes its place in one step (swap/replace_parts.h). Without that
// room, and of several ranks (store.uuid), the old one goes when the new one's files are laid out
// (Store::Create). `progress`: bytes, on the caller's thread. Errors: as swap::Store and `read`.
absl::Status WriteNewState(const NewState& state, const ReadState& read,
                           const std::function<void(uint64_t done, uint64_t total)>& progress);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_NEW_STATE_H_
