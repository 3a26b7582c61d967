#include "zero/engine/engine_state.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/arena.h"
#include "base/status_macros.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tiering/plan/plan_layout.h"
#include "zero/compute/initial_values.h"
#include "zero/compute/measure.h"
#include "zero/compute/stage_runner.h"
#include "zero/config/json_field.h"
#include "zero/engine/json_difference.h"
#include "zero/engine/rank_agreement.h"
#include "zero/lanes/hardware_lanes.h"
#include "zero/memory/activation_spill.h"
#include "zero/memory/guarded.h"
#include "zero/memory/host_memory.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

constexpr uint64_t kInitializationSalt = 0x696e6974;  // keeps initial values apart from dropout's seeds

size_t At(int index) { return static_cast<size_t>(index); }

// Where an identity names the optimizer's states, and what runs had that name none.
constexpr const char* kOptimizer = "optimizer";
constexpr const char* kOptimizerStates = "optimizer_states";
constexpr const char* kBlockElements = "block_elements";

// Whose part it is of. One rank's state is named as it always was.
void NameRank(const EngineOptions& options, nlohmann::json* identity) {
  if (options.world() > 1) identity->update({{"ranks", options.world()}, {"rank", options.rank()}});
}

nlohmann::json IdentityOf(const Model& model, const EngineOptions& options, const TileFormat& format,
                          const tiering::ModelGraph& graph) {
  nlohmann::json elements = nlohmann::json::array();
  for (const tiering::BlockShape& block : graph.blocks) elements.push_back(block.elements);
  nlohmann::json identity = {{"model", model.identity},
                             {"dtype", std::string(DTypeName(format.weights))},
                             {kOptimizer, OptimizerName(options.optimizer)},
                             {kOptimizerStates, std::string(StateTypeName(format.states))},
                             {"seed", options.seed},
                             {kBlockElements, std::move(elements)}};
  NameRank(options, &identity);
  return identity;
}

// The identity of the run that is there. Older runs, which do not say it, have Adam's states in fp32.
nlohmann::json IdentityThere(const swap::Inspection& found, bool with_rank) {
  nlohmann::json theirs = nlohmann::json::parse(found.shape.identity, nullptr, /*allow_exceptions=*/false);
  if (!theirs.is_object()) return theirs;
  if (!with_rank) theirs = WholeIdentity(found.shape.identity);
  theirs.emplace(kOptimizer, "adam");
  theirs.emplace(kOptimizerStates, std::string(StateTypeName(kernels::StateType::kFp32)));
  return theirs;
}

// Whoever only evaluates takes optimizer and seed of the run as they are.
void Adopt(const nlohmann::json& theirs, TileFormat* format, nlohmann::json* ours) {
  if (!theirs.is_object()) return;
  for (const char* key : {kOptimizer, kOptimizerStates, "seed"})
    (*ours)[key] = theirs.value(key, nlohmann::json());
  const auto text = [&](const char* key) {
    return theirs[key].is_string() ? theirs[key].get<std::string>() : std::string();
  };
  format->moments = MomentsByName(text(kOptimizer)).value_or(format->moments);
  format->states = ParseStateType(text(kOptimizerStates)).value_or(format->states);
}

absl::StatusOr<std::vector<std::vector<int64_t>>> TilesOf(const swap::StoreShape& shape,
                                                          const tiering::ModelGraph& graph, int world,
                                                          const tiering::Precision& precision) {
  std::vector<std::vector<int64_t>> tiles;
  size_t next = 0;
  for (const tiering::BlockShape& block : graph.blocks) {
    std::vector<int64_t>& of_block = tiles.emplace_back();
    for (int64_t elements = 0; elements < tiering::ShardElements(block.elements, world);) {
      if (next == shape.tiles.size())
        return absl::DataLossError("the store has fewer tiles than its model needs");
      const swap::TileLayout& tile = shape.tiles[next++].layout;
      const auto of_tile = tile.segment_bytes.empty()
                               ? 0
                               : static_cast<int64_t>(tile.segment_bytes[0]) / precision.weight_bytes();
      bool fits = of_tile > 0 && tile.segment_bytes.size() == precision.segment_bytes.size();
      for (size_t s = 0; fits && s < tile.segment_bytes.size(); ++s) {
        fits = static_cast<int64_t>(tile.segment_bytes[s]) == precision.SegmentBytes(s, of_tile);
      }
      if (!fits)
        return absl::DataLossError(
            absl::StrCat("tile ", next - 1, " of the store is not one of its model's"));
      of_block.push_back(of_tile);
      elements += of_tile;
    }
  }
  if (next != shape.tiles.size()) return absl::DataLossError("the store has more tiles than its model needs");
  return tiles;
}

