#include "models/families/lora.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "zero/compute/seed.h"
#include "zero/config/config_json.h"
#include "zero/config/json_field.h"

namespace penstock::models {
namespace {

constexpr const char* kPeftPrefix = "base_model.model.";
constexpr const char* kDownEnding = ".lora_A.weight";
constexpr const char* kUpEnding = ".lora_B.weight";
constexpr absl::string_view kWeight = ".weight";
constexpr int64_t kMostRank = 1 << 16;

std::string Stem(const std::string& matrix) { return std::string(absl::StripSuffix(matrix, kWeight)); }

bool IsAdapterTensor(const PublishedTensor& tensor) {
  return absl::StartsWith(tensor.name, kPeftPrefix) &&
         (absl::EndsWith(tensor.name, kDownEnding) || absl::EndsWith(tensor.name, kUpEnding));
}

// A matrix that tokens are multiplied with, by its name in the block; a tile of one has no adapter.
bool IsLinear(const ParameterDescription& parameter) {
  return parameter.columns > 0 && !parameter.is_tile() && absl::EndsWith(parameter.name, kWeight);
}

// The names of a model's matrices, each once, in their order, and where they are published. Block 0 is the
// embedding, which is looked up.
struct Linears {
  std::vector<std::string> names;
  std::map<std::string, std::vector<std::string>> published;  // by name, of each layer
};
Linears LinearsOf(const std::vector<BlockDescription>& blocks) {
  Linears linears;
  for (size_t b = 1; b < blocks.size(); ++b) {
    for (const ParameterDescription& parameter : blocks[b].parameters) {
      if (!IsLinear(parameter)) continue;
      const std::string name = Stem(parameter.name);
      if (linears.published.count(name) == 0) linears.names.push_back(name);
      linears.published[name].push_back(Stem(parameter.published));
    }
  }
  return linears;
}

// The last part of a name is what people write.
std::string ShortName(const std::string& name) { return name.substr(name.rfind('.') + 1); }

// As PEFT matches them.
bool Matches(const std::string& target, const std::string& name) {
  return name == target || absl::EndsWith(name, "." + target);
}

constexpr const char* kHead = "lm_head";

// Targets that name a matrix of one layer, as PEFT writes "all-linear" out: those of all layers are one name.
absl::Status JoinLayers(const Linears& linears, const std::set<std::string>& whole,
                        std::set<std::string>* resolved) {
  for (const auto& [name, published] : linears.published) {
    const auto named = std::count_if(published.begin(), published.end(),
                                     [&](const std::string& each) { return whole.count(each) > 0; });
    if (named == 0) continue;
    if (named < std::ssize(published)) {
      return absl::InvalidArgumentError(
          absl::StrCat("targets: ", name, " of ", named, " of ", published.size(),
                       " layers: adapters of all of them, or of none, are served"));
    }
    resolved->insert(name);
  }
  return absl::OkStatus();
}

absl::Status ResolveTargets(const LanguageModel& base, const Linears& linears,
                            std::vector<std::string>* targets) {
  const std::vector<std::string>& names = linears.names;
  std::set<std::string> published;
  for (const auto& [name, of_layers] : linears.published)
    published.insert(of_layers.begin(), of_layers.end());
  if (targets->empty()) *targets = base.AdapterTargets();
  std::set<std::string> resolved, whole;
  for (const std::string& target : *targets) {
    if (target == kAllLinear) {
      for (const std::string& name : names) {
        if (name != kHead) resolved.insert(ShortName(name));
      }
    } else if (std::any_of(names.begin(), names.end(),
                           [&](const std::string& name) { return Matches(target, name); })) {
      resolved.insert(target);
    } else if (published.count(target) > 0) {
      whole.insert(target);
    } else {
      return absl::InvalidArgumentError(absl::StrCat("targets: no matrix of this model is called \"", target,
                                                     "\": it has ", absl::StrJoin(names, ", "),
                                                     " (or the ends of these, as ", ShortName(names.front()),
                                                     "), and ", kAllLinear, " means all but a ", kHead));
    }
  }
  RETURN_IF_ERROR(JoinLayers(linears, whole, &resolved));
  targets->assign(resolved.begin(), resolved.end());
  return absl::OkStatus();
}

absl::Status CheckNumbers(const LoraOptions& options) {
  const auto wrong = [](const auto&... words) { return absl::InvalidArgumentError(absl::StrCat(words...)); };
  if (options.rank < 1 || options.rank > kMostRank)
    return wrong("rank ", options.rank, ": must be between 1 and ", kMostRank);
  if (!(options.alpha > 0 && options.alpha <= 1e9))
    return wrong("alpha ", options.alpha, ": must be above 0 and at most 1e9");
  if (!(options.dropout >= 0 && options.dropout < 1))
    return wrong("dropout ", options.dropout, ": must be from 0 to below 1");
  return absl::OkStatus();
}

bool IsTarget(const LoraOptions& options, const ParameterDescription& parameter) {
  const std::string name = Stem(parameter.name);
  return IsLinear(parameter) && std::any_of(options.targets.begin(), options.targets.end(),
                                            [&](const std::string& t) { return Matches(t, name); });
}

void Adapt(const LoraOptions& options, bool embeds, BlockDescription* block) {
  std::vector<ParameterDescription> adapters;
  for (ParameterDescription& parameter : block->parameters) {
    parameter.frozen = true;
    if (embeds || !IsTarget(options, parameter)) continue;
    const std::string name = Stem(parameter.name);
    adapters.push_back({.name = AdapterDown(name),
                        .published = PublishedDown(parameter.published),
                        .rows = options.rank,
                        .columns = parameter.columns,
                        // kaiming_uniform_(a=sqrt(5)), as torch.nn.Linear begins.
                        .bound = 1 / std::sqrt(static_cast<double>(parameter.columns))});
    adapters.push_back({.name = AdapterUp(name),
                        .published = PublishedUp(parameter.published),
                        .rows = parameter.rows,
                        .columns = options.rank});
  }
  block->parameters.insert(block->parameters.end(), adapters.begin(), adapters.end());
  block->adapters = {.scaling = options.scaling(), .dropout = options.dropout};
}

// The one matrix that tells what rank is too much.
absl::Status CheckRank(const LoraOptions& options, const std::vector<BlockDescription>& blocks) {
  for (size_t b = 1; b < blocks.size(); ++b) {
    for (const ParameterDescription& parameter : blocks[b].parameters) {
      if (!IsTarget(options, parameter) || options.rank <= std::max(parameter.rows, parameter.columns))
        continue;
      return absl::InvalidArgumentError(absl::StrCat("rank ", options.rank, ": ", Stem(parameter.published),
                                                     " is ", parameter.rows, " x ", parameter.columns,
                                                     ", and a rank above both adds nothing"));
    }
  }
  return absl::OkStatus();
}

class AdaptedModel : public LanguageModel {
 public:
  AdaptedModel(std::shared_ptr<const LanguageModel> base, LoraOptions options)
      : base_(std::move(base)), options_(std::move(options)) {}

