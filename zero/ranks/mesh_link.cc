#include "zero/ranks/mesh_link.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace penstock::zero {

static_assert(std::is_trivially_copyable_v<MeshFrame>);

void MeshLink::Start(End* end, uint64_t number) {
  PENSTOCK_CHECK(broken_.empty() && !end->started && end->bytes > 0, "a message that cannot be started");
  end->started = true;
  end->number = number;
  if (!end->sends) {
    PENSTOCK_CHECK(receives_.emplace(number, end).second, "two messages of one number");
    outgoing_.push_back({.frame = {.kind = MeshKind::kAsks, .number = number, .bytes = end->bytes}});
    return;
  }
  PENSTOCK_CHECK(sends_.emplace(number, end).second, "two messages of one number");
  const auto asked = asked_.find(number);
  if (asked == asked_.end()) return;
  const uint64_t bytes = asked->second;
  asked_.erase(asked);
  if (IsAskedFor(end, bytes)) QueuePiece(end);
}

void MeshLink::Drop(End* end) {
  if (!end->started || end->over) return;
  std::map<uint64_t, End*>& of = end->sends ? sends_ : receives_;
  if (const auto at = of.find(end->number); at != of.end() && at->second == end) of.erase(at);
  if (broken_.empty()) Break("a message was given up");
}

void MeshLink::Break(const std::string& why) {
  broken_ = why;
  outgoing_.clear();
  to_ = nullptr;
  left_ = 0;
  changed_ = true;
}

std::span<char> MeshLink::Place() {
  if (left_ > 0) return {to_->data + to_->done, left_};
  return {reinterpret_cast<char*>(&frame_) + of_frame_, sizeof(frame_) - of_frame_};
}

void MeshLink::Received(size_t bytes) {
  PENSTOCK_CHECK(bytes <= Place().size(), "more received than there was room for");
  if (left_ == 0) {
    of_frame_ += bytes;
    if (of_frame_ == sizeof(frame_)) TakeFrame();
    return;
  }
  left_ -= bytes;
  to_->done += bytes;
  if (left_ > 0) return;
  End* const end = std::exchange(to_, nullptr);
  if (end->done == end->bytes) Over(&receives_, end);
}

void MeshLink::TakeFrame() {
  const MeshFrame frame = frame_;
  of_frame_ = 0;
  if (frame.kind == MeshKind::kAsks) return TakeRequest(frame);
  const auto receives = receives_.find(frame.number);
  if (frame.kind != MeshKind::kPiece || receives == receives_.end() || frame.bytes == 0 ||
      frame.bytes > receives->second->bytes - receives->second->done)
    return Break("it sent what nobody waits for");
  to_ = receives->second;
  left_ = frame.bytes;
}

void MeshLink::TakeRequest(const MeshFrame& frame) {
  if (const auto sends = sends_.find(frame.number); sends != sends_.end()) {
    if (IsAskedFor(sends->second, frame.bytes)) QueuePiece(sends->second);
    return;
  }
  if (asked_.size() >= kMeshMostAsked)
    return Break(absl::StrCat("it asks for more than ", kMeshMostAsked, " messages ahead"));
  if (!asked_.emplace(frame.number, frame.bytes).second) Break("it asks for a message twice");
}

// false: and the link is broken.
bool MeshLink::IsAskedFor(End* end, uint64_t bytes) {
  if (end->asked) {
    Break("it asks for a message twice");
  } else if (bytes != end->bytes) {
    Break(absl::StrCat(bytes, " bytes are waited for where ", end->bytes, " are sent"));
  }
  end->asked = true;
  return broken_.empty();
}

void MeshLink::QueuePiece(End* end) {
  const size_t bytes = std::min(kMeshPieceBytes, end->bytes - end->done);
  outgoing_.push_back(
      {.frame = {.kind = MeshKind::kPiece, .number = end->number, .bytes = bytes}, .of = end});
}

std::span<const iovec> MeshLink::ToSend() {
  const Outgoing& first = outgoing_.front();
  size_t count = 0;
  if (first.sent < sizeof(MeshFrame)) {
    const char* frame = reinterpret_cast<const char*>(&first.frame) + first.sent;
    parts_[count++] = {const_cast<char*>(frame), sizeof(MeshFrame) - first.sent};
  }
  if (first.of != nullptr) {
    const size_t sent = first.sent - std::min(first.sent, sizeof(MeshFrame));
    parts_[count++] = {first.of->data + first.of->done + sent, first.frame.bytes - sent};
  }
  return {parts_.data(), count};
}

void MeshLink::Sent(size_t bytes) {
  Outgoing& first = outgoing_.front();
  first.sent += bytes;
  const size_t of_piece = first.of != nullptr ? first.frame.bytes : 0;
  PENSTOCK_CHECK(first.sent <= sizeof(MeshFrame) + of_piece, "more sent than there was to send");
  if (first.sent < sizeof(MeshFrame) + of_piece) return;
  End* const end = first.of;
  outgoing_.pop_front();
  if (end == nullptr) return;
  end->done += of_piece;
  if (end->done < end->bytes) {
    QueuePiece(end);
  } else {
    Over(&sends_, end);
  }
}

void MeshLink::Over(std::map<uint64_t, End*>* of, End* end) {
  of->erase(end->number);
  end->over = true;
  changed_ = true;
}

bool MeshLink::TakeChanged() { return std::exchange(changed_, false); }

}  // namespace penstock::zero
