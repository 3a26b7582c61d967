#include "swap/store_files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file_lock.h"
#include "base/io_error.h"
#include "base/read_at.h"
#include "base/status_macros.h"

namespace penstock::swap {

std::string StorePath(const std::string& directory) {
  return absl::StrCat(directory, "/", absl::string_view(kStoreFileName.data(), kStoreFileName.size()));
}

std::string OverwrittenText(uint64_t step) {
  return absl::StrCat("the run keeps one version of its state, and was ended while that of step ", step,
                      " was being overwritten: what is left is of no use; go on from a checkpoint "
                      "(`resume` with `checkpoint_dir`), or start over (`overwrite`)");
}

std::string LostSuperblockText(const std::string& found) {
  return absl::StrCat(
      found,
      ", and the run's directory 0 is whole: it was overwritten; go on from a checkpoint "
      "(`resume` with `checkpoint_dir` and another `state_dir`), or start over (`overwrite`)");
}

absl::Status CheckDirectory(const std::string& directory) {
  struct stat link;
  if (directory.empty()) return absl::InvalidArgumentError("a state directory has an empty path");
  // Without a trailing slash, which would make lstat follow the link.
  std::string path = directory;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (::lstat(path.c_str(), &link) != 0) {
    return errno == ENOENT ? absl::OkStatus()
                           : MakeIoError({.op = "look at directory", .path = path, .error = errno});
  }
  if (S_ISLNK(link.st_mode) && link.st_uid != ::geteuid() && link.st_uid != 0) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is a symbolic link of another user (uid ",
                                                      link.st_uid, "): give the real path"));
  }
  struct stat target;
  if (::stat(path.c_str(), &target) != 0)
    return MakeIoError({.op = "look at directory", .path = path, .error = errno});
  if (!S_ISDIR(target.st_mode))
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a directory"));
  return absl::OkStatus();
}

absl::Status MakeDirectories(const std::string& directory, std::vector<std::string>* made) {
  RETURN_IF_ERROR(CheckDirectory(directory));
  for (size_t at = 1; at <= directory.size(); ++at) {
    if (at != directory.size() && directory[at] != '/') continue;
    const std::string prefix = directory.substr(0, at);
    if (::mkdir(prefix.c_str(), 0700) == 0) {
      if (made != nullptr) made->push_back(prefix);
      const size_t slash = prefix.find_last_of('/');
      const std::string parent = slash == std::string::npos ? "."
                                 : slash == 0               ? "/"
                                                            : prefix.substr(0, slash);
      RETURN_IF_ERROR(aio::SyncDirectory(parent));
    } else if (errno != EEXIST) {
      return MakeIoError({.op = "make directory", .path = prefix, .error = errno});
    }
  }
  return CheckDirectory(directory);
}

absl::Status Rename(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str()) == 0
             ? absl::OkStatus()
             : MakeIoError({.op = "rename to", .path = to, .error = errno});
}

absl::Status CheckDistinct(const std::vector<std::string>& directories) {
  std::set<std::pair<dev_t, ino_t>> seen;
  for (const std::string& directory : directories) {
    struct stat info;
    if (::stat(directory.c_str(), &info) != 0) {
      if (errno == ENOENT || errno == ENOTDIR) continue;  // missing: for others to say
      return MakeIoError({.op = "look at directory", .path = directory, .error = errno});
    }
    if (!seen.emplace(info.st_dev, info.st_ino).second) {
      return absl::InvalidArgumentError(absl::StrCat("state directory ", directory, " was given twice"));
    }
  }
  return absl::OkStatus();
}

// ---- PlainFile ----

PlainFile::PlainFile(PlainFile&& other) noexcept { *this = std::move(other); }

PlainFile& PlainFile::operator=(PlainFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(bytes_, other.bytes_);
  std::swap(allocated_bytes_, other.allocated_bytes_);
  std::swap(device_, other.device_);
  std::swap(modified_ns_, other.modified_ns_);
  return *this;
}

PlainFile::~PlainFile() {
  if (fd_ >= 0) ::close(fd_);
}

