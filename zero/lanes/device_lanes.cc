#include "zero/lanes/device_lanes.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {

using tiering::Op;
using tiering::OpKind;

absl::StatusOr<std::unique_ptr<DeviceLanes>> DeviceLanes::Create(const tiering::Plan& plan,
                                                                 const ArenaView& residency, Device& device,
                                                                 std::span<std::byte> staging) {
  ASSIGN_OR_RETURN(const auto arena, device.AllocateArena(plan.device.arena_bytes));
  return std::unique_ptr<DeviceLanes>(new DeviceLanes(plan, residency, device, arena, staging));
}

std::byte* DeviceLanes::weights(const Op& op) const {
  const tiering::Tile& cut = plan_.blocks[op.block].tiles[op.tile];
  return static_cast<std::byte*>(run(op.device_weight_slot)) +
         residency_.InRun(op.block, cut).offset * plan_.precision.weight_bytes();
}

std::byte* DeviceLanes::gradients(const Op& op) const {
  return op.device_accumulator_slot.valid()
             ? Place(plan_.device.accumulator_slots, op.device_accumulator_slot)
             : Place(plan_.device.gradient_slots, op.device_gradient_slot);
}

std::byte* DeviceLanes::own_part(const Op& op) const {
  const int64_t part = plan_.blocks[op.block].elements;
  return gradients(op) + residency_.rank() * part * plan_.accumulator_bytes(op.block);
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

void DeviceLanes::Start(const Op& op, StageRunner& runner, Device::Done done) {
  switch (op.kind) {
    case OpKind::kCopyIn: {
      if (!op.tile.valid()) {
        return device_.CopyIn(run(op.device_weight_slot), residency_.run(op.weight_slot), op.bytes,
                              /*after_compute=*/false, std::move(done));
      }
      const TileMemory tile = residency_.tile(op.block, op.tile, op.weight_slot, tiering::TileSlot());
      return device_.CopyIn(weights(op), tile.weights, op.bytes, /*after_compute=*/false, std::move(done));
    }
    case OpKind::kCopyOut: {
      void* const to = op.accumulator_slot.valid() ? residency_.accumulator(op.accumulator_slot)
                                                   : residency_.gradient(op.gradient_slot);
      const void* const from = state_.has(op.block)       ? static_cast<void*>(state_.partial_sums(op.block))
                               : plan_.device.collectives ? own_part(op)
                                                          : gradients(op);
      return device_.CopyOut(to, from, op.bytes, std::move(done));
    }
    case OpKind::kCopyStateIn:
      return state_.CopyStateIn(op.block, op.tile,
                                residency_.tile(op.block, op.tile, tiering::WeightSlot(), op.tile_slot),
                                std::move(done));
    case OpKind::kCopyStateOut:
      return state_.CopyOut(op.block, op.tile,
                            residency_.tile(op.block, op.tile, op.weight_slot, op.tile_slot),
                            std::move(done));
    case OpKind::kWriteInput:
    case OpKind::kReadInput:
      return StartInput(op, runner, std::move(done));
    default:
      return done(
          absl::InternalError(absl::StrCat("not a copy: ", std::string(tiering::OpKindName(op.kind)))));
  }
}

void DeviceLanes::StartInput(const Op& op, StageRunner& runner, Device::Done done) {
  const tiering::InputSlot slot = plan_.input_slot(op.position, op.micro_batch);
  Input& input = inputs_[slot];
  void* const place = residency_.input(slot);
  if (op.kind == OpKind::kReadInput) {
    absl::Status status = Guarded("memory for the input of a stage", [&] {
      input.tensor =
          torch::empty(input.sizes, torch::TensorOptions().dtype(input.type).device(device_.torch_device()));
    });
    if (!status.ok()) return done(std::move(status));
    const auto bytes = static_cast<int64_t>(input.tensor.nbytes());
    return device_.CopyIn(input.tensor.data_ptr(), place, bytes, /*after_compute=*/true, std::move(done));
  }
  input.tensor = runner.TakeInput(op.position.value(), op.micro_batch);
  input.sizes = input.tensor.sizes().vec();
  input.type = input.tensor.scalar_type();
  const auto bytes = static_cast<int64_t>(input.tensor.nbytes());
  const int64_t room = plan_.input_slots[slot].bytes;
  if (bytes > room || !input.tensor.is_contiguous()) {
    return done(absl::InvalidArgumentError(absl::StrCat(
        "the input at position ", op.position.value(), " has ", bytes, " bytes, ", room,
        " were planned for: a stage's output must keep the shape that the example batch gave it")));
  }
  device_.CopyOut(place, input.tensor.data_ptr(), bytes, std::move(done));
}

void DeviceLanes::Settle(const Op& op, StageRunner& runner) {
  if (op.kind != OpKind::kWriteInput && op.kind != OpKind::kReadInput) return;
  torch::Tensor tensor =
      std::exchange(inputs_[plan_.input_slot(op.position, op.micro_batch)].tensor, torch::Tensor());
  if (op.kind == OpKind::kReadInput) runner.PutInput(op.position.value(), op.micro_batch, std::move(tensor));
}

}  // namespace penstock::zero
