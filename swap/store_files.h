// The store's files as files: making directories, telling ours from others', locking, whole reads and writes
// of metadata. Internal to swap/; errors as in swap/store.h.
#ifndef PENSTOCK_SWAP_STORE_FILES_H_
#define PENSTOCK_SWAP_STORE_FILES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "swap/aligned_buffer.h"
#include "swap/format.h"

namespace penstock::swap {

// "<directory>/penstock.store".
std::string StorePath(const std::string& directory);

// A symbolic link is followed only if it belongs to this user or to root: in a directory that others may
// write to, someone may have planted it. Missing directories are fine here.
absl::Status CheckDirectory(const std::string& directory);
// Makes what is missing, mode 0700, and syncs the parent of each. `made` gets what was missing, in order.
absl::Status MakeDirectories(const std::string& directory, std::vector<std::string>* made = nullptr);
absl::Status Rename(const std::string& from, const std::string& to);
// kInvalidArgument if two of them are the same directory.
absl::Status CheckDistinct(const std::vector<std::string>& directories);

// What stands at a path where a store file would be.
enum class FileKind : uint8_t {
  kAbsent,
  kUnfinished,  // empty or without a superblock: a creation that was cut short
  kStore,       // a superblock, whole or damaged
  kForeign,     // something else, or a link
};

// A store file opened for looking at it or removing it, through the page cache. Closes (and unlocks) when
// destroyed.
class PlainFile {
 public:
  PlainFile() = default;
  PlainFile(PlainFile&& other) noexcept;
  PlainFile& operator=(PlainFile&& other) noexcept;
  ~PlainFile();

  // kNotFound if there is none; kFailedPrecondition for links and what is no regular file.
  static absl::StatusOr<PlainFile> Open(const std::string& path);
  const std::string& path() const { return path_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t allocated_bytes() const { return allocated_bytes_; }
  uint64_t device() const { return device_; }
  // Returns whether it was modified after `until_ns`, in nanoseconds since the epoch, when it was opened. A
  // time that has yet to come says nothing: no.
  bool ModifiedAfter(std::optional<int64_t> until_ns) const;
  absl::StatusOr<std::vector<std::byte>> Read(uint64_t offset,
                                              uint64_t bytes) const;  // short at the end of the file
  // flock, shared or exclusive; false if another holds it after `patience_ms`.
  absl::StatusOr<bool> TryLock(bool exclusive, int patience_ms) const;
  absl::StatusOr<FileKind> Classify() const;
  // Cuts the file to `bytes`.
  absl::Status Cut(uint64_t bytes) const;
  // The file has this name, now. After a lock was waited for, its path may be another file's: a run that was
  // started at the same time may have replaced it, or somebody may have moved it away.
  absl::StatusOr<bool> IsAt(const std::string& path) const;
  uint64_t names() const;  // how many it has now
  // No other descriptor of it is open anywhere. In doubt: there is. Of a file that has no name any more; of
  // another, a process that opens it at this moment may be asked to try again.
  bool IsOpenHereOnly() const;

 private:
  std::string path_;
  int fd_ = -1;
  uint64_t bytes_ = 0;
  uint64_t allocated_bytes_ = 0;
  uint64_t device_ = 0;
  int64_t modified_ns_ = 0;
};

// The path of a store file that was locked is another file's by now.
absl::Status Replaced(const std::string& path);

// The store file of an old run, made by this program and locked, so that nobody else removes it or goes on
// from it. Not there: no value. kFailedPrecondition: another has it after `patience_ms`, or the file is of
// another program.
absl::StatusOr<std::optional<PlainFile>> TakeOldFile(const std::string& path, int patience_ms);

// One blocking transfer through the engine.
absl::Status ReadFully(aio::Engine& engine, aio::File& file, uint64_t offset, std::span<std::byte> bytes);
absl::Status WriteFully(aio::Engine& engine, aio::File& file, uint64_t offset,
                        std::span<const std::byte> bytes);
absl::Status SyncFully(aio::Engine& engine, aio::File& file);

// What a creation writes first lies in here, behind the headers: with nothing but zeros in it, what stands
// further behind is a run's.
inline constexpr uint64_t kBeginOfFile = uint64_t{1} << 20;

// Of a file without superblock headers, by what stands behind them: kNotFound: a creation that was cut short;
// kDataLoss: a run whose headers were overwritten. `read` is short at the end of the file.
using ReadBytes = std::function<absl::StatusOr<std::vector<std::byte>>(uint64_t offset, uint64_t bytes)>;
absl::Status WithoutHeaders(const ReadBytes& read);

// The superblock of an opened, locked file. kNotFound: there is none (a creation that was cut short).
absl::StatusOr<DecodedSuperblock> ReadSuperblock(aio::Engine& engine, aio::File& file);

// The same of one that is only looked at.
absl::StatusOr<DecodedSuperblock> LoadSuperblock(const PlainFile& file);

// Both places of the commit record; the newest that is whole.
struct FoundRecord {
  Record record;                       // sequence 0: none is whole
  std::vector<std::string> damage;     // one line for each copy that should be whole and is not
  std::vector<std::string> cut_short;  // likewise for a place whose commit did not come to its end
  // Nothing stands in the place of the second commit: whatever is damaged, it can only be the first.
  bool only_first_place = false;
};
FoundRecord NewestRecord(const Geometry& geometry, const Uuid& uuid,
                         std::span<const std::vector<std::byte>> copies);  // place * kRecordCopies + copy
// The same for the commit of number `sequence`, where the newest is another: the one before it, if it is
// that.
FoundRecord RecordOfCommit(const Geometry& geometry, const Uuid& uuid,
                           std::span<const std::vector<std::byte>> copies, std::optional<uint64_t> sequence);

// Of a store's first file. `sequence`: as RecordOfCommit has it.
absl::StatusOr<FoundRecord> LoadRecord(const PlainFile& file, const Geometry& geometry, const Uuid& uuid,
                                       std::optional<uint64_t> sequence = std::nullopt);

// A store file has no superblock, though the run's directory 0 has: `found` says so.
std::string LostSuperblockText(const std::string& found);

// What is left of a run of one version that was ended between two commits, for people.
std::string OverwrittenText(uint64_t step);

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_STORE_FILES_H_
