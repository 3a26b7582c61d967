#include "aio/request.h"

#include "absl/strings/str_cat.h"
#include "aio/file.h"
#include "aio/io_error.h"

namespace penstock::aio {

std::string_view PriorityName(Priority priority) {
  switch (priority) {
    case Priority::kDemand:
      return "demand";
    case Priority::kPrefetch:
      return "prefetch";
    case Priority::kWriteBehind:
      return "write-behind";
  }
  return "unknown";
}

std::string_view OpName(Op op) {
  switch (op) {
    case Op::kRead:
      return "read";
    case Op::kWrite:
      return "write";
    case Op::kSync:
      return "sync";
  }
  return "unknown";
}

void Request::PrepareRead(File& file, uint64_t offset, void* data, uint64_t bytes) {
  Prepare(Op::kRead, file, offset, {});
  one_ = {data, bytes};
  segment_count_ = 1;
  bytes_ = bytes;
}

void Request::PrepareWrite(File& file, uint64_t offset, const void* data, uint64_t bytes) {
  Prepare(Op::kWrite, file, offset, {});
  one_ = {const_cast<void*>(data), bytes};  // only ever read from
  segment_count_ = 1;
  bytes_ = bytes;
}

void Request::PrepareRead(File& file, uint64_t offset, std::span<const Segment> segments) {
  Prepare(Op::kRead, file, offset, segments);
}

void Request::PrepareWrite(File& file, uint64_t offset, std::span<const Segment> segments) {
  Prepare(Op::kWrite, file, offset, segments);
}

void Request::PrepareSync(File& file) { Prepare(Op::kSync, file, 0, {}); }

void Request::Prepare(Op op, File& file, uint64_t offset, std::span<const Segment> segments) {
  op_ = op;
  file_ = &file;
  offset_ = offset;
  many_ = segments.data();
  segment_count_ = static_cast<uint32_t>(segments.size());
  bytes_ = 0;
  for (const Segment& segment : segments) bytes_ += segment.bytes;
  state_.store(State::kIdle, std::memory_order_relaxed);
}

absl::Status Request::status() const {
  const State now = state();
  if (now == State::kDone) return absl::OkStatus();
  if (file_ == nullptr) return absl::FailedPreconditionError("request: never prepared");
  const auto describe = [&] {
    return absl::StrCat(std::string(OpName(op_)), " ", file_->path(), " (", file_->device_name(),
                        "): offset ", offset_, ", ", bytes_, " bytes, ", done_bytes(), " done: ");
  };
  if (now == State::kCancelled) return absl::CancelledError(absl::StrCat(describe(), "cancelled"));
  if (now != State::kFailed) {
    return absl::FailedPreconditionError(
        absl::StrCat(describe(), now == State::kIdle ? "never submitted" : "still pending"));
  }
  if (error_ == kEndOfFile) {
    const absl::StatusOr<uint64_t> size = file_->Size();
    return absl::OutOfRangeError(absl::StrCat(describe(), "past the end of the file, which has ",
                                              size.ok() ? absl::StrCat(*size) : "an unknown number of",
                                              " bytes"));
  }
  return MakeIoError({.op = OpName(op_),
                      .path = file_->path(),
                      .device = file_->device_name(),
                      .offset = offset_,
                      .bytes = bytes_,
                      .done_bytes = done_bytes(),
                      .error = error_});
}

}  // namespace penstock::aio
