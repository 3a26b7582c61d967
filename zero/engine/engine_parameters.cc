#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/parameter_access.h"
#include "zero/engine/rank_agreement.h"

namespace penstock::zero {
namespace {

absl::Status OnePartOnly() {
  return absl::FailedPreconditionError(
      "this process has one rank's part of what several have kept: read it with as many, or export it");
}

}  // namespace

ParameterAccess Engine::Impl::Access() const {
  return {plan_.graph,          layouts_, plan_.plan,          plan_.format,
          arena_view(),         store(),  DeviceStateOrNull(), options_.comm.get(),
          options_.frozen.get()};
}

absl::Status Engine::Impl::ReadState(std::string_view parameter, StateKind kind,
                                     const ParameterAccess::Place& place) {
  RETURN_IF_ERROR(broken_);
  if (resources_->others() != nullptr) return OnePartOnly();
  RETURN_IF_ERROR(BroadcastError(Flush()));
  if (kind != StateKind::kGradient) return Access().Read(parameter, kind, place);
  if (calls_ > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", step_ + 1, " has more calls to come: its gradients are not final"));
  }
  if (!gradients_lost_.empty()) return absl::FailedPreconditionError(gradients_lost_);
  if (last_result_.step == 0) {
    return absl::FailedPreconditionError("no step has been made since the run was opened: no gradient yet");
  }
  const auto checksum = [this](tiering::BlockIndex block, tiering::TileIndex tile) {
    return lanes_->gradient_checksum(block, tile);
  };
  return Access().ReadGradient(parameter, last_result_.loss_scale, last_result_.speculative_share > 0,
                               checksum, place);
}

absl::Status Engine::Impl::ReadRanges(const std::function<absl::Status(const ReadRange&)>& use) {
  RETURN_IF_ERROR(broken_);
  if (resources_->others() != nullptr) return OnePartOnly();
  RETURN_IF_ERROR(BroadcastError(Flush()));
  ParameterAccess access = Access();
  TensorPool* const tensors = TensorMemory::Here();  // on whatever thread it is read
  return use([&](int block, int64_t first, int64_t elements, float* master, float* m, float* v) {
    const TensorScope scope(tensors);
    return access.ReadRange(tiering::BlockIndex(block), first, elements, {master, m, v});
  });
}

absl::Status Engine::Impl::WriteState(std::string_view parameter, StateKind kind, const TensorView& value) {
  if (!options_.trains) return absl::FailedPreconditionError("this engine only reads");
  absl::Status status = BroadcastError(Flush());
  RETURN_IF_ERROR(status);
  // A value may be written more often than a step's commit.
  ForCheckpointing([](Checkpointing& each) { each.FinishTiles(); });
  bool begun = false;
  status = Access().Write(parameter, kind, value, [&] {
    begun = true;
    const bool over_the_only_one = store() != nullptr && plan_.versions == 1;
    return over_the_only_one ? store()->OverwriteNow() : absl::OkStatus();
  });
  if (!begun) return status;
  // What the builder believes to be in memory, or on a device, is of the version before.
  MakeBuilder(builder_->next_id());
  const auto commit = [this] { return CommitAgain(std::string(store()->committed_payload())); };
  if (status.ok()) {
    if (store() == nullptr) return status;
    status = commit();
    // Nobody writes over the version before until all have this one.
    if (options_.comm != nullptr) status = AgreeOnStatus(*options_.comm, Channel::kSetup, status);
    return BroadcastError(status);
  }
  absl::Status undone = absl::UnimplementedError("it is in memory alone");
  if (store() != nullptr) undone = store()->DropAllWritten();
  if (undone.ok() && store()->overwriting()) undone = commit();  // nothing was, after all
  if (undone.ok()) return status;
  // Part of the value may be there: nobody may train on that.
  broken_ = BroadcastError(absl::Status(
      status.code(), absl::StrCat(status.message(), "; what was written of ", std::string(parameter),
                                  " cannot be taken back: ", undone.message())));
  return broken_;
}

}  // namespace penstock::zero
