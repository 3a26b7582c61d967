#include "aio/file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "aio/bytes.h"
#include "aio/file_user.h"
#include "aio/io_error.h"
#include "aio/sim_disk.h"
#include "base/file_lock.h"
#include "base/status_macros.h"

namespace penstock::aio {
namespace {

absl::Status Failure(std::string_view op, std::string_view path, int error) {
  return MakeIoError({.op = op, .path = path, .error = error});
}

struct DirectReport {
  bool known = false;  // the kernel answered; 0 in `offset` then means that direct I/O is not possible
  uint32_t memory = 0;
  uint32_t offset = 0;
};

DirectReport AskDirectAlignment(int fd) {
  struct statx answer {};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) != 0) return {};
  if ((answer.stx_mask & STATX_DIOALIGN) == 0) return {};
  return {true, answer.stx_dio_mem_align, answer.stx_dio_offset_align};
}

std::string FileSystemName(uint64_t magic) {
  switch (magic) {
    case EXT4_SUPER_MAGIC:
      return "ext4";  // ext2 and ext3 share the number
    case 0x58465342:
      return "xfs";
    case BTRFS_SUPER_MAGIC:
      return "btrfs";
    case 0x2fc12fc1:
      return "zfs";
    case 0xca451a4e:
      return "bcachefs";
    case F2FS_SUPER_MAGIC:
      return "f2fs";
    case TMPFS_MAGIC:
      return "tmpfs";
    case RAMFS_MAGIC:
      return "ramfs";
    case OVERLAYFS_SUPER_MAGIC:
      return "overlayfs";
    case NFS_SUPER_MAGIC:
      return "nfs";
    case 0x65735546:
      return "fuse";
    default:
      return absl::StrCat("type 0x", absl::Hex(magic));
  }
}

std::string DeviceName(dev_t device) {
  std::string number = absl::StrCat(major(device), ":", minor(device));
  char target[PATH_MAX];
  const ssize_t length =
      readlink(absl::StrCat("/sys/dev/block/", number).c_str(), target, sizeof(target) - 1);
  if (length <= 0) return number;
  const std::string_view path(target, static_cast<size_t>(length));
  return std::string(path.substr(path.rfind('/') + 1));
}

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

FileSystemSpace SpaceOf(const struct statfs& info) {
  FileSystemSpace space;
  // Blocks are counted in fragments where there are such: on FUSE these are smaller.
  const uint64_t block = static_cast<uint64_t>(info.f_frsize != 0 ? info.f_frsize : info.f_bsize);
  space.free_bytes = static_cast<uint64_t>(info.f_bavail) * block;
  space.total_bytes = static_cast<uint64_t>(info.f_blocks) * block;
  space.type = FileSystemName(static_cast<uint64_t>(info.f_type) & 0xffffffff);
  space.copy_on_write = space.type == "btrfs" || space.type == "zfs" || space.type == "bcachefs";
  return space;
}

absl::StatusOr<FileSystemSpace> SpaceAround(int fd, const std::string& path) {
  struct statfs info {};
  if (fstatfs(fd, &info) != 0) return Failure("fstatfs", path, errno);
  return SpaceOf(info);
}

std::string_view KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISLNK(mode)) return "a symbolic link, which is not followed";
  return "of an unknown kind";
}

// The file of a descriptor once more, with flags of its own. -1 and errno where it fails.
int OpenAgain(int descriptor, int flags) {
  const int now = fcntl(descriptor, F_GETFL);
  if (now < 0) return -1;
  const bool reads = (flags & O_ACCMODE) == O_RDONLY;
  if ((now & O_PATH) != 0 || (now & O_ACCMODE) == (reads ? O_WRONLY : O_RDONLY)) {
    errno = EBADF;
    return -1;
  }
  return open(absl::StrCat("/proc/self/fd/", descriptor).c_str(), flags);
}

bool IsFile(mode_t mode) { return S_ISREG(mode) || S_ISBLK(mode); }

