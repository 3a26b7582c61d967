#include "swap/write_stream.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "swap/format.h"

namespace penstock::swap {

WriteStream::WriteStream(aio::Engine& engine, std::span<std::byte> memory, uint64_t chunk_bytes)
    : engine_(engine), chunk_bytes_(chunk_bytes) {
  PENSTOCK_CHECK(chunk_bytes > 0 && chunk_bytes % kSectorBytes == 0 && memory.size() >= chunk_bytes,
                 "chunks that are no sectors, or more than their memory");
  for (uint64_t at = 0; at + chunk_bytes <= memory.size(); at += chunk_bytes) {
    chunks_.push_back(std::make_unique<Chunk>());
    chunks_.back()->memory = memory.data() + at;
  }
}

WriteStream::~WriteStream() {
  // Only their memory has to be free: a file that is not finished is none.
  SettleAll().IgnoreError();
}

absl::Status WriteStream::Open(const std::string& path, uint64_t bytes) {
  SettleAll().IgnoreError();  // of one that was given up
  file_.reset();
  failed_ = absl::OkStatus();
  flushed_ = false;
  sent_ = filled_ = 0;
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": open for writing"));
  aio::FileOptions options;
  options.path = path;
  options.descriptor = fd;
  options.size = bytes;
  options.allow_unaligned_file_system = true;  // what others read may lie anywhere
  absl::StatusOr<std::unique_ptr<aio::File>> file = aio::File::Open(options);
  ::close(fd);
  if (!file.ok()) (void)::unlink(path.c_str());
  RETURN_IF_ERROR(file.status());
  file_ = *std::move(file);
  return absl::OkStatus();
}

absl::Status WriteStream::Settle(Chunk* chunk) {
  return std::exchange(chunk->pending, false) ? engine_.Wait(&chunk->request) : absl::OkStatus();
}

absl::Status WriteStream::SettleAll() {
  absl::Status first;
  for (const auto& chunk : chunks_) first.Update(Settle(chunk.get()));
  return first;
}

// The chunk goes, and the next one is free.
absl::Status WriteStream::Send() {
  Chunk& chunk = *chunks_[now_];
  const uint64_t padded = PaddedBytes(filled_);
  std::memset(chunk.memory + filled_, 0, padded - filled_);
  chunk.request.PrepareWrite(*file_, sent_, chunk.memory, padded);
  chunk.request.set_priority(aio::Priority::kWriteBehind);
  RETURN_IF_ERROR(engine_.Submit(&chunk.request));
  chunk.pending = true;
  sent_ += filled_;
  filled_ = 0;
  now_ = (now_ + 1) % chunks_.size();
  return Settle(chunks_[now_].get());
}

absl::Status WriteStream::CheckOpen() const {
  RETURN_IF_ERROR(failed_);
  if (file_ == nullptr) return absl::FailedPreconditionError("no file is open: Open comes first");
  if (flushed_) return absl::FailedPreconditionError(absl::StrCat(file_->path(), ": its end has set out"));
  return absl::OkStatus();
}

absl::Status WriteStream::Append(std::span<const std::byte> bytes) {
  RETURN_IF_ERROR(CheckOpen());
  while (!bytes.empty()) {
    const size_t n = std::min<size_t>(bytes.size(), chunk_bytes_ - filled_);
    std::memcpy(chunks_[now_]->memory + filled_, bytes.data(), n);
    filled_ += n;
    bytes = bytes.subspan(n);
    if (filled_ == chunk_bytes_) RETURN_IF_ERROR(failed_ = Send());
  }
  return absl::OkStatus();
}

absl::Status WriteStream::Overwrite(uint64_t offset, std::span<const std::byte> bytes) {
  RETURN_IF_ERROR(CheckOpen());
  if (offset > this->bytes() || bytes.size() > this->bytes() - offset)
    return absl::InvalidArgumentError(absl::StrCat(file_->path(), ": bytes ", offset, " to ",
                                                   offset + bytes.size(), " of ", this->bytes(),
                                                   " that have been written"));
  if (offset < sent_) {
    const size_t n = std::min<size_t>(bytes.size(), sent_ - offset);
    RETURN_IF_ERROR(failed_ = SettleAll());
    aio::Request request;
    request.PrepareWrite(*file_, offset, bytes.data(), n);
    RETURN_IF_ERROR(failed_ = engine_.Submit(&request));
    RETURN_IF_ERROR(failed_ = engine_.Wait(&request));
    offset += n;
    bytes = bytes.subspan(n);
  }
  if (!bytes.empty()) std::memcpy(chunks_[now_]->memory + (offset - sent_), bytes.data(), bytes.size());
  return absl::OkStatus();
}

absl::Status WriteStream::Flush() {
  RETURN_IF_ERROR(CheckOpen());
  if (filled_ > 0) RETURN_IF_ERROR(failed_ = Send());
  flushed_ = true;
  return absl::OkStatus();
}

absl::Status WriteStream::Finish() {
  RETURN_IF_ERROR(failed_);
  if (!flushed_) RETURN_IF_ERROR(Flush());
  RETURN_IF_ERROR(failed_ = SettleAll());
  RETURN_IF_ERROR(failed_ = file_->Resize(sent_));
  file_.reset();
  flushed_ = false;
  sent_ = 0;
  return absl::OkStatus();
}

}  // namespace penstock::swap
