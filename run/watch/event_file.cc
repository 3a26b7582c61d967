#include "run/watch/event_file.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/directory.h"
#include "base/io_error.h"
#include "base/status_macros.h"

namespace penstock::run {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr const char* kTensorboard = "tensorboard";
constexpr const char* kPrefix = "events.out.tfevents.";
constexpr size_t kFrame = 16;  // of a record, beside its message

// Protobuf's types of fields, and the fields of Event, Summary and Summary.Value.
enum Wire : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
constexpr int kEventWallTime = 1, kEventStep = 2, kEventFileVersion = 3, kEventSummary = 5;
constexpr int kSummaryValue = 1, kValueTag = 1, kValueSimple = 2;

uint32_t Crc32c(std::string_view bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < t.size(); ++i) {
      uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
      t[i] = crc;
    }
    return t;
  }();
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = (crc >> 8) ^ table[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  return ~crc;
}

uint32_t Masked(uint32_t crc) { return std::rotr(crc, 15) + 0xa282ead8u; }

template <typename T>
std::string Raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}
template <typename T>
T FromRaw(std::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

std::string Varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
std::string Key(int field, Wire wire) { return Varint(static_cast<uint64_t>(field) << 3 | wire); }
std::string BytesField(int field, std::string_view bytes) {
  return absl::StrCat(Key(field, kBytes), Varint(bytes.size()),
                      absl::string_view(bytes.data(), bytes.size()));
}

absl::Status NoMessage() { return absl::DataLossError("tensorboard: a record is no event"); }

// Takes one field off the front of a message.
struct Field {
  int number = 0;
  Wire wire = kVarint;
  uint64_t value = 0;      // of kVarint
  std::string_view bytes;  // of the others
};
absl::StatusOr<uint64_t> TakeVarint(std::string_view* message) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64 && !message->empty(); shift += 7) {
    const auto byte = static_cast<uint8_t>(message->front());
    message->remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  return NoMessage();
}
absl::StatusOr<Field> TakeField(std::string_view* message) {
  ASSIGN_OR_RETURN(const uint64_t key, TakeVarint(message));
  Field field{.number = static_cast<int>(key >> 3), .wire = static_cast<Wire>(key & 7), .bytes = {}};
  uint64_t size = 0;
  switch (field.wire) {
    case kVarint: {
      ASSIGN_OR_RETURN(field.value, TakeVarint(message));
      return field;
    }
    case kFixed64:
      size = 8;
      break;
    case kFixed32:
      size = 4;
      break;
    case kBytes: {
      ASSIGN_OR_RETURN(size, TakeVarint(message));
      break;
    }
    default:
      return NoMessage();
  }
  if (size > message->size()) return NoMessage();
  field.bytes = message->substr(0, size);
  message->remove_prefix(size);
  return field;
}

double Now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string HostName() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == 0) return "localhost";
  return name;
}

// Ids are the last part of files' names, and come from a record that a stranger may have written.
bool IsPartOfName(const std::string& id) {
  return !id.empty() && std::all_of(id.begin(), id.end(),
                                    [](char c) { return absl::ascii_isalnum(c) || c == '-' || c == '_'; });
}

// As this program makes them ("1a2b3c4d-0123456789abcdef") and its Python package ("python-0123456789ab"):
// no other program's files end so.
bool IsMadeHere(const std::string& id) {
  constexpr size_t kLeastDigits = 12;
  const size_t dash = id.rfind('-');
  return IsPartOfName(id) && dash != std::string::npos && id.size() - dash > kLeastDigits &&
         id.find_first_not_of("0123456789abcdef", dash + 1) == std::string::npos;
}

// The files of the run in there, from the first that it began.
absl::StatusOr<std::vector<std::string>> FilesOf(const std::string& directory, const std::string& run_id) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(directory));
  std::vector<std::string> paths;
  for (const std::string& name : names) {
    if (absl::StartsWith(name, kPrefix) && absl::EndsWith(name, "." + run_id))
      paths.push_back((std::filesystem::path(directory) / name).string());
  }
  return paths;
}

// Of a file that is sorted, and read, behind `last`; empty: there is none yet.
std::string NewName(const std::string& last, const std::string& run_id) {
  int64_t seconds = static_cast<int64_t>(Now());
  int64_t before = 0;
  const size_t prefix = std::string_view(kPrefix).size();
  if (last.size() > prefix && absl::SimpleAtoi(last.substr(prefix, last.find('.', prefix) - prefix), &before))
    seconds = std::max(seconds, before + 1);
  return absl::StrFormat("%s%010d.%s.%s", kPrefix, seconds, HostName(), run_id);
}

}  // namespace

std::string EventRecord(std::string_view message) {
  const std::string length = Raw<uint64_t>(message.size());
  return absl::StrCat(length, Raw(Masked(Crc32c(length))), absl::string_view(message.data(), message.size()),
                      Raw(Masked(Crc32c(message))));
}

std::string FileVersionEvent(double wall_time) {
  return absl::StrCat(Key(kEventWallTime, kFixed64), Raw(wall_time),
                      BytesField(kEventFileVersion, "brain.Event:2"));
}

std::string ScalarEvent(double wall_time, int64_t step, const Scalar& scalar) {
  const std::string value = absl::StrCat(BytesField(kValueTag, scalar.tag), Key(kValueSimple, kFixed32),
                                         Raw(static_cast<float>(scalar.value)));
  return absl::StrCat(Key(kEventWallTime, kFixed64), Raw(wall_time), Key(kEventStep, kVarint),
                      Varint(static_cast<uint64_t>(step)),
                      BytesField(kEventSummary, BytesField(kSummaryValue, value)));
}

