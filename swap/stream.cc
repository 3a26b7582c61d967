#include "swap/stream.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "swap/format.h"

namespace penstock::swap {

ReadStream::ReadStream(aio::Engine& engine, std::span<std::byte> memory, uint64_t chunk_bytes,
                       std::function<std::optional<Range>()> next_range)
    : engine_(engine), chunk_bytes_(chunk_bytes), next_range_(std::move(next_range)) {
  PENSTOCK_CHECK(chunk_bytes > 0 && chunk_bytes % kSectorBytes == 0 && memory.size() >= chunk_bytes,
                 "chunks that are no sectors, or more than their memory");
  for (uint64_t at = 0; at + chunk_bytes <= memory.size(); at += chunk_bytes) {
    slots_.push_back(std::make_unique<Slot>());
    slots_.back()->memory = memory.data() + at;
  }
}

ReadStream::~ReadStream() {
  for (const auto& slot : slots_) {
    // Nobody wants the data any more; only its memory has to be free.
    if (slot->request.pending()) (void)engine_.Wait(&slot->request);
  }
}

// Sends the next chunk on its way; false when there is none.
bool ReadStream::Issue(Slot* slot) {
  while (!end_ && (!now_.has_value() || cut_ >= now_->bytes)) {
    if (now_.has_value()) ++ranges_;
    now_ = next_range_();
    cut_ = 0;
    end_ = !now_.has_value();
  }
  if (end_) return false;
  slot->range = ranges_;
  slot->offset = cut_;
  slot->bytes = std::min(chunk_bytes_, now_->bytes - cut_);
  slot->request.PrepareRead(*now_->file, now_->offset + cut_, slot->memory, PaddedBytes(slot->bytes));
  slot->request.set_priority(aio::Priority::kPrefetch);
  slot->submitted = engine_.Submit(&slot->request);
  cut_ += slot->bytes;
  return true;
}

std::optional<ReadStream::Chunk> ReadStream::Next() {
  while (issued_ < slots_.size()) {
    if (!Issue(slots_[(head_ + issued_) % slots_.size()].get())) break;
    ++issued_;
  }
  if (issued_ == 0) return std::nullopt;
  Slot& slot = *slots_[head_];
  head_ = (head_ + 1) % slots_.size();
  --issued_;
  Chunk chunk;
  chunk.range = slot.range;
  chunk.offset = slot.offset;
  chunk.data = {slot.memory, slot.bytes};
  chunk.status = slot.submitted.ok() ? engine_.Wait(&slot.request) : slot.submitted;
  return chunk;
}

}  // namespace penstock::swap
