// The operations of a program in the order in which they are appended, numbered on from pass to pass.
//
// Invariant: an operation waits for earlier ones only. So no timing makes a program wait for itself. Checked
// for every operation, when the next one follows or its pass is complete.
#ifndef PENSTOCK_TIERING_PROGRAM_OP_LIST_H_
#define PENSTOCK_TIERING_PROGRAM_OP_LIST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "tiering/program/op.h"

namespace penstock::tiering {

class OpList {
 public:
  // A pass has about `likely` operations.
  OpList(OpId first_id, size_t likely) : next_id_(first_id), most_(likely) {}

  // What is emitted from now on is a pass; `step` is the step that computes in it, `trains`: with a backward.
  void StartPass(int64_t step, bool trains) {
    ops_.clear();
    ops_.reserve(most_);  // operations are costly to move
    computing_step_ = step;
    trains_ = trains;
  }
  // It holds until the next one is emitted.
  Op& Emit(OpKind kind, Lane lane, int64_t step) {
    CheckLast();
    Op& op = ops_.emplace_back();
    op.kind = kind;
    op.lane = lane;
    op.step = step;
    ++next_id_;
    return op;
  }
  // The pass is complete.
  std::vector<Op> Take() {
    CheckLast();
    most_ = std::max(most_, ops_.size());
    return std::exchange(ops_, {});
  }

  OpId next_id() const { return next_id_; }
  int64_t computing_step() const { return computing_step_; }
  bool trains() const { return trains_; }

 private:
  void CheckLast() const {
    if (ops_.empty()) return;
    for (const OpId before : ops_.back().after)
      PENSTOCK_CHECK(before >= 0 && before < next_id_ - 1,
                     "an operation that waits for itself or a later one");
  }

  OpId next_id_;
  int64_t computing_step_ = 0;
  bool trains_ = false;
  std::vector<Op> ops_;
  size_t most_;  // operations of a pass
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_OP_LIST_H_
