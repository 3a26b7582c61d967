#include "tools/pages/run_files.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/json.h"
#include "base/lines.h"
#include "base/status_macros.h"
#include "zero/config/json_field.h"

namespace penstock::tools {
namespace {

using nlohmann::json;

constexpr const char* kWayOut = ": give files that --report, --log or --trace wrote";

absl::Status Wrong(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what, kWayOut));
}

// Of a file that cannot be read: the status names it.
absl::Status Unread(const absl::Status& status) {
  return absl::InvalidArgumentError(absl::StrCat(status.message(), kWayOut));
}

bool IsEvaluation(const json& line) { return line.is_object() && line.contains("windows"); }

void AddLine(const json& line, Run* run) {
  const std::optional<int64_t> step = zero::JsonField<int64_t>(line, "step");
  if (!step.has_value() || line.contains("stuck")) return;
  if (IsEvaluation(line)) {
    run->evaluations.push_back({*step, NumberOf(line, "loss")});
    return;
  }
  run->steps.push_back({.step = *step,
                        .loss = NumberOf(line, "loss"),
                        .grad_norm = NumberOf(line, "grad_norm"),
                        .lr = NumberOf(line, "lr"),
                        .tokens = NumberOf(line, "tokens"),
                        .seconds = NumberOf(line, "seconds"),
                        .stall_io_seconds = NumberOf(line, "stall_io_seconds"),
                        .compute_seconds = NumberOf(line, "compute_seconds"),
                        .nvme_read_bytes = NumberOf(line, "nvme_read_bytes"),
                        .nvme_write_bytes = NumberOf(line, "nvme_write_bytes"),
                        .loss_not_finite = line.contains("loss") && line["loss"].is_null(),
                        .skipped = zero::JsonField<bool>(line, "skipped").value_or(false),
                        .redone = zero::JsonField<bool>(line, "redone").value_or(false)});
}

// Steps and evaluations in order, one of each.
template <typename Entries>
void InOrder(Entries* entries) {
  std::stable_sort(entries->begin(), entries->end(),
                   [](const auto& a, const auto& b) { return a.step < b.step; });
  entries->erase(std::unique(entries->begin(), entries->end(),
                             [](const auto& a, const auto& b) { return a.step == b.step; }),
                 entries->end());
}

Run RunOf(json report) {
  Run run;
  run.run_id = zero::JsonField<std::string>(report, "run_id").value_or("");
  for (const char* key : {"steps", "evaluations"}) {
    if (report.contains(key) && report[key].is_array()) {
      for (const json& line : report[key]) AddLine(line, &run);
    }
    report.erase(key);
  }
  if (!run.steps.empty()) {
    run.first_reported_step = run.steps.front().step;
    run.last_reported_step = run.steps.back().step;
  }
  run.report = std::move(report);
  return run;
}

// A log's lines; the last one may be torn.
absl::StatusOr<Run> ReadLog(const std::string& path) {
  ASSIGN_OR_RETURN(LineReader file, LineReader::Open(path));
  Run run;
  int64_t number = 0;
  std::string line;
  while (true) {
    ASSIGN_OR_RETURN(const bool more, file.Next(&line));
    if (!more) break;
    ++number;
    const json entry = ParseJson(line, "").value_or(json());
    const bool torn = file.torn();
    if (!entry.is_object() || !entry.contains("step")) {
      if (torn || line.empty()) continue;
      return Wrong(path, absl::StrCat("line ", number, " is no line of a log"));
    }
    if (run.run_id.empty()) run.run_id = zero::JsonField<std::string>(entry, "run_id").value_or("");
    AddLine(entry, &run);
  }
  if (run.steps.empty() && run.evaluations.empty()) return Wrong(path, "it is empty, or no log");
  return run;
}

enum class FileKind { kReport, kLog, kTrace };
struct Content {
  FileKind kind;
  json report;
};

absl::StatusOr<Content> Look(const std::string& path) {
  absl::StatusOr<LineReader> file = LineReader::Open(path);
  if (!file.ok()) return Unread(file.status());
  std::string first;
  RETURN_IF_ERROR(file->Next(&first).status());
  const size_t begin = first.find_first_not_of(" \t\r\xef\xbb\xbf");
  if (begin != std::string::npos && first[begin] == '[') return Content{FileKind::kTrace, {}};
  const json line = ParseJson(first, "").value_or(json());
  if (line.is_object() && line.contains("step")) return Content{FileKind::kLog, {}};
  // A report has at most 10,000 steps of some hundred bytes; what is far larger is none.
  constexpr uint64_t kLargest = uint64_t{64} << 20;
  constexpr JsonOptions kOptions = {.max_values = 2'000'000};
  absl::StatusOr<json> read = ReadJsonObject(path, kLargest, kOptions);
  // What is no JSON is no report; what cannot be read is said to be that.
  if (!read.ok() && !absl::IsInvalidArgument(read.status())) return Unread(read.status());
  if (read.ok() && (read->contains("status") || read->contains("steps")))
    return Content{FileKind::kReport, *std::move(read)};
  return Wrong(path, "it is no report, log or trace of Penstock");
}