absl::StatusOr<ReadRecord> ReadEventRecord(std::string_view bytes) {
  const auto torn = [] { return absl::OutOfRangeError("tensorboard: a record is torn"); };
  const auto damaged = [] { return absl::DataLossError("tensorboard: a record is damaged"); };
  if (bytes.size() < 12) return torn();
  const auto length = FromRaw<uint64_t>(bytes);
  if (FromRaw<uint32_t>(bytes.substr(8)) != Masked(Crc32c(bytes.substr(0, 8)))) return damaged();
  if (bytes.size() < kFrame || length > bytes.size() - kFrame) return torn();
  const std::string_view message = bytes.substr(12, length);
  if (FromRaw<uint32_t>(bytes.substr(12 + length)) != Masked(Crc32c(message))) return damaged();
  return ReadRecord{message, static_cast<size_t>(length) + kFrame};
}

absl::StatusOr<std::pair<int64_t, std::string>> ReadEvent(std::string_view message) {
  std::pair<int64_t, std::string> read{0, ""};
  while (!message.empty()) {
    ASSIGN_OR_RETURN(const Field field, TakeField(&message));
    if (field.number == kEventStep && field.wire == kVarint) read.first = static_cast<int64_t>(field.value);
    if (field.number != kEventSummary || field.wire != kBytes) continue;
    std::string_view summary = field.bytes;
    while (!summary.empty()) {
      ASSIGN_OR_RETURN(const Field value, TakeField(&summary));
      if (value.number != kSummaryValue || value.wire != kBytes) continue;
      std::string_view parts = value.bytes;
      while (!parts.empty()) {
        ASSIGN_OR_RETURN(const Field part, TakeField(&parts));
        if (part.number == kValueTag && part.wire == kBytes) read.second = std::string(part.bytes);
      }
    }
  }
  return read;
}

absl::StatusOr<std::unique_ptr<EventFile>> EventFile::Open(const std::string& directory,
                                                           const MonitorOwner& owner) {
  if (!IsPartOfName(owner.run_id)) {
    return absl::DataLossError(absl::StrCat(kTensorboard, ": the run's record is damaged: its run_id is ",
                                            OneLine(owner.run_id), ", which is no part of a file's name"));
  }
  RETURN_IF_ERROR(MakeDirectory(kTensorboard, directory));
  return std::unique_ptr<EventFile>(new EventFile(directory, owner));
}

absl::Status EventFile::Begin(int64_t samples) {
  last_.clear();
  for (const std::string& id : owner_.replaces) {
    if (!IsMadeHere(id)) continue;
    ASSIGN_OR_RETURN(const std::vector<std::string> paths, FilesOf(directory_, id));
    for (const std::string& path : paths) {
      std::error_code error;
      std::filesystem::remove(path, error);
      if (error)
        return absl::UnknownError(absl::StrCat(kTensorboard, ": ", path, ": remove: ", error.message(),
                                               ": it is of the run that is replaced"));
    }
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> there, FilesOf(directory_, owner_.run_id));
  file_ = nullptr;
  for (const std::string& path : there) {
    ASSIGN_OR_RETURN(std::unique_ptr<AppendFile> file, AppendFile::Open(kTensorboard, path));
    ASSIGN_OR_RETURN(const bool whole, Take(samples, *file));
    file_ = whole ? std::move(file) : nullptr;
  }
  if (file_ == nullptr) {
    const std::string last = there.empty() ? "" : std::filesystem::path(there.back()).filename().string();
    const std::string name = NewName(last, owner_.run_id);
    ASSIGN_OR_RETURN(file_,
                     AppendFile::Open(kTensorboard, (std::filesystem::path(directory_) / name).string()));
  }
  ASSIGN_OR_RETURN(const int64_t size, file_->Size());
  return size > 0 ? absl::OkStatus() : file_->Append(EventRecord(FileVersionEvent(Now())));
}

absl::StatusOr<bool> EventFile::Take(int64_t samples, const AppendFile& file) {
  bool damaged = false, behind = false;
  const auto take = [&](std::string_view bytes) -> absl::StatusOr<int64_t> {
    const absl::StatusOr<ReadRecord> record = ReadEventRecord(bytes);
    if (absl::IsOutOfRange(record.status())) return AppendFile::kMore;  // or torn, which is known at the end
    damaged = !record.ok();
    if (damaged) return AppendFile::kStop;
    ASSIGN_OR_RETURN(const auto event, ReadEvent(record->message));
    behind = !event.second.empty() && event.first > samples;
    if (behind) return AppendFile::kStop;
    if (!event.second.empty()) last_[event.second] = event.first;
    return static_cast<int64_t>(record->bytes);
  };
  ASSIGN_OR_RETURN(const int64_t whole, file.Walk(take));
  ASSIGN_OR_RETURN(const int64_t size, file.Size());
  // No record of a scalar is so long.
  if (damaged || (!behind && size - whole >= AppendFile::kMostUnitBytes)) return false;
  if (whole < size) RETURN_IF_ERROR(file.Cut(whole));
  return true;
}

absl::Status EventFile::Append(int64_t samples, const std::vector<Scalar>& scalars) {
  std::string records;
  const double now = Now();
  for (const Scalar& scalar : scalars) {
    const auto [last, first] = last_.try_emplace(scalar.tag, -1);
    if (samples <= last->second) continue;
    last->second = samples;
    records += EventRecord(ScalarEvent(now, samples, scalar));
  }
  return file_->Append(records);
}

}  // namespace penstock::run
