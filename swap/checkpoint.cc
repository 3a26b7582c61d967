#include "swap/checkpoint.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "swap/inspect.h"
#include "swap/store_files.h"

namespace penstock::swap {
namespace {

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kPartial = ".partial";
constexpr int kLeftoverPatienceMs = 1000;

std::vector<std::string> Entries(const std::string& directory) {
  std::vector<std::string> names;
  DIR* dir = ::opendir(directory.c_str());
  if (dir == nullptr) return names;
  while (const dirent* entry = ::readdir(dir)) names.emplace_back(entry->d_name);
  ::closedir(dir);
  std::sort(names.begin(), names.end());
  return names;
}

// The step of a checkpoint's name; false for any other name.
bool StepOf(const std::string& name, uint64_t* step) {
  if (name.size() <= kPrefix.size() || name.compare(0, kPrefix.size(), kPrefix) != 0) return false;
  const std::string digits = name.substr(kPrefix.size());
  if (digits.size() > 19 || digits.find_first_not_of("0123456789") != std::string::npos) return false;
  *step = std::strtoull(digits.c_str(), nullptr, 10);
  return true;
}

// Removes a directory that holds a store file of ours, or nothing, and nothing else. Anything else stays.
absl::Status RemoveStoreDirectory(const std::string& directory, int lock_patience_ms = 0) {
  const std::string path = StorePath(directory);
  const auto file = PlainFile::Open(path);
  if (file.ok()) {
    if (file->Classify() == FileKind::kForeign) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " was not made by this program and is not removed"));
    }
    const auto locked = file->TryLock(/*exclusive=*/true, lock_patience_ms);
    if (!locked.ok()) return locked.status();
    if (!*locked) return absl::FailedPreconditionError(absl::StrCat(path, " is in use"));
    if (::unlink(path.c_str()) != 0) return ErrnoError(errno, "remove", path);
  } else if (!absl::IsNotFound(file.status())) {
    return file.status();
  }
  if (::rmdir(directory.c_str()) != 0 && errno != ENOENT)
    return ErrnoError(errno, "remove directory", directory);
  return absl::OkStatus();
}

// A small file that appears whole or not at all.
absl::Status WriteSmallFile(const std::string& directory, const std::string& name, const std::string& text) {
  const std::string temporary =
      absl::StrCat(directory, "/.", name, absl::string_view(kPartial.data(), kPartial.size()));
  const std::string path = absl::StrCat(directory, "/", name);
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return ErrnoError(errno, "create", temporary);
  const ssize_t written = ::write(fd, text.data(), text.size());
  const int write_error = written < 0 ? errno : written != static_cast<ssize_t>(text.size()) ? ENOSPC : 0;
  const int sync_error = write_error == 0 && ::fsync(fd) != 0 ? errno : 0;
  ::close(fd);
  const int error = write_error != 0 ? write_error : sync_error;
  if (error != 0 || ::rename(temporary.c_str(), path.c_str()) != 0) {
    const int cause = error != 0 ? error : errno;
    (void)::unlink(temporary.c_str());
    return ErrnoError(cause, "write", path);
  }
  return aio::SyncDirectory(directory);
}

Layout LayoutOf(const StoreShape& shape) {
  Layout layout;
  for (const TilePlacement& tile : shape.tiles) {
    layout.tiles.push_back(tile.layout);
    layout.tiles.back().scratch_bytes = 0;  // means nothing to anyone but the process that wrote it
  }
  return layout;
}

uint64_t LargestSlot(const Geometry& geometry) {
  uint64_t largest = 0;
  for (uint32_t t = 0; t < geometry.tiles(); ++t) largest = std::max(largest, geometry.slot_bytes(t));
  return largest;
}

// Where the segments of a tile stand in memory that holds one slot.
uint32_t SegmentPlaces(const Geometry& geometry, uint32_t tile, std::byte* memory,
                       std::array<void*, kMaxSegments>* places) {
  const uint32_t segments = geometry.segments(tile);
  for (uint32_t s = 0; s < segments; ++s) (*places)[s] = memory + geometry.segment_start(tile, s);
  return segments;
}

}  // namespace

