#include "zero/engine/initialize.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "base/status_macros.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/initial_values.h"
#include "zero/compute/seed.h"
#include "zero/compute/tile_version.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {
namespace {

constexpr uint64_t kInitializationSalt = 0x696e6974;  // keeps initial values apart from dropout's seeds

}  // namespace

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
    const tiering::BlockIndex number(b);
    const tiering::BlockPlan& block = plan.blocks[number];
    const FlatLayout& layout = modules[b]->layout();
    absl::Status refused;  // by initial_values, or the device
    absl::Status status = Guarded(absl::StrCat("building block ", model.blocks[b].name), [&] {
      torch::manual_seed(MixSeed(options.seed, kInitializationSalt, b));
      std::shared_ptr<torch::nn::Module> module;
      std::optional<InitialStream> stream;  // of a block that says what it begins with
      if (!options.initial_values) {
        module = model.blocks[b].build();
        TORCH_CHECK(module != nullptr, "its factory returned nothing");
        TORCH_CHECK(layout.SameShapes(LayoutOf(*module)),
                    "its parameters differ from those of the others of kind ", model.blocks[b].kind);
        if (!model.blocks[b].initial.empty()) stream.emplace(model.blocks[b], layout);
      }
      const tiering::WeightSlot weight_slot = block.private_run_slot.valid()
                                                  ? block.private_run_slot
                                                  : plan.weight_classes[At(block.weight_class)].first_slot;
      for (const tiering::TileIndex t : block.tiles.indices()) {
        const tiering::Tile& tile = block.tiles[t];
        torch::Tensor masters = torch::empty({tile.elements}, torch::kFloat32);
        float* const values = masters.data_ptr<float>();
        const int64_t first = residency.InRun(number, tile).offset;
        if (stream.has_value()) {
          stream->Read(first, tile.elements, values);
        } else if (module != nullptr) {
          CopyParameters(*module, layout, first, tile.elements, values);
        } else {
          // The parts of the last ranks may go beyond the run's end.
          const int64_t there = std::clamp<int64_t>(layout.elements - first, 0, tile.elements);
          std::fill(values + there, values + tile.elements, 0.0F);
          if (there > 0) refused = options.initial_values(number.value(), first, there, values);
          if (!refused.ok()) return;
        }
        Slot& slot = ring[next % ring.size()];
        if (store != nullptr) {
          const absl::Status settled = settle(slot);
          TORCH_CHECK(settled.ok(), std::string(settled.message()));
        }
        const tiering::TileSlot tile_slot =
            store != nullptr ? tiering::TileSlot(next % ring.size()) : block.private_tile_slot[t];
        const bool staged = store == nullptr && device != nullptr && device->has(number);
        const TileMemory memory =
            staged ? device->staged(number, t) : residency.tile(number, t, weight_slot, tile_slot);
        FillTile(format, values, memory);
        if (staged) refused = device->Write(number, t, memory);
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

}  // namespace penstock::zero
