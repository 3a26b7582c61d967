#include "zero/lanes/drive_lanes.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "zero/compute/tile_version.h"

namespace penstock::zero {
namespace {

using tiering::Op;
using tiering::OpKind;

bool MovesSums(const Op& op) { return op.kind == OpKind::kReadSums || op.kind == OpKind::kWriteSums; }

}  // namespace

DriveLanes::DriveLanes(const tiering::Plan& plan, const ArenaView& arena_view, DeviceLanes* device,
                       const Options& options, Report report)
    : plan_(plan),
      arena_view_(arena_view),
      device_(device),
      options_(options),
      store_(options.store),
      report_(std::move(report)) {
  int64_t tiles = 0;
  for (const tiering::BlockPlan& block : plan_.blocks) {
    first_tile_.push_back(tiles - block.tiles_elsewhere());
    tiles += std::ssize(block.tiles) - block.tiles_elsewhere();
    auto& of_block = tiles_.emplace_back();
    auto& spill = spills_.emplace_back(std::make_unique<Spill>());
    spill->lanes = this;
    sums_transfers_.emplace_back().lanes = this;
    if (store_ == nullptr) continue;
    for (size_t t = 0; t < block.tiles.size(); ++t) {
      auto& transfers = of_block.emplace_back(std::make_unique<TileTransfers>());
      transfers->checksums.resize(plan_.precision.segment_bytes.size());
      for (Transfer* transfer : {&transfers->weights, &transfers->there, &transfers->state,
                                 &transfers->gradient, &transfers->write}) {
        transfer->lanes = this;
        transfer->io.set_on_complete(&DriveLanes::OnTileDone, transfer);
      }
      transfers->spill.io.set_on_complete(&DriveLanes::OnSpillDone, spill.get());
      if (!block.in_store(tiering::TileIndex(t))) transfers->frozen = options_.frozen->MakeRead();
    }
  }
  for (const tiering::Position position : plan_.all_positions()) {
    auto& of_position = input_transfers_.emplace_back();
    for (int m = 0; plan_.SpillsInput(position) && m < plan_.micro_batches; ++m) {
      of_position.push_back(std::make_unique<OtherTransfer>());
      of_position.back()->lanes = this;
    }
  }
  commit_.set_on_complete(&DriveLanes::OnCommitDone, this);
}

std::string DriveLanes::PlaceOf(const Op& op) const {
  if (op.block.valid() && IsElsewhere(op)) return options_.frozen->PlaceOf(op.block);
  const bool of_tile = op.block.valid() && op.tile.valid();
  return store_->path(of_tile ? StoreTile(op.block, op.tile) : 0);
}

std::pair<uint32_t, uint32_t> DriveLanes::WrittenSegments(const Op& op) const {
  const auto segments = static_cast<uint32_t>(plan_.precision.segment_bytes.size());
  if (op.kind == OpKind::kWriteState) return {1, segments - 1};
  return {0, op.kind == OpKind::kWriteWeights ? 1 : segments};
}

absl::Status DriveLanes::Start(tiering::OpId id, const Op& op) {
  const Task task{id, &op, options_.now()};
  if (op.kind == OpKind::kWriteGradient) {
    StartSpill(task);
    return absl::OkStatus();
  }
  if (MovesSums(op)) return StartSums(task);
  return IsElsewhere(op) ? StartFrozen(task) : StartTile(task);
}

absl::Status DriveLanes::StartFrozen(const Task& task) {
  const Op& op = *task.op;
  const tiering::Tile& place = plan_.blocks[op.block].tiles[op.tile];
  Transfer& transfer = transfers(op).weights;
  transfer.task = task;
  return options_.frozen->Start(store_->engine(), transfers(op).frozen.get(), op.block, place.offset,
                                place.elements, static_cast<std::byte*>(MemoryOf(op).weights),
                                &DriveLanes::OnFrozenDone, &transfer);
}

DriveLanes::Transfer& DriveLanes::TileTransfer(const Op& op) const {
  TileTransfers& transfers = this->transfers(op);
  switch (op.kind) {
    case OpKind::kReadWeights:
      return op.device_weight_slot.valid() ? transfers.there : transfers.weights;
    case OpKind::kReadState:
      return transfers.state;
    case OpKind::kReadGradient:
      return transfers.gradient;
    default:
      return transfers.write;
  }
}

absl::Status DriveLanes::StartTile(const Task& task) {
  const Op& op = *task.op;
  const uint32_t tile = StoreTile(op.block, op.tile);
  const TileMemory memory = MemoryOf(op);
  const auto segments = static_cast<uint32_t>(plan_.precision.segment_bytes.size());
  Transfer& transfer = TileTransfer(op);
  // The store refuses one that is in flight, whose task must stay what it is.
  if (!transfer.io.pending()) transfer.task = task;
  swap::TileIo* const io = &transfer.io;
  // An update that is made again starts from what the last commit holds.
  const swap::VersionChoice choice =
      op.replay ? swap::VersionChoice::kCommitted : swap::VersionChoice::kNewest;
  switch (op.kind) {
    case OpKind::kReadWeights: {
      void* const destination[] = {op.device_weight_slot.valid() ? device_->weights(op) : memory.weights};
      return store_->ReadSegments(io, tile, 0, 1, destination, aio::Priority::kDemand, choice);
    }
    case OpKind::kReadState:
      return store_->ReadSegments(io, tile, 1, segments - 1, memory.state, aio::Priority::kPrefetch, choice);
    case OpKind::kReadGradient:
      return store_->ReadScratch(io, tile, 0, memory.gradient, static_cast<uint64_t>(op.bytes),
                                 aio::Priority::kPrefetch);
    case OpKind::kWriteTile:
    case OpKind::kWriteState:
    case OpKind::kWriteWeights: {
      if (store_->geometry().slots() == 1 && !store_->overwriting()) {
        RETURN_IF_ERROR(store_->OverwriteNow());
      }
      std::vector<const void*> sources = {memory.weights};
      sources.insert(sources.end(), memory.state.begin(), memory.state.end());
      const auto [first, count] = WrittenSegments(op);
      return store_->WriteSegments(io, tile, VersionAfter(op.step), first,
                                   std::span(sources).subspan(first, count), aio::Priority::kWriteBehind);
    }
    default:
      return absl::InternalError(absl::StrCat("not a transfer: ", std::string(tiering::OpKindName(op.kind))));
  }
}

void DriveLanes::StartSpill(const Task& task) {
  const Op& op = *task.op;
  const tiering::BlockPlan& block = plan_.blocks[op.block];
  Spill& spill = *spills_[op.block];
  spill.task = task;
  int tiles = 0, submitted = 0;
  for (const tiering::TileIndex t : block.tiles.indices()) tiles += block.updates(t) ? 1 : 0;
  // One more than the transfers, taken off at the end: none of them may report before all are submitted.
  spill.outstanding.store(tiles + 1, std::memory_order_relaxed);
  spill.refused = absl::OkStatus();
  for (const tiering::TileIndex t : block.tiles.indices()) {
    if (!spill.refused.ok()) break;
    if (!block.updates(t)) continue;
    const int64_t bytes = block.tiles[t].elements * plan_.precision.gradient_bytes;
    spill.refused = store_->WriteScratch(&tiles_[op.block][t]->spill.io, StoreTile(op.block, t), 0,
                                         arena_view_.GradientOf(op.block, t, op.gradient_slot),
                                         static_cast<uint64_t>(bytes), aio::Priority::kWriteBehind);
    if (spill.refused.ok()) ++submitted;
  }
  const int missing = tiles - submitted;
  if (spill.outstanding.fetch_sub(missing + 1) == missing + 1) ReportEnd(task);
}

absl::Status DriveLanes::StartSums(const Task& task) {
  const Op& op = *task.op;
  OtherTransfer& transfer = sums_transfers_[op.block];
  transfer.task = task;
  void* const sums = op.accumulator_slot.valid() ? arena_view_.accumulator(op.accumulator_slot)
                                                 : arena_view_.gradient(op.gradient_slot);
  return op.kind == OpKind::kReadSums
             ? options_.sums->Read(op.block, sums, &DriveLanes::OnOtherDone, &transfer)
             : options_.sums->Write(op.block, sums, &DriveLanes::OnOtherDone, &transfer);
}

absl::Status DriveLanes::StartInput(tiering::OpId id, const Op& op, std::span<const TensorView> values) {
  OtherTransfer& transfer = *input_transfers_[op.position][At(op.micro_batch)];
  transfer.task = {id, &op, options_.now()};
  ActivationSpill& inputs = *options_.inputs;
  return op.kind == OpKind::kReadInput
             ? inputs.Read(op.position, op.micro_batch, values, &DriveLanes::OnOtherDone, &transfer)
             : inputs.Write(op.position, op.micro_batch, values, &DriveLanes::OnOtherDone, &transfer);
}

absl::Status DriveLanes::StartCommit(tiering::OpId id, const Op& op, const swap::CommitInfo& info) {
  commit_task_ = {id, &op, options_.now()};
  return store_->Commit(&commit_, info);
}

absl::Status DriveLanes::DropWritten(const Op& op) {
  return store_->DropWritten(StoreTile(op.block, op.tile));
}

void DriveLanes::OnTileDone(swap::TileIo&, void* context) {
  auto* const transfer = static_cast<Transfer*>(context);
  transfer->lanes->ReportEnd(transfer->task);
}

void DriveLanes::OnFrozenDone(void* context) {
  auto* const transfer = static_cast<Transfer*>(context);
  transfer->lanes->ReportEnd(transfer->task);
}

void DriveLanes::OnSpillDone(swap::TileIo&, void* context) {
  auto* const spill = static_cast<Spill*>(context);
  if (spill->outstanding.fetch_sub(1) == 1) spill->lanes->ReportEnd(spill->task);
}

void DriveLanes::OnOtherDone(void* context) {
  auto* const transfer = static_cast<OtherTransfer*>(context);
  transfer->lanes->ReportEnd(transfer->task);
}

void DriveLanes::OnCommitDone(swap::CommitIo&, void* context) {
  auto* const lanes = static_cast<DriveLanes*>(context);
  lanes->ReportEnd(lanes->commit_task_);
}

absl::Status DriveLanes::Ended(const Op& op) {
  if (op.kind == OpKind::kWriteGradient) return SpillEnded(op.block);
  if (op.kind == OpKind::kWriteInput) return options_.inputs->Written(op.position, op.micro_batch);
  if (op.kind == OpKind::kReadInput) return options_.inputs->TakeRead(op.position, op.micro_batch);
  if (MovesSums(op)) return options_.sums->Ended(op.block);
  if (op.kind == OpKind::kReadWeights) return WeightsEnded(op);
  Transfer& transfer = TileTransfer(op);
  if (!tiering::IsTileWrite(op.kind)) return transfer.io.status();
  const auto [first, count] = WrittenSegments(op);
  return store_->NoteWritten(&transfer.io, std::span(transfers(op).checksums).subspan(first, count));
}

absl::Status DriveLanes::WeightsEnded(const Op& op) {
  if (IsElsewhere(op)) return absl::OkStatus();  // kVerify says how it ended
  absl::Status status = TileTransfer(op).io.status();
  if (!op.device_weight_slot.valid()) return status;
  if (status.ok()) past_host_bytes_ += op.bytes;
  return status.ok() ? status
                     : absl::Status(status.code(),
                                    absl::StrCat(std::string(status.message()),
                                                 "; without aio.use_gds it would go by way of host memory"));
}

absl::Status DriveLanes::SpillEnded(tiering::BlockIndex block) const {
  absl::Status status = spills_[block]->refused;  // the tiles that were not taken have their last status
  for (const tiering::TileIndex t : tiles_[block].indices()) {
    if (plan_.blocks[block].updates(t)) status.Update(tiles_[block][t]->spill.io.status());
  }
  return status;
}

absl::Status DriveLanes::FinishCommit() { return store_->FinishCommit(&commit_); }

absl::Status DriveLanes::Verify(const Op& op) {
  if (IsElsewhere(op)) return options_.frozen->Finish(transfers(op).frozen.get());
  if (op.device_weight_slot.valid()) {
    const swap::TileIo& io = transfers(op).there.io;
    const swap::Store::ChecksumOf of = store_->ChecksumFor(io, 0);
    absl::StatusOr<uint64_t> checksum = device_->device().Checksum(device_->weights(op), of.bytes, of.seed);
    return checksum.ok() ? store_->VerifyChecksum(io, 0, *checksum) : checksum.status();
  }
  return store_->VerifyRead(op.checks_state ? transfers(op).state.io : transfers(op).weights.io);
}

absl::Status DriveLanes::VerifyBeforeUpdate(const Op& op) {
  if (op.checks_weights) {
    RETURN_IF_ERROR(store_->VerifyRead(transfers(op).weights.io));
  }
  if (op.checks_state) {
    RETURN_IF_ERROR(store_->VerifyRead(transfers(op).state.io));
  }
  return absl::OkStatus();
}

void DriveLanes::ChecksumTile(const Op& op) {
  const TileMemory memory = MemoryOf(op);
  std::vector<uint64_t>& checksums = transfers(op).checksums;
  const uint32_t id = StoreTile(op.block, op.tile);
  const uint64_t version = VersionAfter(op.step);
  checksums[0] = store_->SegmentChecksum(id, 0, version, memory.weights);
  for (size_t s = 1; s < checksums.size(); ++s) {
    checksums[s] = store_->SegmentChecksum(id, static_cast<uint32_t>(s), version, memory.state[s - 1]);
  }
}

void DriveLanes::ChecksumGradient(const Op& op) {
  const tiering::BlockPlan& block = plan_.blocks[op.block];
  const auto width = static_cast<size_t>(plan_.precision.gradient_bytes);
  for (const tiering::TileIndex t : block.tiles.indices()) {
    if (!block.updates(t)) continue;
    tiles_[op.block][t]->gradient_checksum =
        kernels::Checksum(arena_view_.GradientOf(op.block, t, op.gradient_slot),
                          static_cast<size_t>(block.tiles[t].elements) * width);
  }
}

absl::Status DriveLanes::VerifyGradient(const Op& op, const TileMemory& memory) const {
  const auto bytes = static_cast<size_t>(memory.elements * plan_.precision.gradient_bytes);
  if (kernels::Checksum(memory.gradient, bytes) == transfers(op).gradient_checksum) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("gradient of tile ", op.tile.value(), " of block ",
                                          op.block.value(), ", ", bytes,
                                          " bytes: what came back from the drive is not what was written; "
                                          "the last commit is whole: continue with "
                                          "`resume`, and mistrust the drive"));
}

}  // namespace penstock::zero
