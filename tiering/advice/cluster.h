// Many nodes and GPUs on paper: what fits where, what bandwidth each kind of data needs, and how long a step
// takes, from first principles. docs/clusters.md says where this agrees with published figures and where
// not.
//
// The model is a transformer of `layers` x `hidden`: 12 hidden^2 parameters a layer, 8 x parameters x tokens
// operations a step (forward 2, recompute 2, backward 4). All state is cut over all GPUs (ZeRO-3), and all
// GPUs are alike, so one GPU with its share of its node stands for all.
//
// Two schedules:
//   kZeroInfinity  as published: the weights are gathered three times (forward, recompute, backward) and
//                  gradients scattered once; gradients go to the drive as fp32; the optimizer's pass begins
//                  when backward has ended: 38 bytes a parameter and step through the drives, 20 on them
//   kPenstock      weights gathered twice, gradients as 16 bits, the update rides on the next forward: 26
//                  bytes through the drives (4 more where gradients do not fit into host memory), two
//                  versions of 12 bytes on them and 2 for a gradient
//
// Formulas of memory and arithmetic intensity: Rajbhandari et al., "ZeRO-Infinity" (arXiv 2104.07857),
// sections 3 and 4. Pure functions.
#ifndef PENSTOCK_TIERING_ADVICE_CLUSTER_H_
#define PENSTOCK_TIERING_ADVICE_CLUSTER_H_

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::tiering {

// Bandwidths in bytes a second, of one direction.
struct ClusterMachine {
  std::string name = "cluster";
  int64_t nodes = 1;
  int64_t gpus_per_node = 16;
  double gpu_flops = 70e12;               // achieved on large products, not the data sheet's
  double gpu_memory_bytes = 32e9;         // of one
  double gpu_link_bytes_per_s = 70e9;     // of one GPU in a collective over all
  double host_link_bytes_per_s = 3e9;     // between one GPU and host memory, while all of its node use theirs
  double host_memory_bytes = 1.5e12;      // of a node
  double nvme_bytes = 28e12;              // of a node
  double nvme_read_bytes_per_s = 25.6e9;  // of a node
  double nvme_write_bytes_per_s = 25.6e9;  // of a node
  double update_parameters_per_s = 6e9;    // of a node's processors, if they do nothing else
  double rated_bytes_written = 0;          // of a node's drives together; 0: unknown

  int64_t gpus() const { return nodes * gpus_per_node; }
};

struct ClusterModel {
  int64_t layers = 128;
  int64_t hidden = 25600;
  int64_t heads = 256;
  int64_t sequence = 1024;
  double batch_per_gpu = 1;           // sequences; a fraction where several GPUs share one
  int64_t layers_per_checkpoint = 1;  // saved activations: one every so many layers

  double params() const;
  double tokens_per_gpu() const { return batch_per_gpu * static_cast<double>(sequence); }
};

enum class ClusterSchedule : uint8_t { kZeroInfinity, kPenstock };
std::string_view Name(ClusterSchedule schedule);  // "zero-infinity", "penstock"

enum class ClusterTier : uint8_t { kGpu, kHost, kNvme };
std::string_view Name(ClusterTier tier);  // "gpu", "host", "nvme"

// ---- Bandwidth and efficiency.

// Operations for each byte that is moved (arithmetic intensity), per GPU for weights and activations, over
// all GPUs for the optimizer's state.
double IntensityOfWeights(const ClusterModel& model);      // sequence x batch
double IntensityOfState(const ClusterModel& model);        // sequence x batch / 4
double IntensityOfActivations(const ClusterModel& model);  // 24 x hidden x layers_per_checkpoint
// Share of its peak that a GPU reaches if it waits for every byte: ait x bw / (ait x bw + peak).
double Efficiency(double intensity, double bytes_per_s, double peak_flops);
// The bandwidth with which it does.
double BandwidthFor(double efficiency, double intensity, double peak_flops);

// ---- Memory.

double StateBytesPerParam(ClusterSchedule schedule, ClusterTier tier);  // at rest: gradients included
double CheckpointBytes(const ClusterModel& model);                      // saved activations of one GPU
double WorkingStateBytes(const ClusterModel& model);       // weights and gradients of the largest product
double WorkingActivationBytes(const ClusterModel& model);  // between two checkpoints
// The most parameters whose state fits into `tier` of the whole cluster.
double LargestModel(const ClusterMachine& machine, ClusterSchedule schedule, ClusterTier tier);

// ---- A step.

enum class ClusterLane : uint8_t {
  kNvmeRead,
  kNvmeWrite,
  kToGpu,
  kFromGpu,
  kCollective,
  kGpu,
  kUpdate,
};
inline constexpr int kClusterLanes = 7;
std::string_view Name(ClusterLane lane);

struct ClusterPlan {
  double params = 0;
  ClusterTier state_on = ClusterTier::kNvme;        // weights and optimizer state
  ClusterTier checkpoints_on = ClusterTier::kHost;  // saved activations
  bool gradients_spill = false;                     // kPenstock: host memory does not hold them
  // Pieces that the largest products are cut into, so that their weights and gradients take no more than a
  // quarter of a GPU's memory (the paper's memory-centric tiling).
  int64_t product_tiles = 1;
  double state_bytes = 0;                                // in all
  double gpu_bytes = 0, host_bytes = 0, nvme_bytes = 0;  // of one GPU, one node, one node
  double step_seconds = 0;
  double flops_per_gpu = 0;
  std::array<double, kClusterLanes> busy_seconds{};  // in a step
  ClusterLane bound_by = ClusterLane::kGpu;
  double written_bytes_per_step = 0;  // of a node's drives
  double days_to_rating = 0;          // infinite where unknown or nothing is written
};

// The highest tiers that hold everything, and the step in steady state: every layer's transfers, collectives
// and computation as operations on the lanes of one GPU, each lane in order, data fetched as far ahead as
// `layers_ahead` allows. kFailedPrecondition names what does not fit and by how much.
absl::StatusOr<ClusterPlan> PlanOnPaper(const ClusterMachine& machine, const ClusterModel& model,
                                        ClusterSchedule schedule, int layers_ahead = 3);

// {"machine": {...}, "model": {...}}, the fields above by name. kInvalidArgument, one line, for anything that
// is missing its sense.
absl::Status ReadClusterJson(const nlohmann::json& json, ClusterMachine* machine, ClusterModel* model);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_ADVICE_CLUSTER_H_
