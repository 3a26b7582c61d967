// How a store comes to be: Create, Open, and what disk space it takes.
#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "aio/bytes.h"
#include "aio/sim_disk.h"
#include "base/directory.h"
#include "base/file_lock.h"
#include "base/io_error.h"
#include "base/status_macros.h"
#include "swap/replace_parts.h"
#include "swap/store.h"
#include "swap/store_files.h"

namespace penstock::swap {
namespace {

constexpr int kCreationPatienceMs = 2000;

absl::Status Named(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

// What Create would write, with a uuid of zeros.
absl::StatusOr<StoreShape> MakeShape(const StoreOptions& options, const Layout& layout,
                                     std::string_view identity) {
  StoreShape shape;
  shape.slots = options.slots;
  shape.payload_capacity = options.payload_capacity;
  shape.identity = std::string(identity);
  shape.directory_paths = options.directories;
  std::vector<double> weights = options.weights;
  if (weights.empty()) weights.assign(options.directories.size(), 1.0);
  if (weights.size() != options.directories.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(weights.size(), " weights for ", options.directories.size(), " state directories"));
  }
  for (double weight : weights) {
    if (!(weight > 0) || !std::isfinite(weight)) {
      return absl::InvalidArgumentError(
          absl::StrCat("a directory weight of ", weight, "; it must be above 0"));
    }
  }
  if (options.slots < 1 || options.slots > kMaxSlots) {
    return absl::InvalidArgumentError(
        absl::StrCat("a store keeps 1 to ", kMaxSlots, " versions of a tile, not ", options.slots));
  }
  const std::vector<uint32_t> homes = AssignDirectories(layout, weights);
  for (size_t t = 0; t < layout.tiles.size(); ++t) shape.tiles.push_back({homes[t], layout.tiles[t]});
  RETURN_IF_ERROR(Validate(shape));
  return shape;
}

absl::Status FillRandom(Uuid* uuid) {
  size_t done = 0;
  while (done < uuid->size()) {
    const ssize_t n = ::getrandom(uuid->data() + done, uuid->size() - done, 0);
    if (n < 0 && errno != EINTR)
      return MakeIoError({.op = "read random bytes from", .path = "the kernel", .error = errno});
    if (n > 0) done += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

// The nearest ancestor that exists, to ask for free space before anything is made.
absl::StatusOr<std::string> ExistingAncestor(std::string path) {
  while (!path.empty()) {
    ASSIGN_OR_RETURN(const bool there, PathExists(path));
    if (there) return path;
    const size_t slash = path.find_last_of('/');
    if (slash == std::string::npos) break;
    path.resize(slash == 0 && path.size() > 1 ? 1 : slash);
  }
  return ".";
}

// Of a store file that is made beside the one that it replaces.
std::string NextPath(const std::string& directory) {
  return absl::StrCat(directory, "/.", std::string(kStoreFileName), ".next");
}

absl::StatusOr<std::unique_ptr<aio::File>> OpenFile(aio::Engine& engine, const StoreOptions& options,
                                                    const std::string& path, bool create,
                                                    int descriptor = -1) {
  aio::FileOptions file_options;
  file_options.path = path;
  file_options.descriptor = descriptor;
  file_options.create = create;
  file_options.exclusive = create;
  file_options.read_only = !create && options.read_only;
  file_options.allow_unaligned_file_system = options.allow_unaligned_file_system;
  file_options.sim = engine.options().sim;
  ASSIGN_OR_RETURN(auto file, aio::File::Open(file_options));
  if (file->alignment().offset > kSectorBytes) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": the device wants transfers aligned to ", file->alignment().offset,
                     " bytes, the store's are aligned to ", kSectorBytes, "; use another device"));
  }
  return file;
}

// A new one, which errors call by the name that it is to take.
absl::StatusOr<std::unique_ptr<aio::File>> OpenNext(aio::Engine& engine, const StoreOptions& options,
                                                    const std::string& directory) {
  const std::string path = NextPath(directory);
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return MakeIoError({.op = "open", .path = path, .error = errno});
  auto file = OpenFile(engine, options, StorePath(directory), /*create=*/false, fd);
  ::close(fd);
  if (!file.ok()) (void)::unlink(path.c_str());
  return file;
}

// The newest commit that a store file has, and its step; none of one that never was committed or is no
// store's.
struct NewestCommit {
  CommitSeen seen;
  uint64_t step = 0;
};
// Of what is damaged or cannot be read: the same each time it is looked at, and no commit's.
constexpr uint64_t kUnknownSequence = ~uint64_t{0};

std::optional<NewestCommit> NewestCommitIn(const PlainFile& file) {
  const auto super = LoadSuperblock(file);
  if (absl::IsNotFound(super.status()) || absl::IsInvalidArgument(super.status())) return std::nullopt;
  if (!super.ok()) return NewestCommit{{Uuid{}, kUnknownSequence}};
  if (super->directory != 0) return std::nullopt;
  const auto geometry = Geometry::Make(super->shape);
  if (!geometry.ok()) return NewestCommit{{super->shape.uuid, kUnknownSequence}};
  const auto found = LoadRecord(file, *geometry, super->shape.uuid);
  if (!found.ok()) return NewestCommit{{super->shape.uuid, kUnknownSequence}};
  if (found->record.sequence == 0) return std::nullopt;
  return NewestCommit{{super->shape.uuid, found->record.sequence}, found->record.step};
}

// What the stores of this process ended with. While one was open nobody else wrote to its files.
class OwnCommits {
 public:
  static OwnCommits& Get() {
    static auto* const all = new OwnCommits();  // stores may outlive what main() ends
    return *all;
  }
  void Add(const CommitSeen& commit) {
    const std::lock_guard lock(mutex_);
    commits_.emplace(commit.uuid, commit.sequence);
  }
  bool Have(const CommitSeen& commit) const {
    const std::lock_guard lock(mutex_);
    return commits_.contains({commit.uuid, commit.sequence});
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::pair<Uuid, uint64_t>> commits_;
};

absl::Status CheckSeenIn(const PlainFile& file, std::span<const CommitSeen> seen) {
  const std::optional<NewestCommit> newest = NewestCommitIn(file);
  if (!newest.has_value() || std::find(seen.begin(), seen.end(), newest->seen) != seen.end())
    return absl::OkStatus();
  if (newest->seen.sequence == kUnknownSequence) {
    return absl::FailedPreconditionError(
        absl::StrCat(file.path(),
                     " was changed by another process since this one was started, or cannot be read "
                     "any more: it is not overwritten: start this one again, or move it away"));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      file.path(), ": another process has trained there since this one was started, and has come to step ",
      newest->step, ", which is not overwritten: start this one again, or move it away"));
}

// The store files of an old run, which is replaced: only what is ours, and only if nobody uses any of them.
absl::StatusOr<std::vector<PlainFile>> TakeOldFiles(const StoreOptions& options) {
  // Before the lock is waited for: what another run commits meanwhile is not overwritten.
  const std::vector<CommitSeen> seen =
      options.overwrites_only.has_value() ? *options.overwrites_only : SeeCommits(options.directories);
  std::vector<PlainFile> old;
  for (const std::string& directory : options.directories) {
    ASSIGN_OR_RETURN(auto file, TakeOldFile(StorePath(directory), options.lock_patience_ms));
    if (file.has_value()) old.push_back(*std::move(file));
  }
  for (const PlainFile& file : old) {
    // Anew: what it was when it was opened may be long ago. It is locked: it stays so.
    ASSIGN_OR_RETURN(const PlainFile now, PlainFile::Open(file.path()));
    RETURN_IF_ERROR(CheckSeenIn(now, seen));
  }
  return old;
}

absl::Status CheckAtTheirPlaces(const std::vector<PlainFile>& files) {
  for (const PlainFile& file : files) {
    ASSIGN_OR_RETURN(const bool at_its_place, file.IsAt(file.path()));
    if (!at_its_place) return Replaced(file.path());
  }
  return absl::OkStatus();
}

// The one with the commit records before the others: whoever is killed in the midst of this leaves what is
// recognised as a run that never was, not as one that lost a directory.
absl::Status EmptyOldFiles(std::vector<PlainFile>* old) {
  std::stable_partition(old->begin(), old->end(), [](const PlainFile& file) {
    const auto headers = file.Read(0, 2 * kSectorBytes);
    return headers.ok() && DirectoryFromHeaders(*headers) == 0u;
  });
  RETURN_IF_ERROR(CheckAtTheirPlaces(*old));
  for (const PlainFile& file : *old) {
    if (file.names() > 1) continue;  // somebody keeps it under another name
    RETURN_IF_ERROR(file.Cut(0));
  }
  return absl::OkStatus();
}

absl::Status RemoveOldFiles(const StoreOptions& options, std::vector<PlainFile>* old) {
  RETURN_IF_ERROR(EmptyOldFiles(old));
  for (const PlainFile& file : *old) {
    ASSIGN_OR_RETURN(const bool at_its_place, file.IsAt(file.path()));
    if (!at_its_place) return Replaced(file.path());
    if (::unlink(file.path().c_str()) != 0)
      return MakeIoError({.op = "remove", .path = file.path(), .error = errno});
  }
  for (const std::string& directory : options.directories) {
    if (absl::Status synced = SyncDirectory(directory); !synced.ok() && !absl::IsNotFound(synced))
      return synced;
  }
  return absl::OkStatus();
}

// What a kill has left of one, or of the one that it replaced. By who has the directory's store locked.
absl::Status RemoveLeftover(const std::string& directory, int patience_ms) {
  ASSIGN_OR_RETURN(const auto left, TakeOldFile(NextPath(directory), patience_ms));
  if (!left.has_value() || ::unlink(left->path().c_str()) == 0) return absl::OkStatus();
  return MakeIoError({.op = "remove", .path = left->path(), .error = errno});
}

// Whether the new files can be made while the old ones are there.
absl::StatusOr<bool> HasRoomForBoth(StoreOptions options, const Layout& layout, std::string_view identity) {
  options.overwrite = false;
  absl::Status fits = CheckSpace(options, layout, identity);
  if (!fits.ok() && !absl::IsResourceExhausted(fits)) return fits;
  return fits.ok();
}

// Whether the old files, removed, leave room for each of the new ones within a quota, of which free space on
// the file system says nothing.
bool LeaveRoom(const StoreOptions& options, const Geometry& geometry, const std::vector<PlainFile>& old) {
  for (uint32_t d = 0; d < geometry.directories(); ++d) {
    const std::string path = StorePath(options.directories[d]);
    const bool leaves = std::any_of(old.begin(), old.end(), [&](const PlainFile& file) {
      return file.path() == path && file.names() == 1 && file.allocated_bytes() >= geometry.file_bytes(d);
    });
    if (!leaves) return false;
  }
  return true;
}

// Undoes a creation that failed, unless told that it worked. The files are locked until then, so that what
// has their names is theirs.
class CreatedFiles {
 public:
  explicit CreatedFiles(aio::SimDisk* sim) : sim_(sim) {}
  ~CreatedFiles() {
    for (auto path = paths_.rbegin(); path != paths_.rend(); ++path) {
      // The error that brought us here is the one to report; what cannot be removed is recognised as
      // unfinished.
      if (sim_ == nullptr) {
        (void)::unlink(path->c_str());
      } else {
        (void)sim_->Remove(*path);
      }
    }
    // Only those that are empty go.
    for (auto made = directories_.rbegin(); made != directories_.rend(); ++made) (void)::rmdir(made->c_str());
  }
  std::vector<std::string>* paths() { return &paths_; }
  std::vector<std::string>* directories() { return &directories_; }
  void Keep() {
    paths_.clear();
    directories_.clear();
  }

