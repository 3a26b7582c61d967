#include "tiering/simulate/calibrate.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "tiering/simulate/op_work.h"

namespace penstock::tiering {
namespace {

// A direction of the drive must have been busy for this share of the time, and this long, to be believed.
constexpr double kLeastShare = 0.03;
constexpr double kLeastSeconds = 0.02;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

bool Transfers(Lane lane) { return lane == Lane::kRead || lane == Lane::kWrite; }

}  // namespace

void Calibration::Observe(const Op& op, double start_seconds, double end_seconds) {
  if (op.kind == OpKind::kCommit && !op.durable) return;  // nothing is done for it
  if (op.lane == Lane::kHost || !(end_seconds > start_seconds) || full()) return;
  Span span{op.kind, op.lane, op.stage, op.bytes, start_seconds, end_seconds};
  if (op.lane == Lane::kUpdate || op.kind == OpKind::kUpdateOnDevice) {
    span.amount = UpdateWork(plan_, op);
    if (span.amount == 0) return;
  }
  spans_.push_back(span);
}

Calibration::Result Calibration::Calibrated() const {
  Result result{graph_, machine_, false};
  CalibrateCpu(&result);
  CalibrateDrive(&result);
  return result;
}

void Calibration::CalibrateCpu(Result* result) const {
  // Undisturbed seconds of compute and of updates gone by at each moment at which something began or ended.
  struct Edge {
    double at;
    int computing, updates, transfers;
  };
  std::vector<Edge> edges;
  for (const Span& span : spans_) {
    const Edge begin{span.start, span.lane == Lane::kCompute, span.lane == Lane::kUpdate,
                     Transfers(span.lane)};
    if (begin.computing + begin.updates + begin.transfers == 0) continue;
    edges.push_back(begin);
    edges.push_back({span.end, -begin.computing, -begin.updates, -begin.transfers});
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.at < b.at; });
  struct Gone {
    double at, compute, updates;
  };
  std::vector<Gone> gone;
  Edge now{0, 0, 0, 0};
  for (const Edge& edge : edges) {
    const Gone before = gone.empty() ? Gone{edge.at, 0, 0} : gone.back();
    const double passed = edge.at - before.at;
    gone.push_back({edge.at, before.compute + passed * machine_.compute_speed(now.updates, now.transfers > 0),
                    before.updates + passed * machine_.update_speed(now.computing > 0, now.updates)});
    now = {edge.at, now.computing + edge.computing, now.updates + edge.updates,
           now.transfers + edge.transfers};
  }
  const auto until = [&](double at) {
    return std::lower_bound(gone.begin(), gone.end(), at, [](const Gone& a, double b) { return a.at < b; });
  };
  PerStage<std::vector<double>> forward(graph_.stages.size()), backward(graph_.stages.size());
  std::vector<double> commits;
  double updated = 0, update_seconds = 0, checked = 0, check_seconds = 0;
  double updated_there = 0, update_there_seconds = 0;
  for (const Span& span : spans_) {
    if (span.lane == Lane::kCommit) commits.push_back(span.end - span.start);
    if (span.lane != Lane::kCompute && span.lane != Lane::kUpdate) continue;
    const auto begin = until(span.start), end = until(span.end);
    const double work =
        span.lane == Lane::kCompute ? end->compute - begin->compute : end->updates - begin->updates;
    switch (span.kind) {
      case OpKind::kForward:
        forward[span.stage].push_back(work);
        break;
      case OpKind::kBackward:
        backward[span.stage].push_back(work);
        break;
      case OpKind::kUpdate:
      case OpKind::kUpdateNorms:
        updated += static_cast<double>(span.amount);
        update_seconds += work;
        break;
      case OpKind::kUpdateOnDevice:
        updated_there += static_cast<double>(span.amount);
        update_there_seconds += work;
        break;
      default:
        if (span.lane != Lane::kUpdate) break;
        checked += static_cast<double>(span.amount);
        check_seconds += work * WorkersOf(plan_, machine_, span.kind);
        break;
    }
  }
  for (const StageIndex s : graph_.stages.indices()) {
    if (!forward[s].empty()) result->graph.stages[s].forward_seconds = Median(forward[s]);
    if (!backward[s].empty()) result->graph.stages[s].backward_seconds = Median(backward[s]);
  }
  if (update_seconds > 0) result->machine.update_parameters_per_s = updated / update_seconds;
  if (update_there_seconds > 0)
    result->machine.device_update_parameters_per_s = updated_there / update_there_seconds;
  if (check_seconds > 0) result->machine.verify_bytes_per_s = checked / check_seconds;
  if (!commits.empty()) result->machine.commit_seconds = Median(commits);
}

