#include "run/watch/csv_monitor.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/directory.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "base/whole_file.h"

namespace penstock::run {
namespace {

constexpr const char* kCsvMonitor = "csv_monitor";
constexpr const char* kEndOfLine = "\r\n";
constexpr const char* kMark = "penstock_run_id";

std::string NameOf(const std::string& tag) {
  return absl::StrCat(absl::StrReplaceAll(tag, {{"/", "_"}, {" ", "_"}}), ".csv");
}

// The files of a training's scalars in there, whoever made them. What else is there is somebody else's.
absl::StatusOr<std::vector<std::string>> FilesIn(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(directory));
  std::vector<std::string> paths;
  for (const char* tag : kScalarTags) {
    const std::string name = NameOf(tag);
    if (std::find(names.begin(), names.end(), name) != names.end())
      paths.push_back((std::filesystem::path(directory) / name).string());
  }
  return paths;
}

// The samples of a line; -1: it is a header, which DeepSpeed writes again in every process.
absl::StatusOr<int64_t> SamplesOf(const std::string& path, const std::string& line) {
  int64_t samples = 0;
  if (absl::StartsWith(line, "step,")) return -1;
  const std::string first = line.substr(0, line.find(','));
  if (line.find(',') != std::string::npos && absl::SimpleAtoi(first, &samples) && samples >= 0)
    return samples;
  return absl::FailedPreconditionError(absl::StrCat(
      kCsvMonitor, ": ", path, " is no file of scalars: move it away, or give another job_name"));
}

}  // namespace

std::string PythonFloat(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return nlohmann::json(value).dump();
}

absl::StatusOr<std::unique_ptr<CsvMonitor>> CsvMonitor::Open(const std::string& directory,
                                                             const MonitorOwner& owner) {
  RETURN_IF_ERROR(MakeDirectory(kCsvMonitor, directory));
  std::unique_ptr<CsvMonitor> monitor(new CsvMonitor(directory, owner));
  RETURN_IF_ERROR(monitor->Owns().status());
  return monitor;
}

absl::StatusOr<bool> CsvMonitor::Owns() const {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesIn(directory_));
  if (files.empty()) return true;
  const absl::StatusOr<std::string> text = ReadSmallFile(directory_ + "/" + kMark);
  if (!text.ok() && !absl::IsNotFound(text.status())) return text.status();
  const std::string mark = text.ok() ? text->substr(0, text->find('\n')) : "";
  if (mark == owner_.run_id && owner_.resumes) return true;
  if (mark.empty() && owner_.resumes) return false;
  if (!mark.empty() && owner_.replaces.count(mark) > 0) return true;
  return absl::FailedPreconditionError(
      absl::StrCat(kCsvMonitor, ": ", directory_, " holds the samples of another run",
                   mark.empty() ? "" : absl::StrCat(" (", mark, ")"),
                   ": give another job_name or output_path, or move them away"));
}

absl::Status CsvMonitor::Take(const std::string& path, int64_t samples, bool keeps, File* file) const {
  file->last = -1;
  int64_t whole = 0;
  bool behind = false;
  const auto take = [&](std::string_view text) -> absl::StatusOr<int64_t> {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return AppendFile::kMore;  // or torn
    ASSIGN_OR_RETURN(const int64_t at, SamplesOf(path, std::string(text.substr(0, end))));
    const int64_t bytes = static_cast<int64_t>(end) + 1;
    behind |= at > samples;
    if (!behind) {
      file->last = std::max(file->last, at);
      whole += bytes;
    } else if (at >= 0 && at <= samples) {
      return absl::FailedPreconditionError(absl::StrCat(
          kCsvMonitor, ": ", path, " is damaged: it has sample ", at, " behind a later one than ", samples,
          ", where this run goes on; nothing of it was cut: move it away"));
    }
    return bytes;
  };
  RETURN_IF_ERROR(file->file->Walk(take).status());
  ASSIGN_OR_RETURN(const int64_t size, file->file->Size());
  if (whole == size) return absl::OkStatus();
  if (!behind && size - whole >= AppendFile::kMostUnitBytes)  // no line that a kill cut short
    return absl::FailedPreconditionError(absl::StrCat(kCsvMonitor, ": ", path,
                                                      " is no file of scalars from byte ", whole,
                                                      " on: move it away, or give another job_name"));
  if (!keeps) return file->file->Cut(whole);
  return absl::FailedPreconditionError(
      absl::StrCat(kCsvMonitor, ": ", path, " has lines behind sample ", samples,
                   ", where this run goes on, and does not say whose they are: give another job_name, or "
                   "move it away"));
}

// Before anything is looked at: of two runs that begin at once in an empty directory, one has it.
absl::Status CsvMonitor::Lock() {
  if (lock_.has_value()) return absl::OkStatus();
  const absl::StatusOr<bool> locked = lock_.emplace().Take(directory_);
  if (locked.ok() && *locked) return absl::OkStatus();
  lock_.reset();
  RETURN_IF_ERROR(locked.status());
  return absl::FailedPreconditionError(
      absl::StrCat(kCsvMonitor, ": ", directory_,
                   " is written by another training: give another job_name or output_path"));
}

absl::Status CsvMonitor::Begin(int64_t samples) {
  RETURN_IF_ERROR(Lock());
  absl::Status status = TakeOver(samples);
  if (!status.ok()) {
    files_.clear();
    lock_.reset();
  }
  return status;
}

absl::Status CsvMonitor::TakeOver(int64_t samples) {
  ASSIGN_OR_RETURN(const bool own, Owns());
  files_.clear();
  const bool replaces = own && !owner_.resumes;
  ASSIGN_OR_RETURN(const std::vector<std::string> paths, FilesIn(directory_));
  for (const std::string& path : paths) {
    File file;
    ASSIGN_OR_RETURN(file.file, AppendFile::Open(kCsvMonitor, path));
    if (replaces) {
      RETURN_IF_ERROR(file.file->Cut(0));
    } else {
      RETURN_IF_ERROR(Take(path, samples, /*keeps=*/!own, &file));
    }
    files_[path] = std::move(file);
  }
  return WriteWholeFile(kCsvMonitor, directory_ + "/" + kMark, owner_.run_id + "\n");
}

absl::StatusOr<CsvMonitor::File*> CsvMonitor::FileOf(const std::string& tag) {
  const std::string path = (std::filesystem::path(directory_) / NameOf(tag)).string();
  File& file = files_[path];
  if (file.file == nullptr) {
    ASSIGN_OR_RETURN(file.file, AppendFile::Open(kCsvMonitor, path));
  }
  return &file;
}

absl::Status CsvMonitor::Append(int64_t samples, const std::vector<Scalar>& scalars) {
  for (const Scalar& scalar : scalars) {
    ASSIGN_OR_RETURN(File* const file, FileOf(scalar.tag));
    if (samples <= file->last) continue;
    std::string line = absl::StrCat(samples, ",", PythonFloat(scalar.value), kEndOfLine);
    if (file->last < 0) {
      // The first line of the file: a header before it, in the same write.
      ASSIGN_OR_RETURN(const int64_t there, file->file->Size());
      const std::string name = scalar.tag.substr(scalar.tag.rfind('/') + 1);
      if (there == 0) line = absl::StrCat("step,", name, kEndOfLine, line);
    }
    RETURN_IF_ERROR(file->file->Append(line));
    file->last = samples;
  }
  return absl::OkStatus();
}

}  // namespace penstock::run
