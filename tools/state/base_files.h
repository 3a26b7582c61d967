// The files of the weights that a run's adapters go to, where the run keeps nothing of them: what they were
// when it began, and whether they still are that. Needs no LibTorch.
#ifndef PENSTOCK_TOOLS_STATE_BASE_FILES_H_
#define PENSTOCK_TOOLS_STATE_BASE_FILES_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace penstock::tools {

// Where a run's record says what its base is.
inline constexpr const char* kBaseKey = "lora_base";

// How errors end that want another place. Python's front end has its own words for it.
inline constexpr const char* kBaseWayOut = "say where they are (--model DIR; train also takes --init-from)";

// How files are held against a record.
enum class BaseCheck {
  // Where the record says, one of the recorded size and time is taken to be the same. One of another time,
  // and all of them elsewhere, are read.
  kTimes,
  kBytes,  // every one is read, whatever its time and place
};

// For a new run's record: the path, and of each file its size, time and, if it `checks`, checksum, for which
// all are read.
absl::StatusOr<nlohmann::json> RecordBase(const std::string& path, const std::vector<std::string>& files,
                                          bool checks, bool quiet);

// Holds the files at `path` (a directory, or one file of it; empty: where the record says) against the
// record, and gives it back with their path and times of now. kFailedPrecondition names the file that is
// missing or another, and how to say where they are.
absl::StatusOr<nlohmann::json> CompareBase(const nlohmann::json& record, const std::string& path,
                                           BaseCheck check, bool quiet);

// The error for a file that is not the recorded one, for callers that find that out otherwise.
absl::Status AnotherBase(const std::string& file, const std::string& why);

// kFailedPrecondition: the files that weights were opened in are not those of the record, all of them.
absl::Status CheckSameFiles(const std::vector<std::string>& files, const nlohmann::json& record);

// The error for --model where a state has its weights itself.
absl::Status NoBase(const std::string& model);

// The bytes of all files, as recorded.
int64_t BaseBytes(const nlohmann::json& record);

// Where they lay, as recorded; empty: the record does not say.
std::string PathOfBase(const nlohmann::json& record);

// The directory that a base's path means, which may be one of its files.
std::string BaseDirectory(const std::string& path);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_STATE_BASE_FILES_H_
