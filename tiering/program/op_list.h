// The operations of a program in the order in which they are appended, numbered on from pass to pass.
//
// Invariant: an operation waits for earlier ones only. So no timing makes a program wait for itself. Checked
// for every operation, when its pass is complete.
#ifndef PENSTOCK_TIERING_PROGRAM_OP_LIST_H_
#define PENSTOCK_TIERING_PROGRAM_OP_LIST_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "tiering/program/op.h"

namespace penstock::tiering {

class OpList {
 public:
  explicit OpList(OpId first_id) : next_id_(first_id) {}

  // What is emitted from now on is a pass; `step` is the step that computes in it.
  void StartPass(int64_t step) {
    ops_.clear();
    computing_step_ = step;
  }
  // It holds until the next one is emitted.
  Op& Emit(OpKind kind, Lane lane, int64_t step) {
    Op& op = ops_.emplace_back();
    op.kind = kind;
    op.lane = lane;
    op.step = step;
    ++next_id_;
    return op;
  }
  // The pass is complete.
  std::vector<Op> Take() {
    OpId id = next_id_ - static_cast<OpId>(ops_.size());
    for (const Op& op : ops_) {
      for (const OpId before : op.after) {
        PENSTOCK_CHECK(before >= 0 && before < id, "an operation that waits for itself or a later one");
      }
      ++id;
    }
    return std::exchange(ops_, {});
  }

  OpId next_id() const { return next_id_; }
  int64_t computing_step() const { return computing_step_; }

 private:
  OpId next_id_;
  int64_t computing_step_ = 0;
  std::vector<Op> ops_;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_OP_LIST_H_
