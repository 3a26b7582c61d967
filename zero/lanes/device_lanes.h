// A device with its own memory behind the lanes: where the plan's slots are in its memory, and the copies to
// and from it.
//
// Threads: Start on the executor's thread; the places from any.
#ifndef PENSTOCK_ZERO_LANES_DEVICE_LANES_H_
#define PENSTOCK_ZERO_LANES_DEVICE_LANES_H_

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/index.h"
#include "tiering/plan/plan.h"
#include "tiering/program/op.h"
#include "zero/compute/compute.h"
#include "zero/compute/device.h"
#include "zero/compute/device_state.h"
#include "zero/compute/gradient_sums.h"
#include "zero/memory/arena_view.h"

namespace penstock::zero {

class DeviceLanes {
 public:
  // The device's arena, as the plan lays it out; `staging` is for DeviceState. kResourceExhausted: the device
  // has not that much.
  static absl::StatusOr<std::unique_ptr<DeviceLanes>> Create(const tiering::Plan& plan,
                                                             const ArenaView& arena_view, Device& device,
                                                             std::span<std::byte> staging);

  Device& device() const { return device_; }
  void* weights(tiering::DeviceWeightSlot slot) const { return Place(plan_.device.weight_slots, slot); }
  // Of the operation's tile, in its slot of the run there.
  std::byte* weights(const tiering::Op& op) const;
  // Where kAccumulateGradient leaves what backward made, and kRoundOnDevice puts and finds it.
  GradientPlace place(const tiering::Op& op) const;
  void* gradient(tiering::DeviceGradientSlot slot) const { return Place(plan_.device.gradient_slots, slot); }
  const DeviceState& state() const { return state_; }
  // Where kSquareGradient leaves its sums: behind the gradient, or of a block that lives there behind its
  // state.
  double* partial_sums(const tiering::Op& op) const;
  // Where devices exchange with each other: what kReduceScatter reduces, this rank's part of it, which
  // becomes the result where the block does not live there, and the memory of DevicePlan::network.
  std::byte* gradients(const tiering::Op& op) const;  // its sums, or where there are none its gradient
  std::byte* own_part(const tiering::Op& op) const;
  std::byte* network() const { return arena_ + plan_.device.network.offset; }

  // An operation of kCopyIn or kCopyOut; `done` is called when it is over, or at once if it cannot begin.
  void Start(const tiering::Op& op, Device::Done done);
  // What a position keeps, on its way from or to the device: these values, one after the other in its slot.
  // After an error `done` is not called.
  absl::Status StartInput(const tiering::Op& op, std::span<const TensorView> values,
                          const Device::Done& done);

 private:
  DeviceLanes(const tiering::Plan& plan, const ArenaView& arena_view, Device& device, std::byte* arena,
              std::span<std::byte> staging)
      : plan_(plan),
        arena_view_(arena_view),
        device_(device),
        arena_(arena),
        state_(plan, device, arena, arena_view.rank(), staging) {}
  template <class I>
  std::byte* Place(const IndexedVector<I, tiering::Slot>& slots, I slot) const {
    return arena_ + slots[slot].offset;
  }

  const tiering::Plan& plan_;
  const ArenaView& arena_view_;
  Device& device_;
  std::byte* const arena_;
  const DeviceState state_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_LANES_DEVICE_LANES_H_
