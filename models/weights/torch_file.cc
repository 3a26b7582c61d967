#include "models/weights/torch_file.h"

#include <fcntl.h>
#include <libdeflate.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <unordered_map>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/read_at.h"
#include "base/status_macros.h"

namespace penstock::models {

static_assert(std::endian::native == std::endian::little, "files are read in place");

namespace {

// Sums of two ranges as one of both, by arithmetic of polynomials over GF(2): CRC-32 of what is behind it, in
// zero bytes, is the first sum times x^(8 bytes).
constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ 0xEDB88320U : b >> 1;
  }
  return product;
}
uint32_t JoinSums(uint32_t first, uint32_t second, uint64_t second_bytes) {
  uint32_t shift = uint32_t{1} << 31;  // x^0
  uint32_t power = uint32_t{1} << 23;  // x^8, squared from bit to bit
  for (; second_bytes > 0; second_bytes >>= 1) {
    if ((second_bytes & 1) != 0) shift = Multiply(shift, power);
    power = Multiply(power, power);
  }
  return Multiply(shift, first) ^ second;
}

}  // namespace

// A value, or on the way to one: a name that is called, a storage of tensors.
struct TorchFile::Node {
  TorchValue::Kind kind = TorchValue::Kind::kNone;
  TorchValue::Form form = TorchValue::Form::kOwn;
  bool is_name = false;     // of a class or a function
  bool is_storage = false;  // of tensors: `integer` bytes at `tensor.offset`, untyped where `is_name`
  int64_t integer = 0;      // of kBool too
  double number = 0;
  std::string_view text = {};  // in the pickle or in Contents::texts; of kObject: its name
  std::vector<uint32_t> items = {};
  std::vector<std::pair<uint32_t, uint32_t>> pairs = {};
  std::unique_ptr<TorchTensor> tensor = nullptr;  // of kTensor, and of a storage
};

// A member that tensors lie in.
struct TorchFile::Storage {
  // What of it has been read, as ranges that do not touch: where each ends, and the sum of its bytes.
  struct Range {
    uint64_t end = 0;
    uint32_t crc = 0;
  };

  // `range` was read too, from `from` on. What another thread was faster with is left out: its sum is made
  // when the rest is read or checked.
  void Add(uint64_t from, Range range) {
    auto next = read.lower_bound(from);
    if (checked || (next != read.end() && next->first < range.end)) return;
    if (next != read.begin() && std::prev(next)->second.end > from) return;
    if (next != read.end() && next->first == range.end) {
      range = {next->second.end, JoinSums(range.crc, next->second.crc, next->second.end - range.end)};
      next = read.erase(next);
    }
    if (next != read.begin() && std::prev(next)->second.end == from) {
      Range& before = std::prev(next)->second;
      before = {range.end, JoinSums(before.crc, range.crc, range.end - from)};
      return;
    }
    read.emplace_hint(next, from, range);
  }

  std::string member = {};
  uint64_t offset = 0, bytes = 0;
  std::optional<uint32_t> crc = {};  // absent: the file has no sums
  std::mutex mutex = {};
  std::map<uint64_t, Range> read = {};
  bool checked = false, damaged = false;
};

struct TorchFile::Contents {
  std::string pickle;
  std::deque<std::string> texts;  // that are made of others
  std::deque<Node> nodes;
  std::deque<Storage> storages;
  // Of the longer dicts, by node: what is at each key.
  absl::flat_hash_map<uint32_t, std::unordered_map<std::string_view, uint32_t>> by_text;
  absl::flat_hash_map<uint32_t, absl::flat_hash_map<int64_t, uint32_t>> by_number;
  uint32_t root = 0;
  uint64_t bytes = 0;
};

namespace {

// Of a quarter of a million tensors.
constexpr uint64_t kLargestDirectory = uint64_t{32} << 20;
constexpr size_t kLongDict = 16;  // from here on keys are looked up in a table
constexpr size_t kMostDimensions = 64;
constexpr size_t kLongestKey = 256;
constexpr size_t kCheckedAtOnce = size_t{1} << 20;  // of what nobody has read, when its sum is checked

template <typename T>
T Load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

absl::Status Bad(const std::string& path, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", absl::string_view(what.data(), what.size())));
}

std::string Quoted(std::string_view text) {
  return absl::StrCat(
      "\"",
      absl::CHexEscape(absl::string_view(text.substr(0, 100).data(), std::min<size_t>(text.size(), 100))),
      "\"");
}

std::optional<swap::Dtype> DtypeOf(std::string_view name) {
  using swap::Dtype;
  static constexpr std::pair<std::string_view, Dtype> kNames[] = {
      {"torch.FloatStorage", Dtype::kF32},   {"torch.DoubleStorage", Dtype::kF64},
      {"torch.HalfStorage", Dtype::kF16},    {"torch.BFloat16Storage", Dtype::kBf16},
      {"torch.LongStorage", Dtype::kI64},    {"torch.IntStorage", Dtype::kI32},
      {"torch.ShortStorage", Dtype::kI16},   {"torch.CharStorage", Dtype::kI8},
      {"torch.ByteStorage", Dtype::kU8},     {"torch.BoolStorage", Dtype::kBool},
      {"torch.float32", Dtype::kF32},        {"torch.float64", Dtype::kF64},
      {"torch.float16", Dtype::kF16},        {"torch.bfloat16", Dtype::kBf16},
      {"torch.int64", Dtype::kI64},          {"torch.int32", Dtype::kI32},
      {"torch.int16", Dtype::kI16},          {"torch.int8", Dtype::kI8},
      {"torch.uint8", Dtype::kU8},           {"torch.bool", Dtype::kBool},
      {"torch.uint16", Dtype::kU16},         {"torch.uint32", Dtype::kU32},
      {"torch.uint64", Dtype::kU64},         {"torch.float8_e4m3fn", Dtype::kF8E4M3},
      {"torch.float8_e5m2", Dtype::kF8E5M2},
  };
  for (const auto& [known, dtype] : kNames) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}

}  // namespace

// ---- The zip.

