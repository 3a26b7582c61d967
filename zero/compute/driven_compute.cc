#include "zero/compute/driven_compute.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "zero/compute/device.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

constexpr int64_t kInputAlignment = 64;  // of a tensor, in memory that several share

std::string Text(Direction direction, tiering::StageIndex stage, int micro_batch) {
  return absl::StrCat(direction == Direction::kForward ? "forward" : "backward", " of stage ", stage.value(),
                      ", micro-batch ", micro_batch);
}

}  // namespace

DrivenCompute::DrivenCompute(Measured given, int drivers)
    : given_(std::move(given)), drivers_(static_cast<size_t>(std::max(1, drivers))) {}

DrivenCompute::Entered::~Entered() {
  if (compute_ == nullptr || !compute_->made_in_.here()) return;
  std::lock_guard lock(compute_->mutex_);
  compute_->FailLocked(absl::CancelledError(
      absl::StrCat(Text(compute_->direction_, compute_->use_.stage, compute_->use_.micro_batch),
                   " was entered and not left")));
  compute_->state_ = State::kNone;
  compute_->changed_.notify_all();
}

void DrivenCompute::FailLocked(const absl::Status& why) {
  if (!open_ || !failure_.ok()) return;
  failure_ = why;
  changed_.notify_all();
}

void DrivenCompute::Fail(const absl::Status& why) {
  if (!made_in_.here()) return;
  std::lock_guard lock(mutex_);
  FailLocked(why);
}

void DrivenCompute::Open() {
  std::lock_guard lock(mutex_);
  open_ = true;
  enters_no_more_ = false;
  failure_ = absl::OkStatus();
}

absl::Status DrivenCompute::EntersNoMore() {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  std::lock_guard lock(mutex_);
  if (state_ == State::kEntered) {
    return absl::FailedPreconditionError(
        absl::StrCat(Text(direction_, use_.stage, use_.micro_batch), " is entered and was not left"));
  }
  enters_no_more_ = true;
  FailIfNeverEntered();
  return absl::OkStatus();
}

void DrivenCompute::FailIfNeverEntered() {
  if (!enters_no_more_ || state_ != State::kOffered) return;
  FailLocked(absl::FailedPreconditionError(absl::StrCat(
      "the pass was finished before ", Text(direction_, use_.stage, use_.micro_batch), " was computed")));
}

void DrivenCompute::Close(const absl::Status& ended) {
  std::lock_guard lock(mutex_);
  if (!ended.ok() && failure_.ok()) failure_ = ended;
  open_ = false;
  changed_.notify_all();
}

bool DrivenCompute::IsOffered(const Wanted& wanted) const {
  return state_ == State::kOffered && direction_ == wanted.direction && use_.stage == wanted.stage &&
         use_.micro_batch == wanted.micro_batch;
}

absl::Status DrivenCompute::Deadlock() const {
  if (state_ == State::kNone || state_ == State::kLeft || waiting_.size() < drivers_) return absl::OkStatus();
  std::string wanted;
  for (const Wanted* each : waiting_) {
    if (IsOffered(*each)) return absl::OkStatus();
    absl::StrAppend(&wanted, wanted.empty() ? "" : " and ",
                    Text(each->direction, each->stage, each->micro_batch));
  }
  if (state_ == State::kEntered) {
    return absl::AbortedError(absl::StrCat(Text(direction_, use_.stage, use_.micro_batch),
                                           " is entered and was not left before ", wanted, " is asked for"));
  }
  return absl::AbortedError(absl::StrCat(
      "the engine is at ", Text(direction_, use_.stage, use_.micro_batch), ", and ", wanted,
      " is asked for: a pass goes through the stages in ", "their order, and backward in the reverse"));
}

absl::Status DrivenCompute::WhyNot() {
  RETURN_IF_ERROR(failure_);
  if (!open_) return absl::FailedPreconditionError("no pass is open: nothing can be computed");
  FailLocked(Deadlock());
  return failure_;
}

