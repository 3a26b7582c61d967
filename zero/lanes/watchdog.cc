#include "zero/lanes/watchdog.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace penstock::zero {
namespace {

using tiering::Lane;
using tiering::Op;
using News = StuckOperation::News;

size_t Index(Lane lane) { return static_cast<size_t>(lane); }

bool IsOfDrive(Lane lane) { return lane == Lane::kRead || lane == Lane::kWrite || lane == Lane::kCommit; }

// What waits for other ranks has a bound of its own.
bool IsOfRanks(const Op& op) {
  return op.lane == Lane::kAllGather || op.lane == Lane::kReduceScatter || op.kind == tiering::OpKind::kAgree;
}

// Longer than this away from the lanes, and the time was somebody else's.
double ShortAbsence(const WatchOptions& options) {
  const double least = options.stuck_seconds > 0 ? options.stuck_seconds : options.hopeless_seconds;
  return std::min(1.0, least / 2);
}

}  // namespace

void Watchdog::Began(tiering::OpId id, const Op& op, double now) {
  if (IsOfRanks(op)) return;
  const std::lock_guard lock(mutex_);
  // Of an idle lane it is the first; on a busy one it waits, which is no sign of life of those before it.
  const bool idle = std::none_of(in_flight_.begin(), in_flight_.end(),
                                 [&](const InFlight& other) { return other.op->lane == op.lane; });
  if (idle) life_[Index(op.lane)] = now;
  in_flight_.push_back({id, &op, now});
}

std::vector<StuckOperation> Watchdog::Ended(const std::vector<tiering::Completion>& completions, double now) {
  std::vector<StuckOperation> news;
  const std::lock_guard lock(mutex_);
  for (const tiering::Completion& completion : completions) {
    const auto ended = std::find_if(in_flight_.begin(), in_flight_.end(),
                                    [&](const InFlight& operation) { return operation.id == completion.id; });
    if (ended == in_flight_.end()) continue;
    life_[Index(ended->op->lane)] = now;
    if (ended->told_stuck) news.push_back(Describe(News::kEnded, *ended, now));
    in_flight_.erase(ended);
  }
  return news;
}

void Watchdog::Attend(double now) {
  const std::lock_guard lock(mutex_);
  if (now - left_at_ > ShortAbsence(options_)) back_at_ = now;
  attended_ = true;
}

void Watchdog::Leave(double now) {
  const std::lock_guard lock(mutex_);
  left_at_ = now;
  attended_ = false;
}

double Watchdog::LookEvery(News news) const { return std::min(1.0, SecondsOf(news) / 8); }

StuckOperation Watchdog::Describe(News news, const InFlight& operation, double now) const {
  StuckOperation stuck;
  stuck.news = news;
  stuck.what = sources_.what(*operation.op);
  stuck.where = sources_.where(*operation.op);
  stuck.seconds = now - operation.start;
  stuck.step = operation.op->step;
  for (const InFlight& other : in_flight_)
    stuck.others += &other != &operation && other.op->lane == operation.op->lane ? 1 : 0;
  return stuck;
}

bool Watchdog::IsStuck(News news, const InFlight& operation, double now) const {
  const Lane lane = operation.op->lane;
  double life = std::max(life_[Index(lane)], back_at_);
  if (IsOfDrive(lane)) life = std::max(life, drive_life_);
  return now - life >= std::max(SecondsOf(news), kPatience * operation.op->seconds);
}

std::vector<StuckOperation> Watchdog::Look(News news, double now) {
  std::vector<StuckOperation> found;
  const uint64_t bytes = sources_.drive_bytes ? sources_.drive_bytes() : 0;
  const std::lock_guard lock(mutex_);
  double& looked_at = looked_at_[static_cast<size_t>(news)];
  // Whoever could not look for so long was not let run, and neither was anybody else.
  if (looked_at >= 0 && now - looked_at > 4 * LookEvery(news)) back_at_ = now;
  looked_at = now;
  if (bytes != drive_bytes_) drive_life_ = now;
  drive_bytes_ = bytes;
  if (!attended_) return found;
  std::array<bool, tiering::kLanes> seen{};
  for (InFlight& operation : in_flight_) {
    if (std::exchange(seen[Index(operation.op->lane)], true)) continue;
    bool& told = news == News::kHopeless ? operation.told_hopeless : operation.told_stuck;
    if (told || !IsStuck(news, operation, now)) continue;
    told = true;
    found.push_back(Describe(news, operation, now));
  }
  return found;
}

WatchedLanes::WatchedLanes(tiering::Lanes* lanes, const WatchOptions& options, Watchdog::Sources sources,
                           Tell tell)
    : lanes_(*lanes), tell_(std::move(tell)), watchdog_(options, std::move(sources)) {
  if (options.stuck_seconds > 0) threads_.emplace_back([this] { Watch(News::kStuck); });
  if (options.hopeless_seconds > 0) threads_.emplace_back([this] { Watch(News::kHopeless); });
}

WatchedLanes::~WatchedLanes() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WatchedLanes::Start(tiering::OpId id, const Op& op) {
  const double now = lanes_.Now();
  watchdog_.Attend(now);
  watchdog_.Began(id, op, now);
  lanes_.Start(id, op);
  watchdog_.Leave(lanes_.Now());
}

void WatchedLanes::Wait(std::vector<tiering::Completion>* completions) {
  watchdog_.Attend(lanes_.Now());
  lanes_.Wait(completions);
  const double now = lanes_.Now();
  watchdog_.Leave(now);
  for (const StuckOperation& ended : watchdog_.Ended(*completions, now)) tell_(ended);
}

void WatchedLanes::Watch(News news) {
  const auto every = std::chrono::duration<double>(watchdog_.LookEvery(news));
  std::unique_lock lock(mutex_);
  while (!stop_.wait_for(lock, every, [this] { return stopping_; })) {
    lock.unlock();
    for (const StuckOperation& stuck : watchdog_.Look(news, lanes_.Now())) tell_(stuck);
    lock.lock();
  }
}

}  // namespace penstock::zero
