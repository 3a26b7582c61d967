// Weights of a model's frozen parameters that are read where they lie, in files as they are published or as
// `penstock pack` coded them, instead of being copied into the state.
#ifndef PENSTOCK_PYTHON_BASE_WEIGHTS_H_
#define PENSTOCK_PYTHON_BASE_WEIGHTS_H_

#include <nanobind/nanobind.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zero/compute/compute.h"
#include "zero/engine/engine_options.h"

namespace penstock::python {

struct GivenBase {
  bool given = false;
  std::string path;  // a directory, or a file of one; empty: where the run's record says
  // Of each parameter of each block: the tensor's name there; empty: it trains.
  std::vector<std::vector<std::string>> names;
  std::vector<std::string> passed_over;  // tensors there that no frozen parameter of the model has
  nlohmann::json record;                 // of the run that is gone on with; null: it is a new one
  bool is_planned = false;               // nothing is read of the files but their headers
};
// Throws nanobind's value_error.
GivenBase MakeBase(const nlohmann::json& base);

// Has the engine read what is frozen from there: sets `options`' source and what its record says of the
// files, which are read once for their checksums where the run is new. Returns a line for people.
// kInvalidArgument: they are not the weights of this model, or cannot be read in place; kFailedPrecondition:
// not those that the run was made for, by the file's name; kDataLoss: damaged.
absl::StatusOr<std::string> TakeBase(const GivenBase& base, const zero::Measured& model,
                                     zero::EngineOptions* options);

// An error about such weights in keywords of Python's: base_weights for the command line's --model.
absl::Status BaseInPython(const absl::Status& status);

void BindBaseWeights(nanobind::module_& module);

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_BASE_WEIGHTS_H_
