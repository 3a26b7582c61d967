#include "models/weights/weight_files.h"

#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/status_macros.h"

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

}  // namespace penstock::models
