#include "zero/lanes/hardware_lanes.h"

#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "kernels/float16.h"
#include "zero/compute/seed.h"
#include "zero/compute/tile_version.h"
#include "zero/memory/guarded.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

using tiering::Lane;
using tiering::Op;
using tiering::OpKind;

}  // namespace

HardwareLanes::HardwareLanes(const tiering::Plan& plan, const ArenaView& residency,
                             GradientSums::Layouts layouts, Compute* compute, Device* device,
                             swap::Store* store, ActivationSpill* inputs, DeviceLanes* lanes,
                             const Options& options, LaneHooks hooks)
    : plan_(plan),
      residency_(residency),
      layouts_(std::move(layouts)),
      compute_(compute),
      sums_(layouts_, options.format.weights, *device),
      store_(store),
      inputs_(inputs),
      device_(lanes),
      options_(options),
      hooks_(std::move(hooks)),
      squares_(plan.blocks.size()) {
  int64_t tiles = 0;
  for (const tiering::BlockPlan& block : plan_.blocks) {
    first_tile_.push_back(tiles - block.tiles_elsewhere());
    tiles += std::ssize(block.tiles) - block.tiles_elsewhere();
    auto& of_block = tiles_.emplace_back();
    auto& spill = spills_.emplace_back(std::make_unique<Spill>());
    spill->lanes = this;
    sums_transfers_.emplace_back().lanes = this;
    if (store_ == nullptr) continue;
    for (size_t t = 0; t < block.tiles.size(); ++t) {
      auto& transfers = of_block.emplace_back(std::make_unique<TileTransfers>());
      transfers->checksums.resize(plan_.precision.segment_bytes.size());
      for (Transfer* transfer : {&transfers->weights, &transfers->there, &transfers->state,
                                 &transfers->gradient, &transfers->write}) {
        transfer->lanes = this;
        transfer->io.set_on_complete(&HardwareLanes::OnTransferDone, transfer);
      }
      transfers->spill.io.set_on_complete(&HardwareLanes::OnSpillDone, spill.get());
      if (!block.in_store(tiering::TileIndex(t))) transfers->frozen = options_.frozen->MakeRead();
    }
  }
  for (const tiering::Position position : plan_.all_positions()) {
    auto& of_position = input_transfers_.emplace_back();
    for (int m = 0; plan_.SpillsInput(position) && m < plan_.micro_batches; ++m) {
      of_position.push_back(std::make_unique<InputTransfer>());
      of_position.back()->lanes = this;
    }
  }
  commit_.set_on_complete(&HardwareLanes::OnCommitDone, this);
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
  ranks_ = std::make_unique<RankLanes>(
      plan_, residency_, options_.comm, options_.parts, std::move(rank_options),
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
  return totals;
}

absl::Status HardwareLanes::Decide(const Op& op) {
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
  work_there_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

double HardwareLanes::Now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string HardwareLanes::PlaceOf(const Op& op) const {
  const bool drive = op.lane == Lane::kRead || op.lane == Lane::kWrite || op.lane == Lane::kCommit;
  if (drive && store_ != nullptr) {
    if (op.block.valid() && IsElsewhere(op)) return options_.frozen->PlaceOf(op.block);
    const bool of_tile = op.block.valid() && op.tile.valid();
    return store_->path(of_tile ? StoreTile(op.block, op.tile) : 0);
  }
  const bool host = drive || op.lane == Lane::kUpdate || device_ == nullptr;
  return host ? "the processor" : device_->device().Describe();
}

bool HardwareLanes::HasRoom(Lane lane) const { return lane != Lane::kCompute || computes_ < 2; }

void HardwareLanes::FailPass(const Op& op) {
  if (op.evaluates) {
    evaluation_failed_ = true;
  } else {
    failed_step_ = op.step;
  }
}

void HardwareLanes::ForgetFailedPass() {
  compute_failed_ = false;
  {
    const std::lock_guard<std::mutex> lock(compute_error_mutex_);
    compute_error_ = absl::OkStatus();
  }
  failed_step_ = 0;
  evaluation_failed_ = false;
}

void HardwareLanes::ForgetSums() {
  for (const tiering::BlockIndex block : layouts_.indices()) sums_.Taken(block);
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
      work_there_.notify_all();
      return;
    }
    case Lane::kRead:
    case Lane::kWrite: {
      if (op.kind == OpKind::kWriteGradient) return StartSpill(task);
      if (UndoesWrite(op)) return Report(task, store_->DropWritten(StoreTile(op.block, op.tile)), Now());
      const double start = Now();
      const bool input = op.kind == OpKind::kWriteInput || op.kind == OpKind::kReadInput;
      const bool sums = op.kind == OpKind::kWriteSums || op.kind == OpKind::kReadSums;
      absl::Status status = input ? StartInput(task) : sums ? StartSums(task) : StartTransfer(task);
      if (!status.ok()) Report(task, std::move(status), start);
      return;
    }
    case Lane::kCopyIn:
    case Lane::kCopyOut: {
      const double start = Now();
      if (op.kind == OpKind::kWriteInput || op.kind == OpKind::kReadInput) {
        if (absl::Status status = StartInput(task); !status.ok())
          ReportInOrder(task, std::move(status), start);
        return;
      }
      return device_->Start(
          op, [this, task, start](absl::Status status) { ReportInOrder(task, std::move(status), start); });
    }
    case Lane::kCommit: {
      const double start = Now();
      if (store_ == nullptr || !op.durable) return Report(task, absl::OkStatus(), start);
      if (absl::Status status = StartCommit(task); !status.ok()) Report(task, std::move(status), start);
      return;
    }
    default:
      return Report(task, absl::InternalError("an operation was started on a lane that is not there"), Now());
  }
}

