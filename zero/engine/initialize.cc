#include "zero/engine/initialize.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "base/status_macros.h"
#include "zero/compute/seed.h"
#include "zero/engine/tile_ring.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

constexpr uint64_t kInitializationSalt = 0x696e6974;  // keeps initial values apart from dropout's seeds

class Initialization {
 public:
  Initialization(Compute& compute, const EngineOptions& options, const EnginePlan& plan,
                 const ArenaView& arena_view, const DeviceState* device, const GradientSums::Layouts& layouts,
                 swap::Store* store)
      : compute_(compute),
        options_(options),
        plan_(plan.plan),
        format_(plan.format),
        arena_view_(arena_view),
        device_(device),
        layouts_(layouts) {
    if (store != nullptr)
      ring_ =
          std::make_unique<TileRing>(*store, static_cast<size_t>(std::max(1, plan_.tile_ring)), /*step=*/0);
  }

  absl::Status Block(tiering::BlockIndex number) {
    const tiering::BlockPlan& block = plan_.blocks[number];
    std::unique_ptr<InitialReader> reader;
    if (!options_.initial_values) {
      const uint64_t seed =
          MixSeed(options_.seed, kInitializationSalt, static_cast<uint64_t>(number.value()));
      ASSIGN_OR_RETURN(reader, compute_.Initial(number, seed));
    }
    absl::Status status;
    for (const tiering::TileIndex t : block.tiles.indices()) {
      if (!block.in_store(t)) continue;
      status = Tile(number, t, reader.get());
      if (!status.ok()) break;
    }
    // The next block may use the same weight slot.
    if (ring_ != nullptr) status.Update(ring_->SettleAll());
    return status;
  }

 private:
  // Elements [first, first + elements) of the block's flat parameters; the shards of the last ranks may go
  // beyond their end.
  absl::Status Values(tiering::BlockIndex block, int64_t first, int64_t elements, InitialReader* reader,
                      float* to) const {
    if (reader != nullptr) return reader->Read(first, elements, to);
    const int64_t there = std::clamp<int64_t>(layouts_[block]->elements - first, 0, elements);
    std::fill(to + there, to + elements, 0.0F);
    return there > 0 ? options_.initial_values(block.value(), first, there, to) : absl::OkStatus();
  }

  void RoundToWeights(float* values, int64_t n) const {
    if (format_.weights == kernels::DType::kFp32) return;
    std::array<uint16_t, 4096> weights;
    for (int64_t at = 0; at < n; at += std::ssize(weights)) {
      TileMemory alone;
      alone.weights = weights.data();
      alone.elements = std::min<int64_t>(n - at, std::ssize(weights));
      FillTile(format_, values + at, alone);
      ReadMasters(format_, alone, values + at);
    }
  }

  absl::Status Tile(tiering::BlockIndex number, tiering::TileIndex t, InitialReader* reader) {
    const tiering::BlockPlan& block = plan_.blocks[number];
    const tiering::WeightSlot weight_slot = block.private_weight_slot.valid()
                                                ? block.private_weight_slot
                                                : plan_.weight_classes[At(block.weight_class)].first_slot;
    if (ring_ != nullptr) {
      ASSIGN_OR_RETURN(const size_t slot, ring_->Next());
      const tiering::TileSlot tile_slot =
          block.weights_alone(t) ? tiering::TileSlot() : tiering::TileSlot(slot);
      const TileMemory memory = arena_view_.tile(number, t, weight_slot, tile_slot);
      RETURN_IF_ERROR(Fill(number, t, reader, memory));
      std::vector<const void*> segments = {memory.weights};
      segments.insert(segments.end(), memory.state.begin(), memory.state.end());
      return ring_->Write(segments);
    }
    const bool staged = device_ != nullptr && device_->has(number);
    const TileMemory memory = staged ? device_->staged(number, t)
                                     : arena_view_.tile(number, t, weight_slot, block.private_tile_slot[t]);
    RETURN_IF_ERROR(Fill(number, t, reader, memory));
    return staged ? device_->Write(number, t, memory) : absl::OkStatus();
  }

  // Where weights are all that there is, piece by piece: plans of what is only evaluated have no room for the
  // fp32 values of a tile.
  absl::Status Fill(tiering::BlockIndex number, tiering::TileIndex t, InitialReader* reader,
                    const TileMemory& memory) const {
    constexpr int64_t kPiece = int64_t{1} << 16;
    const tiering::Tile& tile = plan_.blocks[number].tiles[t];
    const FlatLayout& layout = *layouts_[number];
    const int64_t first = arena_view_.InWholeBlock(number, tile).offset;
    const int64_t frozen_to = layout.Trains() ? layout.trained_from : layout.elements;
    const int64_t most = memory.state.empty() ? std::min(tile.elements, kPiece) : tile.elements;
    ASSIGN_OR_RETURN(const HostBuffer masters, HostBuffer::Of(most * static_cast<int64_t>(sizeof(float)),
                                                              "memory for a tile's initial values"));
    auto* const values = reinterpret_cast<float*>(masters.data());
    for (int64_t at = 0; at < tile.elements; at += most) {
      TileMemory piece = memory;
      piece.elements = std::min(most, tile.elements - at);
      piece.weights = static_cast<std::byte*>(memory.weights) + plan_.precision.SegmentBytes(0, at);
      RETURN_IF_ERROR(Values(number, first + at, piece.elements, reader, values));
      // The same values wherever they are kept: also where what is frozen has a master.
      RoundToWeights(values, std::clamp<int64_t>(frozen_to - first - at, 0, piece.elements));
      FillTile(format_, values, piece);
    }
    return absl::OkStatus();
  }

  Compute& compute_;
  const EngineOptions& options_;
  const tiering::Plan& plan_;
  const TileFormat& format_;
  const ArenaView& arena_view_;
  const DeviceState* const device_;
  const GradientSums::Layouts& layouts_;
  std::unique_ptr<TileRing> ring_;  // null: nothing lives on a drive
};

}  // namespace

absl::Status InitializeState(Compute& compute, const EngineOptions& options, const EnginePlan& plan,
                             const ArenaView& arena_view, const DeviceState* device,
                             const GradientSums::Layouts& layouts, swap::Store* store,
                             const std::function<void(const std::string&)>& log) {
  Initialization initialization(compute, options, plan, arena_view, device, layouts, store);
  const size_t blocks = plan.graph.blocks.size();
  for (const tiering::BlockIndex block : plan.graph.blocks.indices()) {
    RETURN_IF_ERROR(initialization.Block(block));
    const size_t done = At(block) + 1;
    if (done == blocks || done % 16 == 0) log(absl::StrCat("initialised ", done, " of ", blocks, " blocks"));
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
