// What an operation gives a worker to do, for those who compute with rates: simulator and calibration.
#ifndef PENSTOCK_TIERING_SIMULATE_OP_WORK_H_
#define PENSTOCK_TIERING_SIMULATE_OP_WORK_H_

#include <cstdint>

#include "tiering/plan/plan.h"
#include "tiering/program/op.h"

namespace penstock::tiering {

// Of an operation of the update lane, or of kUpdateOnDevice: parameters of an update, bytes of what is
// checked, sealed or rounded. 0: nothing that counts (a handful of sums).
int64_t UpdateWork(const Plan& plan, const Op& op);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_SIMULATE_OP_WORK_H_
