// TensorBoard's event files: records of TFRecord framing (length, its checksum, bytes, their checksum;
// CRC-32C, masked), each one protobuf message Event with one scalar.
//
// A run has one file, "events.out.tfevents.<seconds>.<host>.<run id>", which a resumed process appends to.
// Where a record of it is damaged the file stays as it is, and the run begins another; only a record that a
// kill cut short is cut off. Other files of the directory are left alone. The few bytes of protobuf are
// written by hand: two messages of three fields, against a library and a compiler of its own at build time.
#ifndef PENSTOCK_RUN_WATCH_EVENT_FILE_H_
#define PENSTOCK_RUN_WATCH_EVENT_FILE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "run/watch/append_file.h"
#include "run/watch/scalar_sink.h"

namespace penstock::run {

class EventFile : public ScalarSink {
 public:
  // Makes `directory` and changes nothing in it yet. kDataLoss: the run's id is no part of a file's name.
  static absl::StatusOr<std::unique_ptr<EventFile>> Open(const std::string& directory,
                                                         const MonitorOwner& owner);

  absl::Status Begin(int64_t samples) override;
  absl::Status Append(int64_t samples, const std::vector<Scalar>& scalars) override;

 private:
  EventFile(std::string directory, MonitorOwner owner)
      : directory_(std::move(directory)), owner_(std::move(owner)) {}
  // What `file` has of the run: cut at the first record that is torn or lies behind `samples`. Returns
  // whether it can be appended to: not where a record is damaged.
  absl::StatusOr<bool> Take(int64_t samples, const AppendFile& file);

  const std::string directory_;
  const MonitorOwner owner_;
  std::unique_ptr<AppendFile> file_;
  std::map<std::string, int64_t> last_;  // samples, by tag
};

// The record of one message.
std::string EventRecord(std::string_view message);
// The message Event of a file's beginning, and of a scalar.
std::string FileVersionEvent(double wall_time);
std::string ScalarEvent(double wall_time, int64_t step, const Scalar& scalar);

// Of a record at the beginning of `bytes`: its message, and the bytes that it takes. kOutOfRange: it is
// longer than `bytes`, as far as they go. kDataLoss: it is damaged.
struct ReadRecord {
  std::string_view message;
  size_t bytes = 0;
};
absl::StatusOr<ReadRecord> ReadEventRecord(std::string_view bytes);
// Step and tag of a message; tag "" where it has no scalar. kDataLoss: it is none.
absl::StatusOr<std::pair<int64_t, std::string>> ReadEvent(std::string_view message);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_EVENT_FILE_H_