 private:
  aio::SimDisk* sim_;
  std::vector<std::string> paths_;
  std::vector<std::string> directories_;  // made for them, in order
};

// The new files take the names of the old ones, all of which are locked. Where one directory has all, an
// error leaves the old file as it was.
absl::Status TakePlaces(const StoreOptions& options, std::vector<PlainFile>* old, CreatedFiles* next_files) {
  RETURN_IF_ERROR(CheckAtTheirPlaces(*old));
  if (options.directories.size() == 1) {
    const std::string& directory = options.directories.front();
    const std::string next = NextPath(directory), path = StorePath(directory);
    const auto exchange = [&] {
      return ::renameat2(AT_FDCWD, next.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0;
    };
    if (exchange()) {
      if (absl::Status synced = SyncDirectory(directory); !synced.ok()) {
        if (!exchange()) next_files->Keep();  // then the old one has the name that would be removed
        return synced;
      }
      (void)::unlink(next.c_str());  // else RemoveLeftover
      return absl::OkStatus();
    }
    if (errno != EINVAL && errno != ENOSYS)
      return MakeIoError({.op = "rename to", .path = path, .error = errno});
  }
  RETURN_IF_ERROR(EmptyOldFiles(old));
  // Directory 0 last, as its superblock is written.
  for (size_t d = options.directories.size(); d-- > 0;) {
    const std::string path = StorePath(options.directories[d]);
    const bool replaces =
        std::any_of(old->begin(), old->end(), [&](const PlainFile& file) { return file.path() == path; });
    if (!replaces) {
      ASSIGN_OR_RETURN(const bool there, PathExists(path));
      if (there) return Replaced(path);
    }
    RETURN_IF_ERROR(Rename(NextPath(options.directories[d]), path));
  }
  for (const std::string& directory : options.directories) RETURN_IF_ERROR(SyncDirectory(directory));
  return absl::OkStatus();
}

// Makes the files of a store, whole and durable, at their places or beside them, where they have NextPath.
// `made` gets their paths.
absl::Status MakeFiles(aio::Engine& engine, const StoreOptions& options, const Geometry& geometry,
                       const StoreShape& shape, bool beside, const std::function<void(CrashPoint)>& at,
                       HeldFiles* files, std::vector<std::string>* made) {
  const bool on_disk = engine.options().sim == nullptr;
  for (uint32_t d = 0; d < geometry.directories(); ++d) {
    const std::string& directory = options.directories[d];
    const std::string path = beside ? NextPath(directory) : StorePath(directory);
    auto file =
        beside ? OpenNext(engine, options, directory) : OpenFile(engine, options, path, /*create=*/true);
    if (absl::IsAlreadyExists(file.status())) {
      if (options.overwrite) return Replaced(path);
      return absl::AlreadyExistsError(absl::StrCat(path,
                                                   " is there already: resume that run (`resume`), replace "
                                                   "it (`overwrite`), or use another directory"));
    }
    RETURN_IF_ERROR(file.status());
    files->push_back(*std::move(file));
    // Nobody uses it, but somebody may just look at it (Probe). Another run that is started with `overwrite`
    // may take it for what a killed one left: then it is theirs.
    const int patience_ms = std::max(options.lock_patience_ms, kCreationPatienceMs);
    RETURN_IF_ERROR(files->back()->Lock(patience_ms));
    if (on_disk) {
      ASSIGN_OR_RETURN(const bool at_its_place, IsFileAt(files->back()->fd(), path));
      if (!at_its_place) return Replaced(path);
    }
    made->push_back(path);
    at(CrashPoint::kCreateFile);
  }
  for (uint32_t d = 0; d < geometry.directories(); ++d) {
    RETURN_IF_ERROR((*files)[d]->Preallocate(geometry.file_bytes(d)));
    at(CrashPoint::kCreateReserved);
  }
  // Directory 0 comes last: where it has a superblock, all have.
  for (uint32_t d = geometry.directories(); d-- > 0;) {
    const std::vector<std::byte> bytes = EncodeSuperblock(shape, d);
    AlignedBuffer aligned(bytes.size());
    std::copy(bytes.begin(), bytes.end(), aligned.data());
    aio::File& file = *(*files)[d];
    // Bodies, header copy 1, header copy 0, each durable before the next: cut short anywhere, it is known as
    // that, and headers that are zero before a run's records are damage. Of long bodies what tells them from
    // a run comes first.
    const uint64_t begin = std::min<uint64_t>(bytes.size(), kBeginOfFile);
    for (const auto& [from, to] : {std::pair{2 * kSectorBytes, begin},
                                   {begin, uint64_t{bytes.size()}},
                                   {kSectorBytes, 2 * kSectorBytes},
                                   {uint64_t{0}, kSectorBytes}}) {
      if (from == to) continue;
      RETURN_IF_ERROR(WriteFully(engine, file, from, aligned.span().subspan(from, to - from)));
      at(CrashPoint::kCreateSuperblock);
      RETURN_IF_ERROR(file.SyncData());
    }
    // A drive that lost it without a word would have everything after it taken for a run that never was.
    AlignedBuffer back(bytes.size());
    std::fill_n(back.data(), bytes.size(), std::byte{0xff});
    RETURN_IF_ERROR(ReadFully(engine, file, 0, back.span()));
    if (!std::equal(bytes.begin(), bytes.end(), back.data())) {
      return absl::DataLossError(absl::StrCat(file.path(), ": offset 0, ", bytes.size(),
                                              " bytes: what came back is not what was written just before: "
                                              "mistrust the drive"));
    }
    if (on_disk) RETURN_IF_ERROR(aio::SyncDirectory(options.directories[d]));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<CommitSeen> SeeCommits(const std::vector<std::string>& directories,
                                   std::optional<int64_t> until_ns) {
  std::vector<CommitSeen> seen;
  const auto see = [&](const std::string& directory) {
    const auto file = PlainFile::Open(StorePath(directory));
    if (!file.ok()) return;
    const std::optional<NewestCommit> newest = NewestCommitIn(*file);
    if (!newest.has_value()) return;
    if (!file->ModifiedAfter(until_ns) || OwnCommits::Get().Have(newest->seen)) seen.push_back(newest->seen);
  };
  for (const std::string& directory : directories) {
    see(directory);
    for (const std::string& next : PlacesBefore(directory)) see(next);
  }
  return seen;
}

absl::Status CheckSeen(const std::vector<std::string>& directories, std::span<const CommitSeen> seen) {
  for (const std::string& directory : directories) {
    const auto file = PlainFile::Open(StorePath(directory));
    if (absl::IsNotFound(file.status())) continue;
    RETURN_IF_ERROR(file.status());
    RETURN_IF_ERROR(CheckSeenIn(*file, seen));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint64_t>> BytesOnDisk(const StoreOptions& options, const Layout& layout,
                                                  std::string_view identity) {
  ASSIGN_OR_RETURN(const auto shape, MakeShape(options, layout, identity));
  ASSIGN_OR_RETURN(const auto geometry, Geometry::Make(shape));
  std::vector<uint64_t> bytes;
  bytes.reserve(geometry.directories());
  for (uint32_t d = 0; d < geometry.directories(); ++d) bytes.push_back(geometry.file_bytes(d));
  return bytes;
}

absl::Status CheckSpace(const StoreOptions& options, const Layout& layout, std::string_view identity,
                        std::span<const uint64_t> besides) {
  ASSIGN_OR_RETURN(const auto bytes, BytesOnDisk(options, layout, identity));
  struct Device {
    uint64_t need = 0;
    uint64_t free = 0;
    std::string directories;
  };
  std::map<uint64_t, Device> devices;  // by st_dev
  for (size_t d = 0; d < options.directories.size(); ++d) {
    ASSIGN_OR_RETURN(const std::string place, ExistingAncestor(options.directories[d]));
    struct stat info;
    if (::stat(place.c_str(), &info) != 0)
      return MakeIoError({.op = "look at directory", .path = place, .error = errno});
    Device& device = devices[info.st_dev];
    if (device.need == 0) {
      ASSIGN_OR_RETURN(const auto space, aio::QueryFileSystem(place));
      device.free = space.free_bytes;
    }
    device.need += bytes[d] + (d < besides.size() ? besides[d] : 0);
    absl::StrAppend(&device.directories, device.directories.empty() ? "" : ", ", options.directories[d]);
    if (!options.overwrite) continue;
    for (const std::string& path : {StorePath(options.directories[d]), NextPath(options.directories[d])}) {
      const auto old = PlainFile::Open(path);
      if (absl::IsNotFound(old.status())) continue;
      RETURN_IF_ERROR(old.status());
      ASSIGN_OR_RETURN(const FileKind kind, old->Classify());
      if (kind != FileKind::kForeign) device.free += old->allocated_bytes();
    }
  }
  for (const auto& [id, device] : devices) {
    if (device.need <= device.free) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        device.directories, ": the state needs ", aio::FormatBytes(device.need), ", ",
        aio::FormatBytes(device.free), " are free: ", aio::FormatBytes(device.need - device.free),
        " too little (make room, use another directory or more of them, or a smaller model)"));
  }
  return absl::OkStatus();
}

std::string RoomText(const std::vector<std::string>& directories) {
  uint64_t bytes = 0, there = 0, free = 0;
  std::set<uint64_t> devices;
  for (const std::string& directory : directories) {
    const auto file = PlainFile::Open(StorePath(directory));
    const auto space = aio::QueryFileSystem(directory);
    if (!file.ok() || !space.ok()) return "";
    bytes += file->bytes();
    there += std::min(file->bytes(), file->allocated_bytes());
    if (devices.insert(file->device()).second) free += space->free_bytes;
  }
  const std::string of = absl::StrCat("of the state's ", aio::FormatBytes(bytes), " on disk ");
  if (there == bytes) {
    return absl::StrCat(of, "none is missing, but a copy of the files may share it; ", aio::FormatBytes(free),
                        " are free");
  }
  return absl::StrCat(of, aio::FormatBytes(bytes - there), " are missing, and ", aio::FormatBytes(free),
                      " are free");
}

void Store::NoteOwnCommit() const {
  if (options_.read_only || engine_.options().sim != nullptr) return;
  // Whether one that failed came to the disk is not known: what is there then is not replaced unasked.
  try {
    OwnCommits::Get().Add({shape_.uuid, record_.sequence});
  } catch (const std::bad_alloc&) {
    return;  // likewise
  }
}

Store::Store(aio::Engine& engine, const StoreOptions& options, StoreShape shape, Geometry geometry)
    : engine_(engine), options_(options), shape_(std::move(shape)), geometry_(std::move(geometry)) {}

absl::StatusOr<std::unique_ptr<Store>> Store::Create(aio::Engine& engine, const StoreOptions& options,
                                                     const Layout& layout, const std::string& identity) {
  ASSIGN_OR_RETURN(auto shape, MakeShape(options, layout, identity));
  if (options.uuid.has_value()) {
    shape.uuid = *options.uuid;
  } else if (absl::Status random = FillRandom(&shape.uuid); !random.ok()) {
    return random;
  }
  ASSIGN_OR_RETURN(auto geometry, Geometry::Make(shape));

  const bool on_disk = engine.options().sim == nullptr;
  std::unique_ptr<Store> store;  // holds the locks while what was created is undone
  CreatedFiles created(engine.options().sim);
  if (on_disk) {
    for (const std::string& directory : options.directories) {
      RETURN_IF_ERROR(MakeDirectories(directory, created.directories()));
    }
    RETURN_IF_ERROR(CheckDistinct(options.directories));
    RETURN_IF_ERROR(CheckSpace(options, layout, identity));
  }
  store.reset(new Store(engine, options, std::move(shape), std::move(geometry)));
  const auto make = [&](bool beside, std::vector<std::string>* made) {
    return MakeFiles(
        engine, options, store->geometry_, store->shape_, beside, [&](CrashPoint stage) { store->At(stage); },
        &store->files_, made);
  };
  std::vector<PlainFile> old;  // of the run that is replaced, locked
  bool beside = false;         // it stays until the new files are durable
  if (on_disk && options.overwrite) {
    ASSIGN_OR_RETURN(old, TakeOldFiles(options));
    if (!old.empty()) {
      for (const std::string& directory : options.directories)
        RETURN_IF_ERROR(RemoveLeftover(directory, options.lock_patience_ms));
      ASSIGN_OR_RETURN(beside, HasRoomForBoth(options, layout, identity));
    }
  }
  if (beside) {
    absl::Status made;
    bool beyond_quota = false;
    {
      CreatedFiles next(nullptr);
      made = make(/*beside=*/true, next.paths());
      beyond_quota = ErrnoOf(made) == EDQUOT;
      if (made.ok()) made = TakePlaces(options, &old, &next);
      if (made.ok()) next.Keep();
    }
    if (absl::IsResourceExhausted(made)) {  // the room may be gone meanwhile, to another rank for one
      store->files_.clear();
      ASSIGN_OR_RETURN(beside, HasRoomForBoth(options, layout, identity));
      beside = beside && !(beyond_quota && LeaveRoom(options, store->geometry_, old));
    }
    if (beside) RETURN_IF_ERROR(made);
  }
  if (on_disk && options.overwrite) {
    if (!beside) RETURN_IF_ERROR(RemoveOldFiles(options, &old));
    store->At(CrashPoint::kOverwriteRemoved);
  }
  if (!beside) RETURN_IF_ERROR(make(/*beside=*/false, created.paths()));
  created.Keep();
  store->SizeTables();
  store->At(CrashPoint::kCreateDone);
  return store;
}

namespace {

// Files of a store's directories, each locked.
struct LockedFiles {
  std::vector<std::unique_ptr<aio::File>> files;
  std::vector<std::string> missing;  // directories that have none
};

absl::StatusOr<LockedFiles> LockAll(aio::Engine& engine, const StoreOptions& options, bool on_disk) {
  LockedFiles locked;
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(options.lock_patience_ms);
  for (const std::string& directory : options.directories) {
    auto file = OpenFile(engine, options, StorePath(directory), /*create=*/false);
    if (absl::IsNotFound(file.status())) {
      locked.missing.push_back(directory);
      continue;
    }
    RETURN_IF_ERROR(file.status());
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    const int patience_ms = static_cast<int>(std::max<int64_t>(0, left.count()));
    RETURN_IF_ERROR((*file)->Lock(patience_ms, options.read_only));
    // While the lock was waited for another run may have replaced it.
    if (on_disk) {
      ASSIGN_OR_RETURN(const bool at_its_place, IsFileAt((*file)->fd(), (*file)->path()));
      if (!at_its_place) return Replaced((*file)->path());
    }
    locked.files.push_back(*std::move(file));
  }
  return locked;
}

// What the superblocks of a store's files say, and which file is which directory of it.
struct Superblocks {
  std::optional<StoreShape> shape;                    // none: no file has one
  std::vector<std::unique_ptr<aio::File>> by_index =  // by directory, null: not given
      std::vector<std::unique_ptr<aio::File>>(kMaxDirectories);
  std::vector<std::string> damage;
  std::string first_path;  // of a file that has one
  std::string unfinished;  // path of a file that has none
};

absl::StatusOr<Superblocks> ReadSuperblocks(aio::Engine& engine,
                                            std::vector<std::unique_ptr<aio::File>> files) {
  Superblocks found;
  for (auto& file : files) {
    auto decoded = ReadSuperblock(engine, *file);
    if (absl::IsNotFound(decoded.status())) {
      found.unfinished = file->path();
      continue;
    }
    if (absl::IsInvalidArgument(decoded.status())) {
      return absl::FailedPreconditionError(absl::StrCat(
          decoded.status().message(), ": it was made by something else, or its superblock was overwritten"));
    }
    RETURN_IF_ERROR(decoded.status());
    for (const std::string& line : decoded->damage) {
      found.damage.push_back(absl::StrCat(file->path(), ": ", line));
    }
    if (!found.shape.has_value()) {
      found.shape = std::move(decoded->shape);
      found.first_path = file->path();
    } else if (found.shape->uuid != decoded->shape.uuid) {
      return absl::DataLossError(
          absl::StrCat(found.first_path, " belongs to run ", UuidText(found.shape->uuid), ", ", file->path(),
                       " to run ", UuidText(decoded->shape.uuid), ": give the directories of one run"));
    } else if (!(*found.shape == decoded->shape)) {
      return absl::DataLossError(absl::StrCat(found.first_path, " and ", file->path(),
                                              " have the same identity and different layouts"));
    }
    std::unique_ptr<aio::File>& place = found.by_index[decoded->directory];
    if (place != nullptr) {
      return absl::DataLossError(absl::StrCat(file->path(), " and ", place->path(), " are both directory ",
                                              decoded->directory, " of one run"));
    }
    place = std::move(file);
  }
  return found;
}

// All directories of one finished run, and no others. `missing`: those that were given and have no file.
absl::Status CheckComplete(const StoreOptions& options, const Superblocks& found,
                           const std::vector<std::string>& missing) {
  const bool unfinished = !found.unfinished.empty();
  // Creation writes the superblock of directory 0 last.
  if (!found.shape.has_value() || (found.by_index[0] == nullptr && unfinished)) {
    return absl::NotFoundError(absl::StrCat(options.directories.front(),
                                            ": the run was created and never committed: start it over"));
  }
  const StoreShape& shape = *found.shape;
  for (uint32_t d = 0; d < shape.directories(); ++d) {
    if (found.by_index[d] != nullptr) continue;
    if (unfinished) {
      return absl::DataLossError(LostSuperblockText(absl::StrCat(found.unfinished, " has no superblock")));
    }
    return absl::DataLossError(absl::StrCat(
        "directory ", d, " of the ", shape.directories(), " of run ", UuidText(shape.uuid),
        " is missing (it was ", shape.directory_paths[d], " when the run was created): give it as well"));
  }
  if (options.directories.size() != shape.directories()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the run has ", shape.directories(), " directories, ", options.directories.size(), " were given (",
        missing.empty() ? found.unfinished : missing.front(), " is not one of them)"));
  }
  return absl::OkStatus();
}

}  // namespace

HeldFiles Store::Close(std::unique_ptr<Store> store) {
  store->AwaitAll();
  return std::move(store->files_);
}

void Store::Discard(std::unique_ptr<Store> store) {
  if (store->record_.sequence > 0) return;
  const HeldFiles files = Close(std::move(store));
  for (const std::unique_ptr<aio::File>& file : files) {
    if (IsFileAt(file->fd(), file->path()).value_or(false)) (void)::unlink(file->path().c_str());
  }
}

absl::StatusOr<std::unique_ptr<Store>> Store::Open(aio::Engine& engine, const StoreOptions& options,
                                                   HeldFiles held) {
  if (options.directories.empty() || options.directories.size() > kMaxDirectories) {
    return absl::InvalidArgumentError(
        absl::StrCat("1 to ", kMaxDirectories, " state directories, not ", options.directories.size()));
  }
  const bool on_disk = engine.options().sim == nullptr;
  if (on_disk) {
    for (const std::string& directory : options.directories) {
      RETURN_IF_ERROR(CheckDirectory(directory));
    }
    RETURN_IF_ERROR(CheckDistinct(options.directories));
  }
  // Lock first, look afterwards: a run that was killed may still be writing.
  LockedFiles locked;
  locked.files = std::move(held);
  if (locked.files.empty()) {
    ASSIGN_OR_RETURN(locked, LockAll(engine, options, on_disk));
  }
  if (locked.files.empty()) {
    return absl::NotFoundError(absl::StrCat(options.directories.front(), " holds no run"));
  }
  ASSIGN_OR_RETURN(Superblocks found, ReadSuperblocks(engine, std::move(locked.files)));
  RETURN_IF_ERROR(CheckComplete(options, found, locked.missing));
  if (on_disk && !options.read_only) {
    for (const std::string& directory : options.directories)
      (void)RemoveLeftover(directory, options.lock_patience_ms);
  }
  auto geometry = Geometry::Make(*found.shape);
  if (!geometry.ok()) return Named(found.first_path, absl::DataLossError(geometry.status().message()));

  std::unique_ptr<Store> store(new Store(engine, options, *std::move(found.shape), *std::move(geometry)));
  for (uint32_t d = 0; d < store->geometry_.directories(); ++d) {
    store->files_.push_back(std::move(found.by_index[d]));
    ASSIGN_OR_RETURN(const auto size, store->files_[d]->Size());
    if (size < store->geometry_.file_bytes(d)) {
      return absl::DataLossError(absl::StrCat(store->files_[d]->path(), " has ", size, " bytes of ",
                                              store->geometry_.file_bytes(d), ": it was cut off"));
    }
  }
  store->recovered_.damage = std::move(found.damage);
  RETURN_IF_ERROR(store->Recover());
  if (options.sync == Sync::kPower && !options.read_only) {
    RETURN_IF_ERROR(store->MakeDurable());
  }
  return store;
}

absl::Status Store::Recover() {
  std::vector<std::vector<std::byte>> copies;
  AlignedBuffer buffer(geometry_.record_capacity());
  std::vector<std::string> unreadable;
  for (uint32_t place = 0; place < kRecordPlaces; ++place) {
    for (uint32_t copy = 0; copy < kRecordCopies; ++copy) {
      const absl::Status read =
          ReadFully(engine_, *files_[0], geometry_.record_offset(place, copy), buffer.span());
      if (read.ok()) {
        copies.emplace_back(buffer.data(), buffer.data() + buffer.bytes());
      } else {
        // The other copy may be readable; an unreadable one counts as damaged.
        copies.emplace_back();
        unreadable.push_back(std::string(read.message()));
      }
    }
  }
  const std::optional<uint64_t> sequence = options_.read_only ? options_.sequence : std::nullopt;
  FoundRecord found = RecordOfCommit(geometry_, shape_.uuid, copies, sequence);
  for (const std::string& line : unreadable) recovered_.damage.push_back(line);
  for (const std::string& line : found.damage) {
    recovered_.damage.push_back(absl::StrCat(files_[0]->path(), ": ", line));
  }
  for (const std::string& line : found.cut_short) {
    recovered_.cut_short.push_back(absl::StrCat(files_[0]->path(), ": ", line));
  }
  if (found.record.sequence == 0) {
    if (recovered_.damage.empty()) {
      return absl::NotFoundError(
          absl::StrCat(files_[0]->path(), ": the run was created and never committed: start it over"));
    }
    if (!unreadable.empty()) return absl::DataLossError(unreadable.front());
    if (found.only_first_place) {
      return absl::NotFoundError(
          absl::StrCat(files_[0]->path(), ": the run's first commit was cut short: start it over"));
    }
    return absl::DataLossError(absl::StrCat("no commit record is whole: ", recovered_.damage.back()));
  }
  if (found.record.overwriting) {
    return absl::DataLossError(absl::StrCat(files_[0]->path(), ": ", OverwrittenText(found.record.step)));
  }
  if (sequence.has_value() && found.record.sequence != *sequence) {
    return absl::DataLossError(absl::StrCat(files_[0]->path(), " is at step ", found.record.step, ", commit ",
                                            found.record.sequence, ", and has no commit ", *sequence,
                                            " any more"));
  }
  recovered_.sequence = found.record.sequence;
  recovered_.step = found.record.step;
  recovered_.updates = found.record.updates;
  recovered_.payload = found.record.payload;
  record_ = std::move(found.record);
  SizeTables();
  return absl::OkStatus();
}

// The record that was found may never have been synced: its process was killed before that, or the sync
// failed. In the latter case the kernel may have forgotten it, so that syncing alone would mean nothing: it
// is written again. Until then the next step must not write to the slots of the commit before. One copy after
// the other, first the one that is not whole, so that at any moment a whole one is left alone.
absl::Status Store::MakeDurable() {
  const uint64_t bytes = RecordBytes(geometry_, record_.payload.size());
  const std::span<std::byte> record = record_buffer_.span().first(bytes);
  EncodeRecord(geometry_, shape_.uuid, record_, record);
  const auto place = static_cast<uint32_t>(record_.sequence % kRecordPlaces);
  AlignedBuffer there(bytes);
  const bool first_is_whole =
      ReadFully(engine_, *files_[0], geometry_.record_offset(place, 0), there.span()).ok() &&
      std::equal(record.begin(), record.end(), there.data());
  for (const uint32_t copy : {first_is_whole ? 1u : 0u, first_is_whole ? 0u : 1u}) {
    absl::Status status = WriteFully(engine_, *files_[0], geometry_.record_offset(place, copy), record);
    for (size_t d = files_.size(); d-- > 0 && status.ok();) status = SyncFully(engine_, *files_[d]);
    if (!status.ok()) {
      return absl::Status(status.code(), absl::StrCat("making the commit of step ", record_.step,
                                                      " durable: ", status.message()));
    }
  }
  return RewriteTakenBack();
}

// A commit that was taken back (store_back.cc) must stay so: where the sync of that failed, a power cut could
// bring its record back over tiles that others wrote since. What stands in the other place and is no record
// is written once more.
absl::Status Store::RewriteTakenBack() {
  const auto other = static_cast<uint32_t>((record_.sequence + 1) % kRecordPlaces);
  AlignedBuffer sector(kSectorBytes);
  bool rewritten = false;
  for (uint32_t copy = 0; copy < kRecordCopies; ++copy) {
    const uint64_t at = geometry_.record_offset(other, copy);
    // An unreadable one is no record either.
    if (!ReadFully(engine_, *files_[0], at, sector.span()).ok() || StartsLikeRecord(sector.span())) continue;
    if (std::all_of(sector.span().begin(), sector.span().end(),
                    [](std::byte b) { return b == std::byte{0}; }))
      continue;
    RETURN_IF_ERROR(WriteFully(engine_, *files_[0], at, sector.span()));
    rewritten = true;
  }
  return rewritten ? SyncFully(engine_, *files_[0]) : absl::OkStatus();
}

void Store::SizeTables() {
  record_.tiles.resize(geometry_.tiles());
  record_.checksums.resize(geometry_.total_segments());
  // Room for the longest payload from the start, so that no commit allocates.
  record_.payload.reserve(shape_.payload_capacity);
  next_.tiles.resize(geometry_.tiles());
  next_.checksums.resize(geometry_.total_segments());
  next_.payload.reserve(shape_.payload_capacity);
  written_.resize(geometry_.tiles());
  written_checksums_.resize(geometry_.total_segments());
  record_buffer_ = AlignedBuffer(geometry_.record_capacity());
}

}  // namespace penstock::swap
