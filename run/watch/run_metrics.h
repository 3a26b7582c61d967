// The figures of a training for Prometheus, replaced after each commit and at the end.
#ifndef PENSTOCK_RUN_WATCH_RUN_METRICS_H_
#define PENSTOCK_RUN_WATCH_RUN_METRICS_H_

#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "run/watch/prometheus_file.h"
#include "zero/engine/engine.h"

namespace penstock::run {

// Where rank `rank` of `world` writes: `path`, and with more ranks "NAME-rank-K.prom" for those behind the
// first.
std::string PrometheusPath(const std::string& path, int rank, int world);

class RunMetrics {
 public:
  RunMetrics(std::string path, const std::string& run_id, int rank)
      : file_(std::move(path), {{"run_id", run_id}, {"rank", std::to_string(rank)}}) {}

  struct Totals {
    int64_t last_step = 0;                      // of the run, as it is planned
    int64_t tokens_per_step = 0;                // of all ranks
    int64_t read_bytes = 0, written_bytes = 0;  // of drives, by this process, as its report counts
    int64_t run_written_bytes = 0;              // by all processes of this run
    int64_t budget_bytes = 0;                   // of host memory; 0: none
  };
  // Of a step that was committed. What cannot be written is returned once (PrometheusFile).
  absl::Status Committed(const zero::StepResult& result, const zero::Engine& engine, const Totals& totals);
  // The same step once more, with what the process moved until its end. Nothing where none was committed.
  absl::Status Ended(const zero::Engine& engine, const Totals& totals);

 private:
  absl::Status Write(const zero::Engine& engine, const Totals& totals);

  PrometheusFile file_;
  zero::StepResult newest_;
  std::time_t committed_at_ = 0;  // 0: nothing was
  // Of this process's steps.
  double tokens_ = 0, seconds_ = 0;
  int64_t skipped_ = 0;
};

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_RUN_METRICS_H_
