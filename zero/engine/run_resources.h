// What a run holds for as long as it goes on, as its plan says: the arena with the slots in it, a device's
// own memory, the I/O engine, the store. Made in one order, given back in the reverse.
//
// Threads: made and destroyed on the engine's; what it holds has its own rules.
#ifndef PENSTOCK_ZERO_ENGINE_RUN_RESOURCES_H_
#define PENSTOCK_ZERO_ENGINE_RUN_RESOURCES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/arena.h"
#include "aio/engine.h"
#include "swap/store.h"
#include "zero/engine/engine.h"
#include "zero/lanes/device_lanes.h"
#include "zero/memory/activation_spill.h"
#include "zero/memory/arena_view.h"
#include "zero/memory/sums_spill.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero {

class RunResources {
 public:
  // Opens the store of a run that goes on, of all ranks at the newest commit that all have made, and makes
  // that of a new one, with `identity` (swap/store.h). `held`: the store's files, where CloseStore gave them;
  // taken, and given back with an error, unless it is the store's own. From here on tensors on the host are
  // counted afresh, and bounded by what the arena leaves of the budget. Plan and options outlive it.
  static absl::StatusOr<std::unique_ptr<RunResources>> Create(const EnginePlan& plan,
                                                              const EngineOptions& options,
                                                              const std::string& identity,
                                                              swap::HeldFiles& held);
  // The run stays locked, and is opened by what is created next. Empty: no drive.
  swap::HeldFiles CloseStore();
  // Nothing may be in flight. Tensors are bounded by nothing afterwards.
  ~RunResources();
  RunResources(const RunResources&) = delete;
  RunResources& operator=(const RunResources&) = delete;

  // Bounds the tensors on a device with its own memory. Called when the model is built: what tensors took on
  // the host till then is no part of what they may take there.
  absl::Status BoundDevice();

  const aio::Arena& arena() const { return *arena_; }
  std::shared_ptr<const aio::Arena> shared_arena() const { return arena_; }
  bool pinned() const { return registered_ || arena_->locked(); }  // the arena, by a device or by mlock
  bool pinned_for_device() const { return registered_; }
  ArenaView& arena_view() const { return *arena_view_; }
  // Plan::checkpoint_bytes and Plan::network_bytes of the arena; empty: none are planned.
  std::span<std::byte> tile_memory() const { return {tile_memory_.data(), tile_memory_.bytes()}; }
  std::span<std::byte> network_memory() const { return {network_memory_.data(), network_memory_.bytes()}; }
  DeviceLanes* device_lanes() const { return device_lanes_.get(); }  // null: the host computes
  aio::Engine* io() const { return io_.get(); }                      // null: no file is read or written
  swap::Store* store() const { return store_.get(); }                // null: no drive
  ShardedState* others() const {
    return others_.get();
  }  // null but where a run of several ranks is evaluated
  ActivationSpill* inputs() const { return inputs_.get(); }  // null: none are spilled
  SumsSpill* sums() const { return sums_.get(); }            // the same

  // Managed bytes while the model was measured and built.
  int64_t preparation_peak() const { return preparation_peak_; }
  // What had been copied to and from the device by then.
  const Device::Traffic& traffic_before() const { return traffic_before_; }

 private:
  RunResources(const EnginePlan& plan, const EngineOptions& options) : plan_(plan), options_(options) {}
  static int NodeFor(const EngineOptions& options);  // of NUMA, for the arena; -1: the kernel's choice
  absl::Status Make(const std::string& identity, swap::HeldFiles& held);
  absl::Status MakeMemory();
  absl::Status MakeDevice();
  absl::Status MakeIo();
  absl::Status MakeStore(const std::string& identity, swap::HeldFiles& held);
  absl::Status OpenOthers(swap::StoreOptions* own);
  absl::Status CheckPlannedFor(const swap::StoreShape& shape, const std::string& identity) const;
  absl::Status GoBackTogether();
  void Log(const std::string& line) const {
    if (options_.hooks.log) options_.hooks.log(line);
  }

  const EnginePlan& plan_;
  const EngineOptions& options_;
  std::shared_ptr<aio::Arena> arena_;
  std::unique_ptr<ArenaView> arena_view_;
  aio::Region tile_memory_, network_memory_;
  std::unique_ptr<DeviceLanes> device_lanes_;
  bool registered_ = false;  // the arena, with the device
  std::unique_ptr<aio::Engine> io_;
  std::unique_ptr<swap::Store> store_;
  std::unique_ptr<ShardedState> others_;
  std::unique_ptr<ActivationSpill> inputs_;
  std::unique_ptr<SumsSpill> sums_;
  int64_t preparation_peak_ = 0;
  Device::Traffic traffic_before_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_ENGINE_RUN_RESOURCES_H_
