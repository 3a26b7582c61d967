#include "models/data/token_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "base/directory.h"
#include "base/file_lock.h"
#include "base/io_error.h"
#include "base/read_at.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "base/write_all.h"
#include "kernels/checksum.h"
#include "models/data/data_records.h"

namespace penstock::models {
namespace {

static_assert(std::endian::native == std::endian::little,
              "both files are little-endian and are read in place");

constexpr size_t kPieceBytes = 4 << 20;
constexpr uint64_t kLongestFile = uint64_t{128} << 20;  // of a tokenizer's

using Header = TokenFileHeader;
static_assert(sizeof(Header) == 64);

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() { Close(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }

 private:
  void Close() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd_;
};

// A regular file to read from its beginning.
class Input {
 public:
  static absl::StatusOr<Input> Open(const std::string& path) {
    // O_NONBLOCK: a FIFO is refused, not waited for.
    Input input(path, Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)));
    if (input.fd_.get() < 0) return MakeIoError({.op = "cannot open", .path = path, .error = errno});
    if (::fstat(input.fd_.get(), &input.info_) != 0)
      return MakeIoError({.op = "fstat", .path = path, .error = errno});
    if (!S_ISREG(input.info_.st_mode))
      return absl::InvalidArgumentError(absl::StrCat(path, " is no regular file"));
    return input;
  }
  const struct stat& info() const { return info_; }
  uint64_t bytes() const { return static_cast<uint64_t>(info_.st_size); }
  // As much as there is of `bytes` at `offset`.
  absl::StatusOr<size_t> Read(uint64_t offset, char* to, size_t bytes) const {
    return ReadAt(fd_.get(), path_, offset, to, bytes);
  }

