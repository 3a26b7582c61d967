#include "engine_options.h"

#include <nanobind/nanobind.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "kernels/float16.h"
#include "run/config.h"
#include "run/config_options.h"
#include "run/elasticity.h"
#include "run/settings.h"
#include "run/unused_keys.h"
#include "zero/compute/tile_format.h"
#include "zero/config/config_json.h"
#include "zero/memory/host_memory.h"
#include "zero/memory/thread_times.h"
#include "zero/ranks/comm.h"

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

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

// By the word that JSON has for it; `values` are all there are.
template <typename T>
void TakeWord(Options& options, const std::string& key, std::initializer_list<T> values, T* to) {
  std::string word;
  options.Take(key, &word);
  if (word.empty()) return;
  for (const T value : values) {
    if (Lower(zero::Name(value)) != Lower(word)) continue;
    *to = value;
    return;
  }
  options.Refuse(absl::StrCat(key, ": there is no ", word));
}

absl::StatusOr<zero::OptimizerOptions> MakeOptimizer(const Json& given) {
  Options options(given);
  std::string type = "AdamW";
  options.Take("type", &type);
  zero::OptimizerOptions made;
  const auto betas = [&](auto* to) {
    options.Take("beta1", &to->beta1);
    options.Take("beta2", &to->beta2);
  };
  const auto common = [&](auto* to) {
    options.Take("lr", &to->lr);
    options.Take("weight_decay", &to->weight_decay);
  };
  if (type == "AdamW" || type == "Adam") {
    kernels::AdamOptions adam = {.lr = 1e-3};
    adam.mode = type == "Adam" ? kernels::AdamMode::kAdam : kernels::AdamMode::kAdamW;
    common(&adam);
    betas(&adam);
    options.Take("eps", &adam.eps);
    made = adam;
  } else if (type == "Adagrad") {
    kernels::AdagradOptions adagrad;
    common(&adagrad);
    options.Take("lr_decay", &adagrad.lr_decay);
    options.Take("eps", &adagrad.eps);
    made = adagrad;
  } else if (type == "Lion") {
    kernels::LionOptions lion;
    common(&lion);
    betas(&lion);
    made = lion;
  } else if (type == "SGD") {
    kernels::SgdOptions sgd;
    common(&sgd);
    options.Take("momentum", &sgd.momentum);
    options.Take("dampening", &sgd.dampening);
    options.Take("nesterov", &sgd.nesterov);
    made = sgd;
  } else {
    options.Refuse(absl::StrCat("optimizer: there is no ", type));
  }
  RETURN_IF_ERROR(options.Done());
  return made;
}

// As MakeOptimizer reads it.
Json OptimizerJson(const run::OptimizerConfig& config) {
  if (!config.type.has_value()) return nullptr;
  const bool adam = config.type == run::OptimizerType::kAdam || config.type == run::OptimizerType::kAdamW;
  Json json = {{"type", std::string(run::Name(!adam                     ? *config.type
                                              : config.DecoupledDecay() ? run::OptimizerType::kAdamW
                                                                        : run::OptimizerType::kAdam))}};
  const auto add = [&](const char* name, const auto& value) {
    if (value.has_value()) json[name] = *value;
  };
  add("lr", config.lr);
  add("beta1", config.beta1);
  add("beta2", config.beta2);
  add("weight_decay", config.weight_decay);
  const bool has_eps = adam || config.type == run::OptimizerType::kAdagrad;
  if (has_eps) add("eps", config.eps);
  if (config.type == run::OptimizerType::kAdagrad) add("lr_decay", config.lr_decay);
  if (config.type == run::OptimizerType::kSgd) {
    add("momentum", config.momentum);
    add("dampening", config.dampening);
    add("nesterov", config.nesterov);
  }
  return json;
}

