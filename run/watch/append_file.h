// A file that only grows at its end, and is cut back when a run goes on from further back.
#ifndef PENSTOCK_RUN_WATCH_APPEND_FILE_H_
#define PENSTOCK_RUN_WATCH_APPEND_FILE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::run {

// Errors name `what` (the key), the path, the operation and errno.
class AppendFile {
 public:
  // Makes it where it is not there. It is locked, where the file system can do that, until this is destroyed;
  // kFailedPrecondition: another has it.
  static absl::StatusOr<std::unique_ptr<AppendFile>> Open(std::string what, std::string path);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  // Whole, by one write where the kernel takes it so.
  absl::Status Append(std::string_view bytes);
  // Leaves the first `bytes`.
  absl::Status Cut(int64_t bytes) const;
  absl::StatusOr<int64_t> Size() const;

  // Reads from the beginning, a piece at a time. `take` is shown what comes next and says how many bytes of
  // that make one unit: kMore, it needs to see more, up to kMostUnitBytes; kStop, the rest is not wanted.
  // Returns the bytes of all units; what the file's end leaves without a unit is none.
  static constexpr int64_t kMostUnitBytes = 1 << 20;
  static constexpr int64_t kMore = 0, kStop = -1;
  absl::StatusOr<int64_t> Walk(const std::function<absl::StatusOr<int64_t>(std::string_view)>& take) const;

 private:
  AppendFile(std::string what, std::string path, int fd);
  absl::Status Failed(const char* op) const;

  const std::string what_, path_;
  const int fd_;
};

// Makes `path` and what is above it. kInvalidArgument where that cannot be.
absl::Status MakeDirectory(const std::string& what, const std::string& path);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_APPEND_FILE_H_
