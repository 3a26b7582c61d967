// What some of a run's steps say about the machine: the times that its operations took, as the rates and
// times that the simulator computes with.
//
// Operations disturb each other: forward shares cores with updates, reads share the drive with writes. What
// is wanted is the work of each, as if it were alone, in the simulator's own terms; so a span counts as much
// of its time as MachineModel gives it beside the others, and a drive's bandwidth is taken where it was busy
// enough: reading, writing, and both apart. A direction that was never busy is taken to be as far from the
// machine's figure as the drive was where it was. Where the run has shown nothing, the machine's figure
// stays.
#ifndef PENSTOCK_TIERING_SIMULATE_CALIBRATE_H_
#define PENSTOCK_TIERING_SIMULATE_CALIBRATE_H_

#include <cstdint>
#include <vector>

#include "tiering/plan/machine.h"
#include "tiering/plan/model_graph.h"
#include "tiering/plan/plan.h"
#include "tiering/program/op.h"

namespace penstock::tiering {

class Calibration {
 public:
  // `busy_bytes`: the drive counts as busy with at least this many in flight (what saturates it).
  Calibration(const ModelGraph& graph, const Plan& plan, const MachineModel& machine, int64_t busy_bytes)
      : graph_(graph), plan_(plan), machine_(machine), busy_bytes_(busy_bytes) {}

  // An operation that ran on a real lane, by the lanes' clock. Beyond kMostSpans they are not kept.
  void Observe(const Op& op, double start_seconds, double end_seconds);

  bool full() const { return spans_.size() >= kMostSpans; }
  // With what was observed in place of what was measured or assumed before.
  struct Result {
    ModelGraph graph;
    MachineModel machine;
    bool drive_seen = false;  // some direction's bandwidth is the run's own
  };
  Result Calibrated() const;

  static constexpr size_t kMostSpans = 200'000;

 private:
  struct Span {
    OpKind kind;
    Lane lane;
    StageIndex stage;
    int64_t amount;  // bytes moved or looked at; parameters of an update
    double start, end;
  };
  void CalibrateCpu(Result* result) const;
  void CalibrateDrive(Result* result) const;

  const ModelGraph graph_;
  const Plan plan_;
  const MachineModel machine_;
  const int64_t busy_bytes_;
  std::vector<Span> spans_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_SIMULATE_CALIBRATE_H_
