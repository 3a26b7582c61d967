#include "models/data/dataset.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/io_error.h"
#include "base/read_at.h"
#include "base/status_macros.h"

namespace penstock::models {
namespace {

static_assert(std::endian::native == std::endian::little,
              "nanoGPT's .bin is little-endian and is read in place");

__extension__ typedef unsigned __int128 UWide;

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

// splitmix64's finalizer (Steele, Lea, Flood 2014): a bijection that mixes every bit into every other.
constexpr uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27;
  x *= 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

int64_t TokenBytes(TokenFormat format) {
  return format == TokenFormat::kBytes ? 1 : format == TokenFormat::kUint16 ? 2 : 4;
}

absl::Status BadData(const std::string& path, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("data file ", path, ": ", std::string(what)));
}

// Reads exactly `size` bytes at `offset`. The end of the file is kDataLoss.
absl::Status ReadExactly(int fd, const std::string& path, char* buffer, int64_t size, int64_t offset) {
  ASSIGN_OR_RETURN(const size_t done,
                   ReadAt(fd, absl::StrCat("data file ", path), static_cast<uint64_t>(offset), buffer,
                          static_cast<size_t>(size)));
  if (done == static_cast<size_t>(size)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("data file ", path, ": ", size, " bytes at offset ", offset,
                                          " met the end of the file after ", done,
                                          ": it was truncated while in use; restore it and resume"));
}

}  // namespace

int64_t SequenceStart(uint64_t seed, int64_t step, int64_t row, int64_t places) {
  uint64_t h = Mix(seed + kGolden);
  h = Mix(h ^ (static_cast<uint64_t>(step) + 2 * kGolden));
  h = Mix(h ^ (static_cast<uint64_t>(row) + 3 * kGolden));
  // The high half of h * places: uniform to within places / 2^64.
  return static_cast<int64_t>((static_cast<UWide>(h) * static_cast<uint64_t>(places)) >> 64);
}

// Few rows are shuffled one by one (Fisher and Yates): the network below mixes them unevenly.
constexpr int64_t kShuffled = 1024;
int64_t ShuffledRow(uint64_t seed, int64_t epoch, int64_t index, int64_t rows) {
  std::array<int16_t, kShuffled> order;
  for (int64_t i = 0; i < rows; ++i) order[static_cast<size_t>(i)] = static_cast<int16_t>(i);
  for (int64_t left = rows; left > 1; --left) {
    const int64_t chosen = SequenceStart(seed, epoch + 1, left, left);
    std::swap(order[static_cast<size_t>(left - 1)], order[static_cast<size_t>(chosen)]);
  }
  return order[static_cast<size_t>(index)];
}

int64_t RowOfEpoch(uint64_t seed, int64_t epoch, int64_t index, int64_t rows) {
  // Halves of equal width: at most four times as many numbers as there are rows.
  if (rows <= kShuffled) return ShuffledRow(seed, epoch, index, rows);
  int half = 1;
  while ((uint64_t{1} << (2 * half)) < static_cast<uint64_t>(rows)) ++half;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  const uint64_t key = Mix(Mix(seed + kGolden) ^ (static_cast<uint64_t>(epoch) + 4 * kGolden));
  auto at = static_cast<uint64_t>(index);
  do {
    for (uint64_t round = 0; round < 6; ++round) {
      const uint64_t left = at >> half, right = at & mask;
      at = (right << half) | (left ^ (Mix(key ^ (right + round * kGolden)) & mask));
    }
  } while (at >= static_cast<uint64_t>(rows));
  return static_cast<int64_t>(at);
}

TokenFormat InferTokenFormat(const std::string& path, int64_t vocab) {
  if (vocab <= 0 && !absl::EndsWith(path, ".bin")) return TokenFormat::kBytes;
  return vocab > 65536 ? TokenFormat::kUint32 : TokenFormat::kUint16;
}