  int64_t vocabulary() const override { return base_->vocabulary(); }
  int64_t context() const override { return base_->context(); }
  int64_t usual_length() const override { return base_->usual_length(); }
  std::vector<std::string> AdapterTargets() const override { return base_->AdapterTargets(); }
  const LoraOptions* lora() const override { return &options_; }
  std::shared_ptr<const LanguageModel> base() const override { return base_; }
  nlohmann::ordered_json ToPublished() const override { return base_->ToPublished(); }

  std::vector<BlockDescription> Blocks() const override {
    std::vector<BlockDescription> blocks = base_->Blocks();
    for (size_t b = 0; b < blocks.size(); ++b) Adapt(options_, /*embeds=*/b == 0, &blocks[b]);
    return blocks;
  }
  ModelLayout Layout() const override {
    const ModelLayout of_base = base_->Layout();
    ModelLayout layout = LayoutOf(Blocks());
    layout.prefix = of_base.prefix;
    layout.passed_over = of_base.passed_over;
    layout.wrapped_prefixes = of_base.wrapped_prefixes;
    layout.other_parts = of_base.other_parts;
    return layout;
  }
  nlohmann::json ToJson() const override {
    nlohmann::json json = base_->ToJson();
    json[kLoraKey] = options_.ToJson();
    return json;
  }
  std::shared_ptr<const LanguageModel> WithVocabulary(int64_t vocabulary) const override {
    return std::make_shared<AdaptedModel>(base_->WithVocabulary(vocabulary), options_);
  }
  int64_t tile_rows() const override { return base_->tile_rows(); }
  std::shared_ptr<const LanguageModel> WithTileRows(int64_t rows) const override {
    return std::make_shared<AdaptedModel>(base_->WithTileRows(rows), options_);
  }

  // Matrices that are frozen get no gradient, and what goes into them does.
  std::vector<StageProducts> Products() const override {
    std::vector<StageProducts> products = base_->Products();
    const std::vector<BlockDescription> blocks = Blocks();
    for (StageProducts& stage : products) {
      stage.frozen_parameters = stage.parameters;
      for (const ParameterDescription& parameter : blocks[static_cast<size_t>(stage.block)].parameters) {
        if (!parameter.frozen) stage.parameters += parameter.elements();
      }
    }
    return products;
  }

  std::optional<Decoder> decoder() const override {
    std::optional<Decoder> decoder = base_->decoder();
    if (decoder.has_value()) decoder->blocks = Blocks();
    return decoder;
  }