swap::TileLayout TileLayoutOf(const tiering::Precision& precision, int64_t elements) {
  swap::TileLayout layout;
  for (size_t s = 0; s < precision.segment_bytes.size(); ++s)
    layout.segment_bytes.push_back(static_cast<uint64_t>(precision.SegmentBytes(s, elements)));
  layout.scratch_bytes = static_cast<uint64_t>(elements * precision.gradient_bytes);
  return layout;
}

// Slots of a new store.
uint32_t VersionsOf(const EngineOptions& options, swap::StoreOptions store, const swap::Layout& layout,
                    const std::string& identity, std::span<const uint64_t> besides = {}) {
  if (options.versions > 0) return static_cast<uint32_t>(options.versions);
  // With a third version a checkpoint is copied at leisure; it is worth its space where there is any. Where
  // only checkpoints are commits, the second one is free meanwhile.
  if (!options.trains || options.checkpoints.every == 0) return 2;
  if (options.durability == Durability::kCheckpoint) return 2;
  store.slots = 3;
  return swap::CheckSpace(store, OfAllHere(layout, options), identity, besides).ok() ? 3 : 2;
}

// The same for all ranks: the least of theirs.
absl::StatusOr<uint32_t> AgreeOnVersions(Comm* comm, uint32_t mine) {
  if (comm == nullptr) return mine;
  absl::StatusOr<std::vector<int64_t>> all = AllNumbers(*comm, "the versions", mine);
  if (!all.ok()) return all.status();
  return static_cast<uint32_t>(*std::min_element(all->begin(), all->end()));
}

// Byte counts of what an identity says that its tiles are of; kFailedPrecondition: it says none.
absl::StatusOr<tiering::Precision> PrecisionOf(const nlohmann::json& identity, const std::string& path) {
  const auto text = [&](const char* key, const char* otherwise) {
    return JsonField<std::string>(identity, key).value_or(otherwise);
  };
  TileFormat format;
  const std::optional<kernels::DType> weights = ParseDType(text("dtype", ""));
  const std::optional<Moments> moments = MomentsByName(text(kOptimizer, "adam"));
  const std::optional<kernels::StateType> states = ParseStateType(text(kOptimizerStates, "fp32"));
  if (!weights.has_value() || !moments.has_value() || !states.has_value() ||
      !identity.contains(kBlockElements)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " does not say what its tiles hold"));
  }
  format.weights = *weights;
  format.moments = *moments;
  format.states = *states;
  return format.precision();
}

// The runs of its blocks; kDataLoss: no model has such.
absl::StatusOr<std::vector<int64_t>> BlockElementsOf(const nlohmann::json& identity,
                                                     const std::string& path) {
  constexpr int64_t kMost = int64_t{1} << 50;
  const auto elements = JsonField<std::vector<int64_t>>(identity, kBlockElements);
  const auto possible = [](int64_t each) {
    return each > 0 && each <= kMost && each % tiering::kElementAlignment == 0;
  };
  if (elements.has_value() && !elements->empty() && std::all_of(elements->begin(), elements->end(), possible))
    return *elements;
  return absl::DataLossError(
      absl::StrCat(path, ": the sizes of its blocks are none that a model has: its identity is damaged"));
}

