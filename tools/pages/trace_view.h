// One step of a trace: what ran on which lane, what compute waited for, and what lay in which slot.
//
// From the file that --trace wrote (tools/pages/trace.h), or from the simulator's operations.
#ifndef PENSTOCK_TOOLS_PAGES_TRACE_VIEW_H_
#define PENSTOCK_TOOLS_PAGES_TRACE_VIEW_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/pages/op_places.h"

namespace penstock::tools {

struct TraceEvent {
  std::string lane;
  std::string name;
  double start_seconds = 0;
  double end_seconds = 0;
  int64_t step = 0;
  int64_t block = -1, tile = -1, stage = -1;
  int64_t bytes = 0;
  std::vector<Place> places = {};
};

struct TraceView {
  std::string run_id;  // empty: the trace does not say whose it is
  int64_t step = 0;    // 0: none is complete
  double start_seconds = 0, end_seconds = 0;
  std::vector<TraceEvent> events;  // of the step and, for what stays in slots, of its neighbours
  std::vector<TraceEvent> waits;   // of the compute lane; `name` is the cause
};

inline constexpr char kWaitsTrack[] = "compute waits for";

// From one step's last backward to the next one's: the operations that fall into a step of median length,
// with a neighbour on either side where there is one.
TraceView StepOf(std::vector<TraceEvent> events);

// Reads a file of any length in memory for about three steps. Lines that are no events are passed over; a
// file cut short by a kill is read as far as it goes. kInvalidArgument: not readable, or nothing of a trace
// in it.
absl::StatusOr<TraceView> ReadTrace(const std::string& path);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_TRACE_VIEW_H_
