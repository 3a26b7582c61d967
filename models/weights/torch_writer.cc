#include "models/weights/torch_writer.h"

#include <libdeflate.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace penstock::models {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr uint32_t kLong = 0xFFFFFFFF;  // the number stands in the zip64 field
constexpr uint64_t kLocalBytes = 30, kWideBytes = 20;
constexpr uint64_t kChecksumOffset = 14;  // in a local header

template <typename T>
void Number(std::string* to, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  to->append(bytes, sizeof(T));
}

std::string_view StorageName(swap::Dtype dtype) {
  switch (dtype) {
    case swap::Dtype::kF32:
      return "FloatStorage";
    case swap::Dtype::kF16:
      return "HalfStorage";
    case swap::Dtype::kBf16:
      return "BFloat16Storage";
    case swap::Dtype::kI64:
      return "LongStorage";
    default:
      return "ByteStorage";
  }
}

}  // namespace

static_assert(std::endian::native == std::endian::little, "numbers are written as they are");

TorchPickle::TorchPickle() : code_("\x80\x02") {}

void TorchPickle::Int(int64_t value) {
  if (value >= INT32_MIN && value <= INT32_MAX) {
    code_ += 'J';
    Number(&code_, static_cast<int32_t>(value));
    return;
  }
  code_ += "\x8a\x08";  // a long of eight bytes
  Number(&code_, value);
}

void TorchPickle::Float(double value) {
  code_ += 'G';
  Number(&code_, __builtin_bswap64(std::bit_cast<uint64_t>(value)));
}

void TorchPickle::Text(std::string_view text) {
  code_ += 'X';
  Number(&code_, static_cast<uint32_t>(text.size()));
  code_ += text;
}

void TorchPickle::Name(std::string_view module, std::string_view name) {
  code_ += 'c';
  code_.append(module).append("\n").append(name).append("\n");
}

void TorchPickle::BeginObject(std::string_view module, std::string_view name) {
  Name(module, name);
  code_ += ")\x81";
}

void TorchPickle::Json(const nlohmann::json& value) {
  if (value.is_object()) {
    BeginDict();
    for (const auto& [key, item] : value.items()) {
      Text(key);
      Json(item);
    }
    EndDict();
  } else if (value.is_array()) {
    BeginList();
    for (const nlohmann::json& item : value) Json(item);
    EndList();
  } else if (value.is_boolean()) {
    Bool(value.get<bool>());
  } else if (value.is_number_integer()) {
    Int(value.get<int64_t>());
  } else if (value.is_number()) {
    Float(value.get<double>());
  } else if (value.is_string()) {
    Text(value.get<std::string>());
  } else {
    None();
  }
}

// torch._utils._rebuild_tensor_v2(storage, 0, sizes, strides, False, OrderedDict())
size_t TorchPickle::Tensor(swap::Dtype dtype, const std::vector<uint64_t>& sizes) {
  const size_t storage = storages_.size();
  uint64_t elements = 1;
  for (const uint64_t size : sizes) elements *= size;
  storages_.push_back(elements * swap::DtypeBytes(dtype));
  Name("torch._utils", "_rebuild_tensor_v2");
  code_ += "((";
  Text("storage");
  Name("torch", StorageName(dtype));
  Text(absl::StrCat(storage));
  Text("cpu");
  Int(static_cast<int64_t>(elements));
  code_ += "tQ";
  Int(0);
  code_ += '(';
  for (const uint64_t size : sizes) Int(static_cast<int64_t>(size));
  code_ += "t(";
  uint64_t stride = elements;
  for (const uint64_t size : sizes) {
    stride /= std::max<uint64_t>(size, 1);
    Int(static_cast<int64_t>(stride));
  }
  code_ += "t\x89";
  Name("collections", "OrderedDict");
  code_ += ")RtR";
  return storage;
}

void TorchWriter::Add(const std::string& name, uint64_t bytes) {
  Member member{.name = absl::StrCat("archive/", name), .header = end_, .bytes = bytes};
  // Two extra fields: the lengths once more, in 64 bits, and what pads the data to its alignment.
  const uint64_t least = kLocalBytes + member.name.size() + kWideBytes + 4;
  member.data = (end_ + least + kAlignment - 1) / kAlignment * kAlignment;
  end_ = member.data + bytes;
  members_.push_back(std::move(member));
}

std::string TorchWriter::LocalHeader(const Member& member) const {
  std::string header;
  const uint64_t padding = member.data - member.header - kLocalBytes - member.name.size() - kWideBytes - 4;
  const bool wide = member.bytes >= kLong;
  Number<uint32_t>(&header, 0x04034b50);
  Number<uint16_t>(&header, 45);                                         // zip64
  for (int zeros = 0; zeros < 4; ++zeros) Number<uint16_t>(&header, 0);  // flags, stored, time, date
  Number(&header, member.crc);
  for (int both = 0; both < 2; ++both) Number(&header, wide ? kLong : static_cast<uint32_t>(member.bytes));
  Number(&header, static_cast<uint16_t>(member.name.size()));
  Number(&header, static_cast<uint16_t>(kWideBytes + 4 + padding));
  header += member.name;
  Number<uint16_t>(&header, wide ? 1 : 0x4250);  // of no meaning where it is not needed
  Number<uint16_t>(&header, kWideBytes - 4);
  Number(&header, member.bytes);
  Number(&header, member.bytes);
  Number<uint16_t>(&header, 0x4246);  // padding, as torch writes it
  Number(&header, static_cast<uint16_t>(padding));
  header.append(padding, 'Z');
  return header;
}

