#include "zero/engine/parameter_access.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/index.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "kernels/float16.h"
#include "zero/compute/tile_version.h"
#include "zero/config/nearest_name.h"
#include "zero/engine/rank_agreement.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

constexpr auto kWidth = static_cast<int64_t>(sizeof(float));
constexpr const char* kWhat = "memory for a parameter's state";
constexpr int64_t kSharedAtOnce = int64_t{1} << 17;  // elements of all ranks together

// Memory for direct I/O of that many bytes, padded to pages.
absl::StatusOr<HostBuffer> Pages(int64_t bytes, std::byte** aligned) {
  const int64_t padded = tiering::AlignUp(bytes, tiering::kPage) + tiering::kPage;
  ASSIGN_OR_RETURN(HostBuffer memory, HostBuffer::Of(padded, "memory for a tile of state"));
  std::memset(memory.data(), 0, static_cast<size_t>(padded));
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data()));
  *aligned = memory.data() + (tiering::AlignUp(address, tiering::kPage) - address);
  return memory;
}

absl::Status Take(int64_t bytes, absl::string_view what, HostBuffer* to) {
  ASSIGN_OR_RETURN(*to, HostBuffer::Of(bytes, what));
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string> ParameterAccess::NamesOf(const tiering::ModelGraph& graph,
                                                  const GradientSums::Layouts& layouts) {
  std::vector<std::string> names;
  for (const tiering::BlockIndex b : layouts.indices()) {
    for (const Parameter& parameter : layouts[b]->parameters)
      names.push_back(absl::StrCat(graph.blocks[b].name, ".", parameter.name));
  }
  return names;
}

absl::StatusOr<ParameterAccess::Found> ParameterAccess::Find(std::string_view name) const {
  for (const tiering::BlockIndex b : layouts_.indices()) {
    for (const Parameter& parameter : layouts_[b]->parameters) {
      if (absl::StrCat(graph_.blocks[b].name, ".", parameter.name) == name) return Found{b, &parameter};
    }
  }
  const std::vector<std::string> names = NamesOf(graph_, layouts_);
  return absl::NotFoundError(
      absl::StrCat("there is no parameter ", std::string(name),
                   DidYouMean(name, std::vector<std::string_view>(names.begin(), names.end()))));
}

uint32_t ParameterAccess::StoreTile(tiering::BlockIndex block, tiering::TileIndex tile) const {
  int64_t before = -plan_.blocks[block].tiles_elsewhere();
  for (tiering::BlockIndex b(0); b < block; ++b)
    before += std::ssize(plan_.blocks[b].tiles) - plan_.blocks[b].tiles_elsewhere();
  return static_cast<uint32_t>(before + tile.value());
}

absl::Status ParameterAccess::ForEachTile(
    const Found& found,
    const std::function<absl::Status(tiering::TileIndex, int64_t, int64_t, int64_t)>& body) const {
  const Parameter& parameter = *found.parameter;
  const tiering::PerTile<tiering::Tile>& tiles = plan_.blocks[found.block].tiles;
  for (const tiering::TileIndex t : tiles.indices()) {
    const tiering::Tile tile = arena_view_.InWholeBlock(found.block, tiles[t]);
    const int64_t begin = std::max(parameter.offset, tile.offset);
    const int64_t end = std::min(parameter.offset + parameter.elements, tile.offset + tile.elements);
    if (begin >= end) continue;
    RETURN_IF_ERROR(body(t, begin - tile.offset, end - begin, begin - parameter.offset));
  }
  return absl::OkStatus();
}

absl::Status ParameterAccess::CheckKept(StateKind kind) const {
  if (Keeps(format_, kind)) return absl::OkStatus();
  if (kind == StateKind::kGradient) {
    return absl::FailedPreconditionError("a gradient cannot be set: the update may have used it already");
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the optimizer of this run keeps no ", std::string(StateKindName(kind))));
}

absl::Status ParameterAccess::OfAll(const absl::Status& mine) const {
  return comm_ == nullptr ? mine : AgreeOnStatus(*comm_, Channel::kSetup, mine);
}

absl::StatusOr<HostTensor> ParameterAccess::Made(const std::function<absl::Status(const Place&)>& read) {
  HostTensor values;
  RETURN_IF_ERROR(read([&](const Parameter& parameter) -> absl::StatusOr<float*> {
    RETURN_IF_ERROR(Take(parameter.elements * kWidth, kWhat, &values.memory));
    values.view = {values.memory.data(), ElementType::kFp32, parameter.sizes};
    return static_cast<float*>(values.view.data);
  }));
  return values;
}

absl::StatusOr<float*> ParameterAccess::ReadParts(
    const Found& found, const Place& place,
    const std::function<absl::Status(tiering::TileIndex, int64_t, int64_t, float*)>& read) const {
  HostBuffer exchanged;
  const absl::StatusOr<float*> room = place(*found.parameter);
  absl::Status status = room.status();
  if (comm_ != nullptr) status.Update(Take(kSharedAtOnce * kWidth, kWhat, &exchanged));
  float* const to = room.ok() ? *room : nullptr;
  if (status.ok()) {
    status = ForEachTile(found, [&](tiering::TileIndex tile, int64_t begin, int64_t n, int64_t at) {
      return read(tile, begin, n, to + at);
    });
  }
  status = OfAll(status);
  if (status.ok() && comm_ != nullptr) status = Share(found, reinterpret_cast<float*>(exchanged.data()), to);
  RETURN_IF_ERROR(status);
  return to;
}

absl::Status ParameterAccess::Share(const Found& found, float* gathered, float* values) const {
  const Parameter& parameter = *found.parameter;
  const int64_t part = plan_.blocks[found.block].elements;
  const int64_t most = std::min(part, std::max<int64_t>(1, kSharedAtOnce / comm_->world()));
  for (int64_t from = 0; from < part; from += most) {
    const int64_t n = std::min(most, part - from);
    // Calls `copy(values, gathered, n)` for what rank k has of the parameter in this round.
    const auto of_rank = [&](int k, const auto& copy) {
      const int64_t first = k * part + from;
      const int64_t begin = std::max(parameter.offset, first);
      const int64_t end = std::min(parameter.offset + parameter.elements, first + n);
      if (begin >= end) return false;
      copy(values + (begin - parameter.offset), gathered + k * n + (begin - first), end - begin);
      return true;
    };
    bool any = false;
    for (int k = 0; k < comm_->world(); ++k) any |= of_rank(k, [](float*, float*, int64_t) {});
    if (!any) continue;
    of_rank(comm_->rank(), [](float* own, float* to, int64_t count) { std::copy_n(own, count, to); });
    RETURN_IF_ERROR(comm_->AllGather(Channel::kSetup, {"a parameter's state"}, gathered,
                                     static_cast<size_t>(n) * sizeof(float)));
    for (int k = 0; k < comm_->world(); ++k) {
      of_rank(k, [](float* to, const float* other, int64_t count) { std::copy_n(other, count, to); });
    }
  }
  return absl::OkStatus();
}

absl::Status ParameterAccess::CheckShape(const Found& found, std::string_view name,
                                         const TensorView& value) const {
  const std::vector<int64_t>& sizes = found.parameter->sizes;
  if (value.sizes == sizes && value.type == ElementType::kFp32 && !value.on_device) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "value of a parameter's state: a tensor of shape [", absl::StrJoin(value.sizes, ", "), "] in ",
      std::string(NameOf(value.type)), value.on_device ? " on a device" : "", " for the [",
      absl::StrJoin(sizes, ", "), "] of ", std::string(name), ", which is set in fp32 from host memory"));
}

