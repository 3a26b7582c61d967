#include "zero/engine/engine.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "aio/engine.h"
#include "aio/io_error.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "swap/inspect.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/prepare.h"
#include "zero/engine/rank_agreement.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {
namespace {

// Of a step that all ranks make alike: with other rates on one of them each would update its part otherwise.
std::string RatesText(const std::vector<GroupRates>& groups) {
  if (groups.empty()) return "";
  std::string all;
  for (const GroupRates& group : groups) {
    const auto number = [&all](const std::optional<double>& value) {
      absl::StrAppend(&all, value.has_value() ? absl::StrFormat("%.17g ", *value) : "- ");
    };
    number(group.rates.lr);
    number(group.rates.beta1);
    number(group.rates.beta2);
    number(group.weight_decay);
  }
  return absl::StrFormat(" (learning rate %.10g, all rates %08x)", groups.front().rates.lr,
                         static_cast<uint32_t>(kernels::Checksum(all.data(), all.size())));
}

}  // namespace

void Engine::Impl::Enter(const std::string& call) const {
  if (options_.comm != nullptr) options_.comm->Enter(call);
}

absl::Status Engine::Impl::AgreeOn(const char* what, const std::string& mine) const {
  if (options_.comm == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(std::vector<std::string> all, options_.comm->AllTexts(Channel::kSetup, {what}, mine));
  for (size_t k = 1; k < all.size(); ++k) {
    if (all[k] == all.front()) continue;
    return absl::InvalidArgumentError(absl::StrCat("all ranks need one ", what, ": rank 0 has ", all.front(),
                                                   ", ", RankName(static_cast<int>(k), options_.world()), " ",
                                                   all[k]));
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::OfAll(const absl::Status& mine) const {
  return options_.comm == nullptr ? mine : AgreeOnStatus(*options_.comm, Channel::kSetup, mine);
}

absl::Status Engine::Impl::WithRoom(absl::Status status) const {
  const auto told_of = [&](const std::string& text) { return absl::StrContains(status.message(), text); };
  const std::vector<std::string>& own = options_.storage.state_dirs;  // and not another rank's
  if (store() == nullptr || !told_of(aio::ErrnoText(ENOSPC)) || std::none_of(own.begin(), own.end(), told_of))
    return status;
  const std::string room = swap::RoomText(own);
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), room.empty() ? "" : "; ", room, "; ",
                   plan_.versions == 1
                       ? std::string("with room, `resume` goes on from a checkpoint")
                       : absl::StrCat("with room, `resume` goes on from step ", store()->committed_step())));
}

absl::Status Engine::Impl::BroadcastError(absl::Status status) const {
  status = WithRoom(std::move(status));
  if (!status.ok() && options_.comm != nullptr) options_.comm->Abort(status);
  return status;
}

absl::StatusOr<EnginePlan> Engine::MakePlan(Compute& compute, const EngineOptions& options) {
  ASSIGN_OR_RETURN(PreparedModel prepared, PrepareModel(compute, options));
  return std::move(prepared.plan);
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(std::shared_ptr<Compute> compute,
                                                       EngineOptions options) {
  auto impl = std::make_unique<Impl>(std::move(compute), std::move(options));
  const TensorScope scope(impl->tensors_.pool());
  if (absl::Status status = impl->Create(); !status.ok()) return impl->BroadcastError(std::move(status));
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() {
  if (!made_in_.here()) (void)impl_.release();  // threads, files and locks are the parent's
}

absl::StatusOr<StepResult> Engine::Step(std::vector<Batch> batches, const StepOptions& options) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("step ", impl_->step_ + 1, RatesText(options.groups)));
  return impl_->BroadcastError(impl_->Step(std::move(batches), options));
}
absl::Status Engine::SetOrder(std::vector<int> stages) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter("an order of stages");
  return impl_->SetOrder(std::move(stages));
}
absl::StatusOr<double> Engine::Evaluate(const std::vector<Batch>& batches) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("an evaluation of ", batches.size(), " batches after step ", impl_->step_));
  return impl_->BroadcastError(impl_->Evaluate(batches));
}
absl::StatusOr<std::vector<double>> Engine::EvaluateEach(const std::vector<Batch>& batches) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("an evaluation of ", batches.size(), " batches after step ", impl_->step_));
  return impl_->BroadcastError(impl_->EvaluateEach(batches));
}
int64_t Engine::EvaluatesAtOnce(const Batch& batch) const { return impl_->EvaluatesAtOnce(batch); }
absl::StatusOr<std::vector<std::vector<HostTensor>>> Engine::Infer(const std::vector<Batch>& batches) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("an inference of ", batches.size(), " batches after step ", impl_->step_));
  return impl_->BroadcastError(impl_->Infer(batches));
}
std::vector<std::string> Engine::ParameterNames() const { return impl_->ParameterNames(); }
absl::StatusOr<HostTensor> Engine::ReadState(std::string_view parameter, StateKind kind) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("reading ", std::string(parameter), " (", std::string(StateKindName(kind)), ")"));
  return ParameterAccess::Made(
      [&](const ParameterAccess::Place& place) { return impl_->ReadState(parameter, kind, place); });
}
absl::Status Engine::ReadState(std::string_view parameter, StateKind kind, std::span<float> to) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("reading ", std::string(parameter), " (", std::string(StateKindName(kind)), ")"));
  return impl_->ReadState(parameter, kind, [&](const Parameter& of) -> absl::StatusOr<float*> {
    if (std::ssize(to) == of.elements) return to.data();
    return absl::InvalidArgumentError(absl::StrCat(std::string(parameter), " has ", of.elements,
                                                   " elements, and there is room for ", to.size()));
  });
}
absl::Status Engine::ReadRanges(const std::function<absl::Status(const ReadRange&)>& use) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter("reading its state");
  return impl_->ReadRanges(use);
}
absl::Status Engine::WriteState(std::string_view parameter, StateKind kind, const TensorView& value) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("writing ", std::string(parameter), " (", std::string(StateKindName(kind)), ")"));
  return impl_->WriteState(parameter, kind, value);
}
absl::Status Engine::Flush() {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("a flush after step ", impl_->step_));
  return impl_->BroadcastError(impl_->Flush());
}
absl::Status Engine::CommitDescription() {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("describing step ", impl_->step_));
  return impl_->BroadcastError(impl_->CommitDescription());
}