 private:
  Input(std::string path, Descriptor fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  std::string path_;
  Descriptor fd_;
  struct stat info_ {};
};

// A file under a temporary name until it is whole; gone again if it never gets there.
class Output {
 public:
  // Takes the file for this process; waits for another that has it, as long as `goes_on` says so.
  static absl::StatusOr<Output> Take(const std::string& path, const std::function<bool()>& goes_on) {
    const std::string part = path + ".part";
    while (true) {
      Descriptor fd(::open(part.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666));
      if (fd.get() < 0) {
        const absl::Status error = MakeIoError({.op = "cannot make", .path = part, .error = errno});
        return absl::Status(
            error.code(),
            absl::StrCat(error.message(),
                         ": tokens are written beside the data; copy it to a directory that can be written"));
      }
      while (true) {
        ASSIGN_OR_RETURN(const bool locked, TryLockFile(fd.get(), part));
        if (locked) break;
        if (!goes_on()) return absl::CancelledError("stopped");
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
      // Another may have finished or removed it meanwhile: then there is a new one.
      ASSIGN_OR_RETURN(const bool at_its_place, IsFileAt(fd.get(), part));
      if (at_its_place) {
        struct stat ours {};
        if (::fstat(fd.get(), &ours) != 0) return MakeIoError({.op = "fstat", .path = part, .error = errno});
        if (ours.st_nlink == 1) return Output(path, part, std::move(fd));
        // It is another file by this name too, which stays as it is.
        if (::unlink(part.c_str()) != 0) return MakeIoError({.op = "unlink", .path = part, .error = errno});
      }
      if (!goes_on()) return absl::CancelledError("stopped");
    }
  }
  Output(Output&&) = default;
  Output& operator=(Output&&) = default;
  ~Output() {
    if (fd_.get() >= 0 && !whole_) ::unlink(part_.c_str());
  }

  absl::Status Empty() {
    buffer_.clear();
    if (::ftruncate(fd_.get(), 0) != 0 || ::lseek(fd_.get(), 0, SEEK_SET) != 0)
      return MakeIoError({.op = "ftruncate", .path = part_, .error = errno});
    return absl::OkStatus();
  }
  absl::Status Write(const void* data, size_t bytes) {
    const auto* const from = static_cast<const char*>(data);
    buffer_.insert(buffer_.end(), from, from + bytes);
    return buffer_.size() < kPieceBytes ? absl::OkStatus() : Flush();
  }
  // On the drive; still under its temporary name.
  absl::Status Sync() {
    RETURN_IF_ERROR(Flush());
    if (::fsync(fd_.get()) != 0) return MakeIoError({.op = "fsync", .path = part_, .error = errno});
    return absl::OkStatus();
  }
  absl::Status Rename() {
    if (::rename(part_.c_str(), path_.c_str()) != 0)
      return MakeIoError({.op = "rename to", .path = path_, .error = errno});
    whole_ = true;
    return absl::OkStatus();
  }

 private:
  Output(std::string path, std::string part, Descriptor fd)
      : path_(std::move(path)), part_(std::move(part)), fd_(std::move(fd)) {}
  absl::Status Flush() {
    const int error = WriteAll(fd_.get(), {buffer_.data(), buffer_.size()});
    if (error != 0) return MakeIoError({.op = "write", .path = part_, .error = error});
    buffer_.clear();
    return absl::OkStatus();
  }

  std::string path_, part_;
  Descriptor fd_;
  std::vector<char> buffer_;
  bool whole_ = false;
};

// What decides the tokens, but for the tokenizer's files: those are added by Digest.
absl::Status AddFile(const std::string& path, kernels::Checksummer* sum) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadSmallFile(path, kLongestFile));
  sum->Update(bytes.data(), bytes.size());
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Digest(const Input& data, bool records, const text::Tokenizer& tokenizer,
                                const std::string& tokenizer_path, const TokenFileOptions& options) {
  kernels::Checksummer sum;
  const std::array<uint64_t, 9> facts = {
      Header().version,
      records,
      data.bytes(),
      static_cast<uint64_t>(data.info().st_mtim.tv_sec),
      static_cast<uint64_t>(data.info().st_mtim.tv_nsec),
      static_cast<uint64_t>(data.info().st_ctim.tv_sec),
      static_cast<uint64_t>(data.info().st_ctim.tv_nsec),
      options.chat.has_value() ? 1 + static_cast<uint64_t>(*options.chat) : 0,
      options.skip_broken};
  sum.Update(facts.data(), sizeof(facts));
  constexpr uint64_t kSamples = 16;
  constexpr size_t kSampleBytes = 4096;
  std::vector<char> sample(kSampleBytes);
  for (uint64_t i = 0; i < kSamples; ++i) {
    const uint64_t last = data.bytes() - std::min<uint64_t>(data.bytes(), kSampleBytes);
    ASSIGN_OR_RETURN(const size_t bytes, data.Read(last / (kSamples - 1) * i, sample.data(), kSampleBytes));
    sum.Update(sample.data(), bytes);
  }
  ASSIGN_OR_RETURN(const uint64_t files, TokenizerDigest(tokenizer_path));
  sum.Update(&files, sizeof(files));
  // Earlier versions made other tokens of the same files.
  if (tokenizer.config_counts()) sum.Update("config", 6);
  return sum.Digest();
}

// The pair, if it is there and whole; kNotFound else.
absl::StatusOr<TokenFile> Existing(const TokenFile& names, int64_t width) {
  for (const std::string& path : {names.examples_path, names.tokens_path}) {
    ASSIGN_OR_RETURN(const bool there, PathExists(path));
    if (!there) return absl::NotFoundError("");
  }
  const absl::StatusOr<Input> opened = Input::Open(names.examples_path),
                              of_tokens = Input::Open(names.tokens_path);
  for (const auto* each : {&opened, &of_tokens}) {
    // Another user's: they are made anew, in their place.
    if (absl::IsPermissionDenied(each->status())) return absl::NotFoundError("");
    RETURN_IF_ERROR(each->status());
  }
  const Input &input = *opened, &tokens = *of_tokens;
  // A start and a bit for each token, at most: what is longer is not taken into memory.
  const uint64_t count = tokens.bytes() / static_cast<uint64_t>(width);
  if (input.bytes() > sizeof(Header) + (count + 1) * sizeof(uint64_t) + count / 8 + 1)
    return absl::NotFoundError("");
  std::vector<char> bytes(input.bytes());
  ASSIGN_OR_RETURN(const size_t read, input.Read(0, bytes.data(), bytes.size()));
  Header header;
  if (read != bytes.size() || read < sizeof(header)) return absl::NotFoundError("");
  std::memcpy(&header, bytes.data(), sizeof(header));
  const uint64_t checksum = std::exchange(header.checksum, 0);
  kernels::Checksummer sum;
  sum.Update(&header, sizeof(header));
  sum.Update(bytes.data() + sizeof(header), bytes.size() - sizeof(header));
  // Whoever can write the file can make a checksum too: every number is held against the files' lengths.
  const uint64_t behind = bytes.size() - sizeof(header);
  const uint64_t bits = header.learned == header.tokens ? 0 : count / 8 + (count % 8 != 0 ? 1 : 0);
  if (std::memcmp(header.magic, Header().magic, sizeof(header.magic)) != 0 ||
      header.version != Header().version || checksum != sum.Digest() || header.tokens != count ||
      tokens.bytes() % static_cast<uint64_t>(width) != 0 || header.learned > header.tokens ||
      behind % sizeof(uint64_t) != bits % sizeof(uint64_t) || behind < bits ||
      header.examples != (behind - bits) / sizeof(uint64_t))
    return absl::NotFoundError("");
  TokenFile file = names;
  file.tokens = static_cast<int64_t>(header.tokens);
  file.examples = static_cast<int64_t>(header.examples);
  file.learned = static_cast<int64_t>(header.learned);
  file.skipped = static_cast<int64_t>(header.skipped);
  file.first_skipped_line = static_cast<int64_t>(header.first_skipped_line);
  file.was_there = true;
  return file;
}

// Tokens as they come, into the pair.
class Writer {
 public:
  Writer(Output tokens, Output examples, bool wide)
      : tokens_(std::move(tokens)), examples_(std::move(examples)), wide_(wide) {}