absl::Status HardwareLanes::StartTransfer(const Task& task) {
  const Op& op = *task.op;
  TileTransfers& transfers = this->transfers(op);
  if (IsElsewhere(op)) {
    const tiering::Tile& place = plan_.blocks[op.block].tiles[op.tile];
    Transfer& transfer = transfers.weights;
    transfer.task = task;
    transfer.start = Now();
    const TileMemory memory = residency_.tile(op.block, op.tile, op.weight_slot, op.tile_slot);
    return options_.frozen->Start(store_->engine(), transfers.frozen.get(), op.block, place.offset,
                                  place.elements, static_cast<std::byte*>(memory.weights),
                                  &HardwareLanes::OnFrozenDone, &transfer);
  }
  const uint32_t tile = StoreTile(op.block, op.tile);
  const TileMemory memory = residency_.tile(op.block, op.tile, op.weight_slot, op.tile_slot);
  const auto segments = static_cast<uint32_t>(plan_.precision.segment_bytes.size());
  auto begin = [&](Transfer* transfer) {
    // The store refuses one that is in flight, whose task must stay what it is.
    if (!transfer->io.pending()) {
      transfer->task = task;
      transfer->start = Now();
    }
    return &transfer->io;
  };
  // An update that is made again starts from what the last commit holds.
  const swap::VersionChoice choice =
      op.replay ? swap::VersionChoice::kCommitted : swap::VersionChoice::kNewest;
  switch (op.kind) {
    case OpKind::kReadWeights: {
      void* const destination[] = {op.device_weight_slot.valid() ? device_->weights(op) : memory.weights};
      return store_->ReadSegments(begin(&WeightsTransfer(op)), tile, 0, 1, destination,
                                  aio::Priority::kDemand, choice);
    }
    case OpKind::kReadState:
      return store_->ReadSegments(begin(&transfers.state), tile, 1, segments - 1, memory.state,
                                  aio::Priority::kPrefetch, choice);
    case OpKind::kReadGradient:
      return store_->ReadScratch(begin(&transfers.gradient), tile, 0, memory.gradient,
                                 static_cast<uint64_t>(op.bytes), aio::Priority::kPrefetch);
    case OpKind::kWriteTile:
    case OpKind::kWriteState:
    case OpKind::kWriteWeights: {
      if (store_->geometry().slots() == 1 && !store_->overwriting()) {
        RETURN_IF_ERROR(store_->OverwriteNow());
      }
      std::vector<const void*> sources = {memory.weights};
      sources.insert(sources.end(), memory.state.begin(), memory.state.end());
      const auto [first, count] = WrittenSegments(op);
      return store_->WriteSegments(begin(&transfers.write), tile, VersionAfter(op.step), first,
                                   std::span(sources).subspan(first, count), aio::Priority::kWriteBehind);
    }
    default:
      return absl::InternalError(absl::StrCat("not a transfer: ", std::string(tiering::OpKindName(op.kind))));
  }
}

// A skipped step ends with the version that it began with, also where an update in backward was written.
bool HardwareLanes::UndoesWrite(const Op& op) const {
  return op.kind == OpKind::kWriteTile && op.replay && DecisionFor(op.step).skip;
}

