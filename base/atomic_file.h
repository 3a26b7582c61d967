// A file that is replaced whole: a reader sees the old content or the new one, and so does the next start
// after a kill, a power cut or a full disk.
#ifndef PENSTOCK_BASE_ATOMIC_FILE_H_
#define PENSTOCK_BASE_ATOMIC_FILE_H_

#include <sys/types.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/process_mark.h"

namespace penstock {

struct AtomicFileOptions {
  mode_t mode = 0666;     // of a new file, less the umask
  bool keep_mode = true;  // a regular file that is replaced hands its mode on
  bool replace = true;    // false: Commit fails with kAlreadyExists where `path` names something
  bool durable = true;    // fsync of the file before it gets its name, and of its directory afterwards
};

// A new file in the directory of its destination. It has no name until Commit() where the file system can do
// that (O_TMPFILE), so that a kill leaves nothing; elsewhere a random one that nothing else has,
// ".NAME.<16 hex digits>.new", of a file that is locked for as long as somebody writes it. Commit() gives it
// its name in one step. Without a Commit() that succeeded, the destructor removes it, and the destination is
// as it was. Symbolic links are not followed: one at the destination is itself replaced.
//
// A kill between the two calls that give it its name leaves the random one. The next Commit() of a file of
// that name removes it, and never one that a living process writes: that one is locked. Where files cannot be
// locked it stays.
//
// Threads: one. A forked child's copy removes nothing. Errors name operation, path and errno;
// kResourceExhausted: the disk is full; kFailedPrecondition: `path` is a device, a pipe or a socket.
class AtomicFile {
 public:
  static absl::StatusOr<AtomicFile> Create(const std::string& path, const AtomicFileOptions& options = {});
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  // Open for writing until Commit(); owned by this object.
  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  // A path at which this process finds the new content until Commit().
  std::string temporary_path() const;

  // Appends all of `bytes`.
  absl::Status Write(std::string_view bytes);

  // Makes what was written durable. Commit() does so too: this is for files that are committed later.
  absl::Status Sync() const;

  // Syncs and closes the file, gives it its name, and syncs the directory. Must be called once. An error
  // before the name was given leaves the destination as it was. An error of the last sync says so: the new
  // content stands under its name, and a power cut may still bring the old one back.
  absl::Status Commit();

  // Commits files of one directory that only mean something together: a reader that begins at one of
  // `keys`, at any moment and after a kill or a power cut at any moment, finds all the old files, all the new
  // ones, or no key. The last of `files` is the one to begin with, and its path one of `keys`; the other keys
  // are what an older state may begin with, and are gone afterwards.
  //
  // No file gets its name before all of them are durable under temporary names: a full disk leaves everything
  // as it was. Then the keys are moved away, the files renamed, the last one last, and the old files removed.
  // An error before the last one has its name leaves everything as it was, or says which old file could not
  // be given its name again. A kill in that moment leaves the old files under names that begin with a dot,
  // which the next that succeeds removes.
  //
  // A file of at most kSmallFileBytes whose content stands under its path already is left out. `superseded`
  // returns paths of the old state that the new one does not have: it is called when no other process can
  // change the old state any more, and what it returns is removed when the new state is durable.
  //
  // Of several processes that do this in one directory at once, one does it after the other: the directory is
  // locked from the first change to the last. Where the file system cannot lock a directory (NFS), that is
  // left to the callers. kUnavailable: another process has held the lock for a minute.
  using Superseded = std::function<std::vector<std::string>()>;
  static absl::Status CommitTogether(std::vector<AtomicFile> files, const std::vector<std::string>& keys,
                                     const Superseded& superseded = nullptr);

 private:
  AtomicFile(std::string path, const AtomicFileOptions& options);
  // Durable, all errors of its closing told, and under a temporary name.
  absl::Status Settle();
  // Its bytes are those of the small file that stands under its path.
  absl::StatusOr<bool> Stands() const;
  // Under its own name, which is not durable yet.
  absl::Status Move();

  ProcessMark made_in_;
  std::string path_;
  std::string temporary_;  // empty: it has no name, or its own
  AtomicFileOptions options_;
  int fd_ = -1;
};

// Puts `text` in place of what `path` holds, as above.
absl::Status ReplaceFile(const std::string& path, std::string_view text,
                         const AtomicFileOptions& options = {});

// Makes `path` a symbolic link to `target`, durably and in one step, in place of the link or file that it
// was. kNotFound: there is no such directory.
absl::Status ReplaceLink(const std::string& target, const std::string& path);

// Puts a copy of the regular file `from` (links followed) at `to`, as above. kNotFound: there is no `from`.
absl::Status CopyFile(const std::string& from, const std::string& to, const AtomicFileOptions& options = {});

// ".NAME.<16 hex digits>" + `suffix` beside `path`: a name that nobody can guess or already has.
std::string RandomNameBeside(const std::string& path, std::string_view suffix);
// Returns NAME of such an entry of a directory, at most its first 200 bytes; empty: it is none.
std::string_view NameInTemporary(std::string_view entry, std::string_view suffix);

}  // namespace penstock

#endif  // PENSTOCK_BASE_ATOMIC_FILE_H_