void Calibration::CalibrateDrive(Result* result) const {
  // Each transfer's bytes are spread evenly over its time; over a stretch in which the drive never ran dry
  // the sum is what it moved.
  struct Edge {
    double at;
    std::array<double, 2> rate;    // of reads, of writes
    std::array<int64_t, 2> bytes;  // in flight
  };
  std::vector<Edge> edges;
  for (const Span& span : spans_) {
    if (!Transfers(span.lane) || span.amount <= 0) continue;
    Edge begin{span.start, {}, {}}, end{span.end, {}, {}};
    const size_t direction = span.lane == Lane::kRead ? 0 : 1;
    begin.rate[direction] = static_cast<double>(span.amount) / (span.end - span.start);
    begin.bytes[direction] = span.amount;
    end.rate[direction] = -begin.rate[direction];
    end.bytes[direction] = -span.amount;
    edges.push_back(begin);
    edges.push_back(end);
  }
  if (edges.empty()) return;
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.at < b.at; });
  std::array<double, 3> seconds{}, moved{};  // only reads, only writes, both
  std::array<double, 2> rate{};
  std::array<int64_t, 2> bytes{};
  double before = edges.front().at;
  for (const Edge& edge : edges) {
    const double passed = edge.at - before;
    before = edge.at;
    if (bytes[0] + bytes[1] >= busy_bytes_) {
      const size_t mode = bytes[0] == 0 ? 1 : (bytes[1] == 0 ? 0 : 2);
      seconds[mode] += passed;
      moved[mode] += passed * (rate[0] + rate[1]);
    }
    for (size_t d = 0; d < 2; ++d) {
      rate[d] += edge.rate[d];
      bytes[d] += edge.bytes[d];
      if (bytes[d] == 0) rate[d] = 0;  // no rounding errors are carried on
    }
  }
  const double all = edges.back().at - edges.front().at;
  const auto seen = [&](size_t mode) {
    return seconds[mode] >= std::max(kLeastSeconds, kLeastShare * all) && moved[mode] > 0;
  };
  MachineModel& machine = result->machine;
  const std::array<double, 3> known = {machine.read_bytes_per_s, machine.write_bytes_per_s,
                                       2 * machine.mixed_rate(std::numeric_limits<double>::infinity())};
  double all_moved = 0, by_known = 0;
  for (size_t mode = 0; mode < 3; ++mode) {
    all_moved += seen(mode) ? moved[mode] : 0;
    by_known += seen(mode) ? seconds[mode] * known[mode] : 0;
  }
  if (by_known == 0) return;
  result->drive_seen = true;
  const double pace = all_moved / by_known;
  machine.read_bytes_per_s = seen(0) ? moved[0] / seconds[0] : pace * known[0];
  machine.write_bytes_per_s = seen(1) ? moved[1] / seconds[1] : pace * known[1];
  machine.mixed_bytes_per_s *= pace;
  if (seen(2)) {
    machine.mixed_bytes_per_s = moved[2] / seconds[2];
    // Alone a direction is not slower than beside the other, whatever was believed of it.
    for (double* alone : {&machine.read_bytes_per_s, &machine.write_bytes_per_s})
      *alone = std::max(*alone, machine.mixed_bytes_per_s / 2);
  }
}

}  // namespace penstock::tiering
