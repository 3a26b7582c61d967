// The log of a training: one JSON line for every committed step, complete across kills.
//
// A line is appended after its step's commit. A kill between the two leaves the line missing, a kill within
// the write leaves it torn: Open cuts off a torn line, and AddMissing writes the one that the commit record
// still knows. Where a run goes back to a checkpoint, CutAfter takes away the lines of the steps that will
// come again.
#ifndef PENSTOCK_TOOLS_PENSTOCK_TRAIN_LOG_H_
#define PENSTOCK_TOOLS_PENSTOCK_TRAIN_LOG_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::tools {

class TrainLog {
 public:
  // Opens for appending; `resumes` cuts a torn last line off.
  static absl::StatusOr<std::unique_ptr<TrainLog>> Open(const std::string& path, bool resumes);
  ~TrainLog();
  TrainLog(const TrainLog&) = delete;
  TrainLog& operator=(const TrainLog&) = delete;

  absl::Status Append(const nlohmann::json& step);
  // Appends `step`, a line from a commit record, unless the log has its step already.
  absl::Status AddMissing(const nlohmann::json& step);
  // Cuts off the lines of steps after `step`.
  absl::Status CutAfter(int64_t step);
  int64_t last_step() const { return last_step_; }  // 0: no line yet

 private:
  TrainLog(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  absl::Status CutTornLine();

  const std::string path_;
  const int fd_;
  int64_t last_step_ = 0;
};

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_TRAIN_LOG_H_
