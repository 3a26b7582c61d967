#include "deepspeed_checkpoint.h"

#include <algorithm>
#include <exception>
#include <map>
#include <new>
#include <span>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "models/deepspeed/universal.h"
#include "models/weights/torch_file.h"
#include "swap/safetensors.h"
#include "tiering/plan/model_graph.h"
#include "zero/compute/missed_updates.h"
#include "zero/engine/new_state.h"
#include "zero/engine/rank_agreement.h"
#include "zero/engine/restore.h"
#include "zero/engine/state_identity.h"

namespace penstock::python {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kExportMemoryBytes = uint64_t{48} << 20;

models::PublishedTensor TensorOf(std::string name, const std::vector<int64_t>& sizes) {
  models::PublishedTensor tensor;
  tensor.name = std::move(name);
  tensor.rows = 1;
  for (const int64_t size : sizes) tensor.rows *= size;
  tensor.shape = std::vector<uint64_t>(sizes.begin(), sizes.end());
  return tensor;
}

absl::Status AddBuffers(const models::DeepSpeedCheckpoint& checkpoint, const std::vector<std::string>& wanted,
                        const models::NameMap& names, int64_t most_bytes, Json* to) {
  (*to)["buffers"] = Json::object();
  for (const char* kept : {"large_buffers", "missing_buffers", "unreadable_buffers"})
    (*to)[kept] = Json::array();
  int64_t bytes = 0;
  for (const std::string& name : wanted) {
    const models::TorchValue found = checkpoint.FindModuleBuffer(name, names);
    const models::TorchTensor* const tensor = found.tensor();
    const char* const dtype = tensor == nullptr ? nullptr : TorchName(tensor->dtype);
    if (dtype == nullptr) {
      (*to)[found ? "unreadable_buffers" : "missing_buffers"].push_back(name);
      continue;
    }
    const auto width = static_cast<int64_t>(swap::DtypeBytes(tensor->dtype));
    if (tensor->elements > (most_bytes - bytes) / width) {
      (*to)["large_buffers"].push_back(name);
      continue;
    }
    bytes += tensor->elements * width;
    std::vector<std::byte> values(static_cast<size_t>(tensor->elements * width));
    RETURN_IF_ERROR(checkpoint.ReadModuleBuffer(*tensor, values));
    const absl::string_view raw(reinterpret_cast<const char*>(values.data()), values.size());
    (*to)["buffers"][name] = {{"__penstock__", "tensor"},
                              {"dtype", dtype},
                              {"shape", tensor->sizes},
                              {"value", absl::Base64Escape(raw)}};
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<models::DeepSpeedCheckpoint>> OpenCheckpoint(const std::string& path,
                                                                            models::ModelLayout layout,
                                                                            const models::NameMap& names) {
  return models::DeepSpeedCheckpoint::Open(
      path, std::move(layout), names, {.names = "names=", .model = "load it into the model that it is of"});
}

}  // namespace

const char* TorchName(swap::Dtype dtype) {
  switch (dtype) {
    case swap::Dtype::kBool:
      return "bool";
    case swap::Dtype::kU8:
      return "uint8";
    case swap::Dtype::kI8:
      return "int8";
    case swap::Dtype::kI16:
      return "int16";
    case swap::Dtype::kI32:
      return "int32";
    case swap::Dtype::kI64:
      return "int64";
    case swap::Dtype::kF16:
      return "float16";
    case swap::Dtype::kBf16:
      return "bfloat16";
    case swap::Dtype::kF32:
      return "float32";
    case swap::Dtype::kF64:
      return "float64";
    default:
      return nullptr;
  }
}

absl::StatusOr<models::ModelLayout> ModelLayoutOf(const std::vector<std::vector<std::string>>& names,
                                                  const Layouts& layouts) {
  models::ModelLayout made;
  if (names.size() != layouts.size())
    return absl::InvalidArgumentError(
        absl::StrCat("names of ", names.size(), " blocks, and there are ", layouts.size()));
  for (size_t b = 0; b < layouts.size(); ++b) {
    const zero::FlatLayout& layout = *layouts[b];
    if (names[b].size() != layout.parameters.size())
      return absl::InvalidArgumentError(absl::StrCat("block ", b, " has ", layout.parameters.size(),
                                                     " parameters, and ", names[b].size(),
                                                     " names are given"));
    for (const size_t p : layout.InOrder()) {
      models::PublishedTensor& tensor =
          made.tensors.emplace_back(TensorOf(names[b][p], layout.parameters[p].sizes));
      tensor.block = static_cast<int>(b);
      tensor.offset = layout.parameters[p].offset;
    }
    made.block_elements.push_back(layout.elements);
  }
  return made;
}

absl::StatusOr<Json> DescribeCheckpoint(const std::string& path, const std::vector<NamedShape>& parameters,
                                        const models::NameMap& names, const std::vector<std::string>& buffers,
                                        int64_t most_buffer_bytes) {
  models::ModelLayout layout;
  for (const auto& [name, sizes] : parameters) layout.tensors.push_back(TensorOf(name, sizes));
  models::NameMap of_parameters = names, of_buffers;
  for (const std::string& name : buffers) {
    if (auto named = of_parameters.extract(name)) of_buffers.insert(std::move(named));
  }
  ASSIGN_OR_RETURN(const auto checkpoint, OpenCheckpoint(path, std::move(layout), of_parameters));
  const models::DeepSpeedProgress& progress = checkpoint->progress();
  Json json = {
      {"directory", checkpoint->directory()},  {"format", progress.format},   {"step", progress.step},
      {"updates", progress.updates},           {"samples", progress.samples}, {"groups", progress.groups},
      {"lr_scheduler", progress.lr_scheduler}, {"client", progress.client},   {"unread", progress.unread}};
  RETURN_IF_ERROR(AddBuffers(*checkpoint, buffers, of_buffers, most_buffer_bytes, &json));
  RETURN_IF_ERROR(checkpoint->CheckRead());
  return json;
}

absl::Status VerifyDeepSpeedCheckpoint(const std::string& path, const std::vector<NamedShape>& parameters,
                                       const models::NameMap& names, int rank, int world) {
  constexpr int64_t kPiece = int64_t{1} << 18;
  models::ModelLayout layout;  // each parameter is a block
  for (const auto& [name, sizes] : parameters) {
    models::PublishedTensor& tensor = layout.tensors.emplace_back(TensorOf(name, sizes));
    tensor.block = static_cast<int>(layout.block_elements.size());
    layout.block_elements.push_back(tensor.elements());
  }
  const std::vector<int64_t> elements = layout.block_elements;
  ASSIGN_OR_RETURN(const auto checkpoint, OpenCheckpoint(path, std::move(layout), names));
  std::vector<float> values(kPiece);
  for (int block = rank; block < static_cast<int>(elements.size()); block += world) {
    const int64_t all = elements[static_cast<size_t>(block)];
    for (int64_t first = 0; first < all; first += kPiece) {
      for (const auto kind :
           {zero::StateKind::kParameter, zero::StateKind::kFirstMoment, zero::StateKind::kSecondMoment}) {
        RETURN_IF_ERROR(checkpoint->Read(kind, block, first, std::min(kPiece, all - first), values.data()));
      }
    }
  }
  return checkpoint->CheckRead();
}

GivenImport MakeImport(const Json& given) {
  GivenImport made;
  given.at("path").get_to(made.path);
  given.at("names").get_to(made.names);
  given.at("parameters").get_to(made.parameters);
  given.at("step").get_to(made.step);
  given.at("updates").get_to(made.updates);
  given.at("is_read_once").get_to(made.is_read_once);
  made.description = given.at("description");
  return made;
}

namespace {

// What each parameter that trains has missed, by the counts of a checkpoint that was opened with
// ModelLayoutOf(layouts).
zero::MissedUpdates MissedOf(const models::DeepSpeedCheckpoint& checkpoint, const Layouts& layouts) {
  std::vector<int64_t> all;
  size_t tensor = 0;
  for (size_t b = 0; b < layouts.size(); ++b) {
    std::vector<int64_t> of_block(layouts[b]->parameters.size());
    for (const size_t p : layouts[b]->InOrder())
      of_block[p] = checkpoint.progress().updates - checkpoint.updates()[tensor++];
    for (size_t p = 0; p < of_block.size(); ++p) {
      if (layouts[b]->parameters[p].trains) all.push_back(of_block[p]);
    }
  }
  return zero::MissedUpdates::Of(std::move(all));
}

}  // namespace

absl::Status ImportRun(const GivenImport& given, const zero::Measured& model, const Layouts& layouts,
                       const zero::EngineOptions& options, bool is_verified) {
  ASSIGN_OR_RETURN(models::ModelLayout layout, ModelLayoutOf(given.parameters, layouts));
  zero::NewState state;
  state.format = zero::FormatOf(options);
  state.identity = zero::IdentityOf(model.identity, options, state.format, model.graph).dump();
  std::vector<int64_t> first_of;  // this rank's elements of each block
  for (const int64_t elements : layout.block_elements) {
    const int64_t part = tiering::ShardElements(elements, options.world());
    state.block_elements.push_back(part);
    first_of.push_back(options.rank() * part);
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<models::DeepSpeedCheckpoint> checkpoint,
                   OpenCheckpoint(given.path, std::move(layout), given.names));
  const models::DeepSpeedProgress& progress = checkpoint->progress();
  if (progress.step != given.step || progress.updates != given.updates)
    return absl::InvalidArgumentError(absl::StrCat(
        checkpoint->directory(), " is at step ", progress.step, " now, and was at step ", given.step,
        " when it was looked at (", progress.updates, " and ", given.updates, " updates): load it again"));
  std::string note;
  ASSIGN_OR_RETURN(const Json loss_scale,
                   models::LossScaleOf(state.format.weights, options.optimizer.loss_scale, progress, &note));
  Json run = options.resume.run;
  run["imported"] = {
      {"format", progress.format}, {"step", progress.step}, {"torch_optimizer", progress.step_is_tensor}};
  if (!note.empty()) run["imported"]["note"] = note;
  const zero::MissedUpdates missed = MissedOf(*checkpoint, layouts);
  state.payload = Json{{"run", std::move(run)},
                       {"schedule", nullptr},  // rates are Python's
                       {"loss_scale", loss_scale},
                       {"missed_updates", missed.ToJson()},
                       {"step", given.description}}
                      .dump();
  state.store.payload_capacity += static_cast<uint64_t>(
      zero::MissedUpdates::MostBytes(zero::TrainedParameters(zero::GradientSums::Layouts(layouts))));
  state.check = [&] { return checkpoint->CheckRead(); };
  state.step = progress.step;
  state.updates = progress.updates;
  state.tile_bytes = options.memory.tile_bytes;
  state.store.directories = options.storage.state_dirs;
  state.store.weights = zero::ChooseStripes(options.storage, options.memory.host_memory_budget_bytes).weights;
  state.store.sync = options.storage.sync;
  state.store.overwrite = true;  // Python has asked
  state.store.overwrites_only = options.storage.overwrites_only;
  if (options.storage.versions > 0) state.store.slots = static_cast<uint32_t>(options.storage.versions);
  if (given.is_read_once) state.store.slots = 1;
  const auto read = [&](zero::StateKind kind, int block, int64_t first, int64_t elements, float* to) {
    return checkpoint->Read(kind, block, first_of[static_cast<size_t>(block)] + first, elements, to);
  };
  ASSIGN_OR_RETURN(const bool replaces, zero::ReplacesCommits(options));
  if (replaces && !is_verified) RETURN_IF_ERROR(zero::ReadWhole(state, read));
  // Ranks meet here: none replaces anything before all have read theirs.
  if (options.comm != nullptr) {
    ASSIGN_OR_RETURN(state.store.uuid, zero::AgreeOnNewStore(*options.comm, state.store));
  }
  return zero::WriteNewState(state, read, [](uint64_t, uint64_t) {});
}

namespace {

// What parameters have missed, by block and offset; those that are not there have missed none.
std::map<std::pair<int, int64_t>, int64_t> MissedByPlace(const zero::Engine& engine) {
  std::map<std::pair<int, int64_t>, int64_t> missed;
  const std::span<const int64_t> counts = engine.missed_updates().counts();
  size_t at = 0;
  for (const tiering::BlockIndex block : engine.layouts().indices()) {
    for (const zero::Parameter& parameter : engine.layouts()[block]->parameters) {
      if (!parameter.trains || counts.empty()) continue;
      if (const int64_t count = counts[at++]; count > 0) missed[{block.value(), parameter.offset}] = count;
    }
  }
  return missed;
}

absl::Status Export(zero::Engine& engine, const models::ModelLayout& layout, const Json& what) {
  models::UniversalOptions options;
  what.at("directory").get_to(options.directory);
  what.at("tag").get_to(options.tag);
  what.at("overwrite").get_to(options.overwrite);
  what.at("names").get_to(options.names);
  what.at("torch_optimizer").get_to(options.step_is_tensor);
  what.at("has_scheduler").get_to(options.has_scheduler);
  options.memory_bytes = kExportMemoryBytes;
  models::DeepSpeedProgress progress;
  progress.version = models::kDeepSpeedVersion;
  progress.step = engine.step();
  progress.groups = what.at("groups");
  progress.lr_scheduler = what.at("lr_scheduler");
  progress.client = what.at("client");
  what.at("samples").get_to(progress.samples);
  return engine.ReadRanges([&](const zero::Engine::ReadRange& read) {
    progress.updates = engine.updates();
    if (const auto missed = MissedByPlace(engine); !missed.empty()) {
      options.updates_of = [&engine, missed](const models::PublishedTensor& tensor) {
        const auto found = missed.find({tensor.block, tensor.offset});
        return engine.updates() - (found != missed.end() ? found->second : 0);
      };
    }
    if (engine.plan().format.weights == kernels::DType::kFp16)
      progress.loss_scaler = models::LossScalerOf(engine.loss_scaler().ToJson());
    return models::WriteUniversal(progress, layout, read, options);
  });
}

}  // namespace

// On a thread of the engine's, which no exception may leave.
absl::Status ExportRun(zero::Engine& engine, const models::ModelLayout& layout, const Json& what) {
  try {
    return Export(engine, layout, what);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("export_checkpoint: there is not enough memory");
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("export_checkpoint: ", error.what()));
  }
}

}  // namespace penstock::python
