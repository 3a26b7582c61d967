// A run goes on with another number of ranks than it had, in its own state directories.
//
// Its new parts are made beside the old ones, of the state that is there or, where parts of that are gone
// with their host, of a checkpoint, and take their places at once (swap/replace_parts.h): a kill before that
// leaves the old state. Every rank makes each of these calls, in the same order; `comm` is null where there
// is one.
#ifndef PENSTOCK_ZERO_ENGINE_CHANGE_RANKS_H_
#define PENSTOCK_ZERO_ENGINE_CHANGE_RANKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/engine/engine.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

// A change that a kill has cut short when it was already the run: every start, before it looks at the state.
// `directories`: of the state, as all ranks are given them.
absl::Status FinishChangeOfRanks(Comm* comm, const std::vector<std::string>& directories);

struct OtherRanks {
  int64_t ranks = 0;              // of the run that is there
  std::vector<std::string> from;  // what its new parts are made of; empty: there is nothing to change
};

// What a run that is in `directories`, and was made by another number of ranks than there are, goes on from:
// `directories`, where every rank sees all of its parts there; else `checkpoint`, the newest one ("": there
// is none). Of a run of this number of ranks: `checkpoint`, where some ranks have lost their part. kDataLoss:
// parts are gone, and there is no checkpoint. Else the error of the rank that could not read them.
absl::StatusOr<OtherRanks> FindOtherRanks(Comm* comm, const std::vector<std::string>& directories,
                                          const std::string& checkpoint);

// Makes what is in `directories` a run of as many ranks as there are. `from`: FindOtherRanks' of the same
// ranks. `options`: a new run's, of which storage.state_dirs are not looked at. Of its drives it takes one
// version of the state more, until it is done. Memory and threads: RestoreRun's.
absl::Status ChangeRanks(const std::vector<std::string>& from, const std::vector<std::string>& directories,
                         EngineOptions options);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_CHANGE_RANKS_H_
