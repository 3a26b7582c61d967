// Ranks as processes of this machine, for tests. The parent only forks: LibTorch's threads live in the
// children.
#ifndef PENSTOCK_TESTS_ZERO_RANKS_H_
#define PENSTOCK_TESTS_ZERO_RANKS_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/zero/training.h"
#include "zero/ranks/comm.h"
#include "zero/ranks/tcp_mesh.h"

namespace penstock::zero::testing_support {

// Connects one of `world` ranks of this machine, which meet at `port`.
absl::StatusOr<std::unique_ptr<Comm>> ConnectLoopback(int rank, int world, int port,
                                                      const CommOptions& options = {});

// What became of a child: its report, and how its process ended.
struct RankOutcome {
  nlohmann::json report;  // null: it wrote none
  int exit_code = -1;     // -1: killed
  std::string text() const {
    return report.is_object() ? report.value("status", std::string()) : std::string();
  }
};

// Runs `body` in `world` processes; what it returns comes back as the report.
using RankBody = std::function<nlohmann::json(int rank, int port)>;
std::vector<RankOutcome> RunProcesses(int world, const RankBody& body);

// Trains in `world` processes that are connected. `adjust`: the options of one rank. The state directory of
// rank k is rank-k/ below that of `run`, which is kept. Reports: status, losses, norms, ... as in
// TrainedLosses.
std::vector<RankOutcome> TrainRanks(int world, const RunOptions& run,
                                    const std::function<void(int rank, RunOptions*)>& adjust = nullptr,
                                    const CommOptions& comm = {});

// No block is used twice, so every gradient has one addend a rank: the sum over W ranks is that of W
// micro-batches, to the bit. Sizes that no number of ranks divides, and one that is smaller than their parts.
Model Untied();
RunOptions UntiedRun(OffloadDevice offload, kernels::DType dtype);

// One rank, in a process of its own like the others.
nlohmann::json Alone(const RunOptions& run);

nlohmann::json ToJson(const TrainedLosses& trained);

// Every rank ended well, with the losses, norms and all else of `one`, to the bit.
void ExpectSameLosses(const nlohmann::json& one, const std::vector<RankOutcome>& ranks);

}  // namespace penstock::zero::testing_support

#endif  // PENSTOCK_TESTS_ZERO_RANKS_H_
