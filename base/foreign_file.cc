#include "base/foreign_file.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"

namespace penstock {
namespace {

using std::string_view_literals::operator""sv;

// %s in `way` is the file's path.
struct Format {
  std::string_view mark;
  const char* what;
  const char* way;
};

constexpr const char* kParquet =
    "python3 -c \"import pandas; pandas.read_parquet('%s').to_json('%s.jsonl', orient='records', "
    "lines=True)\"";
constexpr const char* kArrow =
    "python3 -c \"import datasets; datasets.Dataset.from_file('%s').to_json('%s.jsonl')\"";
constexpr const char* kPickle =
    "python3 -c \"import json, pickle; [print(json.dumps(row)) for row in pickle.load(open('%s', 'rb'))]\" > "
    "'%s.jsonl', where you trust it: loading it runs code";
constexpr const char* kNumpy =
    "python3 -c \"import numpy; numpy.load('%s').astype('uint16').tofile('%s.bin')\", uint32 for a "
    "vocabulary above 65536";
constexpr const char* kTorch =
    "python3 -c \"import torch; torch.load('%s', weights_only=True).numpy().astype('uint16').tofile('%s.bin')"
    "\" if it is a tensor of tokens, uint32 for a vocabulary above 65536; weights are for `init_from`, once "
    "they are safetensors";
constexpr const char* kTokensBehindHeader =
    "tail -c +1025 '%s' > '%s.tokens.bin', for `vocab`, takes the header off";

// Marks of at least 6 bytes: random numbers do not begin with them.
constexpr std::array<Format, 10> kLong = {{
    {"\x93NUMPY"sv, "an array of numpy.save", kNumpy},
    {"ARROW1"sv, "Arrow", kArrow},
    {"\x89HDF\r\n\x1a\n"sv, "HDF5",
     "python3 -c \"import h5py; h5py.File('%s')['KEY'][:].astype('uint16').tofile('%s.bin')\", with the KEY "
     "that h5ls shows"},
    {"SQLite format 3"sv, "an SQLite database", "sqlite3 -json '%s' 'select * from TABLE' > '%s.json'"},
    {"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"sv, "of torch.save", kTorch},
    {"MMIDIDX\x00\x00"sv, "Megatron's index of the .bin beside it",
     "give that .bin, with `vocab`, whose tokens are uint16 or uint32"},
    // Little-endian integers of 32 bits: a magic number and a version; the tokens follow 1024 bytes.
    {"\x88\xd8\x34\x01\x01\x00\x00\x00"sv, "llm.c's tokens behind a header", kTokensBehindHeader},
    {"\xa1\xd9\x34\x01\x07\x00\x00\x00"sv, "llm.c's tokens behind a header", kTokensBehindHeader},
    {"7z\xbc\xaf\x27\x1c"sv, "a 7z archive", "7z x '%s'"},
    {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, "an old document of Office",
     "python3 -c \"import pandas; pandas.read_excel('%s').to_json('%s.jsonl', orient='records', "
     "lines=True)\", "
     "if it is a table"},
}};
constexpr std::array<Format, 17> kShort = {{
    {"PAR1"sv, "Parquet", kParquet},
    {"\x1f\x8b"sv, "compressed by gzip", "gunzip -k '%s'"},
    {"\x28\xb5\x2f\xfd"sv, "compressed by zstd", "zstd -d '%s'"},
    {"\xfd\x37zXZ\x00"sv, "compressed by xz", "xz -dk '%s'"},
    {"BZh"sv, "compressed by bzip2", "bzip2 -dk '%s'"},
    {"\x04\x22\x4d\x18"sv, "compressed by lz4", "lz4 -d '%s'"},
    {"\x80\x02"sv, "a pickle", kPickle},
    {"\x80\x03"sv, "a pickle", kPickle},
    {"\x80\x04"sv, "a pickle", kPickle},
    {"\x80\x05"sv, "a pickle", kPickle},
    {"ORC"sv, "ORC",
     "python3 -c \"import pandas; pandas.read_orc('%s').to_json('%s.jsonl', orient='records', lines=True)\""},
    {"Obj\x01"sv, "Avro",
     "python3 -c \"import fastavro, json; [print(json.dumps(row)) for row in fastavro.reader(open('%s', "
     "'rb'))]"
     "\" > '%s.jsonl'"},
    {"%PDF-"sv, "PDF", "pdftotext '%s'"},
    {"GGUF"sv, "GGUF, a model's weights", "give text, or tokens in a .bin"},
    {"\xff\xfe\x00\x00"sv, "text in UTF-32", "iconv -f UTF-32 -t UTF-8 '%s' > '%s.utf8'"},
    {"\xff\xfe"sv, "text in UTF-16", "iconv -f UTF-16 -t UTF-8 '%s' > '%s.utf8'"},
    {"\xfe\xff"sv, "text in UTF-16", "iconv -f UTF-16 -t UTF-8 '%s' > '%s.utf8'"},
}};

// The name of a zip archive's first entry; empty where the head is not such an archive's. Thirty bytes that
// must agree: tokens do not begin so.
std::string_view FirstInZip(std::string_view head) {
  constexpr size_t kHeader = 30;
  const auto at = [&](size_t offset) {
    return static_cast<size_t>(static_cast<unsigned char>(head[offset])) |
           static_cast<size_t>(static_cast<unsigned char>(head[offset + 1])) << 8;
  };
  if (head.size() <= kHeader || !head.starts_with("PK\x03\x04"sv)) return {};
  const size_t version = at(4), method = at(8), length = at(26);
  const bool known =
      method == 0 || method == 8 || method == 9 || method == 12 || method == 14 || method == 93;
  if (version > 100 || !known || length == 0 || head.size() - kHeader < length) return {};
  const std::string_view name = head.substr(kHeader, length);
  const auto unprintable = [](unsigned char c) { return c < 0x20 || c == '\'' || c == '"' || c == '\\'; };
  return std::any_of(name.begin(), name.end(), unprintable) ? std::string_view() : name;
}

// A length of eight bytes and an object of JSON.
bool IsSafetensors(std::string_view head) {
  return head.size() > 10 && head.substr(4, 4) == "\0\0\0\0"sv && head.substr(8, 2) == "{\""sv;
}

bool IsTar(std::string_view head) { return head.size() > 262 && head.substr(257, 5) == "ustar"sv; }

// What `datasets` keeps: a continuation mark, a length of two bytes, a table of flatbuffers.
bool IsArrowStream(std::string_view head) {
  return head.size() >= 12 && head.starts_with("\xff\xff\xff\xff") && head.substr(6, 6) == "\0\0\x10\0\0\0"sv;
}

std::string Filled(std::string_view way, std::string_view path) {
  std::string text;
  for (size_t at = 0; (at = way.find("%s")) != std::string_view::npos; way.remove_prefix(at + 2)) {
    text.append(way.substr(0, at));
    text.append(path);
  }
  return text.append(way);
}

std::string Described(const Format& format, std::string_view path) {
  return absl::StrCat("is ", format.what, ", which is not read: ", Filled(format.way, path));
}

std::string DescribedZip(std::string_view first, std::string_view path) {
  if (first.ends_with("/data.pkl")) return Described({"", "of torch.save", kTorch}, path);
  if (first.ends_with(".npy")) {
    const std::string name(first.substr(0, first.size() - 4));
    return Filled(
        absl::StrCat("is an archive of numpy.savez, which is not read: python3 -c \"import numpy; "
                     "numpy.load('%s')['",
                     name, "'].astype('uint16').tofile('%s.bin')\", uint32 for a vocabulary above 65536"),
        path);
  }
  return Described({"", "a zip archive", "unzip '%s'"}, path);
}

}  // namespace

bool IsGitLfsPointer(std::string_view text) {
  return text.starts_with("version https://git-lfs.github.com/spec/");
}

std::string DescribeForeignData(std::string_view head, std::string_view path, bool tokens) {
  if (IsGitLfsPointer(head)) return kGitLfsPointer;
  for (const Format& format : kLong) {
    if (head.starts_with(format.mark)) return Described(format, path);
  }
  if (IsArrowStream(head)) return Described({"", "Arrow", kArrow}, path);
  if (const std::string_view first = FirstInZip(head); !first.empty()) return DescribedZip(first, path);
  if (IsTar(head)) return Described({"", "a tar archive", "tar -xf '%s'"}, path);
  if (tokens) return "";
  if (IsSafetensors(head))
    return Described({"", "safetensors, a model's weights", "give text, or tokens in a .bin"}, path);
  for (const Format& format : kShort) {
    if (head.starts_with(format.mark)) return Described(format, path);
  }
  for (const auto& [ending, separator] :
       {std::pair<std::string_view, const char*>{".csv", ","}, {".tsv", "\\t"}}) {
    if (!path.ends_with(ending)) continue;
    return Filled(
        absl::StrCat("is a table of separated values by its name, which is not read: python3 -c \"import "
                     "csv, json; [print(json.dumps(row)) for row in csv.DictReader(open('%s'), delimiter='",
                     separator, "')]\" > '%s.jsonl' (or rename it, to learn its characters)"),
        path);
  }
  return "";
}

}  // namespace penstock