struct TorchFile::Archive {
  struct Member {
    uint64_t header = 0, bytes = 0;  // of its local header; of its data
    uint32_t crc = 0;
  };

  absl::Status Open() {
    constexpr size_t kEnd = 22, kLongestComment = 65535;
    const size_t tail = static_cast<size_t>(std::min<uint64_t>(file.bytes_, kEnd + kLongestComment));
    std::vector<char> end(tail);
    RETURN_IF_ERROR(file.ReadAt(file.bytes_ - tail, end.data(), tail));
    char head[4] = {};
    if (file.bytes_ >= sizeof(head)) {
      RETURN_IF_ERROR(file.ReadAt(0, head, sizeof(head)));
    }
    if (Load<uint32_t>(head) != 0x04034b50U) {
      return Bad(
          file.path_,
          "is no zip file: torch.save of torch 1.6 and later makes one; load and save an older file again");
    }
    size_t at = tail;
    while (at >= kEnd && Load<uint32_t>(end.data() + at - kEnd) != 0x06054b50U) --at;
    if (at < kEnd)
      return absl::DataLossError(absl::StrCat(file.path_, ": has no zip directory: it was cut short"));
    const char* const record = end.data() + at - kEnd;
    uint64_t count = Load<uint16_t>(record + 10), size = Load<uint32_t>(record + 12),
             first = Load<uint32_t>(record + 16);
    const uint64_t record_offset = file.bytes_ - tail + (at - kEnd);
    if (count == 0xFFFF || size == 0xFFFFFFFF || first == 0xFFFFFFFF) {
      char locator[20], record64[56];
      if (record_offset < sizeof(locator)) return Bad(file.path_, "its zip64 directory is not there");
      RETURN_IF_ERROR(file.ReadAt(record_offset - sizeof(locator), locator, sizeof(locator)));
      if (Load<uint32_t>(locator) != 0x07064b50U) return Bad(file.path_, "its zip64 directory is not there");
      RETURN_IF_ERROR(file.ReadAt(Load<uint64_t>(locator + 8), record64, sizeof(record64)));
      if (Load<uint32_t>(record64) != 0x06064b50U) return Bad(file.path_, "its zip64 directory is not there");
      count = Load<uint64_t>(record64 + 32);
      size = Load<uint64_t>(record64 + 40);
      first = Load<uint64_t>(record64 + 48);
    }
    if (size > kLargestDirectory || size > file.bytes_ || first > file.bytes_ - size)
      return absl::DataLossError(absl::StrCat(file.path_, ": its zip directory lies beyond its end"));
    directory_bytes = size;
    std::string directory(size, '\0');
    RETURN_IF_ERROR(file.ReadAt(first, directory.data(), size));
    return ReadDirectory(directory, count);
  }

  absl::Status ReadDirectory(const std::string& directory, uint64_t count) {
    constexpr size_t kEntry = 46;
    size_t at = 0;
    for (uint64_t i = 0; i < count; ++i) {
      if (directory.size() - at < kEntry || Load<uint32_t>(directory.data() + at) != 0x02014b50U)
        return Bad(file.path_, "its zip directory is damaged");
      const char* const entry = directory.data() + at;
      const uint64_t name_bytes = Load<uint16_t>(entry + 28), extra_bytes = Load<uint16_t>(entry + 30),
                     comment_bytes = Load<uint16_t>(entry + 32);
      if (directory.size() - at - kEntry < name_bytes + extra_bytes + comment_bytes)
        return Bad(file.path_, "its zip directory is damaged");
      const std::string name(entry + kEntry, name_bytes);
      uint64_t stored = Load<uint32_t>(entry + 20), bytes = Load<uint32_t>(entry + 24),
               header = Load<uint32_t>(entry + 42);
      // zip64's extra field has those of the three that are all ones, in this order.
      const char* extra = entry + kEntry + name_bytes;
      for (const char* const last = extra + extra_bytes; last - extra >= 4;) {
        const uint16_t id = Load<uint16_t>(extra), length = Load<uint16_t>(extra + 2);
        extra += 4;
        if (last - extra < length) break;
        const char* field = extra;
        for (uint64_t* const wide : {&bytes, &stored, &header}) {
          if (id != 1 || *wide != 0xFFFFFFFF || extra + length - field < 8) continue;
          *wide = Load<uint64_t>(field);
          field += 8;
        }
        extra += length;
      }
      if ((Load<uint16_t>(entry + 8) & 1) != 0)
        return Bad(file.path_, absl::StrCat(Quoted(name), " is encrypted"));
      if (Load<uint16_t>(entry + 10) != 0 || stored != bytes)
        return Bad(file.path_, absl::StrCat(Quoted(name), " is compressed, which torch.save never does"));
      const uint32_t crc = Load<uint32_t>(entry + 16);
      has_sums |= crc != 0;
      if (!members.emplace(name, Member{header, bytes, crc}).second)
        return Bad(file.path_, absl::StrCat("has ", Quoted(name), " twice"));
      at += kEntry + name_bytes + extra_bytes + comment_bytes;
    }
    return absl::OkStatus();
  }

  // Where a member's data begins.
  absl::StatusOr<uint64_t> DataOf(const std::string& name, const Member& member) const {
    char header[30];
    RETURN_IF_ERROR(file.ReadAt(member.header, header, sizeof(header)));
    if (Load<uint32_t>(header) != 0x04034b50U)
      return Bad(file.path_, absl::StrCat(Quoted(name), " is not where the zip directory says"));
    const uint64_t data =
        member.header + sizeof(header) + Load<uint16_t>(header + 26) + Load<uint16_t>(header + 28);
    if (data > file.bytes_ || member.bytes > file.bytes_ - data)
      return absl::DataLossError(
          absl::StrCat(file.path_, ": ", Quoted(name), " goes beyond the end of the file"));
    return data;
  }

