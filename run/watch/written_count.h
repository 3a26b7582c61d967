// How many bytes a run has written to its drives, in a file of its own beside its state: for what is killed
// before a commit record says so.
#ifndef PENSTOCK_RUN_WATCH_WRITTEN_COUNT_H_
#define PENSTOCK_RUN_WATCH_WRITTEN_COUNT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::run {

class WrittenCount {
 public:
  // The file's name in the directory of the state, or of the checkpoints of a run without a drive.
  static constexpr const char* kName = ".penstock.written";

  // Of the run that goes on in `directory`. `recorded`: its record; null: it has none yet, and starts over. A
  // file of another run than the recorded one counts nothing. kDataLoss: the file cannot be read, or says no
  // number.
  static absl::StatusOr<WrittenCount> Read(const std::string& directory, const nlohmann::json& recorded);
  // Of a new run: 0.
  explicit WrittenCount(const std::string& directory);

  // By processes before this one: the larger number of file and record.
  int64_t before() const { return before_; }

  // Replaces the file, and makes the directory where it is missing; durable. Does nothing where the file says
  // so already.
  absl::Status Save(const std::string& run_id, int64_t bytes);
  // Of a new run that was refused: gives the file the content that the first Save found, of the run that was
  // to be replaced, or removes it, and the directories that Save made where nothing else is in them.
  absl::Status Revert() const;

 private:
  std::string directory_, path_;
  int64_t before_ = 0;
  int64_t saved_ = -1;                   // -1: not yet
  std::optional<std::string> replaced_;  // what the first Save found
  std::vector<std::string> made_;        // directories, in order
};

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_WRITTEN_COUNT_H_