std::pair<uint32_t, uint32_t> HardwareLanes::WrittenSegments(const Op& op) const {
  const auto segments = static_cast<uint32_t>(plan_.precision.segment_bytes.size());
  if (op.kind == OpKind::kWriteState) return {1, segments - 1};
  return {0, op.kind == OpKind::kWriteWeights ? 1 : segments};
}

void HardwareLanes::StartSpill(const Task& task) {
  const Op& op = *task.op;
  const tiering::BlockPlan& block = plan_.blocks[op.block];
  Spill& spill = *spills_[op.block];
  spill.task = task;
  spill.start = Now();
  int tiles = 0, submitted = 0;
  for (const tiering::TileIndex t : block.tiles.indices()) tiles += block.updates(t) ? 1 : 0;
  // One more than the transfers, taken off at the end: none of them may report before all are submitted.
  spill.outstanding.store(tiles + 1, std::memory_order_relaxed);
  spill.refused = absl::OkStatus();
  for (const tiering::TileIndex t : block.tiles.indices()) {
    if (!spill.refused.ok()) break;
    if (!block.updates(t)) continue;
    const int64_t bytes = block.tiles[t].elements * plan_.precision.gradient_bytes;
    spill.refused = store_->WriteScratch(&tiles_[op.block][t]->spill.io, StoreTile(op.block, t), 0,
                                         residency_.GradientOf(op.block, t, op.gradient_slot),
                                         static_cast<uint64_t>(bytes), aio::Priority::kWriteBehind);
    if (spill.refused.ok()) ++submitted;
  }
  const int missing = tiles - submitted;
  if (spill.outstanding.fetch_sub(missing + 1) == missing + 1) Report(task, absl::OkStatus(), spill.start);
}

absl::Status HardwareLanes::StartSums(const Task& task) {
  const Op& op = *task.op;
  SumsTransfer& transfer = sums_transfers_[op.block];
  transfer.task = task;
  transfer.start = Now();
  void* const sums = op.accumulator_slot.valid() ? residency_.accumulator(op.accumulator_slot)
                                                 : residency_.gradient(op.gradient_slot);
  return op.kind == OpKind::kReadSums
             ? options_.sums->Read(op.block, sums, &HardwareLanes::OnSumsDone, &transfer)
             : options_.sums->Write(op.block, sums, &HardwareLanes::OnSumsDone, &transfer);
}

void HardwareLanes::OnSumsDone(void* context) {
  auto* const transfer = static_cast<SumsTransfer*>(context);
  transfer->lanes->Report(transfer->task, absl::OkStatus(), transfer->start);
}

absl::Status HardwareLanes::StartInput(const Task& task) {
  const Op& op = *task.op;
  InputTransfer& transfer = *input_transfers_[op.position][At(op.micro_batch)];
  transfer.task = task;
  transfer.start = Now();
  const bool reads = op.kind == OpKind::kReadInput;
  absl::StatusOr<std::span<const TensorView>> values = std::span<const TensorView>();
  if (compute_failed_) {
    values = ComputeError();
  } else {
    values = reads ? compute_->RestoreInputs(op.position, op.micro_batch)
                   : compute_->SavedInputs(op.position, op.micro_batch);
  }
  transfer.refused = !values.ok();
  if (transfer.refused) return FailCompute(values.status());
  if (device_ != nullptr) {
    return device_->StartInput(op, *values, [this, task, start = transfer.start](absl::Status status) {
      ReportInOrder(task, std::move(status), start);
    });
  }
  return reads ? inputs_->Read(op.position, op.micro_batch, *values, &HardwareLanes::OnInputDone, &transfer)
               : inputs_->Write(op.position, op.micro_batch, *values, &HardwareLanes::OnInputDone, &transfer);
}

void HardwareLanes::OnInputDone(void* context) {
  auto* transfer = static_cast<InputTransfer*>(context);
  transfer->lanes->Report(transfer->task, absl::OkStatus(), transfer->start);
}

absl::Status HardwareLanes::StartCommit(const Task& task) {
  commit_task_ = task;
  commit_start_ = Now();
  return store_->Commit(&commit_, hooks_.describe_commit(*task.op));
}

void HardwareLanes::OnTransferDone(swap::TileIo&, void* context) {
  auto* transfer = static_cast<Transfer*>(context);
  transfer->lanes->Report(transfer->task, absl::OkStatus(), transfer->start);
}

