// An optimizer whose states and masters live on a drive, for parameters anywhere in host memory.
//
//   DriveOptimizerOptions options;
//   options.directory = "/nvme/scratch";
//   options.host_memory_budget_bytes = 256 * aio::kMiB;
//   ASSIGN_OR_RETURN(auto optimizer, DriveOptimizer::Create(options));
//   Parameter parameter = {.n = n, .has_m = true, .has_v = true};
//   ASSIGN_OR_RETURN(const int id, optimizer->Add({&parameter, 1}));
//   Update update = {.parameter = id, .values = w, .gradient = g, .options = kernels::AdamOptions{}};
//   RETURN_IF_ERROR(optimizer->Step({&update, 1}));
//
// What lies on the drive. The moments, in fp32, and what a 16-bit parameter lacks to its fp32 master: for
// bf16 the other 16 bits (kernels/split_master.h), for fp16 the whole master. So an element of Adam's takes
// 8 bytes, 10 with bf16, 12 with fp16. It is cut into *tiles*, a tile at multiples of kReduceBlock elements,
// several small parameters in one.
//
// A step reads a tile, updates it and the parameter, and writes it back, with reads and writes of other tiles
// in flight meanwhile, in a ring of locked buffers. Tiles that host_memory_budget_bytes leaves room for
// besides the ring stay in memory. Results are those of kernels/optimizer.h to the bit, wherever a tile lives
// and however it was cut (LAMB too: its norms are exact).
//
// The file has no name: it goes with the optimizer, however the process ends. What is to be kept is copied
// out (CopyStates) and put back (SetStates). Tiles have no checksums: a transfer that the drive reports as
// failed is an error, bytes that it returns wrongly and reports as right are not noticed. swap/ notices them.
//
// A parameter that was changed from outside. The 16 bits of a bf16 master are worth something only beside the
// value that they were split from, so the values are known by their checksum, for each part of a parameter
// that shares a tile; where it is another, the master begins anew at the parameter. An fp16 parameter is
// compared with its master, element by element.
//
// Errors name operation, path, offset and errno. One that comes before anything was changed leaves all as it
// was: the call may be made again. After one that comes later, parameters and states do not belong together
// any more; every call but SetStates of everything is then refused (kFailedPrecondition, with the first
// error).
//
// Threads: one call at a time. A forked child makes its own: each call there is kFailedPrecondition.
#ifndef PENSTOCK_OPTIM_DRIVE_OPTIMIZER_H_
#define PENSTOCK_OPTIM_DRIVE_OPTIMIZER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/bytes.h"
#include "aio/engine.h"
#include "base/process_mark.h"
#include "kernels/optimizer.h"

namespace penstock::optim {

struct DriveOptimizerOptions {
  std::string directory;  // where the file without a name is made; must exist
  // Buffers and tiles that stay in memory; whole MiB count, at least 2. Parameters and gradients are not
  // counted. Not counted either: 24 bytes for each part of a parameter in a tile.
  uint64_t host_memory_budget_bytes = 256 * aio::kMiB;
  // Of the states that are added, this share lives on the drive and the rest in memory, whatever
  // host_memory_budget_bytes is, which is then the ring's alone. Below 0: as much in memory as
  // host_memory_budget_bytes holds.
  double drive_share = -1.0;
  int threads = 1;  // that update, the caller's included
  aio::BackendKind backend = aio::BackendKind::kAuto;
  std::function<void(std::string_view)> log;  // as aio::EngineOptions::log
  // For tests: faults between engine and kernel.
  std::function<std::unique_ptr<aio::Backend>()> backend_factory;
};

struct Parameter {
  uint64_t n = 0;
  kernels::DType type = kernels::DType::kFp32;
  bool has_m = false;  // Adam, LAMB: both. Lion, SGD with momentum: m. Adagrad: v. SGD without: none
  bool has_v = false;
  float initial_v = 0.0f;
};

using UpdateOptions = std::variant<kernels::AdamOptions, kernels::AdagradOptions, kernels::LionOptions,
                                   kernels::SgdOptions, kernels::LambOptions>;

// One parameter's share of a step. The arrays are the caller's, of the parameter's n elements.
struct Update {
  int parameter = 0;
  void* values = nullptr;
  const void* gradient = nullptr;
  kernels::DType gradient_type = kernels::DType::kFp32;
  UpdateOptions options;
  int64_t update = 1;  // which of this parameter's updates it is: 1 for the first
  double gradient_scale = 1.0;
};

// A parameter's states as they come back: fp32 arrays of n elements. Null: as of a parameter that was never
// updated (the master begins at the parameter, moments at their initial value).
struct StateValues {
  int parameter = 0;
  const float* master = nullptr;  // 16-bit parameters only
  const float* m = nullptr;
  const float* v = nullptr;
};

// Where a parameter's states go to in a file: byte offsets of fp32 arrays of n elements. Below 0: nowhere.
struct StatePlaces {
  int parameter = 0;
  const void* values = nullptr;  // the parameter's; wanted for the master
  int64_t master = -1;
  int64_t m = -1;
  int64_t v = -1;
};

// Where the last call failed, if it was a transfer.
struct FailedTransfer {
  bool any = false;
  std::string path;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

struct DriveOptimizerStats {
  uint64_t drive_bytes = 0;     // of states on the drive
  uint64_t resident_bytes = 0;  // of states in memory
  uint64_t ring_bytes = 0;
  uint64_t tiles = 0;
  uint64_t read_bytes = 0;  // since creation
  uint64_t written_bytes = 0;
};

class DriveOptimizer {
 public:
  // kInvalidArgument: no directory, too little memory. Errors of the file: aio/file.h.
  static absl::StatusOr<std::unique_ptr<DriveOptimizer>> Create(DriveOptimizerOptions options);
  ~DriveOptimizer();
  DriveOptimizer(const DriveOptimizer&) = delete;
  DriveOptimizer& operator=(const DriveOptimizer&) = delete;

  // Takes parameters in and reserves their space; returns the number of the first, the others follow. A full
  // drive is found here: kResourceExhausted, and nothing was added.
  absl::StatusOr<int> Add(std::span<const Parameter> parameters);

  // Updates all of them, or none if the arguments are wrong (kInvalidArgument). A parameter may occur once.
  absl::Status Step(std::span<const Update> updates);

  // Replaces the states of these parameters.
  absl::Status SetStates(std::span<const StateValues> states);
  // Writes the states of these parameters into the file of a descriptor, through the page cache, at most
  // 1 MiB at once. States and parameters stay as they are.
  absl::Status CopyStates(std::span<const StatePlaces> states, int descriptor);

  // Ok, or the error since which states and parameters do not belong together.
  const absl::Status& broken() const;
  const FailedTransfer& failed_transfer() const;
  DriveOptimizerStats stats() const;
  std::string backend_name() const;  // "" as long as nothing lives on the drive
  int descriptor() const;            // the file's

 private:
  class Impl;
  explicit DriveOptimizer(std::unique_ptr<Impl> impl);
  const ProcessMark made_in_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::optim

#endif  // PENSTOCK_OPTIM_DRIVE_OPTIMIZER_H_
