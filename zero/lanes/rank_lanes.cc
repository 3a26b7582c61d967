#include "zero/lanes/rank_lanes.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "base/status_macros.h"
#include "kernels/weight_code.h"

namespace penstock::zero {

using kernels::DType;
using tiering::Lane;
using tiering::Op;
using tiering::OpKind;

namespace {

constexpr kernels::WeightCode kWeightCode{tiering::kWeightCodeBits, tiering::kCodeGroup};
constexpr kernels::WeightCode kGradientCode{tiering::kGradientCodeBits, tiering::kCodeGroup};
constexpr auto kPiece = static_cast<size_t>(tiering::kNetworkPiece);
static_assert(kWeightCode.row_bytes(kPiece) ==
              size_t{tiering::CodedBytes(kWeightCode.bits, tiering::kNetworkPiece)});
static_assert(kGradientCode.row_bytes(kPiece) ==
              size_t{tiering::CodedBytes(kGradientCode.bits, tiering::kNetworkPiece)});

// Exchanges `pieces`, two of them under way at once: `begin` starts one, and `end` finds it arrived.
template <typename Begin, typename End>
absl::Status InPieces(size_t pieces, Begin begin, End end) {
  std::unique_ptr<Exchange> coming;
  for (size_t piece = 0; piece <= pieces; ++piece) {
    std::unique_ptr<Exchange> next;
    if (piece < pieces) {
      ASSIGN_OR_RETURN(std::unique_ptr<Exchange> begun, begin(piece));
      next = std::move(begun);
    }
    if (piece > 0) {
      RETURN_IF_ERROR(coming->Wait());
      RETURN_IF_ERROR(end(piece - 1));
    }
    coming = std::move(next);
  }
  return absl::OkStatus();
}

}  // namespace

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
    case OpKind::kAllGather:
      return RunGather(op);
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

absl::Status RankLanes::RunGather(const Op& op) {
  const auto bytes = static_cast<size_t>(plan_.blocks[op.block].elements * plan_.precision.weight_bytes());
  const What what{.name = "the weights", .step = op.step, .block = op.block.value()};
  const bool there = plan_.device.collectives;
  if (!there && comm_ == nullptr)
    return parts_->ReadWeights(op.block, 1, arena_view_.weights(op.weight_slot));
  if (plan_.codes.weights && !op.evaluates) return GatherCoded(op, what);
  gathered_.Count(At(plan_.world) - 1, bytes, bytes);
  if (there)
    return options_.devices->AllGather(Channel::kAllGather, what,
                                       options_.device->weights(op.device_weight_slot), bytes);
  return comm_->AllGather(Channel::kAllGather, what, arena_view_.weights(op.weight_slot), bytes);
}

RankLanes::Peers RankLanes::PeersOf(const Op& op) {
  const bool there = plan_.device.collectives;
  Comm& comm = there ? *options_.devices : *comm_;
  return {.device = there ? options_.device->device() : *HostDevice(),
          .comm = comm,
          .memory = there ? options_.device->network() : options_.memory.data(),
          .piece_elements = there ? static_cast<size_t>(plan_.device.network_piece) : kPiece,
          .world = At(plan_.world),
          .own = At(comm.rank()),
          .part = static_cast<size_t>(plan_.blocks[op.block].elements)};
}

absl::Status RankLanes::GatherCoded(const Op& op, const What& what) {
  const bool there = plan_.device.collectives;
  const Peers peers = PeersOf(op);
  const size_t world = peers.world, own = peers.own;
  const auto width = static_cast<size_t>(plan_.precision.weight_bytes());
  auto* const weights = static_cast<std::byte*>(there ? options_.device->weights(op.device_weight_slot)
                                                      : arena_view_.weights(op.weight_slot));
  const auto at = [&](size_t rank, size_t piece) { return weights + peers.first(rank, piece) * width; };
  // Behind what gradients are reduced in. This rank's own place has what it sends.
  std::byte* const memory = peers.memory + (!plan_.trains ? 0
                                            : there       ? plan_.device.reduce_bytes(plan_.world)
                                                          : tiering::NetworkBytes(plan_.world));
  const auto coded = [&](size_t rank, size_t piece) {
    return memory + (piece % 2 * world + rank) * kWeightCode.row_bytes(peers.piece_elements);
  };
  return InPieces(
      peers.pieces(),
      [&](size_t piece) -> absl::StatusOr<std::unique_ptr<Exchange>> {
        const size_t n = peers.length(piece), bytes = kWeightCode.row_bytes(n);
        RETURN_IF_ERROR(
            peers.device.EncodeRow(kWeightCode, options_.weights, at(own, piece), n, coded(own, piece)));
        const std::vector<const void*> send(world, coded(own, piece));
        std::vector<void*> receive;
        for (size_t k = 0; k < world; ++k) receive.push_back(coded(k, piece));
        What of_piece = what;
        of_piece.piece = static_cast<int64_t>(piece);
        gathered_.Count(world - 1, bytes, n * width);
        return peers.comm.Begin(Channel::kAllGather, of_piece, send, receive, bytes);
      },
      [&](size_t piece) {
        for (size_t k = 0; k < world; ++k) {
          if (k == own) continue;
          RETURN_IF_ERROR(peers.device.DecodeRow(kWeightCode, coded(k, piece), peers.length(piece),
                                                 options_.weights, at(k, piece)));
        }
        return absl::OkStatus();
      });
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
  const Peers peers = PeersOf(op);
  Device& device = peers.device;
  const size_t world = peers.world, own = peers.own, piece_elements = peers.piece_elements;
  const auto width = static_cast<size_t>(plan_.accumulator_bytes(op.block));
  const auto width_after = static_cast<size_t>(plan_.precision.gradient_bytes);
  const DType type = width == 4 ? DType::kFp32 : options_.weights;
  std::byte* const gradients =
      there ? options_.device->gradients(op)
            : reinterpret_cast<std::byte*>(arena_view_.accumulator(op.accumulator_slot));
  // In place nobody else reads this part, and what is rounded lies before what is still to be summed.
  std::byte* const reduced = Reduced(op);
  const auto elements = static_cast<size_t>(options_.layout_elements[op.block]);
  RETURN_IF_ERROR(device.Clear(gradients + elements * width, (world * peers.part - elements) * width));

  double* const squares =
      plan_.on_device(op.block) ? options_.device->state().partial_sums(op.block) : nullptr;
  std::byte* const memory = peers.memory;
  auto* const sums = reinterpret_cast<float*>(memory);
  // Behind the sums: what arrives of two pieces; or the addends of one, decoded, and then what is sent of two
  // pieces and what arrives.
  const bool coded = plan_.codes.gradients;
  const size_t coded_bytes = kGradientCode.row_bytes(piece_elements);
  const auto decoded = [&](size_t rank) { return sums + (1 + rank) * piece_elements; };
  const auto sent = [&](size_t piece, size_t rank) {
    return memory + (1 + world) * piece_elements * 4 + (piece % 2 * world + rank) * coded_bytes;
  };
  const auto place = [&](size_t piece, size_t rank) {
    return coded ? sent(piece, rank) + 2 * world * coded_bytes
                 : memory + (1 + (piece % 2) * world + rank) * piece_elements * 4;
  };
  const auto addend = [&](size_t rank, size_t piece) { return gradients + peers.first(rank, piece) * width; };
  return InPieces(
      peers.pieces(),
      [&](size_t piece) -> absl::StatusOr<std::unique_ptr<Exchange>> {
        const size_t n = peers.length(piece), bytes = coded ? kGradientCode.row_bytes(n) : n * width;
        std::vector<const void*> send;
        std::vector<void*> receive;
        for (size_t k = 0; k < world; ++k) {
          // What is not finite is NaN in the sum, and the step is skipped.
          if (coded && k != own)
            RETURN_IF_ERROR(device.EncodeRow(kGradientCode, type, addend(k, piece), n, sent(piece, k)));
          send.push_back(coded ? sent(piece, k) : addend(k, piece));
          receive.push_back(place(piece, k));
        }
        reduced_.Count(world - 1, bytes, n * width);
        return peers.comm.Begin(Channel::kReduceScatter,
                                {.name = "the gradient",
                                 .step = op.step,
                                 .block = op.block.value(),
                                 .piece = static_cast<int64_t>(piece)},
                                send, receive, bytes);
      },
      [&](size_t piece) {
        const size_t n = peers.length(piece), first = peers.first(0, piece);
        std::vector<const void*> addends(world);
        for (size_t k = 0; k < world; ++k) {
          addends[k] = k == own ? addend(k, piece) : place(piece, k);
          if (!coded || (k == own && type == DType::kFp32)) continue;
          // A sum of one is that one, in fp32.
          RETURN_IF_ERROR(
              k == own ? device.SumInOrder(type, std::span(&addends[k], 1), sums, DType::kFp32, decoded(k), n,
                                           nullptr)
                       : device.DecodeRow(kGradientCode, place(piece, k), n, DType::kFp32, decoded(k)));
          addends[k] = decoded(k);
        }
        return device.SumInOrder(coded ? DType::kFp32 : type, addends, sums, options_.weights,
                                 reduced + first * width_after, n,
                                 squares == nullptr ? nullptr : squares + first / kernels::kReduceBlock);
      });
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
