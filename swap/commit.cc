// The commit: a small state machine driven by the completions of its own requests.
#include "swap/commit.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "swap/store.h"

namespace penstock::swap {

absl::Status Store::Commit(CommitIo* io, const CommitInfo& info) {
  if (io->pending()) return absl::FailedPreconditionError("the commit object is in use");
  // A commit that failed may be tried again, but makes up for no mark; everything else that forbids writing
  // forbids committing.
  if (health_ != Health::kCommitFailed || next_.overwriting) {
    RETURN_IF_ERROR(CheckWritable());
  }
  if (commit_ != nullptr) return absl::FailedPreconditionError("a commit is in flight");
  if (info.payload.size() > shape_.payload_capacity) {
    return absl::InvalidArgumentError(absl::StrCat("a commit payload of ", info.payload.size(),
                                                   " bytes; this store takes ", shape_.payload_capacity));
  }
  if (record_.sequence > 0 && (info.step < record_.step || info.updates < record_.updates)) {
    return absl::InvalidArgumentError(absl::StrCat("commit of step ", info.step, ", update ", info.updates,
                                                   " after step ", record_.step, ", update ",
                                                   record_.updates));
  }
  if (writing_ > 0) {
    return absl::FailedPreconditionError(absl::StrCat(writing_, " tiles have writes that were not noted"));
  }
  for (uint32_t tile = 0; tile < geometry_.tiles(); ++tile) {
    const Written& written = written_[tile];
    if (written.state == Written::State::kFailed) {
      return absl::FailedPreconditionError(
          absl::StrCat("the last write of tile ", tile, " failed: write or drop it before committing"));
    }
    if (written.state == Written::State::kInParts) {
      return absl::FailedPreconditionError(
          absl::StrCat("of version ", written.version, " of tile ", tile, " some segments were not written"));
    }
    if (written.state == Written::State::kNone && record_.tiles[tile].version == 0) {
      return absl::FailedPreconditionError(absl::StrCat("tile ", tile, " was never written"));
    }
  }

  next_.sequence = record_.sequence + 1;
  next_.overwriting = false;
  next_.step = info.step;
  next_.updates = info.updates;
  next_.checkpoint = info.checkpoint;
  next_.payload.assign(info.payload);
  for (uint32_t tile = 0; tile < geometry_.tiles(); ++tile) {
    const Written& written = written_[tile];
    const bool noted = written.state == Written::State::kNoted;
    next_.tiles[tile] = noted ? TileVersion{written.version, written.slot} : record_.tiles[tile];
    const auto first = static_cast<ptrdiff_t>(geometry_.first_segment(tile));
    const auto& from = noted ? written_checksums_ : record_.checksums;
    std::copy_n(from.begin() + first, geometry_.segments(tile), next_.checksums.begin() + first);
  }
  StartRecord(io);
  return absl::OkStatus();
}

absl::Status Store::StartOverwriting(CommitIo* io) {
  if (io->pending()) return absl::FailedPreconditionError("the commit object is in use");
  // A mark that failed may be tried again, like a commit; one does not make up for the other.
  if (health_ != Health::kCommitFailed || !next_.overwriting) {
    RETURN_IF_ERROR(CheckWritable());
  }
  if (commit_ != nullptr) return absl::FailedPreconditionError("a commit is in flight");
  if (geometry_.slots() != 1 || record_.sequence == 0 || record_.overwriting || retained_.has_value()) {
    return absl::FailedPreconditionError(
        retained_.has_value() ? "a checkpoint still holds the only version: it cannot be overwritten"
                              : "only a committed store of one slot is overwritten in place, once a commit");
  }
  next_ = record_;
  ++next_.sequence;
  next_.overwriting = true;
  StartRecord(io);
  return absl::OkStatus();
}

void Store::StartRecord(CommitIo* io) {
  io->record_bytes_ = RecordBytes(geometry_, next_.payload.size());
  EncodeRecord(geometry_, shape_.uuid, next_, record_buffer_.span().first(io->record_bytes_));

  io->store_ = this;
  io->sequence_ = next_.sequence;
  io->step_ = next_.step;
  io->submit_error_ = absl::OkStatus();
  io->failed_stage_ = CommitIo::Step::kDone;
  io->begin_ns_ = engine_.clock().NowNs();
  io->end_ns_ = io->begin_ns_;
  if (options_.sync == Sync::kPower) {
    while (io->syncs_.size() < files_.size()) io->syncs_.push_back(std::make_unique<aio::Request>());
  }
  commit_ = io;
  io->state_.store(CommitIo::State::kPending, std::memory_order_release);
  At(CrashPoint::kCommitBegin);
  StartCommitStage(io,
                   options_.sync == Sync::kPower ? CommitIo::Step::kSyncTiles : CommitIo::Step::kWriteRecord);
}

// Runs on the executor's thread for the first stage and on an I/O thread for the others. Whoever finishes the
// last request of a stage starts the next, so that no two threads are ever in here for one commit.
void Store::StartCommitStage(CommitIo* io, CommitIo::Step stage) {
  io->stage_ = stage;
  std::array<aio::Request*, kMaxDirectories> requests;
  size_t count = 0;
  switch (stage) {
    case CommitIo::Step::kSyncTiles:
      for (size_t d = 0; d < files_.size(); ++d) {
        io->syncs_[d]->PrepareSync(*files_[d]);
        requests[count++] = io->syncs_[d].get();
      }
      break;
    case CommitIo::Step::kWriteRecord:
      At(CrashPoint::kCommitTilesSynced);
      for (uint32_t copy = 0; copy < kRecordCopies; ++copy) {
        io->copies_[copy].PrepareWrite(
            *files_[0], geometry_.record_offset(static_cast<uint32_t>(next_.sequence % kRecordPlaces), copy),
            record_buffer_.data(), io->record_bytes_);
        requests[count++] = &io->copies_[copy];
      }
      break;
    case CommitIo::Step::kSyncRecord:
      io->syncs_[0]->PrepareSync(*files_[0]);
      requests[count++] = io->syncs_[0].get();
      break;
    case CommitIo::Step::kDone:
      break;
  }
  if (count == 0) {
    EndCommit(io);
    return;
  }
  io->outstanding_.store(static_cast<uint32_t>(count), std::memory_order_release);
  for (size_t i = 0; i < count; ++i) {
    requests[i]->set_priority(aio::Priority::kDemand);
    requests[i]->set_on_complete(&Store::OnCommitRequestDone, io);
  }
  // Once they are submitted, another thread may finish the commit and its owner close the store: hold on to
  // nothing.
  const auto at_crash_point = stage == CommitIo::Step::kWriteRecord ? options_.at_crash_point : nullptr;
  void* const stage_context = options_.stage_context;
  // All or none are taken, so that on failure nothing of this stage will call back.
  absl::Status submitted = engine_.Submit(std::span<aio::Request* const>(requests.data(), count));
  if (!submitted.ok()) {
    io->submit_error_ = std::move(submitted);
    io->failed_stage_ = stage;
    EndCommit(io);
    return;
  }
  if (at_crash_point != nullptr) at_crash_point(CrashPoint::kCommitSubmitted, stage_context);
}

void Store::OnCommitRequestDone(aio::Request& request, void* context) {
  auto* io = static_cast<CommitIo*>(context);
  Store* store = io->store_;
  if (!request.ok()) io->stage_failed_.store(true, std::memory_order_relaxed);
  if (io->outstanding_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const CommitIo::Step stage = io->stage_;
  if (io->stage_failed_.exchange(false, std::memory_order_relaxed)) {
    io->failed_stage_ = stage;
    store->EndCommit(io);
    return;
  }
  CommitIo::Step next = CommitIo::Step::kDone;
  if (stage == CommitIo::Step::kSyncTiles) {
    next = CommitIo::Step::kWriteRecord;
  } else if (stage == CommitIo::Step::kWriteRecord) {
    store->At(CrashPoint::kCommitWritten);
    if (store->options_.sync == Sync::kPower) next = CommitIo::Step::kSyncRecord;
  }
  store->StartCommitStage(io, next);
}

void Store::EndCommit(CommitIo* io) {
  if (io->failed_stage_ == CommitIo::Step::kDone) At(CrashPoint::kCommitSynced);
  io->end_ns_ = engine_.clock().NowNs();
  const CommitIo::Callback callback = io->callback_;
  void* const context = io->context_;
  io->state_.store(CommitIo::State::kFinished, std::memory_order_release);
  if (callback != nullptr) callback(*io, context);
}

absl::Status Store::FinishCommit(CommitIo* io) {
  if (commit_ != io || !io->finished())
    return absl::FailedPreconditionError("not a finished commit of this store");
  commit_ = nullptr;
  io->state_.store(CommitIo::State::kIdle, std::memory_order_relaxed);

  if (io->failed_stage_ != CommitIo::Step::kDone) {
    // A record that may or may not be whole can be written once more. After a failed sync the kernel has
    // forgotten what it could not write: trying again would report success and mean nothing.
    const bool record = io->failed_stage_ == CommitIo::Step::kWriteRecord;
    health_ = record ? Health::kCommitFailed : Health::kSyncFailed;
    absl::Status error = io->submit_error_;
    if (record) {
      for (const aio::Request& copy : io->copies_) error.Update(copy.status());
    } else {
      for (const auto& sync : io->syncs_) error.Update(sync->status());
    }
    const char* what = next_.overwriting ? "mark of the overwriting of step " : "commit of step ";
    return absl::Status(error.code(), absl::StrCat(what, io->step_, ": ", error.message()));
  }

  health_ = Health::kGood;
  std::swap(record_, next_);
  for (Written& written : written_) written.state = Written::State::kNone;
  At(CrashPoint::kCommitDone);
  return absl::OkStatus();
}

absl::Status Store::CommitNow(const CommitInfo& info) {
  CommitIo io;
  RETURN_IF_ERROR(Commit(&io, info));
  return AwaitCommit(&io);
}

absl::Status Store::CommitGiven(const CommitInfo& info) {
  RETURN_IF_ERROR(CommitNow(info));
  return CommitNow(info);
}

absl::Status Store::OverwriteNow() {
  CommitIo io;
  RETURN_IF_ERROR(StartOverwriting(&io));
  return AwaitCommit(&io);
}

absl::Status Store::AwaitCommit(CommitIo* io) {
  // Each stage's requests are submitted before those of the stage before are over, so that the engine is idle
  // only when the commit is.
  while (io->pending()) {
    RETURN_IF_ERROR(engine_.Drain());
  }
  return FinishCommit(io);
}

}  // namespace penstock::swap
