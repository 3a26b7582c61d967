// The inputs that stages keep for backward and that do not stay in memory: their way to the drive and back.
//
// A file in each state directory, without a name from the moment it is made: nothing is left behind, however
// the run ends. An input has a place of its own by position and micro-batch, used again every step. What
// comes back is checked against the checksum of what went.
//
// Threads: Write, Read, Written and Take on the executor's thread; `done` runs on the I/O engine's.
// Ownership: tensors are held from Write until Written and from Read until Take.
#ifndef PENSTOCK_ZERO_MEMORY_ACTIVATION_SPILL_H_
#define PENSTOCK_ZERO_MEMORY_ACTIVATION_SPILL_H_

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/request.h"
#include "tiering/plan/plan.h"

namespace penstock::zero {

class ActivationSpill {
 public:
  using Done = void (*)(aio::Request& request, void* context);

  // Bytes in each of so many directories.
  static std::vector<uint64_t> BytesIn(size_t directories, const tiering::ModelGraph& graph,
                                       const tiering::Plan& plan);
  // Room for what the plan spills, reserved. kResourceExhausted: the disk is too full.
  static absl::StatusOr<std::unique_ptr<ActivationSpill>> Create(aio::Engine& engine,
                                                                 const tiering::ModelGraph& graph,
                                                                 const tiering::Plan& plan,
                                                                 const std::vector<std::string>& directories);
  // Waits for what is in flight.
  ~ActivationSpill();

  absl::Status Write(tiering::Position position, int micro_batch, torch::Tensor input, Done done,
                     void* context);
  // How it ended; the tensor is let go.
  absl::Status Written(tiering::Position position, int micro_batch);
  // Into a new tensor of the same shape.
  absl::Status Read(tiering::Position position, int micro_batch, Done done, void* context);
  // The tensor that was read. kDataLoss: it is not what was written.
  absl::StatusOr<torch::Tensor> Take(tiering::Position position, int micro_batch);

 private:
  struct Place {
    aio::File* file = nullptr;
    uint64_t offset = 0;
    uint64_t bytes = 0;  // reserved
    aio::Request request;
    torch::Tensor tensor;
    std::vector<int64_t> sizes;
    torch::ScalarType type = torch::kFloat32;
    uint64_t checksum = 0;
  };

  explicit ActivationSpill(aio::Engine& engine) : engine_(engine) {}
  Place& place(tiering::Position position, int micro_batch) {
    return *places_[position][static_cast<size_t>(micro_batch)];
  }

  aio::Engine& engine_;
  std::vector<std::unique_ptr<aio::File>> files_;
  tiering::PerPosition<std::vector<std::unique_ptr<Place>>> places_;  // [micro_batch], empty where kept
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_MEMORY_ACTIVATION_SPILL_H_
