#include "tools/penstock/export_deepspeed.h"

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "models/deepspeed_checkpoint.h"
#include "models/deepspeed_weights.h"
#include "tools/base/whole_file.h"
#include "tools/penstock/state_reader.h"

namespace penstock::tools {
namespace {

std::vector<std::string> FilesOf(const std::string& directory) {
  std::vector<std::string> files;
  std::error_code error;  // what cannot be listed was not read either
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory, error))
    if (entry.path().extension() == ".pt") files.push_back(entry.path().string());
  return files;
}

}  // namespace

absl::Status ExportDeepSpeed(const DeepSpeedExport& wish, std::ostream& out, std::ostream& err) {
  ASSIGN_OR_RETURN(const std::unique_ptr<models::DeepSpeedCheckpoint> checkpoint,
                   models::DeepSpeedCheckpoint::OpenWeights(wish.checkpoint));
  const models::DeepSpeedProgress& progress = checkpoint->progress();
  if (!progress.unread.empty() && !wish.quiet)
    err << "left out: " << absl::StrJoin(progress.unread, ", ") << "\n" << std::flush;
  std::error_code error;
  models::DeepSpeedWeightsOptions options;
  options.path = std::filesystem::is_directory(wish.out, error) ? wish.out + "/model.safetensors" : wish.out;
  RETURN_IF_ERROR(CheckIsNoInput("the output", options.path, FilesOf(checkpoint->directory())));
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
