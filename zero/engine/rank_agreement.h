// What the ranks of a run agree on before its first step: budgets, devices, one plan, one commit to go on
// from. Every rank calls each of these, in the same order.
#ifndef PENSTOCK_ZERO_ENGINE_RANK_AGREEMENT_H_
#define PENSTOCK_ZERO_ENGINE_RANK_AGREEMENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/format.h"
#include "swap/store.h"
#include "tiering/plan/machine.h"
#include "tiering/plan/model_graph.h"
#include "tiering/plan/plan.h"
#include "zero/compute/device.h"
#include "zero/ranks/agree.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

// Rank 0's, everywhere.
absl::StatusOr<swap::Uuid> AgreeOnUuid(Comm& comm);

// The number of a new run whose store each rank makes by options of its own. Where any of them may not
// replace what its directories hold, all have that rank's error, before any has removed anything.
absl::StatusOr<swap::Uuid> AgreeOnNewStore(Comm& comm, const swap::StoreOptions& options);

// All ranks see one and the same directory at this path; rank 0 makes it. kFailedPrecondition: they do not.
absl::Status AgreeOnDirectory(Comm& comm, const std::string& path);

// Returns the first of the ranks that have the same directory at this path as this one has. Makes it where it
// is missing.
absl::StatusOr<int> LeaderAt(Comm& comm, const std::string& path);

// The least of all budgets; 0 is no bound.
absl::StatusOr<int64_t> AgreeOnBudget(Comm& comm, int64_t mine);

// What every rank may take of its device, which is apart: the least of `mine` or, where that is 0,
// of what the devices have, each shared evenly among the ranks whose it is.
absl::StatusOr<int64_t> AgreeOnDeviceBudget(Comm& comm, const Device& device, int64_t mine);

// How the ranks' devices exchange weights and gradients.
struct DeviceExchange {
  std::shared_ptr<Comm> comm;  // whose memory is the devices'; null: through host memory
  int64_t budget_bytes = 0;    // of the device, once it is agreed on
  std::string how;             // a line about it; empty where no device is apart
};

// Over a comm of their own, where every rank has a device of its own and all are of a kind that exchanges
// without the host. What that takes of a device's memory is no longer in its capacity afterwards.
absl::StatusOr<DeviceExchange> ConnectDevices(const std::shared_ptr<Comm>& comm, Device& device);

// What one plan is made of must be the same on all: the times of stages are those of rank 0, what a stage
// takes is the most that it takes anywhere, and the machine is rank 0's with the rates of the slowest of
// those that have `measured` theirs, and the network as measured here, between devices where they exchange.
// `unlike`: a line where their drives differ by half or more.
absl::Status AgreeOnGraph(Comm& comm, tiering::ModelGraph* graph);
absl::Status AgreeOnMachine(Comm& comm, const DeviceExchange& devices, Device& device,
                            int64_t host_memory_budget_bytes, bool measured, tiering::MachineModel* machine,
                            std::string* unlike);

// kInternal: the plans differ after all.
absl::Status AgreeOnPlan(Comm& comm, const tiering::Plan& plan);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_RANK_AGREEMENT_H_
