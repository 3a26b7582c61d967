// The report of a run: what `penstock train --report` writes, with the names of the fields fixed.
//
// Steady state is from the end of the process's first step to the end of its last: steps 2..N, and the
// evaluations between them. Of a run that was planned again it is that of the newest plan.
//   nvme_bytes_per_param_per_step  bytes the drive moved in it, over its steps and the model's parameters;
//                                  without the reads of evaluations
//   io_saturated_seconds           time with bytes in flight that saturate the device (aio::EngineStats)
//   compute_union_seconds          union of the intervals in which forward, backward or update kernels ran
//   overlap_ratio                  its seconds / max(io_saturated_seconds, compute_union_seconds)
//   io_gbps_achieved               its NVMe bytes that arrived in io_saturated_seconds, over these, in 10^9
//                                  bytes per second; 0 where the drive was never saturated
//   order_of_update                what the plan does while nothing is clipped: "next_forward",
//                                  "in_backward", or "mixed" with in_backward_share of the tiles;
//                                  deferred_steps of its steps updated nothing in backward (they were, or
//                                  were likely to be, clipped), redone_steps did so for nothing
//   predicted_step_seconds         the step of the simulator, by the steps that there were: those that
//                                  updated nothing in backward take predicted_clipped_step_seconds, the
//                                  others predicted_unclipped_step_seconds. Both with what the steps of the
//                                  process, the first apart, showed of times and bandwidths
//                                  (prediction_from "steps"; tiering/simulate/run_prediction.h), before there
//                                  are any with what was measured at the start ("start");
//                                  predicted_at_start_step_seconds and
//                                  predicted_at_start_clipped_step_seconds are the latter
//   predicted_floor_seconds        the least that a step takes: its busiest part alone;
//                                  predicted_clipped_floor_seconds is that of a clipped step, whose updates
//                                  wait for the norm (tiering/simulate/simulate.h)
//   floor_ratio                    seconds of a step over these floors, each weighted by its steps, as the
//                                  run's own steps showed them; null before there are any. Where steps are
//                                  clipped this is what 1 can be reached of, and overlap_ratio is not
//   model_flops_per_second         of matrix products, forward and twice that for backward, of all ranks
//                                  (model_flops_per_step), over its seconds
//   mfu                            that over product_flops_per_second, the best product of matrices that was
//                                  measured before the run, of each rank; null where there is no steady
//                                  state, or where it is more than 1: the product was disturbed then.
//                                  Neither is there unless the product was measured
//   replanned                      null, or what the first steps were held against and what came of it
//                                  (zero/engine/prediction_check.h): after_step; predicted_step_seconds of
//                                  these steps at the start, and measured_step_seconds; outcome: "moved",
//                                  "stays", "unexplained" (what they showed does not predict them) or
//                                  "refused", with its error; kept_step_seconds, which by what they showed a
//                                  step takes as it was planned, step_seconds with the plan that the run
//                                  goes on with; moved, a line for each thing that has another place. Where
//                                  something moved, the steady state begins behind the first step under the
//                                  new plan
// totals are of the whole process, the first step too: nvme_read_bytes and nvme_write_bytes are all that its
// drives moved, with probe, initialisation, evaluations and checkpoints; step_nvme_read_bytes and
// step_nvme_write_bytes are what its steps say of that, run_nvme_write_bytes what all processes of the run
// wrote, where the caller knows it.
// A step's seconds, and those of totals, are without evaluation_seconds, which are of the evaluations after
// the step before. evaluations has every one of this process, with its windows: sequences of the held-out
// text, each a batch of its own. stopped_by is the signal that stopped the run, else null.
// stall_seconds is, by cause, what the compute lane waited for from its first operation to
// its last: together with what forward and backward took, all of that time. updated_on_device_share is of the
// model's elements, in blocks whose state lives on the device. gds: weights that only the device needs come
// from the drive past host memory; gds_read_bytes, part of nvme_read_bytes, are those that did. h2d_bytes and
// d2h_bytes are what the run copied: weights, gradients, inputs and batches, and state that is loaded or
// written; single numbers (losses) apart. peak_device_bytes is the device's slots and LibTorch's
// tensors there, 0 where the host computes. Managed memory is the arena and every tensor
// (zero/memory/tensor_memory.h). Not counted, because nobody can bound it from here: code,
// LibTorch's and BLAS's scratch, the kernel's page cache, threads' stacks, and the tables that describe
// blocks and tiles (some hundred bytes for each).
#ifndef PENSTOCK_ZERO_ENGINE_REPORT_H_
#define PENSTOCK_ZERO_ENGINE_REPORT_H_

#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/profile.h"
#include "tiering/simulate/run_prediction.h"
#include "tiering/simulate/simulate.h"
#include "zero/engine/engine.h"

