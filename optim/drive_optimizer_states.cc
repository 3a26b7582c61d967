#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/io_error.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "kernels/float16.h"
#include "kernels/split_master.h"
#include "optim/drive_optimizer_impl.h"

namespace penstock::optim {

using aio::kMiB;
using kernels::DType;

void DriveOptimizer::Impl::SetPiece(const StateValues& state, Piece& piece, std::byte* tile) {
  const Parameter& given = known_[static_cast<size_t>(piece.parameter)].given;
  if (float* const m = At<float>(tile, piece.m)) {
    if (state.m != nullptr) {
      std::memcpy(m, state.m + piece.first, 4 * piece.n);
    } else {
      std::fill_n(m, piece.n, 0.0f);
    }
  }
  if (float* const v = At<float>(tile, piece.v)) {
    if (state.v != nullptr) {
      std::memcpy(v, state.v + piece.first, 4 * piece.n);
    } else {
      std::fill_n(v, piece.n, given.initial_v);
    }
  }
  if (piece.master == kNone) return;
  piece.has_checksum = false;
  if (state.master == nullptr) {
    std::memset(tile + piece.master, 0, MasterBytes(given.type) * piece.n);
    return;
  }
  const float* const master = state.master + piece.first;
  if (given.type == DType::kFp16) {
    std::memcpy(tile + piece.master, master, 4 * piece.n);
    return;
  }
  // The low halves are good for the values that this master is rounded to, whether the parameter has them
  // already or is yet to be loaded.
  kernels::Checksummer checksum;
  uint16_t high[kBlock];
  for (size_t i = 0; i < piece.n; i += kBlock) {
    const size_t n = std::min<size_t>(kBlock, piece.n - i);
    kernels::SplitMaster(master + i, high, At<int16_t>(tile, piece.master) + i, n);
    checksum.Update(high, 2 * n);
  }
  piece.checksum = checksum.Digest();
  piece.has_checksum = true;
}

absl::Status DriveOptimizer::Impl::SetStates(std::span<const StateValues> states) {
  std::vector<const StateValues*> state_of(known_.size(), nullptr);
  for (const StateValues& state : states) {
    if (state.parameter < 0 || static_cast<size_t>(state.parameter) >= known_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("states of parameter ", state.parameter, ": no such one"));
    }
    state_of[static_cast<size_t>(state.parameter)] = &state;
  }
  const bool all = std::find(state_of.begin(), state_of.end(), nullptr) == state_of.end();
  if (!all) RETURN_IF_ERROR(CheckUsable());
  failed_ = {};
  std::vector<Work> work;
  for (size_t t = 0; t < tiles_.size(); ++t) {
    if (tiles_[t].bytes == 0) continue;
    size_t set = 0;
    for (size_t i = tiles_[t].first_piece; i < tiles_[t].first_piece + tiles_[t].pieces; ++i) {
      if (state_of[static_cast<size_t>(pieces_[i].parameter)] != nullptr) ++set;
    }
    if (set != 0) work.push_back({.tile = t, .write = true, .replaced = set == tiles_[t].pieces});
  }
  RETURN_IF_ERROR(Sweep(work, true, [&](const Tile& tile, std::byte* data) {
    for (size_t i = tile.first_piece; i < tile.first_piece + tile.pieces; ++i) {
      const StateValues* const state = state_of[static_cast<size_t>(pieces_[i].parameter)];
      if (state != nullptr) SetPiece(*state, pieces_[i], data);
    }
    return absl::OkStatus();
  }));
  if (all) broken_ = absl::OkStatus();
  return absl::OkStatus();
}

absl::Status DriveOptimizer::Impl::WriteOut(int descriptor, const void* data, uint64_t bytes,
                                            uint64_t offset) {
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes != 0) {
    const ssize_t moved =
        pwrite(descriptor, next, std::min<uint64_t>(bytes, kMiB), static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      failed_ = {.any = true, .path = "the copy of the states", .offset = offset, .bytes = bytes};
      return aio::MakeIoError({.op = "write",
                               .path = "the copy of the states",
                               .offset = offset,
                               .bytes = bytes,
                               .error = moved == 0 ? ENOSPC : errno});
    }
    next += moved;
    offset += static_cast<uint64_t>(moved);
    bytes -= static_cast<uint64_t>(moved);
  }
  return absl::OkStatus();
}

