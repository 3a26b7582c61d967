// The safetensors file format: 8 bytes of little-endian header length, a JSON header that names each tensor's
// type, shape and place, then the tensors' bytes. Written in one pass over any amount of data; read without
// trusting it.
//
//   std::vector<TensorInfo> tensors = {{"wte.weight", Dtype::kF32, {256, 64}}, ...};
//   auto writer = SafetensorsWriter::Create("model.safetensors", tensors, {{"format", "pt"}});
//   for each tensor in that order: (*writer)->Append(bytes)...;          // in pieces of any size
//   absl::Status done = (*writer)->Finish();                             // now the file is there, whole
//
// Threads: one at a time per object. Errors: kInvalidArgument: the caller's tensors or bytes; kDataLoss: a
// file that is not what it says; kAlreadyExists; kResourceExhausted: disk full; others as the operating
// system says.
#ifndef PENSTOCK_SWAP_SAFETENSORS_H_
#define PENSTOCK_SWAP_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/atomic_file.h"

namespace penstock::swap {

enum class Dtype : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kF64,
  kI64,
  kU64
};
std::string_view DtypeName(Dtype dtype);  // "BOOL", "U8", ..., as in the files
uint64_t DtypeBytes(Dtype dtype);

struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<uint64_t> shape;  // empty: a scalar
  // Of the tensor's data, from the first byte behind the header. Set by the writer and the reader.
  uint64_t offset = 0;

  // Product of shape and size of the type; kInvalidArgument if it does not fit into 63 bits.
  absl::StatusOr<uint64_t> Bytes() const;
};

// Other readers take 100 MiB; these are 100,000 tensors with names of 300 bytes.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = uint64_t{32} << 20;

class SafetensorsWriter {
 public:
  // The header follows from the arguments, so that nothing has to be held back. Space is reserved. The file
  // appears under its name in Finish (base/atomic_file.h). kInvalidArgument: two tensors of one name, the
  // name
  // "__metadata__", a header too long.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, std::vector<TensorInfo> tensors,
      const std::map<std::string, std::string>& metadata = {}, bool overwrite = false);
  // Without Finish, nothing is left behind.
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // The next bytes of the data: tensors in the order given, without gaps. kInvalidArgument if they are too
  // many.
  absl::Status Append(std::span<const std::byte> bytes);
  // Syncs and publishes. kFailedPrecondition if bytes are missing; kAlreadyExists if a file of that name is
  // there and `overwrite` was not set.
  absl::Status Finish();
  // Instead of Finish: the file, whole and durable, for who commits it, perhaps with others.
  absl::StatusOr<AtomicFile> Take();

  uint64_t data_bytes() const { return data_bytes_; }  // all tensors together
  const std::vector<TensorInfo>& tensors() const { return tensors_; }

 private:
  explicit SafetensorsWriter(AtomicFile file) : file_(std::move(file)) {}
  absl::Status CheckWhole() const;

  AtomicFile file_;
  std::vector<TensorInfo> tensors_;
  uint64_t data_bytes_ = 0;
  uint64_t written_ = 0;
};

class SafetensorsReader {
 public:
  // Reads and checks the header: every tensor lies within the file, has the length that its type and shape
  // ask for, and all of them together cover the data without overlap or gap. kDataLoss says what is wrong.
  static absl::StatusOr<std::unique_ptr<SafetensorsReader>> Open(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // in the order of their data
  const TensorInfo* Find(std::string_view name) const;                 // null if there is none
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }
  // Where the first byte behind the header is, in the file.
  uint64_t data_start() const { return data_start_; }

  // Bytes [offset, offset + out.size()) of a tensor. kInvalidArgument if that is beyond its end.
  absl::Status Read(const TensorInfo& tensor, uint64_t offset, std::span<std::byte> out) const;

 private:
  SafetensorsReader() = default;
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) const;

  std::string path_;
  int fd_ = -1;
  uint64_t data_start_ = 0;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

// What stands in the header of a file of `file_bytes` bytes: the parser of SafetensorsReader, for tests and
// fuzzing.
struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;
  std::map<std::string, std::string> metadata;
};
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_bytes);

}  // namespace penstock::swap

#endif  // PENSTOCK_SWAP_SAFETENSORS_H_