absl::StatusOr<std::unique_ptr<Dataset>> Dataset::Open(const std::string& path, TokenFormat format,
                                                       int64_t vocab, int64_t seq) {
  if (seq < 1) return BadData(path, absl::StrCat("a sequence of ", seq, " tokens; it must have 1 or more"));
  const int64_t width = TokenBytes(format);
  const int64_t range = int64_t{1} << (8 * width);
  if (format == TokenFormat::kBytes && vocab > range) {
    return BadData(
        path, absl::StrCat("is taken for text, whose bytes are tokens from 0 to 255, and the model has a "
                           "vocabulary of ",
                           vocab,
                           ": encode it with the model's tokenizer and give the numbers as uint16 in a "
                           "file that ends in .bin (numpy: np.array(ids, np.uint16).tofile(\"x.bin\"))"));
  }
  if (vocab < 0 || vocab > range) {
    return BadData(path, absl::StrCat("a vocabulary of ", vocab, " does not fit tokens of ", 8 * width,
                                      " bits; the largest is ", range));
  }
  if (path.empty()) return BadData("\"\"", "no name; give one with `data`");
  // O_NONBLOCK: a FIFO must be refused, not waited for. It means nothing for a regular file.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    return BadData(
        path, absl::StrCat("cannot open: ", ErrnoText(error), "; give an existing file that can be read"));
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    const int error = errno;
    ::close(fd);
    return BadData(path, absl::StrCat("fstat failed: ", ErrnoText(error)));
  }
  const int64_t bytes = info.st_size;
  const int64_t tokens = bytes / width;
  std::string wrong;
  if (S_ISDIR(info.st_mode)) {
    wrong = "is a directory; give a file";
  } else if (!S_ISREG(info.st_mode)) {
    wrong = "is not a regular file; copy the data to one";
  } else if (bytes == 0) {
    wrong = "is empty";
  } else if (bytes % width != 0) {
    wrong = absl::StrCat("has ", bytes, " bytes, not a whole number of ", width, "-byte tokens: is it uint",
                         width == 2 ? 32 : 16, " or text?");
  } else if (tokens < seq + 1) {
    wrong = absl::StrCat("has ", tokens, " tokens, but a sequence needs ", seq + 1, " (`seq` ", seq,
                         " and its last target); give more data or a shorter `seq`");
  }
  if (!wrong.empty()) {
    ::close(fd);
    return BadData(path, wrong);
  }
  return std::unique_ptr<Dataset>(new Dataset(path, fd, format, vocab == 0 ? range : vocab, seq, tokens));
}

absl::StatusOr<std::unique_ptr<Dataset>> Dataset::OpenExamples(const TokenFile& file, int64_t vocab,
                                                               int64_t seq) {
  struct stat info {};
  if (::stat(file.tokens_path.c_str(), &info) != 0)
    return BadData(file.tokens_path, absl::StrCat("cannot open: ", ErrnoText(errno)));
  const bool wide = info.st_size == 4 * file.tokens;
  const TokenFormat format = wide ? TokenFormat::kUint32 : TokenFormat::kUint16;
  // Rows may be longer than all that is there.
  ASSIGN_OR_RETURN(std::unique_ptr<Dataset> data,
                   Open(file.tokens_path, format, wide ? vocab : std::min<int64_t>(vocab, 65536),
                        file.is_stream() ? seq : 1));
  if (file.is_stream()) return data;
  data->seq_ = seq;
  const int fd = ::open(file.examples_path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return BadData(file.examples_path, absl::StrCat("cannot open: ", ErrnoText(errno)));
  TokenFileHeader header;
  std::vector<uint64_t> starts(static_cast<size_t>(file.examples));
  data->learned_ = std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(file.tokens + 7) / 8);
  int64_t at = 0;
  absl::Status status;
  for (const auto& [to, bytes] :
       {std::pair{reinterpret_cast<char*>(&header), sizeof(header)},
        {reinterpret_cast<char*>(starts.data()), starts.size() * sizeof(uint64_t)},
        {reinterpret_cast<char*>(data->learned_->data()), data->learned_->size()}}) {
    if (status.ok()) status = ReadExactly(fd, file.examples_path, to, static_cast<int64_t>(bytes), at);
    at += static_cast<int64_t>(bytes);
  }
  ::close(fd);
  RETURN_IF_ERROR(status);
  for (size_t i = 0; i < starts.size(); ++i) {
    const uint64_t end = i + 1 < starts.size() ? starts[i + 1] : static_cast<uint64_t>(file.tokens);
    if (starts[i] > end) {
      return absl::DataLossError(absl::StrCat(file.examples_path, ": example ", i, " begins at token ",
                                              starts[i],
                                              ", behind its end: remove the file, and it is made anew"));
    }
  }
  data->examples_digest_ = header.checksum;
  data->Pack(starts);
  if (data->rows_.empty()) {
    return BadData(file.tokens_path, absl::StrCat("no example has a token to learn among its first ", seq + 1,
                                                  " (`seq` ", seq, ")"));
  }
  return data;
}

