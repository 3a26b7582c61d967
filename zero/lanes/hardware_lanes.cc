#include "zero/lanes/hardware_lanes.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "base/status_macros.h"
#include "zero/compute/seed.h"
#include "zero/memory/guarded.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

using tiering::Lane;
using tiering::Op;
using tiering::OpKind;

bool MovesInput(const Op& op) { return op.kind == OpKind::kWriteInput || op.kind == OpKind::kReadInput; }

}  // namespace

HardwareLanes::HardwareLanes(const tiering::Plan& plan, ArenaView& arena_view, GradientSums::Layouts layouts,
                             Compute* compute, Device* device, swap::Store* store, ActivationSpill* inputs,
                             DeviceLanes* lanes, const Options& options, LaneHooks hooks)
    : plan_(plan),
      arena_view_(arena_view),
      layouts_(std::move(layouts)),
      compute_(compute),
      pool_(std::max(2, options.update_workers)),
      compute_lane_(plan, arena_view, layouts_, compute, *device, lanes,
                    {options.format.weights, options.seed, options.rank, options.world, &pool_}),
      has_store_(store != nullptr),
      device_(lanes),
      options_(options),
      hooks_(std::move(hooks)),
      squares_(plan.blocks.size()),
      norms_(layouts_),
      drive_(plan, arena_view, lanes,
             {.store = store,
              .inputs = inputs,
              .sums = options.sums,
              .frozen = options.frozen,
              .now = [this] { return Now(); }},
             [this](tiering::OpId id, const Op& op, absl::Status status, double start) {
               Report({id, &op}, std::move(status), start);
             }) {
  for (const tiering::BlockPlan& block : plan_.blocks) moved_.emplace_back(block.tiles.size(), 0);
  for (const tiering::Position position : plan_.all_positions())
    refused_inputs_.emplace_back(plan_.SpillsInput(position) ? plan_.micro_batches : 0, false);
  TensorPool* const tensors = TensorMemory::Here();  // of the engine whose lanes these are
  threads_.emplace_back([this, tensors] {
    const TensorScope scope(tensors);
    Work(&compute_queue_, /*computes=*/true);
  });
  for (int i = 0; i < std::max(1, options_.update_workers); ++i) {
    threads_.emplace_back([this, tensors] {
      const TensorScope scope(tensors);
      Work(&update_queue_, /*computes=*/false);
    });
  }
  if (options_.comm == nullptr && options_.parts == nullptr) return;
  RankLanes::Options rank_options;
  rank_options.weights = options_.format.weights;
  for (const auto& layout : layouts_) rank_options.layout_elements.push_back(layout->elements);
  rank_options.memory = options_.network_memory;
  rank_options.devices = options_.devices;
  rank_options.device = device_;
  rank_options.now = [this] { return Now(); };
  rank_options.norms = &norms_;
  ranks_ = std::make_unique<RankLanes>(
      plan_, arena_view_, options_.comm, options_.parts, std::move(rank_options),
      [this] { return OwnTotals(); },
      [this](tiering::OpId id, const Op& op, absl::Status status, double start) {
        Report({id, &op}, std::move(status), start);
      });
}

StepTotals HardwareLanes::OwnTotals() const {
  StepTotals totals;
  for (const kernels::SumOfSquares& squares : squares_) totals.squares.Merge(squares);
  absl::StatusOr<std::vector<double>> losses = compute_->Losses();
  totals.failure = losses.status();
  if (losses.ok()) totals.losses = *std::move(losses);
  totals.stops = options_.stops && options_.stops();
  if (options_.tells_what_came) totals.came = compute_lane_.Came();
  return totals;
}

absl::Status HardwareLanes::Decide(const Op& op) {
  if (op.kind == OpKind::kTrust) {
    if (const UpdateDecision& decision = DecisionFor(op.step); decision.step == op.step)
      norms_.Decide(decision);
    return absl::OkStatus();
  }
  absl::Status status = hooks_.decide(op);
  if (!status.ok() && ranks_ != nullptr) ranks_->Fail(status);
  return status;
}