absl::StatusOr<PlainFile> PlainFile::Open(const std::string& path) {
  PlainFile file;
  file.path_ = path;
  file.fd_ = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file.fd_ < 0) return MakeIoError({.op = "open", .path = path, .error = errno});
  struct stat info;
  if (::fstat(file.fd_, &info) != 0) return MakeIoError({.op = "look at", .path = path, .error = errno});
  if (!S_ISREG(info.st_mode))
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a regular file"));
  file.bytes_ = static_cast<uint64_t>(info.st_size);
  file.allocated_bytes_ = static_cast<uint64_t>(info.st_blocks) * 512;
  file.device_ = info.st_dev;
  file.modified_ns_ = int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
  return file;
}

bool PlainFile::ModifiedAfter(std::optional<int64_t> until_ns) const {
  const int64_t now_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                             std::chrono::system_clock::now().time_since_epoch())
                             .count();
  return until_ns.has_value() && modified_ns_ > *until_ns && modified_ns_ <= now_ns;
}

absl::StatusOr<std::vector<std::byte>> PlainFile::Read(uint64_t offset, uint64_t bytes) const {
  // Nothing is taken on trust: no more memory than the file has bytes.
  bytes = offset >= bytes_ ? 0 : std::min(bytes, bytes_ - offset);
  std::vector<std::byte> data(bytes);
  ASSIGN_OR_RETURN(const size_t done, ReadAt(fd_, path_, offset, data.data(), bytes));
  data.resize(done);
  // Nobody else wants these pages, and the file's owner goes past the cache.
  (void)::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  return data;
}

absl::StatusOr<bool> PlainFile::TryLock(bool exclusive, int patience_ms) const {
  return TryLockFile(fd_, path_, exclusive ? LockMode::kExclusive : LockMode::kShared,
                     std::chrono::milliseconds(patience_ms));
}

absl::Status PlainFile::Cut(uint64_t bytes) const {
  // By descriptor, so that nothing else that took the path meanwhile is harmed.
  const std::string self = absl::StrCat("/proc/self/fd/", fd_);
  const int fd = ::open(self.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return MakeIoError({.op = "open for cutting", .path = path_, .error = errno});
  const int result = ::ftruncate(fd, static_cast<off_t>(bytes));
  const int error = errno;
  ::close(fd);
  return result == 0 ? absl::OkStatus() : MakeIoError({.op = "cut", .path = path_, .error = error});
}

absl::StatusOr<bool> PlainFile::IsAt(const std::string& path) const { return IsFileAt(fd_, path); }

uint64_t PlainFile::names() const {
  struct stat info;
  return ::fstat(fd_, &info) == 0 ? info.st_nlink : ~uint64_t{0};  // in doubt somebody's
}

bool PlainFile::IsOpenHereOnly() const {
  // The kernel grants a write lease where that is so. What it would signal, should anybody come before the
  // lease is given back, does nothing.
  if (::fcntl(fd_, F_SETSIG, SIGURG) != 0 || ::fcntl(fd_, F_SETLEASE, F_WRLCK) != 0) return false;
  return ::fcntl(fd_, F_SETLEASE, F_UNLCK) == 0;
}

absl::StatusOr<FileKind> PlainFile::Classify() const {
  ASSIGN_OR_RETURN(const auto headers, Read(0, 2 * kSectorBytes));
  const auto length = SuperblockBytesFromHeaders(headers);
  if (absl::IsNotFound(length.status())) return FileKind::kUnfinished;
  // A damaged superblock, or one of another format version, is a store's as well.
  return absl::IsInvalidArgument(length.status()) ? FileKind::kForeign : FileKind::kStore;
}

absl::Status Replaced(const std::string& path) {
  return absl::FailedPreconditionError(absl::StrCat(
      path,
      " was replaced or moved away just now: another run was started at the same time, or somebody is "
      "at work there; look into the directory and start again"));
}

absl::StatusOr<std::optional<PlainFile>> TakeOldFile(const std::string& path, int patience_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
  while (true) {
    auto file = PlainFile::Open(path);
    if (absl::IsNotFound(file.status())) return std::nullopt;
    RETURN_IF_ERROR(file.status());
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    ASSIGN_OR_RETURN(const auto locked,
                     file->TryLock(/*exclusive=*/true, static_cast<int>(std::max<int64_t>(0, left.count()))));
    if (!locked) return absl::FailedPreconditionError(absl::StrCat(path, " is in use by another run"));
    // Whoever held the lock may have removed the file, and made another.
    ASSIGN_OR_RETURN(const bool at_its_place, file->IsAt(path));
    if (!at_its_place) {
      if (std::chrono::steady_clock::now() >= deadline) return Replaced(path);
      continue;
    }
    ASSIGN_OR_RETURN(const FileKind kind, file->Classify());
    if (kind == FileKind::kForeign) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " was not made by this program and is not overwritten: move it away"));
    }
    return *std::move(file);
  }
}

