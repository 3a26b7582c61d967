// What Python says of a model and of its training, as the engine wants it. Structure goes as tuples, options
// as JSON: names and numbers, checked here.
#ifndef PENSTOCK_PYTHON_ENGINE_OPTIONS_H_
#define PENSTOCK_PYTHON_ENGINE_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base_weights.h"
#include "deepspeed_checkpoint.h"
#include "run/resolve.h"
#include "zero/engine/engine.h"

namespace penstock::python {

// name within the block, sizes, trains, group, address of its values, their element type ("fp32", ...),
// whether they are a shared mapping of a file, whose pages go back once they were read.
using GivenParameter = std::tuple<std::string, std::vector<int64_t>, bool, int, uint64_t, std::string, bool>;
// name, parameters
using GivenBlock = std::pair<std::string, std::vector<GivenParameter>>;
// name, block, seconds of forward and of backward, bytes of each tensor that forward is given and that may
// leave memory until backward
using GivenStage = std::tuple<std::string, int, double, double, std::vector<int64_t>>;
// lr, beta1, beta2, weight decay of a group
using GivenRates = std::tuple<double, std::optional<double>, std::optional<double>, std::optional<double>>;

struct GivenModel {
  zero::Measured measured;
  // Reads the values where they are: they stay there until the engine is made.
  std::function<absl::Status(int block, int64_t first, int64_t elements, float* to)> initial_values;
};
// kInvalidArgument: an element type that has no fp32 master.
absl::StatusOr<GivenModel> MakeModel(const std::vector<GivenBlock>& blocks,
                                     const std::vector<GivenStage>& stages);

// The device in whose memory an engine has its blocks: "" for the processor, "cuda:0"; "test:" and what
// TestDevice::Parse reads, for tests alone. kInvalidArgument: there is no such name. Else why it cannot be
// used.
absl::StatusOr<std::shared_ptr<zero::Device>> OpenDevice(const std::string& name);

// Throws nanobind's value_error.
nlohmann::json ParseJson(const std::string& text);

struct GivenOptions {
  zero::EngineOptions engine;
  std::string restore_from;          // the checkpoint that the run is made of; empty: none
  bool restore_is_verified = false;  // all of it has been read and checked, of DeepSpeed's too
  GivenImport imported;              // likewise, of DeepSpeed's
  GivenBase base;                    // of frozen parameters
  bool input_gradients = false;      // ModelGraph's
  int64_t resident_bytes = 0;        // of Python's memory that lives as long as the run: resident parameters
  bool computes_elsewhere = false;   // on a device that the engine has no memory of
  int64_t step_tensor_bytes = 0;     // of Python's tensors on the engine's device in a step, at the most
  bool plans_again = false;          // once, where the first steps differ much from their prediction
  bool breaks_down = false;          // the time of each step: wall_clock_breakdown
  bool logs_exchanges = false;       // comms_logger
};
// What a run's state on its drives depends on: all of storage, and what it holds besides.
void TakeStorage(const run::Resolved& settings, zero::EngineOptions* options);

// options: a JSON object of what the engine's maker says beside the settings; the keys are
// python/penstock/_engine/_handed_over.py's. kInvalidArgument names one that is wrong. comm: the other ranks,
// or null.
absl::StatusOr<GivenOptions> MakeOptions(const run::Resolved& settings, const std::string& options,
                                         std::shared_ptr<zero::Comm> comm);

// Of a live engine, for people and tests.
nlohmann::json InfoOf(const zero::Engine& engine);

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_ENGINE_OPTIONS_H_