// The file's name, and as much of its directories as tells it from the others.
void NameRuns(const std::vector<std::string>& paths, std::vector<Run>* runs) {
  for (int parts = 1; parts <= 8; ++parts) {
    std::map<std::string, int> seen;
    for (size_t i = 0; i < runs->size(); ++i) {
      std::filesystem::path path = paths[i], name = path.filename();
      for (int up = 1; up < parts && path.has_parent_path() && path.parent_path() != path; ++up) {
        path = path.parent_path();
        name = path.filename() / name;
      }
      (*runs)[i].name = name.string();
      ++seen[(*runs)[i].name];
    }
    if (seen.size() == runs->size()) return;
  }
  for (size_t i = 0; i < runs->size(); ++i) absl::StrAppend(&(*runs)[i].name, " (", i + 1, ")");
}

// The log's steps where it has more of them than the report.
void Join(Run log, Run* run) {
  if (log.steps.size() > run->steps.size()) run->steps = std::move(log.steps);
  if (log.evaluations.size() > run->evaluations.size()) run->evaluations = std::move(log.evaluations);
}

// What the files gave, with the run that each of them went to.
class Gathering {
 public:
  absl::Status Add(const std::string& path) {
    ASSIGN_OR_RETURN(Content content, Look(path));
    if (content.kind == FileKind::kReport) {
      NewRun(path, RunOf(std::move(content.report)));
    } else if (content.kind == FileKind::kLog) {
      ASSIGN_OR_RETURN(Run log, ReadLog(path));
      // A report that comes later may be this log's too.
      if (log.run_id.empty()) {
        NewRun(path, std::move(log));
      } else {
        logs_.push_back({path, run_of_file_.size(), std::move(log)});
        run_of_file_.push_back(kNone);
      }
    } else {
      ASSIGN_OR_RETURN(TraceView trace, ReadTrace(path));
      traces_.push_back({path, run_of_file_.size(), std::move(trace)});
      run_of_file_.push_back(kNone);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<Run>> Finish() {
    for (auto& [path, file, log] : logs_) JoinLog(path, file, std::move(log));
    for (auto& [path, file, trace] : traces_) RETURN_IF_ERROR(JoinTrace(path, file, std::move(trace)));
    for (Run& run : runs_) {
      InOrder(&run.steps);
      InOrder(&run.evaluations);
    }
    NameRuns(names_, &runs_);
    return std::move(runs_);
  }

 private:
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();
  template <typename Part>
  struct Waiting {
    std::string path;
    size_t file;
    Part part;
  };

  void NewRun(const std::string& path, Run run) {
    run_of_file_.push_back(runs_.size());
    runs_.push_back(std::move(run));
    names_.push_back(path);
  }

  void JoinLog(const std::string& path, size_t file, Run log) {
    for (size_t i = 0; i < runs_.size(); ++i) {
      if (runs_[i].run_id != log.run_id) continue;
      Join(log, &runs_[i]);
      run_of_file_[file] = i;
    }
    if (run_of_file_[file] != kNone) return;
    run_of_file_[file] = runs_.size();
    runs_.push_back(std::move(log));
    names_.push_back(path);
  }

  // The run that stands before a file, and if `run_id` is not empty is that one; kNone: there is none.
  size_t RunBefore(size_t file, const std::string& run_id) const {
    while (file-- > 0) {
      const size_t run = run_of_file_[file];
      if (run != kNone && (run_id.empty() || runs_[run].run_id == run_id)) return run;
    }
    return kNone;
  }

  absl::Status JoinTrace(const std::string& path, size_t file, TraceView trace) {
    size_t run = RunBefore(file, trace.run_id);
    if (run == kNone && !trace.run_id.empty()) {
      run = RunBefore(run_of_file_.size(), trace.run_id);
      // A report that names no run may be this one's.
      const size_t nameless = RunBefore(file, "");
      if (run == kNone && nameless != kNone && runs_[nameless].run_id.empty()) run = nameless;
      if (run == kNone) {
        return Wrong(path, absl::StrCat("it is the trace of run ", trace.run_id,
                                        ", and no report or log here is of that run"));
      }
    }
    if (run == kNone) return Wrong(path, "a trace stands behind the report or log that it belongs to");
    if (runs_[run].trace.has_value())
      return Wrong(path, "its run has another trace already, and one step of one is drawn");
    runs_[run].trace = std::move(trace);
    return absl::OkStatus();
  }

  std::vector<Run> runs_;
  std::vector<std::string> names_;   // the file that each is called after
  std::vector<size_t> run_of_file_;  // of each file in order
  std::vector<Waiting<Run>> logs_;
  std::vector<Waiting<TraceView>> traces_;
};

}  // namespace

double NumberOf(const json& object, const char* key) {
  return zero::JsonField<double>(object, key).value_or(kMissing);
}

double Run::Figure(const char* path) const {
  const json* at = &report;
  const std::vector<std::string> keys = absl::StrSplit(path, '.');
  for (size_t i = 0; i + 1 < keys.size(); ++i) {
    const auto it = at->is_object() ? at->find(keys[i]) : at->end();
    if (it == at->end()) return kMissing;
    at = &*it;
  }
  return NumberOf(*at, keys.back().c_str());
}

std::string Run::Text(const char* key) const {
  return zero::JsonField<std::string>(report, key).value_or("");
}

int64_t Run::FirstOfProcess() const {
  const auto it = report.find("resumed_from_step");
  if (it == report.end()) return first_reported_step;
  return zero::JsonField<int64_t>(report, "resumed_from_step").value_or(0) + 1;
}

absl::StatusOr<std::vector<Run>> ReadRuns(const std::vector<std::string>& paths) {
  Gathering gathering;
  for (const std::string& path : paths) RETURN_IF_ERROR(gathering.Add(path));
  return gathering.Finish();
}

}  // namespace penstock::tools
