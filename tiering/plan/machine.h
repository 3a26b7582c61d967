// What the simulator knows of a machine: bandwidths, latencies and rates, measured or assumed.
#ifndef PENSTOCK_TIERING_PLAN_MACHINE_H_
#define PENSTOCK_TIERING_PLAN_MACHINE_H_

#include <algorithm>

namespace penstock::tiering {

struct MachineModel {
  // The drives (all state directories together), each direction alone.
  double read_bytes_per_s = 3e9;
  double write_bytes_per_s = 3e9;
  // Both directions at once, in equal bytes, counted together: what the I/O engine gives them, since it hands
  // out a block of each in turn. 0: they share one server's time, 2rw / (r + w). A drive that is better at
  // both than at one (duplex) or worse (writes that disturb reads) shows here.
  double mixed_bytes_per_s = 0;
  // From when the last of a transfer is handed to a drive that is busy to when it is complete: by Little's
  // law about what must be in flight to keep it busy (its saturating bytes) over its rate. With few small
  // tiles in flight that is what a step waits for.
  double io_latency_seconds = 200e-6;
  double commit_seconds = 1e-3;
  // Between host memory and a device with its own memory; both directions at once do not disturb each other.
  double h2d_bytes_per_s = 20e9;
  double d2h_bytes_per_s = 20e9;
  double copy_latency_seconds = 20e-6;
  // Parameters per second of the optimizer there: memory's bandwidth over some 28 bytes.
  double device_update_parameters_per_s = 20e9;
  // What one rank receives from the others, and what a message takes besides.
  double network_bytes_per_s = 1e9;
  double network_latency_seconds = 100e-6;
  // Parameters per second and worker of the optimizer, checksums included; bytes per second of checking a
  // read and of rounding a gradient.
  double update_parameters_per_s = 400e6;
  double verify_bytes_per_s = 8e9;
  int update_workers = 1;
  // Hardware threads that everything shares, and how many of them forward and backward use; 0: nobody is in
  // anybody's way (a device computes).
  int cores = 0;
  int compute_threads = 1;
  // How fast forward and backward run, 1 being undisturbed, beside a busy drive, whose transfers take memory
  // bandwidth and processor time.
  double compute_beside_drive = 1;

  // Every rate is above 0: on another machine some operation would never end.
  bool moves() const {
    for (const double rate : {read_bytes_per_s, write_bytes_per_s, h2d_bytes_per_s, d2h_bytes_per_s,
                              device_update_parameters_per_s, network_bytes_per_s, update_parameters_per_s,
                              verify_bytes_per_s, compute_beside_drive}) {
      if (!(rate > 0)) return false;
    }
    return true;
  }
  // Bytes per second of reads, and of writes, while both have work.
  double mixed_rate(double alone) const {
    const double shared = 2 * read_bytes_per_s * write_bytes_per_s / (read_bytes_per_s + write_bytes_per_s);
    const double both = mixed_bytes_per_s > 0 ? mixed_bytes_per_s : shared;
    return std::min(alone, both / 2);
  }
  // Seconds that the drives need for so many bytes, at the least: as much of both at once as there is, or one
  // direction after the other, whichever takes less.
  double drive_seconds(double read_bytes, double write_bytes) const {
    const double has_own_memory = read_bytes / read_bytes_per_s + write_bytes / write_bytes_per_s;
    const double read_rate = mixed_rate(read_bytes_per_s), write_rate = mixed_rate(write_bytes_per_s);
    const double both = std::min(read_bytes / read_rate, write_bytes / write_rate);
    const double together = both + std::max(0.0, read_bytes - both * read_rate) / read_bytes_per_s +
                            std::max(0.0, write_bytes - both * write_rate) / write_bytes_per_s;
    return std::min(has_own_memory, together);
  }
  // How fast forward and backward run (1: undisturbed) beside `updates` and a drive that is at work or not.
  // Their loops wait for the core that has most to do, and the others stand idle meanwhile.
  double compute_speed(int updates, bool drive) const {
    const int most = cores > 0 ? (threads(true, updates) + cores - 1) / cores : 1;
    return (compute_threads > 0 && drive ? compute_beside_drive : 1.0) / std::max(1, most);
  }
  // How fast each of `updates` runs, beside forward and backward or alone: cores are shared evenly.
  double update_speed(bool computing, int updates) const {
    const int all = threads(computing, updates);
    return cores > 0 && all > cores ? static_cast<double>(cores) / all : 1.0;
  }

 private:
  int threads(bool computing, int updates) const { return (computing ? compute_threads : 0) + updates; }
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_MACHINE_H_
