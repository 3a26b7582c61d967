#include "zero/engine/parameter_access.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "kernels/float16.h"
#include "zero/compute/tile_version.h"
#include "zero/config/nearest_name.h"
#include "zero/engine/rank_agreement.h"
#include "zero/lanes/hardware_lanes.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {
namespace {

constexpr int64_t kSharedAtOnce = int64_t{1} << 17;  // elements of all ranks together

// Memory for direct I/O of that many bytes, padded to pages.
absl::StatusOr<torch::Tensor> Pages(int64_t bytes, std::byte** aligned) {
  torch::Tensor memory;
  absl::Status status = Guarded("memory for a tile of state", [&] {
    memory = torch::zeros({tiering::AlignUp(bytes, tiering::kPage) + tiering::kPage}, torch::kUInt8);
  });
  if (!status.ok()) return status;
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data_ptr()));
  *aligned =
      static_cast<std::byte*>(memory.data_ptr()) + (tiering::AlignUp(address, tiering::kPage) - address);
  return memory;
}

}  // namespace

std::vector<std::string> ParameterAccess::Names() const {
  std::vector<std::string> names;
  for (size_t b = 0; b < modules_.size(); ++b) {
    for (const Parameter& parameter : modules_[b]->layout().parameters)
      names.push_back(absl::StrCat(model_.blocks[b].name, ".", parameter.name));
  }
  return names;
}

absl::StatusOr<ParameterAccess::Found> ParameterAccess::Find(std::string_view name) const {
  for (size_t b = 0; b < modules_.size(); ++b) {
    for (const Parameter& parameter : modules_[b]->layout().parameters) {
      if (absl::StrCat(model_.blocks[b].name, ".", parameter.name) == name)
        return Found{tiering::BlockIndex(b), &parameter};
    }
  }
  const std::vector<std::string> names = Names();
  return absl::NotFoundError(
      absl::StrCat("there is no parameter ", std::string(name),
                   DidYouMean(name, std::vector<std::string_view>(names.begin(), names.end()))));
}

uint32_t ParameterAccess::StoreTile(tiering::BlockIndex block, tiering::TileIndex tile) const {
  size_t before = 0;
  for (tiering::BlockIndex b(0); b < block; ++b) before += plan_.blocks[b].tiles.size();
  return static_cast<uint32_t>(before + At(tile));
}

