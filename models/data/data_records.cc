#include "models/data/data_records.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/foreign_file.h"
#include "base/io_error.h"
#include "base/json.h"
#include "base/read_at.h"
#include "base/status_macros.h"
#include "text/example.h"

namespace penstock::models {
namespace {

constexpr size_t kMostLooked = size_t{64} << 20;      // for the end of the first record
constexpr size_t kMostLookedNamed = size_t{4} << 20;  // where the name says what it is
constexpr std::string_view kSpace = " \t\r\n";
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

bool IsSpace(char c) { return kSpace.find(c) != std::string_view::npos; }

absl::Status Refused(const std::string& path, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("data file ", path, ": ", std::string(why)));
}

// What a directory is in the place of a file.
absl::Status NoFile(const std::string& path) {
  for (const auto& [name, part] :
       {std::pair<const char*, const char*>{"dataset_dict.json", "['train']"}, {"dataset_info.json", ""}}) {
    ASSIGN_OR_RETURN(const bool saved, PathExists(absl::StrCat(path, "/", name)));
    if (!saved) continue;
    return Refused(path,
                   absl::StrCat("is a directory that save_to_disk of datasets has written, which is not "
                                "read: python3 -c \"import datasets; datasets.load_from_disk('",
                                path, "')", part, ".to_json('", path, ".jsonl')\""));
  }
  return Refused(path, "is a directory: give the files in it, each as `data` of its own");
}

// The begin of a file; more of it with each More().
class Head {
 public:
  static absl::StatusOr<Head> Open(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return MakeIoError({.op = "open", .path = path, .error = errno});
    Head head(path, fd);
    struct stat info {};
    if (::fstat(fd, &info) != 0) return MakeIoError({.op = "stat", .path = path, .error = errno});
    if (S_ISDIR(info.st_mode)) return NoFile(path);
    if (!S_ISREG(info.st_mode))
      return absl::FailedPreconditionError(absl::StrCat("data file ", path, ": is not a regular file"));
    RETURN_IF_ERROR(head.More());
    return head;
  }
  Head(Head&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {
    text_ = std::move(other.text_);
    whole_ = other.whole_;
  }
  Head& operator=(Head&&) = delete;
  ~Head() {
    if (fd_ >= 0) ::close(fd_);
  }
  const std::string& text() const { return text_; }
  bool whole() const { return whole_; }
  absl::Status More() {
    const size_t before = text_.size(), wanted = std::max<size_t>(before, 32 << 10);
    text_.resize(before + wanted);
    ASSIGN_OR_RETURN(const size_t more, ReadAt(fd_, path_, before, text_.data() + before, wanted));
    whole_ = more < wanted;
    text_.resize(before + more);
    return absl::OkStatus();
  }

 private:
  Head(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  std::string path_;
  int fd_;
  std::string text_;
  bool whole_ = false;
};

// Whether the file begins with an array of objects: its first element, or none.
absl::StatusOr<bool> BeginsArray(Head& head) {
  while (true) {
    RecordSplitter splitter(DataForm::kArray);
    bool found = false, object = false;
    const absl::Status status = splitter.Push(head.text(), [&](std::string_view element) {
      if (!found) object = ParseJsonObject(element, "").ok();
      found = true;
      return absl::CancelledError();
    });
    if (found) return object;
    if (!status.ok()) return false;
    if (head.whole()) return splitter.Finish([](std::string_view) { return absl::OkStatus(); }).ok();
    if (head.text().size() >= kMostLooked) return false;
    RETURN_IF_ERROR(head.More());
  }
}

bool NamedJson(std::string_view path) {
  return path.ends_with(".jsonl") || path.ends_with(".ndjson") || path.ends_with(".json");
}

}  // namespace

absl::Status CheckTokenData(const std::string& path) {
  ASSIGN_OR_RETURN(const Head head, Head::Open(path));
  const std::string foreign = DescribeForeignData(head.text(), path, /*tokens=*/true);
  return foreign.empty() ? absl::OkStatus() : Refused(path, foreign);
}

absl::StatusOr<DataForm> DataFormOf(const std::string& path, bool* keys_unknown) {
  ASSIGN_OR_RETURN(Head head, Head::Open(path));
  if (const std::string foreign = DescribeForeignData(head.text(), path, /*tokens=*/false); !foreign.empty())
    return Refused(path, foreign);
  const auto begin = [&] {
    const std::string_view text = head.text();
    return std::min(text.find_first_not_of(kSpace, text.starts_with(kByteOrderMark) ? 3 : 0), text.size());
  };
  while (begin() == head.text().size() && !head.whole() && head.text().size() < kMostLooked)
    RETURN_IF_ERROR(head.More());
  const size_t at = begin();
  const bool named = NamedJson(path);
  const DataForm otherwise = named ? DataForm::kLines : DataForm::kText;
  if (at == head.text().size()) return otherwise;
  if (head.text()[at] == '[') {
    ASSIGN_OR_RETURN(const bool array, BeginsArray(head));
    return array ? DataForm::kArray : otherwise;
  }
  if (head.text()[at] != '{') return otherwise;
  size_t end = head.text().find('\n', at);
  const size_t most = named ? kMostLookedNamed : kMostLooked;
  while (end == std::string::npos && !head.whole() && head.text().size() < most) {
    RETURN_IF_ERROR(head.More());
    end = head.text().find('\n', at);
  }
  if (end == std::string::npos && !head.whole()) return otherwise;
  const std::string_view text = head.text();
  const absl::StatusOr<nlohmann::json> line = ParseJsonObject(text.substr(at, end - at), "");
  if (line.ok()) {
    if (named || text::HasExampleKeys(*line)) return DataForm::kLines;
    if (keys_unknown != nullptr) *keys_unknown = true;
    return DataForm::kText;
  }
  if (named && head.whole() && ParseJsonObject(text.substr(at), "").ok()) {
    return Refused(path,
                   "is one object of JSON; read are lines of JSON, an object in each, or one array of them: "
                   "write the list that is in it (python3 -c \"import json; d = json.load(open('FILE')); "
                   "json.dump(d['KEY'], open('OUT.json', 'w'))\")");
  }
  return otherwise;
}

absl::Status RecordSplitter::Wrong(std::string_view what) const {
  return absl::InvalidArgumentError(absl::StrCat(place(), ": ", std::string(what)));
}

absl::Status RecordSplitter::CheckLength(size_t bytes) const {
  return bytes <= longest_ ? absl::OkStatus()
                           : Wrong(absl::StrCat("longer than ", longest_,
                                                " bytes, the most that is taken at once: cut it into "
                                                "several, or allow more memory (`host_memory`)"));
}

std::string RecordSplitter::place() const {
  return absl::StrCat(array_ ? "element " : "line ", std::max<int64_t>(number_, 1));
}

absl::Status RecordSplitter::Push(std::string_view piece, Take take) {
  return array_ ? PushArray(piece, take) : PushLines(piece, take);
}

absl::Status RecordSplitter::TakeLine(std::string_view line, Take take) {
  if (number_++ == 0 && line.starts_with(kByteOrderMark)) line.remove_prefix(kByteOrderMark.size());
  RETURN_IF_ERROR(CheckLength(line.size()));
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line.find_first_not_of(" \t") == std::string_view::npos ? absl::OkStatus() : take(line);
}

absl::Status RecordSplitter::PushLines(std::string_view piece, Take take) {
  for (size_t end = 0; (end = piece.find('\n')) != std::string_view::npos; piece.remove_prefix(end + 1)) {
    if (rest_.empty()) {
      RETURN_IF_ERROR(TakeLine(piece.substr(0, end), take));
      continue;
    }
    rest_.append(piece.substr(0, end));
    RETURN_IF_ERROR(TakeLine(rest_, take));
    rest_.clear();
  }
  rest_.append(piece);
  if (rest_.size() <= longest_) return absl::OkStatus();
  ++number_;
  return CheckLength(rest_.size());
}

absl::Status RecordSplitter::PushArray(std::string_view piece, Take take) {
  size_t begin = 0;  // of the element, in `piece`
  for (size_t i = 0; i < piece.size(); ++i) {
    const char c = piece[i];
    if (at_ == At::kElement) {
      if (in_string_) {
        if (escaped_) {
          escaped_ = false;
        } else if (c == '\\') {
          escaped_ = true;
        } else if (c == '"') {
          in_string_ = false;
        }
        continue;
      }
      if (c == '"') in_string_ = true;
      if (c == '{' || c == '[') ++depth_;
      const bool closes = c == '}' || c == ']';
      if (closes && depth_ > 0) {
        --depth_;
      } else if (depth_ == 0 && (closes || c == ',')) {
        if (c == '}') return Wrong("a } without {");
        std::string_view element = piece.substr(begin, i - begin);
        if (!rest_.empty()) element = rest_.append(element);
        RETURN_IF_ERROR(CheckLength(element.size()));
        RETURN_IF_ERROR(take(element));
        rest_.clear();
        at_ = c == ',' ? At::kNext : At::kEnd;
      }
      continue;
    }
    if (IsSpace(c)) continue;
    if (at_ == At::kBegin) {
      // A byte order mark may come in parts.
      if (kByteOrderMark.find(c) != std::string_view::npos) continue;
      if (c != '[') return Wrong("no array of JSON");
      at_ = At::kFirst;
    } else if (at_ == At::kEnd) {
      ++number_;
      return Wrong("text behind the array's end");
    } else if (at_ == At::kFirst && c == ']') {
      at_ = At::kEnd;
    } else {
      ++number_;
      if (c == ',' || c == ']') return Wrong("nothing between two commas");
      at_ = At::kElement;
      begin = i;
      --i;
    }
  }
  if (at_ == At::kElement) rest_.append(piece.substr(begin));
  return CheckLength(rest_.size());
}

absl::Status RecordSplitter::Finish(Take take) {
  if (array_)
    return at_ == At::kEnd ? absl::OkStatus() : Wrong("the file ends within the array: it was cut short");
  if (rest_.empty()) return absl::OkStatus();
  const std::string line = std::exchange(rest_, "");
  return TakeLine(line, take);
}

}  // namespace penstock::models
