#include "engine_options.h"

#include <nanobind/nanobind.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "gil.h"
#include "kernels/checksum.h"
#include "kernels/float16.h"
#include "run/config.h"
#include "run/config_options.h"
#include "run/optimizer_options.h"
#include "run/record/run_record.h"
#include "run/settings.h"
#include "swap/store.h"
#include "zero/compute/test_device.h"
#include "zero/compute/tile_format.h"
#include "zero/engine/report.h"
#include "zero/memory/host_memory.h"
#include "zero/memory/tensor_memory.h"
#include "zero/memory/thread_times.h"
#include "zero/ranks/comm.h"
#ifdef PENSTOCK_CUDA_DRIVER
#include "zero/compute/cuda/driver_device.h"
#endif

namespace penstock::python {
namespace {

using Json = nlohmann::json;

// Where a parameter's values are, of what type.
struct Source {
  const std::byte* data = nullptr;
  kernels::DType type = kernels::DType::kFp32;
  bool mapped = false;  // a shared mapping of a file
};

// The whole pages of a shared mapping of a file leave this process; the file has them.
void GiveBack(const std::byte* data, int64_t bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / page * page;
  if (begin < end) (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

// The values of a block's flat parameters, from where Python has them.
class Values {
 public:
  Values(std::shared_ptr<const zero::FlatLayout> layout, std::vector<Source> sources)
      : layout_(std::move(layout)), sources_(std::move(sources)) {}

  void Read(int64_t first, int64_t elements, float* to) const {
    std::fill_n(to, elements, 0.0F);
    for (size_t p = 0; p < sources_.size(); ++p) {
      const zero::Parameter& parameter = layout_->parameters[p];
      const int64_t begin = std::max(first, parameter.offset);
      const int64_t end = std::min(first + elements, parameter.offset + parameter.elements);
      if (begin >= end) continue;
      const auto bytes = static_cast<int64_t>(kernels::BytesPerElement(sources_[p].type));
      const std::byte* from = sources_[p].data + (begin - parameter.offset) * bytes;
      kernels::Convert(sources_[p].type, from, kernels::DType::kFp32, to + (begin - first),
                       static_cast<size_t>(end - begin));
      if (sources_[p].mapped) GiveBack(from, (end - begin) * bytes);
    }
  }

 private:
  std::shared_ptr<const zero::FlatLayout> layout_;
  std::vector<Source> sources_;
};

// Looks keys up and knows which were asked for: one that nobody wants is an error.
class Options {
 public:
  explicit Options(Json values) : values_(std::move(values)) {}

  template <typename T>
  void Take(const std::string& key, T* to) {
    const auto found = values_.find(key);
    if (found == values_.end()) return;
    if (!found->is_null()) {
      try {
        *to = found->get<T>();
      } catch (const nlohmann::json::exception&) {
        Refuse(absl::StrCat(key, ": ", found->dump(), " is of another kind"));
      }
    }
    values_.erase(found);
  }
  void Refuse(const std::string& why) { status_.Update(absl::InvalidArgumentError(why)); }
  absl::Status Done() {
    if (status_.ok() && !values_.empty())
      Refuse(absl::StrCat("the engine has no option ", values_.begin().key()));
    return status_;
  }

 private:
  Json values_;
  absl::Status status_;
};

absl::StatusOr<zero::OptimizerOptions> OptimizerOf(const Json& given) {
  Options options(given);
  std::string name(run::Name(run::OptimizerType::kAdamW));
  options.Take("type", &name);
  const std::optional<run::OptimizerType> type = run::ParseOptimizerType(name);
  if (!type.has_value()) return absl::InvalidArgumentError(absl::StrCat("optimizer: there is no ", name));
  zero::OptimizerOptions made = run::MakeOptimizer(
      *type, {.lr = 1e-3}, [&options](const char* what, auto* value) { options.Take(what, value); });
  RETURN_IF_ERROR(options.Done());
  return made;
}

}  // namespace

absl::StatusOr<std::shared_ptr<zero::Device>> OpenDevice(const std::string& name) {
  if (name.empty()) return zero::HostDevice();
  constexpr std::string_view kTest = "test:", kCuda = "cuda:";
  if (name.starts_with(kTest)) return zero::TestDevice::Parse(name.substr(kTest.size()));
  int number = 0;
  if (!name.starts_with(kCuda) || !absl::SimpleAtoi(name.substr(kCuda.size()), &number))
    return absl::InvalidArgumentError(absl::StrCat("there is no device ", name));
#ifdef PENSTOCK_CUDA_DRIVER
  return zero::OpenDriverDevice(number);
#else
  return absl::FailedPreconditionError("this build of the package has no CUDA kernels");
#endif
}

nlohmann::json ParseJson(const std::string& text) {
  // Below the bounds of what reads it back out of a commit, where it is a part of a larger value.
  absl::StatusOr<Json> json = penstock::ParseJson(text, "", {.max_depth = 100, .max_values = 350'000});
  if (!json.ok()) throw nanobind::value_error(std::string(json.status().message()).c_str());
  return *std::move(json);
}

absl::StatusOr<GivenModel> MakeModel(const std::vector<GivenBlock>& blocks,
                                     const std::vector<GivenStage>& stages) {
  GivenModel model;
  zero::Measured& measured = model.measured;
  std::vector<Values> values;
  std::string described;
  for (const auto& [block_name, parameters] : blocks) {
    std::vector<zero::ParameterSpec> specs;
    std::vector<Source> sources;
    for (const auto& [name, sizes, trains, group, address, type, mapped] : parameters) {
      const auto dtype = zero::ParseDType(type);
      if (!dtype.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat(block_name, ".", name, " is ", type, ": fp32, bf16 and fp16 have a master in fp32"));
      }
      specs.push_back({.name = name, .sizes = sizes, .trains = trains, .group = group});
      sources.push_back({reinterpret_cast<const std::byte*>(address), *dtype, mapped});
      absl::StrAppend(&described, block_name, ".", name, trains ? " " : " frozen ");
      if (group != 0) absl::StrAppend(&described, "group ", group, " ");  // it moves what follows
      for (const int64_t size : sizes) absl::StrAppend(&described, size, ",");
    }
    const auto layout = std::make_shared<const zero::FlatLayout>(zero::FlatLayout::Of(specs));
    measured.graph.blocks.push_back({.name = block_name,
                                     .elements = layout->elements,
                                     .trains = layout->Trains(),
                                     .trained_from = layout->trained_from});
    measured.layouts.push_back(layout);
    measured.parameters += layout->parameter_elements;
    values.emplace_back(layout, std::move(sources));
  }
  for (const auto& [name, block, forward_seconds, backward_seconds, inputs] : stages) {
    tiering::StageShape& stage = measured.graph.stages.emplace_back();
    stage.name = name;
    stage.block = tiering::BlockIndex(block);
    stage.forward_seconds = forward_seconds;
    stage.backward_seconds = backward_seconds;
    const bool first = measured.graph.stages.size() == 1;  // which has the batch, that its caller keeps
    for (const int64_t bytes : first ? std::vector<int64_t>() : inputs) {
      stage.input_bytes += zero::TensorMemory::Counted(bytes);
      stage.input_scratch_bytes += tiering::AlignUp(bytes, tiering::kPage);
    }
    absl::StrAppend(&described, ";", block);
  }
  const uint64_t fingerprint = kernels::Checksum(described.data(), described.size());
  measured.identity = {{"architecture", "driven"},
                       {"parameters", measured.parameters},
                       {"fingerprint", absl::StrCat(absl::Hex(fingerprint, absl::kZeroPad16))}};
  model.initial_values = [values = std::move(values)](int block, int64_t first, int64_t elements, float* to) {
    values[static_cast<size_t>(block)].Read(first, elements, to);
    return absl::OkStatus();
  };
  return model;
}

void TakeStorage(const run::Resolved& settings, zero::EngineOptions* options) {
  const run::PenstockConfig& own = settings.config.penstock;
  zero::StorageOptions& storage = options->storage;
  run::SetOptions(settings.config, options);
  storage.offload = settings.offload;
  storage.state_dirs = settings.directories.paths;
  storage.state_dir_weights = settings.directories.weights;
  options->optimizer.missing_gradients = own.missing_gradients.value_or(zero::MissingGradients::kSkip);
  options->memory.host_memory_budget_bytes = own.host_memory_budget_bytes.value_or(0);
}

absl::StatusOr<GivenOptions> MakeOptions(const run::Resolved& settings, const std::string& text,
                                         std::shared_ptr<zero::Comm> comm) {
  Options given(ParseJson(text));
  GivenOptions made;
  zero::EngineOptions& options = made.engine;
  options.comm = std::move(comm);
  options.dtype = settings.dtype;
  options.micro_batches = static_cast<int>(settings.forwards);
  TakeStorage(settings, &options);
  options.storage.checkpoints.on_demand = true;
  Json optimizer = Json::object();
  given.Take("seed", &options.seed);
  given.Take("input_gradients", &made.input_gradients);
  given.Take("resident_bytes", &made.resident_bytes);
  given.Take("state_dirs", &options.storage.state_dirs);
  given.Take("overwrite", &options.storage.overwrite);
  int64_t overwrites_until_ns = -1;
  given.Take("overwrites_until", &overwrites_until_ns);
  given.Take("resume", &options.resume.enabled);
  given.Take("trains", &options.trains);
  given.Take("new_weights", &options.new_weights);
  given.Take("run", &options.resume.run);
  given.Take("run_changes", &options.resume.run_changes);
  given.Take("optimizer", &optimizer);
  bool device_computes = false;  // to which who owns the model copies
  given.Take("device_computes", &device_computes);
  std::string device;
  given.Take("device", &device);
  given.Take("computes_elsewhere", &made.computes_elsewhere);
  given.Take("step_tensor_bytes", &made.step_tensor_bytes);
  bool asks_for_host = false;
  given.Take("asks_for_host", &asks_for_host);
  given.Take("restore_from", &made.restore_from);
  given.Take("restore_is_verified", &made.restore_is_verified);
  Json imported;
  given.Take("import", &imported);
  if (imported.is_object()) made.imported = MakeImport(imported);
  Json base;
  given.Take("base", &base);
  made.base = MakeBase(base);
  RETURN_IF_ERROR(given.Done());
  if (overwrites_until_ns >= 0)
    options.storage.overwrites_only = swap::SeeCommits(options.storage.state_dirs, overwrites_until_ns);

  run::Config config = settings.config;
  if (options.resume.enabled && made.restore_from.empty() && made.imported.path.empty()) {
    const GilReleased released;
    RETURN_IF_ERROR(run::FitConfigToStore(options.storage, &config));
  }
  ASSIGN_OR_RETURN(options.optimizer.algorithm, OptimizerOf(optimizer));
  run::ApplyConfig(config, run::Door::kPython, &options);
  if (asks_for_host && !config.penstock.saved_activations.has_value())
    options.memory.saved_activations = zero::SavedActivations::kHost;
  const run::PenstockConfig& own = config.penstock;
  ASSIGN_OR_RETURN(options.device, OpenDevice(device));
  // Unasked, a tenth of what is free stays so: what torch was seen to take is not all that it ever will.
  if (options.device->has_own_memory()) {
    options.memory.device_memory_budget_bytes =
        own.device_memory_budget_bytes.value_or(options.device->capacity_bytes() / 10 * 9);
  }
  made.plans_again = options.trains && run::PlansAgain(own, options.world(), options.storage.offload);
  made.breaks_down = config.wall_clock_breakdown.value_or(false);
  made.logs_exchanges = config.comms_logger.value_or(false);
  const int ranks_here = options.comm != nullptr ? options.comm->environment().local_world : 1;
  options.optimizer.workers =
      static_cast<int>(own.update_threads.value_or(zero::DefaultUpdateThreads(device_computes, ranks_here)));
  ASSIGN_OR_RETURN(const zero::LossScaler scaler, run::MakeLossScaler(config.fp16));
  options.optimizer.loss_scale = scaler.options();
  // As much as it likes would be what is in flight: what is only evaluated gains by all that stays.
  int64_t& budget = options.memory.host_memory_budget_bytes;
  if (!options.trains && budget == 0) budget = zero::FindHostMemory().free_bytes / 2;
  return made;
}

namespace {

// leaves: of each stage, whether its inputs wait for backward elsewhere. room: the most bytes of one stage's
// that have a place there; 0: there is no bound.
Json SavedActivationsOf(const tiering::Plan& plan) {
  std::vector<bool> leaves;
  for (const tiering::Position position : plan.all_positions())
    leaves.push_back(plan.trains && plan.SpillsInput(position));
  const bool in_slots = !plan.input_slots.empty();
  return {{"leaves", leaves},
          {"room", in_slots ? Json(plan.input_slots[tiering::InputSlot(0)].bytes) : Json()},
          {"scratch_bytes", plan.input_scratch_bytes}};
}

}  // namespace

nlohmann::json InfoOf(const zero::Engine& engine) {
  const zero::EnginePlan& plan = engine.plan();
  return {{"step", engine.step()},
          {"committed_step", engine.committed_step()},
          {"resumed_from", engine.resumed_from().has_value() ? Json(*engine.resumed_from()) : Json()},
          {"parameters", plan.parameters},
          {"state_bytes", plan.state_bytes},
          {"disk_bytes", plan.disk_bytes},
          {"host_memory_bytes", plan.plan.host_memory_budget_bytes},
          {"least_host_memory_bytes", plan.plan.least_host_memory_bytes},
          {"least_device_memory_bytes", plan.plan.device.least_bytes},
          {"updated_on_device_share", plan.plan.on_device_share()},
          {"peak_managed_bytes", engine.peak_managed_bytes()},
          {"on_nvme", plan.plan.on_nvme},
          {"nvme_read_bytes_per_step", plan.plan.nvme_read_bytes},
          {"nvme_write_bytes_per_step", plan.plan.nvme_write_bytes},
          {"saved_activations", SavedActivationsOf(plan.plan)},
          {"exchange", zero::ExchangeJson(plan.plan)},
          {"io_backend", engine.io_backend()},
          {"written_bytes", engine.io_stats().DeviceWriteBytes()},
          {"run", engine.run()}};
}

}  // namespace penstock::python
