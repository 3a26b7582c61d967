#include "zero/lanes/rank_lanes.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "base/status_macros.h"

namespace penstock::zero {

using kernels::DType;
using tiering::Lane;
using tiering::Op;
using tiering::OpKind;

RankLanes::RankLanes(const tiering::Plan& plan, const ArenaView& arena_view, Comm* comm, ShardedState* parts,
                     Options options, Totals totals, Report report)
    : plan_(plan),
      arena_view_(arena_view),
      comm_(comm),
      parts_(parts),
      options_(std::move(options)),
      own_totals_(std::move(totals)),
      report_(std::move(report)) {
  for (Queue& queue : queues_) queue.thread = std::thread([this, &queue] { Work(&queue); });
}

RankLanes::~RankLanes() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_there_.notify_all();
  for (Queue& queue : queues_) queue.thread.join();
}

void RankLanes::Start(tiering::OpId id, const Op& op) {
  const size_t queue = op.lane == Lane::kAllGather ? 0 : op.lane == Lane::kReduceScatter ? 1 : 2;
  {
    std::lock_guard lock(mutex_);
    queues_[queue].tasks.push_back({id, &op});
  }
  work_there_.notify_all();
}

void RankLanes::Work(Queue* queue) {
  for (;;) {
    Task task{};
    {
      std::unique_lock lock(mutex_);
      work_there_.wait(lock, [&] { return stopping_ || !queue->tasks.empty(); });
      if (queue->tasks.empty()) return;
      task = queue->tasks.front();
      queue->tasks.pop_front();
    }
    const double start = options_.now();
    report_(task.id, *task.op, Run(*task.op), start);
  }
}

absl::Status RankLanes::Run(const Op& op) {
  switch (op.kind) {
    case OpKind::kAllGather: {
      const auto bytes =
          static_cast<size_t>(plan_.blocks[op.block].elements * plan_.precision.weight_bytes());
      const What what{.name = "the weights", .step = op.step, .block = op.block.value()};
      if (plan_.device.collectives)
        return options_.devices->AllGather(Channel::kAllGather, what,
                                           options_.device->weights(op.device_weight_slot), bytes);
      if (comm_ == nullptr) return parts_->ReadWeights(op.block, 1, arena_view_.weights(op.weight_slot));
      return comm_->AllGather(Channel::kAllGather, what, arena_view_.weights(op.weight_slot), bytes);
    }
    case OpKind::kReduceScatter:
      return RunReduce(op);
    case OpKind::kExchange:
      return RunExchange(op);
    case OpKind::kExchangeNorms:
      return options_.norms->Exchange(*comm_, op.step);
    case OpKind::kAgree:
      return RunAgree(op);
    default:
      return absl::InternalError(
          absl::StrCat("no exchange between ranks: ", std::string(tiering::OpKindName(op.kind))));
  }
}

// Where a block's reduced gradient goes.
std::byte* RankLanes::Reduced(const Op& op) const {
  if (!plan_.device.collectives) return static_cast<std::byte*>(arena_view_.gradient(op.gradient_slot));
  if (!plan_.on_device(op.block)) return options_.device->own_part(op);
  return static_cast<std::byte*>(options_.device->state().block(op.block).gradient);
}

