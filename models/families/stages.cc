#include "models/families/stages.h"

#include "models/families/described_module.h"

namespace penstock::models {

zero::Model MakeModel(const LanguageModel& model, Head head) {
  if (model.gpt() != nullptr) return MakeGpt(*model.gpt(), head);
  if (model.llama() != nullptr) return MakeLlama(*model.llama(), head);
  // With adapters: their base's stages, over blocks that have them.
  zero::Model made = MakeModel(*model.base(), head);
  made.identity = model.ToJson();
  const std::vector<BlockDescription> blocks = model.Blocks();
  for (size_t b = 0; b < blocks.size(); ++b) made.blocks[b] = SpecOf(blocks[b]);
  return made;
}

std::unique_ptr<const TensorDecoder> MakeTensorDecoder(const LanguageModel& model) {
  if (model.gpt() != nullptr) return MakeGptDecoder(*model.gpt());
  return model.llama() != nullptr ? MakeLlamaDecoder(*model.llama()) : nullptr;
}

}  // namespace penstock::models