HardwareLanes::~HardwareLanes() {
  ranks_.reset();
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  compute_there_.notify_all();
  updates_there_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

double HardwareLanes::Now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string HardwareLanes::PlaceOf(const Op& op) const {
  const bool drive = op.lane == Lane::kRead || op.lane == Lane::kWrite || op.lane == Lane::kCommit;
  if (drive && has_store_) return drive_.PlaceOf(op);
  const bool host = drive || op.lane == Lane::kUpdate || device_ == nullptr;
  return host ? "the processor" : device_->device().Describe();
}

// What a device has computed is known a while after it has. So backward of a block is enqueued behind that of
// the block before, its gradient, rounding and squares: else the device would wait for that news.
bool HardwareLanes::HasRoom(Lane lane) const {
  return lane != Lane::kCompute || computes_ < (device_ != nullptr ? 6 : 2);
}

void HardwareLanes::FailPass(const Op& op) {
  if (op.evaluates) {
    evaluation_failed_ = true;
  } else {
    failed_step_ = op.step;
  }
}

void HardwareLanes::ForgetFailedPass() {
  compute_lane_.ForgetFailure();
  if (failed_step_ != 0) {
    for (const tiering::BlockIndex b : moved_.indices()) {
      for (const tiering::TileIndex t : moved_[b].indices()) TakeBackUpdate(b, t, failed_step_);
    }
  }
  failed_step_ = 0;
  evaluation_failed_ = false;
}

void HardwareLanes::ForgetSums() {
  for (const tiering::BlockIndex block : layouts_.indices()) compute_lane_.SumsTaken(block);
  compute_lane_.ForgetCame();
}

bool HardwareLanes::Skips(const Op& op) const {
  if (evaluation_failed_ && op.evaluates && op.lane == Lane::kCompute) return true;
  if (failed_step_ != 0 && op.step >= failed_step_ && !op.evaluates) return true;
  if (abandoned_step_ != 0 && op.step == abandoned_step_) {
    return op.speculative_update || tiering::TraitsOf(op.kind).ends_with_its_step;
  }
  const UpdateDecision& decision = DecisionFor(op.step);
  const bool decided = decision.step == op.step;
  if (op.replay) return !(decided && decision.replay);
  if (!decided || !IsTileWrite(op.kind)) return false;
  // Written for a commit, whatever became of the last update.
  if (plan_.written_at_checkpoint(op.block, op.tile)) return false;
  // What will be made again need not go to the drive; a skipped update leaves the tile as it was.
  return op.speculative_update ? decision.replay : decision.skip;
}

void HardwareLanes::Report(const Task& task, absl::Status status, double start) {
  // Inside the lock: who takes the last completion may end this, and this thread is not always one of its
  // own.
  std::lock_guard lock(mutex_);
  done_.push_back({task, std::move(status), start, Now()});
  completion_there_.notify_one();
}

void HardwareLanes::ReportInOrder(const Task& task, absl::Status status, double start) {
  {
    std::lock_guard lock(mutex_);
    double& idle_since = idle_since_[static_cast<size_t>(task.op->lane)];
    start = std::max(start, idle_since);
    idle_since = Now();
  }
  Report(task, std::move(status), start);
}

void HardwareLanes::Start(tiering::OpId id, const Op& op) {
  const Task task{id, &op};
  if (op.lane == Lane::kCompute) ++computes_;
  if (RankLanes::Runs(op)) return ranks_->Start(id, op);
  switch (op.lane) {
    case Lane::kCompute:
    case Lane::kUpdate: {
      {
        std::lock_guard lock(mutex_);
        (op.lane == Lane::kCompute ? compute_queue_ : update_queue_).push_back(task);
      }
      (op.lane == Lane::kCompute ? compute_there_ : updates_there_).notify_one();
      return;
    }
    case Lane::kRead:
    case Lane::kWrite: {
      const double start = Now();
      if (UndoesWrite(op)) return Report(task, drive_.DropWritten(op), start);
      absl::Status status = MovesInput(op) ? StartInput(task) : drive_.Start(id, op);
      if (!status.ok()) Report(task, std::move(status), start);
      return;
    }
    case Lane::kCopyIn:
    case Lane::kCopyOut: {
      const double start = Now();
      if (MovesInput(op)) {
        if (absl::Status status = StartInput(task); !status.ok())
          ReportInOrder(task, std::move(status), start);
        return;
      }
      return device_->Start(
          op, [this, task, start](absl::Status status) { ReportInOrder(task, std::move(status), start); });
    }
    case Lane::kCommit: {
      const double start = Now();
      if (!has_store_ || !op.durable) return Report(task, absl::OkStatus(), start);
      absl::Status status = drive_.StartCommit(id, op, hooks_.describe_commit(op));
      if (!status.ok()) Report(task, std::move(status), start);
      return;
    }
    default:
      return Report(task, absl::InternalError("an operation was started on a lane that is not there"), Now());
  }
}

// A skipped step ends with the version that it began with, also where an update in backward was written.
bool HardwareLanes::UndoesWrite(const Op& op) const {
  return op.kind == OpKind::kWriteTile && op.replay && DecisionFor(op.step).skip;
}

absl::Status HardwareLanes::StartInput(const Task& task) {
  const Op& op = *task.op;
  const absl::StatusOr<std::span<const TensorView>> values = compute_lane_.Inputs(op);
  refused_inputs_[op.position][At(op.micro_batch)] = !values.ok();
  RETURN_IF_ERROR(values.status());
  const bool reads = op.kind == OpKind::kReadInput;
  int64_t in_pages = 0;
  for (const TensorView& value : *values) {
    (reads ? input_bytes_.read : input_bytes_.written) += value.bytes();
    in_pages += tiering::AlignUp(value.bytes(), tiering::kPage);
  }
  if (device_ == nullptr) (reads ? inputs_not_moved_.read : inputs_not_moved_.written) += op.bytes - in_pages;
  if (device_ == nullptr) {
    absl::Status status = drive_.StartInput(task.id, op, *values);
    // No room for them, say: the step fails, and not the run.
    if (!reads) refused_inputs_[op.position][At(op.micro_batch)] = !status.ok();
    return status;
  }
  return device_->StartInput(op, *values, [this, task, start = Now()](absl::Status status) {
    ReportInOrder(task, std::move(status), start);
  });
}

absl::Status HardwareLanes::Settle(const Done& done) {
  const Op& op = *done.task.op;
  RETURN_IF_ERROR(done.status);
  if (op.kind == OpKind::kWriteInput) compute_->DropInputs(op.position, op.micro_batch);
  if (op.lane == Lane::kRead || op.lane == Lane::kWrite)
    return UndoesWrite(op) ? absl::OkStatus() : drive_.Ended(op);
  if (op.kind == OpKind::kRoundGradient) compute_lane_.SumsTaken(op.block);
  if (op.kind == OpKind::kCommit && has_store_ && op.durable) RETURN_IF_ERROR(drive_.FinishCommit());
  // Over several ranks a step is committed when all have.
  const OpKind committed = ranks_ == nullptr ? OpKind::kCommit : OpKind::kAgree;
  return op.kind == committed ? hooks_.committed(op) : absl::OkStatus();
}

void HardwareLanes::Wait(std::vector<tiering::Completion>* completions) {
  std::deque<Done> done;
  {
    std::unique_lock lock(mutex_);
    completion_there_.wait(lock, [&] { return !done_.empty(); });
    done.swap(done_);
  }
  for (const Done& one : done) {
    if (one.task.op->lane == Lane::kCompute) --computes_;
    absl::Status status = Settle(one);
    if (!status.ok() && IsOfCompute(*one.task.op) && hooks_.failed && hooks_.failed(*one.task.op, status))
      status = absl::OkStatus();
    // What waits for the others must not wait for a rank that has failed.
    if (!status.ok() && ranks_ != nullptr) ranks_->Fail(status);
    completions->push_back({one.task.id, std::move(status), one.start, one.end});
  }
}

void HardwareLanes::Work(std::deque<Task>* queue, bool computes) {
  if (computes) compute_->ThreadBegins();
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      (computes ? compute_there_ : updates_there_).wait(lock, [&] { return stopping_ || !queue->empty(); });
      if (queue->empty()) return;
      task = queue->front();
      queue->pop_front();
    }
    const double start = Now();
    absl::Status status = Run(*task.op);
    if (computes && device_ != nullptr && status.ok()) {
      // Enqueued, not computed: the next may be enqueued behind it meanwhile.
      device_->device().AfterCompute(
          [this, task, start](absl::Status computed) { ReportInOrder(task, std::move(computed), start); });
      continue;
    }
    Report(task, std::move(status), start);
  }
}