absl::Status NoFile(const std::string& path, mode_t mode) {
  return absl::FailedPreconditionError(
      absl::StrCat("open ", path, ": it is ", std::string(KindOf(mode)),
                   ", and no regular file or block device; choose another path"));
}

// -1 and errno where it fails.
int OpenNameless(const std::string& path, int flags) {
  const int fd = open(DirectoryOf(path).c_str(), flags | O_TMPFILE, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return fd;
  // A file system that cannot: a name that is nobody's, for a moment.
  std::string name = absl::StrCat(path, ".XXXXXX");
  const int named = mkostemp(name.data(), flags & ~O_ACCMODE);
  if (named < 0 || unlink(name.c_str()) == 0) return named;
  const int error = errno;
  close(named);
  errno = error;
  return -1;
}

}  // namespace

absl::StatusOr<FileSystemSpace> QueryFileSystem(const std::string& path) {
  struct statfs info {};
  if (statfs(path.c_str(), &info) != 0) return Failure("statfs", path, errno);
  return SpaceOf(info);
}

std::string NearestExisting(const std::string& directory) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::absolute(directory, error);
  while (!path.empty() && !std::filesystem::is_directory(path, error) && path != path.root_path()) {
    path = path.parent_path();
  }
  return path.string();
}

absl::StatusOr<std::string> DeviceOfPath(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return Failure("stat", path, errno);
  return DeviceName(S_ISBLK(info.st_mode) ? info.st_rdev : info.st_dev);
}

absl::StatusOr<std::unique_ptr<File>> File::Open(const FileOptions& options) {
  if (options.path.empty()) return absl::InvalidArgumentError("open: no path given");
  for (const uint32_t alignment : {options.offset_alignment, options.memory_alignment}) {
    if (alignment != 0 && !IsPowerOfTwo(alignment)) {
      return absl::InvalidArgumentError(
          absl::StrCat("open ", options.path, ": alignment ", alignment, " is not a power of two"));
    }
  }
  std::unique_ptr<File> file(new File());
  file->path_ = options.path;
  file->read_only_ = options.read_only;
  file->direct_ = options.direct;
  bool created = false;
  if (options.create && options.sim == nullptr) {
    struct stat info {};
    created = lstat(options.path.c_str(), &info) != 0 && errno == ENOENT;
  }
  absl::Status status = options.sim != nullptr ? file->OpenSimulated(options) : file->OpenOnDisk(options);
  if (status.ok()) {
    if (options.offset_alignment != 0) {
      file->alignment_.offset = std::max<uint32_t>(options.offset_alignment, kSectorBytes);
      file->alignment_.source = "options";
    }
    if (options.memory_alignment != 0) {
      file->alignment_.memory = options.memory_alignment;
      file->alignment_.source = "options";
    }
    if (options.size != 0) status = file->Preallocate(options.size);
  }
  if (status.ok()) return file;
  if (created && file->fd_ >= 0) unlink(options.path.c_str());  // leaves nothing behind that was not there
  return status;
}

