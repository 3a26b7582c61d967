// Memory estimates on paper: DeepSpeed's, to the digit, and Penstock's with the NVMe tier beside them.
//
// DeepSpeed's formulas are those of estimate_zero2_model_states_mem_needs and
// estimate_zero3_model_states_mem_needs (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py), with their
// rounding: bytes are truncated to whole ones. They count parameters, gradients and optimizer states only, no
// activations; and what they print as GB are units of 2^30 bytes.
//
// Penstock's figures are arithmetic on bytes per parameter; what a certain machine really needs, down to the
// byte, is the planner's to say (penstock plan). Pure functions; all results are for the values given, which
// the caller checks.
#ifndef PENSTOCK_TIERING_ADVICE_ESTIMATE_H_
#define PENSTOCK_TIERING_ADVICE_ESTIMATE_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "tiering/plan/model_graph.h"

namespace penstock::tiering {

struct EstimateInput {
  int64_t params = 0;                // in all, shared ones counted once
  int64_t largest_layer_params = 0;  // of the largest single layer
  int64_t largest_block_params = 0;  // of Penstock's largest block; 0: as of the layer
  int64_t gpus_per_node = 1;         // ranks on one node
  int64_t nodes = 1;
  double buffer_factor = 1.5;  // DeepSpeed's additional_buffer_factor, on host memory
  // Of `params`, that stay as they are beside adapters that train, and are read where they lie; in Penstock's
  // rows, of one rank. DeepSpeed's formulas know no such thing.
  int64_t frozen_params = 0;
};

// kInvalidArgument, one line, for counts below 1, a layer larger than the model, and numbers that would
// overflow.
absl::Status CheckEstimate(const EstimateInput& input);

struct MemoryRow {
  std::string options;    // as DeepSpeed prints them
  int64_t cpu_bytes = 0;  // per node
  int64_t gpu_bytes = 0;  // per GPU
};

// In DeepSpeed's order: 2 rows for ZeRO-2, 6 for ZeRO-3.
std::vector<MemoryRow> EstimateZero2(const EstimateInput& input);
std::vector<MemoryRow> EstimateZero3(const EstimateInput& input);

// The text that DeepSpeed's estimators print, ending in a newline.
std::string FormatZero2(const EstimateInput& input);
std::string FormatZero3(const EstimateInput& input);

// ---- Penstock.
// --------------------------------------------------------------------------------------------------------

// What the drives of one node are and what a step costs beside them.
struct DriveInput {
  Precision precision = Precision::Bf16();  // one of its own, with moments of any kind
  int64_t drives = 1;                       // per node
  double read_bytes_per_s = 3e9;            // of one drive
  double write_bytes_per_s = 2e9;           // of one drive
  double rated_bytes_written = 600e12;      // of one drive: its TBW rating
  double step_seconds = 0;                  // of compute; a step takes this or its I/O, whichever is longer
};

// Where state lives, per node and in steady state.
struct TierRow {
  std::string options;  // "offload=nvme, order=next_forward"
  int64_t device_bytes =
      0;  // per rank: all state without offload; else a block's weights twice and its gradient
  int64_t host_bytes =
      0;  // per node: resident state, waiting gradients, and two blocks' state streaming through
  int64_t nvme_bytes = 0;            // per node, on disk: two versions of every tile
  int64_t read_bytes_per_step = 0;   // per node
  int64_t write_bytes_per_step = 0;  // per node
  double bytes_per_param_per_step = 0;
  double io_seconds_per_step = 0;  // reads and writes share a drive: their times add up
  double step_seconds = 0;
  double steps_to_rated_writes = 0;  // infinite where nothing is written
  double days_to_rated_writes = 0;   // training day and night; infinite where nothing is written
};

// Rows: none, cpu, nvme with the update in the next forward, nvme with the update in backward; and last, for
// comparison, what DeepSpeed 0.9's full NVMe path moves (reference figures: reads 2 + 2 + 12 + 4, writes 2 +
// 12 + 4 bytes a parameter, 18 bytes on disk); not where parameters are frozen.
//
// Bytes read and written per parameter and step, exact (both orders of update move the same):
//   bf16  2 in one pass; high, low, m, v in the other, written back                     14 + 12 = 26
//   fp32  4 in one pass; p, m, v in the other, written back                          16 + 12 = 28
//   fp16  2 in each pass; p, m, v for the update, written back with a new fp16 copy  16 + 14 = 30
// Compact states take as many bytes less in each direction as in m and v: bf16 with 8 bit 8 + 6 and 4/64.
std::vector<TierRow> EstimateTiers(const EstimateInput& input, const DriveInput& drives);

// A table for people; one line a row.
std::string FormatTiers(const EstimateInput& input, const DriveInput& drives);

// {"input": {...}, "zero2": [...], "zero3": [...], "penstock": [...]}; keys carry their units. Infinite days
// are null.
nlohmann::json EstimateJson(const EstimateInput& input, const DriveInput& drives);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_ADVICE_ESTIMATE_H_
