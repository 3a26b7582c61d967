#include "swap/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/foreign_file.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/read_at.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "swap/store_files.h"

namespace penstock::swap {
namespace {

struct DtypeEntry {
  Dtype dtype;
  std::string_view name;
  uint64_t bytes;
};
constexpr std::array<DtypeEntry, 15> kDtypes = {{{Dtype::kBool, "BOOL", 1},
                                                 {Dtype::kU8, "U8", 1},
                                                 {Dtype::kI8, "I8", 1},
                                                 {Dtype::kF8E5M2, "F8_E5M2", 1},
                                                 {Dtype::kF8E4M3, "F8_E4M3", 1},
                                                 {Dtype::kI16, "I16", 2},
                                                 {Dtype::kU16, "U16", 2},
                                                 {Dtype::kF16, "F16", 2},
                                                 {Dtype::kBf16, "BF16", 2},
                                                 {Dtype::kI32, "I32", 4},
                                                 {Dtype::kU32, "U32", 4},
                                                 {Dtype::kF32, "F32", 4},
                                                 {Dtype::kF64, "F64", 8},
                                                 {Dtype::kI64, "I64", 8},
                                                 {Dtype::kU64, "U64", 8}}};

std::optional<Dtype> ParseDtype(std::string_view name) {
  for (const DtypeEntry& entry : kDtypes) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

absl::Status IsThere(const std::string& path) {
  return absl::AlreadyExistsError(absl::StrCat(path, " is there already"));
}

// A tensor's entry is 8 values: 100,000 tensors. None nests deeper than "shape".
constexpr JsonOptions kHeaderOptions = {.max_depth = 8, .max_values = 800'000, .duplicate_keys = false};

absl::StatusOr<TensorInfo> ParseTensor(const std::string& name, const nlohmann::json& value, uint64_t* end) {
  const auto refuse = [&](const auto&... parts) {
    return absl::DataLossError(absl::StrCat("tensor ", name, ": ", parts...));
  };
  if (!value.is_object()) return refuse("not an object");
  const auto dtype = value.find("dtype"), shape = value.find("shape"), offsets = value.find("data_offsets");
  if (dtype == value.end() || !dtype->is_string()) return refuse("no dtype");
  if (shape == value.end() || !shape->is_array()) return refuse("no shape");
  if (offsets == value.end() || !offsets->is_array() || offsets->size() != 2)
    return refuse("no data_offsets");
  TensorInfo tensor;
  tensor.name = name;
  const auto parsed = ParseDtype(dtype->get_ref<const std::string&>());
  if (!parsed.has_value()) return refuse("unknown dtype ", dtype->get_ref<const std::string&>());
  tensor.dtype = *parsed;
  for (const nlohmann::json& length : *shape) {
    if (!length.is_number_unsigned()) return refuse("a shape that is not made of whole numbers");
    tensor.shape.push_back(length.get<uint64_t>());
  }
  if (!(*offsets)[0].is_number_unsigned() || !(*offsets)[1].is_number_unsigned())
    return refuse("no data_offsets");
  tensor.offset = (*offsets)[0].get<uint64_t>();
  *end = (*offsets)[1].get<uint64_t>();
  const auto bytes = tensor.Bytes();
  if (!bytes.ok()) return refuse(bytes.status().message());
  if (*end < tensor.offset || *end - tensor.offset != *bytes) {
    return refuse("bytes ", tensor.offset, " to ", *end, " for a type and shape of ", *bytes, " bytes");
  }
  return tensor;
}

}  // namespace

std::string_view DtypeName(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)].name; }
uint64_t DtypeBytes(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)].bytes; }

absl::StatusOr<uint64_t> TensorInfo::Bytes() const {
  constexpr uint64_t kMax = uint64_t{1} << 62;
  uint64_t bytes = DtypeBytes(dtype);
  // A zero anywhere makes it empty, whatever the others are.
  if (std::find(shape.begin(), shape.end(), 0u) != shape.end()) return 0;
  for (uint64_t length : shape) {
    if (length > kMax / bytes) return absl::InvalidArgumentError("a shape too large for any file");
    bytes *= length;
  }
  return bytes;
}

