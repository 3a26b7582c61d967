#include "tools/state/export_deepspeed.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/directory.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "models/deepspeed/checkpoint.h"
#include "models/deepspeed/weights.h"
#include "tools/state/state_reader.h"

namespace penstock::tools {
namespace {

absl::Status AddFilesOf(const std::string& directory, std::vector<std::string>* files) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(directory));
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(directory, "/", name);
    ASSIGN_OR_RETURN(const PathKind kind, LinkKindOf(path));
    if (kind == PathKind::kDirectory) {
      RETURN_IF_ERROR(AddFilesOf(path, files));
    } else if (name.ends_with(".pt")) {
      files->push_back(path);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ExportDeepSpeed(const DeepSpeedExport& wish, std::ostream& out, std::ostream& err) {
  ASSIGN_OR_RETURN(const std::unique_ptr<models::DeepSpeedCheckpoint> checkpoint,
                   models::DeepSpeedCheckpoint::OpenWeights(wish.checkpoint));
  const models::DeepSpeedProgress& progress = checkpoint->progress();
  if (!progress.unread.empty() && !wish.quiet)
    err << "left out: " << absl::StrJoin(progress.unread, ", ") << "\n" << std::flush;
  models::DeepSpeedWeightsOptions options;
  ASSIGN_OR_RETURN(const bool into_directory, IsDirectory(wish.out));
  options.path = into_directory ? wish.out + "/model.safetensors" : wish.out;
  RETURN_IF_ERROR(CheckNoRunAt(wish.out, into_directory));
  std::vector<std::string> inputs;
  RETURN_IF_ERROR(AddFilesOf(checkpoint->directory(), &inputs));
  RETURN_IF_ERROR(CheckIsNoInput("the output", options.path, inputs));
  options.dtype = wish.dtype;
  options.overwrite = wish.overwrite;
  int64_t values = 0;
  {
    ByteProgress shown("exporting", wish.quiet);
    options.progress = [&](uint64_t done, uint64_t total) { shown.Update(done, total); };
    ASSIGN_OR_RETURN(values, models::WriteDeepSpeedWeights(*checkpoint, options));
  }
  if (wish.quiet) return absl::OkStatus();
  out << absl::StrFormat("%s: step %d of %s (%s), %u tensors, %d values as %s\n", options.path, progress.step,
                         checkpoint->directory(), progress.format, checkpoint->weights().size(), values,
                         wish.dtype == swap::Dtype::kF32 ? "fp32" : "bf16")
      << std::flush;
  return absl::OkStatus();
}

}  // namespace penstock::tools