absl::StatusOr<DrivenCompute::Entered> DrivenCompute::Enter(Direction direction, tiering::StageIndex stage,
                                                            int micro_batch,
                                                            std::optional<DeviceStream> stream) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const Wanted wanted{direction, stage, micro_batch};
  std::unique_lock lock(mutex_);
  waiting_.push_back(&wanted);
  absl::Status why;
  while ((why = WhyNot()).ok() && !IsOffered(wanted)) {
    changed_.wait_for(lock, kPatience);
    if (!interrupted_) continue;
    lock.unlock();  // it may take a lock of its caller's
    const bool interrupted = Interrupted();
    lock.lock();
    if (interrupted) FailLocked(absl::CancelledError("interrupted"));
  }
  waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &wanted));
  RETURN_IF_ERROR(why);
  if (device_ != nullptr && stream.has_value()) {
    // The compute thread waits with its offer, so nobody else enqueues.
    absl::Status joined = CheckStream(*stream);
    if (joined.ok()) joined = device_->ComputeOn(stream->stream, {});
    if (!joined.ok()) {
      FailLocked(joined);
      return failure_;
    }
  }
  state_ = State::kEntered;
  return Entered(this);
}

absl::Status DrivenCompute::CheckStream(const DeviceStream& stream) const {
  if (device_->ordinal() < 0 || stream.device == device_->ordinal()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(Text(direction_, use_.stage, use_.micro_batch),
                                                 " is computed on a stream of device ", stream.device,
                                                 ", and its weights are on device ", device_->ordinal()));
}

absl::Status DrivenCompute::JoinStreams(const Result& result) {
  std::vector<void*> also;
  for (const DeviceStream& each : result.also) {
    RETURN_IF_ERROR(CheckStream(each));
    also.push_back(each.stream);
  }
  RETURN_IF_ERROR(CheckStream(*result.stream));
  return device_->ComputeOn(result.stream->stream, also);
}

absl::Status DrivenCompute::CheckResult(const Result& result) const {
  const tiering::BlockIndex block = weights_.front().block;
  const bool backward = direction_ == Direction::kBackward;
  const bool trains = backward && given_.graph.blocks[block].trains;
  const std::string use = Text(direction_, use_.stage, use_.micro_batch);
  for (const auto& [of, gradients] : result.gradients) {
    if (of != block || !trains)
      return absl::InvalidArgumentError(
          absl::StrCat(use, " was left with gradients of block ", of.value(), ", which are not asked for"));
    for (const Gradient& gradient : gradients) {
      if (gradient.value.on_device && device_ == nullptr && !result.stream.has_value())
        return absl::InvalidArgumentError(absl::StrCat(
            use, " was left with gradients on a device and without the stream that they are of"));
    }
  }
  if (!result.inputs.empty() && (backward || !use_.keeps_inputs))
    return absl::InvalidArgumentError(
        absl::StrCat(use, " was left with inputs, which nobody asks for again"));
  if (trains && result.gradients.size() != 1)
    return absl::InvalidArgumentError(
        absl::StrCat(use, " was left without gradients of block ", block.value()));
  const bool known = result.loss.has_value() || has_loss_[static_cast<size_t>(use_.micro_batch)] != 0;
  if (backward && !use_.passes_gradients && !known)
    return absl::InvalidArgumentError(
        absl::StrCat(use, " was left, the last of its micro-batch, without a loss"));
  return absl::OkStatus();
}