int64_t Dataset::LearnedOf(const Row& row) const {
  int64_t count = 0;
  for (int64_t token = row.first; token < row.first + row.count; ++token)
    count += (*learned_)[static_cast<size_t>(token) / 8] >> (token % 8) & 1;
  return count;
}

void Dataset::Pack(const std::vector<uint64_t>& starts) {
  const auto add = [&](const Row& row) {
    const int64_t count = LearnedOf(row);
    if (count > 0) rows_.push_back(row);
    learned_count_ += count;
  };
  Row row;
  for (size_t i = 0; i < starts.size(); ++i) {
    const auto first = static_cast<int64_t>(starts[i]);
    const int64_t end = i + 1 < starts.size() ? static_cast<int64_t>(starts[i + 1]) : tokens_;
    const int64_t count = std::min(end - first, seq_ + 1);
    cut_ += end - first > count ? 1 : 0;
    lost_ += LearnedOf({first, count}) == 0 ? 1 : 0;
    if (row.count > 0 && row.first + row.count == first && row.count + count <= seq_ + 1) {
      row.count += count;
      continue;
    }
    add(row);
    row = {first, count};
  }
  add(row);
}

Dataset::Dataset(std::string path, int fd, TokenFormat format, int64_t vocab, int64_t seq, int64_t tokens)
    : path_(std::move(path)),
      fd_(fd),
      format_(format),
      vocab_(vocab),
      seq_(seq),
      tokens_(tokens),
      file_tokens_(tokens) {}

Dataset::~Dataset() { ::close(fd_); }

absl::StatusOr<std::unique_ptr<Dataset>> Dataset::HoldOut(double share) {
  const int64_t all = rows_.empty() ? tokens_ : rows();
  const int64_t least = rows_.empty() ? seq_ + 1 : 1;
  const int64_t held = std::max(least, static_cast<int64_t>(static_cast<double>(all) * share));
  if (all - held < least) {
    return BadData(path_,
                   absl::StrCat("has ", rows_.empty() ? tokens_ / seq_ : rows(), " sequences of `seq` ", seq_,
                                ": not enough to hold some of them out; give a file of them (`eval_data`)"));
  }
  const int fd = ::fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return BadData(path_, absl::StrCat("fcntl(F_DUPFD_CLOEXEC) failed: ", ErrnoText(errno)));
  std::unique_ptr<Dataset> out(new Dataset(path_, fd, format_, vocab_, seq_, tokens_));
  out->file_tokens_ = file_tokens_;
  out->is_part_ = is_part_ = true;
  out->examples_digest_ = examples_digest_;
  out->learned_ = learned_;
  if (rows_.empty()) {
    out->first_token_ = first_token_ + tokens_ - held;
    out->tokens_ = held;
    tokens_ -= held;
    return out;
  }
  out->rows_.assign(rows_.end() - held, rows_.end());
  rows_.resize(static_cast<size_t>(all - held));
  for (const Row& row : out->rows_) out->learned_count_ += LearnedOf(row);
  learned_count_ -= out->learned_count_;
  return out;
}

absl::StatusOr<uint64_t> Dataset::Fingerprint() const {
  constexpr int64_t kSamples = 16;
  constexpr int64_t kSampleBytes = 4096;
  const int64_t bytes = file_tokens_ * TokenBytes(format_);
  uint64_t digest = Mix(static_cast<uint64_t>(bytes) + kGolden) ^ examples_digest_;
  if (is_part_) {
    for (const int64_t number : {first_token_, tokens_, rows()})
      digest = Mix(digest ^ static_cast<uint64_t>(number)) + kGolden;
  }
  std::vector<char> sample(kSampleBytes);
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t size = std::min(kSampleBytes, bytes);
    const auto offset =
        static_cast<int64_t>(static_cast<UWide>(bytes - size) * static_cast<uint64_t>(i) / (kSamples - 1));
    RETURN_IF_ERROR(ReadExactly(fd_, path_, sample.data(), size, offset));
    for (int64_t j = 0; j < size; j += 8) {
      uint64_t word = 0;
      std::memcpy(&word, sample.data() + j, static_cast<size_t>(std::min<int64_t>(8, size - j)));
      digest = Mix(digest ^ word) + kGolden;
    }
  }
  return digest;
}

