// What an operation gives a worker to do, for those who compute with rates: simulator and calibration.
#ifndef PENSTOCK_TIERING_SIMULATE_OP_WORK_H_
#define PENSTOCK_TIERING_SIMULATE_OP_WORK_H_

#include <cstdint>

#include "tiering/plan/machine.h"
#include "tiering/plan/plan.h"
#include "tiering/program/op.h"

namespace penstock::tiering {

// Of an operation of the update lane, or of kUpdateOnDevice: parameters of an update, bytes of what is
// checked, sealed or rounded. 0: nothing that counts (a handful of sums).
int64_t UpdateWork(const Plan& plan, const Op& op);

// Workers that an operation of the update lane keeps busy. Where a device computes, all of them finish a
// gradient together.
int WorkersOf(const Plan& plan, const MachineModel& machine, OpKind kind);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_SIMULATE_OP_WORK_H_
