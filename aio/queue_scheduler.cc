#include "aio/queue_scheduler.h"

#include <algorithm>
#include <utility>

#include "aio/bytes.h"
#include "base/check.h"

namespace penstock::aio {
namespace {

// A class that waits lets at most this much of more urgent classes go first, then has one block's turn.
constexpr uint64_t kPassOverBytes = 32 * kMiB;

}  // namespace

DeviceQueue::RequestList& DeviceQueue::Scheduler::ListOf(const Request& request) {
  if (request.op_ == Op::kSync) return syncs_;
  return lists_[static_cast<size_t>(DirectionOf(request.op_))][static_cast<size_t>(request.priority_)];
}

void DeviceQueue::Scheduler::Add(Request& request) {
  ListOf(request).PushBack(&request);
  request.queued_ = true;
  queued_.Add(1);
}

void DeviceQueue::Scheduler::Remove(Request& request) {
  ListOf(request).PopFront();
  request.queued_ = false;
  queued_.Add(~uint64_t{0});
}

DeviceQueue::RequestList DeviceQueue::Scheduler::Take(bool all) {
  RequestList taken;
  const auto sweep = [&](RequestList& list) {
    RequestList before = std::exchange(list, {});
    while (!before.empty()) {
      Request* const request = before.PopFront();
      if (all || request->cancel_.load(std::memory_order_relaxed)) {
        request->queued_ = false;
        queued_.Add(~uint64_t{0});
        taken.PushBack(request);
      } else {
        list.PushBack(request);
      }
    }
  };
  for (auto& direction : lists_) {
    for (RequestList& list : direction) sweep(list);
  }
  sweep(syncs_);
  return taken;
}

Request* DeviceQueue::Scheduler::Next(int direction) const {
  const auto& lists = lists_[static_cast<size_t>(direction)];
  const auto& passed_over = passed_over_[static_cast<size_t>(direction)];
  Request* next = nullptr;
  uint64_t passed_over_by_others = 0;
  for (size_t c = kPriorities; c-- > 0;) {
    if (lists[c].empty()) continue;
    if (next != nullptr && passed_over_by_others >= kPassOverBytes) break;
    next = lists[c].first;
    passed_over_by_others = passed_over[c];
  }
  return next;
}

bool DeviceQueue::Scheduler::HasRoom(const Request& request, uint64_t bytes) const {
  const int direction = DirectionOf(request.op_);
  const uint64_t in_flight = in_flight_bytes_[static_cast<size_t>(direction)];
  const uint64_t cap_bytes =
      (direction == kReads ? core_.read_cap_bytes : core_.write_cap_bytes).load(std::memory_order_relaxed);
  // A demand never waits for lesser reads to make room.
  const bool demands = request.priority_ == Priority::kDemand && direction == kReads;
  return in_flight == 0 || in_flight + bytes <= cap_bytes + (demands ? 2 * core_.options.block_bytes : 0);
}

int DeviceQueue::Scheduler::TakeTurn() { return std::exchange(next_direction_, 1 - next_direction_); }

void DeviceQueue::Scheduler::Cut(Request& request, uint64_t bytes) {
  const auto direction = static_cast<size_t>(DirectionOf(request.op_));
  const auto picked = static_cast<size_t>(request.priority_);
  for (size_t c = picked + 1; c < kPriorities; ++c) {
    if (!lists_[direction][c].empty()) passed_over_[direction][c] += bytes;
  }
  passed_over_[direction][picked] = 0;
  if (request.cut_bytes_ != request.bytes_) return;
  Remove(request);
  if (request.priority_ == Priority::kDemand) {
    request.tail_ = true;
    ++demand_tails_;
  }
}

void DeviceQueue::Scheduler::Launched(Op op, uint64_t bytes) {
  ++in_flight_pieces_;
  InFlight(op) += bytes;
}

void DeviceQueue::Scheduler::Ended(Op op, uint64_t bytes) {
  PENSTOCK_CHECK(in_flight_pieces_ > 0 && InFlight(op) >= bytes, "a piece that ends twice");
  --in_flight_pieces_;
  InFlight(op) -= bytes;
}

void DeviceQueue::Scheduler::Completed(Request& request) {
  if (std::exchange(request.tail_, false)) --demand_tails_;
}

uint32_t DeviceQueue::Scheduler::Batch() const {
  if (demand_tails_ != 0 || queued_.Get() == 0) return 1;
  return std::clamp(in_flight_pieces_ * 5 / 16, 1u, kMostWanted);
}

}  // namespace penstock::aio