namespace penstock::zero {

// A `steps` entry; with "run_id" also a line of the log. Losses have 17 significant digits, so that bits can
// be compared.
nlohmann::json StepJson(const StepResult& result, int64_t tokens);
// The loss of a held-out text after `step`.
struct Evaluation {
  int64_t step = 0;
  double loss = 0;
  int64_t windows = 0;
  double seconds = 0;
};
// An `evaluations` entry; with "run_id" also a line of the log. What tells it from a step's is "windows".
nlohmann::json EvaluationJson(const Evaluation& evaluation);
// One or the other as one line of text. (nlohmann prints the shortest digits that give the same double back;
// 17 are promised.)
std::string LogLine(const nlohmann::json& entry);

// Where what blocks keep for backward waits for it, as reports and plans say it.
nlohmann::json SavedActivationsJson(const tiering::Plan& plan);
// What this rank receives from the others, as reports and plans say it. Null: there are none.
nlohmann::json ExchangeJson(const tiering::Plan& plan);

class Report {
 public:
  static constexpr size_t kStepsKept = 10'000;

  void Start(const EngineOptions& options, const std::string& version, int world_size);
  void Planned(const Engine& engine, const aio::DeviceProfile& device, const tiering::Prediction& prediction);
  void Predicted(const tiering::Prediction& prediction);  // by the run's own steps
  // Their prediction was wrong, and this is what came of Engine::Replan.
  void PlannedAgain(const Engine& engine, const tiering::RunPrediction::Beside& beside,
                    const absl::StatusOr<zero::PlannedAgain>& again);
  // What probing the drives moved before the run; part of the totals, as it is part of the kernel's own
  // counters.
  void Probed(int64_t read_bytes, int64_t write_bytes) {
    probe_read_bytes_ += read_bytes;
    probe_write_bytes_ += write_bytes;
  }
  // What the process and those before it wrote to drives for this run.
  void RunWrote(int64_t bytes) { run_write_bytes_ = bytes; }
  // What a step of the model computes: forward and backward, as the caller counts.
  void Computes(double flops_per_step) { flops_per_step_ = flops_per_step; }
  // What the best product of matrices reached on each rank, before the run.
  void MeasuredProduct(double flops_per_second) { product_flops_per_second_ = flops_per_second; }
  void Identify(const std::string& run_id) { report_["run_id"] = run_id; }
  // The run ends before its last step.
  void Stopped(const std::string& signal) { report_["stopped_by"] = signal; }
  // After each evaluation of this process.
  void Evaluated(const Evaluation& evaluation);
  // After each step of this process.
  void Stepped(const Engine& engine, const StepResult& result, int64_t tokens);
  // At the end, well or not.
  std::string Finish(const Engine* engine, const absl::Status& status);

  // Of the totals, by now.
  int64_t ReadBytes(const Engine& engine) const {
    return static_cast<int64_t>(engine.io_stats().DeviceReadBytes()) + probe_read_bytes_;
  }
  int64_t WriteBytes(const Engine& engine) const {
    return static_cast<int64_t>(engine.io_stats().DeviceWriteBytes()) + probe_write_bytes_;
  }

  double overlap_ratio() const { return overlap_ratio_; }
  double bytes_per_param_per_step() const { return bytes_per_param_per_step_; }
  double io_gbps() const { return io_gbps_; }
  double floor_ratio() const { return floor_ratio_; }  // 0: not known

 private:
  struct Mark {
    double seconds = 0;       // of the steps and evaluations so far
    double step_seconds = 0;  // of the steps alone
    double saturated_seconds = 0;
    double compute_union_seconds = 0;
    int64_t saturated_bytes = 0;  // that the drive moved in saturated_seconds
    int64_t step_bytes = 0;       // that the steps moved
    int64_t steps = 0;
  };
  Mark Now(const Engine& engine) const;
  // What the engine's plan says.
  void DescribePlan(const Engine& engine);

  nlohmann::json report_;
  std::deque<nlohmann::json> steps_;
  std::vector<nlohmann::json> evaluations_;
  Mark first_, last_;
  double seconds_ = 0;                       // of steps
  double evaluation_seconds_ = 0;            // that steps have told
  double evaluated_since_step_seconds_ = 0;  // that none has told yet
  double compute_seconds_ = 0;
  int64_t step_read_bytes_ = 0, step_write_bytes_ = 0;
  int64_t stepped_ = 0, skipped_steps_ = 0;
  int64_t fills_ = 1;  // the number of the step that fills the pipeline of the newest plan
  int64_t probe_read_bytes_ = 0, probe_write_bytes_ = 0;
  std::optional<int64_t> run_write_bytes_;
  int64_t tokens_ = 0;
  int world_size_ = 1;
  double flops_per_step_ = 0;            // 0: not known
  double product_flops_per_second_ = 0;  // 0: not measured
  int64_t parameters_ = 0;
  tiering::Prediction prediction_;
  // Of the steady state: steps that left all updates to the next forward, and steps some of whose updates
  // were made in backward, and then again.
  int64_t deferred_steps_ = 0, replayed_steps_ = 0;
  double overlap_ratio_ = 0, bytes_per_param_per_step_ = 0, io_gbps_ = 0, floor_ratio_ = 0;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_REPORT_H_
