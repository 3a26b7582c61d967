// The record of a run, as its state directories or a checkpoint hold it.
#ifndef PENSTOCK_RUN_RECORD_RUN_RECORD_H_
#define PENSTOCK_RUN_RECORD_RUN_RECORD_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "run/config.h"
#include "zero/engine/engine_options.h"

namespace penstock::run {

// The most intra-op threads that a run may have.
inline constexpr int64_t kMostThreads = 1024;

// What `dirs` hold, for a run that is to be resumed: its record's "run", with dtype, schedule and loss scale
// beside it; null where there is none yet. kFailedPrecondition: another program's, or in use; kDataLoss:
// damaged; IsOverwritten.
absl::StatusOr<nlohmann::json> FindRun(const std::vector<std::string>& dirs);

// Of a run that goes on: a store keeps as many versions as it was made for, and with one of them commits with
// its checkpoints only, which `config` says afterwards too. kFailedPrecondition: it asks for something else.
absl::Status FitConfigToStore(const zero::StorageOptions& storage, Config* config);

// What a record says of its tokenizer, or "" where it says nothing.
std::string RecordedTokenizer(const nlohmann::json& run);

// Of FindRun's status: a run of one version that was killed. There is nothing to go on from, and nothing to
// keep either.
bool IsOverwritten(const absl::Status& status);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_RECORD_RUN_RECORD_H_
