// Which rank this process is, from what its launcher put into the environment.
//
//   torchrun    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (so may people, by
//               hand)
//   mpirun      OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
//   srun        SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS), SLURM_LOCALID, SLURM_NODEID,
//               SLURM_STEP_TASKS_PER_NODE ("2(x3),1"), SLURM_LAUNCH_NODE_IPADDR; only where there is a
//               SLURM_STEP_ID, since a batch script has the others too and is one process
//
// The first of them that is there counts. MASTER_ADDR and MASTER_PORT are read in all three. None: one rank.
#ifndef PENSTOCK_ZERO_RANKS_RANK_ENVIRONMENT_H_
#define PENSTOCK_ZERO_RANKS_RANK_ENVIRONMENT_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace penstock::zero {

struct RankEnvironment {
  int rank = 0;
  int world = 1;
  int local_rank = 0;   // among the ranks of this host
  int local_world = 1;  // how many they are; 1 where the launcher does not say
  std::string master_address = "127.0.0.1";
  int master_port = 29500;
  // torchrun's agent listens there, in its own LibTorch's language: the ranks meet at the next port.
  bool agent_is_master = false;
  // Tells this run, and this start of it, from others at the same meeting point.
  std::string session;
};

using Getenv = std::function<std::optional<std::string>(const char* name)>;

// The process's own environment.
std::optional<std::string> ProcessEnvironment(const char* name);

// kInvalidArgument names the variable, its value and what is wrong with it.
absl::StatusOr<RankEnvironment> ReadRankEnvironment(const Getenv& get = ProcessEnvironment);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_RANK_ENVIRONMENT_H_
