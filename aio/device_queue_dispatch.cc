// The part of a device queue that decides what goes to the device next, and what to do when it comes back.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/bytes.h"
#include "aio/device_queue.h"
#include "aio/io_error.h"
#include "base/check.h"

namespace penstock::aio {
namespace {

constexpr int kReads = 0;
constexpr int kWrites = 1;
// A class that waits lets at most this much of more urgent classes go first, then has one block's turn.
constexpr uint64_t kPassOverBytes = 32 * kMiB;
constexpr uint32_t kAttemptsMax = 64;    // transient refusals of one transfer without any progress
constexpr uint32_t kAttemptsAtOnce = 4;  // of these, so many without a pause

int DirectionOf(Op op) { return op == Op::kWrite ? kWrites : kReads; }

}  // namespace

DeviceQueue::RequestQueue& DeviceQueue::QueueOf(const Request& request) {
  if (request.op_ == Op::kSync) return syncs_;
  return queues_[static_cast<size_t>(DirectionOf(request.op_))][static_cast<size_t>(request.priority_)];
}

void DeviceQueue::Unqueue(RequestQueue& queue, Request& request) {
  queue.PopFront();
  request.queued_ = false;
  queued_requests_.Add(~uint64_t{0});
}

void DeviceQueue::Dispatch() {
  while (retries_first_ != nullptr) {
    Piece* const piece = retries_first_;
    retries_first_ = piece->next;
    SendToDevice(*piece);
  }
  while (syncs_.first != nullptr && free_pieces_ != nullptr) {
    Request& request = *syncs_.first;
    Piece& piece = *free_pieces_;
    free_pieces_ = piece.next;
    piece = Piece();
    piece.kind = Piece::Kind::kSync;
    piece.op = Op::kSync;
    Launch(request, piece);
    Unqueue(syncs_, request);
  }
  // One block of each direction in turn, so that neither fills all places.
  for (bool any = true; any;) {
    any = DispatchFrom(next_direction_);
    any |= DispatchFrom(1 - next_direction_);
  }
  next_direction_ = 1 - next_direction_;
}

// The class whose turn it is: the most urgent that waits, unless a lesser one was passed over for too long.
// That one then goes first even if it has to wait for room, or demands, which may go beyond the cap, would
// keep the room from it.
int DeviceQueue::PickClass(int direction) const {
  const auto& queues = queues_[static_cast<size_t>(direction)];
  const auto& passed_over = passed_over_[static_cast<size_t>(direction)];
  int picked = -1;
  for (int c = kPriorities - 1; c >= 0; --c) {
    if (queues[static_cast<size_t>(c)].first == nullptr) continue;
    if (picked >= 0 && passed_over[static_cast<size_t>(picked)] >= kPassOverBytes) break;
    picked = c;
  }
  return picked;
}

bool DeviceQueue::DispatchFrom(int direction) {
  const auto d = static_cast<size_t>(direction);
  const uint64_t cap_bytes =
      (direction == kReads ? core_.read_cap_bytes : core_.write_cap_bytes).load(std::memory_order_relaxed);
  const int picked = PickClass(direction);
  if (picked < 0 || free_pieces_ == nullptr) return false;
  RequestQueue& queue = queues_[d][static_cast<size_t>(picked)];
  Request& request = *queue.first;

  Piece& piece = *free_pieces_;
  Piece* const next_free = piece.next;
  piece = Piece();
  piece.next = next_free;
  piece.slot = request.slot_;
  Cutter::Next(request, {core_.options.block_bytes, core_.options.bounce_bytes}, piece);
  // A demand never waits for lesser reads to make room.
  const uint64_t reserve = picked == 0 && direction == kReads ? 2 * core_.options.block_bytes : 0;
  if (in_flight_bytes_[d] != 0 && in_flight_bytes_[d] + piece.bytes > cap_bytes + reserve) return false;
  const bool bounced = piece.kind != Piece::Kind::kInPlace;
  const int error = bounced ? WhyNotBounced(request, piece) : 0;
  if (error != 0) {
    Unqueue(queue, request);
    FinishCut(request, false, error);
    CompleteIfDone(request);
    return true;
  }
  if (MustWait(piece)) return false;

  free_pieces_ = next_free;
  for (size_t c = static_cast<size_t>(picked) + 1; c < kPriorities; ++c) {
    if (queues_[d][c].first != nullptr) passed_over_[d][c] += piece.bytes;
  }
  passed_over_[d][static_cast<size_t>(picked)] = 0;
  Cutter::Take(request, piece);
  if (bounced) {
    piece.bounce = free_bounces_.back();
    free_bounces_.pop_back();
    piece.data = bounce_memory_->data() + static_cast<uint64_t>(piece.bounce) * bounce_bytes_;
  }
  Launch(request, piece);
  if (request.cut_bytes_ == request.bytes_) {
    Unqueue(queue, request);
    if (request.priority_ == Priority::kDemand) {
      request.tail_ = true;
      ++demand_tails_;
    }
  }
  return true;
}

// No bounce buffer is free, the sector is being rewritten, or the file is about to be cut to its length. All
// of these end with a completion, so a piece that waits is looked at again in time.
bool DeviceQueue::MustWait(const Piece& piece) const {
  if (piece.op == Op::kWrite && piece.slot->trims != nullptr) return true;
  if (piece.kind == Piece::Kind::kInPlace) return false;
  if (free_bounces_.empty()) return true;
  if (piece.kind != Piece::Kind::kOneSector) return false;
  return std::any_of(sectors_.begin(), sectors_.end(), [&](const Piece* other) {
    return other->slot == piece.slot && other->offset == piece.offset;
  });
}

// Ragged transfers go through memory of the host, which a device's is not copied to or from here.
int DeviceQueue::WhyNotBounced(const Request& request, const Piece& piece) {
  if (const DeviceTransfers* const device = backend_->device_transfers(); device != nullptr) {
    uint64_t seen = 0;
    for (const Segment* segment = request.segments() + piece.segment; seen < piece.user_bytes; ++segment) {
      if (device->Has(segment->data, 1)) return EINVAL;
      seen += segment->bytes - (seen == 0 ? piece.segment_offset : 0);
    }
  }
  return bounce_memory_ != nullptr || MakeBounceBuffers() ? 0 : ENOMEM;
}

bool DeviceQueue::MakeBounceBuffers() {
  bounce_bytes_ = AlignUp(core_.options.bounce_bytes, kSectorBytes);
  // In huge pages, as what is moved in place: a device takes a transfer to many small ones at half the speed.
  ArenaOptions options;
  options.bytes = bounce_bytes_ * core_.options.bounce_buffers;
  options.lock = options.touch = options.try_hugetlb = false;
  absl::StatusOr<std::unique_ptr<Arena>> memory = Arena::Create(options);
  if (!memory.ok()) return false;
  bounce_memory_ = *std::move(memory);
  for (uint32_t i = 0; i < core_.options.bounce_buffers; ++i) free_bounces_.push_back(static_cast<int>(i));
  return true;
}

void DeviceQueue::Launch(Request& request, Piece& piece) {
  piece.request = &request;
  piece.slot = request.slot_;
  piece.next = nullptr;
  piece.start_ns = now_ns_;
  if (request.state_.load(std::memory_order_relaxed) == Request::State::kQueued) {
    request.start_ns_.store(now_ns_, std::memory_order_relaxed);
    request.state_.store(Request::State::kActive, std::memory_order_release);
  }
  ++request.pieces_in_flight_;
  ++in_flight_pieces_;
  if (request.op_ == Op::kWrite) ++piece.slot->writes_in_flight;
  piece.charged_bytes = piece.bytes;
  in_flight_bytes_[static_cast<size_t>(DirectionOf(request.op_))] += piece.charged_bytes;

  piece_count_.Add(1);
  switch (piece.kind) {
    case Piece::Kind::kInPlace:
      piece.fixed_buffer = backend_->FixedBuffer(piece.data, piece.bytes);
      if (piece.fixed_buffer >= 0) fixed_pieces_.Add(1);
      break;
    case Piece::Kind::kBounced:
      bounced_pieces_.Add(1);
      if (piece.op == Op::kWrite) Cutter::CopyIn(piece);
      break;
    case Piece::Kind::kOneSector:
      bounced_pieces_.Add(1);
      sectors_.push_back(&piece);
      if (piece.user_bytes == piece.bytes) {
        Cutter::CopyIn(piece);
      } else {
        piece.op = Op::kRead;
        read_modify_writes_.Add(1);
      }
      break;
    case Piece::Kind::kSync:
      break;
  }
  SendToDevice(piece);
}

void DeviceQueue::SendToDevice(Piece& piece) { backend_->Queue(piece); }

void DeviceQueue::HandleCompletion(const Completion& completion) {
  Piece& piece = *completion.piece;
  if (completion.result < 0) {
    RetryOrFail(piece, static_cast<int>(-completion.result), completion.why.get());
    return;
  }
  const auto moved = static_cast<uint64_t>(completion.result);
  if (piece.op != Op::kSync && core_.saturated.on()) saturated_bytes_.Add(moved);
  switch (piece.op) {
    case Op::kRead:
      device_read_bytes_.Add(moved);
      AfterRead(piece, moved);
      return;
    case Op::kWrite:
      device_write_bytes_.Add(moved);
      AfterWrite(piece, moved);
      return;
    case Op::kSync:
      Retire(piece, 0);
      return;
  }
}

void DeviceQueue::AfterRead(Piece& piece, uint64_t moved) {
  const bool sector = piece.kind == Piece::Kind::kOneSector;
  const uint64_t needed = sector ? piece.bytes : piece.lead_bytes + piece.user_bytes;
  const uint64_t reached = std::min(piece.resume_bytes + moved, piece.bytes);
  const bool end_of_file = reached <= piece.moved_bytes;
  piece.moved_bytes = std::max(piece.moved_bytes, reached);
  if (piece.moved_bytes < needed && !end_of_file) {
    // Short: go on from the last whole sector.
    short_transfers_.Add(1);
    piece.attempts = 0;
    piece.resume_bytes = AlignDown(piece.moved_bytes, piece.slot->file->alignment().offset);
    SendToDevice(piece);
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
    SendToDevice(piece);
    return;
  }
  if (piece.moved_bytes < needed) {
    piece.user_bytes = piece.moved_bytes - std::min(piece.moved_bytes, piece.lead_bytes);
  }
  if (piece.kind == Piece::Kind::kBounced) Cutter::CopyOut(piece);
  Retire(piece, piece.moved_bytes < needed ? Request::kEndOfFile : 0);
}

void DeviceQueue::AfterWrite(Piece& piece, uint64_t moved) {
  const uint64_t reached = std::min(piece.resume_bytes + moved, piece.bytes);
  if (reached <= piece.moved_bytes) {
    RetryOrFail(piece, EAGAIN);  // a write that writes nothing and says nothing
    return;
  }
  piece.moved_bytes = reached;
  if (reached < piece.bytes) {
    short_transfers_.Add(1);
    piece.attempts = 0;
    piece.resume_bytes = AlignDown(reached, piece.slot->file->alignment().offset);
    SendToDevice(piece);
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
  Retire(piece, 0);
}

// Cuts a file back to where its last write ended, once every write in flight on it is one that waits for
// this. The file's length then changes under no transfer of ours.
void DeviceQueue::RunTrims(FileSlot& slot) {
  if (slot.trims == nullptr || slot.writes_in_flight != slot.trim_count) return;
  const Piece* last = slot.trims;
  for (const Piece* piece = slot.trims; piece != nullptr; piece = piece->next) {
    if (piece->offset > last->offset) last = piece;
  }
  const uint64_t end = std::max(last->file_end, last->offset + last->lead_bytes + last->user_bytes);
  const absl::StatusOr<uint64_t> size = slot.file->Size();
  absl::Status status = size.status();
  if (status.ok() && *size == last->offset + last->bytes) status = slot.file->Resize(end);
  if (!status.ok()) core_.Log(absl::StrCat("device ", device_name_, ": ", std::string(status.message())));
  Piece* piece = std::exchange(slot.trims, nullptr);
  slot.trim_count = 0;
  while (piece != nullptr) Retire(*std::exchange(piece, piece->next), status.ok() ? 0 : EIO);
}

void DeviceQueue::RetryOrFail(Piece& piece, int error, const std::string* why) {
  // A sync that failed stays failed: the kernel has by then told of what it could not write and forgotten it,
  // and a second one would succeed and mean nothing. Only one that was broken off has told of nothing. One
  // that the kernel would not even take never gets here: backends keep it.
  const bool may_repeat = piece.op != Op::kSync || error == EINTR;
  if (may_repeat && IsTransientError(error) && piece.attempts < kAttemptsMax) {
    ++piece.attempts;
    retries_.Add(1);
    if (piece.attempts <= kAttemptsAtOnce) {
      SendToDevice(piece);
      return;
    }
    if (threaded_) usleep(200);  // the kernel is short of something: give it a moment
    piece.next = retries_first_;
    retries_first_ = &piece;
    return;
  }
  const std::string what =
      absl::StrFormat("device %s: %s of %s, offset %u, %u bytes: %s%s", device_name_,
                      std::string(OpName(piece.op)).c_str(), piece.slot->file->path(), piece.device_offset(),
                      piece.device_bytes(), ErrnoText(error), why != nullptr ? absl::StrCat(": ", *why) : "");
  if (may_repeat && IsRetryableDeviceError(error) &&
      piece.io_errors < static_cast<uint32_t>(core_.options.io_error_retries)) {
    ++piece.io_errors;
    retries_.Add(1);
    io_errors_retried_.Add(1);
    core_.Log(absl::StrCat(what, "; trying again"));
    SendToDevice(piece);
    return;
  }
  // The first few in full, then every power of two: a dead drive must not fill the log.
  ++device_errors_;
  if (device_errors_ <= 4 || IsPowerOfTwo(device_errors_)) {
    core_.Log(absl::StrCat(what, "; failure number ", device_errors_, " on this device"));
  }
  Retire(piece, error);
}

// The end of a piece, whatever the reason.
void DeviceQueue::Retire(Piece& piece, int error) {
  Request& request = *piece.request;
  FileSlot& slot = *piece.slot;
  const int64_t service_ns = std::max<int64_t>(0, now_ns_ - piece.start_ns);
  service_[static_cast<size_t>(request.op_)].Record(static_cast<uint64_t>(service_ns));
  if (error == 0 && request.op_ != Op::kSync) WatchService(request.op_, service_ns);
  uint64_t& in_flight_bytes = in_flight_bytes_[static_cast<size_t>(DirectionOf(request.op_))];
  PENSTOCK_CHECK(
      in_flight_pieces_ > 0 && request.pieces_in_flight_ > 0 && in_flight_bytes >= piece.charged_bytes,
      "a piece that ends twice");
  in_flight_bytes -= piece.charged_bytes;
  --in_flight_pieces_;
  if (piece.bounce >= 0) free_bounces_.push_back(piece.bounce);
  if (piece.kind == Piece::Kind::kOneSector) std::erase(sectors_, &piece);
  if (request.op_ == Op::kWrite) --slot.writes_in_flight;
  if (error == 0 || error == Request::kEndOfFile) {
    request.done_bytes_.store(request.done_bytes() + piece.user_bytes, std::memory_order_relaxed);
  }
  piece.request = nullptr;
  piece.next = free_pieces_;
  free_pieces_ = &piece;

  --request.pieces_in_flight_;
  if (error != 0) {
    FinishCut(request, false, error);
    // A request with pieces in flight that still waits in a queue is that queue's first.
    if (request.queued_) Unqueue(QueueOf(request), request);
  }
  CompleteIfDone(request);
  RunTrims(slot);
}

// After the queue was filled: what is in flight now stays so until the next completions.
void DeviceQueue::UpdateWatches() {
  const uint64_t total = in_flight_bytes_[kReads] + in_flight_bytes_[kWrites];
  in_flight_now_.Set(total);
  if (total > in_flight_peak_.Get()) in_flight_peak_.Set(total);
  const bool busy = in_flight_pieces_ != 0;
  if (busy != busy_) {
    busy_ = busy;
    busy_watch_.Set(busy, now_ns_);
    core_.busy.Set(busy, now_ns_);
  }
  const bool saturated = busy && total >= core_.saturating_bytes_in_flight.load(std::memory_order_relaxed);
  if (saturated != saturated_) {
    saturated_ = saturated;
    saturated_watch_.Set(saturated, now_ns_);
    core_.saturated.Set(saturated, now_ns_);
  }
}

// How many completions one system call waits for. More than one only while there is more to hand over and
// nobody waits for the very pieces in flight; a quarter of them leaves the device three quarters to go on
// with.
uint32_t DeviceQueue::Batch() const {
  if (demand_tails_ != 0 || retries_first_ != nullptr || queued_requests_.Get() == 0) return 1;
  return std::clamp(in_flight_pieces_ * 5 / 16, 1u, kMostWanted);
}

int64_t DeviceQueue::TimeoutNs() const {
  if (retries_first_ != nullptr) return 0;
  if (all_first_ == nullptr) return -1;
  if (in_flight_pieces_ == 0) return 1'000'000;
  if (core_.options.stuck_after_ms <= 0) return -1;
  return std::clamp<int64_t>(next_stuck_check_ns_ - now_ns_, 1'000'000, 1'000'000'000);
}

}  // namespace penstock::aio
