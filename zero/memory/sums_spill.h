// The fp32 sums of gradients between the calls of a step, and between the uses of a block, where they do not
// stay in memory: their way to the drive and back.
//
// One file without a name: nothing is left behind, however the run ends. A block's sums have a place of their
// own, used again each time. What comes back is checked against the checksum of what went.
//
// Threads: everything on the executor's; `done` runs on the I/O engine's. The memory is the caller's, and
// stays where it is until Ended.
#ifndef PENSTOCK_ZERO_MEMORY_SUMS_SPILL_H_
#define PENSTOCK_ZERO_MEMORY_SUMS_SPILL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/request.h"
#include "tiering/plan/plan.h"

namespace penstock::zero {

class SumsSpill {
 public:
  using Done = void (*)(void* context);

  // Of the file; 0: the plan sends none to the drive.
  static uint64_t Bytes(const tiering::Plan& plan);
  // Room for them, reserved. kResourceExhausted: the disk is too full.
  static absl::StatusOr<std::unique_ptr<SumsSpill>> Create(aio::Engine& engine, const tiering::Plan& plan,
                                                           const std::string& directory);
  // Waits for what is in flight.
  ~SumsSpill();

  // The block's sums; `done(context)` when they have gone, or come; not after an error.
  absl::Status Write(tiering::BlockIndex block, const void* sums, Done done, void* context);
  absl::Status Read(tiering::BlockIndex block, void* sums, Done done, void* context);
  // How the last of the two ended. kDataLoss: they are not what was written.
  absl::Status Ended(tiering::BlockIndex block);

 private:
  struct Place {
    aio::Request request;
    uint64_t offset = 0, bytes = 0;
    void* sums = nullptr;
    bool reads = false;
    uint64_t checksum = 0;  // as they were written
    Done done = nullptr;
    void* context = nullptr;
  };

  explicit SumsSpill(aio::Engine& engine) : engine_(engine) {}
  absl::Status Submit(Place& place, Done done, void* context);

  aio::Engine& engine_;
  std::unique_ptr<aio::File> file_;
  tiering::PerBlock<std::unique_ptr<Place>> places_;  // null where they stay
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_SUMS_SPILL_H_
