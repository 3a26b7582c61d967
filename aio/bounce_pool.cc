#include "aio/bounce_pool.h"

#include <algorithm>
#include <utility>

#include "aio/bytes.h"

namespace penstock::aio {

BouncePool::BouncePool(uint64_t buffer_bytes, uint32_t buffers)
    : bytes_(AlignUp(buffer_bytes, kSectorBytes)), users_(buffers) {
  free_.reserve(buffers);
}

bool BouncePool::Prepare() {
  if (memory_ != nullptr) return true;
  // In huge pages, as what is moved in place: a device takes a transfer to many small ones at half the speed.
  ArenaOptions options;
  options.bytes = bytes_ * users_.size();
  options.lock = options.touch = options.try_hugetlb = false;
  absl::StatusOr<std::unique_ptr<Arena>> memory = Arena::Create(options);
  if (!memory.ok()) return false;
  memory_ = *std::move(memory);
  for (size_t i = 0; i < users_.size(); ++i) free_.push_back(static_cast<int>(i));
  return true;
}

bool BouncePool::MustWait(const Piece& piece) const {
  if (free_.empty()) return true;
  if (piece.kind != Piece::Kind::kOneSector) return false;
  return std::any_of(users_.begin(), users_.end(), [&](const Piece* user) {
    return user != nullptr && user->kind == Piece::Kind::kOneSector && user->slot == piece.slot &&
           user->offset == piece.offset;
  });
}

void BouncePool::Give(Piece& piece) {
  piece.bounce = free_.back();
  free_.pop_back();
  users_[static_cast<size_t>(piece.bounce)] = &piece;
  piece.data = memory_->data() + static_cast<uint64_t>(piece.bounce) * bytes_;
}

void BouncePool::TakeBack(const Piece& piece) {
  if (piece.bounce < 0) return;
  users_[static_cast<size_t>(piece.bounce)] = nullptr;
  free_.push_back(piece.bounce);
}

}  // namespace penstock::aio
