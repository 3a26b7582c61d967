#include "zero/lanes/device_lanes.h"

#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace penstock::zero {

using tiering::Op;
using tiering::OpKind;

absl::StatusOr<std::unique_ptr<DeviceLanes>> DeviceLanes::Create(const tiering::Plan& plan,
                                                                 const ArenaView& arena_view, Device& device,
                                                                 std::span<std::byte> staging) {
  ASSIGN_OR_RETURN(const auto arena, device.AllocateArena(plan.device.arena_bytes));
  return std::unique_ptr<DeviceLanes>(new DeviceLanes(plan, arena_view, device, arena, staging));
}

std::byte* DeviceLanes::weights(const Op& op) const {
  const tiering::Tile& cut = plan_.blocks[op.block].tiles[op.tile];
  return static_cast<std::byte*>(weights(op.device_weight_slot)) +
         arena_view_.InWholeBlock(op.block, cut).offset * plan_.precision.weight_bytes();
}

std::byte* DeviceLanes::gradients(const Op& op) const {
  return op.device_accumulator_slot.valid()
             ? Place(plan_.device.accumulator_slots, op.device_accumulator_slot)
             : Place(plan_.device.gradient_slots, op.device_gradient_slot);
}

std::byte* DeviceLanes::own_part(const Op& op) const {
  const int64_t part = plan_.blocks[op.block].elements;
  return gradients(op) + arena_view_.rank() * part * plan_.accumulator_bytes(op.block);
}

double* DeviceLanes::partial_sums(const Op& op) const {
  if (state_.has(op.block)) return state_.partial_sums(op.block);
  return reinterpret_cast<double*>(static_cast<std::byte*>(gradient(op.device_gradient_slot)) +
                                   plan_.gradient_bytes(op.block));
}

GradientPlace DeviceLanes::place(const Op& op) const {
  GradientPlace place;
  if (op.device_accumulator_slot.valid()) {
    place.accumulator = reinterpret_cast<float*>(gradients(op));
  } else {
    place.gradient = gradients(op);
  }
  return place;
}

void DeviceLanes::Start(const Op& op, Device::Done done) {
  switch (op.kind) {
    case OpKind::kCopyIn: {
      if (!op.tile.valid()) {
        return device_.CopyIn(weights(op.device_weight_slot), arena_view_.weights(op.weight_slot), op.bytes,
                              /*after_compute=*/false, std::move(done));
      }
      const TileMemory tile = arena_view_.tile(op.block, op.tile, op.weight_slot, tiering::TileSlot());
      return device_.CopyIn(weights(op), tile.weights, op.bytes, /*after_compute=*/false, std::move(done));
    }
    case OpKind::kCopyOut: {
      void* const to = op.accumulator_slot.valid() ? arena_view_.accumulator(op.accumulator_slot)
                                                   : arena_view_.gradient(op.gradient_slot);
      const void* const from = state_.has(op.block)       ? static_cast<void*>(state_.partial_sums(op.block))
                               : plan_.device.collectives ? own_part(op)
                                                          : gradients(op);
      return device_.CopyOut(to, from, op.bytes, std::move(done));
    }
    case OpKind::kCopyStateIn:
      return state_.CopyStateIn(op.block, op.tile,
                                arena_view_.tile(op.block, op.tile, tiering::WeightSlot(), op.tile_slot),
                                std::move(done));
    case OpKind::kCopyStateOut:
      return state_.CopyOut(op.block, op.tile,
                            arena_view_.tile(op.block, op.tile, op.weight_slot, op.tile_slot),
                            std::move(done));
    default:
      return done(
          absl::InternalError(absl::StrCat("not a copy: ", std::string(tiering::OpKindName(op.kind)))));
  }
}

absl::Status DeviceLanes::StartInput(const Op& op, std::span<const TensorView> values,
                                     const Device::Done& done) {
  const bool reads = op.kind == OpKind::kReadInput;
  const tiering::InputSlot slot = plan_.input_slot(op.position, op.micro_batch);
  int64_t bytes = 0;
  for (const TensorView& value : values) bytes += value.bytes();
  if (const int64_t room = plan_.input_slots[slot].bytes; bytes > room) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the input at position ", op.position.value(), " has ", bytes, " bytes, ", room,
        " were planned for: a stage's output must keep the shape that the example batch gave it"));
  }
  if (values.empty()) done(absl::OkStatus());
  // Of several copies the last to end reports, with the first error.
  struct Joined {
    std::mutex mutex;
    size_t outstanding = 0;
    absl::Status status;
  };
  auto joined = std::make_shared<Joined>();
  joined->outstanding = values.size();
  const auto one_done = [joined, done](const absl::Status& status) {
    {
      std::lock_guard lock(joined->mutex);
      joined->status.Update(status);
      if (--joined->outstanding > 0) return;
    }
    done(joined->status);
  };
  auto* place = static_cast<std::byte*>(arena_view_.input(slot));
  for (const TensorView& value : values) {
    const int64_t size = value.bytes();
    if (reads) {
      device_.CopyIn(value.data, place, size, /*after_compute=*/true, one_done);
    } else {
      device_.CopyOut(place, value.data, size, one_done);
    }
    place += size;
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
