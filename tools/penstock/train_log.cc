#include "tools/penstock/train_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "zero/engine/report.h"

namespace penstock::tools {
namespace {

absl::Status Failed(const char* op, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("--log ", path, ": ", op));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TrainLog>> TrainLog::Open(const std::string& path, bool resumes) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return Failed("open", path);
  std::unique_ptr<TrainLog> log(new TrainLog(path, fd));
  if (!resumes) return log;
  if (absl::Status status = log->CutTornLine(); !status.ok()) return status;
  return log;
}

TrainLog::~TrainLog() { close(fd_); }

absl::Status TrainLog::CutTornLine() {
  const off_t size = lseek(fd_, 0, SEEK_END);
  if (size < 0) return Failed("seek", path_);
  // Lines are short: the last two of them lie within this.
  constexpr off_t kTail = 64 << 10;
  const off_t from = std::max<off_t>(0, size - kTail);
  std::string tail(static_cast<size_t>(size - from), '\0');
  for (size_t done = 0; done < tail.size();) {
    const ssize_t n = pread(fd_, tail.data() + done, tail.size() - done, from + static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Failed("read", path_);
    done += static_cast<size_t>(n);
  }
  // Whole lines end with a newline and parse.
  size_t end = tail.rfind('\n');
  end = end == std::string::npos ? 0 : end + 1;
  if (from + static_cast<off_t>(end) < size && ftruncate(fd_, from + static_cast<off_t>(end)) != 0) {
    return Failed("cut off a torn line", path_);
  }
  if (end == 0) return absl::OkStatus();
  size_t begin = end < 2 ? std::string::npos : tail.rfind('\n', end - 2);
  begin = begin == std::string::npos ? 0 : begin + 1;
  const nlohmann::json line = nlohmann::json::parse(tail.substr(begin, end - begin), nullptr, false);
  if (line.is_object() && line.contains("step") && line["step"].is_number_integer()) {
    last_step_ = line["step"].get<int64_t>();
  }
  return absl::OkStatus();
}

absl::Status TrainLog::Append(const nlohmann::json& step) {
  const std::string line = zero::StepLine(step) + "\n";
  for (size_t done = 0; done < line.size();) {
    const ssize_t n = write(fd_, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == ENOSPC || errno == EDQUOT)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("--log ", path_, ": the disk is full: ", line.size() - done,
                       " bytes of the line of step ", step.value("step", int64_t{0}),
                       " are too many; that step is committed: make room and go on with --resume"));
    }
    if (n < 0) return Failed("write", path_);
    done += static_cast<size_t>(n);
  }
  last_step_ = step.value("step", last_step_);
  return absl::OkStatus();
}

absl::Status TrainLog::CutAfter(int64_t step) {
  if (last_step_ <= step) return absl::OkStatus();
  std::ifstream file(path_, std::ios::binary);
  off_t end = 0;
  last_step_ = 0;
  for (std::string text; std::getline(file, text);) {
    const nlohmann::json line = nlohmann::json::parse(text, nullptr, false);
    const int64_t of = line.is_object() ? line.value("step", int64_t{0}) : 0;
    if (of > step) break;
    last_step_ = std::max(last_step_, of);
    end += static_cast<off_t>(text.size()) + 1;
  }
  if (ftruncate(fd_, end) != 0) return Failed("cut off steps that come again", path_);
  return absl::OkStatus();
}

absl::Status TrainLog::AddMissing(const nlohmann::json& step) {
  if (!step.is_object() || step.value("step", int64_t{0}) <= last_step_) return absl::OkStatus();
  return Append(step);
}

}  // namespace penstock::tools
