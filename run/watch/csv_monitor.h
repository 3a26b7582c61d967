// DeepSpeed's csv_monitor: a file for every tag, named after it ("Train_Samples_lr.csv"), with the columns
// "step" (samples) and the last part of the tag, and lines that end as Python's csv writer ends them.
//
// Beside them lies penstock_run_id, which says whose they are: a directory's scalars belong to one run, and
// the process that trains it has them locked. Files of other names are left alone. What DeepSpeed left there
// is gone on with by a run that goes on (an imported one), if none of it lies ahead of the run.
#ifndef PENSTOCK_RUN_WATCH_CSV_MONITOR_H_
#define PENSTOCK_RUN_WATCH_CSV_MONITOR_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/file_lock.h"
#include "run/watch/append_file.h"
#include "run/watch/scalar_sink.h"

namespace penstock::run {

class CsvMonitor : public ScalarSink {
 public:
  // Makes `directory` and changes nothing in it yet. kFailedPrecondition: it holds another run's samples.
  static absl::StatusOr<std::unique_ptr<CsvMonitor>> Open(const std::string& directory,
                                                          const MonitorOwner& owner);

  absl::Status Begin(int64_t samples) override;
  absl::Status Append(int64_t samples, const std::vector<Scalar>& scalars) override;

 private:
  struct File {
    std::unique_ptr<AppendFile> file;
    int64_t last = -1;  // samples of its last line
  };

  absl::Status Lock();
  // Begin, of a directory that is locked.
  absl::Status TakeOver(int64_t samples);
  CsvMonitor(std::string directory, MonitorOwner owner)
      : directory_(std::move(directory)), owner_(std::move(owner)) {}
  // Whether the directory's samples are the run's own; kFailedPrecondition as Open's.
  absl::StatusOr<bool> Owns() const;
  absl::StatusOr<File*> FileOf(const std::string& tag);
  // Reads the existing samples, and cuts them. `keeps`: what lies ahead is somebody else's.
  absl::Status Take(const std::string& path, int64_t samples, bool keeps, File* file) const;

  const std::string directory_;
  const MonitorOwner owner_;
  std::optional<DirectoryLock> lock_;  // of the directory, from Begin on
  std::map<std::string, File> files_;  // by path
};

// As Python writes a float: the shortest digits that give it back, "nan" and "inf".
std::string PythonFloat(double value);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_CSV_MONITOR_H_
