#include "base/output_path.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/status_macros.h"

namespace penstock {

absl::Status CheckWritable(const char* flag, const std::optional<std::string>& path, bool replaced) {
  if (!path.has_value()) return absl::OkStatus();
  const auto cannot = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " ", *path, ": cannot be written: ", why, ": give another file"));
  };
  RETURN_IF_ERROR(CheckIsNoModelFile(flag, *path));
  const absl::StatusOr<PathKind> kind = KindOf(*path);
  if (!kind.ok()) return cannot(std::strerror(ErrnoOf(kind.status())));
  if (*kind != PathKind::kMissing) {
    if (*kind == PathKind::kDirectory) return cannot("it is a directory");
    if (access(path->c_str(), W_OK) != 0) return cannot(std::strerror(errno));
    if (!replaced || *kind != PathKind::kRegular) return absl::OkStatus();
  }
  const std::filesystem::path given = std::filesystem::path(*path).parent_path();
  const std::string parent = given.empty() ? std::string(1, '.') : given.string();
  const absl::StatusOr<PathKind> of_parent = KindOf(parent);
  if (!of_parent.ok()) return cannot(absl::StrCat(parent, ": ", std::strerror(ErrnoOf(of_parent.status()))));
  if (path->empty() || *of_parent == PathKind::kMissing) return cannot(absl::StrCat(parent, " is not there"));
  if (*of_parent != PathKind::kDirectory) return cannot(absl::StrCat(parent, " is not a directory"));
  if (access(parent.c_str(), W_OK | X_OK) != 0)
    return cannot(absl::StrCat(parent, ": ", std::strerror(errno)));
  return absl::OkStatus();
}

absl::Status CheckDirectoryPlace(const std::string& what, const std::string& path, bool writes) {
  const auto cannot = [&](const std::string& at, const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", path, ": cannot be written to: ", at == path ? "" : absl::StrCat(at, ": "),
                     why, ": give another directory"));
  };
  std::string at = path;
  while (true) {
    const absl::StatusOr<PathKind> kind = KindOf(at);
    if (!kind.ok()) return cannot(at, std::strerror(ErrnoOf(kind.status())));
    if (*kind == PathKind::kDirectory) break;
    if (*kind != PathKind::kMissing) return cannot(at, "it is not a directory");
    const absl::StatusOr<PathKind> itself = LinkKindOf(at);
    if (!itself.ok()) return cannot(at, std::strerror(ErrnoOf(itself.status())));
    if (*itself != PathKind::kMissing) return cannot(at, "it is a link to nothing");
    at = ParentOf(at);
  }
  if (writes && access(at.c_str(), W_OK | X_OK) != 0) return cannot(at, std::strerror(errno));
  return absl::OkStatus();
}

absl::Status CheckIsNoModelFile(const std::string& what, const std::string& path) {
  std::error_code error;
  const std::filesystem::path meant = std::filesystem::weakly_canonical(path, error);
  for (const std::string& name :
       {meant.filename().string(), std::filesystem::path(path).filename().string()}) {
    constexpr std::string_view kNames[] = {"penstock.store",
                                           ".penstock.lock",
                                           ".penstock.written",
                                           ".penstock.ranks-secret",
                                           "parameters.json",
                                           "latest",
                                           "latest_universal",
                                           "config.json",
                                           "generation_config.json",
                                           "tokenizer.json",
                                           "tokenizer_config.json",
                                           "special_tokens_map.json",
                                           "added_tokens.json",
                                           "vocab.json",
                                           "merges.txt",
                                           "tokenizer.model",
                                           "adapter_config.json",
                                           "chat_template.jinja",
                                           "pytorch_model.bin",
                                           "pytorch_model.bin.index.json"};
    constexpr std::string_view kEnds[] = {".safetensors", ".safetensors.index.json",
                                          "_states.pt"};  // (of DeepSpeed's checkpoints)
    const bool named = std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
    const bool ends = std::any_of(std::begin(kEnds), std::end(kEnds),
                                  [&](std::string_view end) { return name.ends_with(end); });
    const bool of_client = name.starts_with("client_state-") && name.ends_with(".pt");
    if (!named && !ends && !of_client) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", path, ": is a file of a model or a state by its name: give another file"));
  }
  return absl::OkStatus();
}

std::string ParentOf(const std::string& path) {
  const size_t name = path.find_last_not_of('/');
  const size_t slash = path.rfind('/', name);
  return slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(1, slash));
}

}  // namespace penstock
