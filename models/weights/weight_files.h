// Which files hold the weights at a path: a .safetensors file, the .index.json of several, or a directory
// with model.safetensors or model.safetensors.index.json. Needs no LibTorch.
//
// `given`: what errors begin with, the flag and the path. Errors: kInvalidArgument.
#ifndef PENSTOCK_MODELS_WEIGHTS_WEIGHT_FILES_H_
#define PENSTOCK_MODELS_WEIGHTS_WEIGHT_FILES_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::models {

inline constexpr const char* kSingleWeightFile = "model.safetensors";
inline constexpr const char* kWeightIndex = "model.safetensors.index.json";

// Returns whether a directory has one of the two, or has a file of that name which cannot be looked at:
// reading it gives the error.
bool HasWeights(const std::string& directory);

// Returns whether a directory has weights of a form that is not read: pytorch_model.bin, GGUF, ... False
// where there is no directory; a listing that fails is its error.
absl::StatusOr<bool> HasOtherWeights(const std::string& directory);

// kInvalidArgument; `given`: what the caller named, as the caller spells it.
absl::Status WrongWeights(const std::string& given, const std::string& why);

// For a directory without weights: what it has instead, and how that is converted.
std::string WhyNoWeights(const std::string& directory);

// The file or index that `path` means.
absl::StatusOr<std::string> MainWeightFile(const std::string& path, const std::string& given);

// By file: the tensors that the index says are in there; empty: whatever is. `main`: of MainWeightFile.
using WeightFiles = std::map<std::string, std::set<std::string>>;
absl::StatusOr<WeightFiles> WeightFilesOf(const std::string& main, const std::string& given);

// A checksum of pieces of these files, every sixteen MiB of 16 GiB say, and of their lengths: other weights
// have another one, unless hardly a value differs, and a copy of the files has the same.
absl::StatusOr<uint64_t> SampleWeights(const WeightFiles& files);

// `path` itself where it is a directory, else the directory that it is in.
absl::StatusOr<std::string> WeightDirectory(const std::string& path);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_WEIGHT_FILES_H_