absl::Status ParameterAccess::CheckSame(std::string_view name, const TensorView& values) const {
  if (comm_ == nullptr) return absl::OkStatus();
  const uint64_t checksum = kernels::Checksum(values.data, static_cast<size_t>(values.bytes()));
  ASSIGN_OR_RETURN(std::vector<std::string> all,
                   comm_->AllTexts(Channel::kSetup, {"a parameter's values"}, absl::StrCat(checksum)));
  for (size_t k = 1; k < all.size(); ++k) {
    if (all[k] == all.front()) continue;
    return absl::InvalidArgumentError(absl::StrCat("ranks 0 and ", k, " were given different values for ",
                                                   std::string(name), ": all of them write the same"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ParameterAccess::Loaded> ParameterAccess::Load(tiering::BlockIndex block,
                                                              tiering::TileIndex tile) const {
  const tiering::BlockPlan& bp = plan_.blocks[block];
  Loaded loaded;
  if (store_ == nullptr && !OnDeviceAlone(block)) {
    loaded.memory = arena_view_.tile(block, tile, bp.private_weight_slot, bp.private_tile_slot[tile]);
    return loaded;
  }
  const int64_t elements = bp.tiles[tile].elements;
  std::byte* place = nullptr;
  const bool alone = bp.weights_alone(tile);
  ASSIGN_OR_RETURN(HostBuffer copy, Pages(alone ? plan_.precision.SegmentBytes(0, elements)
                                                : plan_.precision.TotalBytes(elements),
                                          &place));
  loaded.copy = std::move(copy);
  loaded.memory.elements = elements;
  std::vector<void*> segments;
  const size_t count = alone ? 1 : plan_.precision.segment_bytes.size();
  for (size_t s = 0; s < count; ++s) {
    segments.push_back(place);
    place += tiering::AlignUp(plan_.precision.SegmentBytes(s, elements), tiering::kPage);
  }
  loaded.memory.weights = segments.front();
  loaded.memory.state.assign(segments.begin() + 1, segments.end());
  loaded.memory.gradient = loaded.memory.weights;  // not used
  if (OnDeviceAlone(block)) {
    RETURN_IF_ERROR(device_->Read(block, tile, loaded.memory));
    return loaded;
  }
  if (!bp.in_store(tile)) {
    RETURN_IF_ERROR(ReadFrozenNow(*frozen_, store_->engine(), block, bp.tiles[tile].offset, elements,
                                  static_cast<std::byte*>(loaded.memory.weights)));
    return loaded;
  }
  swap::TileIo io;
  RETURN_IF_ERROR(store_->ReadTileNow(&io, StoreTile(block, tile), segments, aio::Priority::kDemand));
  return loaded;
}

absl::Status ParameterAccess::Store(tiering::BlockIndex block, tiering::TileIndex tile,
                                    const Loaded& loaded) const {
  if (OnDeviceAlone(block)) return device_->Write(block, tile, loaded.memory);
  if (store_ == nullptr) return absl::OkStatus();
  const uint32_t id = StoreTile(block, tile);
  std::vector<const void*> sources = {loaded.memory.weights};
  sources.insert(sources.end(), loaded.memory.state.begin(), loaded.memory.state.end());
  // What a step did not write (frozen, skipped) has the version of an older one.
  const uint64_t of_step = VersionAfter(static_cast<int64_t>(store_->committed_step()));
  const uint64_t version = std::max(store_->newest_version(id), of_step) + 1;
  // Without steps all versions are of none.
  if (plan_.trains && version % kVersionsPerStep == 0) {
    return absl::FailedPreconditionError(absl::StrCat("state was written ", kVersionsPerStep - 1,
                                                      " times since the last step: make a step first"));
  }
  swap::TileIo io;
  return store_->WriteTileNow(&io, id, version, sources, aio::Priority::kDemand);
}

absl::Status ParameterAccess::Read(std::string_view name, StateKind kind, const Place& to_place) {
  ASSIGN_OR_RETURN(Found found, Find(name));
  RETURN_IF_ERROR(CheckKept(kind));
  const auto read_tile = [&](tiering::TileIndex tile, int64_t begin, int64_t n, float* to) -> absl::Status {
    ASSIGN_OR_RETURN(Loaded loaded, Load(found.block, tile));
    ReadValues(format_, loaded.memory, kind, begin, n, to);
    return absl::OkStatus();
  };
  return ReadParts(found, to_place, read_tile).status();
}

absl::Status ParameterAccess::ReadRange(tiering::BlockIndex block, int64_t first, int64_t elements,
                                        const std::array<float*, 3>& to) {
  constexpr StateKind kKinds[] = {StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment};
  for (const StateKind kind : kKinds) RETURN_IF_ERROR(CheckKept(kind));
  Parameter range;
  range.offset = first;
  range.elements = elements;
  const Found found{block, &range};
  HostBuffer exchanged;
  absl::Status status;
  if (comm_ != nullptr) status = Take(kSharedAtOnce * kWidth, kWhat, &exchanged);
  if (status.ok()) status = ReadOwnRange(found, to);
  if (comm_ == nullptr) return status;
  RETURN_IF_ERROR(OfAll(status));
  for (float* const values : to)
    RETURN_IF_ERROR(Share(found, reinterpret_cast<float*>(exchanged.data()), values));
  return absl::OkStatus();
}

absl::Status ParameterAccess::ReadOwnRange(const Found& found, const std::array<float*, 3>& to) {
  constexpr StateKind kKinds[] = {StateKind::kParameter, StateKind::kFirstMoment, StateKind::kSecondMoment};
  const tiering::BlockIndex block = found.block;
  return ForEachTile(found,
                     [&](tiering::TileIndex tile, int64_t begin, int64_t n, int64_t at) -> absl::Status {
                       if (block != kept_block_ || tile != kept_tile_) {
                         kept_block_ = {};
                         kept_ = {};
                         ASSIGN_OR_RETURN(kept_, Load(block, tile));
                         kept_block_ = block;
                         kept_tile_ = tile;
                       }
                       for (size_t k = 0; k < to.size(); ++k)
                         ReadValues(format_, kept_.memory, kKinds[k], begin, n, to[k] + at);
                       return absl::OkStatus();
                     });
}

absl::Status ParameterAccess::ReadGradient(
    std::string_view name, double scale, bool speculative_update,
    const std::function<uint64_t(tiering::BlockIndex, tiering::TileIndex)>& gradient_checksum,
    const Place& to_place) {
  ASSIGN_OR_RETURN(Found found, Find(name));
  if (!found.parameter->trains) {
    return absl::FailedPreconditionError(absl::StrCat(std::string(name), " is frozen: it has no gradient"));
  }
  const tiering::BlockPlan& bp = plan_.blocks[found.block];
  if (speculative_update && !plan_.clips && !bp.gradient_slot.valid() && bp.all_speculative()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the gradient of ", std::string(name), " was used where it was made and kept nowhere: ",
                     "more host memory keeps it, and so does the order of update \"next_forward\""));
  }
  const int64_t width = plan_.precision.gradient_bytes;
  const auto read_tile = [&](tiering::TileIndex tile, int64_t begin, int64_t n, float* to) -> absl::Status {
    const tiering::Tile& cut = bp.tiles[tile];
    HostBuffer copy;
    const std::byte* gradient = nullptr;
    if (device_ != nullptr && device_->has(found.block)) {
      std::byte* place = nullptr;
      ASSIGN_OR_RETURN(HostBuffer memory, Pages(cut.elements * width, &place));
      copy = std::move(memory);
      RETURN_IF_ERROR(device_->ReadGradient(found.block, cut.offset, cut.elements, place));
      gradient = place;
    } else if (bp.gradient_slot.valid()) {
      gradient = arena_view_.GradientOf(found.block, tile, bp.gradient_slot);
    } else {
      const auto bytes = static_cast<size_t>(cut.elements * width);
      std::byte* place = nullptr;
      ASSIGN_OR_RETURN(HostBuffer memory, Pages(cut.elements * width, &place));
      copy = std::move(memory);
      swap::TileIo io;
      absl::Status read =
          store_->ReadScratch(&io, StoreTile(found.block, tile), 0, place, bytes, aio::Priority::kDemand);
      if (read.ok()) read = store_->Wait(&io);
      RETURN_IF_ERROR(read);
      if (kernels::Checksum(place, bytes) != gradient_checksum(found.block, tile)) {
        return absl::DataLossError(
            absl::StrCat("gradient of tile ", tile.value(), " of block ", found.block.value(), ", ", bytes,
                         " bytes: what came back from the drive is not what ", "was written"));
      }
      gradient = place;
    }
    kernels::Convert(format_.weights, gradient + begin * width, kernels::DType::kFp32, to,
                     static_cast<size_t>(n));
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(float* const of, ReadParts(found, to_place, read_tile));
  if (scale == 1) return absl::OkStatus();
  // A loss scale is a power of two: exact.
  const auto by = static_cast<float>(1 / scale);
  std::for_each(of, of + found.parameter->elements, [by](float& value) { value *= by; });
  return absl::OkStatus();
}

absl::Status ParameterAccess::Write(std::string_view name, StateKind kind, const TensorView& value,
                                    const std::function<absl::Status()>& start) {
  ASSIGN_OR_RETURN(Found found, Find(name));
  RETURN_IF_ERROR(CheckKept(kind));
  if (kind != StateKind::kParameter && KeepsWeightsAlone(found)) {
    return absl::FailedPreconditionError(
        absl::StrCat(std::string(name), " is frozen: it has no ", std::string(StateKindName(kind))));
  }
  if (!found.parameter->trains && plan_.blocks[found.block].elsewhere_to > 0) {
    return absl::FailedPreconditionError(absl::StrCat(std::string(name), " is frozen and read from ",
                                                      frozen_->PlaceOf(found.block),
                                                      ", which is not written"));
  }
  absl::Status status = OfAll(CheckShape(found, name, value));
  if (status.ok()) status = CheckSame(name, value);
  if (status.ok()) status = OfAll(start());
  RETURN_IF_ERROR(status);
  return OfAll(
      ForEachTile(found, [&](tiering::TileIndex tile, int64_t begin, int64_t n, int64_t at) -> absl::Status {
        ASSIGN_OR_RETURN(Loaded loaded, Load(found.block, tile));
        WriteValues(format_, loaded.memory, kind, begin, n, static_cast<const float*>(value.data) + at);
        return Store(found.block, tile, loaded);
      }));
}

}  // namespace penstock::zero
