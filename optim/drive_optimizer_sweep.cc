#include <algorithm>
#include <cstring>
#include <vector>

#include "aio/request.h"
#include "base/status_macros.h"
#include "optim/drive_optimizer_impl.h"

namespace penstock::optim {

void DriveOptimizer::Impl::FillInitial(const Tile& tile, std::byte* data) {
  std::memset(data, 0, tile.bytes);
  for (size_t i = tile.first_piece; i < tile.first_piece + tile.pieces; ++i) {
    const Piece& piece = pieces_[i];
    const float initial = known_[static_cast<size_t>(piece.parameter)].given.initial_v;
    if (piece.v != kNone && initial != 0.0f) std::fill_n(At<float>(data, piece.v), piece.n, initial);
  }
}

absl::Status DriveOptimizer::Impl::Ended(aio::Request& request) {
  absl::Status status = engine_->Wait(&request);
  if (request.op() == aio::Op::kRead) {
    stats_.read_bytes += request.done_bytes();
  } else {
    stats_.written_bytes += request.done_bytes();
  }
  if (!status.ok() && !failed_.any) {
    failed_ = {.any = true, .path = file_->path(), .offset = request.offset(), .bytes = request.bytes()};
  }
  return status;
}

absl::Status DriveOptimizer::Impl::StartRead(Slot& slot, const Tile& tile, bool wanted_now) {
  slot.read.PrepareRead(*file_, tile.offset, slot.region.data(), tile.bytes);
  slot.read.set_priority(wanted_now ? aio::Priority::kDemand : aio::Priority::kPrefetch);
  RETURN_IF_ERROR(engine_->Submit(&slot.read));
  slot.reading = true;
  return absl::OkStatus();
}

// After a failure: nothing may still move into the ring or out of it.
void DriveOptimizer::Impl::Settle() {
  for (const auto& slot : slots_) {
    if (slot->reading) {
      engine_->Cancel(&slot->read);
      (void)engine_->Wait(&slot->read);
    }
    if (slot->writing) (void)engine_->Wait(&slot->write);
    slot->reading = slot->writing = false;
  }
}

absl::Status DriveOptimizer::Impl::Sweep(
    const std::vector<Work>& work, bool changes,
    absl::FunctionRef<absl::Status(const Tile& tile, std::byte* data)> act) {
  std::vector<Work> far;
  std::vector<Work> near;
  for (const Work& one : work) {
    const Tile& tile = tiles_[one.tile];
    (tile.resident != nullptr || tile.bytes == 0 ? near : far).push_back(one);
  }
  bool changed = false;
  const auto run = [&]() -> absl::Status {
    const size_t ring = slots_.size();
    size_t started = 0;
    // Starts reads as far ahead as there are free slots. The one of `now` is waited for.
    const auto start = [&](size_t now) -> absl::Status {
      for (; started < far.size() && started < now + ring; ++started) {
        Slot& slot = *slots_[started % ring];
        if (slot.writing) {
          if (!slot.write.finished() && started != now) break;
          slot.writing = false;
          RETURN_IF_ERROR(Ended(slot.write));
        }
        const Tile& tile = tiles_[far[started].tile];
        if (tile.holds_state && !far[started].replaced)
          RETURN_IF_ERROR(StartRead(slot, tile, started == now));
      }
      return absl::OkStatus();
    };
    if (!far.empty()) RETURN_IF_ERROR(start(0));
    for (const Work& one : near) {
      Tile& tile = tiles_[one.tile];
      changed = true;
      if (!tile.holds_state && tile.bytes != 0) FillInitial(tile, tile.resident);
      RETURN_IF_ERROR(act(tile, tile.resident));
      tile.holds_state = tile.holds_state || one.write;
    }
    for (size_t now = 0; now < far.size(); ++now) {
      RETURN_IF_ERROR(start(now));
      Slot& slot = *slots_[now % ring];
      Tile& tile = tiles_[far[now].tile];
      std::byte* const data = slot.region.data();
      if (slot.reading) {
        slot.reading = false;
        RETURN_IF_ERROR(Ended(slot.read));
      } else {
        FillInitial(tile, data);
      }
      changed = true;
      RETURN_IF_ERROR(act(tile, data));
      if (!far[now].write) continue;
      slot.write.PrepareWrite(*file_, tile.offset, data, tile.bytes);
      slot.write.set_priority(aio::Priority::kWriteBehind);
      RETURN_IF_ERROR(engine_->Submit(&slot.write));
      slot.writing = true;
      tile.holds_state = true;
    }
    for (const auto& slot : slots_) {
      if (!slot->writing) continue;
      slot->writing = false;
      RETURN_IF_ERROR(Ended(slot->write));
    }
    return absl::OkStatus();
  };
  absl::Status status = run();
  if (!status.ok()) {
    if (engine_ != nullptr) Settle();
    if (changes && changed) broken_ = status;
  }
  return status;
}

}  // namespace penstock::optim
