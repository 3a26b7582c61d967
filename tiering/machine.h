// What the simulator knows of a machine: bandwidths and latencies, measured or assumed.
#ifndef PENSTOCK_TIERING_MACHINE_H_
#define PENSTOCK_TIERING_MACHINE_H_

namespace penstock::tiering {

struct MachineModel {
  // The drive (all state directories together). Reads and writes share it: a second that moves r read and w
  // written bytes spends r / read + w / write of itself (measured: the two shares sum to 0.9 to 1).
  double read_bytes_per_s = 3e9;
  double write_bytes_per_s = 3e9;
  double io_latency_seconds = 200e-6;
  double commit_seconds = 1e-3;
  // Parameters per second and worker of the optimizer, checksums included.
  double update_parameters_per_s = 400e6;
  double verify_bytes_per_s = 8e9;
  int update_workers = 1;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_MACHINE_H_
