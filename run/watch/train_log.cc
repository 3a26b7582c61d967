#include "run/watch/train_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/file_lock.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/lines.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "zero/config/json_field.h"
#include "zero/engine/report.h"

namespace penstock::run {
namespace {

constexpr const char* kWayOut = ": give another file, or move that one away";

absl::Status Failed(const char* op, const std::string& path) {
  return StreamError(absl::StrCat("`log` ", path, ": ", op));
}

absl::Status Foreign(const std::string& path, const std::string& what) {
  return absl::FailedPreconditionError(absl::StrCat("`log` ", path, " ", what, kWayOut));
}

// A line as Append writes it; `step` is -1 where it is none.
struct LogLine {
  nlohmann::json json;
  int64_t step = -1;
  std::string run_id;
  bool evaluates = false;
};

LogLine ParseLine(std::string_view line) {
  LogLine entry;
  entry.json = ParseJson(line, "").value_or(nlohmann::json());
  if (!entry.json.is_object()) return entry;
  entry.step = zero::JsonField<int64_t>(entry.json, "step").value_or(-1);
  entry.run_id = zero::JsonField<std::string>(entry.json, "run_id").value_or("");
  entry.evaluates = entry.json.contains("windows");
  return entry;
}

// ForEachLine of base/lines.h, whose errors say that it is the log.
template <typename Take>
absl::StatusOr<off_t> ForEachLogLine(int fd, const std::string& path, Take&& take) {
  const absl::StatusOr<uint64_t> bytes = ForEachLine(fd, path, std::forward<Take>(take));
  if (bytes.ok()) return static_cast<off_t>(*bytes);
  return absl::Status(bytes.status().code(),
                      absl::StrCat("`log`: ", bytes.status().message(), ": nothing of it was changed"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TrainLog>> TrainLog::Open(const std::string& path, const LogOwner& owner) {
  ASSIGN_OR_RETURN(const PathKind kind, KindOf(path));
  int fd = -1;
  if (kind == PathKind::kOther) {
    // Opened for reading too, a pipe would have this process for its reader, and would take lines until it is
    // full.
    ASSIGN_OR_RETURN(fd, OpenSpecialFile("`log`", path));
  } else {
    fd = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
    if (fd < 0) return Failed("open", path);
  }
  std::unique_ptr<TrainLog> log(new TrainLog(path, fd, owner));
  // A run that has a predecessor waits in Begin, by when that one is known to have ended.
  if (!owner.resumes && owner.replaces.empty()) RETURN_IF_ERROR(log->Lock(std::chrono::milliseconds(0)));
  RETURN_IF_ERROR(log->Look().status());
  return log;
}

absl::Status TrainLog::Lock(std::chrono::milliseconds patience) {
  struct stat info {};
  if (fstat(fd_, &info) != 0) return Failed("look at", path_);
  if (!S_ISREG(info.st_mode)) return absl::OkStatus();  // several may write to a pipe or a device
  const absl::StatusOr<bool> locked = TryLockFile(fd_, path_, LockMode::kExclusive, patience);
  if (CannotLock(locked.status())) return absl::OkStatus();
  RETURN_IF_ERROR(locked.status());
  locked_ = *locked;
  return locked_ ? absl::OkStatus()
                 : absl::FailedPreconditionError(
                       absl::StrCat("`log` ", path_, " is written by another training: give another file"));
}

absl::Status TrainLog::Begin() {
  // A process that was killed just now may not be gone yet.
  RETURN_IF_ERROR(Lock(std::chrono::seconds(10)));
  ASSIGN_OR_RETURN(const off_t whole, Look());
  if (whole < 0) return absl::OkStatus();
  const off_t size = lseek(fd_, 0, SEEK_END);
  if (size < 0) return Failed("seek", path_);
  if (whole < size && ftruncate(fd_, whole) != 0) return Failed("cut off what is not the run's", path_);
  return absl::OkStatus();
}

TrainLog::~TrainLog() {
  if (locked_) UnlockFile(fd_);
  close(fd_);
}

absl::StatusOr<std::string> TrainLog::RunIdIn(const std::string& path) {
  ASSIGN_OR_RETURN(const PathKind kind, KindOf(path));
  if (kind != PathKind::kRegular) return "";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return Failed("open", path);
  std::string last;
  const absl::Status status = ForEachLogLine(fd, path, [&](std::string_view line) {
                                last = line;
                                return true;
                              }).status();
  close(fd);
  RETURN_IF_ERROR(status);
  return ParseLine(last).run_id;
}

void TrainLog::Note(const nlohmann::json& entry) {
  const int64_t step = zero::JsonField<int64_t>(entry, "step").value_or(0);
  last_step_ = std::max(last_step_, step);
  if (entry.contains("windows")) last_evaluation_ = step;
}

absl::StatusOr<off_t> TrainLog::Look() {
  last_step_ = 0;
  last_evaluation_ = -1;
  struct stat info {};
  if (fstat(fd_, &info) != 0) return Failed("look at", path_);
  if (!S_ISREG(info.st_mode)) return -1;
  if (info.st_size == 0) return 0;
  const bool replaces = !owner_.replaces.empty();
  if (!owner_.resumes && !replaces) {
    return Foreign(path_, "holds a log already, and a new run needs one of its own");
  }
  absl::Status status;
  int64_t number = 0, nameless = 0;
  const auto check = [&](std::string_view line) {
    ++number;
    const LogLine entry = ParseLine(line);
    if (entry.step < 0) {
      status = Foreign(path_, absl::StrCat("is no log of a training (line ", number, ")"));
    } else if (replaces) {
      if (owner_.replaces.count(entry.run_id) == 0) {
        status = Foreign(path_, absl::StrCat("is of another run than the one that is replaced (line ", number,
                                             ": ", entry.run_id.empty() ? "no run_id" : entry.run_id, ")"));
      }
    } else if (entry.run_id.empty() && entry.step <= owner_.nameless_until) {
      if (!entry.evaluates && entry.step <= nameless) {
        status = Foreign(path_, absl::StrCat("holds several runs (line ", number, " is of step ", entry.step,
                                             ", the one before of step ", nameless, ")"));
      }
      nameless = std::max(nameless, entry.step);
    } else if (entry.run_id != owner_.run_id) {
      status = Foreign(
          path_, absl::StrCat("is of another run (line ", number, ": ",
                              entry.run_id.empty() ? "no run_id" : absl::StrCat("run_id ", entry.run_id),
                              "; this one is ", owner_.run_id, ")"));
    }
    if (status.ok() && !replaces) Note(entry.json);
    return status.ok();
  };
  ASSIGN_OR_RETURN(const off_t whole, ForEachLogLine(fd_, path_, check));
  RETURN_IF_ERROR(status);
  // All of it may be the beginning of a first line, and nothing else.
  constexpr std::string_view kBegins = "{\"step\": ";
  char first[kBegins.size()];
  const ssize_t seen = whole == 0 ? pread(fd_, first, sizeof(first), 0) : 0;
  if (seen < 0) return Failed("read", path_);
  if (seen > 0 && kBegins.compare(0, static_cast<size_t>(seen), first, static_cast<size_t>(seen)) != 0)
    return Foreign(path_, "is no log of a training");
  return replaces ? 0 : whole;
}

absl::Status TrainLog::Append(nlohmann::json entry) {
  if (!owner_.run_id.empty()) entry["run_id"] = owner_.run_id;
  const std::string line = zero::LogLine(entry) + "\n";
  for (size_t done = 0; done < line.size();) {
    const ssize_t n = write(fd_, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == ENOSPC || errno == EDQUOT)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("`log` ", path_, ": the disk is full: ", line.size() - done,
                       " bytes of the line of step ", zero::JsonField<int64_t>(entry, "step").value_or(0),
                       " are too many: make room and go on with `resume`"));
    }
    if (n < 0) return Failed("write", path_);
    done += static_cast<size_t>(n);
  }
  Note(entry);
  return absl::OkStatus();
}

void TrainLog::AppendAside(nlohmann::json entry) const {
  if (!owner_.run_id.empty()) entry["run_id"] = owner_.run_id;
  // By one write, so that it never stands in the midst of another line.
  const std::string line = zero::LogLine(entry) + "\n";
  (void)!write(fd_, line.data(), line.size());
}

absl::Status TrainLog::CutAfter(int64_t step) {
  if (last_step_ <= step) return absl::OkStatus();
  last_step_ = 0;
  last_evaluation_ = -1;
  off_t end = 0;
  int64_t number = 0, behind = 0, cut_line = 0, kept_line = 0;
  const auto look = [&](std::string_view line) {
    ++number;
    const LogLine entry = ParseLine(line);
    if (cut_line == 0 && entry.step <= step) {
      Note(entry.json);
      end += static_cast<off_t>(line.size()) + 1;
    } else if (cut_line == 0) {
      cut_line = number;
      behind = entry.step;
    } else if (entry.step <= step && !entry.json.contains("stuck")) {
      kept_line = number;
      return false;
    }
    return true;
  };
  RETURN_IF_ERROR(ForEachLogLine(fd_, path_, look).status());
  if (kept_line != 0) {
    return Foreign(path_, absl::StrCat("is damaged: line ", cut_line, " is of step ", behind, ", and line ",
                                       kept_line, " behind it of a step up to ", step,
                                       ", where this run goes on; nothing of it was cut"));
  }
  if (ftruncate(fd_, end) != 0) return Failed("cut off steps that come again", path_);
  return absl::OkStatus();
}

absl::Status TrainLog::AddMissing(const nlohmann::json& step) {
  if (zero::JsonField<int64_t>(step, "step").value_or(0) <= last_step_) return absl::OkStatus();
  return Append(step);
}

}  // namespace penstock::run
