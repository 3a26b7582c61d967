// Runs programs on lanes: starts every operation whose edges are met, in program order, and waits.
//
// One thread, no locks, no allocator, no clock of its own: everything that decides lies in the program,
// everything that takes time lies behind Lanes. So a whole training step runs in virtual time in a test, and
// the step that was simulated is the step that runs.
#ifndef PENSTOCK_TIERING_EXECUTOR_H_
#define PENSTOCK_TIERING_EXECUTOR_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "tiering/lanes.h"

namespace penstock::tiering {

// What the compute lane waits for between two of its operations. kHost: for the executor's own thread, which
// hands operations over, runs callbacks, and belongs to the caller between steps. kNone: it does not wait.
enum class Stall : uint8_t { kRead, kWrite, kUpdate, kCommit, kBatch, kCopy, kNetwork, kHost, kNone };
inline constexpr int kStalls = 8;  // causes; kNone is none
std::string_view StallName(Stall stall);

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
  struct Node {
    Op op;
    int waits = 0;  // edges not met
    bool started = false;
    bool done = false;
    absl::InlinedVector<OpId, 4> dependents;
  };

  // Nodes lie in pieces that stay where they are, since lanes point at operations in flight, and that are
  // used again with the room that their lists have taken.
  using Piece = std::array<Node, 256>;
  Node& node(OpId id) const {
    const auto at = static_cast<size_t>(id - first_);
    return (*pieces_[at / std::tuple_size_v<Piece>])[at % std::tuple_size_v<Piece>];
  }
  Node& AddNode();
  void Ready(OpId id);
  void StartReady();
  void Finish(OpId id);
  void WaitOnce();
  Stall CauseOfStall() const;
  // The compute lane waited from the end of its last operation until `end`.
  void CountStalls(double end);

  Lanes* const lanes_;
  Observer observer_;
  StallObserver stall_observer_;
  std::deque<std::unique_ptr<Piece>> pieces_;
  std::vector<std::unique_ptr<Piece>> spare_;
  OpId first_ = 0;  // of the first piece
  OpId base_ = 0;   // everything before is complete
  OpId end_ = 0;
  std::array<std::set<OpId>, kLanes> ready_;
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

#endif  // PENSTOCK_TIERING_EXECUTOR_H_