absl::Status Engine::CommitDescription(nlohmann::json description) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("describing step ", impl_->step_));
  return impl_->BroadcastError(impl_->CommitDescription(std::move(description)));
}

absl::StatusOr<std::string> Engine::BeginCheckpoint(CheckpointRequest request) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  RETURN_IF_ERROR(FinishCheckpoint());
  impl_->Enter(absl::StrCat("a checkpoint of step ", impl_->step_));
  return impl_->BeginCheckpoint(std::move(request));
}
absl::Status Engine::FinishCheckpoint() {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  if (!impl_->has_begun_checkpoint()) return absl::OkStatus();
  impl_->Enter("the end of a checkpoint");
  return impl_->FinishCheckpoint();
}
bool Engine::checkpoint_ended() const { return impl_->checkpoint_ended(); }
absl::StatusOr<std::string> Engine::Checkpoint(const std::string& parent) {
  ASSIGN_OR_RETURN(std::string path, BeginCheckpoint({.parent = parent, .naming = std::nullopt}));
  RETURN_IF_ERROR(FinishCheckpoint());
  return path;
}
CheckpointTotals Engine::checkpoint_totals() const { return impl_->checkpoint_totals(); }
bool Engine::copies_checkpoint() const { return impl_->checkpoint_seconds() > 0; }

absl::StatusOr<std::string> Engine::Keep() {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("keeping step ", impl_->step_));
  return impl_->BroadcastError(impl_->Keep());
}
absl::Status Engine::Replan(Batch example) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  impl_->Enter(absl::StrCat("another plan after step ", impl_->step_));
  return impl_->Replan(std::move(example));
}
absl::StatusOr<PlannedAgain> Engine::Replan(const ShownBySteps& shown) {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  const TensorScope scope(impl_->tensors_.pool());
  return impl_->Replan(shown);
}
absl::Status Engine::usable() const {
  RETURN_IF_ERROR(made_in_.Check("this engine"));
  RETURN_IF_ERROR(impl_->broken_);
  // Null while Replan makes another one and asks hooks.
  return impl_->executor_ != nullptr ? impl_->executor_->status() : absl::OkStatus();
}
int64_t Engine::step() const { return impl_->step_; }
int64_t Engine::committed_step() const { return impl_->committed_step_; }
int64_t Engine::updates() const { return impl_->decisions_.updates(); }
const MissedUpdates& Engine::missed_updates() const { return impl_->decisions_.missed(); }
const GradientSums::Layouts& Engine::layouts() const { return impl_->layouts_; }
const LossScaler& Engine::loss_scaler() const { return impl_->decisions_.scaler(); }
std::optional<int64_t> Engine::resumed_from() const { return impl_->resumed_from_; }
const nlohmann::json& Engine::run() const { return impl_->run_; }
const nlohmann::json& Engine::last_description() const { return impl_->last_description_; }
const EnginePlan& Engine::plan() const { return impl_->plan_; }
tiering::Stall Engine::waiting_for() const {
  return impl_->executor_ != nullptr ? impl_->executor_->waiting_for() : tiering::Stall::kNone;
}
const tiering::Usage& Engine::usage() const { return impl_->usage_; }
aio::EngineStats Engine::io_stats() const { return impl_->io_stats(); }
std::string Engine::io_backend() const {
  const RunResources* const resources = impl_->resources_.get();
  return resources != nullptr && resources->io() != nullptr ? resources->io()->backend_name() : "none";
}
std::string Engine::arena_pages() const {
  if (impl_->resources_ == nullptr) return "none";
  return std::string(aio::PageKindName(impl_->resources_->arena().page_kind()));
}
std::span<std::byte> Engine::arena() const {
  if (impl_->resources_ == nullptr) return {};
  const aio::Arena& arena = impl_->resources_->arena();
  return {arena.data(), arena.bytes()};
}
std::shared_ptr<const void> Engine::HoldArena() const {
  if (impl_->resources_ == nullptr) return nullptr;
  return impl_->resources_->shared_arena();
}
int64_t Engine::peak_managed_bytes() const { return impl_->peak_managed_bytes(); }
const Device& Engine::device() const { return impl_->device(); }
Device::Traffic Engine::copied() const { return impl_->copied(); }
bool Engine::gds() const { return impl_->plan_.plan.device.gds; }
int64_t Engine::gds_read_bytes() const { return impl_->gds_read_bytes(); }
tiering::ExchangedBytes Engine::gathered() const { return impl_->gathered(); }
tiering::ExchangedBytes Engine::reduced() const { return impl_->reduced(); }
InputBytes Engine::input_bytes() const { return impl_->input_bytes(); }
int64_t Engine::peak_device_bytes() const { return impl_->peak_device_bytes(); }
int64_t Engine::peak_pinned_bytes() const { return impl_->peak_pinned_bytes(); }
int64_t Engine::pinned_for_device_bytes() const { return impl_->pinned_for_device_bytes(); }
void Engine::set_saturating_bytes_in_flight(uint64_t bytes) { impl_->set_saturating_bytes_in_flight(bytes); }

}  // namespace penstock::zero
