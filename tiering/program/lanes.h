// The lanes that operations run on: drives, compute, updates, and the clock by which they are timed.
//
// The executor is a single-threaded state machine over this interface. Behind it stand either real threads
// and rings (zero/lanes/hardware_lanes.h) or durations in virtual time (tiering/simulate/sim_lanes.h); the
// executor cannot tell which.
#ifndef PENSTOCK_TIERING_PROGRAM_LANES_H_
#define PENSTOCK_TIERING_PROGRAM_LANES_H_

#include <vector>

#include "absl/status/status.h"
#include "tiering/program/op.h"

namespace penstock::tiering {

struct Completion {
  OpId id = 0;
  absl::Status status;
  double start_seconds = 0;  // when the lane took it up, by the lanes' clock
  double end_seconds = 0;
};

class Lanes {
 public:
  virtual ~Lanes() = default;

  // Whether Start would be taken now. A lane that runs one operation at a time takes a second one in advance,
  // so that it never waits for the executor. Operations of kCompute run in the order in which they were
  // started.
  virtual bool HasRoom(Lane lane) const = 0;

  // Whether an operation that could start now is nothing: an update that need not be made again, work of a
  // step that was called off. It is complete at once, moves no bytes and runs on no lane.
  virtual bool Skips(const Op&) const { return false; }

  // Whether an operation that starts now moves the bytes that it names: one that calls another off does not.
  virtual bool Moves(const Op&) const { return true; }

  // Starts an operation; never blocks. `op` lives until its completion was delivered. Not called for kHost.
  virtual void Start(OpId id, const Op& op) = 0;

  // Decides a kHost operation at once, on the executor's thread.
  virtual absl::Status Decide(const Op& op) = 0;

  // Waits for at least one completion and appends all that are there. Called only while something is started.
  virtual void Wait(std::vector<Completion>* completions) = 0;

  // The clock, in seconds from an arbitrary zero; never goes back.
  virtual double Now() const = 0;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_LANES_H_