absl::Status DriveOptimizer::Impl::CopyMaster(const StatePlaces& place, const Piece& piece, std::byte* tile,
                                              int descriptor) {
  const auto* const values = static_cast<const uint16_t*>(place.values) + piece.first;
  const bool bf16 = known_[static_cast<size_t>(piece.parameter)].given.type == DType::kBf16;
  const bool joined = bf16 && piece.has_checksum && kernels::Checksum(values, 2 * piece.n) == piece.checksum;
  constexpr size_t kMost = 16 * kBlock;
  std::vector<float> master(std::min<size_t>(kMost, piece.n));
  for (size_t i = 0; i < piece.n; i += kMost) {
    const size_t n = std::min<size_t>(kMost, piece.n - i);
    if (joined) {
      kernels::JoinMaster(values + i, At<int16_t>(tile, piece.master) + i, master.data(), n, &pool_);
    } else if (bf16) {
      kernels::Bf16ToFp32(values + i, master.data(), n, &pool_);
    } else {
      for (size_t j = 0; j < n; ++j) {
        const float kept = At<float>(tile, piece.master)[i + j];
        master[j] = kernels::FloatToFp16(kept) == values[i + j] ? kept : kernels::Fp16ToFloat(values[i + j]);
      }
    }
    RETURN_IF_ERROR(WriteOut(descriptor, master.data(), 4 * n,
                             static_cast<uint64_t>(place.master) + 4 * (piece.first + i)));
  }
  return absl::OkStatus();
}

absl::Status DriveOptimizer::Impl::CopyPiece(const StatePlaces& place, const Piece& piece, std::byte* tile,
                                             int descriptor) {
  const auto copy = [&](uint64_t segment, int64_t offset) {
    if (segment == kNone || offset < 0) return absl::OkStatus();
    return WriteOut(descriptor, tile + segment, 4 * piece.n, static_cast<uint64_t>(offset) + 4 * piece.first);
  };
  RETURN_IF_ERROR(copy(piece.m, place.m));
  RETURN_IF_ERROR(copy(piece.v, place.v));
  if (piece.master == kNone || place.master < 0) return absl::OkStatus();
  return CopyMaster(place, piece, tile, descriptor);
}

absl::Status DriveOptimizer::Impl::CopyStates(std::span<const StatePlaces> states, int descriptor) {
  RETURN_IF_ERROR(CheckUsable());
  std::vector<const StatePlaces*> place_of(known_.size(), nullptr);
  for (const StatePlaces& place : states) {
    if (place.parameter < 0 || static_cast<size_t>(place.parameter) >= known_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("states of parameter ", place.parameter, ": no such one"));
    }
    if (place.master >= 0 && place.values == nullptr &&
        known_[static_cast<size_t>(place.parameter)].given.n != 0) {
      return absl::InvalidArgumentError(absl::StrCat("states of parameter ", place.parameter,
                                                     ": a master is known by its parameter's values"));
    }
    place_of[static_cast<size_t>(place.parameter)] = &place;
  }
  std::vector<Work> work;
  for (size_t t = 0; t < tiles_.size(); ++t) {
    for (size_t i = tiles_[t].first_piece; i < tiles_[t].first_piece + tiles_[t].pieces; ++i) {
      if (tiles_[t].bytes == 0 || place_of[static_cast<size_t>(pieces_[i].parameter)] == nullptr) continue;
      work.push_back({.tile = t});
      break;
    }
  }
  return Sweep(work, false, [&](const Tile& tile, std::byte* data) {
    for (size_t i = tile.first_piece; i < tile.first_piece + tile.pieces; ++i) {
      const StatePlaces* const place = place_of[static_cast<size_t>(pieces_[i].parameter)];
      if (place != nullptr) RETURN_IF_ERROR(CopyPiece(*place, pieces_[i], data, descriptor));
    }
    return absl::OkStatus();
  });
}

}  // namespace penstock::optim
