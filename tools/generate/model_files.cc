#include "tools/generate/model_files.h"

#include "absl/strings/str_cat.h"
#include "base/atomic_file.h"
#include "base/status_macros.h"

namespace penstock::tools {

absl::Status CopyTokenizer(const std::string& from, const std::string& to) {
  for (const char* name : kTokenizerFiles) {
    const absl::Status status =
        CopyFile(absl::StrCat(from, "/", name), absl::StrCat(to, "/", name), {.replace = false});
    if (!status.ok() && !absl::IsNotFound(status) && !absl::IsAlreadyExists(status)) return status;
  }
  return absl::OkStatus();
}

}  // namespace penstock::tools