// This rank's part of a checkpoint of another number of ranks.
absl::Status RestorePart(aio::Engine& io, const ShardDirectories& parts,
                         const std::vector<swap::Inspection>& inspections, const EngineOptions& options,
                         swap::StoreOptions to_options) {
  nlohmann::json identity = WholeIdentity(inspections.front().shape.identity);
  absl::StatusOr<tiering::Precision> precision = PrecisionOf(identity, parts.front().front());
  if (!precision.ok()) return precision.status();
  ASSIGN_OR_RETURN(std::vector<int64_t> elements, BlockElementsOf(identity, parts.front().front()));
  const uint64_t source_bytes = ShardedState::MemoryBytes(inspections);
  aio::ArenaOptions arena_options;
  arena_options.lock = false;
  arena_options.bytes = source_bytes;
  ASSIGN_OR_RETURN(std::unique_ptr<aio::Arena> source, aio::Arena::Create(arena_options));
  ASSIGN_OR_RETURN(
      std::unique_ptr<ShardedState> from,
      ShardedState::Open(io, parts, inspections, elements, *precision, {source->data(), source_bytes}));

  // Tiles of the size that they had.
  struct Place {
    int block;
    tiering::Tile range;  // of the run
  };
  std::vector<Place> places;
  swap::Layout layout;
  for (size_t b = 0; b < elements.size(); ++b) {
    const int64_t part = tiering::ShardElements(elements[b], options.world());
    for (const tiering::Tile& tile : tiering::CutTiles(part, from->LargestTile(static_cast<int>(b)))) {
      places.push_back({static_cast<int>(b), {options.rank() * part + tile.offset, tile.elements}});
      layout.tiles.push_back(TileLayoutOf(*precision, tile.elements));
    }
  }
  NameRank(options, &identity);
  absl::StatusOr<uint32_t> slots =
      AgreeOnVersions(options.comm.get(), VersionsOf(options, to_options, layout, identity.dump()));
  if (!slots.ok()) return slots.status();
  to_options.slots = *slots;
  ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> to,
                   swap::Store::Create(io, to_options, layout, identity.dump()));
  arena_options.bytes = std::max<uint64_t>(swap::kBlockBytes, to->geometry().largest_slot_bytes());
  ASSIGN_OR_RETURN(std::unique_ptr<aio::Arena> target, aio::Arena::Create(arena_options));
  const swap::Recovered& recovered = from->recovered();
  const uint64_t version = VersionAfter(static_cast<int64_t>(recovered.step));
  swap::TileIo io_of_tile;
  std::array<void*, swap::kMaxSegments> memory;
  for (uint32_t t = 0; t < places.size(); ++t) {
    const auto& [block, range] = places[t];
    const std::span<void* const> segments = to->geometry().SegmentPlaces(t, target->data(), &memory);
    absl::Status status = from->Read(block, range.offset, range.elements, segments);
    if (!status.ok()) return status;
    const std::vector<const void*> sources(segments.begin(), segments.end());
    status = to->WriteTileNow(&io_of_tile, t, version, sources, aio::Priority::kWriteBehind);
    if (!status.ok()) return status;
  }
  return to->CommitNow({.step = recovered.step, .updates = recovered.updates, .payload = recovered.payload});
}

}  // namespace

absl::StatusOr<TileFormat> FormatOf(const EngineOptions& options) {
  TileFormat format;
  if (options.dtype == torch::kBFloat16) {
    format.weights = kernels::DType::kBf16;
  } else if (options.dtype == torch::kHalf) {
    format.weights = kernels::DType::kFp16;
  } else if (options.dtype == torch::kFloat32) {
    format.weights = kernels::DType::kFp32;
  } else {
    return absl::InvalidArgumentError("weights are bf16, fp16 or fp32");
  }
  format.states = options.optimizer_states;
  format.moments = MomentsOf(options.optimizer);
  return format;
}

swap::Layout LayoutOf(const tiering::Plan& plan) {
  swap::Layout layout;
  for (const tiering::BlockPlan& block : plan.blocks) {
    for (const tiering::Tile& tile : block.tiles) {
      layout.tiles.push_back(TileLayoutOf(plan.precision, tile.elements));
    }
  }
  return layout;
}

