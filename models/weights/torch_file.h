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
// Memory: what the file's pickle describes (some thousand bytes a tensor), which is bounded however it is
// written; contents of tensors are read on demand.
#ifndef PENSTOCK_MODELS_WEIGHTS_TORCH_FILE_H_
#define PENSTOCK_MODELS_WEIGHTS_TORCH_FILE_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
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
  uint64_t offset = 0;   // of its first byte in the file
  uint32_t storage = 0;  // of the file's, which one it lies in
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
  class Entries;
  Entries entries() const;
  TorchValue operator[](std::string_view key) const;
  TorchValue AtNumber(int64_t key) const;  // of an integer key
  // "collections.deque", "deepspeed.runtime.zero.config.ZeroStageEnum".
  std::string_view name() const;

 private:
  friend class TorchFile;
  friend class Unpickler;
  TorchValue(const TorchFile* file, uint32_t index) : file_(file), index_(index) {}
  const TorchFile* file_ = nullptr;
  uint32_t index_ = 0;
};

// The pairs of a dict, in its order; nothing is copied. Valid as long as the file.
class TorchValue::Entries {
 public:
  using value_type = std::pair<TorchValue, TorchValue>;
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Entries::value_type;
    using difference_type = ptrdiff_t;
    using pointer = const value_type*;
    using reference = value_type;
    Iterator(const Entries* entries, size_t at) : entries_(entries), at_(at) {}
    value_type operator*() const { return (*entries_)[at_]; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    friend bool operator==(const Iterator& a, const Iterator& b) { return a.at_ == b.at_; }

   private:
    const Entries* entries_;
    size_t at_;
  };

  Entries() = default;
  size_t size() const { return pairs_.size(); }
  bool empty() const { return pairs_.empty(); }
  value_type operator[](size_t i) const;
  value_type front() const { return (*this)[0]; }
  Iterator begin() const { return {this, 0}; }
  Iterator end() const { return {this, size()}; }

 private:
  friend class TorchValue;
  Entries(const TorchFile* file, std::span<const std::pair<uint32_t, uint32_t>> pairs)
      : file_(file), pairs_(pairs) {}
  const TorchFile* file_ = nullptr;
  std::span<const std::pair<uint32_t, uint32_t>> pairs_;
};

class TorchFile {
 public:
  // What a file that is opened may take of memory, whatever it describes.
  static constexpr uint64_t kMostBytes = uint64_t{48} << 20;
  // And what it may take in any case.
  static constexpr uint64_t kMostBytesOfAny = uint64_t{512} << 20;

  // Checks the sum of the pickle. kNotFound, kInvalidArgument: in one line, what in the file is wrong or not
  // served, or that it describes more than `most_bytes`, or `bytes_per_pickle_byte` for each byte of its
  // pickle if that is more, hold. kDataLoss: it ends before what it says it has, or is damaged.
  static absl::StatusOr<std::unique_ptr<TorchFile>> Open(const std::string& path,
                                                         uint64_t most_bytes = kMostBytes,
                                                         uint64_t bytes_per_pickle_byte = 0);
  ~TorchFile();
  TorchFile(const TorchFile&) = delete;
  TorchFile& operator=(const TorchFile&) = delete;

  const std::string& path() const { return path_; }
  TorchValue root() const;
  // What was taken of `most_bytes`.
  uint64_t memory_bytes() const;
  uint64_t disk_bytes() const;    // of the file: those that are not holes
  uint64_t pickle_bytes() const;  // of these, its pickle's

  // Its descriptor goes, and each read opens the file anew: for who has more files than may be open.
  void Rest();

  // Bytes of a tensor of this file, from its byte `first` on. Any thread. kDataLoss: the file ends early, or
  // these were the last bytes of their storage that nobody had read, in whatever order, and its sum (CRC-32,
  // of the zip) does not match: something that was read of it is damaged.
  absl::Status Read(const TorchTensor& tensor, uint64_t first, std::span<std::byte> to) const;

  // Reads what is left of the storages of which something was read, and checks their sums: what has been
  // read is known to be right afterwards. Files without sums (torch.serialization.set_crc32_options(False))
  // are not checked. Any thread. Errors as Read.
  absl::Status CheckRead() const;

 private:
  friend class TorchValue;
  friend class Unpickler;
  struct Node;
  struct Storage;
  struct Contents;
  struct Archive;
  explicit TorchFile(std::string path);
  absl::Status Take(Storage* storage, uint64_t offset, std::span<const std::byte> bytes) const;
  absl::Status Damaged(const std::string& member, uint64_t offset, uint64_t bytes) const;
  absl::Status ReadAt(uint64_t offset, void* to, size_t bytes) const;
  absl::Status ReadFrom(int fd, uint64_t offset, void* to, size_t bytes) const;

  std::string path_;
  int fd_ = -1;
  uint64_t bytes_ = 0;
  uint64_t disk_bytes_ = 0;
  uint64_t pickle_bytes_ = 0;
  const std::unique_ptr<Contents> contents_;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_TORCH_FILE_H_