// ---- writing ----

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, std::vector<TensorInfo> tensors,
    const std::map<std::string, std::string>& metadata, bool overwrite) {
  uint64_t data_bytes = 0;
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) {
    for (const auto& [key, value] : metadata) header["__metadata__"][key] = value;
  }
  std::set<std::string> names = {"__metadata__"};
  for (TensorInfo& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(absl::StrCat("two tensors with the name ", tensor.name));
    }
    const auto bytes = tensor.Bytes();
    if (!bytes.ok())
      return absl::InvalidArgumentError(absl::StrCat(tensor.name, ": ", bytes.status().message()));
    tensor.offset = data_bytes;
    data_bytes += *bytes;
    if (data_bytes > uint64_t{1} << 62) return absl::InvalidArgumentError("more data than a file can hold");
    header.emplace(tensor.name, nlohmann::ordered_json{{"dtype", std::string(DtypeName(tensor.dtype))},
                                                       {"shape", tensor.shape},
                                                       {"data_offsets", {tensor.offset, data_bytes}}});
  }
  // Names that are not UTF-8 become replacement characters rather than an exception.
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned
  if (text.size() > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a header of ", text.size(), " bytes; the most is ", kMaxSafetensorsHeaderBytes));
  }

  absl::StatusOr<AtomicFile> file = AtomicFile::Create(path, {.mode = 0644, .replace = overwrite});
  if (absl::IsAlreadyExists(file.status())) return IsThere(path);
  RETURN_IF_ERROR(file.status());
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter(*std::move(file)));
  writer->tensors_ = std::move(tensors);
  writer->data_bytes_ = data_bytes;
  const uint64_t total = 8 + text.size() + data_bytes;
  if (::posix_fallocate(writer->file_.fd(), 0, static_cast<off_t>(total)) == ENOSPC) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path, " needs ", total, " bytes, more than the disk has free"));
  }
  std::array<char, 8> length;
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(uint64_t{text.size()} >> (8 * i));
  RETURN_IF_ERROR(writer->file_.Write(std::string_view(length.data(), length.size())));
  RETURN_IF_ERROR(writer->file_.Write(text));
  return writer;
}

absl::Status SafetensorsWriter::Append(std::span<const std::byte> bytes) {
  if (bytes.size() > data_bytes_ - written_) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_.path(), ": ", written_ + bytes.size(), " bytes for tensors of ", data_bytes_));
  }
  RETURN_IF_ERROR(file_.Write(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size())));
  written_ += bytes.size();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::CheckWhole() const {
  if (written_ == data_bytes_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(file_.path(), ": ", written_, " of ", data_bytes_, " bytes were written"));
}

absl::Status SafetensorsWriter::Finish() {
  RETURN_IF_ERROR(CheckWhole());
  const absl::Status status = file_.Commit();
  return absl::IsAlreadyExists(status) ? IsThere(file_.path()) : status;
}

absl::StatusOr<AtomicFile> SafetensorsWriter::Take() {
  RETURN_IF_ERROR(CheckWhole());
  RETURN_IF_ERROR(file_.Sync());
  return std::move(file_);
}

// ---- reading ----

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_bytes) {
  const absl::StatusOr<nlohmann::json> parsed =
      ParseJsonObject(json, "the safetensors header", kHeaderOptions);
  if (!parsed.ok()) return absl::DataLossError(parsed.status().message());
  const nlohmann::json& header = *parsed;
  SafetensorsHeader result;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      if (value.is_null()) continue;
      if (!value.is_object()) return absl::DataLossError("__metadata__ is not an object");
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string())
          return absl::DataLossError(absl::StrCat("__metadata__ ", key, " is not a string"));
        result.metadata[key] = text.get<std::string>();
      }
      continue;
    }
    uint64_t end = 0;
    ASSIGN_OR_RETURN(auto tensor, ParseTensor(name, value, &end));
    if (end > data_bytes) {
      return absl::DataLossError(absl::StrCat("tensor ", name, " ends at byte ", end, " of ", data_bytes));
    }
    result.tensors.push_back(std::move(tensor));
  }
  std::sort(result.tensors.begin(), result.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    // Empty tensors stand before the one that starts where they do.
    const uint64_t a_bytes = a.Bytes().value_or(0), b_bytes = b.Bytes().value_or(0);
    return std::tie(a.offset, a_bytes, a.name) < std::tie(b.offset, b_bytes, b.name);
  });
  uint64_t at = 0;
  for (const TensorInfo& tensor : result.tensors) {
    if (tensor.offset != at) {
      return absl::DataLossError(absl::StrCat("tensor ", tensor.name, " starts at byte ", tensor.offset,
                                              "; the one before it ends at ", at));
    }
    at += tensor.Bytes().value_or(0);
  }
  if (at != data_bytes) {
    return absl::DataLossError(absl::StrCat("the tensors have ", at, " bytes, the file ", data_bytes));
  }
  return result;
}

