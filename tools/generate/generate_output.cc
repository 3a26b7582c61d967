#include "tools/generate/generate_output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/atomic_file.h"
#include "base/file_lock.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/lines.h"
#include "base/status_macros.h"
#include "base/write_all.h"

namespace penstock::tools {
namespace {

absl::Status Failed(const std::string& what, const std::string& path, int error) {
  return absl::ErrnoToStatus(error, absl::StrCat("--out ", path, ": ", what));
}

// How every line begins.
constexpr std::string_view kBeginning = "{\"index\":";

}  // namespace

absl::StatusOr<std::unique_ptr<GenerateOutput>> GenerateOutput::Open(const std::string& path,
                                                                     bool overwrite) {
  std::unique_ptr<GenerateOutput> output;
  for (bool is_it = false; !is_it;) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) return Failed("open", path, errno);
    output.reset(new GenerateOutput(path, fd));
    struct stat found = {};
    if (::fstat(fd, &found) != 0) return Failed("look at", path, errno);
    if (!S_ISREG(found.st_mode)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--out ", path,
                       ": is no regular file, and one is needed to go on after a kill; without --out texts "
                       "are printed"));
    }
    ASSIGN_OR_RETURN(const bool locked, TryLockFile(fd, path));
    if (!locked) {
      return absl::FailedPreconditionError(absl::StrCat("--out ", path, ": another process writes it"));
    }
    // Another process may have put a file in its place before this one had the lock. A link stays one.
    std::error_code error;
    output->target_ = std::filesystem::canonical(path, error).string();
    if (error == std::errc::no_such_file_or_directory) continue;
    if (error) return Failed("find", path, error.value());
    ASSIGN_OR_RETURN(is_it, IsFileAt(fd, output->target_));
  }
  output->replaces_ = overwrite;
  if (!overwrite) RETURN_IF_ERROR(output->ReadDone());
  return output;
}

GenerateOutput::~GenerateOutput() { ::close(fd_); }

absl::Status GenerateOutput::ReadDone() {
  int64_t number = 0;
  bool ours = true;
  const auto take = [&](std::string_view line) {
    ++number;
    const nlohmann::json json = ParseJson(line, "").value_or(nlohmann::json());
    ours = json.is_object() && json.contains("index") && json["index"].is_number_integer() &&
           json.contains("key") && json["key"].is_string();
    if (ours) keys_[json["index"].get<int64_t>()] = json["key"].get<std::string>();
    return ours;
  };
  const absl::StatusOr<uint64_t> whole = ForEachLine(fd_, path_, take);
  if (!whole.ok())
    return absl::Status(whole.status().code(), absl::StrCat("--out: ", whole.status().message()));
  bytes_ = *whole;
  if (ours) {  // what follows has no line break: torn, if it is ours
    ++number;
    char torn[kBeginning.size()];
    const ssize_t seen = ::pread(fd_, torn, sizeof(torn), static_cast<off_t>(bytes_));
    if (seen < 0) return Failed("read", path_, errno);
    ours = kBeginning.compare(0, static_cast<size_t>(seen), torn, static_cast<size_t>(seen)) == 0;
  }
  if (!ours) {
    return absl::InvalidArgumentError(
        absl::StrCat("--out ", path_, ", line ", number,
                     ": not a line of penstock generate: give another file, or --overwrite"));
  }
  if (::ftruncate(fd_, static_cast<off_t>(bytes_)) != 0) return Failed("truncate", path_, errno);
  return absl::OkStatus();
}

absl::StatusOr<bool> GenerateOutput::Has(int64_t index, const std::string& key) const {
  const auto found = keys_.find(index);
  if (found == keys_.end()) return false;
  if (found->second == key) return true;
  return absl::FailedPreconditionError(absl::StrCat(
      "--out ", path_, ": prompt ", index,
      " is there from another model, prompt, seed or option: give another file, or --overwrite"));
}

absl::Status GenerateOutput::Append(const nlohmann::ordered_json& line) {
  // Texts of bytes may be no UTF-8.
  const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  RETURN_IF_ERROR(replaces_ ? ReplaceBy(text) : AppendText(text));
  replaces_ = false;
  bytes_ += text.size();
  keys_[line["index"].get<int64_t>()] = line["key"].get<std::string>();
  return absl::OkStatus();
}

absl::Status GenerateOutput::ReplaceBy(const std::string& text) {
  const auto named = [](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat("--out: ", std::string(status.message())));
  };
  absl::StatusOr<AtomicFile> file = AtomicFile::Create(target_);
  // In a directory that nobody may write to, the file itself is written over.
  if (absl::IsPermissionDenied(file.status())) return WriteOver(text);
  if (!file.ok()) return named(file.status());
  if (const absl::Status written = file->Write(text); !written.ok()) return named(written);
  // It goes on to be written, and is this process's before it has the name.
  const int fd = ::fcntl(file->fd(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return Failed("duplicate the descriptor of", path_, errno);
  const absl::StatusOr<bool> locked = TryLockFile(fd, path_);
  absl::Status status = locked.status();
  if (status.ok() && !*locked) status = absl::UnavailableError(absl::StrCat(path_, ": locked by another"));
  if (status.ok()) status = file->Commit();
  if (ErrnoOf(status) == EBUSY) {  // a mount of its own, as a container has
    ::close(fd);
    return WriteOver(text);
  }
  if (status.ok() && ::fcntl(fd, F_SETFL, O_APPEND) != 0) status = Failed("append to", path_, errno);
  if (!status.ok()) {
    ::close(fd);
    return named(status);
  }
  ::close(std::exchange(fd_, fd));
  return absl::OkStatus();
}

absl::Status GenerateOutput::WriteOver(const std::string& text) {
  if (::ftruncate(fd_, 0) != 0) return Failed("truncate", path_, errno);
  return AppendText(text);
}

absl::Status GenerateOutput::AppendText(const std::string& text) {
  const int error = WriteAll(fd_, text);
  if (error == 0) return absl::OkStatus();
  // A torn line would be cut off at the next start all the same.
  if (::ftruncate(fd_, static_cast<off_t>(bytes_)) != 0) return Failed("truncate", path_, errno);
  return Failed(absl::StrCat("write of ", text.size(), " bytes at offset ", bytes_), path_, error);
}

}  // namespace penstock::tools