absl::Status TorchWriter::Put(std::string_view text) {
  return stream_.Append(std::as_bytes(std::span(text)));
}

// All of a member.
absl::Status TorchWriter::PutMember(Member* member, std::string_view contents) {
  member->crc = libdeflate_crc32(0, contents.data(), contents.size());
  member->written = contents.size();
  RETURN_IF_ERROR(Put(LocalHeader(*member)));
  return Put(contents);
}

absl::StatusOr<std::unique_ptr<TorchWriter>> TorchWriter::Create(const std::string& path,
                                                                 const TorchPickle& pickle,
                                                                 swap::WriteStream* stream) {
  std::unique_ptr<TorchWriter> writer(new TorchWriter(path, stream));
  const std::string code = pickle.code_ + '.', version = "3\n";
  writer->Add("data.pkl", code.size());
  writer->Add("byteorder", 6);
  writer->Add("version", version.size());
  writer->now_ = writer->members_.size();
  for (size_t s = 0; s < pickle.storages_.size(); ++s)
    writer->Add(absl::StrCat("data/", s), pickle.storages_[s]);
  RETURN_IF_ERROR(stream->Open(path, writer->end_));
  RETURN_IF_ERROR(writer->PutMember(&writer->members_[0], code));
  RETURN_IF_ERROR(writer->PutMember(&writer->members_[1], "little"));
  RETURN_IF_ERROR(writer->PutMember(&writer->members_[2], version));
  RETURN_IF_ERROR(writer->SkipEmpty());
  return writer;
}

// Storages without a byte are complete.
absl::Status TorchWriter::SkipEmpty() {
  for (; now_ < members_.size() && members_[now_].bytes == 0; ++now_)
    RETURN_IF_ERROR(Put(LocalHeader(members_[now_])));
  return absl::OkStatus();
}

absl::Status TorchWriter::Append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (now_ == members_.size())
      return absl::InvalidArgumentError(
          absl::StrCat(path_, ": its tensors are complete, and ", bytes.size(), " bytes more are given"));
    Member& member = members_[now_];
    if (member.written == 0) RETURN_IF_ERROR(Put(LocalHeader(member)));  // its checksum follows
    const size_t n = std::min<uint64_t>(bytes.size(), member.bytes - member.written);
    RETURN_IF_ERROR(stream_.Append(bytes.first(n)));
    member.crc = libdeflate_crc32(member.crc, bytes.data(), n);
    member.written += n;
    bytes = bytes.subspan(n);
    if (member.written < member.bytes) continue;
    RETURN_IF_ERROR(
        stream_.Overwrite(member.header + kChecksumOffset, std::as_bytes(std::span(&member.crc, 1))));
    ++now_;
    RETURN_IF_ERROR(SkipEmpty());
  }
  return absl::OkStatus();
}

absl::Status TorchWriter::Finish() {
  if (!ended_) RETURN_IF_ERROR(End());
  return stream_.Finish();
}

absl::Status TorchWriter::End() {
  std::string directory;
  for (const Member& member : members_) {
    if (member.written != member.bytes)
      return absl::FailedPreconditionError(
          absl::StrCat(path_, ": ", member.name, " has ", member.written, " of ", member.bytes, " bytes"));
    Number<uint32_t>(&directory, 0x02014b50);
    Number<uint16_t>(&directory, 45);
    Number<uint16_t>(&directory, 45);
    for (int zeros = 0; zeros < 4; ++zeros) Number<uint16_t>(&directory, 0);
    Number(&directory, member.crc);
    for (int all = 0; all < 2; ++all) Number(&directory, kLong);
    Number(&directory, static_cast<uint16_t>(member.name.size()));
    Number<uint16_t>(&directory, 28);                                         // the extra field
    for (int zeros = 0; zeros < 3; ++zeros) Number<uint16_t>(&directory, 0);  // comment, disk, attributes
    Number<uint32_t>(&directory, 0);
    Number(&directory, kLong);
    directory += member.name;
    Number<uint16_t>(&directory, 1);
    Number<uint16_t>(&directory, 24);
    for (const uint64_t wide : {member.bytes, member.bytes, member.header}) Number(&directory, wide);
  }
  const uint64_t at = end_, size = directory.size(), count = members_.size();
  Number<uint32_t>(&directory, 0x06064b50);  // zip64's end
  Number<uint64_t>(&directory, 44);
  Number<uint16_t>(&directory, 45);
  Number<uint16_t>(&directory, 45);
  for (int disks = 0; disks < 2; ++disks) Number<uint32_t>(&directory, 0);
  for (const uint64_t wide : {count, count, size, at}) Number(&directory, wide);
  Number<uint32_t>(&directory, 0x07064b50);  // where that is
  Number<uint32_t>(&directory, 0);
  Number<uint64_t>(&directory, at + size);
  Number<uint32_t>(&directory, 1);
  Number<uint32_t>(&directory, 0x06054b50);
  for (int zeros = 0; zeros < 2; ++zeros) Number<uint16_t>(&directory, 0);
  for (int both = 0; both < 2; ++both) Number<uint16_t>(&directory, 0xFFFF);
  for (int both = 0; both < 2; ++both) Number(&directory, kLong);
  Number<uint16_t>(&directory, 0);
  RETURN_IF_ERROR(Put(directory));
  ended_ = true;
  return stream_.Flush();
}

}  // namespace penstock::models
