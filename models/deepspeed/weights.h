// The weights of a checkpoint of DeepSpeed's, whole and in one file: what its zero_to_fp32 makes, in bounded
// memory.
//
//   ASSIGN_OR_RETURN(auto checkpoint, DeepSpeedCheckpoint::OpenWeights("ckpt"));
//   ASSIGN_OR_RETURN(const int64_t values, WriteDeepSpeedWeights(*checkpoint, {.path =
//   "model.safetensors"}));
//
// Names and shapes are the checkpoint's. Masters are exact in fp32; frozen parameters and buffers of floating
// point are widened, other buffers stay of their type. A tied parameter is written under each of its names.
//
// Memory: 9 MiB, and of buffers of another type the largest. Threads: one. Errors: kAlreadyExists; kDataLoss:
// a file that ends early; kResourceExhausted: disk full.
#ifndef PENSTOCK_MODELS_DEEPSPEED_WEIGHTS_H_
#define PENSTOCK_MODELS_DEEPSPEED_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/deepspeed/checkpoint.h"
#include "swap/safetensors.h"

namespace penstock::models {

struct DeepSpeedWeightsOptions {
  std::string path;
  swap::Dtype dtype = swap::Dtype::kF32;  // or kBf16: rounded to nearest even
  bool overwrite = false;
  std::function<void(uint64_t done, uint64_t total)> progress = nullptr;  // bytes
};

// Returns the number of values. The file appears whole or not at all.
absl::StatusOr<int64_t> WriteDeepSpeedWeights(const DeepSpeedCheckpoint& checkpoint,
                                              const DeepSpeedWeightsOptions& options);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_DEEPSPEED_WEIGHTS_H_