swap::Layout OfAllHere(const swap::Layout& layout, const EngineOptions& options) {
  const int here = options.comm != nullptr ? options.comm->environment().local_world : 1;
  swap::Layout all;
  for (int k = 0; k < here; ++k) all.tiles.insert(all.tiles.end(), layout.tiles.begin(), layout.tiles.end());
  return all;
}

namespace {

void Doing(const EngineOptions& options, const std::string& what) {
  if (options.preparing) options.preparing(what);
}

// Measured within the budget, and within what is free. A budget that is too small for that is refused; how
// much would do is known if it can be found out in the memory that the machine has free. *beyond: it was, and
// the budget was not kept.
absl::StatusOr<MeasuredModel> MeasureWithin(const Model& model, const EngineOptions& options,
                                            kernels::DType weights, bool* beyond) {
  const int64_t budget = options.host_memory_bytes;
  // What a killed process could not say.
  const int64_t free = std::max<int64_t>(1, FindHostMemory().free_bytes);  // 0 would be no bound
  MeasureOptions measure;
  measure.weights = weights;
  measure.trains = options.trains;
  measure.times = options.measures_time;
  measure.doing = options.preparing;
  // The tensors of a device apart may be the host's too, and are no part of the host's budget.
  const bool counts = !options.device->has_own_memory() || !options.device->tensors_are_host();
  const auto within = [&](int64_t bytes) {
    measure.host_memory_bytes = bytes;
    const TensorMemoryLimit limit(counts ? bytes : 0);
    return MeasureModel(model, options.example, measure, *options.device);
  };
  *beyond = false;
  absl::StatusOr<MeasuredModel> measured = within(budget > 0 ? std::min(budget, free) : free);
  if (!absl::IsResourceExhausted(measured.status())) return measured;
  const std::string why(measured.status().message());
  const std::string here = absl::StrCat(free, " bytes are free here");
  const char* const less = "; a smaller micro-batch or sequence takes less, and so do smaller blocks";
  if (budget == 0) return absl::ResourceExhaustedError(absl::StrCat(why, "; ", here, less));
  if (budget > free) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a host memory budget of ", budget, " bytes is more than there is: ", here, ", and ", why, less));
  }
  TensorMemory::Trim();
  TensorMemory::ResetPeak();
  // The rest of the process grows meanwhile, and so do others.
  if (const int64_t most = free / 4 * 3; most > budget) {
    *beyond = true;
    measured = within(most);
    if (!absl::IsResourceExhausted(measured.status())) return measured;
  }
  return absl::FailedPreconditionError(absl::StrCat("a host memory budget of ", budget,
                                                    " bytes is too small, and ", here,
                                                    ", too few to find out what would do: ", why, less));
}

}  // namespace

