// What form the data of a file has, by what is in it, and its records one after the other: lines of JSON, or
// the elements of one array of JSON.
#ifndef PENSTOCK_MODELS_DATA_DATA_RECORDS_H_
#define PENSTOCK_MODELS_DATA_DATA_RECORDS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::models {

enum class DataForm { kText, kLines, kArray };

// A file is an array of records if it begins with '[' and the first element is an object of JSON, or the
// array has no element. It has records in lines if its first line that is not empty is an object of JSON with
// a key that records have (text/example.h), or if its name ends in .jsonl, .ndjson or .json. Anything else is
// text, also what merely begins with a bracket. `keys_unknown`, if given: the first line is an object that
// has none of those keys, so that the file is text.
//
// kInvalidArgument: a format that is known and not read (base/foreign_file.h), with how it is converted; a
// directory; an object of JSON over several lines. Other errors: the file cannot be read.
absl::StatusOr<DataForm> DataFormOf(const std::string& path, bool* keys_unknown = nullptr);

// The same for a file that is said to hold tokens as numbers: kInvalidArgument if it is something else.
absl::Status CheckTokenData(const std::string& path);

// Cuts what comes in pieces into records. Memory: one record.
class RecordSplitter {
 public:
  using Take = absl::FunctionRef<absl::Status(std::string_view record)>;

  explicit RecordSplitter(DataForm form, size_t longest = size_t{1} << 30)
      : array_(form == DataForm::kArray), longest_(longest) {}

  // Hands each record that is whole to `take`, whose first error ends it. kInvalidArgument: the array is no
  // JSON, or a record is longer than the longest.
  absl::Status Push(std::string_view piece, Take take);
  absl::Status Finish(Take take);
  // Where the record is that `take` has, or where an error is: "line 7", "element 3".
  std::string place() const;
  int64_t number() const { return number_; }  // of the record; from 1

 private:
  enum class At { kBegin, kFirst, kElement, kNext, kEnd };
  absl::Status PushLines(std::string_view piece, Take take);
  absl::Status PushArray(std::string_view piece, Take take);
  absl::Status TakeLine(std::string_view line, Take take);
  absl::Status Wrong(std::string_view what) const;

  absl::Status CheckLength(size_t bytes) const;

  const bool array_;
  const size_t longest_;  // bytes of a record
  int64_t number_ = 0;
  std::string rest_;  // of a record that goes on in the next piece
  At at_ = At::kBegin;
  int depth_ = 0;
  bool in_string_ = false, escaped_ = false;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DATA_DATA_RECORDS_H_