  // The whole of a member; "" where there is none.
  absl::StatusOr<std::string> Text(const std::string& name, uint64_t most) const {
    const auto found = members.find(name);
    if (found == members.end()) return std::string();
    if (found->second.bytes > most)
      return Bad(file.path_,
                 absl::StrCat(Quoted(name), " has ", found->second.bytes, " bytes, more than are read"));
    ASSIGN_OR_RETURN(const uint64_t data, DataOf(name, found->second));
    std::string text(found->second.bytes, '\0');
    RETURN_IF_ERROR(file.ReadAt(data, text.data(), text.size()));
    if (has_sums && libdeflate_crc32(0, text.data(), text.size()) != found->second.crc)
      return file.Damaged(name, data, text.size());
    return text;
  }

  const TorchFile& file;
  absl::flat_hash_map<std::string, Member> members = {};
  std::string prefix = {};  // "archive/"
  bool has_sums = false;    // torch.serialization.set_crc32_options(False) leaves them all zero
  uint64_t directory_bytes = 0;
};

// ---- The pickle: a program for a stack, of which only what describes values is followed.

class Unpickler {
 public:
  using Node = TorchFile::Node;
  using Kind = TorchValue::Kind;
  using Form = TorchValue::Form;

  // `most_bytes`: what all that it makes may take, however short the program is.
  Unpickler(TorchFile& file, const TorchFile::Archive& archive, uint64_t most_bytes)
      : file_(file),
        archive_(archive),
        contents_(*file.contents_),
        nodes_(contents_.nodes),
        left_(contents_.pickle),
        all_(contents_.pickle.size()),
        bytes_left_(most_bytes) {}

  absl::Status Run() {
    while (true) {
      ASSIGN_OR_RETURN(const std::string_view code, Take(1));
      if (code[0] == '.') break;
      RETURN_IF_ERROR(Do(code[0]));
    }
    ASSIGN_OR_RETURN(contents_.root, Pop());
    return MakeTables();
  }
  uint64_t bytes_left() const { return bytes_left_; }