bool HardwareLanes::IsOfCompute(const Op& op) const {
  if (MovesInput(op)) return refused_inputs_[op.position][At(op.micro_batch)];
  return op.kind == OpKind::kForward || op.kind == OpKind::kBackward ||
         op.kind == OpKind::kAccumulateGradient;
}

absl::Status HardwareLanes::Run(const Op& op) {
  switch (op.kind) {
    case OpKind::kForward:
    case OpKind::kBackward:
    case OpKind::kAccumulateGradient:
    case OpKind::kRoundOnDevice:
      return compute_lane_.Run(op);
    case OpKind::kSquareGradient:
      return Guarded("squares of a gradient", [&] {
        device_->device().SquarePartials(options_.format.weights, device_->gradient(op.device_gradient_slot),
                                         static_cast<size_t>(plan_.blocks[op.block].gradient_elements()),
                                         device_->partial_sums(op));
      });
    case OpKind::kUpdateOnDevice:
      return RunUpdateOnDevice(op);
    case OpKind::kVerify:
      return drive_.Verify(op);
    case OpKind::kUpdate:
      return RunUpdate(op);
    case OpKind::kUpdateNorms:
      return RunUpdateNorms(op);
    case OpKind::kChecksumTile:
      drive_.ChecksumTile(op);
      return absl::OkStatus();
    case OpKind::kRoundGradient:
      return RunRoundGradient(op);
    default:
      return absl::InternalError(absl::StrCat("no worker for: ", std::string(tiering::OpKindName(op.kind))));
  }
}