  void BeginExample() { starts_.push_back(header_.tokens); }
  absl::Status Add(std::span<const int32_t> ids) { return Add(ids, {}); }
  // `learned`: of each; empty: all are.
  absl::Status Add(std::span<const int32_t> ids, const std::vector<bool>& learned) {
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto id = static_cast<uint32_t>(ids[i]);
      const auto narrow = static_cast<uint16_t>(id);
      RETURN_IF_ERROR(wide_ ? tokens_.Write(&id, sizeof(id)) : tokens_.Write(&narrow, sizeof(narrow)));
      const bool learns = learned.empty() || learned[i];
      // As long as all are learned nothing is noted.
      if (!learns && !notes_) {
        notes_ = true;
        bits_.assign((header_.tokens + 7) / 8, 0xFF);
      }
      if (notes_) Note(header_.tokens, learns);
      header_.learned += learns ? 1 : 0;
      ++header_.tokens;
    }
    return absl::OkStatus();
  }
  void Skip(int64_t line) {
    if (header_.skipped++ == 0) header_.first_skipped_line = static_cast<uint64_t>(line);
  }
  uint64_t tokens() const { return header_.tokens; }
  uint64_t learned() const { return header_.learned; }

  absl::Status Finish(const std::string& directory) {
    RETURN_IF_ERROR(tokens_.Sync());
    RETURN_IF_ERROR(tokens_.Rename());
    header_.examples = starts_.size();
    if (notes_) {
      // Nothing is before an example: its first token follows from nothing.
      for (const uint64_t start : starts_) {
        if (start == header_.tokens || (bits_[start / 8] >> (start % 8) & 1) == 0) continue;
        Note(start, false);
        --header_.learned;
      }
    }
    kernels::Checksummer sum;
    sum.Update(&header_, sizeof(header_));
    sum.Update(starts_.data(), starts_.size() * sizeof(uint64_t));
    sum.Update(bits_.data(), bits_.size());
    header_.checksum = sum.Digest();
    RETURN_IF_ERROR(examples_.Write(&header_, sizeof(header_)));
    RETURN_IF_ERROR(examples_.Write(starts_.data(), starts_.size() * sizeof(uint64_t)));
    RETURN_IF_ERROR(examples_.Write(bits_.data(), bits_.size()));
    RETURN_IF_ERROR(examples_.Sync());
    // The tokens' new name before this one: without it nothing is used.
    RETURN_IF_ERROR(SyncDirectory(directory));
    RETURN_IF_ERROR(examples_.Rename());
    return SyncDirectory(directory);
  }

 private:
  void Note(uint64_t token, bool learned) {
    if (token / 8 >= bits_.size()) bits_.push_back(0);
    const auto bit = static_cast<uint8_t>(1U << (token % 8));
    uint8_t& bits = bits_[token / 8];
    bits = static_cast<uint8_t>(learned ? bits | bit : bits & ~bit);
  }

