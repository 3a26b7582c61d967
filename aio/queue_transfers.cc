#include "aio/queue_transfers.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/bytes.h"
#include "aio/io_error.h"
#include "aio/queue_scheduler.h"
#include "base/check.h"

namespace penstock::aio {
namespace {

constexpr uint32_t kAttemptsMax = 64;    // transient refusals of one transfer without any progress
constexpr uint32_t kAttemptsAtOnce = 4;  // of these, so many without a pause

}  // namespace

DeviceQueue::Transfers::Transfers(DeviceQueue& queue)
    : queue_(queue),
      counters_(queue.counters_),
      bounces_(queue.core_.options.bounce_bytes, queue.core_.options.bounce_buffers),
      pieces_(queue.core_.options.max_blocks_in_flight) {
  for (Piece& piece : pieces_) {
    piece.next = free_;
    free_ = &piece;
  }
}

Piece* DeviceQueue::Transfers::Free() {
  if (free_ == nullptr) return nullptr;
  Piece* const next = free_->next;
  *free_ = Piece();
  free_->next = next;
  return free_;
}

int DeviceQueue::Transfers::PrepareBounce(const Request& request, const Piece& piece) {
  if (const DeviceTransfers* const device = queue_.backend_->device_transfers(); device != nullptr) {
    uint64_t seen = 0;
    for (const Segment* segment = request.segments() + piece.segment; seen < piece.user_bytes; ++segment) {
      if (device->Has(segment->data, 1)) return EINVAL;
      seen += segment->bytes - (seen == 0 ? piece.segment_offset : 0);
    }
  }
  return bounces_.Prepare() ? 0 : ENOMEM;
}

bool DeviceQueue::Transfers::MustWait(const Piece& piece) const {
  if (piece.op == Op::kWrite && piece.slot->trims != nullptr) return true;
  return piece.kind != Piece::Kind::kInPlace && bounces_.MustWait(piece);
}

void DeviceQueue::Transfers::Launch(Request& request, Piece& piece) {
  free_ = piece.next;
  if (piece.kind == Piece::Kind::kBounced || piece.kind == Piece::Kind::kOneSector) bounces_.Give(piece);
  piece.request = &request;
  piece.slot = request.slot_;
  piece.next = nullptr;
  piece.start_ns = queue_.now_ns_;
  if (request.state_.load(std::memory_order_relaxed) == Request::State::kQueued) {
    request.start_ns_.store(queue_.now_ns_, std::memory_order_relaxed);
    request.state_.store(Request::State::kActive, std::memory_order_release);
  }
  ++request.pieces_in_flight_;
  if (request.op_ == Op::kWrite) ++piece.slot->writes_in_flight;
  piece.charged_bytes = piece.bytes;
  queue_.scheduler_->Launched(request.op_, piece.charged_bytes);

  counters_.pieces.Add(1);
  switch (piece.kind) {
    case Piece::Kind::kInPlace:
      piece.fixed_buffer = queue_.backend_->FixedBuffer(piece.data, piece.bytes);
      if (piece.fixed_buffer >= 0) counters_.fixed_pieces.Add(1);
      break;
    case Piece::Kind::kBounced:
      counters_.bounced_pieces.Add(1);
      if (piece.op == Op::kWrite) Cutter::CopyIn(piece);
      break;
    case Piece::Kind::kOneSector:
      counters_.bounced_pieces.Add(1);
      if (piece.user_bytes == piece.bytes) {
        Cutter::CopyIn(piece);
      } else {
        piece.op = Op::kRead;
        counters_.read_modify_writes.Add(1);
      }
      break;
    case Piece::Kind::kSync:
      break;
  }
  Send(piece);
}

void DeviceQueue::Transfers::Retry() {
  while (retries_ != nullptr) Send(*std::exchange(retries_, retries_->next));
}

void DeviceQueue::Transfers::Complete(const Completion& completion) {
  Piece& piece = *completion.piece;
  if (completion.result < 0) {
    RetryOrFail(piece, static_cast<int>(-completion.result), completion.why.get());
    return;
  }
  const auto moved = static_cast<uint64_t>(completion.result);
  if (piece.op != Op::kSync && queue_.core_.saturated.on()) counters_.saturated_bytes.Add(moved);
  switch (piece.op) {
    case Op::kRead:
      counters_.read_bytes.Add(moved);
      AfterRead(piece, moved);
      return;
    case Op::kWrite:
      counters_.write_bytes.Add(moved);
      AfterWrite(piece, moved);
      return;
    case Op::kSync:
      End(piece, 0);
      return;
  }
}

void DeviceQueue::Transfers::FailAll(int error) {
  retries_ = nullptr;
  for (Piece& piece : pieces_) {
    if (piece.request != nullptr) End(piece, error);
  }
}

// It was short: goes on from the last whole sector.
void DeviceQueue::Transfers::SendRest(Piece& piece) {
  counters_.short_transfers.Add(1);
  piece.attempts = 0;
  piece.resume_bytes = AlignDown(piece.moved_bytes, piece.slot->file->alignment().offset);
  Send(piece);
}

void DeviceQueue::Transfers::AfterRead(Piece& piece, uint64_t moved) {
  const bool sector = piece.kind == Piece::Kind::kOneSector;
  const uint64_t needed = sector ? piece.bytes : piece.lead_bytes + piece.user_bytes;
  const uint64_t reached = std::min(piece.resume_bytes + moved, piece.bytes);
  const bool end_of_file = reached <= piece.moved_bytes;
  piece.moved_bytes = std::max(piece.moved_bytes, reached);
  if (piece.moved_bytes < needed && !end_of_file) {
    SendRest(piece);
    return;
  }
  if (sector) {
    if (piece.moved_bytes < needed) {
      std::memset(piece.data + piece.moved_bytes, 0, piece.bytes - piece.moved_bytes);
      piece.file_end = piece.offset + piece.moved_bytes;
    }
    Cutter::CopyIn(piece);
    piece.op = Op::kWrite;
    piece.moved_bytes = 0;
    piece.resume_bytes = 0;
    piece.attempts = 0;
    Send(piece);
    return;
  }
  if (piece.moved_bytes < needed) {
    piece.user_bytes = piece.moved_bytes - std::min(piece.moved_bytes, piece.lead_bytes);
  }
  if (piece.kind == Piece::Kind::kBounced) Cutter::CopyOut(piece);
  End(piece, piece.moved_bytes < needed ? Request::kEndOfFile : 0);
}

void DeviceQueue::Transfers::AfterWrite(Piece& piece, uint64_t moved) {
  const uint64_t reached = std::min(piece.resume_bytes + moved, piece.bytes);
  if (reached <= piece.moved_bytes) {
    RetryOrFail(piece, EAGAIN);  // a write that writes nothing and says nothing
    return;
  }
  piece.moved_bytes = reached;
  if (reached < piece.bytes) {
    SendRest(piece);
    return;
  }
  if (piece.kind == Piece::Kind::kOneSector &&
      std::max(piece.file_end, piece.offset + piece.lead_bytes + piece.user_bytes) <
          piece.offset + piece.bytes) {
    FileSlot& slot = *piece.slot;
    piece.next = slot.trims;
    slot.trims = &piece;
    ++slot.trim_count;
    RunTrims(slot);
    return;
  }
  End(piece, 0);
}

// Cuts a file back to where its last write ended, once every write in flight on it is one that waits for
// this. The file's length then changes under no transfer of ours.
void DeviceQueue::Transfers::RunTrims(FileSlot& slot) {
  if (slot.trims == nullptr || slot.writes_in_flight != slot.trim_count) return;
  const Piece* last = slot.trims;
  for (const Piece* piece = slot.trims; piece != nullptr; piece = piece->next) {
    if (piece->offset > last->offset) last = piece;
  }
  const uint64_t end = std::max(last->file_end, last->offset + last->lead_bytes + last->user_bytes);
  const absl::StatusOr<uint64_t> size = slot.file->Size();
  absl::Status status = size.status();
  if (status.ok() && *size == last->offset + last->bytes) status = slot.file->Resize(end);
  if (!status.ok())
    queue_.core_.Log(absl::StrCat("device ", queue_.device_name_, ": ", std::string(status.message())));
  Piece* piece = std::exchange(slot.trims, nullptr);
  slot.trim_count = 0;
  while (piece != nullptr) End(*std::exchange(piece, piece->next), status.ok() ? 0 : EIO);
}

void DeviceQueue::Transfers::RetryOrFail(Piece& piece, int error, const std::string* why) {
  // A sync that failed stays failed: the kernel has by then told of what it could not write and forgotten it,
  // and a second one would succeed and mean nothing. Only one that was broken off has told of nothing. One
  // that the kernel would not even take never gets here: backends keep it.
  const bool may_repeat = piece.op != Op::kSync || error == EINTR;
  if (may_repeat && IsTransientError(error) && piece.attempts < kAttemptsMax) {
    ++piece.attempts;
    counters_.retries.Add(1);
    if (piece.attempts <= kAttemptsAtOnce) {
      Send(piece);
      return;
    }
    if (queue_.threaded_) usleep(200);  // the kernel is short of something: give it a moment
    piece.next = retries_;
    retries_ = &piece;
    return;
  }
  const std::string what =
      absl::StrFormat("device %s: %s of %s, offset %u, %u bytes: %s%s", queue_.device_name_,
                      std::string(OpName(piece.op)).c_str(), piece.slot->file->path(), piece.device_offset(),
                      piece.device_bytes(), ErrnoText(error), why != nullptr ? absl::StrCat(": ", *why) : "");
  if (may_repeat && IsRetryableDeviceError(error) &&
      piece.io_errors < static_cast<uint32_t>(queue_.core_.options.io_error_retries)) {
    ++piece.io_errors;
    counters_.retries.Add(1);
    counters_.io_errors_retried.Add(1);
    queue_.core_.Log(absl::StrCat(what, "; trying again"));
    Send(piece);
    return;
  }
  // The first few in full, then every power of two: a dead drive must not fill the log.
  ++device_errors_;
  if (device_errors_ <= 4 || IsPowerOfTwo(device_errors_)) {
    queue_.core_.Log(absl::StrCat(what, "; failure number ", device_errors_, " on this device"));
  }
  End(piece, error);
}

void DeviceQueue::Transfers::End(Piece& piece, int error) {
  Request& request = *piece.request;
  FileSlot& slot = *piece.slot;
  const int64_t service_ns = std::max<int64_t>(0, queue_.now_ns_ - piece.start_ns);
  counters_.PieceEnded(request.op_, service_ns);
  if (error == 0 && request.op_ != Op::kSync) {
    const std::string slow = slow_.Ended(request.op_, service_ns, queue_.now_ns_);
    if (!slow.empty()) queue_.core_.Log(absl::StrCat("device ", queue_.device_name_, " ", slow));
  }
  PENSTOCK_CHECK(request.pieces_in_flight_ > 0, "a piece that ends twice");
  queue_.scheduler_->Ended(request.op_, piece.charged_bytes);
  bounces_.TakeBack(piece);
  if (request.op_ == Op::kWrite) --slot.writes_in_flight;
  if (error == 0 || error == Request::kEndOfFile) {
    request.done_bytes_.store(request.done_bytes() + piece.user_bytes, std::memory_order_relaxed);
  }
  piece.request = nullptr;
  piece.next = free_;
  free_ = &piece;

  --request.pieces_in_flight_;
  queue_.EndPiece(request, error);
  RunTrims(slot);
}

}  // namespace penstock::aio
