#include "tiering/program/executor.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/check.h"

namespace penstock::tiering {
namespace {

size_t Index(Lane lane) { return static_cast<size_t>(lane); }

double UnionOf(std::vector<std::pair<double, double>>* intervals) {
  std::sort(intervals->begin(), intervals->end());
  double sum = 0, end = 0;
  bool first = true;
  for (const auto& [from, to] : *intervals) {
    if (first || from > end) {
      sum += to - from;
      end = to;
      first = false;
    } else if (to > end) {
      sum += to - end;
      end = to;
    }
  }
  return sum;
}

}  // namespace

bool Executor::complete(OpId id) const { return id < base_ || (id < end_ && progress(id).done); }

OpId Executor::Add(Op&& op) {
  if (end_ - first_ == static_cast<OpId>(pieces_.size() * kPiece)) {
    if (spare_.empty()) spare_.push_back(std::make_unique<Piece>());
    pieces_.push_back(std::move(spare_.back()));
    spare_.pop_back();
  }
  const OpId id = end_++;
  Piece& in = piece(id);
  in.progress[in_piece(id)] = {.lane = op.lane, .gate = op.kind == OpKind::kBatch};
  in.dependents[in_piece(id)].clear();
  in.ops[in_piece(id)] = std::move(op);
  return id;
}

void Executor::Append(std::vector<Op> ops) {
  for (Op& next : ops) {
    const OpId id = Add(std::move(next));
    Piece& in = piece(id);
    Op& added = in.ops[in_piece(id)];
    if (KeepsOrder(added.lane)) order_[Index(added.lane)].push_back(id);
    if (added.lane == Lane::kCompute && compute_end_ < 0) compute_end_ = lanes_->Now();
    Edges& after = added.after;
    if (std::adjacent_find(after.begin(), after.end(), std::greater_equal<>()) != after.end()) {
      std::sort(after.begin(), after.end());
      after.erase(std::unique(after.begin(), after.end()), after.end());
    }
    int32_t waits = 0;
    for (const OpId before : after) {
      if (complete(before)) continue;
      piece(before).dependents[in_piece(before)].push_back(id);
      ++waits;
    }
    in.progress[in_piece(id)].waits = waits;
    if (waits == 0) Ready(id);
  }
}

void Executor::Ready(OpId id) {
  const Progress& ready = progress(id);
  (ready.gate ? ready_gates_ : ready_[Index(ready.lane)]).push(id);
}

void Executor::StartReady() {
  bool again = true;
  while (again && status_.ok()) {
    again = false;
    // Decisions first: they may make more ready.
    FirstOnTop& host = ready_[Index(Lane::kHost)];
    while (true) {
      const bool open = !ready_gates_.empty() && passed_gates_ < open_gates_;
      if (host.empty() && !open) break;
      const bool gate = open && (host.empty() || ready_gates_.top() < host.top());
      FirstOnTop& from = gate ? ready_gates_ : host;
      const OpId id = from.top();
      from.pop();
      if (gate) ++passed_gates_;
      progress(id).started = true;
      const double now = lanes_->Now();
      status_.Update(lanes_->Decide(op(id)));
      if (!status_.ok()) return;
      if (observer_) observer_(id, op(id), now, now);
      Finish(id);
      again = true;
    }
    for (const Lane lane : {Lane::kRead, Lane::kWrite, Lane::kCopyIn, Lane::kCopyOut, Lane::kUpdate,
                            Lane::kCommit, Lane::kAllGather, Lane::kReduceScatter, Lane::kCompute}) {
      auto& ready = ready_[Index(lane)];
      while (!ready.empty() && lanes_->HasRoom(lane)) {
        const OpId id = ready.top();
        if (KeepsOrder(lane)) {
          // Program order, whatever is ready further on: the order of tensors' lives is part of the memory
          // plan, and all ranks come to the network in one order.
          if (order_[Index(lane)].front() != id) break;
          order_[Index(lane)].pop_front();
        }
        if (lane == Lane::kCompute) ++compute_in_flight_;
        ready.pop();
        progress(id).started = true;
        const Op& starting = op(id);
        if (lanes_->Skips(starting)) {
          if (lane == Lane::kCompute) --compute_in_flight_;
          Finish(id);
          again = true;
          continue;
        }
        ++in_flight_;
        if (lanes_->Moves(starting)) usage_.bytes[Index(lane)] += starting.bytes;
        ++usage_.operations[Index(lane)];
        lanes_->Start(id, starting);
      }
    }
  }
}

void Executor::Finish(OpId id) {
  Piece& in = piece(id);
  Progress& ended = in.progress[in_piece(id)];
  PENSTOCK_CHECK(ended.started && !ended.done, "an operation that ends without having begun, or twice");
  ended.done = true;
  for (const OpId dependent : in.dependents[in_piece(id)]) {
    Progress& next = progress(dependent);
    PENSTOCK_CHECK(next.waits > 0, "an operation that began before what it waits for");
    if (--next.waits == 0) Ready(dependent);
  }
  while (base_ < end_ && progress(base_).done) {
    if (++base_ - first_ < static_cast<OpId>(kPiece)) continue;
    spare_.push_back(std::move(pieces_.front()));
    pieces_.erase(pieces_.begin());
    first_ += static_cast<OpId>(kPiece);
  }
}

Stall Executor::CauseOfStall() {
  const std::deque<OpId>& computes = order_[Index(Lane::kCompute)];
  if (computes.empty()) return Stall::kNone;
  OpId id = computes.front();
  // What it waited for last time is still what it waits for: everything between the two waits for that.
  if (id == stalled_ && !complete(stalled_by_)) return CauseOf(stalled_by_);
  stalled_ = id;
  // Follow the first unmet edge down to what is in flight or held back.
  for (OpId depth = base_; depth <= end_; ++depth) {
    if (progress(id).started || progress(id).waits == 0) break;
    OpId next = -1;
    for (const OpId before : op(id).after) {
      if (!complete(before)) {
        next = before;
        break;
      }
    }
    if (next < 0) break;
    id = next;
  }
  stalled_by_ = id;
  return CauseOf(id);
}

Stall Executor::CauseOf(OpId id) const {
  const Lane lane = progress(id).lane;
  if (lane == Lane::kCopyIn || lane == Lane::kCopyOut) return Stall::kCopy;
  return TraitsOf(op(id).kind).stall;
}

void Executor::CountStalls(double end) {
  double until = compute_end_;
  const auto count = [&](Stall cause, double to) {
    if (to <= until) return;
    usage_.stall_seconds[static_cast<size_t>(cause)] += to - until;
    if (stall_observer_) stall_observer_(cause, until, to);
    until = to;
  };
  for (const Waited& waited : waited_) {
    count(Stall::kHost, std::min(waited.start, end));
    count(waited.cause, std::min(waited.end, end));
  }
  count(Stall::kHost, end);
  waited_.clear();
}

void Executor::WaitOnce() {
  const double before = lanes_->Now();
  const bool stalled = compute_in_flight_ == 0;
  waiting_for_ = stalled ? CauseOfStall() : Stall::kNone;
  completions_.clear();
  lanes_->Wait(&completions_);
  if (stalled && waiting_for_ != Stall::kNone) {
    // Many short waits for one cause, with only completions taken in between, are one.
    constexpr double kHandOver = 100e-6;
    if (!waited_.empty() && waited_.back().cause == waiting_for_ && before - waited_.back().end < kHandOver) {
      waited_.back().end = lanes_->Now();
    } else {
      waited_.push_back({waiting_for_, before, lanes_->Now()});
    }
  }
  for (Completion& completion : completions_) {
    const Lane lane = progress(completion.id).lane;
    --in_flight_;
    if (lane == Lane::kCompute) {
      --compute_in_flight_;
      CountStalls(completion.start_seconds);
      compute_end_ = std::max(compute_end_, completion.end_seconds);
    }
    usage_.busy_seconds[Index(lane)] += completion.end_seconds - completion.start_seconds;
    if (lane == Lane::kCompute || lane == Lane::kUpdate) {
      computed_.emplace_back(completion.start_seconds, completion.end_seconds);
    }
    if (status_.ok() && completion.status.ok() && observer_) {
      observer_(completion.id, op(completion.id), completion.start_seconds, completion.end_seconds);
    }
    status_.Update(completion.status);
    Finish(completion.id);
  }
}

absl::Status Executor::RunUntil(OpId id) {
  while (status_.ok() && !complete(id)) {
    StartReady();
    if (!status_.ok() || complete(id)) break;
    if (in_flight_ == 0) {
      status_ = absl::InternalError("the program cannot go on: nothing is in flight and nothing is ready");
      break;
    }
    WaitOnce();
  }
  if (!status_.ok()) Quiesce();
  return status_;
}

absl::Status Executor::RunUntilIdle() {
  while (status_.ok()) {
    StartReady();
    if (!status_.ok() || in_flight_ == 0) break;
    WaitOnce();
  }
  if (!status_.ok()) Quiesce();
  return status_;
}

void Executor::Quiesce() {
  while (in_flight_ > 0) WaitOnce();
}

Usage Executor::TakeUsage() {
  usage_.compute_union_seconds = UnionOf(&computed_);
  computed_.clear();
  return std::exchange(usage_, Usage{});
}

}  // namespace penstock::tiering