absl::Status Dataset::ReadRow(int64_t start, int64_t count, uint32_t* row) const {
  const int64_t width = TokenBytes(format_);
  // Read into the far end of the row itself, then widen from the front: the wide index never overtakes the
  // narrow one.
  char* raw = reinterpret_cast<char*>(row) + count * (4 - width);
  RETURN_IF_ERROR(ReadExactly(fd_, path_, raw, count * width, (first_token_ + start) * width));
  for (int64_t i = 0; i < count; ++i) {
    uint32_t token = 0;
    std::memcpy(&token, raw + i * width, static_cast<size_t>(width));
    row[i] = token;
    if (static_cast<int64_t>(token) >= vocab_) {
      return absl::OutOfRangeError(absl::StrCat(
          "data file ", path_, ": token ", token, " at offset ", (first_token_ + start + i) * width,
          " is not below the vocabulary of ", vocab_, "; give the right `vocab`, or the data that fits it"));
    }
  }
  return absl::OkStatus();
}

absl::Status Dataset::FillRow(int64_t start, uint32_t* row, int64_t* tokens, int64_t* targets) const {
  RETURN_IF_ERROR(ReadRow(start, seq_ + 1, row));
  std::copy(row, row + seq_, tokens);
  std::copy(row + 1, row + seq_ + 1, targets);
  return absl::OkStatus();
}

absl::Status Dataset::FillExamples(const Row& of, uint32_t* row, int64_t* tokens, int64_t* targets) const {
  RETURN_IF_ERROR(ReadRow(of.first, of.count, row));
  for (int64_t i = 0; i < seq_; ++i) {
    const auto target = static_cast<size_t>(of.first + i + 1);
    const bool learned = i + 1 < of.count && ((*learned_)[target / 8] >> (target % 8) & 1) != 0;
    tokens[i] = i < of.count ? row[i] : 0;
    targets[i] = learned ? row[i + 1] : kNotLearned;
  }
  return absl::OkStatus();
}

absl::Status Dataset::CheckPlace(const BatchPlace& place, int64_t batch, bool needs_rows) const {
  if (place.step < 1 || place.micro_batch < 0 || place.world < 1 || place.rank < 0 ||
      place.rank >= place.world || batch < 1 || (needs_rows && place.rows < place.world * batch)) {
    return absl::InvalidArgumentError(
        absl::StrCat("data file ", path_, ": no batch of ", batch, " rows at step ", place.step,
                     ", micro-batch ", place.micro_batch, ", rank ", place.rank, " of ", place.world));
  }
  return absl::OkStatus();
}

absl::Status Dataset::FillSequence(const SequencePlace& place, uint64_t seed, int64_t* tokens,
                                   int64_t* targets) const {
  std::vector<uint32_t> row(static_cast<size_t>(seq_ + 1));
  if (rows_.empty())
    return FillRow(SequenceStart(seed, place.step, place.row, tokens_ - seq_), row.data(), tokens, targets);
  const int64_t of = RowOfEpoch(seed, place.index / rows(), place.index % rows(), rows());
  return FillExamples(rows_[static_cast<size_t>(of)], row.data(), tokens, targets);
}

absl::Status Dataset::Fill(const BatchPlace& place, int64_t batch, uint64_t seed, int64_t* tokens,
                           int64_t* targets) const {
  RETURN_IF_ERROR(CheckPlace(place, batch, !rows_.empty()));
  const int64_t first = (place.micro_batch * place.world + place.rank) * batch;
  for (int64_t i = 0; i < batch; ++i) {
    const SequencePlace of = {place.step, first + i, (place.step - 1) * place.rows + first + i};
    RETURN_IF_ERROR(FillSequence(of, seed, tokens + i * seq_, targets + i * seq_));
  }
  return absl::OkStatus();
}

absl::Status Dataset::FillEval(int64_t first, int64_t count, int64_t* tokens, int64_t* targets) const {
  if (first < 0 || count < 1 || first > EvalWindows() - count) {
    return absl::InvalidArgumentError(absl::StrCat("data file ", path_, ": no windows ", first, " to ",
                                                   first + count - 1, "; it has ", EvalWindows()));
  }
  std::vector<uint32_t> row(static_cast<size_t>(seq_ + 1));
  for (int64_t i = 0; i < count; ++i) {
    int64_t* const to = tokens + i * seq_;
    int64_t* const learned = targets + i * seq_;
    RETURN_IF_ERROR(rows_.empty()
                        ? FillRow((first + i) * seq_, row.data(), to, learned)
                        : FillExamples(rows_[static_cast<size_t>(first + i)], row.data(), to, learned));
  }
  return absl::OkStatus();
}

}  // namespace penstock::models
