#include "tools/state/base_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/directory.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "tools/state/state_reader.h"
#include "zero/config/json_field.h"

namespace penstock::tools {
namespace {

namespace fs = std::filesystem;
constexpr size_t kReadAtOnce = size_t{4} << 20;

// Size and time of a file.
absl::StatusOr<nlohmann::json> Look(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("stat ", path));
  return nlohmann::json{{"name", fs::path(path).filename().string()},
                        {"bytes", static_cast<int64_t>(info.st_size)},
                        {"modified_ns", int64_t{1'000'000'000} * info.st_mtim.tv_sec + info.st_mtim.tv_nsec}};
}

// Of what is on the drive: pages that nobody has changed are dropped before and after. Training reads past
// the page cache, and would not see what is there alone.
absl::StatusOr<std::string> ChecksumOf(const std::string& path, ByteProgress* progress, uint64_t* done,
                                       uint64_t total) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("open ", path));
  (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
  std::vector<char> buffer(kReadAtOnce);
  uint64_t checksum = 0;
  off_t at = 0;
  ssize_t n = 0;
  // Each piece is whole, so that the checksum does not depend on how much a read brings.
  for (size_t filled = 0;;) {
    n = ::read(fd, buffer.data() + filled, buffer.size() - filled);
    if (n < 0 && errno == EINTR) continue;
    if (n > 0) filled += static_cast<size_t>(n);
    if (n <= 0 || filled == buffer.size()) {
      checksum = kernels::Checksum(buffer.data(), filled, checksum);
      (void)::posix_fadvise(fd, at, static_cast<off_t>(filled), POSIX_FADV_DONTNEED);
      at += static_cast<off_t>(filled);
      *done += filled;
      progress->Update(*done, total);
      filled = 0;
    }
    if (n <= 0) break;
  }
  const int error = errno;
  (void)::close(fd);
  if (n < 0) return absl::ErrnoToStatus(error, absl::StrCat("read ", path));
  return absl::StrFormat("%016x", checksum);
}

bool Same(const nlohmann::json& recorded, const nlohmann::json& now, const char* key) {
  return recorded.is_object() && recorded.contains(key) && recorded[key] == now[key];
}

}  // namespace

absl::Status AnotherBase(const std::string& file, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrCat(
      file, ": not the weights that this run's adapters were made for (", why, "): ", kBaseWayOut));
}

absl::Status CheckSameFiles(const std::vector<std::string>& files, const nlohmann::json& record) {
  std::set<std::string> compared;
  for (const nlohmann::json& file : record["files"]) compared.insert(file["name"].get<std::string>());
  for (const std::string& path : files) {
    if (compared.erase(fs::path(path).filename()) == 0) return AnotherBase(path, "it was none of them");
  }
  if (compared.empty()) return absl::OkStatus();
  return AnotherBase(record["path"].get<std::string>(),
                     absl::StrCat("nothing of them is in ", *compared.begin()));
}

absl::Status NoBase(const std::string& model) {
  return absl::InvalidArgumentError(
      absl::StrCat("--model ", model, ": this state has its weights itself: leave the flag out"));
}

int64_t BaseBytes(const nlohmann::json& record) {
  int64_t bytes = 0;
  if (!record.is_object() || !record.contains("files") || !record["files"].is_array()) return 0;
  for (const nlohmann::json& file : record["files"])
    bytes += zero::JsonField<int64_t>(file, "bytes").value_or(0);
  return bytes;
}

std::string PathOfBase(const nlohmann::json& record) {
  return zero::JsonField<std::string>(record, "path").value_or("");
}

std::string BaseDirectory(const std::string& path) {
  const fs::path base(path);
  if (IsDirectory(path).value_or(false)) return path;
  // A file of weights, or the index of several; a directory that is gone may have a dot in its name, too.
  const bool is_file = base.extension() == ".safetensors" || base.extension() == ".json";
  return is_file ? base.parent_path().string() : path;
}

absl::StatusOr<nlohmann::json> RecordBase(const std::string& path, const std::vector<std::string>& files,
                                          bool checks, bool quiet) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error).lexically_normal();
  nlohmann::json record = {{"path", absolute.string()}, {"files", nlohmann::json::array()}};
  for (const std::string& file : files) {
    ASSIGN_OR_RETURN(nlohmann::json looked, Look(file));
    record["files"].push_back(std::move(looked));
  }
  if (!checks) return record;
  ByteProgress progress("reading the base once, for its checksum", quiet);
  const auto total = static_cast<uint64_t>(BaseBytes(record));
  uint64_t done = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    ASSIGN_OR_RETURN(record["files"][i]["checksum"], ChecksumOf(files[i], &progress, &done, total));
  }
  return record;
}

absl::StatusOr<nlohmann::json> CompareBase(const nlohmann::json& record, const std::string& path,
                                           BaseCheck check, bool quiet) {
  nlohmann::json base = record;
  if (!record.is_object() || !record.contains("files") || !record["files"].is_array() ||
      record["files"].empty()) {
    return absl::DataLossError(
        "the run's record is damaged: it does not say what its adapters go to; go on from a checkpoint");
  }
  std::error_code error;
  const std::string where =
      path.empty() ? PathOfBase(record) : fs::absolute(path, error).lexically_normal().string();
  // Elsewhere nothing is taken for granted: files that were made together have one size and one time.
  const bool by_times = check == BaseCheck::kTimes && where == PathOfBase(record);
  base["path"] = where;
  const std::string directory = BaseDirectory(where);
  std::vector<std::pair<std::string, nlohmann::json*>> to_read;
  uint64_t total = 0, done = 0;
  for (nlohmann::json& recorded : base["files"]) {
    const std::string name = zero::JsonField<std::string>(recorded, "name").value_or("");
    // A single file may have got another name.
    bool itself = base["files"].size() == 1 && fs::path(where).extension() == ".safetensors";
    if (itself) {
      ASSIGN_OR_RETURN(itself, IsRegularFile(where));
    }
    const std::string file = itself ? where : (fs::path(directory) / name).string();
    const absl::StatusOr<nlohmann::json> now = Look(file);
    if (!now.ok() && !absl::IsNotFound(now.status())) return now.status();
    if (!now.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat(file, ": the weights that this run's adapters go to are not there (",
                       std::string(now.status().message()), "): ", kBaseWayOut));
    }
    if (!Same(recorded, *now, "bytes")) return AnotherBase(file, "it has another size");
    // Whoever made a state without training from it has read nothing: there is no more to go by than the
    // time.
    const bool summed = recorded.is_object() && recorded.contains("checksum");
    if (!summed && !Same(recorded, *now, "modified_ns")) return AnotherBase(file, "it has another time");
    if (!summed) continue;
    if (by_times && Same(recorded, *now, "modified_ns")) continue;
    recorded["name"] = (*now)["name"];
    recorded["modified_ns"] = (*now)["modified_ns"];
    to_read.emplace_back(file, &recorded);
    total += (*now)["bytes"].get<uint64_t>();
  }
  ByteProgress progress(by_times ? "the base's files look changed: reading them"
                                 : "reading the base's files, for their checksums",
                        quiet);
  for (const auto& [file, recorded] : to_read) {
    ASSIGN_OR_RETURN(const std::string checksum, ChecksumOf(file, &progress, &done, total));
    if (zero::JsonField<std::string>(*recorded, "checksum") != checksum)
      return AnotherBase(file, "its bytes are others");
  }
  return base;
}

}  // namespace penstock::tools
