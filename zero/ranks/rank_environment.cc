#include "zero/ranks/rank_environment.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace penstock::zero {
namespace {

constexpr int kMostRanks = 1 << 16;

struct Names {
  const char* rank;
  const char* world;
  const char* local_rank;
  const char* local_world;
};
constexpr Names kPlain = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kMpi = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                        "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kSlurm = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                          "SLURM_STEP_TASKS_PER_NODE"};

// A whole number from `least` to `most`; `otherwise` where the variable is not set.
absl::StatusOr<int> Number(const Getenv& get, const char* name, int otherwise, int least, int most) {
  const std::optional<std::string> text = get(name);
  if (!text.has_value()) return otherwise;
  int value = 0;
  if (absl::SimpleAtoi(*text, &value) && value >= least && value <= most) return value;
  return absl::InvalidArgumentError(absl::StrCat(
      name, "=", *text, " in the environment: must be a whole number between ", least, " and ", most));
}

// Slurm's tasks on each node, "2(x3),1": 2, 2, 2, 1. Empty: it is not that.
std::vector<int> TasksPerNode(absl::string_view text) {
  std::vector<int> tasks;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int nodes = 1, of_each = 0;
    if (const size_t open = part.find("(x"); open != absl::string_view::npos) {
      absl::string_view times = part.substr(open + 2);
      if (!absl::ConsumeSuffix(&times, ")") || !absl::SimpleAtoi(times, &nodes)) return {};
      part = part.substr(0, open);
    }
    if (!absl::SimpleAtoi(part, &of_each) || of_each < 1 || of_each > kMostRanks || nodes < 1 ||
        nodes > kMostRanks || tasks.size() + static_cast<size_t>(nodes) > kMostRanks)
      return {};
    tasks.insert(tasks.end(), static_cast<size_t>(nodes), of_each);
  }
  return tasks;
}

// How many of a Slurm step's ranks this host has. SLURM_NODEID says which host it is; without it that follows
// from the rank where hosts are filled one after the other, and the largest number is taken where it does
// not.
absl::StatusOr<int> LocalTasks(const Getenv& get, const RankEnvironment& environment) {
  const std::optional<std::string> text = get(kSlurm.local_world);
  if (!text.has_value()) return 1;
  const std::vector<int> tasks = TasksPerNode(*text);
  if (tasks.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(kSlurm.local_world, "=", *text,
                     " in the environment: must be tasks of each node, as 4, 2(x3) or 2(x3),1"));
  }
  if (get("SLURM_NODEID").has_value()) {
    ASSIGN_OR_RETURN(int node, Number(get, "SLURM_NODEID", 0, 0, static_cast<int>(tasks.size()) - 1));
    return tasks[static_cast<size_t>(node)];
  }
  int first = environment.rank - environment.local_rank;
  for (const int here : tasks) {
    if (first == 0 && environment.local_rank < here) return here;
    first -= here;
  }
  return *std::max_element(tasks.begin(), tasks.end());
}

}  // namespace

std::optional<std::string> ProcessEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

absl::StatusOr<RankEnvironment> ReadRankEnvironment(const Getenv& get) {
  Names names = kPlain;
  if (!get(kPlain.rank).has_value() && !get(kPlain.world).has_value()) {
    if (get(kMpi.rank).has_value()) {
      names = kMpi;
    } else if (get(kSlurm.rank).has_value() && get("SLURM_STEP_ID").has_value()) {
      names = kSlurm;
      if (!get(names.world).has_value()) names.world = "SLURM_NTASKS";
    } else {
      return RankEnvironment();
    }
  }
  if (get(names.rank).has_value() != get(names.world).has_value()) {
    const bool has_rank = get(names.rank).has_value();
    return absl::InvalidArgumentError(
        absl::StrCat(has_rank ? names.rank : names.world, " is set in the environment and ",
                     has_rank ? names.world : names.rank, " is not: set both, or none"));
  }
  RankEnvironment environment;
  absl::StatusOr<int> number = Number(get, names.world, 1, 1, kMostRanks);
  RETURN_IF_ERROR(number.status());
  environment.world = *number;
  number = Number(get, names.rank, 0, 0, environment.world - 1);
  RETURN_IF_ERROR(number.status());
  environment.rank = *number;
  number = Number(get, names.local_rank, 0, 0, environment.world - 1);
  RETURN_IF_ERROR(number.status());
  environment.local_rank = *number;
  if (names.rank == kSlurm.rank) {
    number = LocalTasks(get, environment);
  } else {
    number = Number(get, names.local_world, 1, 1, environment.world);
  }
  RETURN_IF_ERROR(number.status());
  environment.local_world = *number;
  if (const auto launch = get("SLURM_LAUNCH_NODE_IPADDR"); launch.has_value() && names.rank == kSlurm.rank) {
    environment.master_address = *launch;
  }
  if (const auto address = get("MASTER_ADDR"); address.has_value()) environment.master_address = *address;
  number = Number(get, "MASTER_PORT", environment.master_port, 1, 65535);
  RETURN_IF_ERROR(number.status());
  environment.master_port = *number;
  environment.agent_is_master = get("TORCHELASTIC_USE_AGENT_STORE") == "True";
  environment.session = absl::StrCat(get("TORCHELASTIC_RUN_ID").value_or(""), "/",
                                     get("TORCHELASTIC_RESTART_COUNT").value_or("0"));
  return environment;
}

}  // namespace penstock::zero