 private:
  absl::Status Wrong(std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(file_.path_, ": its pickle, at byte ", all_ - left_.size(),
                                                   ": ", absl::string_view(what.data(), what.size())));
  }
  absl::StatusOr<std::string_view> Take(uint64_t bytes) {
    if (bytes > left_.size()) return Wrong("ends in the middle");
    const std::string_view taken = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return taken;
  }
  template <typename T>
  absl::StatusOr<T> Number() {
    ASSIGN_OR_RETURN(const std::string_view bytes, Take(sizeof(T)));
    return Load<T>(bytes.data());
  }
  absl::StatusOr<std::string_view> Line() {
    const size_t end = left_.find('\n');
    if (end == std::string_view::npos) return Wrong("ends in the middle");
    ASSIGN_OR_RETURN(const std::string_view line, Take(end + 1));
    return line.substr(0, end);
  }

  // A short program can make very much: whatever takes memory is counted before it is made.
  absl::Status Spend(uint64_t bytes) {
    if (bytes > bytes_left_) return Wrong("describes more than is read of such a file");
    bytes_left_ -= bytes;
    return absl::OkStatus();
  }
  // Of so many items of lists, and pairs of dicts: twice, since vectors grow by doubling.
  static uint64_t BytesOf(size_t items, size_t pairs) {
    return 2 * (items * sizeof(uint32_t) + pairs * sizeof(std::pair<uint32_t, uint32_t>));
  }
  absl::StatusOr<uint32_t> Make(Node node) {
    uint64_t bytes = sizeof(Node) + BytesOf(node.items.size(), node.pairs.size());
    if (node.tensor != nullptr) bytes += sizeof(TorchTensor) + 16 * node.tensor->sizes.size();
    RETURN_IF_ERROR(Spend(bytes));
    nodes_.push_back(std::move(node));
    return static_cast<uint32_t>(nodes_.size() - 1);
  }
  absl::Status PushMade(uint32_t made) {
    RETURN_IF_ERROR(Spend(BytesOf(1, 0)));
    stack_.push_back(made);
    return absl::OkStatus();
  }
  absl::Status Push(Node node) {
    ASSIGN_OR_RETURN(const uint32_t made, Make(std::move(node)));
    return PushMade(made);
  }
  // A text that stands nowhere in the pickle.
  absl::StatusOr<std::string_view> MakeText(std::string text) {
    RETURN_IF_ERROR(Spend(sizeof(std::string) + 2 * text.size()));
    return contents_.texts.emplace_back(std::move(text));
  }
  absl::Status MakeTables() {
    for (uint32_t at = 0; at < nodes_.size(); ++at) {
      const auto& pairs = nodes_[at].pairs;
      if (pairs.size() <= kLongDict) continue;
      RETURN_IF_ERROR(Spend(64 * pairs.size()));
      // What is set later holds.
      for (const auto& [key, value] : pairs) {
        if (nodes_[key].kind == Kind::kText) contents_.by_text[at][nodes_[key].text] = value;
        if (nodes_[key].kind == Kind::kInt) contents_.by_number[at][nodes_[key].integer] = value;
      }
    }
    return absl::OkStatus();
  }
  absl::Status PushInt(int64_t value) { return Push({.kind = Kind::kInt, .integer = value}); }
  absl::StatusOr<uint32_t> Pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) return Wrong("takes more than there is");
    const uint32_t top = stack_.back();
    stack_.pop_back();
    return top;
  }
  absl::StatusOr<std::vector<uint32_t>> PopToMark() {
    if (marks_.empty()) return Wrong("has no mark to go back to");
    std::vector<uint32_t> items(stack_.begin() + static_cast<ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  absl::StatusOr<Node*> Top() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) return Wrong("takes more than there is");
    return &nodes_[stack_.back()];
  }
  absl::Status PushList(std::vector<uint32_t> items, Form form) {
    return Push({.kind = Kind::kList, .form = form, .items = std::move(items)});
  }

  // One instruction: a table of them, in the order of what they are about.
  absl::Status Do(char code) {
    switch (code) {
      case '\x80':  // PROTO
        return Take(1).status();
      case '\x95':  // FRAME
        return Take(8).status();
      // Values.
      case 'N':
        return Push({});
      case '\x88':
      case '\x89':
        return Push({.kind = Kind::kBool, .integer = code == '\x88'});
      case 'K':
        return PushInteger<uint8_t>();
      case 'M':
        return PushInteger<uint16_t>();
      case 'J':
        return PushInteger<int32_t>();
      case '\x8a':  // LONG1
        return PushLong<uint8_t>();
      case '\x8b':  // LONG4
        return PushLong<uint32_t>();
      case 'G':
        return PushFloat();
      case 'X':
      case 'T':
        return PushText<uint32_t>(Form::kOwn);
      case 'B':
        return PushText<uint32_t>(Form::kBytes);
      case '\x8c':
      case 'U':
        return PushText<uint8_t>(Form::kOwn);
      case 'C':
        return PushText<uint8_t>(Form::kBytes);
      case '\x8d':
      case '\x8e':
        return PushText<uint64_t>(code == '\x8d' ? Form::kOwn : Form::kBytes);
      // The stack, and its marks.
      case '(':
        RETURN_IF_ERROR(Spend(2 * sizeof(marks_[0])));
        marks_.push_back(stack_.size());
        return absl::OkStatus();
      case '0':  // POP
        return Pop().status();
      case '1':  // POP_MARK
        return PopToMark().status();
      case '2':  // DUP
        RETURN_IF_ERROR(Top().status());
        return PushMade(stack_.back());
      // Lists and dictionaries.
      case ']':
      case ')':
        return PushList({}, code == ']' ? Form::kOwn : Form::kTuple);
      case '\x8f':  // EMPTY_SET
        return PushList({}, Form::kSet);
      case '}':
        return Push({.kind = Kind::kDict});
      case 't':
      case 'l':
      case '\x91': {  // FROZENSET
        ASSIGN_OR_RETURN(std::vector<uint32_t> items, PopToMark());
        return PushList(std::move(items),
                        code == 't' ? Form::kTuple : (code == 'l' ? Form::kOwn : Form::kSet));
      }
      case '\x85':
      case '\x86':
      case '\x87':
        return Tuple(static_cast<size_t>(static_cast<unsigned char>(code)) - 0x84);
      case 'a':
      case 'e':
      case '\x90':  // ADDITEMS
        return AppendPopped(code == 'a');
      case 's':
      case 'u':
      case 'd':
        return SetPopped(code);
      // What is remembered.
      case 'q':
        return RememberAt<uint8_t>();
      case 'r':
        return RememberAt<uint32_t>();
      case '\x94':  // MEMOIZE
        return Remember(static_cast<uint32_t>(memo_.size()));
      case 'h':
        return RecallAt<uint8_t>();
      case 'j':
        return RecallAt<uint32_t>();
      // Objects.
      case 'c':
      case '\x93':  // STACK_GLOBAL
        return code == 'c' ? NameOfLines() : NameOfStack();
      case 'Q': {  // BINPERSID
        ASSIGN_OR_RETURN(const uint32_t id, Pop());
        return PushStorage(id);
      }
      case '\x92':  // NEWOBJ_EX: what it is made of, without names
        RETURN_IF_ERROR(Pop().status());
        return CallPopped();
      case 'R':
      case '\x81':  // NEWOBJ
        return CallPopped();
      case 'b': {  // BUILD
        ASSIGN_OR_RETURN(const uint32_t state, Pop());
        return Build(state);
      }
      default:
        return Wrong(absl::StrCat("has an instruction that torch.save never writes (",
                                  static_cast<int>(static_cast<unsigned char>(code)), ")"));
    }
  }

  template <typename T>
  absl::Status PushInteger() {
    ASSIGN_OR_RETURN(const T value, Number<T>());
    return PushInt(value);
  }
  absl::Status PushFloat() {
    ASSIGN_OR_RETURN(const uint64_t bits, Number<uint64_t>());
    return Push({.kind = Kind::kFloat, .number = std::bit_cast<double>(__builtin_bswap64(bits))});
  }
  // A text, or the digits of a number, behind its length.
  template <typename T>
  absl::Status PushText(Form form) {
    ASSIGN_OR_RETURN(const T bytes, Number<T>());
    ASSIGN_OR_RETURN(const std::string_view text, Take(bytes));
    return Push({.kind = Kind::kText, .form = form, .text = text});
  }
  template <typename T>
  absl::Status PushLong() {
    ASSIGN_OR_RETURN(const T bytes, Number<T>());
    return Long(bytes);
  }
  template <typename T>
  absl::Status RememberAt() {
    ASSIGN_OR_RETURN(const T at, Number<T>());
    return Remember(at);
  }
  template <typename T>
  absl::Status RecallAt() {
    ASSIGN_OR_RETURN(const T at, Number<T>());
    return Recall(at);
  }
  absl::Status AppendPopped(bool one) {
    if (one) {
      ASSIGN_OR_RETURN(const uint32_t item, Pop());
      return Append({item});
    }
    ASSIGN_OR_RETURN(const std::vector<uint32_t> items, PopToMark());
    return Append(items);
  }
  // 's': one key with its value; 'u': those since the mark; 'd': of a new dictionary.
  absl::Status SetPopped(char code) {
    if (code == 's') {
      ASSIGN_OR_RETURN(const uint32_t value, Pop());
      ASSIGN_OR_RETURN(const uint32_t key, Pop());
      return SetItems({key, value});
    }
    ASSIGN_OR_RETURN(const std::vector<uint32_t> items, PopToMark());
    if (code == 'd') {
      RETURN_IF_ERROR(Push({.kind = Kind::kDict}));
    }
    return SetItems(items);
  }
  absl::Status NameOfLines() {
    ASSIGN_OR_RETURN(const std::string_view module, Line());
    ASSIGN_OR_RETURN(const std::string_view name, Line());
    return Name(module, name);
  }
  absl::Status NameOfStack() {
    ASSIGN_OR_RETURN(const uint32_t name, Pop());
    ASSIGN_OR_RETURN(const uint32_t module, Pop());
    if (nodes_[name].kind != Kind::kText || nodes_[module].kind != Kind::kText)
      return Wrong("names something by what is no text");
    return Name(nodes_[module].text, nodes_[name].text);
  }
  absl::Status CallPopped() {
    ASSIGN_OR_RETURN(const uint32_t arguments, Pop());
    ASSIGN_OR_RETURN(const uint32_t callee, Pop());
    ASSIGN_OR_RETURN(const uint32_t made, Call(callee, arguments));
    return PushMade(made);
  }
  absl::Status Long(uint64_t bytes) {
    ASSIGN_OR_RETURN(const std::string_view digits, Take(bytes));
    if (bytes > 8) return Push({.kind = Kind::kObject, .text = "a number of more than 64 bits"});
    uint64_t value = bytes > 0 && (digits.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
    std::memcpy(&value, digits.data(), bytes);
    return PushInt(static_cast<int64_t>(value));
  }
  absl::Status Tuple(size_t count) {
    std::vector<uint32_t> items(count);
    for (size_t i = count; i-- > 0;) {
      ASSIGN_OR_RETURN(items[i], Pop());
    }
    return PushList(std::move(items), Form::kTuple);
  }
  absl::Status Append(const std::vector<uint32_t>& items) {
    ASSIGN_OR_RETURN(Node* const to, Top());
    if (to->kind != Kind::kList && to->kind != Kind::kObject) return Wrong("appends to what is no list");
    RETURN_IF_ERROR(Spend(BytesOf(items.size(), 0)));
    to->items.insert(to->items.end(), items.begin(), items.end());
    return absl::OkStatus();
  }
  absl::Status SetItems(const std::vector<uint32_t>& items) {
    ASSIGN_OR_RETURN(Node* const to, Top());
    if ((to->kind != Kind::kDict && to->kind != Kind::kObject) || items.size() % 2 != 0)
      return Wrong("sets items of what is no dict");
    RETURN_IF_ERROR(Spend(BytesOf(0, items.size() / 2)));
    for (size_t i = 0; i < items.size(); i += 2) to->pairs.emplace_back(items[i], items[i + 1]);
    return absl::OkStatus();
  }
  absl::Status Remember(uint32_t at) {
    RETURN_IF_ERROR(Top().status());
    RETURN_IF_ERROR(Spend(4 * sizeof(std::pair<uint32_t, uint32_t>)));
    memo_[at] = stack_.back();
    return absl::OkStatus();
  }
  absl::Status Recall(uint32_t at) {
    const auto found = memo_.find(at);
    if (found == memo_.end()) return Wrong("recalls what it has not remembered");
    return PushMade(found->second);
  }
  absl::Status Name(std::string_view module, std::string_view name) {
    RETURN_IF_ERROR(Spend(module.size() + name.size()));
    std::string text(module == "__builtin__" ? "builtins" : module);
    ASSIGN_OR_RETURN(const std::string_view made, MakeText(text.append(".").append(name)));
    return Push({.kind = Kind::kObject, .is_name = true, .text = made});
  }

  // ("storage", class, key, device, elements)
  absl::Status PushStorage(uint32_t id) {
    const std::vector<uint32_t>& parts = nodes_[id].items;
    if (parts.size() < 5 || nodes_[parts[0]].text != "storage" || !nodes_[parts[1]].is_name ||
        nodes_[parts[2]].kind != Kind::kText)
      return Wrong("names something outside of it that is no storage");
    ASSIGN_OR_RETURN(const uint32_t number, StorageOf(nodes_[parts[2]].text));
    const TorchFile::Storage& storage = contents_.storages[number];
    Node node{.kind = Kind::kObject, .is_storage = true, .integer = static_cast<int64_t>(storage.bytes)};
    node.tensor = std::make_unique<TorchTensor>();
    node.tensor->offset = storage.offset;
    node.tensor->storage = number;
    node.text = nodes_[parts[1]].text;
    const std::optional<swap::Dtype> dtype = DtypeOf(node.text);
    if (dtype.has_value()) node.tensor->dtype = *dtype;
    node.is_name = !dtype.has_value();
    return Push(std::move(node));
  }
  absl::StatusOr<uint32_t> StorageOf(std::string_view key) {
    if (key.size() > kLongestKey) return Wrong("names a storage by too long a text");
    const std::string member =
        absl::StrCat(archive_.prefix, "data/", absl::string_view(key.data(), key.size()));
    if (const auto known = storages_.find(member); known != storages_.end()) return known->second;
    const auto found = archive_.members.find(member);
    if (found == archive_.members.end())
      return absl::DataLossError(absl::StrCat(file_.path_, ": ", Quoted(member), " is missing"));
    RETURN_IF_ERROR(Spend(2 * sizeof(TorchFile::Storage) + 4 * member.size()));
    ASSIGN_OR_RETURN(const uint64_t data, archive_.DataOf(member, found->second));
    TorchFile::Storage& storage = contents_.storages.emplace_back();
    storage.member = member;
    storage.offset = data;
    storage.bytes = found->second.bytes;
    if (archive_.has_sums) storage.crc = found->second.crc;
    return storages_[member] = static_cast<uint32_t>(contents_.storages.size() - 1);
  }

  // Calls nothing: says what would come of it.
  absl::StatusOr<uint32_t> Call(uint32_t callee, uint32_t arguments, int depth = 0) {
    if (!nodes_[callee].is_name || nodes_[callee].kind != Kind::kObject ||
        nodes_[arguments].kind != Kind::kList)
      return Wrong("calls what has no name");
    const std::string_view name = nodes_[callee].text;
    const std::vector<uint32_t>& given = nodes_[arguments].items;
    // What a list, a dict or a text is made of is copied, and looked through even where it is not.
    RETURN_IF_ERROR(Spend(BytesOf(given.size(), 0)));
    if (!given.empty()) {
      const Node& first = nodes_[given[0]];
      RETURN_IF_ERROR(Spend(BytesOf(first.items.size(), first.pairs.size())));
    }
    if (name == "torch._utils._rebuild_tensor_v2" || name == "torch._utils._rebuild_tensor_v3" ||
        name == "torch._utils._rebuild_tensor")
      return Tensor(given, name.ends_with("_v3"));
    if (name.starts_with("torch._utils._rebuild_parameter") && !given.empty()) return given[0];
    if (name == "torch._tensor._rebuild_from_type_v2" && given.size() >= 3 && depth < 4)
      return Call(given[0], given[2], depth + 1);
    if (name == "collections.OrderedDict" || name == "builtins.dict") {
      Node dict{.kind = Kind::kDict};
      // Of a list of pairs, as protocol 2 has it.
      if (!given.empty()) {
        for (const uint32_t pair : nodes_[given[0]].items) {
          if (nodes_[pair].items.size() == 2)
            dict.pairs.emplace_back(nodes_[pair].items[0], nodes_[pair].items[1]);
        }
        if (nodes_[given[0]].kind == Kind::kDict) dict.pairs = nodes_[given[0]].pairs;
      }
      return Make(std::move(dict));
    }
    if (name == "torch.Size" || name == "builtins.set" || name == "builtins.frozenset" ||
        name == "builtins.list" || name == "builtins.tuple") {
      const bool tuple = name == "torch.Size" || name == "builtins.tuple";
      Node list{.kind = Kind::kList,
                .form = tuple ? Form::kTuple : (name == "builtins.list" ? Form::kOwn : Form::kSet)};
      if (!given.empty()) list.items = nodes_[given[0]].items;
      return Make(std::move(list));
    }
    // Bytes, as protocol 2 has them: a text in Latin-1.
    if ((name == "_codecs.encode" || name == "builtins.bytes" || name == "builtins.bytearray") &&
        (given.empty() || nodes_[given[0]].kind == Kind::kText)) {
      std::string_view bytes;
      if (!given.empty()) {
        RETURN_IF_ERROR(Spend(nodes_[given[0]].text.size()));
        ASSIGN_OR_RETURN(bytes, MakeText(Latin1(nodes_[given[0]].text)));
      }
      return Make({.kind = Kind::kText, .form = Form::kBytes, .text = bytes});
    }
    return Make({.kind = Kind::kObject, .text = name, .items = given});
  }

  static std::string Latin1(std::string_view utf8) {
    std::string bytes;
    for (size_t i = 0; i < utf8.size(); ++i) {
      const auto lead = static_cast<unsigned char>(utf8[i]);
      const bool pair = (lead == 0xC2 || lead == 0xC3) && i + 1 < utf8.size();
      bytes += pair ? static_cast<char>(((lead & 3) << 6) | (utf8[++i] & 0x3F)) : utf8[i];
    }
    return bytes;
  }

  // (storage, offset, sizes, strides, requires_grad, hooks, metadata), in elements; of _v3 the type before
  // metadata.
  absl::StatusOr<uint32_t> Tensor(const std::vector<uint32_t>& given, bool names_type) {
    const auto whole = [&](uint32_t at) { return nodes_[at].kind == Kind::kInt ? nodes_[at].integer : -1; };
    if (given.size() < (names_type ? 7U : 4U) || !nodes_[given[0]].is_storage || whole(given[1]) < 0 ||
        nodes_[given[2]].kind != Kind::kList || nodes_[given[3]].kind != Kind::kList ||
        nodes_[given[2]].items.size() != nodes_[given[3]].items.size() ||
        nodes_[given[2]].items.size() > kMostDimensions)
      return Wrong("has a tensor that is none");
    const Node& storage = nodes_[given[0]];
    TorchTensor tensor{.dtype = storage.tensor->dtype, .elements = 1, .storage = storage.tensor->storage};
    if (names_type) {
      const std::optional<swap::Dtype> dtype = DtypeOf(nodes_[given[6]].text);
      if (!dtype.has_value())
        return Wrong(
            absl::StrCat("has a tensor of ", Quoted(nodes_[given[6]].text), ", which is not served"));
      tensor.dtype = *dtype;
    } else if (storage.is_name) {
      return Wrong(absl::StrCat("has a tensor of ", Quoted(storage.text), ", which is not served"));
    }
    bool contiguous = true, empty = false;
    for (const uint32_t size : nodes_[given[2]].items) {
      if (whole(size) < 0) return Wrong("has a tensor that is none");
      tensor.sizes.push_back(whole(size));
      empty = empty || whole(size) == 0;
    }
    for (size_t d = tensor.sizes.size(); d-- > 0;) {
      const int64_t stride = whole(nodes_[given[3]].items[d]);
      contiguous = contiguous && (tensor.sizes[d] == 1 || stride == tensor.elements || empty);
      if (__builtin_mul_overflow(tensor.elements, tensor.sizes[d], &tensor.elements))
        return Wrong("has a tensor of more elements than there are numbers");
    }
    if (!contiguous) return Make({.kind = Kind::kObject, .text = "a tensor that is not contiguous"});
    // Its elements are others than those in the file: negated or conjugate ones.
    const size_t metadata = names_type ? 7 : 6;
    if (given.size() > metadata && !nodes_[given[metadata]].pairs.empty())
      return Make(
          {.kind = Kind::kObject, .text = "a tensor that is a negative or a conjugate of its storage"});
    const auto width = static_cast<int64_t>(swap::DtypeBytes(tensor.dtype));
    int64_t first = 0, bytes = 0;
    if (__builtin_mul_overflow(whole(given[1]), width, &first) ||
        __builtin_mul_overflow(tensor.elements, width, &bytes) || first > storage.integer ||
        bytes > storage.integer - first)
      return absl::DataLossError(absl::StrCat(file_.path_, ": a tensor goes beyond the end of its storage"));
    tensor.offset = storage.tensor->offset + static_cast<uint64_t>(first);
    return Make({.kind = Kind::kTensor, .tensor = std::make_unique<TorchTensor>(std::move(tensor))});
  }

  // A state for what is on top: its attributes. Of dicts and tensors they are of no matter.
  absl::Status Build(uint32_t state) {
    ASSIGN_OR_RETURN(Node* const to, Top());
    if (to->kind != Kind::kObject) return absl::OkStatus();
    RETURN_IF_ERROR(AddPairs(state, to));
    // (state, attributes of slots)
    if (nodes_[state].kind != Kind::kList || nodes_[state].items.size() != 2) return absl::OkStatus();
    const uint32_t first = nodes_[state].items[0], second = nodes_[state].items[1];
    RETURN_IF_ERROR(AddPairs(first, to));
    return AddPairs(second, to);
  }
  absl::Status AddPairs(uint32_t from, Node* to) {
    const auto& pairs = nodes_[from].pairs;
    RETURN_IF_ERROR(Spend(BytesOf(0, pairs.size())));
    const size_t count = pairs.size();  // they may be its own
    for (size_t i = 0; i < count; ++i) to->pairs.push_back(nodes_[from].pairs[i]);
    return absl::OkStatus();
  }

  TorchFile& file_;
  const TorchFile::Archive& archive_;
  TorchFile::Contents& contents_;
  std::deque<Node>& nodes_;
  std::string_view left_;
  const size_t all_;
  uint64_t bytes_left_;
  std::vector<uint32_t> stack_;
  std::vector<size_t> marks_;
  absl::flat_hash_map<uint32_t, uint32_t> memo_;
  absl::flat_hash_map<std::string, uint32_t> storages_;  // by member
};

