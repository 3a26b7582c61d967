#include "zero/ranks/rank_environment.h"

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

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
  if (!number.ok()) return number.status();
  environment.world = *number;
  number = Number(get, names.rank, 0, 0, environment.world - 1);
  if (!number.ok()) return number.status();
  environment.rank = *number;
  number = Number(get, names.local_rank, 0, 0, environment.world - 1);
  if (!number.ok()) return number.status();
  environment.local_rank = *number;
  // "2(x3)": two on each of three hosts, the same for all or it is not worth parsing.
  const std::optional<std::string> local = get(names.local_world);
  int local_world = 1;
  if (local.has_value() && absl::SimpleAtoi(local->substr(0, local->find('(')), &local_world)) {
    environment.local_world = local_world > 0 ? local_world : 1;
  }
  if (const auto launch = get("SLURM_LAUNCH_NODE_IPADDR"); launch.has_value() && names.rank == kSlurm.rank) {
    environment.master_address = *launch;
  }
  if (const auto address = get("MASTER_ADDR"); address.has_value()) environment.master_address = *address;
  number = Number(get, "MASTER_PORT", environment.master_port, 1, 65535);
  if (!number.ok()) return number.status();
  environment.master_port = *number;
  environment.agent_is_master = get("TORCHELASTIC_USE_AGENT_STORE") == "True";
  environment.session = absl::StrCat(get("TORCHELASTIC_RUN_ID").value_or(""), "/",
                                     get("TORCHELASTIC_RESTART_COUNT").value_or("0"));
  return environment;
}

}  // namespace penstock::zero
