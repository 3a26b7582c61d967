// Runs programs on lanes: starts every operation whose edges are met, in program order, and waits.
//
// One thread, no locks, no allocator, no clock of its own: everything that decides lies in the program,
// everything that takes time lies behind Lanes. So a whole training step runs in virtual time in a test, and
// the step that was simulated is the step that runs.
#ifndef PENSTOCK_TIERING_PROGRAM_EXECUTOR_H_
#define PENSTOCK_TIERING_PROGRAM_EXECUTOR_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <string_view>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "tiering/program/lanes.h"

namespace penstock::tiering {

// Time on the lanes since the last TakeUsage.
struct Usage {
  double compute_union_seconds = 0;  // some forward, backward or update kernel ran (overlaps counted once)
  std::array<double, kLanes> busy_seconds{};  // summed over operations of the lane
  // From the end of one operation of the compute lane to the beginning of the next, by cause: busy and
  // stalled seconds together are the time from its first operation to its last.
  std::array<double, kStalls> stall_seconds{};
  std::array<int64_t, kLanes> bytes{};
  std::array<int64_t, kLanes> operations{};
};

class Executor {
 public:
  explicit Executor(Lanes* lanes) : lanes_(lanes) {}

  // Adds operations to run; ids continue those of the program builder (the first Append starts at 0).
  void Append(std::vector<Op> ops);

  // Operations of kBatch for steps up to `gate` may pass from now on. Evaluation passes count as gates of
  // their own: gates are numbered by the order in which kBatch operations were appended, from 1.
  void OpenGate(int64_t gates) { open_gates_ = gates; }

  // Runs until operation `id` is complete. An error of any operation ends the run: what is in flight is
  // waited for and the first error is returned, now and from every later call.
  absl::Status RunUntil(OpId id);
  // Runs until nothing is left (a closed gate counts as nothing left).
  absl::Status RunUntilIdle();
  // Waits for everything that is in flight without starting more. For an orderly stop after an error.
  void Quiesce();

  bool complete(OpId id) const;
  size_t in_flight() const { return in_flight_; }
  // What the compute lane waits for now.
  const absl::Status& status() const { return status_; }  // an error stays
  Stall waiting_for() const { return waiting_for_; }

  Usage TakeUsage();

  // Called after each completion, on the executor's thread: for traces and for what follows from a
  // completion.
  using Observer = std::function<void(OpId, const Op&, double start_seconds, double end_seconds)>;
  void set_observer(Observer observer) { observer_ = std::move(observer); }
  // Called for every piece of a wait of the compute lane, in order of time, when the wait is over.
  using StallObserver = std::function<void(Stall, double start_seconds, double end_seconds)>;
  void set_stall_observer(StallObserver observer) { stall_observer_ = std::move(observer); }

 private:
  // How far an operation is. Apart from the rest of it: the edges lead here and there in the program, and
  // this much of it stays in the processor's cache.
  struct Progress {
    int32_t waits = 0;  // edges not met
    Lane lane = Lane::kHost;
    bool gate = false;
    bool started = false;
    bool done = false;
  };
  // Operations lie in pieces that stay where they are, since lanes point at those in flight, and that are
  // used again with the room that their lists have taken.
  static constexpr size_t kPiece = 256;
  struct Piece {
    std::array<Progress, kPiece> progress;
    std::array<absl::InlinedVector<OpId, 3>, kPiece> dependents;
    std::array<Op, kPiece> ops;
  };
  Piece& piece(OpId id) const { return *pieces_[static_cast<size_t>(id - first_) / kPiece]; }
  size_t in_piece(OpId id) const { return static_cast<size_t>(id - first_) % kPiece; }
  Progress& progress(OpId id) const { return piece(id).progress[in_piece(id)]; }
  Op& op(OpId id) const { return piece(id).ops[in_piece(id)]; }
  OpId Add(Op&& op);
  void Ready(OpId id);
  void StartReady();
  void Finish(OpId id);
  void WaitOnce();
  Stall CauseOfStall();
  Stall CauseOf(OpId id) const;
  // The compute lane waited from the end of its last operation until `end`.
  void CountStalls(double end);

  OpId stalled_ = -1, stalled_by_ = -1;  // the compute operation that waits, and what it waits for in the end
  Lanes* const lanes_;
  Observer observer_;
  StallObserver stall_observer_;
  std::vector<std::unique_ptr<Piece>> pieces_;
  std::vector<std::unique_ptr<Piece>> spare_;
  OpId first_ = 0;  // of the first piece
  OpId base_ = 0;   // everything before is complete
  OpId end_ = 0;
  // Operations whose edges are met, the first of the program on top; gates apart, which may be
  // closed.
  using FirstOnTop = std::priority_queue<OpId, std::vector<OpId>, std::greater<>>;
  std::array<FirstOnTop, kLanes> ready_;
  FirstOnTop ready_gates_;
  // [lane] of lanes that keep order: operations not started, in program order.
  std::array<std::deque<OpId>, kLanes> order_;
  int64_t open_gates_ = 0;
  int64_t passed_gates_ = 0;
  size_t in_flight_ = 0;
  size_t compute_in_flight_ = 0;
  absl::Status status_;
  Stall waiting_for_ = Stall::kNone;
  // What this thread waited for while nothing computed, since the last operation of the compute lane ended.
  struct Waited {
    Stall cause;
    double start, end;
  };
  std::vector<Waited> waited_;
  double compute_end_ = -1;  // of that operation; at first, when there was one to run
  std::vector<Completion> completions_;
  Usage usage_;
  std::vector<std::pair<double, double>> computed_;  // intervals since the last TakeUsage
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PROGRAM_EXECUTOR_H_
