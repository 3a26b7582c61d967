// Lanes in virtual time: every operation is an amount of work, the clock jumps from one completion to the
// next.
//
// The drive serves one read and one write at a time, reads of weights before other reads, as the I/O engine's
// priorities have it; while it does both, each direction moves at its mixed rate (tiering/plan/machine.h). A
// fixed latency passes beside the drive's time. Compute is one server in order, updates are `update_workers`
// servers; where the machine has fewer cores than they need together, all of them slow down. Where a device
// computes, a gradient is finished by all of them together, and takes their time from other updates.
// Copies to and from a device with its own memory are one server each, with a latency beside it.
// Gathering and reducing over ranks are one server each; where both run, each has half of the network. The
// other ranks are taken to be as far as this one. Deterministic: the same program gives the same times to the
// last bit.
#ifndef PENSTOCK_TIERING_SIMULATE_SIM_LANES_H_
#define PENSTOCK_TIERING_SIMULATE_SIM_LANES_H_

#include <array>
#include <deque>
#include <functional>
#include <queue>
#include <vector>

#include "tiering/plan/machine.h"
#include "tiering/plan/plan.h"
#include "tiering/program/lanes.h"

namespace penstock::tiering {

class SimLanes : public Lanes {
 public:
  SimLanes(const Plan& plan, const MachineModel& machine) : plan_(plan), machine_(machine) {}

  bool HasRoom(Lane lane) const override;
  // Updates in backward hold, unless the test says otherwise for a step.
  bool Skips(const Op& op) const override { return op.replay && !(replayed_ && replayed_(op.step)); }
  void Start(OpId id, const Op& op) override;
  absl::Status Decide(const Op&) override { return absl::OkStatus(); }
  void Wait(std::vector<Completion>* completions) override;
  double Now() const override { return now_; }

  // Called when an operation starts: a test injects an error by returning one.
  void set_fault(std::function<absl::Status(const Op&)> fault) { fault_ = std::move(fault); }
  // Whether the updates that a step made in backward are made again.
  void set_replayed(std::function<bool(int64_t step)> replayed) { replayed_ = std::move(replayed); }
  // Work that was started, as if nothing were in its way: bytes of transfers, copies and exchanges, seconds
  // of the others.
  double work(Lane lane) const { return work_[static_cast<size_t>(lane)]; }
  // Of one operation.
  double Work(const Op& op) const;

 private:
  struct Job {
    OpId id = 0;
    Lane lane = Lane::kRead;
    double left = 0;  // bytes of transfers and copies, undisturbed seconds of the rest
    double start = 0;
    absl::Status status;
    bool urgent = false;  // before those of its lane that are not
    int workers = 1;      // of the update lane, which do it together
  };
  // A lane that takes up its operations in order, as many at once as it has servers.
  struct Station {
    std::deque<Job> waiting;
    std::vector<Job> running;
  };
  struct Event {
    double end = 0;
    OpId id = 0;
    double start = 0;
    absl::Status status;
    bool operator>(const Event& other) const { return end != other.end ? end > other.end : id > other.id; }
  };

  // Lets every idle server take up its next operation at `now_`.
  void Serve();
  // Work per second of a running job.
  double Rate(const Job& job) const;
  Station& at(Lane lane) { return stations_[static_cast<size_t>(lane)]; }
  const Station& at(Lane lane) const { return stations_[static_cast<size_t>(lane)]; }
  bool busy(Lane lane) const { return !at(lane).running.empty(); }
  void Complete(Job& job, std::vector<Completion>* completions);

  const Plan& plan_;  // the caller's
  const MachineModel machine_;
  std::function<absl::Status(const Op&)> fault_;
  std::function<bool(int64_t)> replayed_;
  double now_ = 0;
  std::array<double, kLanes> work_{};
  std::array<Station, kLanes> stations_;                                   // kCommit and kHost have none
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;  // what only time passes for
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_SIMULATE_SIM_LANES_H_