// ---- The file.

TorchFile::TorchFile(std::string path) : path_(std::move(path)), contents_(std::make_unique<Contents>()) {}

TorchFile::~TorchFile() {
  if (fd_ >= 0) ::close(fd_);
}

absl::StatusOr<std::unique_ptr<TorchFile>> TorchFile::Open(const std::string& path, uint64_t most_bytes,
                                                           uint64_t bytes_per_pickle_byte) {
  std::unique_ptr<TorchFile> file(new TorchFile(path));
  // O_NONBLOCK: a FIFO is refused, not waited for.
  file->fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat info {};
  if (file->fd_ < 0 || ::fstat(file->fd_, &info) != 0) {
    const int error = errno;
    const std::string text =
        absl::StrCat(path, ": cannot open: ", std::strerror(error), " (errno ", error, ")");
    return error == ENOENT ? absl::NotFoundError(text) : absl::InvalidArgumentError(text);
  }
  if (!S_ISREG(info.st_mode)) return Bad(path, "is no regular file");
  file->bytes_ = static_cast<uint64_t>(info.st_size);
  file->disk_bytes_ = static_cast<uint64_t>(info.st_blocks) * 512;
  Archive archive{.file = *file};
  RETURN_IF_ERROR(archive.Open());
  for (const auto& [name, member] : archive.members) {
    if (!absl::EndsWith(name, "/data.pkl")) continue;
    if (!archive.prefix.empty()) return Bad(path, "has more than one data.pkl");
    archive.prefix = name.substr(0, name.size() - std::strlen("data.pkl"));
    file->pickle_bytes_ = std::min(member.bytes, file->disk_bytes_);
  }
  if (archive.prefix.empty()) return Bad(path, "is a zip file without data.pkl: torch.save has not made it");
  ASSIGN_OR_RETURN(const std::string order, archive.Text(archive.prefix + "byteorder", 64));
  if (!order.empty() && order != "little")
    return Bad(path, absl::StrCat("its bytes are in the order ", Quoted(order)));
  most_bytes = std::max(most_bytes, std::min(kMostBytesOfAny, bytes_per_pickle_byte * file->pickle_bytes_));
  if (archive.directory_bytes > most_bytes) return Bad(path, "has more members than are read");
  const uint64_t most = most_bytes - archive.directory_bytes;
  ASSIGN_OR_RETURN(file->contents_->pickle, archive.Text(archive.prefix + "data.pkl", most));
  Unpickler unpickler(*file, archive, most - file->contents_->pickle.size());
  RETURN_IF_ERROR(unpickler.Run());
  file->contents_->bytes = most_bytes - unpickler.bytes_left();
  return file;
}

