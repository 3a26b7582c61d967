// The machine that a plan is made for: what was measured here, found in a stored profile, given by the user,
// or assumed, and which of these each figure is.
#ifndef PENSTOCK_TOOLS_MACHINE_MACHINE_PROBE_H_
#define PENSTOCK_TOOLS_MACHINE_MACHINE_PROBE_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "aio/profile.h"
#include "tiering/plan/machine.h"
#include "zero/compute/device.h"
#include "zero/compute/optimizer.h"
#include "zero/compute/tile_format.h"
#include "zero/engine/engine.h"

namespace penstock::tools {

struct MachineRequest {
  std::vector<std::string> directories;  // of the state; empty: no drive
  std::vector<double> weights;           // of their shares; empty: by speed (zero/engine/stripes.h)
  // Memory that probing may take (0: no bound), and bytes to write: a model of some megabytes is not worth a
  // second of probing.
  int64_t memory_bytes = 0;
  int64_t file_bytes = int64_t{128} << 20;
  zero::TileFormat format;  // of the updates
  zero::OptimizerOptions optimizer;
  int update_workers = 1;
  int compute_threads = 1;
  // A sample of compute on the processor (zero::EngineHooks::machine), measured alone and beside the busy
  // drive; null: nothing is known of what they cost each other.
  std::function<void()> compute;
  std::shared_ptr<zero::Device> device;  // that computes; copies are measured where it is apart
  bool probe_drive = true;               // false: nothing is written
  bool stored_profile = true;            // what ds_nvme_tune has stored is taken instead of a probe
  std::string machine_file;              // JSON with figures that stand above everything else; empty: none
};

struct Machine {
  tiering::MachineModel model;
  // Of all directories together. saturating_bytes_in_flight is 1 where there is no drive.
  aio::DeviceProfile drives;
  // "drive: measured just now", "drive: assumed, because ...", ...: a line a figure or group of them.
  std::vector<std::string> sources;
  bool drive_measured = false;  // here, now or at the time of a stored profile
};

// For what EngineHooks::machine is asked. Drives are those of the state, if any.
MachineRequest RequestFor(const zero::EngineOptions& options, int64_t state_bytes,
                          std::function<void()> compute);

// kInvalidArgument: the machine file is wrong. A drive that cannot be measured is assumed, and said so.
absl::StatusOr<Machine> ProbeMachine(const MachineRequest& request);

// {"read_bytes_per_s": 7e9, ...}: the fields of tiering::MachineModel by name, each a number above 0 (counts
// of cores: 0 or more). kInvalidArgument, one line, for anything else.
absl::Status ApplyMachineJson(const nlohmann::json& json, tiering::MachineModel* model);
nlohmann::json MachineJson(const tiering::MachineModel& model);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_MACHINE_MACHINE_PROBE_H_
