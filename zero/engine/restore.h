// A run's state made of a checkpoint: what --resume goes on with where the state itself is gone.
#ifndef PENSTOCK_ZERO_ENGINE_RESTORE_H_
#define PENSTOCK_ZERO_ENGINE_RESTORE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/engine/engine.h"

namespace penstock::zero {

// Reads every tile of the checkpoint `path` and checks it; of `world` ranks each checks its share of the
// parts. kDataLoss names the first range that is damaged. Memory: 8 MiB, or a tile. Threads: the caller's.
absl::Status VerifyCheckpoint(const std::string& path, int rank, int world);

// Whether options.storage.state_dirs hold a commit that a run made there would replace, on any rank of
// options.comm: of those in storage.overwrites_only where that is set. Every rank calls it.
absl::StatusOr<bool> ReplacesCommits(const EngineOptions& options);

// Makes a run in options.storage.state_dirs of the checkpoint `path`. As many versions as a new run would
// have. The checkpoint may be of another number of ranks: each of options.comm cuts its part out of it, in
// tiles of the size that it has.
//
// A run that is there is replaced. Where it has a commit, on any rank, it is as it was until every tile of
// the checkpoint has been read and checked; `is_verified`: the caller has done so. Memory: two tiles, at
// least 8 MiB. Threads: the caller's.
absl::Status RestoreRun(const std::string& path, const EngineOptions& options, bool is_verified = false);
// The same of a run in several state directories.
absl::Status RestoreRun(const std::vector<std::string>& directories, const EngineOptions& options,
                        bool is_verified = false);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_RESTORE_H_
