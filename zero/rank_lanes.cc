#include "zero/rank_lanes.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

namespace penstock::zero {

using kernels::DType;
using tiering::Lane;
using tiering::Op;
using tiering::OpKind;

namespace {

size_t At(int index) { return static_cast<size_t>(index); }

}  // namespace

RankLanes::RankLanes(const tiering::Plan& plan, const Residency& residency, Comm* comm, RankParts* parts,
                     Options options, Totals totals, Report report)
    : plan_(plan),
      residency_(residency),
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
  const size_t queue = op.lane == Lane::kGather ? 0 : op.lane == Lane::kReduce ? 1 : 2;
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
    case OpKind::kGather:
      if (comm_ == nullptr) return parts_->ReadWeights(op.block, 1, residency_.run(op.run_slot));
      return comm_->AllGather(
          Channel::kGather, residency_.run(op.run_slot),
          static_cast<size_t>(plan_.blocks[At(op.block)].elements * plan_.precision.weight_bytes()));
    case OpKind::kReduce:
      return RunReduce(op);
    case OpKind::kExchange:
      return RunExchange();
    case OpKind::kAgree:
      return RunAgree(op);
    default:
      return absl::InternalError(
          absl::StrCat("no exchange between ranks: ", std::string(tiering::OpKindName(op.kind))));
  }
}

// In pieces, so that it takes little memory: while one is summed, the next is on its way.
absl::Status RankLanes::RunReduce(const Op& op) {
  const auto world = At(plan_.world);
  const auto part = static_cast<size_t>(plan_.blocks[At(op.block)].elements);
  const auto width = static_cast<size_t>(plan_.accumulator_bytes(op.block));
  const DType type = width == 4 ? DType::kFp32 : options_.weights;
  auto* const gradients = reinterpret_cast<std::byte*>(residency_.accumulator(op.accumulator_slot));
  auto* const reduced = static_cast<std::byte*>(residency_.gradient(op.gradient_slot));
  const auto elements = static_cast<size_t>(options_.layout_elements[At(op.block)]);
  std::memset(gradients + elements * width, 0, (world * part - elements) * width);

  constexpr auto kPiece = static_cast<size_t>(tiering::kNetworkPiece);
  auto* const sums = reinterpret_cast<float*>(options_.memory.data());
  const auto place = [&](size_t piece, size_t rank) {
    return options_.memory.data() + (1 + (piece % 2) * world + rank) * kPiece * 4;
  };
  const size_t pieces = (part + kPiece - 1) / kPiece;
  const auto own = At(comm_->rank());
  std::unique_ptr<Exchange> coming;
  for (size_t piece = 0; piece <= pieces; ++piece) {
    std::unique_ptr<Exchange> next;
    if (piece < pieces) {
      const size_t first = piece * kPiece, n = std::min(kPiece, part - first);
      std::vector<const void*> send;
      std::vector<void*> receive;
      for (size_t k = 0; k < world; ++k) {
        send.push_back(gradients + (k * part + first) * width);
        receive.push_back(place(piece, k));
      }
      absl::StatusOr<std::unique_ptr<Exchange>> begun =
          comm_->Begin(Channel::kReduce, send, receive, n * width);
      if (!begun.ok()) return begun.status();
      next = std::move(*begun);
    }
    if (piece > 0) {
      if (absl::Status status = coming->Wait(); !status.ok()) return status;
      const size_t first = (piece - 1) * kPiece, n = std::min(kPiece, part - first);
      for (size_t k = 0; k < world; ++k) {
        const void* addend = k == own ? gradients + (own * part + first) * width : place(piece - 1, k);
        if (k == 0) {
          kernels::Convert(type, addend, DType::kFp32, sums, n);
        } else if (type == DType::kFp32) {
          kernels::AccumulateFp32(static_cast<const float*>(addend), sums, n);
        } else if (type == DType::kBf16) {
          kernels::AccumulateBf16(static_cast<const uint16_t*>(addend), sums, n);
        } else {
          kernels::AccumulateFp16(static_cast<const uint16_t*>(addend), sums, n);
        }
      }
      kernels::Convert(DType::kFp32, sums, options_.weights,
                       reduced + first * static_cast<size_t>(plan_.precision.gradient_bytes), n);
    }
    coming = std::move(next);
  }
  return absl::OkStatus();
}

absl::Status RankLanes::RunExchange() {
  const StepTotals own = own_totals_();
  const auto world = At(plan_.world);
  const auto micro_batches = At(plan_.micro_batches);
  const size_t bytes = sizeof(kernels::SumOfSquares) + (micro_batches + 1) * sizeof(double);
  std::vector<std::byte> all(world * bytes);
  std::byte* const mine = all.data() + At(comm_->rank()) * bytes;
  std::memcpy(mine, &own.squares, sizeof(own.squares));
  std::vector<double> numbers(micro_batches + 1, 0.0);
  std::copy_n(own.losses.begin(), std::min(micro_batches, own.losses.size()), numbers.begin());
  numbers.back() = own.stops ? 1 : 0;
  std::memcpy(mine + sizeof(own.squares), numbers.data(), numbers.size() * sizeof(double));
  if (absl::Status status = comm_->AllGather(Channel::kReduce, all.data(), bytes); !status.ok())
    return status;

  totals_ = StepTotals();
  totals_.losses.resize(micro_batches * world);
  for (size_t k = 0; k < world; ++k) {
    kernels::SumOfSquares squares;
    std::memcpy(&squares, all.data() + k * bytes, sizeof(squares));
    totals_.squares.Merge(squares);
    std::memcpy(numbers.data(), all.data() + k * bytes + sizeof(squares), numbers.size() * sizeof(double));
    for (size_t m = 0; m < micro_batches; ++m) totals_.losses[m * world + k] = numbers[m];
    totals_.stops |= numbers.back() != 0;
  }
  return absl::OkStatus();
}

absl::Status RankLanes::RunAgree(const Op& op) {
  std::vector<int64_t> steps(At(plan_.world));
  steps[At(comm_->rank())] = op.step;
  if (absl::Status status = comm_->AllGather(Channel::kAgree, steps.data(), sizeof(int64_t)); !status.ok())
    return status;
  for (size_t k = 0; k < steps.size(); ++k) {
    if (steps[k] == op.step) continue;
    return absl::InternalError(absl::StrCat("rank ", k, " has committed step ", steps[k], ", rank ",
                                            comm_->rank(), " step ", op.step,
                                            ": they do not run the same program"));
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