// ---- through the engine ----

absl::Status ReadFully(aio::Engine& engine, aio::File& file, uint64_t offset, std::span<std::byte> bytes) {
  aio::Request request;
  request.PrepareRead(file, offset, bytes.data(), bytes.size());
  RETURN_IF_ERROR(engine.Submit(&request));
  return engine.Wait(&request);
}

absl::Status WriteFully(aio::Engine& engine, aio::File& file, uint64_t offset,
                        std::span<const std::byte> bytes) {
  aio::Request request;
  request.PrepareWrite(file, offset, bytes.data(), bytes.size());
  RETURN_IF_ERROR(engine.Submit(&request));
  return engine.Wait(&request);
}

absl::Status SyncFully(aio::Engine& engine, aio::File& file) {
  aio::Request request;
  request.PrepareSync(file);
  RETURN_IF_ERROR(engine.Submit(&request));
  return engine.Wait(&request);
}

absl::Status WithoutHeaders(const ReadBytes& read) {
  // The largest superblock and three copies of the longest record end before this.
  constexpr uint64_t kMetadataEnd = uint64_t{512} << 20;
  constexpr uint64_t kPiece = uint64_t{1} << 20;
  bool bodies = false;  // what a creation writes before the headers begins right behind them
  for (uint64_t offset = 2 * kSectorBytes; offset < kMetadataEnd; offset += kPiece) {
    ASSIGN_OR_RETURN(const auto bytes, read(offset, kPiece));
    for (size_t at = 0; at < bytes.size(); at += kSectorBytes) {
      const auto sector = std::span(bytes).subspan(at, std::min(bytes.size() - at, kSectorBytes));
      if (std::all_of(sector.begin(), sector.end(), [](std::byte b) { return b == std::byte{0}; })) continue;
      bodies = bodies || offset + at < kBeginOfFile;
      if (bodies && !StartsLikeRecord(sector)) continue;
      return absl::DataLossError(absl::StrCat(
          "its superblock is zero, and what a run has written stands behind it (offset ", offset + at,
          "): it was overwritten; go on from a checkpoint (`resume` with "
          "`checkpoint_dir` and another `state_dir`), or start over (`overwrite`)"));
    }
    if (bytes.size() < kPiece) break;
  }
  return absl::NotFoundError("the file holds no superblock");
}

absl::StatusOr<DecodedSuperblock> ReadSuperblock(aio::Engine& engine, aio::File& file) {
  const auto name = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(file.path(), ": ", status.message()));
  };
  ASSIGN_OR_RETURN(const uint64_t size, file.Size());
  const uint64_t header_bytes = std::min<uint64_t>(2 * kSectorBytes, size);
  AlignedBuffer memory(2 * kSectorBytes);
  const std::span<std::byte> headers = memory.span().first(header_bytes);
  if (header_bytes > 0) {
    RETURN_IF_ERROR(ReadFully(engine, file, 0, headers));
  }
  const absl::StatusOr<uint64_t> length = SuperblockBytesFromHeaders(headers);
  if (absl::IsNotFound(length.status())) {
    return name(WithoutHeaders([&](uint64_t offset, uint64_t bytes) {
      bytes = offset >= size ? 0 : std::min(bytes, size - offset);
      AlignedBuffer piece(std::max(bytes, kSectorBytes));
      absl::Status read =
          bytes == 0 ? absl::OkStatus() : ReadFully(engine, file, offset, piece.span().first(bytes));
      using Bytes = std::vector<std::byte>;
      return read.ok() ? absl::StatusOr<Bytes>(Bytes(piece.data(), piece.data() + bytes)) : read;
    }));
  }
  if (!length.ok()) return name(length.status());
  if (*length > size) return name(absl::DataLossError("the file ends inside its superblock"));
  AlignedBuffer all(*length);
  RETURN_IF_ERROR(ReadFully(engine, file, 0, all.span()));
  auto decoded = DecodeSuperblock(all.span());
  if (!decoded.ok()) return name(decoded.status());
  return decoded;
}

