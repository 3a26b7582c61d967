#include "tiering/simulate/sim_lanes.h"

#include <algorithm>
#include <limits>

#include "tiering/simulate/op_work.h"

namespace penstock::tiering {

bool SimLanes::HasRoom(Lane lane) const {
  if (lane == Lane::kCompute) return (computing_.has_value() ? 1 : 0) + computes_.size() < 2;
  return true;
}

double SimLanes::Work(const Op& op) const {
  switch (op.lane) {
    case Lane::kRead:
    case Lane::kWrite:
    case Lane::kCopyIn:
    case Lane::kCopyOut:
    case Lane::kAllGather:
    case Lane::kReduceScatter:
      return static_cast<double>(op.bytes);
    case Lane::kCommit:
      if (op.kind == OpKind::kAgree) return machine_.network_latency_seconds;
      return plan_.on_nvme && op.durable ? machine_.commit_seconds : 0;
    case Lane::kUpdate:
      return static_cast<double>(UpdateWork(plan_, op)) /
             (op.kind == OpKind::kUpdate ? machine_.update_parameters_per_s : machine_.verify_bytes_per_s);
    case Lane::kCompute:
      if (op.kind != OpKind::kUpdateOnDevice) return op.seconds;
      return static_cast<double>(UpdateWork(plan_, op)) / machine_.device_update_parameters_per_s;
    case Lane::kHost:
      return op.seconds;
  }
  return 0;
}

void SimLanes::Start(OpId id, const Op& op) {
  Job job{id, op.lane, Work(op), now_, fault_ ? fault_(op) : absl::OkStatus()};
  work_[static_cast<size_t>(op.lane)] += job.left;
  switch (op.lane) {
    case Lane::kRead:
      (op.kind == OpKind::kReadWeights ? urgent_reads_ : reads_).push_back(std::move(job));
      break;
    case Lane::kWrite:
      writes_.push_back(std::move(job));
      break;
    case Lane::kUpdate:
      updates_.push_back(std::move(job));
      break;
    case Lane::kCompute:
      computes_.push_back(std::move(job));
      break;
    case Lane::kCopyIn:
      copies_in_.push_back(std::move(job));
      break;
    case Lane::kCopyOut:
      copies_out_.push_back(std::move(job));
      break;
    case Lane::kAllGather:
      gathers_.push_back(std::move(job));
      break;
    case Lane::kReduceScatter:
      reduces_.push_back(std::move(job));
      break;
    case Lane::kCommit:
    case Lane::kHost:
      events_.push(Event{now_ + job.left, id, now_, job.status});
      break;
  }
}

void SimLanes::Serve() {
  auto take = [this](std::deque<Job>& queue) {
    Job job = std::move(queue.front());
    queue.pop_front();
    job.start = now_;
    return job;
  };
  if (!reading_ && !urgent_reads_.empty()) reading_ = take(urgent_reads_);
  if (!reading_ && !reads_.empty()) reading_ = take(reads_);
  if (!writing_ && !writes_.empty()) writing_ = take(writes_);
  if (!computing_ && !computes_.empty()) computing_ = take(computes_);
  if (!copying_in_ && !copies_in_.empty()) copying_in_ = take(copies_in_);
  if (!copying_out_ && !copies_out_.empty()) copying_out_ = take(copies_out_);
  if (!gathering_ && !gathers_.empty()) gathering_ = take(gathers_);
  if (!reducing_ && !reduces_.empty()) reducing_ = take(reduces_);
  while (updating_.size() < static_cast<size_t>(std::max(1, machine_.update_workers)) && !updates_.empty()) {
    updating_.push_back(take(updates_));
  }
}

double SimLanes::Rate(const Job& job) const {
  switch (job.lane) {
    case Lane::kRead:
      return writing_ ? machine_.mixed_rate(machine_.read_bytes_per_s) : machine_.read_bytes_per_s;
    case Lane::kWrite:
      return reading_ ? machine_.mixed_rate(machine_.write_bytes_per_s) : machine_.write_bytes_per_s;
    case Lane::kCopyIn:
      return machine_.h2d_bytes_per_s;
    case Lane::kCopyOut:
      return machine_.d2h_bytes_per_s;
    case Lane::kAllGather:
    case Lane::kReduceScatter:
      return gathering_ && reducing_ ? machine_.network_bytes_per_s / 2 : machine_.network_bytes_per_s;
    case Lane::kCompute:
      if (plan_.device.has_own_memory) return 1;
      return machine_.compute_speed(static_cast<int>(updating_.size()), reading_ || writing_);
    default:
      return machine_.update_speed(!plan_.device.has_own_memory && computing_.has_value(),
                                   static_cast<int>(updating_.size()));
  }
}

template <typename Visit>
void SimLanes::ForRunning(Visit&& visit) {
  for (std::optional<Job>* job :
       {&reading_, &writing_, &computing_, &copying_in_, &copying_out_, &gathering_, &reducing_}) {
    if (job->has_value()) visit(**job);
  }
  for (Job& job : updating_) visit(job);
}

void SimLanes::Complete(Job& job, std::vector<Completion>* completions) {
  const bool transfer = job.lane == Lane::kRead || job.lane == Lane::kWrite;
  const bool copy = job.lane == Lane::kCopyIn || job.lane == Lane::kCopyOut;
  const bool message = job.lane == Lane::kAllGather || job.lane == Lane::kReduceScatter;
  const double latency = transfer  ? machine_.io_latency_seconds
                         : copy    ? machine_.copy_latency_seconds
                         : message ? machine_.network_latency_seconds
                                   : 0;
  if (latency > 0) {
    events_.push(Event{now_ + latency, job.id, job.start, std::move(job.status)});
    return;
  }
  completions->push_back({job.id, std::move(job.status), job.start, now_});
}

void SimLanes::Wait(std::vector<Completion>* completions) {
  while (completions->empty()) {
    Serve();
    double next = events_.empty() ? std::numeric_limits<double>::infinity() : events_.top().end - now_;
    ForRunning([&](const Job& job) { next = std::min(next, job.left / Rate(job)); });
    if (next == std::numeric_limits<double>::infinity()) return;  // nothing was started: never asked then
    next = std::max(next, 0.0);
    // What ends within a rounding error of the next moment ends in it.
    const double until = next * (1 + 1e-12);
    ForRunning([&](Job& job) {
      const double rate = Rate(job);
      job.left = job.left / rate <= until ? 0 : job.left - next * rate;
    });
    now_ += next;
    auto finish = [&](std::optional<Job>* job) {
      if (!job->has_value() || (*job)->left > 0) return;
      Complete(**job, completions);
      job->reset();
    };
    finish(&reading_);
    finish(&writing_);
    finish(&computing_);
    finish(&copying_in_);
    finish(&copying_out_);
    finish(&gathering_);
    finish(&reducing_);
    for (size_t i = 0; i < updating_.size();) {
      if (updating_[i].left > 0) {
        ++i;
        continue;
      }
      Complete(updating_[i], completions);
      updating_.erase(updating_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    while (!events_.empty() && events_.top().end <= now_) {
      const Event event = events_.top();
      events_.pop();
      completions->push_back({event.id, event.status, event.start, event.end});
    }
  }
}

}  // namespace penstock::tiering
