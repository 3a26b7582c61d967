// `penstock train` as one of several ranks: meeting the others, and what must be the same on all of them.
#ifndef PENSTOCK_TOOLS_PENSTOCK_RANKS_H_
#define PENSTOCK_TOOLS_PENSTOCK_RANKS_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/data/data_mixture.h"
#include "tools/penstock/train_options.h"
#include "tools/penstock/train_settings.h"
#include "zero/ranks/comm.h"

namespace penstock::tools {

// Null where the environment says that there is one rank (zero/ranks/rank_environment.h). Otherwise takes the
// secret of the run from there or from its state directory (zero/ranks/secret_file.h), waits for
// the others and compares the flags with theirs, and the program: kInvalidArgument on all ranks names the
// first difference. `made` gets what SecretIn has made: a start that is refused takes it away again.
absl::StatusOr<std::shared_ptr<zero::Comm>> ConnectRanks(const TrainOptions& flags,
                                                         std::vector<std::string>* made);

// What the flags, the config and the files of each rank come to, before anything is made: the run, every
// option that changes what a rank does, and the texts, by size and ContentDigest. kInvalidArgument on all
// ranks names the first difference. Left out is what each may have of its own: paths, memory, threads of
// updates, and the I/O of its host. Lines for people: who is there, and processors that differ, which is no
// error: each block's part is computed by one rank alone, so the run's bits are those of these hosts in this
// order.
absl::StatusOr<std::vector<std::string>> AgreeOnRun(zero::Comm& comm, const TrainOptions& flags,
                                                    const TrainSettings& settings,
                                                    const models::DataMixture& data,
                                                    const models::DataMixture* eval_data);

// Of a file's length and content: all of it up to 64 MiB; beyond, 1024 pieces of 64 KiB, spread evenly, the
// first and the last among them. Files of one length that differ only between those are taken for the same.
absl::StatusOr<uint64_t> ContentDigest(const std::string& path);

// A state directory holds the run of one rank, or in rank-K/ those of several, never both:
// kFailedPrecondition where the directories, as they were given, hold one of the other kind. The way on is
// --resume-ranks.
absl::Status CheckRankDirectories(const std::vector<std::string>& dirs, int world);

// What --resume goes on from.
enum class GoOn : uint8_t { kState, kCheckpoint, kStartOver };

// The record of the run that has come least far, by `step`, of all that the ranks found: where some are a
// commit ahead, that is the one that all go on from.
absl::StatusOr<nlohmann::json> OldestRecord(zero::Comm& comm, const nlohmann::json& run, int64_t step);

// What this rank found, held against what the others did, so that all do the same: `run` in its directories
// `dirs` (null: no commit; an error: of one version, and that was being written over), and `checkpoint`
// (empty: none), the newest. The state counts where every rank has its part of it, and where there is one
// version all have that of one step. kFailedPrecondition: it is of another number of ranks, or they do not
// see one checkpoint; kDataLoss: a rank has lost what others still have, and no checkpoint makes up for it.
absl::StatusOr<GoOn> AgreeOnResume(zero::Comm& comm, const absl::StatusOr<nlohmann::json>& run,
                                   const std::vector<std::string>& dirs, const std::string& checkpoint);

// Returns the step of a run or checkpoint, of however many ranks. Errors: FindShards' and InspectShards'.
absl::StatusOr<int64_t> StepIn(const std::vector<std::string>& dirs);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_RANKS_H_