absl::Status DrivenCompute::Leave(Entered entered, Result result) {
  entered.compute_ = nullptr;
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  std::unique_lock lock(mutex_);
  const bool waits = direction_ == Direction::kBackward && given_.graph.blocks[weights_.front().block].trains;
  absl::Status wrong = CheckResult(result);
  if (wrong.ok() && result.stream.has_value() && device_ != nullptr) {
    wrong = JoinStreams(result);
  } else if (wrong.ok() && result.stream.has_value()) {
    lock.unlock();  // the use is entered until it is left: nobody else is here
    const TensorScope scope(pool_);
    for (auto& [of, gradients] : result.gradients)
      wrong.Update(device_gradients_.ToHost(*result.stream, &gradients));
    lock.lock();
  }
  if (!wrong.ok()) {
    FailLocked(wrong);
    state_ = State::kNone;
    changed_.notify_all();
    return wrong;
  }
  if (result.loss.has_value()) {
    losses_[static_cast<size_t>(use_.micro_batch)] = *result.loss;
    has_loss_[static_cast<size_t>(use_.micro_batch)] = 1;
  }
  const InputsKey key{use_.position, use_.micro_batch};
  if (!result.inputs.empty()) {
    inputs_[key].given = std::move(result.inputs);
    stage_at_[key] = use_.stage;
  } else if (direction_ == Direction::kBackward) {
    inputs_.erase(key);
  }
  result_ = std::move(result);
  state_ = State::kLeft;
  taken_ = !waits;
  changed_.notify_all();
  // Until the engine has them, or will never read them.
  changed_.wait(lock, [&] { return taken_ || (!failure_.ok() && !taking_); });
  taken_ = true;
  return failure_;
}

absl::Status DrivenCompute::Offer(Direction direction, const StageUse& use,
                                  std::span<const Weights> weights) {
  std::unique_lock lock(mutex_);
  RETURN_IF_ERROR(failure_);
  if (!open_) return absl::FailedPreconditionError("a pass of a driven model is begun by DrivenEngine");
  direction_ = direction;
  use_ = use;
  weights_.assign(weights.begin(), weights.end());
  state_ = State::kOffered;
  FailIfNeverEntered();
  changed_.notify_all();
  // A driver that is inside still reads the weights.
  changed_.wait(lock,
                [&] { return state_ == State::kLeft || (!failure_.ok() && state_ != State::kEntered); });
  const bool left = state_ == State::kLeft;
  state_ = State::kNone;
  return left ? absl::OkStatus() : failure_;
}

// Of one element, so that a pass has as many as it is given.
Batch DrivenCompute::Unseen() {
  static float value = 0;
  Batch batch;
  batch.tensors = {{"unseen", {&value, ElementType::kFp32, {1}}}};
  return batch;
}

Batch DrivenCompute::UnseenOf(Measured again) {
  auto held = std::make_shared<const Measured>(std::move(again));
  Batch batch = Unseen();
  batch.owner = held;
  std::lock_guard lock(mutex_);
  std::erase_if(again_, [](const auto& each) { return each.expired(); });
  again_.push_back(held);
  return batch;
}

absl::StatusOr<Measured> DrivenCompute::Measure(const ComputeSetup& setup, const Batch& example,
                                                const MeasureOptions&) {
  std::lock_guard lock(mutex_);
  device_ = setup.device->has_own_memory() ? setup.device : nullptr;
  for (const std::weak_ptr<const Measured>& each : again_) {
    const std::shared_ptr<const Measured> again = each.lock();
    if (again != nullptr && again == example.owner) return *again;
  }
  return given_;
}

absl::StatusOr<std::unique_ptr<InitialReader>> DrivenCompute::Initial(tiering::BlockIndex, uint64_t) {
  return absl::FailedPreconditionError(
      "a model that is driven from outside begins with EngineOptions::initial_values");
}

absl::Status DrivenCompute::Begin(const PassInfo& pass, std::vector<Batch> batches) {
  std::lock_guard lock(mutex_);
  pass_ = pass;
  pool_ = TensorMemory::Here();
  inputs_.clear();
  stage_at_.clear();
  dropped_.clear();
  losses_.assign(batches.size(), 0);
  has_loss_.assign(batches.size(), 0);
  return failure_;
}

absl::Status DrivenCompute::Forward(const StageUse& use, std::span<const Weights> weights) {
  return Offer(Direction::kForward, use, weights);
}

absl::Status DrivenCompute::Backward(const StageUse& use, std::span<const Weights> weights) {
  return Offer(Direction::kBackward, use, weights);
}

absl::StatusOr<std::span<const Gradient>> DrivenCompute::Gradients(const StageUse&,
                                                                   tiering::BlockIndex block) {
  std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(failure_);
  taking_ = true;
  for (const auto& [of, gradients] : result_.gradients) {
    if (of == block) return std::span<const Gradient>(gradients);
  }
  return std::span<const Gradient>();
}

