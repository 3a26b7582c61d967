// Where the run of another number of ranks waits while the ranks of now make a run of their own of it.
//
//   DIR/.penstock.of-3-ranks/rank-0/penstock.store, ...      of one rank:
//   DIR/.penstock.of-1-ranks/penstock.store
//
// While a run is set aside, whatever else of a run lies in DIR is unfinished: a part that was not moved yet,
// or what was being made when the processes were killed. It is dropped when every rank's part of the new run
// is durable, and before that run makes a step. So a kill at any moment leaves one of the two whole.
//
// The ranks share the work: each moves the parts whose number is its own, modulo the number of ranks, of
// those that it sees. A host that has not got a part moves none.
#ifndef PENSTOCK_ZERO_RANKS_SET_ASIDE_H_
#define PENSTOCK_ZERO_RANKS_SET_ASIDE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

// The number of ranks of the run in `directories`: of one that is set aside, if any is. 0: there is none.
absl::StatusOr<int64_t> RanksOf(const std::vector<std::string>& directories);

// What ranks of another number go on from.
struct OtherRanks {
  int64_t ranks = 0;  // of the run that was found; 0: there is none of another number
  int64_t step = 0;   // of what follows
  std::vector<std::string>
      from;  // all its parts, where they were set aside, or a checkpoint: RestoreRun reads it
};

// Finds the run of another number of ranks in `directories`, as all ranks were given them, and sets it aside.
// What is newest counts: the commit that all its parts have, where every rank of `comm` sees all of them, or
// `checkpoint` (empty: there is none). `comm` null: one rank; else every rank calls it. kFailedPrecondition:
// a process trains on a part, or the ranks do not see one checkpoint; kDataLoss: parts are missing, and there
// is no checkpoint; nothing was moved then.
absl::StatusOr<OtherRanks> SetOtherRanksAside(const std::vector<std::string>& directories,
                                              const std::string& checkpoint, Comm* comm);

// Removes what is set aside, once the run of these ranks is durable on each. After OK on all ranks none is
// set aside, whatever is killed.
absl::Status DropSetAside(const std::vector<std::string>& directories, Comm* comm);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_SET_ASIDE_H_