absl::StatusOr<run::ParsedConfig> ParseAndFill(const std::string& text, int64_t total_steps,
                                               std::vector<std::string>* filled) {
  ASSIGN_OR_RETURN(run::ParsedConfig parsed, run::ParseConfig(text));
  // Of Penstock's own keys alone nothing follows for what is computed: a loop that does not clip stays one.
  if (!parsed.deepspeeds) parsed.config.gradient_clipping = 0;
  const int64_t steps = total_steps > 0 ? total_steps : std::numeric_limits<int32_t>::max();
  *filled = run::FillDefaults(parsed.autos, steps, std::min<int64_t>(100, steps / 10), &parsed.config);
  return parsed;
}

// Nothing is watched unasked: a stage lasts as long as its owner stops in a debugger. Who is ended is told
// before.
zero::WatchOptions WatchOf(const run::PenstockConfig& config) {
  zero::WatchOptions watch;
  watch.hopeless_seconds = config.watchdog_abort_seconds.value_or(0);
  watch.stuck_seconds = config.watchdog_seconds.value_or(watch.hopeless_seconds / 2);
  return watch;
}

// The batch sizes that elasticity chooses, in the place of the configuration's.
absl::Status ChooseElasticBatch(int world, run::ParsedConfig* parsed) {
  run::Config& config = parsed->config;
  ASSIGN_OR_RETURN(const run::ElasticBatch batch, run::ComputeElasticBatch(config.elasticity));
  ASSIGN_OR_RETURN(const int64_t micro, run::ElasticMicroBatch(config.elasticity, batch, world));
  config.train_batch_size = batch.train_batch;
  config.micro_batch_per_rank = micro;
  config.gradient_accumulation_steps = batch.train_batch / world / micro;
  parsed->notes.push_back(absl::StrCat("elasticity: ", batch.train_batch, " sequences a step, for ",
                                       batch.RanksText(), " ranks; the script gives each of ", world,
                                       " in a step ", *config.gradient_accumulation_steps,
                                       " micro-batches of ", micro));
  return absl::OkStatus();
}

}  // namespace

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
  for (const auto& [name, block, forward_seconds, backward_seconds] : stages) {
    measured.graph.stages.push_back({.name = name,
                                     .block = tiering::BlockIndex(block),
                                     .forward_seconds = forward_seconds,
                                     .backward_seconds = backward_seconds});
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

absl::StatusOr<GivenOptions> MakeOptions(const std::string& text, std::shared_ptr<zero::Comm> comm) {
  Options given(ParseJson(text));
  GivenOptions made;
  zero::EngineOptions& options = made.engine;
  options.comm = std::move(comm);
  std::string dtype = "fp32", states = "fp32", config;
  Json optimizer = Json::object();
  given.Take("dtype", &dtype);
  if (const auto type = zero::ParseDType(dtype); type.has_value()) {
    options.dtype = *type;
  } else {
    given.Refuse(absl::StrCat("dtype: there is no ", dtype));
  }
  given.Take("config", &config);
  given.Take("micro_batches", &options.micro_batches);
  given.Take("seed", &options.seed);
  given.Take("input_gradients", &made.input_gradients);
  given.Take("resident_bytes", &made.resident_bytes);
  given.Take("host_memory", &options.memory.host_memory_budget_bytes);
  TakeWord(given, "offload",
           {zero::OffloadDevice::kNone, zero::OffloadDevice::kCpu, zero::OffloadDevice::kNvme},
           &options.storage.offload);
  given.Take("state_dirs", &options.storage.state_dirs);
  given.Take("state_dir_weights", &options.storage.state_dir_weights);
  given.Take("overwrite", &options.storage.overwrite);
  given.Take("resume", &options.resume.enabled);
  options.storage.checkpoints.on_demand = true;
  given.Take("trains", &options.trains);
  given.Take("new_weights", &options.new_weights);
  given.Take("run", &options.resume.run);
  given.Take("run_changes", &options.resume.run_changes);
  given.Take("clip", &options.optimizer.clip);
  given.Take("optimizer_states", &states);
  if (const auto type = zero::ParseStateType(states); type.has_value()) {
    options.optimizer.states = *type;
  } else {
    given.Refuse(absl::StrCat("optimizer_states: there is no ", states));
  }
  given.Take("optimizer", &optimizer);
  bool device_computes = false;  // to which who owns the model copies
  given.Take("device_computes", &device_computes);
  options.optimizer.workers = zero::DefaultUpdateThreads(
      device_computes, options.comm != nullptr ? options.comm->environment().local_world : 1);
  given.Take("restore_from", &made.restore_from);
  Json imported;
  given.Take("import", &imported);
  if (imported.is_object()) made.imported = MakeImport(imported);
  RETURN_IF_ERROR(given.Done());
  ASSIGN_OR_RETURN(options.optimizer.algorithm, MakeOptimizer(optimizer));
  if (!config.empty()) {
    std::vector<std::string> filled;
    ASSIGN_OR_RETURN(const run::ParsedConfig parsed, ParseAndFill(config, 0, &filled));
    run::ApplyConfig(parsed.config, &options);
    const run::PenstockConfig& own = parsed.config.penstock;
    made.breaks_down = parsed.config.wall_clock_breakdown.value_or(false);
    made.logs_exchanges = parsed.config.comms_logger.value_or(false);
    options.watch = WatchOf(own);
    options.storage.durability = own.durability.value_or(zero::Durability::kStep);
    options.storage.sync = own.sync == zero::SyncMode::kPower ? swap::Sync::kPower : swap::Sync::kProcess;
    options.storage.versions = static_cast<int>(own.versions.value_or(0));
    options.optimizer.workers = static_cast<int>(own.update_threads.value_or(options.optimizer.workers));
    ASSIGN_OR_RETURN(const zero::LossScaler scaler, run::MakeLossScaler(parsed.config.fp16));
    options.optimizer.loss_scale = scaler.options();
  }
  // As much as it likes would be what is in flight: what is only evaluated gains by all that stays.
  int64_t& budget = options.memory.host_memory_budget_bytes;
  if (!options.trains && budget == 0) budget = zero::FindHostMemory().free_bytes / 2;
  return made;
}

absl::StatusOr<nlohmann::json> ConfigAsJson(const std::string& text, int64_t total_steps, int world) {
  std::vector<std::string> filled;
  ASSIGN_OR_RETURN(run::ParsedConfig parsed, ParseAndFill(text, total_steps, &filled));
  const run::Config& config = parsed.config;
  if (config.elasticity.on()) {
    RETURN_IF_ERROR(ChooseElasticBatch(world, &parsed));
  }
  for (std::string& note : run::KeysUnusedFromPython(config)) parsed.notes.push_back(std::move(note));
  Json json = {{"notes", parsed.notes}, {"filled", filled}, {"optimizer", OptimizerJson(config.optimizer)}};
  json["monitors"] = config.csv_monitor.on() || config.tensorboard.on();
  json["monitor_directories"] = Json::object();
  for (const auto& [name, monitor] :
       {std::pair{"csv_monitor", &config.csv_monitor}, std::pair{"tensorboard", &config.tensorboard}}) {
    if (monitor->on() && !monitor->output_path.value_or("").empty())
      json["monitor_directories"][name] = *monitor->output_path;
  }
  json["flops_profiler"] = {{"enabled", config.flops_profiler.on()},
                            {"profile_step", config.flops_profiler.profile_step.value_or(1)},
                            {"output_file", config.flops_profiler.output_file.value_or("")}};
  json["elastic"] = config.elasticity.on();
  json["wear_budget_bytes"] = config.penstock.wear_budget_tb.value_or(0) * 1e12;
  const auto add = [&](const char* name, const auto& value) {
    json[name] = value.has_value() ? Json(*value) : Json();
  };
  add("train_batch_size", config.train_batch_size);
  ASSIGN_OR_RETURN(const run::BatchSizes sizes,
                   run::ResolveBatch({.train_batch = config.train_batch_size,
                                      .micro_batch = config.micro_batch_per_rank,
                                      .accumulation = config.gradient_accumulation_steps},
                                     world, /*default_micro_batch=*/1));
  json["gradient_accumulation_steps"] = sizes.accumulation;
  const bool says_batch = config.train_batch_size.has_value() || config.micro_batch_per_rank.has_value();
  json["micro_batch_size"] = says_batch ? Json(sizes.micro_batch) : Json();
  add("clip", config.gradient_clipping);
  add("host_memory", config.penstock.host_memory_budget_bytes);
  add("optimizer_states", config.penstock.optimizer_states);
  json["dtype"] = config.bf16.value_or(false)           ? "bf16"
                  : config.fp16.enabled.value_or(false) ? "fp16"
                                                        : "fp32";
  const auto offload = run::CombinedOffload(config.zero);
  json["offload"] = offload.has_value() ? Json(std::string(zero::Name(*offload))) : Json();
  ASSIGN_OR_RETURN(const run::StateDirectories directories, run::StateDirectoriesOf(config));
  json["state_dirs"] = directories.paths;
  json["state_dir_weights"] = directories.weights;
  json["schedule"] = nullptr;
  if (config.scheduler.has_value()) {
    ASSIGN_OR_RETURN(const zero::LrSchedule schedule,
                     run::MakeSchedule(*config.scheduler, config.optimizer.lr.value_or(1e-3),
                                       total_steps > 0 ? total_steps : std::numeric_limits<int32_t>::max()));
    json["schedule"] = schedule.ToJson();
  }
  return json;
}

absl::StatusOr<std::string> PlainConfig(const std::string& text) {
  ASSIGN_OR_RETURN(const nlohmann::ordered_json config, zero::ParseHjson(text));
  if (!config.is_object()) return absl::InvalidArgumentError("not a configuration: it is no JSON object");
  return config.dump();
}

absl::StatusOr<std::string> SharedConfig(const std::string& text) {
  if (text.empty()) return "{}";
  ASSIGN_OR_RETURN(nlohmann::ordered_json config, zero::ParseHjson(text));
  run::RemoveWhatRanksMayDifferIn(&config);
  return Json(config).dump();
}

absl::StatusOr<std::string> ReadConfigFile(const std::string& path) {
  const auto named = [&path](const absl::Status& status) {
    return absl::InvalidArgumentError(
        absl::StrCat("config file ", zero::Printable(path, 4096), ": ", std::string(status.message())));
  };
  const absl::StatusOr<std::string> text = ReadSmallFile(path);
  if (!text.ok()) return named(text.status());
  absl::StatusOr<std::string> config = PlainConfig(*text);
  if (!config.ok()) return named(config.status());
  return config;
}

absl::StatusOr<Json> ElasticBatchAsJson(const std::string& text, int world) {
  ASSIGN_OR_RETURN(const run::ParsedConfig parsed, run::ParseConfig(text));
  const run::ElasticityConfig& config = parsed.config.elasticity;
  ASSIGN_OR_RETURN(const run::ElasticBatch batch, run::ComputeElasticBatch(config));
  Json json = {{"train_batch", batch.train_batch}, {"ranks", batch.ranks}, {"micro_batch", nullptr}};
  if (world > 0) {
    ASSIGN_OR_RETURN(const int64_t micro, run::ElasticMicroBatch(config, batch, world));
    json["micro_batch"] = micro;
  }
  return json;
}

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
          {"peak_managed_bytes", engine.peak_managed_bytes()},
          {"on_nvme", plan.plan.on_nvme},
          {"nvme_read_bytes_per_step", plan.plan.nvme_read_bytes},
          {"nvme_write_bytes_per_step", plan.plan.nvme_write_bytes},
          {"io_backend", engine.io_backend()},
          {"run", engine.run()}};
}

}  // namespace penstock::python
