#include "base/foreign_file.h"

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
    "a pickle runs code when it is loaded; load it where it was made and write lines of JSON";
constexpr const char* kNumpy =
    "python3 -c \"import numpy; numpy.load('%s').astype('uint16').tofile('%s.bin')\", uint32 for a "
    "vocabulary "
    "above 65536";

// Marks of at least 6 bytes: random numbers do not begin with them.
constexpr std::array<Format, 4> kLong = {{
    {"\x93NUMPY"sv, "an array of numpy.save", kNumpy},
    {"ARROW1"sv, "Arrow", kArrow},
    {"\x89HDF\r\n\x1a\n"sv, "HDF5", "write it as lines of JSON, or tokens as uint16 in a .bin"},
    {"SQLite format 3"sv, "an SQLite database", "write it as lines of JSON: sqlite3 -json"},
}};
constexpr std::array<Format, 12> kShort = {{
    {"PAR1"sv, "Parquet", kParquet},
    {"\x1f\x8b"sv, "compressed by gzip", "gunzip -k '%s'"},
    {"\x28\xb5\x2f\xfd"sv, "compressed by zstd", "zstd -d '%s'"},
    {"\xfd\x37zXZ\x00"sv, "compressed by xz", "xz -dk '%s'"},
    {"BZh"sv, "compressed by bzip2", "bzip2 -dk '%s'"},
    {"PK\x03\x04"sv, "a zip archive",
     "unzip '%s'; one of torch.save or numpy.savez is loaded there and "
     "written as lines of JSON, or as tokens in a .bin"},
    {"\x80\x02"sv, "a pickle", kPickle},
    {"\x80\x03"sv, "a pickle", kPickle},
    {"\x80\x04"sv, "a pickle", kPickle},
    {"\x80\x05"sv, "a pickle", kPickle},
    {"Obj\x01"sv, "Avro", "write it as lines of JSON"},
    {"%PDF-"sv, "PDF", "pdftotext '%s'"},
}};

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
  if (tokens) return "";
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
