// A model's blocks and stages in LibTorch: what an engine trains, and what generation computes with on a
// device.
#ifndef PENSTOCK_MODELS_FAMILIES_STAGES_H_
#define PENSTOCK_MODELS_FAMILIES_STAGES_H_

#include <memory>

#include "models/families/family.h"
#include "models/families/gpt.h"
#include "models/families/llama.h"
#include "models/families/tensor_decoder.h"
#include "zero/compute/libtorch/model.h"

namespace penstock::models {

zero::Model MakeModel(const LanguageModel& model, Head head = Head::kLoss);
zero::Model MakeGpt(const GptConfig& config, Head head = Head::kLoss);
zero::Model MakeLlama(const LlamaConfig& config, Head head = Head::kLoss);

// Null: the model has adapters.
std::unique_ptr<const TensorDecoder> MakeTensorDecoder(const LanguageModel& model);
std::unique_ptr<const TensorDecoder> MakeGptDecoder(const GptConfig& config);
std::unique_ptr<const TensorDecoder> MakeLlamaDecoder(const LlamaConfig& config);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_STAGES_H_
