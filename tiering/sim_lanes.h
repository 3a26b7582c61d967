// Lanes in virtual time: every operation is a duration, the clock jumps from one completion to the next.
//
// One drive with one server: operations take bytes / bandwidth of it, reads before writes, each in program
// order; a fixed latency passes beside the server's time. Compute is one server in order; updates are
// `update_workers` servers. Deterministic: the same program gives the same times to the last bit.
#ifndef PENSTOCK_TIERING_SIM_LANES_H_
#define PENSTOCK_TIERING_SIM_LANES_H_

#include <deque>
#include <functional>
#include <queue>
#include <vector>

#include "tiering/lanes.h"
#include "tiering/machine.h"

namespace penstock::tiering {

class SimLanes : public Lanes {
 public:
  SimLanes(const Plan& plan, const MachineModel& machine) : plan_(plan), machine_(machine) {}

  bool HasRoom(Lane lane) const override;
  // Updates in backward hold, unless the test says otherwise for a step.
  bool Skips(const Op& op) const override { return op.redo && !(redone_ && redone_(op.step)); }
  void Start(OpId id, const Op& op) override;
  absl::Status Decide(const Op&) override { return absl::OkStatus(); }
  void Wait(std::vector<Completion>* completions) override;
  double Now() const override { return now_; }

  // Called when an operation starts: a test injects an error by returning one.
  void set_fault(std::function<absl::Status(const Op&)> fault) { fault_ = std::move(fault); }
  // Whether the updates that a step made in backward are made again.
  void set_redone(std::function<bool(int64_t step)> redone) { redone_ = std::move(redone); }
  double drive_busy_seconds() const { return drive_busy_seconds_; }

 private:
  struct Pending {
    OpId id = 0;
    double duration = 0;
    double arrived = 0;
    absl::Status status;
  };
  struct Event {
    double end = 0;
    OpId id = 0;
    double start = 0;
    Lane lane = Lane::kRead;
    absl::Status status;
    bool operator>(const Event& other) const { return end != other.end ? end > other.end : id > other.id; }
  };

  double Duration(const Op& op) const;
  // Lets every idle server take up its next operation at `now_`.
  void Serve();
  void Finish(double start, const Pending& pending, double end, Lane lane) {
    events_.push(Event{end, pending.id, start, lane, pending.status});
  }

  const Plan plan_;
  const MachineModel machine_;
  std::function<absl::Status(const Op&)> fault_;
  std::function<bool(int64_t)> redone_;
  double now_ = 0;
  double drive_free_ = 0;
  double drive_busy_seconds_ = 0;
  int compute_running_ = 0;
  int updates_running_ = 0;
  std::deque<Pending> reads_, writes_, computes_, updates_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_SIM_LANES_H_
