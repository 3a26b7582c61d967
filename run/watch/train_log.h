// The log of a training: one JSON line for every committed step and every evaluation, each with the id of its
// run, complete across kills.
//
// A line is appended after its step's commit. A kill between the two leaves the line missing, a kill within
// the write leaves it torn: Begin cuts off a torn line, and AddMissing writes the one that the commit record
// still knows. Where a run goes back to a checkpoint, CutAfter takes away the lines of the steps that will
// come again. A log belongs to one run: nothing is appended to another's, and nothing of it is cut, but where
// the user replaces a run and names its log again. Nothing is cut that could not be read to its end.
#ifndef PENSTOCK_RUN_WATCH_TRAIN_LOG_H_
#define PENSTOCK_RUN_WATCH_TRAIN_LOG_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::run {

// Whose lines a log may hold.
struct LogOwner {
  std::string run_id;    // of the run; every line that is appended has it
  bool resumes = false;  // what the log holds is the run's own
  // Or it is of a run that is replaced, and goes: their ids, "" of one from before there were any. Neither:
  // it must hold nothing yet.
  std::set<std::string> replaces = {};
  // Runs from before there were ids wrote lines without: those up to this step are taken for the run's own,
  // where their steps only rise.
  int64_t nameless_until = 0;
};

class TrainLog {
 public:
  // Opens for appending, and changes nothing yet. kFailedPrecondition: it holds lines of another run, or
  // something else than a log, or another training writes it: the file is locked, of a new run from here on,
  // of others from Begin on, where the file system can do that. What is no regular file (a pipe, /dev/null)
  // is written to and never looked at. kInvalidArgument: a pipe that nothing reads.
  static absl::StatusOr<std::unique_ptr<TrainLog>> Open(const std::string& path, const LogOwner& owner);
  // The run that the last whole line is of; empty: no such file, no line, or one without an id.
  static absl::StatusOr<std::string> RunIdIn(const std::string& path);
  ~TrainLog();
  TrainLog(const TrainLog&) = delete;
  TrainLog& operator=(const TrainLog&) = delete;

  // Once before the first line, when the run is this process's: looks at the log again, to which another
  // process may have written until now, and cuts off a torn last line, or all that was of a run that is
  // replaced. Errors as Open's.
  absl::Status Begin();
  // A step's line, or an evaluation's (zero/engine/report.h).
  absl::Status Append(nlohmann::json entry);
  // A line that belongs to no step: {"step": S, "seconds": T, "stuck": TEXT}, where S is the last that has a
  // line. From any thread; a disk that does not take it is none of its business.
  void AppendAside(nlohmann::json entry) const;
  // Appends `step`, a line from a commit record, unless the log has its step already.
  absl::Status AddMissing(const nlohmann::json& step);
  // Cuts off the lines of steps after `step`. kFailedPrecondition where lines of steps up to it stand behind
  // them, which no run writes.
  absl::Status CutAfter(int64_t step);
  int64_t last_step() const { return last_step_; }              // 0: no line yet
  int64_t last_evaluation() const { return last_evaluation_; }  // the step of it; -1: none yet

 private:
  TrainLog(std::string path, int fd, LogOwner owner)
      : path_(std::move(path)), fd_(fd), owner_(std::move(owner)) {}
  absl::Status Lock(std::chrono::milliseconds patience);
  // What the owner may keep of it ends after `whole` bytes; -1: it is no file to look at.
  absl::StatusOr<off_t> Look();
  void Note(const nlohmann::json& entry);

  const std::string path_;
  const int fd_;
  const LogOwner owner_;
  bool locked_ = false;
  int64_t last_step_ = 0;
  int64_t last_evaluation_ = -1;
};

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_TRAIN_LOG_H_
