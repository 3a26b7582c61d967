#include "models/weights/weight_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/read_at.h"
#include "base/status_macros.h"
#include "kernels/checksum.h"

namespace penstock::models {
namespace {

// Of 400,000 tensors, which is as many as base/json.h takes.
constexpr uint64_t kMostIndexBytes = uint64_t{64} << 20;

// What cannot be looked at counts as there: reading it gives the error.
bool Exists(const std::string& path) { return PathExists(path).value_or(true); }

// A name in `directory` of weights in another form; "" where there is none.
absl::StatusOr<std::string> OtherWeights(const std::string& directory) {
  std::string found;
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectoryIfThere(directory));
  for (const std::string& name : names) {
    const bool torch = absl::StartsWith(name, "pytorch_model") &&
                       (absl::EndsWith(name, ".bin") || absl::EndsWith(name, ".bin.index.json"));
    const bool other = absl::EndsWith(name, ".gguf") || absl::EndsWith(name, ".pth") ||
                       name == "tf_model.h5" || name == "flax_model.msgpack";
    if ((torch || other) && found.empty()) found = name;
  }
  return found;
}

constexpr uint64_t kPieces = 1024;
constexpr uint64_t kPieceBytes = 4096;

// Adds the pieces of this file that begin `every` bytes after one another. Closes nothing.
absl::Status AddPieces(int fd, const std::string& path, uint64_t bytes, uint64_t every,
                       kernels::Checksummer* sum) {
  std::array<char, kPieceBytes> piece;
  sum->Update(&bytes, sizeof(bytes));
  for (uint64_t offset = 0; offset < bytes; offset += every) {
    ASSIGN_OR_RETURN(const size_t done, ReadAt(fd, path, offset, piece.data(), piece.size()));
    sum->Update(piece.data(), done);
  }
  return absl::OkStatus();
}

}  // namespace

bool HasWeights(const std::string& directory) {
  return Exists(absl::StrCat(directory, "/", kWeightIndex)) ||
         Exists(absl::StrCat(directory, "/", kSingleWeightFile));
}

absl::StatusOr<bool> HasOtherWeights(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::string other, OtherWeights(directory));
  return !other.empty();
}

std::string WhyNoWeights(const std::string& directory) {
  std::string none = absl::StrCat("neither ", kSingleWeightFile, " nor ", kWeightIndex, " is there");
  const absl::StatusOr<std::string> listed = OtherWeights(directory);
  if (!listed.ok()) return absl::StrCat(none, " (", std::string(listed.status().message()), ")");
  const std::string& other = *listed;
  if (other.empty()) return none;
  return absl::StrCat(none, ", but ", other,
                      ", which is not read; transformers converts it: python3 -c \"from transformers import "
                      "AutoModelForCausalLM "
                      "as M; M.from_pretrained('",
                      directory, "'",
                      absl::EndsWith(other, ".gguf") ? absl::StrCat(", gguf_file='", other, "'") : "",
                      ", dtype='auto').save_pretrained('", directory, "')\"");
}

absl::Status WrongWeights(const std::string& given, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(given, ": ", why));
}

absl::StatusOr<std::string> WeightDirectory(const std::string& path) {
  ASSIGN_OR_RETURN(const bool is_directory, IsDirectory(path));
  return is_directory ? path : DirectoryOf(path);
}

absl::StatusOr<std::string> MainWeightFile(const std::string& path, const std::string& given) {
  ASSIGN_OR_RETURN(const PathKind kind, KindOf(path));
  if (kind == PathKind::kMissing) return WrongWeights(given, "no such file or directory");
  if (kind != PathKind::kDirectory) return path;
  for (const char* name : {kWeightIndex, kSingleWeightFile}) {
    std::string file = absl::StrCat(path, "/", name);
    if (Exists(file)) return file;
  }
  return WrongWeights(given, WhyNoWeights(path));
}

absl::StatusOr<WeightFiles> WeightFilesOf(const std::string& main, const std::string& given) {
  if (!absl::EndsWith(main, ".json")) return WeightFiles{{main, {}}};
  const absl::StatusOr<nlohmann::json> index = ReadJsonObject(main, kMostIndexBytes);
  if (!index.ok()) return WrongWeights(given, std::string(index.status().message()));
  const auto map = index->find("weight_map");
  if (map == index->end() || !map->is_object() || map->empty()) {
    return WrongWeights(given, absl::StrCat(main, " has no weight_map"));
  }
  WeightFiles files;
  for (const auto& [name, file] : map->items()) {
    // Files beside the index and nowhere else, whoever wrote it.
    if (!file.is_string() || file.get<std::string>().empty() ||
        file.get<std::string>().find('/') != std::string::npos) {
      return WrongWeights(given, absl::StrCat("weight_map has no file name for ", name));
    }
    files[absl::StrCat(DirectoryOf(main), "/", file.get<std::string>())].insert(name);
  }
  return files;
}

absl::StatusOr<uint64_t> SampleWeights(const WeightFiles& files) {
  std::vector<uint64_t> bytes;
  uint64_t all = 0;
  for (const auto& [path, tensors] : files) {
    struct stat info = {};
    if (::stat(path.c_str(), &info) != 0) return MakeIoError({.op = "stat", .path = path, .error = errno});
    bytes.push_back(static_cast<uint64_t>(info.st_size));
    all += bytes.back();
  }
  kernels::Checksummer sum;
  size_t number = 0;
  for (const auto& [path, tensors] : files) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return MakeIoError({.op = "open", .path = path, .error = errno});
    const absl::Status added =
        AddPieces(fd, path, bytes[number++], std::max(kPieceBytes, all / kPieces), &sum);
    ::close(fd);
    RETURN_IF_ERROR(added);
  }
  return sum.Digest();
}

}  // namespace penstock::models
