#include <algorithm>
#include <cstring>
#include <type_traits>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "kernels/float16.h"
#include "kernels/reduce.h"
#include "optim/drive_optimizer_impl.h"

namespace penstock::optim {

using kernels::DType;

// Where the values are not those that the master was last rounded to, the master begins anew at them.
void DriveOptimizer::Impl::NoticeChange(const Piece& piece, const void* values, std::byte* tile) {
  if (piece.master == kNone) return;
  const uint16_t* const now = static_cast<const uint16_t*>(values) + piece.first;
  if (known_[static_cast<size_t>(piece.parameter)].given.type == DType::kBf16) {
    if (!piece.has_checksum || kernels::Checksum(now, 2 * piece.n) != piece.checksum) {
      std::memset(tile + piece.master, 0, 2 * piece.n);
    }
    return;
  }
  float* const master = At<float>(tile, piece.master);
  pool_.ParallelFor(piece.n, 4 * kBlock, [&](size_t begin, size_t end) {
    uint16_t rounded[kBlock];
    for (size_t i = begin; i < end; i += kBlock) {
      const size_t n = std::min(kBlock, end - i);
      kernels::Fp32ToFp16(master + i, rounded, n);
      if (std::memcmp(rounded, now + i, 2 * n) == 0) continue;
      for (size_t j = 0; j < n; ++j) {
        if (rounded[j] != now[i + j]) master[i + j] = kernels::Fp16ToFloat(now[i + j]);
      }
    }
  });
}

void DriveOptimizer::Impl::UpdatePiece(const Update& update, Piece& piece, std::byte* tile,
                                       bool second_sweep) {
  const DType type = known_[static_cast<size_t>(piece.parameter)].given.type;
  const size_t pieces = known_[static_cast<size_t>(piece.parameter)].pieces;
  std::byte* const values =
      static_cast<std::byte*>(update.values) + piece.first * kernels::BytesPerElement(type);
  if (!second_sweep) NoticeChange(piece, update.values, tile);
  kernels::UpdateArrays arrays;
  arrays.n = piece.n;
  arrays.param = values;
  if (type == DType::kBf16) {
    arrays.param_type = kernels::ParamType::kSplit;
    arrays.master_low = At<int16_t>(tile, piece.master);
  } else if (type == DType::kFp16) {
    arrays.param = At<float>(tile, piece.master);
    arrays.copy_out = reinterpret_cast<uint16_t*>(values);
    arrays.copy_type = DType::kFp16;
  }
  arrays.grad_type = update.gradient_type;
  arrays.grad = static_cast<const std::byte*>(update.gradient) +
                piece.first * kernels::BytesPerElement(update.gradient_type);
  arrays.m = At<float>(tile, piece.m);
  arrays.v = At<float>(tile, piece.v);
  arrays.first_element = piece.first;
  bool values_changed = true;
  std::visit(
      [&](const auto& options) {
        using Options = std::decay_t<decltype(options)>;
        if constexpr (std::is_same_v<Options, kernels::LambOptions>) {
          const kernels::LambStep step = kernels::MakeLambStep(options, update.update, update.gradient_scale);
          kernels::LambNorms& norms = norms_[static_cast<size_t>(piece.parameter)];
          if (!second_sweep) kernels::LambMoments(step, arrays, &norms, nullptr, &pool_);
          values_changed = second_sweep || pieces == 1;
          if (values_changed) kernels::LambApply(step, kernels::LambTrust(step, norms), arrays, &pool_);
        } else if constexpr (std::is_same_v<Options, kernels::AdamOptions>) {
          kernels::ApplyUpdate(kernels::MakeAdamStep(options, update.update, update.gradient_scale), arrays,
                               nullptr, &pool_);
        } else if constexpr (std::is_same_v<Options, kernels::AdagradOptions>) {
          kernels::ApplyUpdate(kernels::MakeAdagradStep(options, update.update, update.gradient_scale),
                               arrays, nullptr, &pool_);
        } else if constexpr (std::is_same_v<Options, kernels::LionOptions>) {
          kernels::ApplyUpdate(kernels::MakeLionStep(options, update.gradient_scale), arrays, nullptr,
                               &pool_);
        } else {
          kernels::ApplyUpdate(kernels::MakeSgdStep(options, update.update, update.gradient_scale), arrays,
                               nullptr, &pool_);
        }
      },
      update.options);
  if (type == DType::kBf16 && values_changed) {
    piece.checksum = kernels::Checksum(values, 2 * piece.n);
    piece.has_checksum = true;
  }
}

absl::Status DriveOptimizer::Impl::CheckUpdates(std::span<const Update> updates) {
  updates_.assign(known_.size(), nullptr);
  for (const Update& update : updates) {
    const auto refuse = [&](const std::string& what) {
      return absl::InvalidArgumentError(absl::StrCat("update of parameter ", update.parameter, ": ", what));
    };
    if (update.parameter < 0 || static_cast<size_t>(update.parameter) >= known_.size()) {
      return refuse("no such parameter");
    }
    const Parameter& given = known_[static_cast<size_t>(update.parameter)].given;
    if (updates_[static_cast<size_t>(update.parameter)] != nullptr) return refuse("it occurs twice");
    if (given.n != 0 && (update.values == nullptr || update.gradient == nullptr)) return refuse("no memory");
    if (update.update < 1) return refuse("updates count from 1");
    const auto [m, v] = std::visit(
        [](const auto& options) -> std::pair<bool, bool> {
          using Options = std::decay_t<decltype(options)>;
          if constexpr (std::is_same_v<Options, kernels::AdagradOptions>) return {false, true};
          if constexpr (std::is_same_v<Options, kernels::LionOptions>) return {true, false};
          if constexpr (std::is_same_v<Options, kernels::SgdOptions>) {
            return {options.momentum != 0.0, false};
          } else {
            return {true, true};
          }
        },
        update.options);
    if ((m && !given.has_m) || (v && !given.has_v)) {
      return refuse("this optimizer has a state that the parameter was not added with");
    }
    updates_[static_cast<size_t>(update.parameter)] = &update;
  }
  return absl::OkStatus();
}

absl::Status DriveOptimizer::Impl::Step(std::span<const Update> updates) {
  RETURN_IF_ERROR(CheckUsable());
  RETURN_IF_ERROR(CheckUpdates(updates));
  const auto update_of = [&](const Piece& piece) { return updates_[static_cast<size_t>(piece.parameter)]; };
  // LAMB of a parameter in several tiles takes its norms from a sweep of their own.
  const auto twice = [&](const Piece& piece) {
    const Update* const update = update_of(piece);
    return update != nullptr && std::holds_alternative<kernels::LambOptions>(update->options) &&
           known_[static_cast<size_t>(piece.parameter)].pieces > 1;
  };
  std::vector<Work> first, second;
  bool lamb = false;
  for (size_t t = 0; t < tiles_.size(); ++t) {
    bool any = false, again = false, stores = false;
    for (size_t i = tiles_[t].first_piece; i < tiles_[t].first_piece + tiles_[t].pieces; ++i) {
      const Update* const update = update_of(pieces_[i]);
      if (update == nullptr) continue;
      any = true;
      lamb = lamb || std::holds_alternative<kernels::LambOptions>(update->options);
      if (twice(pieces_[i])) {
        again = true;
        stores = stores || pieces_[i].master != kNone;
      }
    }
    if (any) first.push_back({.tile = t, .write = true});
    if (again) second.push_back({.tile = t, .write = stores});
  }
  if (lamb) norms_.assign(known_.size(), {});
  const auto sweep = [&](const std::vector<Work>& work, bool second_sweep) {
    return Sweep(work, true, [&](const Tile& tile, std::byte* data) {
      for (size_t i = tile.first_piece; i < tile.first_piece + tile.pieces; ++i) {
        if (update_of(pieces_[i]) == nullptr || (second_sweep && !twice(pieces_[i]))) continue;
        UpdatePiece(*update_of(pieces_[i]), pieces_[i], data, second_sweep);
      }
      return absl::OkStatus();
    });
  };
  RETURN_IF_ERROR(sweep(first, false));
  if (second.empty()) return absl::OkStatus();
  const absl::Status status = sweep(second, true);
  if (!status.ok()) broken_ = status;  // moments have moved already
  return status;
}

}  // namespace penstock::optim