void HardwareLanes::OnFrozenDone(void* context) {
  auto* transfer = static_cast<Transfer*>(context);
  transfer->lanes->Report(transfer->task, absl::OkStatus(), transfer->start);
}

void HardwareLanes::OnSpillDone(swap::TileIo&, void* context) {
  auto* spill = static_cast<Spill*>(context);
  if (spill->outstanding.fetch_sub(1) == 1) spill->lanes->Report(spill->task, absl::OkStatus(), spill->start);
}

void HardwareLanes::OnCommitDone(swap::CommitIo&, void* context) {
  auto* lanes = static_cast<HardwareLanes*>(context);
  lanes->Report(lanes->commit_task_, absl::OkStatus(), lanes->commit_start_);
}

absl::Status HardwareLanes::Settle(const Done& done) {
  const Op& op = *done.task.op;
  absl::Status status = done.status;
  if (!status.ok()) return status;
  switch (op.kind) {
    case OpKind::kReadWeights:
      if (IsElsewhere(op)) return status;  // kVerify says how it ended
      status = WeightsTransfer(op).io.status();
      if (!op.device_weight_slot.valid()) return status;
      if (status.ok()) past_host_bytes_ += op.bytes;
      return status.ok()
                 ? status
                 : absl::Status(status.code(),
                                absl::StrCat(std::string(status.message()),
                                             "; without aio.use_gds it would go by way of host memory"));
    case OpKind::kReadState:
      return transfers(op).state.io.status();
    case OpKind::kReadGradient:
      return transfers(op).gradient.io.status();
    case OpKind::kWriteTile:
    case OpKind::kWriteState:
    case OpKind::kWriteWeights: {
      if (UndoesWrite(op)) return status;
      const auto [first, count] = WrittenSegments(op);
      return store_->NoteWritten(&transfers(op).write.io,
                                 std::span(transfers(op).checksums).subspan(first, count));
    }
    case OpKind::kWriteGradient:
      status = spills_[op.block]->refused;  // the tiles that were not taken have their last status
      for (const tiering::TileIndex t : tiles_[op.block].indices()) {
        if (plan_.blocks[op.block].updates(t)) status.Update(tiles_[op.block][t]->spill.io.status());
      }
      return status;
    case OpKind::kWriteInput:
      compute_->DropInputs(op.position, op.micro_batch);
      return device_ == nullptr ? inputs_->Written(op.position, op.micro_batch) : status;
    case OpKind::kReadInput:
      return device_ == nullptr ? inputs_->TakeRead(op.position, op.micro_batch) : status;
    case OpKind::kWriteSums:
    case OpKind::kReadSums:
      return options_.sums->Ended(op.block);
    case OpKind::kCommit:
      if (store_ != nullptr && op.durable) status = store_->FinishCommit(&commit_);
      // Over several ranks a step is committed when all have.
      if (status.ok() && ranks_ == nullptr) status = hooks_.committed(op);
      return status;
    case OpKind::kAgree:
      return hooks_.committed(op);
    case OpKind::kRoundGradient:
      sums_.Taken(op.block);
      return status;
    default:
      return status;
  }
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
      work_there_.wait(lock, [&] { return stopping_ || !queue->empty(); });
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

StageUse HardwareLanes::UseOf(const Op& op) const {
  const int in_step = op.micro_batch + (op.evaluates ? 0 : first_micro_batch_);
  const auto number = static_cast<uint64_t>(in_step) * static_cast<uint64_t>(options_.world) +
                      static_cast<uint64_t>(options_.rank);
  return {.stage = op.stage,
          .position = op.position,
          .micro_batch = op.micro_batch,
          .last = op.position + 1 == tiering::Position(plan_.positions),
          .trains = !op.evaluates,
          .seed = MixSeed(options_.seed, static_cast<uint64_t>(op.step), number,
                          static_cast<uint64_t>(op.stage.value()))};
}

// Of a block that is trained, kAccumulateGradient takes what it leaves.
absl::Status HardwareLanes::RunBackward(const Op& op) {
  const Weights weights = WeightsOf(op);
  absl::Status status = compute_->Backward(UseOf(op), {&weights, 1});
  if (!status.ok() || !plan_.blocks[op.block].trains) compute_->Release(UseOf(op));
  return status;
}

absl::Status HardwareLanes::RunAccumulate(const Op& op) {
  GradientPlace place;
  if (device_ != nullptr) {
    place = device_->place(op);
  } else if (op.accumulator_slot.valid() && plan_.accumulator_bytes(op.block) == 4) {
    place.accumulator = residency_.accumulator(op.accumulator_slot);
  } else if (op.accumulator_slot.valid()) {
    place.gradient = residency_.accumulator(op.accumulator_slot);  // one addend, on its way to other ranks
  } else {
    place.gradient = residency_.gradient(op.gradient_slot);
  }
  place.first = plan_.blocks[op.block].trained_from;
  const StageUse use = UseOf(op);
  const absl::StatusOr<std::span<const Gradient>> gradients = compute_->Gradients(use, op.block);
  absl::Status status = gradients.status();
  if (status.ok()) status = sums_.Add(op.block, *gradients, place);
  compute_->Release(use);
  return status;
}

bool HardwareLanes::IsOfCompute(const Op& op) const {
  switch (op.kind) {
    case OpKind::kForward:
    case OpKind::kBackward:
    case OpKind::kAccumulateGradient:
      return true;
    case OpKind::kWriteInput:
    case OpKind::kReadInput:
      return input_transfers_[op.position][At(op.micro_batch)]->refused;
    default:
      return false;
  }
}

absl::Status HardwareLanes::RunCompute(const Op& op) {
  if (compute_failed_) return ComputeError();
  absl::Status status;
  if (op.kind == OpKind::kForward) {
    const Weights weights = WeightsOf(op);
    status = compute_->Forward(UseOf(op), {&weights, 1});
  } else {
    status = op.kind == OpKind::kBackward ? RunBackward(op) : RunAccumulate(op);
  }
  return status.ok() ? status : FailCompute(std::move(status));
}

absl::Status HardwareLanes::FailCompute(absl::Status status) {
  const std::lock_guard<std::mutex> lock(compute_error_mutex_);
  compute_error_.Update(std::move(status));
  compute_failed_ = true;
  return compute_error_;
}

absl::Status HardwareLanes::ComputeError() {
  const std::lock_guard<std::mutex> lock(compute_error_mutex_);
  return compute_error_;
}

absl::Status HardwareLanes::Run(const Op& op) {
  switch (op.kind) {
    case OpKind::kForward:
    case OpKind::kBackward:
    case OpKind::kAccumulateGradient:
      return RunCompute(op);
    case OpKind::kRoundOnDevice:
      return sums_.Round(op.block, device_->place(op).accumulator,
                         device_->gradient(op.device_gradient_slot));
    case OpKind::kSquareGradient:
      return Guarded("squares of a gradient", [&] {
        device_->device().SquarePartials(options_.format.weights, device_->gradient(op.device_gradient_slot),
                                         static_cast<size_t>(plan_.blocks[op.block].elements),
                                         device_->state().partial_sums(op.block));
      });
    case OpKind::kUpdateOnDevice:
      return RunUpdateOnDevice(op);
    case OpKind::kVerify:
      return RunVerify(op);
    case OpKind::kUpdate:
      return RunUpdate(op);
    case OpKind::kChecksumTile:
      Seal(op);
      return absl::OkStatus();
    case OpKind::kRoundGradient:
      return RunFinalize(op);
    default:
      return absl::InternalError(absl::StrCat("no worker for: ", std::string(tiering::OpKindName(op.kind))));
  }
}

absl::Status HardwareLanes::RunVerify(const Op& op) {
  if (IsElsewhere(op)) return options_.frozen->Finish(transfers(op).frozen.get());
  if (op.device_weight_slot.valid()) {
    const swap::TileIo& io = transfers(op).there.io;
    const swap::Store::ChecksumOf of = store_->ChecksumFor(io, 0);
    absl::StatusOr<uint64_t> checksum = device_->device().Checksum(device_->weights(op), of.bytes, of.seed);
    return checksum.ok() ? store_->VerifyChecksum(io, 0, *checksum) : checksum.status();
  }
  return store_->VerifyRead(op.checks_state ? transfers(op).state.io : transfers(op).weights.io);
}

uint64_t HardwareLanes::SeedOf(const UpdateDecision& decision, tiering::BlockIndex block) {
  return MixSeed(static_cast<uint64_t>(decision.update), static_cast<uint64_t>(block.value()));
}

absl::Status HardwareLanes::RunUpdateOnDevice(const Op& op) {
  const UpdateDecision& decision = DecisionFor(op.step);
  if (decision.skip) return absl::OkStatus();
  const TileMemory memory = device_->state().block(op.block);
  const tiering::Tile all = residency_.InRun(op.block, {0, memory.elements});
  return Guarded("update on the device", [&] {
    const FlatLayout& layout = *layouts_[op.block];
    for (int group = 0; group < layout.groups(); ++group) {
      const auto updates = UpdatesOf(options_.format, SeedOf(decision, op.block), layout, group, all, memory);
      if (!updates.empty()) device_->device().Update(decision.of(group), updates);
    }
  });
}

absl::Status HardwareLanes::RunUpdate(const Op& op) {
  TileMemory memory = residency_.tile(op.block, op.tile, op.weight_slot, op.tile_slot);
  const tiering::Tile& tile = plan_.blocks[op.block].tiles[op.tile];
  // What was read for this update is checked before it is changed. Weights or state that were in memory
  // already have been checked when they came, or were written from here.
  if (op.checks_weights) {
    RETURN_IF_ERROR(store_->VerifyRead(transfers(op).weights.io));
  }
  if (op.checks_state) {
    RETURN_IF_ERROR(store_->VerifyRead(transfers(op).state.io));
  }
  const UpdateDecision& decision = op.speculative_update ? assumed_[op.step & 1] : DecisionFor(op.step);
  if (decision.skip) return absl::OkStatus();
  if (op.gradient_slot.valid()) {
    memory.gradient = residency_.GradientOf(op.block, op.tile, op.gradient_slot);
  } else {
    const auto bytes = static_cast<size_t>(memory.elements * plan_.precision.gradient_bytes);
    if (kernels::Checksum(memory.gradient, bytes) != transfers(op).gradient_checksum) {
      return absl::DataLossError(
          absl::StrCat("gradient of tile ", op.tile.value(), " of block ", op.block.value(), ", ", bytes,
                       " bytes: what came back from the drive is not what was written; the last "
                       "commit is whole: continue with --resume, and mistrust the drive"));
    }
  }
  UpdateTile(options_.format, decision, SeedOf(decision, op.block), *layouts_[op.block],
             residency_.InRun(op.block, tile), memory);
  if (store_ != nullptr && !op.preview && !plan_.written_at_checkpoint(op.block, op.tile)) Seal(op);
  return absl::OkStatus();
}

void HardwareLanes::Seal(const Op& op) {
  const TileMemory memory = residency_.tile(op.block, op.tile, op.weight_slot, op.tile_slot);
  std::vector<uint64_t>& checksums = transfers(op).checksums;
  const uint32_t id = StoreTile(op.block, op.tile);
  const uint64_t version = VersionAfter(op.step);
  checksums[0] = store_->SegmentChecksum(id, 0, version, memory.weights);
  for (size_t s = 1; s < checksums.size(); ++s) {
    checksums[s] = store_->SegmentChecksum(id, static_cast<uint32_t>(s), version, memory.state[s - 1]);
  }
}

absl::Status HardwareLanes::RunFinalize(const Op& op) {
  const auto n = static_cast<size_t>(plan_.blocks[op.block].gradient_elements());
  void* gradient = residency_.gradient(op.gradient_slot);
  kernels::SumOfSquares& squares = squares_[op.block];
  const tiering::BlockPlan& block = plan_.blocks[op.block];
  if (plan_.on_device(op.block)) {
    squares = kernels::SumOfSquares();
    const std::span<const double> partials(
        static_cast<const double*>(gradient),
        static_cast<size_t>(tiering::PartialSumBytes(block.elements)) / sizeof(double));
    for (const double partial : partials) squares.Add(partial);
    return absl::OkStatus();
  }
  squares = FinishGradient(
      options_.format.weights,
      op.accumulator_slot.valid() ? residency_.accumulator(op.accumulator_slot) : nullptr, gradient, n);
  if (block.gradient_slot.valid()) return absl::OkStatus();
  for (const tiering::TileIndex t : block.tiles.indices()) {
    if (!block.updates(t)) continue;
    const auto width = static_cast<size_t>(plan_.precision.gradient_bytes);
    tiles_[op.block][t]->gradient_checksum =
        kernels::Checksum(residency_.GradientOf(op.block, t, op.gradient_slot),
                          static_cast<size_t>(block.tiles[t].elements) * width);
  }
  return absl::OkStatus();
}

}  // namespace penstock::zero
