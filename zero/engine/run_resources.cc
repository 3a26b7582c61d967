#include "zero/engine/run_resources.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/numa.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "swap/inspect.h"
#include "zero/engine/rank_agreement.h"
#include "zero/engine/state_identity.h"
#include "zero/engine/store_layout.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

absl::Status TakeRegion(aio::Arena& arena, int64_t bytes, aio::Region* region) {
  absl::StatusOr<aio::Region> taken = arena.Allocate(static_cast<uint64_t>(bytes));
  if (taken.ok()) *region = std::move(*taken);
  return taken.status();
}

}  // namespace

absl::StatusOr<std::unique_ptr<RunResources>> RunResources::Create(const EnginePlan& plan,
                                                                   const EngineOptions& options,
                                                                   const std::string& identity,
                                                                   swap::HeldFiles& held) {
  auto made = std::unique_ptr<RunResources>(new RunResources(plan, options));
  if (absl::Status status = made->Make(identity, held); !status.ok()) {
    if (made->store_ != nullptr) held = made->CloseStore();
    return status;
  }
  return made;
}

absl::Status RunResources::Make(const std::string& identity, swap::HeldFiles& held) {
  RETURN_IF_ERROR(MakeMemory());
  RETURN_IF_ERROR(MakeDevice());
  const bool checkpoints = options_.trains && options_.storage.checkpoints.any();
  if (plan_.plan.on_nvme || options_.resumes() || checkpoints) RETURN_IF_ERROR(MakeIo());
  if (plan_.plan.on_nvme) RETURN_IF_ERROR(MakeStore(identity, held));
  if (plan_.plan.input_scratch_bytes > 0) {
    ASSIGN_OR_RETURN(inputs_,
                     ActivationSpill::Create(*io_, plan_.graph, plan_.plan, options_.storage.state_dirs));
  }
  if (plan_.plan.on_nvme && SumsSpill::Bytes(plan_.plan) > 0) {
    ASSIGN_OR_RETURN(sums_, SumsSpill::Create(*io_, plan_.plan, options_.storage.state_dirs.front()));
  }
  return absl::OkStatus();
}

swap::HeldFiles RunResources::CloseStore() {
  return store_ != nullptr ? swap::Store::Close(std::move(store_)) : swap::HeldFiles();
}

RunResources::~RunResources() {
  if (registered_) options_.device->UnregisterHost(arena_->data());
  (void)options_.device->LimitTensors(0);
  TensorMemory::SetLimit(0);
}

// Beside its device; ranks of one host without one are spread over its nodes.
int RunResources::NodeFor(const EngineOptions& options) {
  const int nodes = aio::NumaNodes();
  if (nodes == 1) return -1;
  if (options.device->has_own_memory()) return options.device->numa_node();
  if (options.comm == nullptr || options.comm->environment().local_world == 1) return -1;
  return options.comm->environment().local_rank % nodes;
}

absl::Status RunResources::MakeMemory() {
  aio::ArenaOptions arena_options;
  arena_options.bytes = static_cast<uint64_t>(std::max<int64_t>(plan_.plan.arena_bytes, 1));
  arena_options.lock = plan_.plan.on_nvme;
  arena_options.numa_node = NodeFor(options_);
  ASSIGN_OR_RETURN(std::unique_ptr<aio::Arena> arena, aio::Arena::Create(arena_options));
  arena_ = std::move(arena);
  // Transparent huge pages, locked, are as good as any; less than that costs CPU, and is told.
  if (plan_.plan.on_nvme && (arena_->page_kind() == aio::PageKind::kSmall || !arena_->locked())) {
    for (const std::string& note : arena_->notes()) Log(note);
  }
  aio::Region slots;
  absl::Status status = TakeRegion(*arena_, std::max<int64_t>(plan_.plan.slot_bytes, 1), &slots);
  RETURN_IF_ERROR(status);
  arena_view_ = std::make_unique<ArenaView>(plan_.plan, std::move(slots), options_.rank());
  if (plan_.plan.checkpoint_bytes > 0) {
    status = TakeRegion(*arena_, plan_.plan.checkpoint_bytes, &tile_memory_);
    RETURN_IF_ERROR(status);
  }
  if (plan_.plan.network_bytes > 0) {
    status = TakeRegion(*arena_, plan_.plan.network_bytes, &network_memory_);
    RETURN_IF_ERROR(status);
  }
  // Measuring is over before the arena is there: its peak and the run's are not added.
  preparation_peak_ = TensorMemory::Stats().peak_bytes;
  TensorMemory::Trim();
  TensorMemory::ResetPeak();
  const int64_t budget = options_.memory.host_memory_budget_bytes;
  TensorMemory::SetLimit(budget > 0 ? budget - static_cast<int64_t>(arena_->bytes()) : 0);
  return absl::OkStatus();
}