TorchValue TorchFile::root() const { return {this, contents_->root}; }

uint64_t TorchFile::memory_bytes() const { return contents_->bytes; }
uint64_t TorchFile::disk_bytes() const { return disk_bytes_; }
uint64_t TorchFile::pickle_bytes() const { return pickle_bytes_; }

void TorchFile::Rest() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

absl::Status TorchFile::ReadAt(uint64_t offset, void* to, size_t bytes) const {
  if (fd_ >= 0) return ReadFrom(fd_, offset, to, bytes);
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    return absl::UnavailableError(
        absl::StrCat(path_, ": cannot open: ", std::strerror(error), " (errno ", error, ")"));
  }
  const absl::Status status = ReadFrom(fd, offset, to, bytes);
  ::close(fd);
  return status;
}

absl::Status TorchFile::ReadFrom(int fd, uint64_t offset, void* to, size_t bytes) const {
  constexpr auto kFurthest = static_cast<uint64_t>(std::numeric_limits<off_t>::max());
  if (offset > kFurthest || bytes > kFurthest - offset)
    return Bad(path_, "a place in it is beyond all files");
  ASSIGN_OR_RETURN(const size_t done, penstock::ReadAt(fd, path_, offset, to, bytes));
  if (done == bytes) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(path_, ": ", bytes, " bytes at offset ", offset,
                                          " met the end of the file: it was cut short"));
}

