#include "models/weight_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/status_macros.h"

namespace penstock::models {
namespace {

constexpr uint64_t kMostJsonBytes = uint64_t{64} << 20;

absl::Status Wrong(const std::string& given, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(given, ": ", why));
}

bool IsDirectory(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

bool Exists(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0;
}

// A name in `directory` of weights in another form; "" where there is none.
std::string OtherWeights(const std::string& directory) {
  std::string found;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(directory);
  if (!names.ok()) return found;
  for (const std::string& name : *names) {
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

bool HasOtherWeights(const std::string& directory) { return !OtherWeights(directory).empty(); }

std::string WhyNoWeights(const std::string& directory) {
  const std::string none = absl::StrCat("neither ", kSingleWeightFile, " nor ", kWeightIndex, " is there");
  const std::string other = OtherWeights(directory);
  if (other.empty()) return none;
  return absl::StrCat(none, ", but ", other,
                      ", which is not read; transformers converts it: python3 -c \"from transformers import "
                      "AutoModelForCausalLM "
                      "as M; M.from_pretrained('",
                      directory, "'",
                      absl::EndsWith(other, ".gguf") ? absl::StrCat(", gguf_file='", other, "'") : "",
                      ", dtype='auto').save_pretrained('", directory, "')\"");
}

std::string WeightDirectory(const std::string& path) {
  if (IsDirectory(path)) return path;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
}

absl::StatusOr<std::string> MainWeightFile(const std::string& path, const std::string& given) {
  if (!Exists(path)) return Wrong(given, "no such file or directory");
  if (!IsDirectory(path)) return path;
  for (const char* name : {kWeightIndex, kSingleWeightFile}) {
    std::string file = absl::StrCat(path, "/", name);
    if (Exists(file)) return file;
  }
  return Wrong(given, WhyNoWeights(path));
}

absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path, const std::string& given) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 || static_cast<uint64_t>(info.st_size) > kMostJsonBytes) {
    return Wrong(given, absl::StrCat(path, " cannot be read, or is too long"));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  nlohmann::json json = nlohmann::json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  if (!file || !json.is_object()) return Wrong(given, absl::StrCat(path, " is not a JSON object"));
  return json;
}

absl::StatusOr<WeightFiles> WeightFilesOf(const std::string& main, const std::string& given) {
  if (!absl::EndsWith(main, ".json")) return WeightFiles{{main, {}}};
  ASSIGN_OR_RETURN(const nlohmann::json index, ReadJsonObject(main, given));
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object() || map->empty()) {
    return Wrong(given, absl::StrCat(main, " has no weight_map"));
  }
  WeightFiles files;
  for (const auto& [name, file] : map->items()) {
    // Files beside the index and nowhere else, whoever wrote it.
    if (!file.is_string() || file.get<std::string>().empty() ||
        file.get<std::string>().find('/') != std::string::npos) {
      return Wrong(given, absl::StrCat("weight_map has no file name for ", name));
    }
    files[absl::StrCat(WeightDirectory(main), "/", file.get<std::string>())].insert(name);
  }
  return files;
}

}  // namespace penstock::models