void DrivenCompute::Release(const StageUse&) {
  std::lock_guard lock(mutex_);
  taking_ = false;
  taken_ = true;
  result_ = Result();
  changed_.notify_all();
}

absl::StatusOr<std::span<const TensorView>> DrivenCompute::SavedInputs(tiering::Position position,
                                                                       int micro_batch) {
  std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(failure_);
  const auto found = inputs_.find({position, micro_batch});
  if (found == inputs_.end()) return std::span<const TensorView>();  // nothing was computed, or nothing moves
  for (const TensorView& value : found->second.given) traffic_.left_bytes += value.bytes();
  return found->second.given;
}

void DrivenCompute::DropInputs(tiering::Position position, int micro_batch) {
  std::lock_guard lock(mutex_);
  const auto found = stage_at_.find({position, micro_batch});
  if (found != stage_at_.end()) dropped_.push_back({found->second, micro_batch});
}

absl::StatusOr<std::span<const TensorView>> DrivenCompute::RestoreInputs(tiering::Position position,
                                                                         int micro_batch) {
  std::unique_lock lock(mutex_);
  RETURN_IF_ERROR(failure_);
  const auto found = inputs_.find({position, micro_batch});
  if (found == inputs_.end()) return std::span<const TensorView>();
  Inputs& inputs = found->second;
  int64_t all = 0;
  for (const TensorView& value : inputs.given) all += tiering::AlignUp(value.bytes(), kInputAlignment);
  traffic_.returned_bytes += all;
  std::byte* at = nullptr;
  if (make_room_ && device_ != nullptr) {
    const MakeRoom& make_room = make_room_;
    const tiering::StageIndex stage = stage_at_.at({position, micro_batch});
    lock.unlock();  // it takes locks of its owner's
    at = static_cast<std::byte*>(make_room(stage, micro_batch, all));
    lock.lock();
    if (at == nullptr && all > 0) {
      return absl::ResourceExhaustedError(absl::StrCat("the inputs of stage ", stage.value(),
                                                       " come back, and the device has no ", all,
                                                       " bytes for them"));
    }
  }
  const TensorScope scope(room_.pool());
  for (const TensorView& value : inputs.given) {
    TensorView& back = inputs.restored.emplace_back(value);
    if (at != nullptr) {
      back.data = at;
      at += tiering::AlignUp(value.bytes(), kInputAlignment);
      continue;
    }
    ASSIGN_OR_RETURN(HostBuffer memory, HostBuffer::Of(value.bytes(), "an input that comes back"));
    back.data = memory.data();
    inputs.memory.push_back(std::move(memory));
  }
  traffic_.peak_bytes = std::max(traffic_.peak_bytes, room_.Stats().peak_live_bytes);
  return inputs.restored;
}

std::vector<DrivenCompute::Dropped> DrivenCompute::TakeDropped() {
  std::lock_guard lock(mutex_);
  return std::exchange(dropped_, {});
}

std::vector<HostBuffer> DrivenCompute::TakeInputs(tiering::StageIndex stage, int micro_batch) {
  std::lock_guard lock(mutex_);
  if (state_ != State::kEntered || direction_ != Direction::kBackward || use_.stage != stage ||
      use_.micro_batch != micro_batch)
    return {};
  const auto found = inputs_.find({use_.position, micro_batch});
  return found == inputs_.end() ? std::vector<HostBuffer>() : std::exchange(found->second.memory, {});
}

DrivenCompute::InputTraffic DrivenCompute::input_traffic() {
  std::lock_guard lock(mutex_);
  return traffic_;
}

absl::StatusOr<std::vector<double>> DrivenCompute::Losses() {
  std::lock_guard lock(mutex_);
  return losses_;
}

absl::StatusOr<std::vector<std::vector<HostTensor>>> DrivenCompute::Outputs() {
  return absl::FailedPreconditionError("outputs of a model that is driven from outside are its owner's");
}

}  // namespace penstock::zero