absl::Status TorchFile::Read(const TorchTensor& tensor, uint64_t first, std::span<std::byte> to) const {
  const uint64_t bytes = static_cast<uint64_t>(tensor.elements) * swap::DtypeBytes(tensor.dtype);
  if (first > bytes || to.size() > bytes - first)
    return Bad(path_, absl::StrCat("bytes ", first, " to ", first + to.size(), " of a tensor of ", bytes));
  RETURN_IF_ERROR(ReadAt(tensor.offset + first, to.data(), to.size()));
  return Take(&contents_->storages[tensor.storage], tensor.offset + first, to);
}

absl::Status TorchFile::Damaged(const std::string& member, uint64_t offset, uint64_t bytes) const {
  return absl::DataLossError(absl::StrCat(path_, ": the ", bytes, " bytes at offset ", offset, ", ",
                                          Quoted(member),
                                          ", do not match their checksum (CRC-32): the file is damaged; take "
                                          "another copy of it"));
}

// `bytes` of the storage were read, from `offset` of the file on.
absl::Status TorchFile::Take(Storage* storage, uint64_t offset, std::span<const std::byte> bytes) const {
  if (!storage->crc.has_value() || bytes.empty()) return absl::OkStatus();
  uint64_t at = offset - storage->offset;
  const uint64_t end = at + bytes.size();
  while (at < end) {
    // The next range of it that nobody has taken yet, whose sum needs no lock.
    uint64_t from = at, to = end;
    {
      std::lock_guard lock(storage->mutex);
      if (storage->damaged) return Damaged(storage->member, storage->offset, storage->bytes);
      if (storage->checked) return absl::OkStatus();
      auto next = storage->read.upper_bound(from);
      if (next != storage->read.begin()) from = std::max(from, std::prev(next)->second.end);
      if (next != storage->read.end()) to = std::min(to, next->first);
    }
    at = std::max(to, from);
    if (from >= to) continue;
    const auto part = bytes.subspan(from - (offset - storage->offset), to - from);
    const uint32_t crc = libdeflate_crc32(0, part.data(), part.size());
    std::lock_guard lock(storage->mutex);
    storage->Add(from, {to, crc});
    if (storage->checked) return absl::OkStatus();
    if (storage->read.begin()->first != 0 || storage->read.begin()->second.end != storage->bytes) continue;
    storage->damaged = storage->read.begin()->second.crc != *storage->crc;
    storage->checked = true;
    storage->read.clear();
    if (storage->damaged) return Damaged(storage->member, storage->offset, storage->bytes);
  }
  return absl::OkStatus();
}

