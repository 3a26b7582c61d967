// A file that is read and written directly, past the page cache, by the engine (aio/engine.h).
//
//   FileOptions options;
//   options.path = "/nvme/state/tiles.0";
//   options.create = true;
//   options.size = 4 * kGiB;               // reserved now, so that a full disk is found now
//   absl::StatusOr<std::unique_ptr<File>> file = File::Open(options);
//
// Made for files that are preallocated, written once in full and from then on overwritten in place:
// overwriting written blocks is the fastest thing a file system does (no extent allocation, no conversion of
// unwritten extents).
//
// Opened with O_DIRECT, O_CLOEXEC and O_NOFOLLOW, mode 0600. A file on a simulated disk (FileOptions::sim)
// lives in that disk's memory and has no descriptor. Threads: const members and SyncData are thread-safe;
// Preallocate and Resize are not to run together with requests on the range that they change. Ownership: a
// File outlives its requests.
#ifndef PENSTOCK_AIO_FILE_H_
#define PENSTOCK_AIO_FILE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/directory.h"
#include "base/process_mark.h"

namespace penstock::aio {

class FileUser;
class DeviceQueue;
class SimDisk;
struct SimFile;

struct FileOptions {
  std::string path;
  bool create = false;     // create if missing (the directory must exist); fsyncs nothing: see SyncDirectory
  bool exclusive = false;  // with create: kAlreadyExists if it is there
  bool truncate = false;   // cut to 0 bytes on opening
  // A new file in the directory of `path` that never has a name there: `path` is only what it is called in
  // errors. It goes with its File, however the process ends. Alone, or with size and direct.
  bool nameless = false;
  // Not -1: the file that this descriptor has open, whatever its name is by now. It is opened anew, so the
  // descriptor, its position and its flags remain its owner's; it must have been opened for what is asked
  // (EBADF). `path` is only what the file is called in errors. Alone, or with read_only, size and direct.
  int descriptor = -1;
  bool read_only = false;
  uint64_t size = 0;   // not 0: Preallocate(size) as part of opening
  bool direct = true;  // O_DIRECT; false reads and writes through the page cache (small metadata, tests)
  // A file system that takes O_DIRECT without keeping its promise (tmpfs) or has none is refused, since
  // "direct" there means the page cache and measurements mean nothing. true: use it all the same, through the
  // cache where need be.
  bool allow_unaligned_file_system = false;
  // Not 0: overrides what the kernel reports (some drives misreport). A power of two.
  uint32_t offset_alignment = 0;
  uint32_t memory_alignment = 0;
  SimDisk* sim = nullptr;  // open on this simulated disk instead of a real one; must outlive the file
};

// What direct I/O on a file demands. Requests need not care: the engine brings ragged ones into shape, at a
// cost.
struct Alignment {
  uint32_t memory = 4096;  // of addresses
  uint32_t offset = 4096;  // of offsets and lengths; at least kSectorBytes, but 1 if not direct
  std::string source;      // "statx", "block device", "default", "options", "simulated", "buffered"
};

class File {
 public:
  // Errors carry path and errno: kNotFound, kPermissionDenied, kAlreadyExists, kResourceExhausted (no space,
  // no descriptors), kFailedPrecondition (no O_DIRECT here, a symbolic link, not a regular file or block
  // device).
  static absl::StatusOr<std::unique_ptr<File>> Open(const FileOptions& options);
  // Closes. Requests on the file must be finished. A descriptor registered with an engine is taken back
  // first, so that a lock on it is gone when this returns.
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd() const { return fd_; }  // -1 on a simulated disk
  const std::string& path() const { return path_; }
  const Alignment& alignment() const { return alignment_; }
  bool read_only() const { return read_only_; }
  bool direct() const { return direct_; }
  uint64_t device() const { return device_; }  // st_dev: files of one device share a queue in the engine
  const std::string& device_name() const {
    return device_name_;
  }  // "vda", "nvme0n1p2", "0:45" where it has no name
  SimDisk* sim() const { return sim_; }
  // On a simulated disk: the file there.
  SimFile* sim_file() const { return sim_file_.get(); }

  // The file's size now (one fstat; a block device's capacity).
  absl::StatusOr<uint64_t> Size() const;

  // Reserves blocks for [0, bytes) and makes the file at least that long; existing bytes stay.
  // kResourceExhausted says how much was asked, is free, and is missing, and leaves the file as long as it
  // was. File systems without fallocate are given a sparse file instead (kUnimplemented is not returned:
  // preallocated() says whether it held).
  absl::Status Preallocate(uint64_t bytes);
  bool preallocated() const { return preallocated_; }

  // Sets the length; growing leaves a hole.
  absl::Status Resize(uint64_t bytes);

  // fdatasync: all completed writes and the metadata needed to read them back survive a power cut. Blocking;
  // a Request of kind kSync does the same without blocking the caller.
  absl::Status SyncData() const;

  // flock, exclusive, on the very description that the engine transfers through: after a SIGKILL the kernel
  // lets go of it only when the writes still in flight are done. Retries for `patience_ms`;
  // kFailedPrecondition when another still holds it then. `shared`: with other readers.
  absl::Status Lock(int patience_ms = 10'000, bool shared = false);

 private:
  friend class DeviceQueue;

  File() = default;
  absl::Status OpenOnDisk(const FileOptions& options);
  absl::Status OpenSimulated(const FileOptions& options);

  const ProcessMark made_in_;
  std::string path_;
  int fd_ = -1;
  bool read_only_ = false;
  bool direct_ = true;
  bool preallocated_ = false;
  bool locked_ = false;
  bool is_block_device_ = false;
  uint64_t device_ = 0;
  std::string device_name_;
  Alignment alignment_;
  SimDisk* sim_ = nullptr;
  std::shared_ptr<SimFile> sim_file_;

  // The device queues that keep something about this file and must let go before it closes.
  std::mutex users_mutex_;
  std::vector<FileUser*> users_;
};

using penstock::SyncDirectory;

// The nearest existing directory at or above `directory`.
std::string NearestExisting(const std::string& directory);

// The block device below a path: "vda", "nvme0n1p2"; "0:45" where it has no name.
absl::StatusOr<std::string> DeviceOfPath(const std::string& path);

// Free bytes on the file system of `path`, and its type ("ext4", "xfs", "btrfs", "tmpfs"). What it reserves
// for root is not free, for root neither: it keeps a machine alive whose drive is full, and root in a
// container has no right to it.
struct FileSystemSpace {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  std::string type;
  bool copy_on_write = false;  // overwriting in place buys nothing here (btrfs, zfs, bcachefs)
};
absl::StatusOr<FileSystemSpace> QueryFileSystem(const std::string& path);

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_FILE_H_