absl::StatusOr<PreparedModel> PrepareModel(const Model& model, const EngineOptions& options) {
  absl::StatusOr<TileFormat> format = FormatOf(options);
  if (!format.ok()) return format.status();
  if (model.blocks.empty() || model.stages.empty()) {
    return absl::InvalidArgumentError("a model needs at least one block and one stage");
  }
  const bool on_nvme = options.offload == OffloadDevice::kNvme;
  if (on_nvme && options.state_dirs.empty()) {
    return absl::InvalidArgumentError("state on NVMe needs a state directory");
  }
  if (options.resumes() && options.state_dirs.empty()) {
    return absl::FailedPreconditionError(
        "there is nothing to resume: state in memory is gone with its process, and no checkpoint was named");
  }
  PreparedModel prepared;
  EnginePlan& plan = prepared.plan;
  tiering::PlanOptions plan_options;
  plan_options.micro_batches = options.micro_batches;
  plan_options.on_nvme = on_nvme;
  plan_options.trains = options.trains;
  plan_options.host_budget_bytes = options.host_memory_bytes;
  plan_options.tile_bytes = options.tile_bytes;
  plan_options.bounds = options.bounds;
  plan_options.update_order = options.update_order;
  plan_options.clips = options.clip > 0;
  absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> device_storage =
      absl::FailedPreconditionError("not asked for");
  if (Device& device = *options.device; device.has_own_memory()) {
    if (options.gds) device_storage = device.OpenStorage();  // takes memory that is not in its capacity then
    if (options.device_memory_bytes > device.capacity_bytes()) {
      return absl::FailedPreconditionError(
          absl::StrCat("a device memory budget of ", options.device_memory_bytes, " bytes is more than the ",
                       device.capacity_bytes(), " bytes of the device (", device.Describe(), ")"));
    }
    plan_options.device.has_own_memory = true;
    plan_options.device.tensor_slack_bytes = device.tensor_slack_bytes();
    plan_options.device.budget_bytes =
        options.device_memory_bytes > 0 ? options.device_memory_bytes : device.capacity_bytes();
  }
  plan_options.copies_checkpoints = options.trains && options.checkpoints.every > 0;

  // State on a drive stays where it is; what is read into memory, or only evaluated, may be of any number of
  // ranks.
  const bool in_place = on_nvme && options.trains;
  std::vector<swap::Inspection> inspections;
  const swap::Inspection* found = nullptr;  // this rank's part, or the first
  if (options.resumes()) {
    absl::StatusOr<ShardDirectories> parts = FindShards(options.state_dirs);
    if (!parts.ok()) return parts.status();
    ASSIGN_OR_RETURN(std::vector<swap::Inspection> all, InspectShards(*parts));
    plan.parts = std::move(*parts);
    inspections = std::move(all);
    const bool same = plan.parts.size() == static_cast<size_t>(options.world());
    found = &inspections[same ? At(options.rank()) : 0];
    if (in_place && plan.parts.size() > 1) {
      return absl::FailedPreconditionError(absl::StrCat(options.state_dirs.front(), " holds a run of ",
                                                        plan.parts.size(), " ranks, not of one"));
    }
  }
  plan_options.world = options.trains ? options.world() : static_cast<int>(plan.parts.size());
  // A step cannot be durable while the next is written over it.
  const bool one_version = options.resumes() ? found->shape.slots == 1 : options.versions == 1;
  plan_options.commits_every_step =
      !on_nvme || !options.trains || (options.durability == Durability::kStep && !one_version);
  bool beyond_budget = false;
  ASSIGN_OR_RETURN(MeasuredModel measured, MeasureWithin(model, options, format->weights, &beyond_budget));
  if (options.initial_values || options.resumes()) {
    // Nothing is built: its values come from elsewhere.
    for (tiering::BlockShape& block : measured.graph.blocks) block.init_bytes = 0;
  }
  plan.graph = std::move(measured.graph);
  Comm* const comm = options.comm.get();
  if (comm != nullptr) {
    RETURN_IF_ERROR(AgreeOnGraph(*comm, &plan.graph));
    absl::StatusOr<int64_t> budget = AgreeOnBudget(*comm, options.host_memory_bytes);
    if (!budget.ok()) return budget.status();
    plan_options.host_budget_bytes = *budget;
    if (plan_options.device.has_own_memory) {
      // Where weights stay whole in host memory, they are gathered there, once a step. Connecting takes
      // memory.
      if (options.bounds.placement == tiering::Placement::kCuda) {
        prepared.devices.how = "through host memory, where weights stay whole";
      } else {
        absl::StatusOr<DeviceExchange> devices = ConnectDevices(options.comm, *options.device);
        if (!devices.ok()) return devices.status();
        prepared.devices = std::move(*devices);
      }
      plan_options.device.direct = prepared.devices.comm != nullptr;
      budget = AgreeOnDeviceBudget(*comm, *options.device, options.device_memory_bytes);
      if (!budget.ok()) return budget.status();
      plan_options.device.budget_bytes = prepared.devices.budget_bytes = *budget;
    }
  }
  absl::StatusOr<DirectStorage> storage = OpenDirectStorage(
      options, std::move(device_storage), plan_options.world > 1 && !plan_options.device.direct);
  if (!storage.ok()) return storage.status();
  prepared.storage = *std::move(storage);
  plan_options.device.gds = prepared.storage.transfers != nullptr;
  plan.parameters = measured.parameters;
  plan.compute_disturbed = measured.disturbed;
  prepared.modules = measured.modules;
  prepared.identity = IdentityOf(model, options, *format, plan.graph);
  nlohmann::json theirs;
  if (options.resumes()) {
    theirs = IdentityThere(*found, in_place);
    if (!in_place) prepared.identity = WholeIdentity(prepared.identity.dump());
    if (!options.trains) Adopt(theirs, &*format, &prepared.identity);
  }
  plan.format = *format;
  plan_options.precision = format->precision();
  if (options.resumes()) {
    if (theirs != prepared.identity) {
      return absl::FailedPreconditionError(absl::StrCat(
          options.state_dirs.front(), " holds another run: ", JsonDifference(theirs, prepared.identity)));
    }
    if (options.trains) NameRank(options, &prepared.identity);
    if (plan.parts.size() == static_cast<size_t>(plan_options.world) || in_place) {
      ASSIGN_OR_RETURN(std::vector<std::vector<int64_t>> tiles,
                       TilesOf(found->shape, plan.graph, plan_options.world, plan_options.precision));
      plan_options.fixed_tiles = std::move(tiles);
    }
  }
  plan.state_bytes = plan_options.precision.UnpaddedBytes(plan.graph.elements());
  if (options.machine) {
    // A budget that is too small is refused before anything is measured on a drive.
    tiering::PlanOptions any = plan_options;
    any.compares_policies = false;
    ASSIGN_OR_RETURN(tiering::Plan assumed, tiering::MakePlan(plan.graph, any));
    // One rank alone: several would measure each other.
    if (options.rank() == 0) {
      Doing(options, "measuring drive and processor");
      const int64_t budget = options.host_memory_bytes;
      // The least that probing a drive takes (tools/machine/machine_probe.h); of a larger budget, a quarter.
      constexpr int64_t kProbe = int64_t{32} << 20;
      const absl::Status asked = Guarded("measuring the machine", [&] {
        const TensorMemoryLimit limit(budget > 0 ? std::max(budget, kProbe) : 0);
        std::function<void()> compute;
        const bool has_room = budget == 0 || measured.sample_bytes + budget / 4 <= budget;
        if (measured.busiest.stage >= 0 && !options.device->has_own_memory() && has_room)
          compute = BusiestStage(model, measured, options.example, format->weights, *options.device);
        plan_options.machine = options.machine(plan.state_bytes, compute);
      });
      if (!asked.ok()) return asked;
      options.device->TrimTensors();
    }
  }
  if (comm != nullptr) {
    if (absl::Status status =
            AgreeOnMachine(*comm, prepared.devices, plan_options.host_budget_bytes, &plan_options.machine);
        !status.ok())
      return status;
  }
  Doing(options, "planning");
  ASSIGN_OR_RETURN(tiering::Plan made, tiering::MakePlan(plan.graph, plan_options));
  if (beyond_budget) {
    const int64_t least = std::max(made.least_host_memory_bytes, TensorMemory::Stats().peak_bytes);
    return absl::FailedPreconditionError(
        absl::StrCat("a host memory budget of ", options.host_memory_bytes,
                     " bytes is too small: the least that works is ", least,
                     " bytes (measuring takes that much); a smaller micro-batch or sequence takes less"));
  }
  plan.plan = std::move(made);
  if (comm != nullptr) {
    RETURN_IF_ERROR(AgreeOnPlan(*comm, plan.plan));
  }
  plan.options = std::move(plan_options);
  if (on_nvme) {
    swap::StoreOptions store_options;
    store_options.directories = options.state_dirs;
    store_options.overwrite = options.overwrite;
    const swap::Layout layout = LayoutOf(plan.plan);
    absl::StatusOr<uint32_t> slots =
        options.resumes()
            ? found->shape.slots
            : AgreeOnVersions(comm, VersionsOf(options, store_options, layout, prepared.identity.dump(),
                                               ActivationSpill::BytesIn(options.state_dirs.size(), plan.graph,
                                                                        plan.plan)));
    if (!slots.ok()) return slots.status();
    store_options.slots = *slots;
    plan.versions = static_cast<int>(store_options.slots);
    ASSIGN_OR_RETURN(std::vector<uint64_t> bytes,
                     swap::BytesOnDisk(store_options, layout, prepared.identity.dump()));
    for (const uint64_t each : bytes) plan.disk_bytes += static_cast<int64_t>(each);
    plan.disk_bytes += plan.plan.input_scratch_bytes;
  }
  return prepared;
}