absl::Status TorchFile::CheckRead() const {
  std::vector<std::byte> buffer;
  for (Storage& storage : contents_->storages) {
    while (true) {
      uint64_t from = 0, to = storage.bytes;
      {
        std::lock_guard lock(storage.mutex);
        if (storage.damaged) return Damaged(storage.member, storage.offset, storage.bytes);
        if (storage.checked || storage.read.empty()) break;
        auto first = storage.read.begin();
        if (first->first > 0) {
          to = first->first;
        } else {
          from = first->second.end;
          if (++first != storage.read.end()) to = first->first;
        }
      }
      buffer.resize(std::min<uint64_t>(to - from, kCheckedAtOnce));
      RETURN_IF_ERROR(ReadAt(storage.offset + from, buffer.data(), buffer.size()));
      RETURN_IF_ERROR(Take(&storage, storage.offset + from, buffer));
    }
  }
  return absl::OkStatus();
}

TorchValue::Kind TorchValue::kind() const {
  return file_ == nullptr ? Kind::kAbsent : file_->contents_->nodes[index_].kind;
}
TorchValue::Form TorchValue::form() const {
  return file_ == nullptr ? Form::kOwn : file_->contents_->nodes[index_].form;
}
std::optional<bool> TorchValue::boolean() const {
  if (kind() != Kind::kBool) return std::nullopt;
  return file_->contents_->nodes[index_].integer != 0;
}
std::optional<int64_t> TorchValue::integer() const {
  if (kind() != Kind::kInt) return std::nullopt;
  return file_->contents_->nodes[index_].integer;
}
std::optional<double> TorchValue::number() const {
  if (kind() == Kind::kInt) return static_cast<double>(file_->contents_->nodes[index_].integer);
  if (kind() != Kind::kFloat) return std::nullopt;
  return file_->contents_->nodes[index_].number;
}
std::string_view TorchValue::text() const {
  return kind() == Kind::kText ? file_->contents_->nodes[index_].text : std::string_view();
}
const TorchTensor* TorchValue::tensor() const {
  return kind() == Kind::kTensor ? file_->contents_->nodes[index_].tensor.get() : nullptr;
}
std::string_view TorchValue::name() const {
  return kind() == Kind::kObject ? file_->contents_->nodes[index_].text : std::string_view();
}
size_t TorchValue::size() const {
  return file_ == nullptr ? 0 : file_->contents_->nodes[index_].items.size();
}
TorchValue TorchValue::operator[](size_t i) const {
  return i < size() ? TorchValue(file_, file_->contents_->nodes[index_].items[i]) : TorchValue();
}
TorchValue::Entries TorchValue::entries() const {
  return file_ == nullptr ? Entries() : Entries(file_, file_->contents_->nodes[index_].pairs);
}
TorchValue::Entries::value_type TorchValue::Entries::operator[](size_t i) const {
  return {TorchValue(file_, pairs_[i].first), TorchValue(file_, pairs_[i].second)};
}
TorchValue TorchValue::operator[](std::string_view key) const {
  if (file_ == nullptr) return {};
  const TorchFile::Contents& contents = *file_->contents_;
  if (const auto table = contents.by_text.find(index_); table != contents.by_text.end()) {
    const auto found = table->second.find(key);
    return found != table->second.end() ? TorchValue(file_, found->second) : TorchValue();
  }
  const auto& pairs = contents.nodes[index_].pairs;
  if (pairs.size() > kLongDict) return {};  // no key is a text
  // What is set later holds.
  for (auto pair = pairs.rbegin(); pair != pairs.rend(); ++pair) {
    const TorchFile::Node& node = contents.nodes[pair->first];
    if (node.kind == Kind::kText && node.text == key) return {file_, pair->second};
  }
  return {};
}
TorchValue TorchValue::AtNumber(int64_t key) const {
  if (file_ == nullptr) return {};
  const TorchFile::Contents& contents = *file_->contents_;
  if (const auto table = contents.by_number.find(index_); table != contents.by_number.end()) {
    const auto found = table->second.find(key);
    return found != table->second.end() ? TorchValue(file_, found->second) : TorchValue();
  }
  const auto& pairs = contents.nodes[index_].pairs;
  if (pairs.size() > kLongDict) return {};
  for (auto pair = pairs.rbegin(); pair != pairs.rend(); ++pair) {
    const TorchFile::Node& node = contents.nodes[pair->first];
    if (node.kind == Kind::kInt && node.integer == key) return {file_, pair->second};
  }
  return {};
}

}  // namespace penstock::models