// In pieces, so that it takes little memory: while one is summed, the next is on its way.
absl::Status RankLanes::RunReduce(const Op& op) {
  const bool there = plan_.device.collectives;
  Device& device = there ? options_.device->device() : *HostDevice();
  Comm& comm = there ? *options_.devices : *comm_;
  const auto world = At(plan_.world);
  const auto own = At(comm.rank());
  const auto part = static_cast<size_t>(plan_.blocks[op.block].elements);
  const auto width = static_cast<size_t>(plan_.accumulator_bytes(op.block));
  const auto width_after = static_cast<size_t>(plan_.precision.gradient_bytes);
  const DType type = width == 4 ? DType::kFp32 : options_.weights;
  std::byte* const gradients =
      there ? options_.device->gradients(op)
            : reinterpret_cast<std::byte*>(arena_view_.accumulator(op.accumulator_slot));
  // In place nobody else reads this part, and what is rounded lies before what is still to be summed.
  std::byte* const reduced = Reduced(op);
  const auto elements = static_cast<size_t>(options_.layout_elements[op.block]);
  RETURN_IF_ERROR(device.Clear(gradients + elements * width, (world * part - elements) * width));

  double* const squares =
      plan_.on_device(op.block) ? options_.device->state().partial_sums(op.block) : nullptr;
  const auto piece_elements =
      static_cast<size_t>(there ? plan_.device.network_piece : tiering::kNetworkPiece);
  std::byte* const memory = there ? options_.device->network() : options_.memory.data();
  auto* const sums = reinterpret_cast<float*>(memory);
  const auto place = [&](size_t piece, size_t rank) {
    return memory + (1 + (piece % 2) * world + rank) * piece_elements * 4;
  };
  const size_t pieces = (part + piece_elements - 1) / piece_elements;
  std::vector<const void*> addends(world);
  std::unique_ptr<Exchange> coming;
  for (size_t piece = 0; piece <= pieces; ++piece) {
    std::unique_ptr<Exchange> next;
    if (piece < pieces) {
      const size_t first = piece * piece_elements, n = std::min(piece_elements, part - first);
      std::vector<const void*> send;
      std::vector<void*> receive;
      for (size_t k = 0; k < world; ++k) {
        send.push_back(gradients + (k * part + first) * width);
        receive.push_back(place(piece, k));
      }
      ASSIGN_OR_RETURN(std::unique_ptr<Exchange> begun, comm.Begin(Channel::kReduceScatter,
                                                                   {.name = "the gradient",
                                                                    .step = op.step,
                                                                    .block = op.block.value(),
                                                                    .piece = static_cast<int64_t>(piece)},
                                                                   send, receive, n * width));
      next = std::move(begun);
    }
    if (piece > 0) {
      RETURN_IF_ERROR(coming->Wait());
      const size_t first = (piece - 1) * piece_elements, n = std::min(piece_elements, part - first);
      for (size_t k = 0; k < world; ++k) addends[k] = place(piece - 1, k);
      addends[own] = gradients + (own * part + first) * width;
      RETURN_IF_ERROR(
          device.SumInOrder(type, addends, sums, options_.weights, reduced + first * width_after, n,
                            squares == nullptr ? nullptr : squares + first / kernels::kReduceBlock));
    }
    coming = std::move(next);
  }
  return absl::OkStatus();
}

absl::Status RankLanes::RunExchange(const Op& op) {
  const StepTotals own = own_totals_();
  RETURN_IF_ERROR(own.failure);
  const auto world = At(plan_.world);
  const auto micro_batches = At(plan_.micro_batches);
  const size_t came_at = sizeof(kernels::SumOfSquares) + (micro_batches + 1) * sizeof(double);
  const size_t bytes = came_at + own.came.size();
  std::vector<std::byte> all(world * bytes);
  std::byte* const mine = all.data() + At(comm_->rank()) * bytes;
  std::memcpy(mine, &own.squares, sizeof(own.squares));
  std::vector<double> numbers(micro_batches + 1, 0.0);
  std::copy_n(own.losses.begin(), std::min(micro_batches, own.losses.size()), numbers.begin());
  numbers.back() = own.stops ? 1 : 0;
  std::memcpy(mine + sizeof(own.squares), numbers.data(), numbers.size() * sizeof(double));
  std::transform(own.came.begin(), own.came.end(), mine + came_at,
                 [](uint8_t came) { return std::byte{came}; });
  // With the calls: whoever was told to do something else until here, as another order of the stages, does
  // not come to this, and nothing is updated.
  const What what{.name = "the losses and norms", .step = op.step, .calls = comm_->calls()};
  RETURN_IF_ERROR(comm_->AllGather(Channel::kReduceScatter, what, all.data(), bytes));

  totals_ = StepTotals();
  totals_.losses.resize(micro_batches * world);
  totals_.came.resize(own.came.size());
  for (size_t k = 0; k < world; ++k) {
    kernels::SumOfSquares squares;
    std::memcpy(&squares, all.data() + k * bytes, sizeof(squares));
    totals_.squares.Merge(squares);
    std::memcpy(numbers.data(), all.data() + k * bytes + sizeof(squares), numbers.size() * sizeof(double));
    for (size_t m = 0; m < micro_batches; ++m) totals_.losses[m * world + k] = numbers[m];
    totals_.stops |= numbers.back() != 0;
    for (size_t p = 0; p < own.came.size(); ++p)
      totals_.came[p] |= std::to_integer<uint8_t>(all[k * bytes + came_at + p]);
  }
  return absl::OkStatus();
}

absl::Status RankLanes::RunAgree(const Op& op) {
  std::vector<int64_t> steps(At(plan_.world));
  steps[At(comm_->rank())] = op.step;
  const What what{.name = "the commit", .step = op.step};
  RETURN_IF_ERROR(comm_->AllGather(Channel::kAgree, what, steps.data(), sizeof(int64_t)));
  for (size_t k = 0; k < steps.size(); ++k) {
    if (steps[k] == op.step) continue;
    return absl::InternalError(absl::StrCat("rank ", k, " has committed step ", steps[k], ", rank ",
                                            comm_->rank(), " step ", op.step,
                                            ": they do not run the same program"));
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
