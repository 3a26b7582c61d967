// `penstock train` as one of several ranks: meeting the others, and what must be the same on all of them.
#ifndef PENSTOCK_TOOLS_RANKS_H_
#define PENSTOCK_TOOLS_RANKS_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/train_words.h"
#include "zero/comm.h"

namespace penstock::tools {

// Null where the environment says that there is one rank (zero/rank_environment.h). Otherwise waits for the
// others and compares the words with theirs, and the program: kInvalidArgument on all ranks names the first
// difference.
absl::StatusOr<std::shared_ptr<zero::Comm>> ConnectRanks(const TrainWords& words);

// A state directory holds the run of one rank, or in rank-K/ those of several, never both:
// kFailedPrecondition where the directories, as they were given, hold one of the other kind.
absl::Status CheckRankDirectories(const std::vector<std::string>& dirs, int world);

// What --resume found in this rank's directories (null: no commit), held against what the others found. True:
// all go on; false: all start over, because some rank was killed before its first commit, and so nobody has
// more than the first. kDataLoss: a rank has lost what others still have.
absl::StatusOr<bool> AllResume(zero::Comm& comm, const nlohmann::json& run,
                               const std::vector<std::string>& dirs);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_RANKS_H_
