// Files of torch.save, read without executing anything: what a pickle would build is described, not built.
//
//   ASSIGN_OR_RETURN(const std::unique_ptr<TorchFile> file, TorchFile::Open("mp_rank_00_model_states.pt"));
//   const TorchValue module = file->root()["module"];
//   for (const auto& [name, value] : module.entries()) Use(name.text(), value.tensor());
//
// Served is the zip form (torch 1.6 and later), protocols 2 to 5, little-endian. Tensors, parameters, dicts,
// lists, tuples, numbers and texts are values; whatever else a pickle names (an enum, a class, a function) is
// an object with its name and arguments, which nobody calls. The older tar and bare pickle forms, compressed
// members, and tensors that are not strided and dense are refused by name.
//
// Memory: the pickle of the file (some hundred bytes a tensor); contents of tensors are read on demand.
#ifndef PENSTOCK_MODELS_TORCH_FILE_H_
#define PENSTOCK_MODELS_TORCH_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/safetensors.h"

namespace penstock::models {

class TorchFile;

// A tensor in a file. Its elements lie one after the other, row by row: contiguous in torch's words.
struct TorchTensor {
  swap::Dtype dtype = swap::Dtype::kF32;
  std::vector<int64_t> sizes = {};
  int64_t elements = 0;
  uint64_t offset = 0;  // of its first byte in the file
};

// A value of a file, which it must not outlive. A handle: copying costs nothing. What is asked of a value of
// another kind is nothing: an absent value, an empty text, no entries.
class TorchValue {
 public:
  enum class Kind : uint8_t { kAbsent, kNone, kBool, kInt, kFloat, kText, kList, kDict, kTensor, kObject };

  // Of Python's types that are one kind here: lists, tuples and sets; texts and bytes.
  enum class Form : uint8_t { kOwn, kTuple, kSet, kBytes };

  TorchValue() = default;
  Kind kind() const;
  Form form() const;
  explicit operator bool() const { return kind() != Kind::kAbsent; }

  std::optional<bool> boolean() const;
  std::optional<int64_t> integer() const;
  std::optional<double> number() const;  // of an integer as well
  std::string_view text() const;         // of a text, and of bytes
  const TorchTensor* tensor() const;     // null: none

  // Of a list, a tuple or a set; of an object, what it was made of.
  size_t size() const;
  TorchValue operator[](size_t i) const;
  // Of a dict, in its order; of an object, its attributes.
  std::vector<std::pair<TorchValue, TorchValue>> entries() const;
  TorchValue operator[](std::string_view key) const;
  // "collections.deque", "deepspeed.runtime.zero.config.ZeroStageEnum".
  std::string_view name() const;

 private:
  friend class TorchFile;
  friend class Unpickler;
  TorchValue(const TorchFile* file, uint32_t index) : file_(file), index_(index) {}
  const TorchFile* file_ = nullptr;
  uint32_t index_ = 0;
};

class TorchFile {
 public:
  // kNotFound, kInvalidArgument: in one line, what in the file is wrong or not served. kDataLoss: it ends
  // before what it says it has.
  static absl::StatusOr<std::unique_ptr<TorchFile>> Open(const std::string& path);
  ~TorchFile();
  TorchFile(const TorchFile&) = delete;
  TorchFile& operator=(const TorchFile&) = delete;

  const std::string& path() const { return path_; }
  TorchValue root() const;

  // Its descriptor goes, and each read opens the file anew: for who has more files than may be open.
  void Rest();

  // Bytes of a tensor of this file, from its byte `first` on. Any thread. kDataLoss: the file ends early.
  absl::Status Read(const TorchTensor& tensor, uint64_t first, std::span<std::byte> to) const;

 private:
  friend class TorchValue;
  friend class Unpickler;
  struct Node;
  struct Archive;
  explicit TorchFile(std::string path);
  absl::Status ReadAt(uint64_t offset, void* to, size_t bytes) const;
  absl::Status ReadFrom(int fd, uint64_t offset, void* to, size_t bytes) const;

  std::string path_;
  int fd_ = -1;
  uint64_t bytes_ = 0;
  std::vector<Node> nodes_;
  uint32_t root_ = 0;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_TORCH_FILE_H_
