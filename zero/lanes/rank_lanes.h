// The lanes on which a rank waits for the others: a thread for each, in the order of the program.
//
// Gathers and reduces host memory, or device memory where devices exchange with each other.
//
//   kAllGather  this rank's part of a block's weights to the others, theirs into the run
//   kReduceScatter  a block's gradients: each rank gets its part of all of them and sums in fp32, rank 0
//   first, rounding once;
//            and, last in a step, what the norm needs of everybody
//   kCommit  kAgree: every rank has committed the step
//
// With Plan::codes weights and addends of gradients come in fewer bits (tiering/plan/exchange_codes.h).
// A rank's own part and its own addend keep theirs, so that the next update finds its masters.
//
// Sums of addends with all their bits have the same bits as one rank's that computes the ranks' micro-batches
// one after the other, wherever a gradient has one addend a rank: each is rounded as backward leaves it, all
// are added in fp32 in that order, and rounded once.
#ifndef PENSTOCK_ZERO_LANES_RANK_LANES_H_
#define PENSTOCK_ZERO_LANES_RANK_LANES_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "kernels/float16.h"
#include "kernels/reduce.h"
#include "tiering/plan/plan.h"
#include "tiering/program/op.h"
#include "zero/lanes/device_lanes.h"
#include "zero/lanes/tensor_norms.h"
#include "zero/memory/arena_view.h"
#include "zero/ranks/comm.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero {

// What a rank knows at the end of a step, and what all of them know together.
struct StepTotals {
  absl::Status failure;           // why the losses are not known
  kernels::SumOfSquares squares;  // of its parts of all gradients
  std::vector<double> losses;     // by micro-batch; of all: by micro-batch, then rank
  bool stops = false;             // it was asked to stop
  std::vector<uint8_t> came;      // GradientSums::Came, of all: by any of them; empty: nobody asks
};

class RankLanes {
 public:
  // An operation has ended; on one of the threads here.
  using Report =
      std::function<void(tiering::OpId id, const tiering::Op& op, absl::Status status, double start_seconds)>;
  // This rank's part of a step's totals; on one of the threads here, while nothing computes.
  using Totals = std::function<StepTotals()>;

  struct Options {
    kernels::DType weights = kernels::DType::kBf16;
    tiering::PerBlock<int64_t>
        layout_elements;          // of the run, without what its last parts have beyond its end
    std::span<std::byte> memory;  // Plan::network_bytes
    // With DevicePlan::collectives: what the devices exchange over, and where their slots are.
    Comm* devices = nullptr;
    const DeviceLanes* device = nullptr;
    std::function<double()> now;
    TensorNorms* norms = nullptr;  // where updates need them (kExchangeNorms)
  };

  // Everything passed in outlives this. `comm` is null where nobody is there but what the ranks have kept:
  // then kAllGather, which is all that an evaluation needs, reads the others' parts from `parts`, as rank 0.
  RankLanes(const tiering::Plan& plan, const ArenaView& arena_view, Comm* comm, ShardedState* parts,
            Options options, Totals totals, Report report);
  // Waits for what is in flight.
  ~RankLanes();

  static bool Runs(const tiering::Op& op) {
    return op.lane == tiering::Lane::kAllGather || op.lane == tiering::Lane::kReduceScatter ||
           op.kind == tiering::OpKind::kAgree;
  }
  void Start(tiering::OpId id, const tiering::Op& op);
  // This rank has failed: what is in flight ends, and the others hear of it.
  void Fail(const absl::Status& why) {
    if (comm_ != nullptr) comm_->Abort(why);
  }
  // Of the last kExchange, once it is complete.
  const StepTotals& totals() const { return totals_; }
  // What this rank has received so far of weights and of gradients. From any thread.
  tiering::ExchangedBytes gathered() const { return gathered_.Now(); }
  tiering::ExchangedBytes reduced() const { return reduced_.Now(); }

 private:
  struct Task {
    tiering::OpId id;
    const tiering::Op* op;
  };
  struct Queue {
    std::deque<Task> tasks;
    std::thread thread;
  };

  struct Counter {
    std::atomic<int64_t> bytes{0}, whole_bytes{0};
    // Of what each other rank sends.
    void Count(size_t others, size_t of_each, size_t whole) {
      bytes += static_cast<int64_t>(others * of_each);
      whole_bytes += static_cast<int64_t>(others * whole);
    }
    tiering::ExchangedBytes Now() const { return {bytes, whole_bytes}; }
  };

  void Work(Queue* queue);
  absl::Status Run(const tiering::Op& op);
  absl::Status RunGather(const tiering::Op& op);
  absl::Status GatherCoded(const tiering::Op& op, const What& what);
  // Who exchanges parts of a block, and codes and sums them: the devices by themselves, or the processors.
  struct Peers {
    Device& device;
    Comm& comm;
    std::byte* memory;      // of pieces
    size_t piece_elements;  // the most
    size_t world, own;      // ranks, and which of them this one is
    size_t part;            // elements of the block that each rank has
    size_t pieces() const { return (part + piece_elements - 1) / piece_elements; }
    size_t length(size_t piece) const { return std::min(piece_elements, part - piece * piece_elements); }
    // Where a piece of a rank's part begins.
    size_t first(size_t rank, size_t piece) const { return rank * part + piece * piece_elements; }
  };
  Peers PeersOf(const tiering::Op& op);
  absl::Status RunReduce(const tiering::Op& op);
  std::byte* Reduced(const tiering::Op& op) const;
  absl::Status RunExchange(const tiering::Op& op);
  absl::Status RunAgree(const tiering::Op& op);

  const tiering::Plan& plan_;
  const ArenaView& arena_view_;
  Comm* const comm_;
  ShardedState* const parts_;
  const Options options_;
  const Totals own_totals_;
  const Report report_;
  StepTotals totals_;
  Counter gathered_, reduced_;

  std::mutex mutex_;
  std::condition_variable work_there_;
  bool stopping_ = false;
  std::array<Queue, 3> queues_;  // gather, reduce, agree
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_LANES_RANK_LANES_H_
