#include "models/gpt_layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tiering/plan/model_graph.h"
#include "zero/compute/flat_layout.h"

namespace penstock::models {
namespace {

// Places the tensors of one block one after the other, as zero::FlatLayout does.
class BlockLayout {
 public:
  BlockLayout(GptLayout* layout, std::string prefix)
      : layout_(*layout),
        prefix_(std::move(prefix)),
        block_(static_cast<int>(layout->block_elements.size())) {}

  void Add(const std::string& name, int64_t rows, int64_t columns = 0, bool transposed = false) {
    GptTensor& tensor = layout_.tensors.emplace_back();
    tensor = {absl::StrCat(prefix_, name), block_, offset_, rows, columns, transposed};
    offset_ = tiering::AlignUp(offset_ + tensor.elements(), zero::kParameterAlignment);
  }
  void AddNorm(const std::string& name, int64_t width) {
    Add(name + ".weight", width);
    Add(name + ".bias", width);
  }
  void AddLinear(const std::string& name, int64_t in, int64_t out) {
    Add(name + ".weight", out, in, /*transposed=*/true);
    Add(name + ".bias", out);
  }
  void End() { layout_.block_elements.push_back(tiering::AlignUp(offset_, tiering::kElementAlignment)); }

 private:
  GptLayout& layout_;
  const std::string prefix_;
  const int block_;
  int64_t offset_ = 0;
};

}  // namespace

std::vector<uint64_t> GptTensor::published_shape() const {
  const auto r = static_cast<uint64_t>(rows), c = static_cast<uint64_t>(columns);
  if (columns == 0) return {r};
  return transposed ? std::vector<uint64_t>{c, r} : std::vector<uint64_t>{r, c};
}

GptLayout LayoutOfGpt(const GptConfig& config) {
  const int64_t d = config.width;
  GptLayout layout;
  BlockLayout embedding(&layout, "transformer.");
  embedding.Add("wte.weight", config.vocab, d);
  embedding.Add("wpe.weight", config.context, d);
  embedding.AddNorm("ln_f", d);
  embedding.End();
  for (int64_t i = 0; i < config.layers; ++i) {
    BlockLayout layer(&layout, absl::StrCat("transformer.h.", i, "."));
    layer.AddNorm("ln_1", d);
    layer.AddLinear("attn.c_attn", d, 3 * d);
    layer.AddLinear("attn.c_proj", d, d);
    layer.AddNorm("ln_2", d);
    layer.AddLinear("mlp.c_fc", d, config.Inner());
    layer.AddLinear("mlp.c_proj", config.Inner(), d);
    layer.End();
  }
  return layout;
}

}  // namespace penstock::models