  Output tokens_, examples_;
  const bool wide_;
  bool notes_ = false;
  Header header_;
  std::vector<uint64_t> starts_;
  std::vector<uint8_t> bits_;
};

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::Status CheckRows(const std::vector<int32_t>& ids, const text::Tokenizer& tokenizer,
                       const TokenFileOptions& options) {
  if (options.vocabulary == 0 || tokenizer.vocab_size() <= options.vocabulary) return absl::OkStatus();
  for (const int32_t id : ids) {
    if (id < options.vocabulary) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the token ", tokenizer.TokenOf(id), " has the id ", id, ", and the model has rows for ",
        options.vocabulary,
        " tokens: tokenizer_config.json adds it; give a model that was grown for it (transformers' "
        "resize_token_embeddings), or a text without it"));
  }
  return absl::OkStatus();
}

absl::Status EncodeText(const Input& input, const std::string& path, const text::Tokenizer& tokenizer,
                        const TokenFileOptions& options, const std::function<bool(uint64_t)>& goes_on,
                        Writer* to) {
  text::Encoder encoder(tokenizer, {.replace_broken_utf8 = options.skip_broken});
  std::vector<char> piece(kPieceBytes);
  std::vector<int32_t> ids;
  int32_t last = -1;
  to->BeginExample();
  const auto write = [&]() -> absl::Status {
    if (!ids.empty()) last = ids.back();
    if (absl::Status rows = CheckRows(ids, tokenizer, options); !rows.ok()) return InFile(path, rows);
    RETURN_IF_ERROR(to->Add(ids));
    ids.clear();
    return absl::OkStatus();
  };
  for (uint64_t at = 0;;) {
    if (!goes_on(at)) return absl::CancelledError("stopped");
    ASSIGN_OR_RETURN(const size_t bytes, input.Read(at, piece.data(), piece.size()));
    if (bytes == 0) break;
    at += bytes;
    if (absl::Status status = encoder.Append(std::string_view(piece.data(), bytes), ids); !status.ok())
      return InFile(path, status);
    RETURN_IF_ERROR(write());
  }
  if (absl::Status status = encoder.Finish(ids); !status.ok()) return InFile(path, status);
  RETURN_IF_ERROR(write());
  const std::vector<int32_t>& ends = tokenizer.special_ids().eos;
  if (!ends.empty() && std::find(ends.begin(), ends.end(), last) == ends.end()) {
    ids.push_back(ends.front());
    RETURN_IF_ERROR(write());
  }
  return absl::OkStatus();
}

absl::Status EncodeRecords(const Input& input, DataForm form, const std::string& path,
                           const text::Tokenizer& tokenizer, const TokenFileOptions& options,
                           const std::function<bool(uint64_t)>& goes_on, Writer* to) {
  std::vector<char> piece(kPieceBytes);
  RecordSplitter splitter(form, tokenizer.limits().record);
  const auto example_of = [&](std::string_view record) -> absl::StatusOr<text::Example> {
    ASSIGN_OR_RETURN(text::Example example, text::ExampleOfLine(record, tokenizer, options.chat));
    RETURN_IF_ERROR(CheckRows(example.ids, tokenizer, options));
    return example;
  };
  bool ours = false;  // the error has its place already
  const auto take = [&](std::string_view record) -> absl::Status {
    const absl::StatusOr<text::Example> example = example_of(record);
    if (example.ok()) {
      to->BeginExample();
      ours = true;
      RETURN_IF_ERROR(to->Add(example->ids, example->learned));
      ours = false;
      return absl::OkStatus();
    }
    if (!options.skip_broken || !absl::IsInvalidArgument(example.status())) {
      const bool may_skip = !options.skip_broken && absl::IsInvalidArgument(example.status());
      return absl::Status(example.status().code(),
                          absl::StrCat(splitter.place(), ": ", example.status().message(),
                                       may_skip ? " (`skip_broken_lines` passes over such)" : ""));
    }
    to->Skip(splitter.number());
    return absl::OkStatus();
  };
  const auto in_file = [&](const absl::Status& status) { return ours ? status : InFile(path, status); };
  for (uint64_t at = 0;;) {
    if (!goes_on(at)) return absl::CancelledError("stopped");
    ASSIGN_OR_RETURN(const size_t bytes, input.Read(at, piece.data(), piece.size()));
    if (bytes == 0) break;
    at += bytes;
    if (absl::Status status = splitter.Push(std::string_view(piece.data(), bytes), take); !status.ok())
      return in_file(status);
  }
  absl::Status status = splitter.Finish(take);
  return status.ok() ? status : in_file(status);
}

}  // namespace

