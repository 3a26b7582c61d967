#include "tiering/simulate/sim_lanes.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "tiering/simulate/op_work.h"

namespace penstock::tiering {
namespace {

// Lanes with servers, in the order in which operations that end at the same moment are reported.
constexpr std::array kServed = {Lane::kRead,    Lane::kWrite,     Lane::kCompute,       Lane::kCopyIn,
                                Lane::kCopyOut, Lane::kAllGather, Lane::kReduceScatter, Lane::kUpdate};

}  // namespace

bool SimLanes::HasRoom(Lane lane) const {
  return lane != Lane::kCompute || at(lane).running.size() + at(lane).waiting.size() < 2;
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
             (op.kind == OpKind::kUpdate || op.kind == OpKind::kUpdateNorms ? machine_.update_parameters_per_s
                                                                            : machine_.verify_bytes_per_s);
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
  if (op.lane == Lane::kCommit || op.lane == Lane::kHost) {
    events_.push(Event{now_ + job.left, id, now_, job.status});
    return;
  }
  job.workers = op.lane == Lane::kUpdate ? WorkersOf(plan_, machine_, op.kind) : 1;
  job.urgent = op.kind == OpKind::kReadWeights;
  std::deque<Job>& waiting = at(op.lane).waiting;
  const auto behind = job.urgent ? std::find_if(waiting.begin(), waiting.end(),
                                                [](const Job& other) { return !other.urgent; })
                                 : waiting.end();
  waiting.insert(behind, std::move(job));
}

void SimLanes::Serve() {
  for (const Lane lane : kServed) {
    Station& station = at(lane);
    const auto servers =
        lane == Lane::kUpdate ? static_cast<size_t>(std::max(1, machine_.update_workers)) : 1;
    while (station.running.size() < servers && !station.waiting.empty()) {
      station.running.push_back(std::move(station.waiting.front()));
      station.waiting.pop_front();
      station.running.back().start = now_;
    }
  }
}

double SimLanes::Rate(const Job& job) const {
  const auto updating = static_cast<int>(at(Lane::kUpdate).running.size());
  const auto together = [](const Job& one) { return one.workers > 1; };
  switch (job.lane) {
    case Lane::kRead:
      return busy(Lane::kWrite) ? machine_.mixed_rate(machine_.read_bytes_per_s) : machine_.read_bytes_per_s;
    case Lane::kWrite:
      return busy(Lane::kRead) ? machine_.mixed_rate(machine_.write_bytes_per_s) : machine_.write_bytes_per_s;
    case Lane::kCopyIn:
      return machine_.h2d_bytes_per_s;
    case Lane::kCopyOut:
      return machine_.d2h_bytes_per_s;
    case Lane::kAllGather:
    case Lane::kReduceScatter:
      return busy(Lane::kAllGather) && busy(Lane::kReduceScatter) ? machine_.network_bytes_per_s / 2
                                                                  : machine_.network_bytes_per_s;
    case Lane::kCompute:
      if (plan_.device.has_own_memory) return 1;
      return machine_.compute_speed(updating, busy(Lane::kRead) || busy(Lane::kWrite));
    default:
      if (const std::vector<Job>& running = at(Lane::kUpdate).running;
          std::any_of(running.begin(), running.end(), together)) {
        // What the workers do together is beside what they do each alone: memory gives both no more.
        const double wanted = std::accumulate(running.begin(), running.end(), 0.0,
                                              [](double sum, const Job& one) { return sum + one.workers; });
        return job.workers * std::min(1.0, std::max(1, machine_.update_workers) / wanted);
      }
      return machine_.update_speed(!plan_.device.has_own_memory && busy(Lane::kCompute), updating);
  }
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
    for (const Lane lane : kServed) {
      for (const Job& job : at(lane).running) next = std::min(next, job.left / Rate(job));
    }
    if (next == std::numeric_limits<double>::infinity()) return;  // nothing was started: never asked then
    next = std::max(next, 0.0);
    // What ends within a rounding error of the next moment ends in it.
    const double until = next * (1 + 1e-12);
    for (const Lane lane : kServed) {
      for (Job& job : at(lane).running) {
        const double rate = Rate(job);
        job.left = job.left / rate <= until ? 0 : job.left - next * rate;
      }
    }
    now_ += next;
    for (const Lane lane : kServed) {
      std::vector<Job>& running = at(lane).running;
      for (Job& job : running) {
        if (job.left <= 0) Complete(job, completions);
      }
      std::erase_if(running, [](const Job& job) { return job.left <= 0; });
    }
    while (!events_.empty() && events_.top().end <= now_) {
      const Event event = events_.top();
      events_.pop();
      completions->push_back({event.id, event.status, event.start, event.end});
    }
  }
}

}  // namespace penstock::tiering
