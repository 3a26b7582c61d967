// Which block goes to the device next: requests that are not fully cut, by direction and priority, and what
// is in flight of them.
//
// Of each direction the most urgent request that waits is served, and one block of each direction in turn. A
// class of priority that waits lets at most 32 MiB of more urgent classes go first, then has one block's
// turn. In flight never exceeds the engine's cap of the direction; demand reads may exceed it by two blocks.
#ifndef PENSTOCK_AIO_QUEUE_SCHEDULER_H_
#define PENSTOCK_AIO_QUEUE_SCHEDULER_H_

#include <array>
#include <cstdint>

#include "aio/device_queue.h"

namespace penstock::aio {

// The queue's thread only. Allocates nothing.
class DeviceQueue::Scheduler {
 public:
  // queued: how many requests wait.
  Scheduler(const EngineCore& core, Counter& queued) : core_(core), queued_(queued) {}

  void Add(Request& request);
  // The request waits no more; it is the first of its class.
  void Remove(Request& request);
  // Removes all requests, or those that are to be cancelled, and returns them.
  RequestList Take(bool all);

  Request* NextSync() const { return syncs_.first; }
  // The request whose block goes next, null if none waits. It goes first even if it has to wait for room:
  // demands, which may go beyond the cap, would else keep the room from it.
  Request* Next(int direction) const;
  bool HasRoom(const Request& request, uint64_t bytes) const;
  // The direction that is asked first; the other one from the next call on.
  int TakeTurn();

  // A block of the request, which is its class's first, goes to the device.
  void Cut(Request& request, uint64_t bytes);
  void Launched(Op op, uint64_t bytes);
  void Ended(Op op, uint64_t bytes);
  void Completed(Request& request);

  uint64_t in_flight_bytes() const { return in_flight_bytes_[kReads] + in_flight_bytes_[kWrites]; }
  uint32_t in_flight_pieces() const { return in_flight_pieces_; }
  // How many completions one system call waits for. More than one only while there is more to hand over and
  // nobody waits for the very pieces in flight; a quarter of them leaves the device three quarters to go on
  // with.
  uint32_t Batch() const;

 private:
  static constexpr int kReads = 0;
  static constexpr int kWrites = 1;
  static int DirectionOf(Op op) { return op == Op::kWrite ? kWrites : kReads; }
  RequestList& ListOf(const Request& request);
  uint64_t& InFlight(Op op) { return in_flight_bytes_[static_cast<size_t>(DirectionOf(op))]; }

  const EngineCore& core_;
  Counter& queued_;
  std::array<std::array<RequestList, kPriorities>, 2> lists_;  // [direction][priority]
  RequestList syncs_;
  std::array<std::array<uint64_t, kPriorities>, 2> passed_over_{};  // bytes that went before a waiting class
  std::array<uint64_t, 2> in_flight_bytes_{};
  uint32_t in_flight_pieces_ = 0;
  uint32_t demand_tails_ =
      0;  // demand requests that are fully cut and in flight: somebody waits for these pieces
  int next_direction_ = kReads;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_QUEUE_SCHEDULER_H_
