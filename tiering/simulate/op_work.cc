#include "tiering/simulate/op_work.h"

#include <algorithm>

namespace penstock::tiering {

int64_t UpdateWork(const Plan& plan, const Op& op) {
  const BlockPlan& block = plan.blocks[op.block];
  if (op.kind == OpKind::kUpdateOnDevice) return block.elements;
  if (op.kind == OpKind::kRoundGradient) {
    // Its squares, or the checksums of what goes to the drive.
    const bool passes = !plan.squares_on_device() || !block.gradient_slot.valid();
    return passes ? plan.gradient_bytes(op.block) : 0;
  }
  if (op.kind == OpKind::kVerify && op.device_weight_slot.valid()) return 0;  // there
  const int64_t elements = block.tiles[op.tile].elements;
  switch (op.kind) {
    case OpKind::kVerify:
      return op.checks_state ? plan.precision.StateBytes(elements) : elements * plan.precision.weight_bytes();
    case OpKind::kChecksumTile:
      return plan.precision.TotalBytes(elements);
    default:
      return elements;
  }
}

int WorkersOf(const Plan& plan, const MachineModel& machine, OpKind kind) {
  const bool all = kind == OpKind::kRoundGradient && plan.device.has_own_memory && !plan.squares_on_device();
  return all ? std::max(1, machine.update_workers) : 1;
}

}  // namespace penstock::tiering
