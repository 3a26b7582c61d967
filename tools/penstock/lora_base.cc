#include "tools/penstock/lora_base.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"
#include "models/lora.h"
#include "tools/penstock/state_reader.h"
#include "zero/config/json_field.h"

namespace penstock::tools {
namespace {

constexpr size_t kReadAtOnce = size_t{4} << 20;

std::string NameOf(const std::string& path) { return std::filesystem::path(path).filename(); }

// Size and time of a file.
absl::StatusOr<nlohmann::json> Look(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("stat ", path));
  return nlohmann::json{{"name", NameOf(path)},
                        {"bytes", static_cast<int64_t>(info.st_size)},
                        {"modified_ns", int64_t{1'000'000'000} * info.st_mtim.tv_sec + info.st_mtim.tv_nsec}};
}

absl::StatusOr<std::string> ChecksumOf(const std::string& path, ByteProgress* progress, uint64_t* done,
                                       uint64_t total) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("open ", path));
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
      // Nobody needs these pages again: training reads past the page cache.
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

absl::StatusOr<std::shared_ptr<models::FrozenWeights>> Open(const std::string& path,
                                                            const models::LanguageModel& adapted,
                                                            kernels::DType type) {
  ASSIGN_OR_RETURN(
      std::unique_ptr<models::FrozenWeights> weights,
      models::FrozenWeights::Open(path, models::WithoutAdapters(adapted.Layout()), type, "--model"));
  return std::shared_ptr<models::FrozenWeights>(std::move(weights));
}

}  // namespace

absl::StatusOr<LoraBase> OpenBase(const std::string& path, const models::LanguageModel& adapted,
                                  kernels::DType type, bool checks, bool quiet) {
  LoraBase base;
  ASSIGN_OR_RETURN(base.weights, Open(path, adapted, type));
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error).lexically_normal();
  base.record = {{"path", absolute.string()}, {"files", nlohmann::json::array()}};
  uint64_t total = 0, done = 0;
  for (const std::string& file : base.weights->Paths()) {
    ASSIGN_OR_RETURN(nlohmann::json looked, Look(file));
    total += looked["bytes"].get<uint64_t>();
    base.record["files"].push_back(std::move(looked));
  }
  if (!checks) return base;
  ByteProgress progress("reading the base once, for its checksum", quiet);
  size_t i = 0;
  for (const std::string& file : base.weights->Paths()) {
    ASSIGN_OR_RETURN(base.record["files"][i++]["checksum"], ChecksumOf(file, &progress, &done, total));
  }
  return base;
}

absl::StatusOr<LoraBase> ReopenBase(const nlohmann::json& record, const std::string& path,
                                    const models::LanguageModel& adapted, kernels::DType type, bool quiet) {
  const std::string where = path.empty() ? zero::JsonField<std::string>(record, "path").value_or("") : path;
  LoraBase base;
  absl::StatusOr<std::shared_ptr<models::FrozenWeights>> weights = Open(where, adapted, type);
  if (!weights.ok()) {
    return absl::Status(weights.status().code(), absl::StrCat("the weights that this run's adapters go to: ",
                                                              std::string(weights.status().message())));
  }
  base.weights = *std::move(weights);
  base.record = record;
  base.record["path"] = where;
  const std::vector<std::string> paths = base.weights->Paths();
  const auto other = [](const std::string& file, const std::string& why) {
    return absl::FailedPreconditionError(
        absl::StrCat(file, ": not the weights that this run's adapters were made for (", why,
                     "): give the directory that has them (--model), or start another run"));
  };
  if (!record.is_object() || !record.contains("files") || !record["files"].is_array() ||
      record["files"].size() != paths.size())
    return other(where, "other files");
  ByteProgress progress("the base's files look changed: reading them", quiet);
  for (size_t i = 0; i < paths.size(); ++i) {
    nlohmann::json& recorded = base.record["files"][i];
    ASSIGN_OR_RETURN(const nlohmann::json now, Look(paths[i]));
    const auto same = [&](const char* key) {
      return recorded.is_object() && recorded.contains(key) && recorded[key] == now[key];
    };
    if (!same("name")) return other(paths[i], "it has another name");
    if (!same("bytes")) return other(paths[i], "it has another size");
    if (same("modified_ns")) continue;
    uint64_t done = 0;
    ASSIGN_OR_RETURN(const std::string checksum,
                     ChecksumOf(paths[i], &progress, &done, now["bytes"].get<uint64_t>()));
    if (zero::JsonField<std::string>(recorded, "checksum") != checksum)
      return other(paths[i], "its bytes are others");
    recorded["modified_ns"] = now["modified_ns"];
  }
  return base;
}

}  // namespace penstock::tools
