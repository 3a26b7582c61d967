// Finds operations that are stuck, and names them.
//
// An operation is stuck when its lane has given no sign of life for a bound: none of the lane's operations
// has ended, and on the drive's lanes no byte has moved either. So a drive that is slow, or work that waits
// in a queue behind other work, is not stuck. What is planned to take long (Op::seconds) has at least
// kPatience times that. A time in which nobody waits for the lanes counts for nothing: it is the caller's,
// between two steps. Neither does one in which the whole process stood still (SIGSTOP, a debugger).
//
// Not watched: exchanges with other ranks, which have a bound of their own (zero/ranks/comm.h), and what is
// no operation: preparing a run, the copies of a checkpoint.
#ifndef PENSTOCK_ZERO_LANES_WATCHDOG_H_
#define PENSTOCK_ZERO_LANES_WATCHDOG_H_

#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tiering/program/lanes.h"
#include "zero/lanes/stuck_operation.h"

namespace penstock::zero {

// What is in flight, and its signs of life. From any thread.
class Watchdog {
 public:
  static constexpr double kPatience = 10;

  struct Sources {
    // Names of an operation that is in flight, and of where it runs. They must not wait for anything.
    std::function<std::string(const tiering::Op&)> what, where;
    // That the drives have moved since the beginning.
    std::function<uint64_t()> drive_bytes;
  };
  Watchdog(const WatchOptions& options, Sources sources) : options_(options), sources_(std::move(sources)) {}

  // `op` lives until Ended, which returns what is to be reported: that one which was reported as stuck has
  // ended.
  void Began(tiering::OpId id, const tiering::Op& op, double now);
  std::vector<StuckOperation> Ended(const std::vector<tiering::Completion>& completions, double now);
  // Somebody waits for the lanes from now on, or no longer.
  void Attend(double now);
  void Leave(double now);

  // Those that have just become stuck, or hopeless; at most one a lane, the oldest. Called every so often,
  // LookEvery: much later than that says that the process stood still.
  std::vector<StuckOperation> Look(StuckOperation::News news, double now);
  double LookEvery(StuckOperation::News news) const;

 private:
  struct InFlight {
    tiering::OpId id;
    const tiering::Op* op;
    double start;
    bool told_stuck = false, told_hopeless = false;
  };
  double SecondsOf(StuckOperation::News news) const {
    return news == StuckOperation::News::kHopeless ? options_.hopeless_seconds : options_.stuck_seconds;
  }
  StuckOperation Describe(StuckOperation::News news, const InFlight& operation, double now) const;
  bool IsStuck(StuckOperation::News news, const InFlight& operation, double now) const;

  const WatchOptions options_;
  const Sources sources_;
  std::mutex mutex_;
  std::vector<InFlight> in_flight_;  // in the order in which they began
  std::array<double, tiering::kLanes> life_{};
  double drive_life_ = 0;
  uint64_t drive_bytes_ = 0;
  bool attended_ = false;
  double left_at_ = 0, back_at_ = 0;
  std::array<double, 2> looked_at_ = {-1, -1};  // [news]
};

// Lanes that are watched, by threads of their own: one for each kind of news, since the handler of a
// stuck operation may get stuck itself.
class WatchedLanes final : public tiering::Lanes {
 public:
  // `tell`: on those threads; that one has ended, on the executor's. `lanes` outlive this.
  using Tell = std::function<void(const StuckOperation&)>;
  WatchedLanes(tiering::Lanes* lanes, const WatchOptions& options, Watchdog::Sources sources, Tell tell);
  ~WatchedLanes() override;

  bool HasRoom(tiering::Lane lane) const override { return lanes_.HasRoom(lane); }
  bool Skips(const tiering::Op& op) const override { return lanes_.Skips(op); }
  bool Moves(const tiering::Op& op) const override { return lanes_.Moves(op); }
  void Start(tiering::OpId id, const tiering::Op& op) override;
  absl::Status Decide(const tiering::Op& op) override { return lanes_.Decide(op); }
  void Wait(std::vector<tiering::Completion>* completions) override;
  double Now() const override { return lanes_.Now(); }

 private:
  void Watch(StuckOperation::News news);

  tiering::Lanes& lanes_;
  const Tell tell_;
  Watchdog watchdog_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_LANES_WATCHDOG_H_