std::string CheckpointName(uint64_t step) { return absl::StrFormat("step-%08u", step); }

std::vector<CheckpointEntry> ListCheckpoints(const std::string& parent) {
  std::vector<CheckpointEntry> found;
  for (const std::string& name : Entries(parent)) {
    CheckpointEntry entry;
    if (!StepOf(name, &entry.step)) continue;
    entry.name = name;
    entry.path = absl::StrCat(parent, "/", name);
    if (::access(StorePath(entry.path).c_str(), F_OK) == 0) found.push_back(std::move(entry));
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  return found;
}

absl::StatusOr<std::string> FindCheckpoint(const std::string& path) {
  if (::access(StorePath(path).c_str(), F_OK) == 0) return path;
  const auto latest = PlainFile::Open(absl::StrCat(path, "/latest"));
  if (latest.ok()) {
    const auto bytes = latest->Read(0, 256);
    if (bytes.ok()) {
      std::string name(reinterpret_cast<const char*>(bytes->data()), bytes->size());
      name.erase(std::find(name.begin(), name.end(), '\n'), name.end());
      uint64_t step = 0;
      const std::string named = absl::StrCat(path, "/", name);
      if (StepOf(name, &step) && ::access(StorePath(named).c_str(), F_OK) == 0) return named;
    }
  }
  const auto all = ListCheckpoints(path);
  if (all.empty()) return absl::NotFoundError(absl::StrCat(path, " holds no checkpoint"));
  return all.back().path;
}

CheckpointCopy::CheckpointCopy(Store& store, const CheckpointOptions& options, bool retained)
    : store_(store), options_(options), retained_(retained) {}

absl::StatusOr<std::unique_ptr<CheckpointCopy>> CheckpointCopy::Begin(Store& store,
                                                                      const CheckpointOptions& options) {
  return Start(store, options, /*retain=*/true);
}

absl::StatusOr<std::unique_ptr<CheckpointCopy>> CheckpointCopy::Start(Store& store,
                                                                      const CheckpointOptions& options,
                                                                      bool retain) {
  if (store.committed_sequence() == 0) return absl::FailedPreconditionError("nothing is committed yet");
  const uint64_t largest = LargestSlot(store.geometry());
  if (options.memory.size() < largest) {
    return absl::InvalidArgumentError(absl::StrCat("a checkpoint needs memory for one tile: ", largest,
                                                   " bytes, not ", options.memory.size()));
  }
  if (retain) {
    if (absl::Status retained = store.Retain(); !retained.ok()) return retained;
  }
  std::unique_ptr<CheckpointCopy> copy(new CheckpointCopy(store, options, retain));
  copy->record_ = std::make_unique<Record>(store.committed_record());
  copy->name_ = CheckpointName(store.committed_step());
  copy->path_ = absl::StrCat(options.parent, "/", copy->name_);
  if (absl::Status made = MakeDirectories(options.parent); !made.ok()) return made;
  if (::access(copy->path_.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(absl::StrCat(copy->path_, " is there already"));
  }
  // What a run that was killed left behind; its last writes may not be over yet. One that stays in use is
  // another run's and not ours to judge.
  for (const std::string& name : Entries(options.parent)) {
    uint64_t step = 0;
    if (name.size() <= kPartial.size() + 1 || name[0] != '.') continue;
    if (name.compare(name.size() - kPartial.size(), kPartial.size(), kPartial) != 0) continue;
    if (!StepOf(name.substr(1, name.size() - 1 - kPartial.size()), &step)) continue;
    (void)RemoveStoreDirectory(absl::StrCat(options.parent, "/", name), kLeftoverPatienceMs);
  }

  copy->partial_ =
      absl::StrCat(options.parent, "/.", copy->name_, absl::string_view(kPartial.data(), kPartial.size()));
  StoreOptions target;
  target.directories = {copy->partial_};
  target.sync = Sync::kPower;  // a checkpoint is there to stay
  target.slots = 1;
  target.payload_capacity = std::max<uint64_t>(1, copy->record_->payload.size());
  target.uuid = store.uuid();
  target.lock_patience_ms = 0;
  target.allow_unaligned_file_system = options.allow_unaligned_file_system;
  auto created = Store::Create(store.engine(), target, LayoutOf(store.shape()), store.identity());
  if (!created.ok()) return created.status();
  copy->target_ = *std::move(created);

  const uint64_t lanes = std::min<uint64_t>({options.memory.size() / largest, 4, store.geometry().tiles()});
  for (uint64_t i = 0; i < lanes; ++i) {
    copy->lanes_.push_back(std::make_unique<Lane>());
    copy->lanes_.back()->memory = options.memory.data() + i * largest;
  }
  return copy;
}

CheckpointCopy::~CheckpointCopy() {
  for (const auto& lane : lanes_) {
    if (lane->io.pending()) (void)store_.Wait(&lane->io);
  }
  if (retained_ && phase_ != Phase::kDone) store_.Release();
  target_.reset();  // waits for its commit
  // Given up. Should this fail too, the next Begin tries again.
  if (phase_ != Phase::kDone && !partial_.empty()) (void)RemoveStoreDirectory(partial_);
}

uint64_t CheckpointCopy::bytes_total() const { return store_.geometry().state_bytes(); }

absl::StatusOr<bool> CheckpointCopy::Poll() {
  if (phase_ == Phase::kFailed) return absl::FailedPreconditionError("this checkpoint has failed");
  auto done = Advance();
  if (!done.ok()) phase_ = Phase::kFailed;
  return done;
}

absl::StatusOr<bool> CheckpointCopy::Advance() {
  if (phase_ == Phase::kCopying) {
    for (const auto& lane : lanes_) {
      if (absl::Status advanced = AdvanceLane(lane.get()); !advanced.ok()) return advanced;
    }
    if (tiles_done_ < store_.geometry().tiles()) return false;
    if (retained_) store_.Release();
    const CommitInfo info{record_->step, record_->updates, record_->payload};
    if (absl::Status started = target_->Commit(&commit_, info); !started.ok()) return started;
    phase_ = Phase::kCommitting;
  }
  if (phase_ == Phase::kCommitting) {
    if (!commit_.finished()) return false;
    if (absl::Status finished = target_->FinishCommit(&commit_); !finished.ok()) return finished;
    if (absl::Status published = Publish(); !published.ok()) return published;
    phase_ = Phase::kDone;
  }
  return true;
}

absl::Status CheckpointCopy::AdvanceLane(Lane* lane) {
  const Geometry& g = store_.geometry();
  std::array<void*, kMaxSegments> places;
  if (lane->phase == Lane::Phase::kReading && lane->io.finished()) {
    if (absl::Status read = lane->io.status(); !read.ok()) return read;
    // Never a checkpoint of damage.
    if (absl::Status verified = store_.VerifyRead(lane->io); !verified.ok()) return verified;
    if (retained_) store_.Release(lane->tile);
    const uint32_t segments = SegmentPlaces(g, lane->tile, lane->memory, &places);
    std::array<const void*, kMaxSegments> sources;
    std::copy_n(places.begin(), segments, sources.begin());
    absl::Status started = target_->WriteTile(&lane->io, lane->tile, record_->tiles[lane->tile].version,
                                              std::span<const void* const>(sources.data(), segments),
                                              aio::Priority::kWriteBehind);
    if (!started.ok()) return started;
    lane->phase = Lane::Phase::kWriting;
  }
  if (lane->phase == Lane::Phase::kWriting && lane->io.finished()) {
    const std::span<const uint64_t> checksums(&record_->checksums[g.first_segment(lane->tile)],
                                              g.segments(lane->tile));
    if (absl::Status noted = target_->NoteWritten(&lane->io, checksums); !noted.ok()) return noted;
    lane->phase = Lane::Phase::kIdle;
    ++tiles_done_;
    for (uint32_t s = 0; s < g.segments(lane->tile); ++s) bytes_done_ += g.segment_bytes(lane->tile, s);
  }
  if (lane->phase == Lane::Phase::kIdle && next_tile_ < g.tiles()) {
    lane->tile = next_tile_++;
    const uint32_t segments = SegmentPlaces(g, lane->tile, lane->memory, &places);
    absl::Status started = store_.ReadSegments(
        &lane->io, lane->tile, 0, segments, std::span<void* const>(places.data(), segments),
        aio::Priority::kWriteBehind, retained_ ? Which::kRetained : Which::kCommitted);
    if (!started.ok()) return started;
    lane->phase = Lane::Phase::kReading;
  }
  return absl::OkStatus();
}

// Makes the whole, durable checkpoint appear under its name.
absl::Status CheckpointCopy::Publish() {
  target_.reset();
  if (::rename(partial_.c_str(), path_.c_str()) != 0) return ErrnoError(errno, "rename to", path_);
  partial_.clear();
  if (absl::Status synced = aio::SyncDirectory(options_.parent); !synced.ok()) return synced;
  if (absl::Status written = WriteSmallFile(options_.parent, "latest", name_ + "\n"); !written.ok())
    return written;
  if (options_.keep == 0) return absl::OkStatus();
  const auto all = ListCheckpoints(options_.parent);
  for (size_t i = 0; i + options_.keep < all.size(); ++i) {
    // One that somebody reads just now stays until next time.
    if (all[i].path != path_) (void)RemoveStoreDirectory(all[i].path);
  }
  return absl::OkStatus();
}

absl::Status WriteCheckpoint(Store& store, const CheckpointOptions& options) {
  auto copy = CheckpointCopy::Start(store, options, /*retain=*/false);
  if (!copy.ok()) return copy.status();
  while (true) {
    const auto done = (*copy)->Poll();
    if (!done.ok()) return done.status();
    if (*done) return absl::OkStatus();
    for (const auto& lane : (*copy)->lanes_) {
      if (lane->io.pending()) {
        (void)store.Wait(&lane->io);  // its error comes with the next Poll
        break;
      }
    }
    if ((*copy)->commit_.pending()) {
      if (absl::Status drained = store.engine().Drain(); !drained.ok()) return drained;
    }
  }
}

absl::Status RestoreCheckpoint(Store& from, Store& to, std::span<std::byte> memory) {
  const Geometry& g = from.geometry();
  if (g.tiles() != to.geometry().tiles()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the checkpoint has ", g.tiles(), " tiles, the new state ", to.geometry().tiles()));
  }
  if (memory.size() < LargestSlot(g)) {
    return absl::InvalidArgumentError(
        absl::StrCat("restoring needs memory for one tile: ", LargestSlot(g), " bytes"));
  }
  TileIo io;
  std::array<void*, kMaxSegments> places;
  std::array<const void*, kMaxSegments> sources;
  std::array<uint64_t, kMaxSegments> checksums;
  for (uint32_t tile = 0; tile < g.tiles(); ++tile) {
    if (from.shape().tiles[tile].layout.segment_bytes != to.shape().tiles[tile].layout.segment_bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("tile ", tile, " of the checkpoint has other segments"));
    }
    const uint32_t segments = SegmentPlaces(g, tile, memory.data(), &places);
    absl::Status status =
        from.ReadSegments(&io, tile, 0, segments, std::span<void* const>(places.data(), segments),
                          aio::Priority::kDemand, Which::kCommitted);
    if (status.ok()) status = from.Wait(&io);
    if (status.ok()) status = from.VerifyRead(io);
    if (!status.ok()) return status;
    const uint64_t version = from.committed(tile).version;
    std::copy_n(places.begin(), segments, sources.begin());
    status = to.WriteTile(&io, tile, version, std::span<const void* const>(sources.data(), segments),
                          aio::Priority::kWriteBehind);
    if (!status.ok()) return status;
    for (uint32_t s = 0; s < segments; ++s) checksums[s] = to.SegmentChecksum(tile, s, version, sources[s]);
    (void)to.Wait(&io);  // NoteWritten returns its error
    status = to.NoteWritten(&io, std::span<const uint64_t>(checksums.data(), segments));
    if (!status.ok()) return status;
  }
  return to.CommitNow({from.committed_step(), from.committed_updates(), from.committed_payload()});
}

}  // namespace penstock::swap
