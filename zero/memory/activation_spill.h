// The inputs that stages keep for backward and that do not stay in memory: their way to the drive and back.
//
// A file in each state directory, without a name from the moment it is made: nothing is left behind, however
// the run ends. An input has a place of its own by position and micro-batch, used again every step. What
// comes back is checked against the checksum of what went.
//
// Threads: everything on the executor's thread; `done` runs on the I/O engine's.
// Ownership: the caller's memory throughout, which stays where it is from Write until Written and from Read
// until TakeRead.
#ifndef PENSTOCK_ZERO_MEMORY_ACTIVATION_SPILL_H_
#define PENSTOCK_ZERO_MEMORY_ACTIVATION_SPILL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/request.h"
#include "tiering/plan/plan.h"
#include "zero/memory/values.h"

namespace penstock::zero {

class ActivationSpill {
 public:
  using Done = void (*)(void* context);

  // Bytes in each of `directories`.
  static std::vector<uint64_t> BytesIn(size_t directories, const tiering::ModelGraph& graph,
                                       const tiering::Plan& plan);
  // Room for what the plan spills, reserved. kResourceExhausted: the disk is too full.
  static absl::StatusOr<std::unique_ptr<ActivationSpill>> Create(aio::Engine& engine,
                                                                 const tiering::ModelGraph& graph,
                                                                 const tiering::Plan& plan,
                                                                 const std::vector<std::string>& directories);
  // Waits for what is in flight.
  ~ActivationSpill();

  // The values of an input, in host memory. `done(context)` when all have gone; not after an error. What has
  // more bytes than were planned for has another place from here on where inputs may grow
  // (ModelGraph::inputs_beside), and is kInvalidArgument elsewhere; kResourceExhausted: the disk is full.
  absl::Status Write(tiering::Position position, int micro_batch, std::span<const TensorView> values,
                     Done done, void* context);
  // How it ended.
  absl::Status Written(tiering::Position position, int micro_batch);
  // As many values of the same sizes.
  absl::Status Read(tiering::Position position, int micro_batch, std::span<const TensorView> values,
                    Done done, void* context);
  // How it ended. kDataLoss: they are not what was written.
  absl::Status TakeRead(tiering::Position position, int micro_batch);

 private:
  // One value of an input.
  struct Value {
    aio::Request request;
    void* data = nullptr;
    uint64_t offset = 0;  // in the file
    uint64_t bytes = 0;
    uint64_t checksum = 0;  // as it was written
  };
  struct Place {
    aio::File* file = nullptr;
    uint64_t offset = 0;
    uint64_t bytes = 0;  // reserved
    std::vector<std::unique_ptr<Value>> values;
    std::atomic<int> outstanding{0};
    absl::Status refused;  // of what the I/O engine did not take
    Done done = nullptr;
    void* context = nullptr;
  };

  ActivationSpill(aio::Engine& engine, bool grows) : engine_(engine), grows_(grows) {}
  // A place of `bytes` at the end of its file.
  absl::Status Grow(Place& place, uint64_t bytes);
  Place& place(tiering::Position position, int micro_batch) {
    return *places_[position][static_cast<size_t>(micro_batch)];
  }

  // Submits what `prepare` has prepared of each value.
  template <typename Prepare>
  absl::Status Submit(Place& place, aio::Priority priority, Done done, void* context, Prepare&& prepare);
  static void OnValueDone(aio::Request& request, void* context);
  static absl::Status StatusOf(const Place& place);

  aio::Engine& engine_;
  const bool grows_;
  std::vector<std::unique_ptr<aio::File>> files_;
  tiering::PerPosition<std::vector<std::unique_ptr<Place>>> places_;  // [micro_batch], empty where kept
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_ACTIVATION_SPILL_H_