absl::Status File::OpenOnDisk(const FileOptions& options) {
  // Not to wait for the other end of a FIFO; taken back below, where it would reach transfers.
  int flags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (options.read_only ? O_RDONLY : O_RDWR);
  if (options.create) flags |= O_CREAT;
  if (options.create && options.exclusive) flags |= O_EXCL;
  if (options.truncate) flags |= O_TRUNC;
  const auto open_with = [&](int direct) {
    int fd = -1;
    do {
      if (options.descriptor != -1) {
        fd = OpenAgain(options.descriptor, (flags & ~(O_NOFOLLOW | O_CREAT | O_EXCL | O_TRUNC)) | direct);
      } else {
        fd = options.nameless ? OpenNameless(path_, (flags & ~O_NOFOLLOW) | direct)
                              : open(path_.c_str(), flags | direct, 0600);
      }
    } while (fd < 0 && errno == EINTR);
    return fd;
  };
  fd_ = open_with(direct_ ? O_DIRECT : 0);
  struct stat info {};
  if (const int error = errno; fd_ < 0 && error != EEXIST && !options.nameless && options.descriptor == -1) {
    // What an open of something else fails with tells little.
    if (lstat(path_.c_str(), &info) == 0 && !IsFile(info.st_mode)) return NoFile(path_, info.st_mode);
    errno = error;
  }
  if (fd_ < 0 && errno == EINVAL && direct_) {
    const absl::StatusOr<FileSystemSpace> where = QueryFileSystem(DirectoryOf(path_));
    if (!options.allow_unaligned_file_system) {
      return absl::FailedPreconditionError(
          absl::StrCat("open ", path_, ": ", where.ok() ? where->type : "the file system",
                       " has no direct I/O (O_DIRECT refused); choose a directory on a local disk"));
    }
    direct_ = false;
    fd_ = open_with(0);
  }
  if (fd_ < 0) return Failure("open", path_, errno);

  if (fstat(fd_, &info) != 0) return Failure("fstat", path_, errno);
  if (!IsFile(info.st_mode)) return NoFile(path_, info.st_mode);
  is_block_device_ = S_ISBLK(info.st_mode);
  const int now = fcntl(fd_, F_GETFL);
  if (now < 0 || fcntl(fd_, F_SETFL, now & ~O_NONBLOCK) != 0) return Failure("fcntl", path_, errno);
  device_ = is_block_device_ ? info.st_rdev : info.st_dev;
  device_name_ = DeviceName(device_);
  if (!direct_) {
    alignment_ = {1, 1, "buffered"};
    return absl::OkStatus();
  }

  const DirectReport report = AskDirectAlignment(fd_);
  if (report.known && report.offset != 0) {
    alignment_ = {report.memory, std::max<uint32_t>(report.offset, kSectorBytes), "statx"};
    return absl::OkStatus();
  }
  const absl::StatusOr<FileSystemSpace> where = SpaceAround(fd_, path_);
  const std::string type = where.ok() ? where->type : "the file system";
  const bool in_memory = type == "tmpfs" || type == "ramfs";
  if ((report.known || in_memory) && !options.allow_unaligned_file_system) {
    return absl::FailedPreconditionError(absl::StrCat(
        "open ", path_, ": ", type, in_memory ? " keeps files in memory" : " reports no direct I/O",
        ", so O_DIRECT means nothing here; choose a directory on a local disk"));
  }
  int sector = 0;
  if (is_block_device_ && ioctl(fd_, BLKSSZGET, &sector) == 0 && sector > 0) {
    alignment_ = {static_cast<uint32_t>(sector),
                  std::max<uint32_t>(static_cast<uint32_t>(sector), kSectorBytes), "block device"};
  } else {
    alignment_ = {static_cast<uint32_t>(kSectorBytes), static_cast<uint32_t>(kSectorBytes), "default"};
  }
  return absl::OkStatus();
}

absl::Status File::OpenSimulated(const FileOptions& options) {
  SimDisk* const disk = options.sim->DiskOf(path_);
  ASSIGN_OR_RETURN(std::shared_ptr<SimFile> file,
                   disk->OpenFile(path_, options.create || options.nameless, options.exclusive,
                                  options.truncate || options.nameless));
  sim_ = disk;
  sim_file_ = std::move(file);
  device_ = reinterpret_cast<uint64_t>(sim_);
  device_name_ = sim_->options().name;
  alignment_ = {sim_->options().memory_alignment, sim_->options().offset_alignment, "simulated"};
  return absl::OkStatus();
}