absl::Status ParameterAccess::ForEachTile(
    const Found& found,
    const std::function<absl::Status(tiering::TileIndex, int64_t, int64_t, int64_t)>& body) const {
  const Parameter& parameter = *found.parameter;
  const tiering::PerTile<tiering::Tile>& tiles = plan_.blocks[found.block].tiles;
  for (const tiering::TileIndex t : tiles.indices()) {
    const tiering::Tile tile = residency_.InRun(found.block, tiles[t]);
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

absl::StatusOr<torch::Tensor> ParameterAccess::ReadParts(
    const Found& found,
    const std::function<absl::Status(tiering::TileIndex, int64_t, int64_t, float*)>& read) const {
  torch::Tensor values, exchanged;
  absl::Status status = Guarded("memory for a parameter's state", [&] {
    values = torch::empty(found.parameter->sizes, torch::kFloat32);
    if (comm_ != nullptr) exchanged = torch::empty({kSharedAtOnce}, torch::kFloat32);
  });
  if (status.ok()) {
    float* const to = values.data_ptr<float>();
    status = ForEachTile(found, [&](tiering::TileIndex tile, int64_t begin, int64_t n, int64_t at) {
      return read(tile, begin, n, to + at);
    });
  }
  status = OfAll(status);
  if (status.ok() && comm_ != nullptr)
    status = Share(found, exchanged.data_ptr<float>(), values.data_ptr<float>());
  if (!status.ok()) return status;
  return values;
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

absl::Status ParameterAccess::CheckSame(std::string_view name, const torch::Tensor& values) const {
  if (comm_ == nullptr) return absl::OkStatus();
  const uint64_t checksum = kernels::Checksum(values.data_ptr(), values.nbytes());
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
    loaded.memory = residency_.tile(block, tile, bp.private_run_slot, bp.private_tile_slot[tile]);
    return loaded;
  }
  const int64_t elements = bp.tiles[tile].elements;
  std::byte* place = nullptr;
  ASSIGN_OR_RETURN(torch::Tensor copy, Pages(plan_.precision.TotalBytes(elements), &place));
  loaded.copy = std::move(copy);
  loaded.memory.elements = elements;
  std::vector<void*> segments;
  for (size_t s = 0; s < plan_.precision.segment_bytes.size(); ++s) {
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
  if (version % kVersionsPerStep == 0) {
    return absl::FailedPreconditionError(absl::StrCat("state was written ", kVersionsPerStep - 1,
                                                      " times since the last step: make a step first"));
  }
  swap::TileIo io;
  return store_->WriteTileNow(&io, id, version, sources, aio::Priority::kDemand);
}

absl::StatusOr<torch::Tensor> ParameterAccess::Read(std::string_view name, StateKind kind) {
  ASSIGN_OR_RETURN(Found found, Find(name));
  RETURN_IF_ERROR(CheckKept(kind));
  return ReadParts(found, [&](tiering::TileIndex tile, int64_t begin, int64_t n, float* to) -> absl::Status {
    ASSIGN_OR_RETURN(Loaded loaded, Load(found.block, tile));
    ReadValues(format_, loaded.memory, kind, begin, n, to);
    return absl::OkStatus();
  });
}

absl::StatusOr<torch::Tensor> ParameterAccess::ReadGradient(
    std::string_view name, double scale, bool in_backward,
    const std::function<uint64_t(tiering::BlockIndex, tiering::TileIndex)>& gradient_checksum) {
  ASSIGN_OR_RETURN(Found found, Find(name));
  if (!found.parameter->trains) {
    return absl::FailedPreconditionError(absl::StrCat(std::string(name), " is frozen: it has no gradient"));
  }
  const tiering::BlockPlan& bp = plan_.blocks[found.block];
  const bool all_in_backward = std::count(bp.in_backward.begin(), bp.in_backward.end(), 0) == 0;
  if (in_backward && !plan_.clips && !bp.gradient_slot.valid() && all_in_backward) {
    return absl::FailedPreconditionError(
        absl::StrCat("the gradient of ", std::string(name), " was used where it was made and kept nowhere: ",
                     "more host memory keeps it, and so does the order of update \"next_forward\""));
  }
  const int64_t width = plan_.precision.gradient_bytes;
  const auto read_tile = [&](tiering::TileIndex tile, int64_t begin, int64_t n, float* to) -> absl::Status {
    const tiering::Tile& cut = bp.tiles[tile];
    torch::Tensor copy;
    const std::byte* gradient = nullptr;
    if (device_ != nullptr && device_->has(found.block)) {
      std::byte* place = nullptr;
      ASSIGN_OR_RETURN(torch::Tensor memory, Pages(cut.elements * width, &place));
      copy = std::move(memory);
      RETURN_IF_ERROR(device_->ReadGradient(found.block, cut.offset, cut.elements, place));
      gradient = place;
    } else if (bp.gradient_slot.valid()) {
      gradient = static_cast<const std::byte*>(residency_.gradient(bp.gradient_slot)) + cut.offset * width;
    } else {
      const auto bytes = static_cast<size_t>(cut.elements * width);
      std::byte* place = nullptr;
      ASSIGN_OR_RETURN(torch::Tensor memory, Pages(cut.elements * width, &place));
      copy = std::move(memory);
      swap::TileIo io;
      absl::Status read =
          store_->ReadScratch(&io, StoreTile(found.block, tile), 0, place, bytes, aio::Priority::kDemand);
      if (read.ok()) read = store_->Wait(&io);
      if (!read.ok()) return read;
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
  absl::StatusOr<torch::Tensor> values = ReadParts(found, read_tile);
  if (!values.ok() || scale == 1) return values;
  RETURN_IF_ERROR(Guarded("gradient", [&] { values->mul_(1 / scale); }));
  return values;
}

absl::Status ParameterAccess::Write(std::string_view name, StateKind kind, const torch::Tensor& value,
                                    const std::function<absl::Status()>& start) {
  ASSIGN_OR_RETURN(Found found, Find(name));
  RETURN_IF_ERROR(CheckKept(kind));
  torch::Tensor values;
  absl::Status status = Guarded("value of a parameter's state", [&] {
    TORCH_CHECK(value.defined() && value.sizes().vec() == found.parameter->sizes, "a tensor of shape ",
                value.defined() ? value.sizes() : torch::IntArrayRef(), " for the ",
                torch::IntArrayRef(found.parameter->sizes), " of ", std::string(name));
    values = value.detach().to(torch::kCPU, torch::kFloat32).contiguous();
  });
  if (!status.ok()) {
    if (!absl::IsResourceExhausted(status)) status = absl::InvalidArgumentError(status.message());
  }
  status = OfAll(status);
  if (status.ok()) status = CheckSame(name, values);
  if (status.ok()) status = OfAll(start());
  if (!status.ok()) return status;
  return OfAll(
      ForEachTile(found, [&](tiering::TileIndex tile, int64_t begin, int64_t n, int64_t at) -> absl::Status {
        ASSIGN_OR_RETURN(Loaded loaded, Load(found.block, tile));
        WriteValues(format_, loaded.memory, kind, begin, n, values.data_ptr<float>() + at);
        return Store(found.block, tile, loaded);
      }));
}

}  // namespace penstock::zero
