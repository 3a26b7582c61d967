// A run's state made of a checkpoint: what --resume goes on with where the state itself is gone.
#ifndef PENSTOCK_ZERO_ENGINE_RESTORE_H_
#define PENSTOCK_ZERO_ENGINE_RESTORE_H_

#include <string>

#include "absl/status/status.h"
#include "zero/engine/engine.h"

namespace penstock::zero {

// Makes a run in options.storage.state_dirs (which hold none, or one of no use) of the checkpoint `path`. As
// many versions as a new run would have. The checkpoint may be of another number of ranks: each of
// options.comm cuts its part out of it, in tiles of the size that it has. Memory: two tiles. Threads: the
// caller's.
absl::Status RestoreRun(const std::string& path, const EngineOptions& options);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_RESTORE_H_
