// What --device names for `generate` and `plan --generate`, in the program that has LibTorch.
#ifndef PENSTOCK_TOOLS_PENSTOCK_GENERATE_DEVICE_H_
#define PENSTOCK_TOOLS_PENSTOCK_GENERATE_DEVICE_H_

#include "absl/status/status.h"
#include "generate/generator.h"
#include "tools/generate/generate_flags.h"

namespace penstock::tools {

// An OpenGenerateDevice.
absl::Status OpenDeviceForGeneration(const GenerateMemoryFlags& flags, generate::GeneratorOptions* options);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PENSTOCK_GENERATE_DEVICE_H_