 private:
  const std::shared_ptr<const LanguageModel> base_;
  const LoraOptions options_;
};

}  // namespace

nlohmann::json LoraOptions::ToJson() const {
  return {{"rank", rank}, {"alpha", alpha}, {"dropout", dropout}, {"targets", targets}};
}

absl::StatusOr<LoraOptions> LoraOptionsFromJson(const nlohmann::json& json) {
  const auto rank = zero::JsonField<int64_t>(json, "rank");
  const auto alpha = zero::JsonField<double>(json, "alpha"),
             dropout = zero::JsonField<double>(json, "dropout");
  const auto targets = zero::JsonField<std::vector<std::string>>(json, "targets");
  if (!rank.has_value() || !alpha.has_value() || !dropout.has_value() || !targets.has_value() ||
      targets->empty())
    return absl::InvalidArgumentError(absl::StrCat("model: its ", kLoraKey, " is ", zero::ShowValue(json)));
  return LoraOptions{*rank, *alpha, *dropout, *targets};
}

absl::StatusOr<std::shared_ptr<const LanguageModel>> WithLora(std::shared_ptr<const LanguageModel> base,
                                                              LoraOptions options) {
  if (base->lora() != nullptr) return absl::InvalidArgumentError("rank: the model has adapters already");
  const std::vector<BlockDescription> blocks = base->Blocks();
  RETURN_IF_ERROR(CheckNumbers(options));
  RETURN_IF_ERROR(ResolveTargets(*base, LinearsOf(blocks), &options.targets));
  RETURN_IF_ERROR(CheckRank(options, blocks));
  return std::make_shared<AdaptedModel>(std::move(base), std::move(options));
}

std::string PublishedDown(const std::string& matrix) {
  return absl::StrCat(kPeftPrefix, Stem(matrix), kDownEnding);
}
std::string PublishedUp(const std::string& matrix) {
  return absl::StrCat(kPeftPrefix, Stem(matrix), kUpEnding);
}

namespace {

ModelLayout Some(ModelLayout layout, bool adapters) {
  layout.tensors.erase(
      std::remove_if(layout.tensors.begin(), layout.tensors.end(),
                     [&](const PublishedTensor& t) { return IsAdapterTensor(t) != adapters; }),
      layout.tensors.end());
  return layout;
}

}  // namespace

ModelLayout AdaptersOf(const ModelLayout& adapted) {
  ModelLayout layout = Some(adapted, true);
  layout.prefix.clear();
  layout.passed_over.clear();
  return layout;
}
ModelLayout WithoutAdapters(const ModelLayout& adapted) { return Some(adapted, false); }

ModelLayout KeptApart(const LanguageModel& adapted, ModelLayout layout) {
  layout.state_from = layout.block_elements;  // of a block without adapters, nothing
  for (const PublishedTensor& tensor : AdaptersOf(adapted.Layout()).tensors) {
    int64_t& from = layout.state_from[static_cast<size_t>(tensor.block)];
    from = std::min(from, tensor.offset);
  }
  return layout;
}

InitialElements AdaptedValues(const LanguageModel& adapted, std::shared_ptr<WeightImport> base,
                              std::shared_ptr<WeightImport> adapter, uint64_t seed) {
  constexpr uint64_t kSalt = 0x6c6f7261;  // keeps these numbers apart from all others of the seed
  return [layout = AdaptersOf(adapted.Layout()), base = std::move(base), adapter = std::move(adapter), seed](
             int block, int64_t first, int64_t elements, float* to) -> absl::Status {
    RETURN_IF_ERROR(base->Read(block, first, elements, to));
    std::vector<float> own;
    if (adapter != nullptr) {
      own.resize(static_cast<size_t>(elements));
      RETURN_IF_ERROR(adapter->Read(block, first, elements, own.data()));
    }
    return ForTensorsIn(layout, block, first, elements, [&](size_t i, const TensorPiece& piece) {
      const PublishedTensor& tensor = layout.tensors[i];
      if (adapter != nullptr) {
        std::copy_n(own.data() + piece.at, piece.to - piece.from, to + piece.at);
      } else if (absl::EndsWith(tensor.name, kDownEnding)) {
        const double bound = 1 / std::sqrt(static_cast<double>(tensor.columns));
        for (int64_t e = piece.from; e < piece.to; ++e) {
          const uint64_t drawn = zero::MixSeed(seed ^ kSalt, i, static_cast<uint64_t>(e)) >> 40;  // 24 bits
          to[piece.at + e - piece.from] =
              static_cast<float>((2 * static_cast<double>(drawn) / (1 << 24) - 1) * bound);
        }
      }
      return absl::OkStatus();
    });
  };
}

}  // namespace penstock::models
