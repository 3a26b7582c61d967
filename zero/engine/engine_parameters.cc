#include <array>
#include <exception>
#include <functional>
#include <new>
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
  if (options_.comm != nullptr) return ReadRangesOfAll(access, use);
  return use([&](int block, int64_t first, int64_t elements, float* master, float* m, float* v) {
    const TensorScope scope(tensors);
    return access.ReadRange(tiering::BlockIndex(block), first, elements, {master, m, v});
  });
}

// Rank 0 says which range comes next, and the others read it with it: {block, first, elements}, or block -1
// when `use` has ended.
absl::Status Engine::Impl::ReadRangesOfAll(ParameterAccess& access,
                                           const std::function<absl::Status(const ReadRange&)>& use) {
  using Range = std::array<int64_t, 3>;
  Comm& comm = *options_.comm;
  std::vector<Range> all(static_cast<size_t>(comm.world()));
  const auto next = [&](const Range& mine) -> absl::StatusOr<Range> {
    all[static_cast<size_t>(comm.rank())] = mine;
    RETURN_IF_ERROR(comm.AllGather(Channel::kSetup, {.name = "a range of state"}, all.data(), sizeof(Range)));
    return all.front();
  };
  constexpr Range kEnd = {-1, 0, 0};
  if (comm.rank() == 0) {
    TensorPool* const tensors = TensorMemory::Here();
    absl::Status status;
    try {
      status = use([&](int block, int64_t first, int64_t elements, float* master, float* m, float* v) {
        const TensorScope scope(tensors);
        RETURN_IF_ERROR(next({block, first, elements}).status());
        return access.ReadRange(tiering::BlockIndex(block), first, elements, {master, m, v});
      });
    } catch (const std::bad_alloc&) {  // the others wait for how it ended
      status = absl::ResourceExhaustedError("there is not enough memory to read the state");
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
    RETURN_IF_ERROR(next(kEnd).status());
    return AgreeOnStatus(comm, Channel::kSetup, status);
  }
  std::vector<float> values;
  for (;;) {
    ASSIGN_OR_RETURN(const Range range, next(kEnd));
    const auto [block, first, elements] = range;
    if (block < 0) return AgreeOnStatus(comm, Channel::kSetup, absl::OkStatus());
    const auto blocks = static_cast<int64_t>(plan_.graph.blocks.size());
    constexpr int64_t kMost = int64_t{1} << 28;  // elements, of any range that is asked for
    if (block >= blocks || first < 0 || elements <= 0 || elements > kMost)
      return BroadcastError(absl::DataLossError("rank 0 asks for a range of state that there is not"));
    const auto n = static_cast<size_t>(elements);
    try {
      values.resize(3 * n);
    } catch (const std::bad_alloc&) {
      return BroadcastError(absl::ResourceExhaustedError(absl::StrCat(
          "there is no memory for ", 3 * n * sizeof(float), " bytes of the state that rank 0 reads")));
    }
    // What went wrong is everybody's, and rank 0 ends.
    (void)access.ReadRange(tiering::BlockIndex(static_cast<int>(block)), first, elements,
                           {values.data(), values.data() + n, values.data() + 2 * n});
  }
}

absl::Status Engine::Impl::WriteState(std::string_view parameter, StateKind kind, const TensorView& value) {
  if (!options_.trains && options_.resumes())
    return absl::FailedPreconditionError(
        "this engine only reads: the run that it goes on with is another's. One that is made of a model's "
        "own values takes new ones");
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