// The device's own memory.
absl::Status RunResources::MakeDevice() {
  Device& device = *options_.device;
  if (!device.has_own_memory()) return absl::OkStatus();
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceLanes> lanes,
                   DeviceLanes::Create(plan_.plan, *arena_view_, device, tile_memory()));
  device_lanes_ = std::move(lanes);
  const absl::Status pinned = device.RegisterHost(arena_->data(), static_cast<int64_t>(arena_->bytes()));
  registered_ = pinned.ok();
  if (!registered_) {
    Log(absl::StrCat(
        "copies to and from the device are of pageable memory, which is slower: ",
        std::string(pinned.message()),
        "; a smaller host memory budget, or a higher limit of locked memory (ulimit -l), may help"));
  }
  return absl::OkStatus();
}

// And its bounds. Building the model is over: what tensors took on the host till now is no part of what
// they may take on the device.
absl::Status RunResources::BoundDevice() {
  Device& device = *options_.device;
  if (!device.has_own_memory()) return absl::OkStatus();
  const tiering::DevicePlan& plan = plan_.plan.device;
  const auto arena_bytes = static_cast<int64_t>(arena_->bytes());
  if (device.tensors_are_host()) {
    preparation_peak_ = std::max(preparation_peak_, arena_bytes + TensorMemory::Stats().peak_bytes);
  }
  traffic_before_ = device.traffic();
  device.TrimTensors();
  device.ResetPeak();
  const bool bounded = plan.budget_bytes > 0;
  return device.LimitTensors(bounded ? plan.budget_bytes - plan.arena_bytes : 0);
}

absl::Status RunResources::MakeIo() {
  aio::EngineOptions io_options = options_.storage.io;
  // Without a drive of its own a run moves its state seldom, and its memory stays unpinned.
  if (plan_.plan.on_nvme) io_options.arenas = {arena_.get()};
  io_options.log = [this](std::string_view line) { Log(std::string(line)); };
  ASSIGN_OR_RETURN(std::unique_ptr<aio::Engine> io, aio::Engine::Create(std::move(io_options)));
  io_ = std::move(io);
  return absl::OkStatus();
}

absl::Status RunResources::MakeStore(const std::string& identity, swap::HeldFiles& held) {
  swap::StoreOptions store_options;
  store_options.slots = static_cast<uint32_t>(plan_.versions);
  store_options.directories = options_.resumes() ? plan_.parts.front() : options_.storage.state_dirs;
  store_options.weights = plan_.stripes.weights;
  for (const std::string& line : {plan_.stripes.line, plan_.unlike_drives}) {
    if (!line.empty()) Log(line);
  }
  if (options_.resumes() && !options_.storage.state_dir_weights.empty())
    Log("weights of state directories: of no effect on a run that goes on: its bytes stay where they are");
  store_options.sync = options_.storage.sync;
  store_options.overwrite = options_.storage.overwrite;
  store_options.overwrites_only = options_.storage.overwrites_only;
  store_options.read_only = !options_.trains && options_.resumes();
  store_options.payload_capacity += static_cast<uint64_t>(plan_.buffer_bytes + plan_.missed_bytes);
  if (!options_.resumes()) {
    RETURN_IF_ERROR(swap::CheckSpace(
        store_options, LayoutOfThisHost(LayoutOf(plan_.plan), options_), identity,
        ActivationSpill::BytesIn(options_.storage.state_dirs.size(), plan_.graph, plan_.plan)));
    if (options_.comm != nullptr) {
      ASSIGN_OR_RETURN(store_options.uuid, AgreeOnNewStore(*options_.comm, store_options));
    }
  }
  if (plan_.parts.size() > 1) {
    RETURN_IF_ERROR(OpenOthers(&store_options));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<swap::Store> store,
                   options_.resumes()
                       ? swap::Store::Open(*io_, store_options, std::exchange(held, {}))
                       : swap::Store::Create(*io_, store_options, LayoutOf(plan_.plan), identity));
  store_ = std::move(store);
  if (!options_.resumes()) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPlannedFor(store_->shape(), identity));
  return options_.comm != nullptr ? GoBackTogether() : absl::OkStatus();
}