absl::Status InitializeState(const Model& model, const EngineOptions& options, const EnginePlan& engine_plan,
                             const ArenaView& residency, const DeviceState* device,
                             const std::vector<BlockModule*>& modules, swap::Store* store,
                             const std::function<void(const std::string&)>& log) {
  const tiering::Plan& plan = engine_plan.plan;
  const TileFormat& format = engine_plan.format;
  // One transfer per ring slot; a slot is filled again when its write is done.
  struct Slot {
    swap::TileIo io;
    std::vector<uint64_t> checksums;
    bool busy = false;
  };
  std::vector<Slot> ring(static_cast<size_t>(std::max(1, plan.tile_ring)));
  auto settle = [&](Slot& slot) {
    if (!slot.busy) return absl::OkStatus();
    slot.busy = false;
    RETURN_IF_ERROR(store->Wait(&slot.io));
    return store->NoteWritten(&slot.io, slot.checksums);
  };
  auto settle_all = [&] {
    absl::Status first;
    for (Slot& slot : ring) first.Update(settle(slot));
    return first;
  };
  uint32_t store_tile = 0;
  size_t next = 0;
  for (size_t b = 0; b < model.blocks.size(); ++b) {
    const tiering::BlockPlan& block = plan.blocks[b];
    const FlatLayout& layout = modules[b]->layout();
    absl::Status refused;  // by initial_values, or the device
    absl::Status status = Guarded(absl::StrCat("building block ", model.blocks[b].name), [&] {
      torch::manual_seed(MixSeed(options.seed, kInitializationSalt, b));
      std::shared_ptr<torch::nn::Module> module;
      std::optional<InitialStream> stream;  // of a block that says what it begins with
      if (!options.initial_values) {
        module = model.blocks[b].build();
        TORCH_CHECK(module != nullptr, "its factory returned nothing");
        TORCH_CHECK(layout.SameShapes(FlatLayout::Of(*module)),
                    "its parameters differ from those of the others of kind ", model.blocks[b].kind);
        if (!model.blocks[b].initial.empty()) stream.emplace(model.blocks[b], layout);
      }
      const int weight_slot = block.private_run_slot >= 0
                                  ? block.private_run_slot
                                  : plan.weight_classes[At(block.weight_class)].first_slot;
      for (size_t t = 0; t < block.tiles.size(); ++t) {
        const tiering::Tile& tile = block.tiles[t];
        torch::Tensor masters = torch::empty({tile.elements}, torch::kFloat32);
        float* const values = masters.data_ptr<float>();
        const int64_t first = residency.InRun(static_cast<int>(b), tile).offset;
        if (stream.has_value()) {
          stream->Read(first, tile.elements, values);
        } else if (module != nullptr) {
          CopyParameters(*module, layout, first, tile.elements, values);
        } else {
          // The parts of the last ranks may go beyond the run's end.
          const int64_t there = std::clamp<int64_t>(layout.elements - first, 0, tile.elements);
          std::fill(values + there, values + tile.elements, 0.0F);
          if (there > 0) refused = options.initial_values(static_cast<int>(b), first, there, values);
          if (!refused.ok()) return;
        }
        Slot& slot = ring[next % ring.size()];
        if (store != nullptr) {
          const absl::Status settled = settle(slot);
          TORCH_CHECK(settled.ok(), std::string(settled.message()));
        }
        const int tile_slot =
            store != nullptr ? static_cast<int>(next % ring.size()) : block.private_tile_slot[t];
        const auto number = static_cast<int>(b), of_block = static_cast<int>(t);
        const bool staged = store == nullptr && device != nullptr && device->has(number);
        const TileMemory memory = staged ? device->staged(number, of_block)
                                         : residency.tile(number, of_block, weight_slot, tile_slot);
        FillTile(format, values, memory);
        if (staged) refused = device->Write(number, of_block, memory);
        if (!refused.ok()) return;
        if (store == nullptr) continue;
        std::vector<const void*> sources = {memory.weights};
        sources.insert(sources.end(), memory.state.begin(), memory.state.end());
        slot.checksums.clear();
        for (size_t s = 0; s < sources.size(); ++s) {
          slot.checksums.push_back(
              store->SegmentChecksum(store_tile, static_cast<uint32_t>(s), VersionAfter(0), sources[s]));
        }
        const absl::Status written =
            store->WriteTile(&slot.io, store_tile, VersionAfter(0), sources, aio::Priority::kWriteBehind);
        TORCH_CHECK(written.ok(), std::string(written.message()));
        slot.busy = true;
        ++store_tile;
        ++next;
      }
    });
    status.Update(refused);
    // The next block may use the same run slot.
    if (store != nullptr) status.Update(settle_all());
    if (!status.ok()) return status;
    if (b + 1 == model.blocks.size() || (b + 1) % 16 == 0) {
      log(absl::StrCat("initialised ", b + 1, " of ", model.blocks.size(), " blocks"));
    }
  }
  return absl::OkStatus();
}

