// `penstock zero_to_fp32`, or `export`, of a checkpoint that DeepSpeed wrote: its weights as one file.
#ifndef PENSTOCK_TOOLS_STATE_EXPORT_DEEPSPEED_H_
#define PENSTOCK_TOOLS_STATE_EXPORT_DEEPSPEED_H_

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "swap/safetensors.h"

namespace penstock::tools {

struct DeepSpeedExport {
  std::string checkpoint;  // what save_checkpoint was given, or the directory of a tag
  std::string out;         // a file, or a directory that gets model.safetensors
  swap::Dtype dtype = swap::Dtype::kF32;
  bool overwrite = false;
  bool quiet = false;
};

absl::Status ExportDeepSpeed(const DeepSpeedExport& wish, std::ostream& out, std::ostream& err);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_STATE_EXPORT_DEEPSPEED_H_