// Another start may have replaced what was planned for, by a part of another number of ranks too.
absl::Status RunResources::CheckPlannedFor(const swap::StoreShape& shape, const std::string& identity) const {
  swap::Inspection opened;
  opened.shape = shape;
  bool same = RecordedIdentity(opened, /*with_rank=*/options_.trains) ==
              ParseJsonObject(identity, "").value_or(nlohmann::json());
  if (same && options_.trains) {
    const tiering::PlanOptions& planned = plan_.options;
    const absl::StatusOr<StoreTiles> tiles =
        TilesOf(shape, plan_.graph, planned.world, planned.precision, planned.frozen_elsewhere);
    same = tiles.ok() && tiles->elements == planned.fixed_tiles;
  }
  if (same) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(options_.storage.state_dirs.front(),
                   ": another process has replaced the run while this one started: start this one again"));
}

// Goes on from the newest commit that every rank has made; they make the same ones. With two versions none
// has begun to overwrite it: that waits until all have made the next one (OpKind::kAgree), so the ones that
// have are one ahead at the most. With one version who is ahead cannot go back, which is kDataLoss.
absl::Status RunResources::GoBackTogether() {
  const uint64_t step = store_->committed_step(), sequence = store_->committed_sequence();
  ASSIGN_OR_RETURN(const std::vector<std::string> uuids,
                   options_.comm->AllTexts(Channel::kSetup, {"the run"}, swap::UuidText(store_->uuid())));
  for (size_t rank = 1; rank < uuids.size(); ++rank) {
    if (uuids[rank] == uuids.front()) continue;
    return absl::DataLossError(
        absl::StrCat("rank ", rank, " has a part of run ", uuids[rank], ", and rank 0 of run ", uuids.front(),
                     ": bring the parts of one run together, or go on from a checkpoint"));
  }
  ASSIGN_OR_RETURN(std::vector<int64_t> all,
                   AllNumbers(*options_.comm, "the newest commit", static_cast<int64_t>(sequence)));
  const auto common = static_cast<uint64_t>(*std::min_element(all.begin(), all.end()));
  if (common == sequence) return absl::OkStatus();
  RETURN_IF_ERROR(store_->GoBackTo(common));
  Log(store_->committed_step() == step
          ? absl::StrCat("what was written into the state after step ", step,
                         " was not committed by all ranks: going on without it")
          : absl::StrCat("step ", step, " was not committed by all ranks: going on from step ",
                         store_->committed_step()));
  return absl::OkStatus();
}

// An evaluation of what several ranks keep: this is the only process, with the plan of rank 0, and reads
// the others' parts where it would gather them.
absl::Status RunResources::OpenOthers(swap::StoreOptions* own) {
  ASSIGN_OR_RETURN(std::vector<swap::Inspection> inspections, InspectShards(plan_.parts));
  std::vector<int64_t> elements;
  for (const tiering::BlockShape& block : plan_.graph.blocks) elements.push_back(block.elements);
  own->sequence = inspections.front().record.sequence;
  ASSIGN_OR_RETURN(std::unique_ptr<ShardedState> others,
                   ShardedState::Open(*io_, plan_.parts, inspections, elements, plan_.plan.precision, {}));
  others_ = std::move(others);
  return absl::OkStatus();
}

}  // namespace penstock::zero