absl::StatusOr<DecodedSuperblock> LoadSuperblock(const PlainFile& file) {
  ASSIGN_OR_RETURN(const auto headers, file.Read(0, 2 * kSectorBytes));
  const auto length = SuperblockBytesFromHeaders(headers);
  if (absl::IsNotFound(length.status())) {
    return WithoutHeaders([&](uint64_t offset, uint64_t bytes) { return file.Read(offset, bytes); });
  }
  RETURN_IF_ERROR(length.status());
  ASSIGN_OR_RETURN(const auto bytes, file.Read(0, *length));
  return DecodeSuperblock(bytes);
}

FoundRecord NewestRecord(const Geometry& geometry, const Uuid& uuid,
                         std::span<const std::vector<std::byte>> copies) {
  FoundRecord found;
  // Commit 1 goes to place 1, commit 2 to place 0.
  const auto empty = [](const std::vector<std::byte>& copy) {
    return !copy.empty() &&
           std::all_of(copy.begin(), copy.end(), [](std::byte b) { return b == std::byte{0}; });
  };
  found.only_first_place = empty(copies[0]) && empty(copies[1]);
  std::vector<std::string> torn;  // places without a whole copy
  for (uint32_t place = 0; place < kRecordPlaces; ++place) {
    std::vector<std::string> lines;
    for (uint32_t copy = 0; copy < kRecordCopies; ++copy) {
      auto record = DecodeRecord(geometry, uuid, place, copies[place * kRecordCopies + copy]);
      if (record.ok()) {
        if (record->sequence > found.record.sequence) found.record = *std::move(record);
      } else if (!absl::IsNotFound(record.status())) {
        lines.push_back(absl::StrFormat("commit record place %u copy %u (offset %u, length %u): %s", place,
                                        copy, geometry.record_offset(place, copy), geometry.record_capacity(),
                                        std::string(record.status().message())));
      }
    }
    auto& where = lines.size() == kRecordCopies ? torn : found.damage;
    where.insert(where.end(), lines.begin(), lines.end());
  }
  // Beside a whole record, a place with none is what a commit leaves that was cut short.
  auto& where = found.record.sequence > 0 ? found.cut_short : found.damage;
  where.insert(where.end(), torn.begin(), torn.end());
  return found;
}

FoundRecord RecordOfCommit(const Geometry& geometry, const Uuid& uuid,
                           std::span<const std::vector<std::byte>> copies, std::optional<uint64_t> sequence) {
  FoundRecord newest = NewestRecord(geometry, uuid, copies);
  if (!sequence.has_value() || newest.record.sequence == 0 || newest.record.sequence == *sequence)
    return newest;
  if (geometry.slots() == 1) return newest;  // the tiles of the one before have been written over
  std::vector<std::vector<std::byte>> before(copies.begin(), copies.end());
  const uint64_t place = newest.record.sequence % kRecordPlaces;
  for (uint32_t copy = 0; copy < kRecordCopies; ++copy) before[place * kRecordCopies + copy].clear();
  FoundRecord found = NewestRecord(geometry, uuid, before);
  const bool next = found.record.sequence + 1 == newest.record.sequence;
  return next && found.record.sequence == *sequence ? found : newest;
}

absl::StatusOr<FoundRecord> LoadRecord(const PlainFile& file, const Geometry& geometry, const Uuid& uuid,
                                       std::optional<uint64_t> sequence) {
  std::vector<std::vector<std::byte>> copies;
  for (uint32_t place = 0; place < kRecordPlaces; ++place) {
    for (uint32_t copy = 0; copy < kRecordCopies; ++copy) {
      ASSIGN_OR_RETURN(auto bytes,
                       file.Read(geometry.record_offset(place, copy), geometry.record_capacity()));
      copies.push_back(std::move(bytes));
    }
  }
  return RecordOfCommit(geometry, uuid, copies, sequence);
}

}  // namespace penstock::swap