absl::StatusOr<uint64_t> TokenizerDigest(const std::string& path) {
  kernels::Checksummer sum;
  std::filesystem::path directory = path;
  std::filesystem::path file = directory / "tokenizer.json";
  ASSIGN_OR_RETURN(const bool is_directory, IsDirectory(path));
  if (!is_directory) {
    file = directory;
    directory = directory.parent_path();
  }
  RETURN_IF_ERROR(AddFile(file, &sum));
  for (const char* const name :
       {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"}) {
    ASSIGN_OR_RETURN(const bool there, PathExists(directory / name));
    if (there) RETURN_IF_ERROR(AddFile(directory / name, &sum));
  }
  return sum.Digest();
}

absl::StatusOr<TokenFile> MakeTokenFile(const std::string& path, const text::Tokenizer& tokenizer,
                                        const std::string& tokenizer_path, const TokenFileOptions& options) {
  ASSIGN_OR_RETURN(const Input input, Input::Open(path));
  ASSIGN_OR_RETURN(const DataForm form, DataFormOf(path));
  if (options.chat.has_value()) {
    RETURN_IF_ERROR(text::CheckChatTemplate(*options.chat, tokenizer));
  }
  ASSIGN_OR_RETURN(const uint64_t digest,
                   Digest(input, form != DataForm::kText, tokenizer, tokenizer_path, options));
  TokenFile names;
  const std::string stem = absl::StrFormat("%s.%016x", path, digest);
  names.tokens_path = stem + ".bin";
  names.examples_path = stem + ".examples";
  const bool wide = tokenizer.vocab_size() > 65536;
  const int64_t width = wide ? 4 : 2;
  if (absl::StatusOr<TokenFile> there = Existing(names, width); !absl::IsNotFound(there.status()))
    return there;

  const auto goes_on = [&](uint64_t at) {
    return options.progress == nullptr ||
           options.progress(
               input.bytes() == 0 ? 1 : static_cast<double>(at) / static_cast<double>(input.bytes()));
  };
  // Whoever has the examples makes both, unless another has just done it.
  ASSIGN_OR_RETURN(Output examples, Output::Take(names.examples_path, [&] { return goes_on(0); }));
  if (absl::StatusOr<TokenFile> there = Existing(names, width); !absl::IsNotFound(there.status()))
    return there;
  ASSIGN_OR_RETURN(Output tokens, Output::Take(names.tokens_path, [&] { return goes_on(0); }));
  RETURN_IF_ERROR(examples.Empty());
  RETURN_IF_ERROR(tokens.Empty());
  Writer writer(std::move(tokens), std::move(examples), wide);
  RETURN_IF_ERROR(form == DataForm::kText
                      ? EncodeText(input, path, tokenizer, options, goes_on, &writer)
                      : EncodeRecords(input, form, path, tokenizer, options, goes_on, &writer));
  // The pair's name stands for what the text was.
  struct stat now {};
  if (::stat(path.c_str(), &now) != 0 || now.st_size != input.info().st_size ||
      now.st_mtim.tv_sec != input.info().st_mtim.tv_sec ||
      now.st_mtim.tv_nsec != input.info().st_mtim.tv_nsec) {
    return absl::AbortedError(
        absl::StrCat(path, " changed while it was read: start again when nothing writes to it"));
  }
  if (writer.learned() == 0)
    return absl::InvalidArgumentError(absl::StrCat(path, ": there is nothing in it to learn"));
  std::string directory = std::filesystem::path(path).parent_path();
  RETURN_IF_ERROR(writer.Finish(directory.empty() ? "." : directory));
  ASSIGN_OR_RETURN(TokenFile made, Existing(names, width));
  made.was_there = false;
  return made;
}

}  // namespace penstock::models
