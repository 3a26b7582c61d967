// Stands in for other ranks: for a caller that asks what one of several would do, and trains nothing.
#ifndef PENSTOCK_ZERO_RANKS_ALIKE_RANKS_H_
#define PENSTOCK_ZERO_RANKS_ALIKE_RANKS_H_

#include <memory>

#include "zero/ranks/comm.h"

namespace penstock::zero {

// Every other rank is taken to say what this one says. Nothing waits, and nothing is sent.
std::unique_ptr<Comm> AlikeRanks(const RankEnvironment& environment);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_ALIKE_RANKS_H_
