// Which share of a new run's bytes each state directory gets.
#ifndef PENSTOCK_ZERO_ENGINE_STRIPES_H_
#define PENSTOCK_ZERO_ENGINE_STRIPES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "zero/engine/engine_options.h"

namespace penstock::zero {

struct Stripes {
  std::vector<double> weights;  // of each directory, for swap::StoreOptions; empty: equal shares
  // What each directory moves, read and written at once, measured alone; directories on one drive divide its
  // rate. Empty: not measured.
  std::vector<double> bytes_per_s;
  // Of the sum of these rates: what all reach together, since the one that takes longest for its share is
  // waited for. 1 where shares are in proportion to rates, or nothing was measured.
  double reached = 1;
  std::string line;  // for log and plan: the shares and where they come from; empty: one directory

  // Of the bytes, from 0 to 1.
  double share(size_t directory, size_t directories) const;
};

// Returns the shares of storage.state_dirs: as storage.state_dir_weights says; without them, where the
// directories lie on several drives, in proportion to the drives' speeds. Speeds within a quarter of each
// other count as equal: they drift by as much.
//
// A drive is measured once, with a file of up to 64 MiB that has no name and goes again, for about a
// second; ds_nvme_tune's profile of it is taken where there is one, else what was measured before
// (StripeCachePath()). Memory: at most `memory_bytes` / 4, and 8 MiB; 0: no bound. Where a drive cannot be
// measured, shares are equal, and `line` says why.
Stripes ChooseStripes(const StorageOptions& storage, int64_t memory_bytes);

// Where the speeds of drives are kept, by directory and device: $XDG_CACHE_HOME/penstock/stripes.json, else
// ~/.cache/penstock/stripes.json.
std::string StripeCachePath();

// Shares in proportion to `bytes_per_s`; empty where they count as equal.
std::vector<double> WeightsBySpeed(const std::vector<double>& bytes_per_s);

// Of the sum of `bytes_per_s`: what directories with these weights reach together.
double ReachedOf(const std::vector<double>& bytes_per_s, const std::vector<double>& weights);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_STRIPES_H_
