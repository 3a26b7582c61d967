// DeepSpeed's checkpoints of a model that Python drives: in, as the state that a run goes on from, and out.
#ifndef PENSTOCK_PYTHON_DEEPSPEED_CHECKPOINT_H_
#define PENSTOCK_PYTHON_DEEPSPEED_CHECKPOINT_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/deepspeed/checkpoint.h"
#include "models/weights/layout.h"
#include "swap/safetensors.h"
#include "zero/compute/flat_layout.h"
#include "zero/engine/engine.h"

namespace penstock::python {

// A parameter's name in the module, and its shape.
using NamedShape = std::pair<std::string, std::vector<int64_t>>;
using Layouts = std::vector<std::shared_ptr<const zero::FlatLayout>>;

// torch's name of a type; null: it has none.
const char* TorchName(swap::Dtype dtype);

// names: of the parameters of each block, in the order in which its layout has them. kInvalidArgument: of
// another number.
absl::StatusOr<models::ModelLayout> ModelLayoutOf(const std::vector<std::vector<std::string>>& names,
                                                  const Layouts& layouts);

// Where the run of a checkpoint stood, as JSON for _engine/_deepspeed_checkpoint.py, and that it is one of a
// model with these parameters. buffers: those that the module keeps, and `names` may name; values of at most
// `most_buffer_bytes` together come along, as _engine/_json.py has tensors.
absl::StatusOr<nlohmann::json> DescribeCheckpoint(const std::string& path,
                                                  const std::vector<NamedShape>& parameters,
                                                  const models::NameMap& names,
                                                  const std::vector<std::string>& buffers,
                                                  int64_t most_buffer_bytes);

// What an engine goes on from instead of what it would make by itself.
struct GivenImport {
  std::string path;  // empty: nothing
  models::NameMap names;
  std::vector<std::vector<std::string>> parameters;  // ModelLayoutOf's
  int64_t step = 0, updates = 0;                     // as DescribeCheckpoint has found them
  bool is_read_once = false;                         // state in memory: one version on the drive is enough
  nlohmann::json description;                        // of the first commit: what Python finds again
};
// From a JSON object with these keys.
GivenImport MakeImport(const nlohmann::json& given);

// Reads all values of the checkpoint and checks its checksums; of `world` ranks each every world-th
// parameter. kDataLoss: it is damaged.
absl::Status VerifyDeepSpeedCheckpoint(const std::string& path, const std::vector<NamedShape>& parameters,
                                       const models::NameMap& names, int rank, int world);

// Makes the run in options.storage.state_dirs of the checkpoint: this rank's part of it. A run that stands
// there is replaced once all of the checkpoint has been read and checked; `is_verified`: the caller has done
// so. Memory: some 40 MiB. Several ranks call it together. kInvalidArgument: another checkpoint lies there by
// now.
absl::Status ImportRun(const GivenImport& given, const zero::Measured& model, const Layouts& layouts,
                       const zero::EngineOptions& options, bool is_verified);

// Writes the state of an engine, which rank 0 of several does, and all of them call, as DeepSpeed's universal
// checkpoint. what: directory, tag, overwrite, names, groups, lr_scheduler, client, samples, torch_optimizer,
// has_scheduler. Memory: a tile, and 48 MiB.
absl::Status ExportRun(zero::Engine& engine, const models::ModelLayout& layout, const nlohmann::json& what);

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_DEEPSPEED_CHECKPOINT_H_