uint64_t HardwareLanes::SeedOf(const UpdateDecision& decision, tiering::BlockIndex block) {
  return MixSeed(static_cast<uint64_t>(decision.update), static_cast<uint64_t>(block.value()));
}

absl::Status HardwareLanes::RunUpdateOnDevice(const Op& op) {
  const UpdateDecision& decision = DecisionFor(op.step);
  if (decision.skip) return absl::OkStatus();
  const TileMemory memory = device_->state().block(op.block);
  const tiering::Tile all = arena_view_.InWholeBlock(op.block, {0, memory.elements});
  return Guarded("update on the device", [&] {
    const BlockSteps steps(decision, *layouts_[op.block], op.block);
    for (const auto& [step, arrays] :
         UpdatesOf(options_.format, steps, SeedOf(decision, op.block), all, memory))
      device_->device().Update(*step, arrays);
  });
}

void HardwareLanes::TakeBackUpdate(tiering::BlockIndex block, tiering::TileIndex tile, int64_t step) {
  if (moved_[block][tile] != step) return;
  moved_[block][tile] = 0;
  arena_view_.Exchange(block, tile);
}

absl::Status HardwareLanes::RunUpdateBesideVersion(const Op& op) {
  TileMemory from = arena_view_.tile(op.block, op.tile, op.weight_slot, op.tile_slot);
  RETURN_IF_ERROR(FindGradient(op, &from));
  const UpdateDecision& decision = assumed_[op.step & 1];
  UpdateTileInto(options_.format, {decision, *layouts_[op.block], op.block}, SeedOf(decision, op.block),
                 arena_view_.InWholeBlock(op.block, plan_.blocks[op.block].tiles[op.tile]), from,
                 arena_view_.other_place(op.block, op.tile));
  arena_view_.Exchange(op.block, op.tile);
  moved_[op.block][op.tile] = op.step;
  return absl::OkStatus();
}

