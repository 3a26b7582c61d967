// A trace of every operation, in the format that Perfetto and chrome://tracing read: one track a lane, and
// one for what the compute lane waits for between two operations. The report's stall_seconds are the sums of
// it.
//
// Its first line names the run. Written as it happens; a trace cut short by a kill still loads. Operations
// that overlap on their lane (transfers, updates) are async events, those that do not are plain ones.
#ifndef PENSTOCK_TOOLS_PAGES_TRACE_H_
#define PENSTOCK_TOOLS_PAGES_TRACE_H_

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tiering/program/executor.h"
#include "tools/pages/op_places.h"

namespace penstock::tools {

class Trace {
 public:
  // `run_id`: of the run that is traced; empty: of none, it is simulated.
  static absl::StatusOr<std::unique_ptr<Trace>> Open(const std::string& path, const std::string& run_id);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // From here on operations tell the slots that they use, by the sizes of this plan.
  void Planned(const tiering::Plan& plan) { sizes_ = SlotSizes(plan); }
  // Seconds by any clock that does not go back; the first one is the trace's zero.
  void Add(tiering::OpId id, const tiering::Op& op, double start_seconds, double end_seconds);
  void AddStall(tiering::Stall cause, double start_seconds, double end_seconds);
  absl::Status Close();

 private:
  Trace(std::string path, std::FILE* file, const std::string& run_id);
  void Name(int track, std::string_view name);
  // Microseconds since the first event.
  double Since(double seconds);

  const std::string path_;
  std::FILE* file_;
  double zero_ = -1;
  SlotSizes sizes_;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_TRACE_H_