absl::Status RestoreRun(const std::string& path, const EngineOptions& options) {
  constexpr uint64_t kMiB = 1 << 20;
  ASSIGN_OR_RETURN(ShardDirectories parts, FindShards({path}));
  ASSIGN_OR_RETURN(std::vector<swap::Inspection> inspections, InspectShards(parts));
  aio::EngineOptions io_options;
  io_options.log = [](std::string_view) {};
  ASSIGN_OR_RETURN(std::unique_ptr<aio::Engine> io, aio::Engine::Create(std::move(io_options)));
  swap::StoreOptions to_options;
  to_options.directories = options.state_dirs;
  to_options.sync = options.sync;
  to_options.overwrite = true;  // of what was never committed, or is of no use any more
  if (options.comm != nullptr) {
    absl::StatusOr<swap::Uuid> uuid = AgreeOnUuid(*options.comm);
    if (!uuid.ok()) return uuid.status();
    to_options.uuid = *uuid;
  }
  if (parts.size() != static_cast<size_t>(options.world()))
    return RestorePart(*io, parts, inspections, options, std::move(to_options));
  swap::StoreOptions from_options;
  from_options.directories = parts[At(options.rank())];
  from_options.read_only = true;
  from_options.sequence = inspections.front().record.sequence;
  ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> from, swap::Store::Open(*io, from_options));
  swap::Layout layout;
  for (const swap::TilePlacement& tile : from->shape().tiles) layout.tiles.push_back(tile.layout);
  const uint64_t tile_bytes = std::max<uint64_t>(kMiB, from->geometry().largest_slot_bytes());
  absl::StatusOr<uint32_t> slots =
      AgreeOnVersions(options.comm.get(), VersionsOf(options, to_options, layout, from->identity()));
  if (!slots.ok()) return slots.status();
  to_options.slots = *slots;
  ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> to,
                   swap::Store::Create(*io, to_options, layout, from->identity()));
  aio::ArenaOptions arena_options;
  arena_options.bytes = 2 * tile_bytes;
  arena_options.lock = false;
  ASSIGN_OR_RETURN(std::unique_ptr<aio::Arena> arena, aio::Arena::Create(arena_options));
  return swap::RestoreCheckpoint(*from, *to, {arena->data(), 2 * tile_bytes});
}

}  // namespace penstock::zero
