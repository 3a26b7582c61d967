// Where a flag says that something is to be written.
#ifndef PENSTOCK_BASE_OUTPUT_PATH_H_
#define PENSTOCK_BASE_OUTPUT_PATH_H_

#include <optional>
#include <string>

#include "absl/status/status.h"

namespace penstock {

// That a file can be written at `path` at the end, without touching it now. `replaced`: as WriteWholeFile
// does it, which needs the directory as well. kInvalidArgument names the flag, the path and what is in the
// way.
absl::Status CheckWritable(const char* flag, const std::optional<std::string>& path, bool replaced = false);

// That there is a directory at `path`, or that it could be made, without making it. `writes`: and that files
// could be made in it. kInvalidArgument names `what`, the path and what is in the way.
absl::Status CheckDirectoryPlace(const std::string& what, const std::string& path, bool writes);

// That nothing a run or a model consists of would be replaced: by its name, links followed, a store of a
// state or checkpoint (penstock.store) and what lies beside it (latest, parameters.json, ...), weights
// (*.safetensors, their index) and theirs (config.json, tokenizer.json, ...). kInvalidArgument names `what`
// and the path. Part of CheckWritable and of WriteWholeFile.
absl::Status CheckIsNoModelFile(const std::string& what, const std::string& path);

// The directory that `path` is in, a slash at its end or not: "kept" of "kept/step-00000001", "." of a bare
// name.
std::string ParentOf(const std::string& path);

}  // namespace penstock

#endif  // PENSTOCK_BASE_OUTPUT_PATH_H_
