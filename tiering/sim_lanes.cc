#include "tiering/sim_lanes.h"

#include <algorithm>

namespace penstock::tiering {

bool SimLanes::HasRoom(Lane lane) const {
  if (lane == Lane::kCompute) return static_cast<size_t>(compute_running_) + computes_.size() < 2;
  return true;
}

double SimLanes::Duration(const Op& op) const {
  switch (op.lane) {
    case Lane::kRead:
      return static_cast<double>(op.bytes) / machine_.read_bytes_per_s;
    case Lane::kWrite:
      return static_cast<double>(op.bytes) / machine_.write_bytes_per_s;
    case Lane::kCommit:
      return plan_.on_nvme ? machine_.commit_seconds : 0;
    case Lane::kUpdate: {
      if (op.kind == OpKind::kFinalize) {
        const int64_t elements = plan_.blocks[static_cast<size_t>(op.block)].elements;
        return static_cast<double>(elements * plan_.precision.gradient_bytes) / machine_.verify_bytes_per_s;
      }
      const int64_t elements =
          plan_.blocks[static_cast<size_t>(op.block)].tiles[static_cast<size_t>(op.tile)].elements;
      if (op.kind == OpKind::kVerify) {
        return static_cast<double>(elements * plan_.precision.weight_bytes()) / machine_.verify_bytes_per_s;
      }
      return static_cast<double>(elements) / machine_.update_parameters_per_s;
    }
    case Lane::kCompute:
    case Lane::kHost:
      return op.seconds;
  }
  return 0;
}

void SimLanes::Start(OpId id, const Op& op) {
  Pending pending{id, Duration(op), now_, fault_ ? fault_(op) : absl::OkStatus()};
  switch (op.lane) {
    case Lane::kRead:
      reads_.push_back(std::move(pending));
      break;
    case Lane::kWrite:
      writes_.push_back(std::move(pending));
      break;
    case Lane::kUpdate:
      updates_.push_back(std::move(pending));
      break;
    case Lane::kCompute:
      computes_.push_back(std::move(pending));
      break;
    case Lane::kCommit:
    case Lane::kHost:
      Finish(now_, pending, now_ + pending.duration, op.lane);
      break;
  }
}

void SimLanes::Serve() {
  // The drive takes one operation at a time, so that a demand read that arrives is next.
  while (drive_free_ <= now_ && (!reads_.empty() || !writes_.empty())) {
    std::deque<Pending>& queue = reads_.empty() ? writes_ : reads_;
    const Pending pending = std::move(queue.front());
    queue.pop_front();
    drive_free_ = now_ + pending.duration;
    drive_busy_seconds_ += pending.duration;
    Finish(now_, pending, drive_free_ + machine_.io_latency_seconds, Lane::kRead);
    if (pending.duration > 0) {
      // A wake-up of its own: the server is free before the latency of its operation has passed.
      events_.push(Event{drive_free_, -1, now_, Lane::kHost, absl::OkStatus()});
    }
  }
  while (compute_running_ == 0 && !computes_.empty()) {
    const Pending pending = std::move(computes_.front());
    computes_.pop_front();
    ++compute_running_;
    Finish(now_, pending, now_ + pending.duration, Lane::kCompute);
  }
  while (updates_running_ < std::max(1, machine_.update_workers) && !updates_.empty()) {
    const Pending pending = std::move(updates_.front());
    updates_.pop_front();
    ++updates_running_;
    Finish(now_, pending, now_ + pending.duration, Lane::kUpdate);
  }
}

void SimLanes::Wait(std::vector<Completion>* completions) {
  while (completions->empty()) {
    Serve();
    if (events_.empty()) return;  // nothing was started: the executor never asks then
    const double end = events_.top().end;
    now_ = std::max(now_, end);
    while (!events_.empty() && events_.top().end <= now_) {
      Event event = events_.top();
      events_.pop();
      if (event.lane == Lane::kCompute) --compute_running_;
      if (event.lane == Lane::kUpdate) --updates_running_;
      if (event.id >= 0) completions->push_back({event.id, std::move(event.status), event.start, event.end});
    }
  }
}

}  // namespace penstock::tiering
