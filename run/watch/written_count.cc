#include "run/watch/written_count.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/atomic_file.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "swap/store_files.h"
#include "zero/config/json_field.h"

namespace penstock::run {
namespace {

constexpr const char* kWrittenBytesKey = "written_bytes";
constexpr const char* kRunIdKey = "run_id";

}  // namespace

WrittenCount::WrittenCount(const std::string& directory)
    : directory_(directory), path_(absl::StrCat(directory, "/", kName)) {}

absl::StatusOr<WrittenCount> WrittenCount::Read(const std::string& directory,
                                                const nlohmann::json& recorded) {
  WrittenCount count(directory);
  std::optional<std::string> run_id;
  if (recorded.is_object()) {
    count.before_ = zero::JsonField<int64_t>(recorded, kWrittenBytesKey).value_or(0);
    run_id = zero::JsonField<std::string>(recorded, kRunIdKey);
  }
  const absl::StatusOr<nlohmann::json> file = ReadJsonObject(count.path_);
  if (absl::IsNotFound(file.status())) return count;
  const std::optional<int64_t> bytes =
      file.ok() ? zero::JsonField<int64_t>(*file, kWrittenBytesKey) : std::optional<int64_t>();
  if (!bytes.has_value() || *bytes < 0) {
    return absl::DataLossError(
        absl::StrCat(count.path_, ": it does not say how much the run has written to its drives",
                     file.ok() ? "" : absl::StrCat(" (", std::string(file.status().message()), ")"),
                     "; remove it to count what the last commit says"));
  }
  if (!run_id.has_value() || zero::JsonField<std::string>(*file, kRunIdKey) == run_id)
    count.before_ = std::max(count.before_, *bytes);
  return count;
}

absl::Status WrittenCount::Save(const std::string& run_id, int64_t bytes) {
  if (bytes == saved_) return absl::OkStatus();
  RETURN_IF_ERROR(swap::MakeDirectories(directory_, &made_));
  if (saved_ < 0) {
    absl::StatusOr<std::string> found = ReadSmallFile(path_);
    if (!found.ok() && !absl::IsNotFound(found.status())) return found.status();
    if (found.ok()) replaced_ = *std::move(found);
  }
  const nlohmann::json text = {{kRunIdKey, run_id}, {kWrittenBytesKey, bytes}};
  RETURN_IF_ERROR(ReplaceFile(path_, text.dump() + "\n", {.mode = 0600}));
  saved_ = bytes;
  return absl::OkStatus();
}

absl::Status WrittenCount::Revert() const {
  if (saved_ < 0) return absl::OkStatus();
  if (replaced_.has_value()) return ReplaceFile(path_, *replaced_, {.mode = 0600});
  if (::unlink(path_.c_str()) != 0 && errno != ENOENT)
    return MakeIoError({.op = "remove", .path = path_, .error = errno});
  // Only where nothing else is in them.
  for (auto each = made_.rbegin(); each != made_.rend() && ::rmdir(each->c_str()) == 0; ++each) {
  }
  return absl::OkStatus();
}

}  // namespace penstock::run