File::~File() {
  if (!made_in_.here()) {
    // The child's own descriptor goes, and with its last one the parent's lock. The device queues are not
    // here.
    if (fd_ >= 0) close(fd_);
    return;
  }
  std::vector<FileUser*> users;
  {
    const std::lock_guard<std::mutex> lock(users_mutex_);
    users.swap(users_);
  }
  for (FileUser* user : users) user->ForgetFile(*this);
  if (sim_ != nullptr) sim_->Unlock(*sim_file_, this);
  // A forked child that has a copy of the descriptor does not keep the lock.
  if (locked_) UnlockFile(fd_);
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<uint64_t> File::Size() const {
  if (sim_ != nullptr) return sim_->FileBytes(*sim_file_);
  if (is_block_device_) {
    uint64_t bytes = 0;
    if (ioctl(fd_, BLKGETSIZE64, &bytes) != 0) return Failure("BLKGETSIZE64", path_, errno);
    return bytes;
  }
  struct stat info {};
  if (fstat(fd_, &info) != 0) return Failure("fstat", path_, errno);
  return static_cast<uint64_t>(info.st_size);
}

absl::Status File::Preallocate(uint64_t bytes) {
  RETURN_IF_ERROR(made_in_.Check(path_));
  ASSIGN_OR_RETURN(const uint64_t now, Size());
  if (is_block_device_) {
    if (bytes <= now) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat("preallocate ", path_, ": ", FormatBytes(bytes),
                                                     " asked for, the device has ", FormatBytes(now)));
  }
  if (sim_ != nullptr) {
    preallocated_ = true;
    return bytes > now ? sim_->Resize(*sim_file_, bytes) : absl::OkStatus();
  }
  if (bytes == 0) return absl::OkStatus();
  // Asked beforehand, because an fallocate that fails has by then taken all there was from everyone else.
  struct stat info {};
  if (fstat(fd_, &info) != 0) return Failure("fstat", path_, errno);
  ASSIGN_OR_RETURN(const FileSystemSpace space, SpaceAround(fd_, path_));
  const uint64_t reserved = std::min(bytes, static_cast<uint64_t>(info.st_blocks) * 512);
  const uint64_t wanted = bytes - reserved;
  int result = -1;
  int error = ENOSPC;
  if (wanted <= space.free_bytes) {
    do {
      result = fallocate(fd_, 0, 0, static_cast<off_t>(bytes));
      error = errno;
    } while (result != 0 && error == EINTR);
    if (result == 0) {
      preallocated_ = true;
      return absl::OkStatus();
    }
    if (error == EOPNOTSUPP || error == ENOSYS) return bytes > now ? Resize(bytes) : absl::OkStatus();
    // It may have reserved a part: give that back.
    if (ftruncate(fd_, static_cast<off_t>(now)) != 0) return Failure("ftruncate", path_, errno);
  }
  if (error == ENOSPC) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "preallocate ", path_, " (", device_name_, "): ", FormatBytes(bytes), " asked for, ",
        FormatBytes(space.free_bytes), " free",
        wanted > space.free_bytes ? absl::StrCat(", ", FormatBytes(wanted - space.free_bytes), " missing")
                                  : "",
        ": ", ErrnoText(ENOSPC), "; free space on this file system or choose another directory"));
  }
  return MakeIoError(
      {.op = "preallocate", .path = path_, .device = device_name_, .bytes = bytes, .error = error});
}

absl::Status File::Resize(uint64_t bytes) {
  RETURN_IF_ERROR(made_in_.Check(path_));
  if (sim_ != nullptr) return sim_->Resize(*sim_file_, bytes);
  int result = 0;
  do {
    result = ftruncate(fd_, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0 ? absl::OkStatus() : Failure("ftruncate", path_, errno);
}

absl::Status File::SyncData() const {
  if (sim_ != nullptr) return sim_->Sync(*sim_file_);
  int result = 0;
  do {
    result = fdatasync(fd_);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? absl::OkStatus() : Failure("fdatasync", path_, errno);
}

absl::Status File::Lock(int patience_ms, bool shared) {
  RETURN_IF_ERROR(made_in_.Check(path_));
  if (sim_ != nullptr) return sim_->Lock(*sim_file_, this);
  ASSIGN_OR_RETURN(locked_, TryLockFile(fd_, path_, shared ? LockMode::kShared : LockMode::kExclusive,
                                        std::chrono::milliseconds(patience_ms)));
  if (locked_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("lock ", path_, ": held by another process after ", patience_ms,
                   " ms of trying; let that one end, or use another directory"));
}

}  // namespace penstock::aio