absl::Status HardwareLanes::RunUpdate(const Op& op) {
  if (op.speculative_update && !has_store_) return RunUpdateBesideVersion(op);
  if (op.replay && !has_store_) TakeBackUpdate(op.block, op.tile, op.step);
  TileMemory memory = arena_view_.tile(op.block, op.tile, op.weight_slot, op.tile_slot);
  const tiering::Tile& tile = plan_.blocks[op.block].tiles[op.tile];
  // What was read for this update is checked before it is changed. Weights or state that were in memory
  // already have been checked when they came, or were written from here.
  RETURN_IF_ERROR(drive_.VerifyBeforeUpdate(op));
  const UpdateDecision& decision = op.speculative_update ? assumed_[op.step & 1] : DecisionFor(op.step);
  if (decision.skip) return absl::OkStatus();
  RETURN_IF_ERROR(FindGradient(op, &memory));
  const std::span<const double> trusts =
      plan_.tensor_norms ? norms_.trusts(op.block) : std::span<const double>();
  UpdateTile(options_.format, {decision, *layouts_[op.block], op.block}, SeedOf(decision, op.block),
             arena_view_.InWholeBlock(op.block, tile), memory, trusts);
  if (has_store_ && !op.preview && !plan_.written_at_checkpoint(op.block, op.tile)) drive_.ChecksumTile(op);
  return absl::OkStatus();
}

absl::Status HardwareLanes::FindGradient(const Op& op, TileMemory* memory) {
  if (!op.gradient_slot.valid()) return drive_.VerifyGradient(op, *memory);
  memory->gradient = arena_view_.GradientOf(op.block, op.tile, op.gradient_slot);
  return absl::OkStatus();
}

absl::Status HardwareLanes::RunUpdateNorms(const Op& op) {
  TileMemory memory = arena_view_.tile(op.block, op.tile, op.weight_slot, op.tile_slot);
  RETURN_IF_ERROR(drive_.VerifyBeforeUpdate(op));
  const UpdateDecision& decision = DecisionFor(op.step);
  if (decision.skip) return absl::OkStatus();
  RETURN_IF_ERROR(FindGradient(op, &memory));
  norms_.Add(options_.format, decision, SeedOf(decision, op.block), op.block,
             arena_view_.InWholeBlock(op.block, plan_.blocks[op.block].tiles[op.tile]), memory);
  return absl::OkStatus();
}

absl::Status HardwareLanes::RunRoundGradient(const Op& op) {
  const auto n = static_cast<size_t>(plan_.blocks[op.block].gradient_elements());
  void* gradient = arena_view_.gradient(op.gradient_slot);
  kernels::SumOfSquares& squares = squares_[op.block];
  if (plan_.squares_on_device() || plan_.on_device(op.block)) {
    squares = kernels::SumOfSquares();
    const auto* const partials = reinterpret_cast<const double*>(static_cast<const std::byte*>(gradient) +
                                                                 plan_.gradient_bytes(op.block));
    const auto count =
        static_cast<size_t>(tiering::PartialSumBytes(static_cast<int64_t>(n))) / sizeof(double);
    for (const double partial : std::span(partials, count)) squares.Add(partial);
  } else {
    squares =
        FinishGradient(options_.format.weights,
                       op.accumulator_slot.valid() ? arena_view_.accumulator(op.accumulator_slot) : nullptr,
                       gradient, n, &pool_);
  }
  if (!plan_.blocks[op.block].gradient_slot.valid()) drive_.ChecksumGradient(op);
  return absl::OkStatus();
}

}  // namespace penstock::zero