absl::StatusOr<std::unique_ptr<SafetensorsReader>> SafetensorsReader::Open(const std::string& path) {
  std::unique_ptr<SafetensorsReader> reader(new SafetensorsReader());
  reader->path_ = path;
  reader->fd_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (reader->fd_ < 0) return MakeIoError({.op = "open", .path = path, .error = errno});
  struct stat info;
  if (::fstat(reader->fd_, &info) != 0) return MakeIoError({.op = "look at", .path = path, .error = errno});
  const auto refuse = [&](const auto&... parts) {
    return absl::DataLossError(absl::StrCat(path, ": ", parts...));
  };
  if (!S_ISREG(info.st_mode))
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a regular file"));
  const auto file_bytes = static_cast<uint64_t>(info.st_size);
  std::array<std::byte, 8> prefix;
  if (file_bytes < prefix.size()) return refuse("too short for a safetensors file");
  RETURN_IF_ERROR(reader->ReadAt(0, prefix));
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) length |= static_cast<uint64_t>(prefix[i]) << (8 * i);
  if (std::string head(std::min<uint64_t>(file_bytes, kForeignHeadBytes), '\0');
      length > kMaxSafetensorsHeaderBytes) {
    RETURN_IF_ERROR(reader->ReadAt(0, std::as_writable_bytes(std::span(head))));
    if (IsGitLfsPointer(head)) return refuse(kGitLfsPointer);
    if (head.starts_with("PK") || head.starts_with("\x80\x02"))
      return refuse(
          "is a file of torch.save, not safetensors: load it there and write it with "
          "safetensors.torch.save_file");
  }
  if (length > kMaxSafetensorsHeaderBytes || length > file_bytes - 8) {
    return refuse("not a safetensors file: a header of ", length, " bytes in a file of ", file_bytes);
  }
  std::string json(length, '\0');
  RETURN_IF_ERROR(reader->ReadAt(8, std::as_writable_bytes(std::span(json))));
  auto header = ParseSafetensorsHeader(json, file_bytes - 8 - length);
  if (!header.ok()) return refuse(header.status().message());
  reader->data_start_ = 8 + length;
  reader->tensors_ = std::move(header->tensors);
  reader->metadata_ = std::move(header->metadata);
  return reader;
}

SafetensorsReader::~SafetensorsReader() {
  if (fd_ >= 0) ::close(fd_);
}

const TensorInfo* SafetensorsReader::Find(std::string_view name) const {
  for (const TensorInfo& tensor : tensors_) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

absl::Status SafetensorsReader::ReadAt(uint64_t offset, std::span<std::byte> out) const {
  ASSIGN_OR_RETURN(const size_t done, penstock::ReadAt(fd_, path_, offset, out.data(), out.size()));
  return done == out.size() ? absl::OkStatus()
                            : absl::DataLossError(absl::StrCat(path_, " ends at byte ", offset + done));
}

absl::Status SafetensorsReader::Read(const TensorInfo& tensor, uint64_t offset,
                                     std::span<std::byte> out) const {
  ASSIGN_OR_RETURN(const auto bytes, tensor.Bytes());
  if (offset > bytes || out.size() > bytes - offset) {
    return absl::InvalidArgumentError(absl::StrCat("bytes ", offset, " to ", offset + out.size(),
                                                   " of tensor ", tensor.name, " of ", bytes));
  }
  return ReadAt(data_start_ + tensor.offset + offset, out);
}

}  // namespace penstock::swap
