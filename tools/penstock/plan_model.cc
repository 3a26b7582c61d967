#include "tools/penstock/plan_model.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "models/families/family.h"
#include "models/families/narrow_model.h"
#include "models/families/stages.h"
#include "models/families/vocabulary_tiles.h"
#include "tools/machine/product_rate.h"
#include "tools/pages/plan_text.h"
#include "tools/penstock/vocabulary_flags.h"
#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/create_engine.h"
#include "zero/compute/libtorch/libtorch_compute.h"
#include "zero/compute/libtorch/threads.h"
#include "zero/memory/host_memory.h"

namespace penstock::tools {
namespace {

using models::LanguageModel;

// Seconds that filling and copying an element of the weights and of its gradient takes, about.
constexpr double kSecondsPerElement = 8e-9;
// Passes of a stage that measuring it comes to: forward, and backward, which is three of them with what it
// computes again, and some more.
constexpr double kPasses = 6;

double SecondsToRun(const LanguageModel& model, int64_t sequences, int64_t length, double flops_per_second) {
  const models::ModelLayout layout = model.Layout();
  std::set<std::tuple<int64_t, int64_t, int64_t>> kinds;
  double seconds = 0;
  for (const models::StageProducts& stage : model.Products()) {
    const int64_t elements = layout.block_elements[static_cast<size_t>(stage.block)];
    if (!kinds.emplace(stage.parameters, stage.attention_width, elements).second) continue;
    seconds += kPasses * stage.ForwardFlops(sequences, length) / flops_per_second;
    seconds += kSecondsPerElement * static_cast<double>(elements);
  }
  return seconds;
}

// What the model takes, by what a narrower one takes. It plans, and computes nothing.
class NarrowCompute final : public zero::Compute {
 public:
  NarrowCompute(const TrainSettings& settings, const LanguageModel& narrow, int64_t by)
      : settings_(settings),
        by_(by),
        wide_(models::MakeModel(*settings.model)),
        wide_products_(settings.model->Products()),
        products_(narrow.Products()),
        narrow_(models::MakeModel(narrow)) {}

  absl::StatusOr<zero::Measured> Measure(const zero::ComputeSetup& setup, const zero::Batch& example,
                                         const zero::MeasureOptions& options) override {
    ASSIGN_OR_RETURN(zero::Measured measured, narrow_.Measure(setup, example, options));
    tiering::ModelGraph& graph = measured.graph;
    PENSTOCK_CHECK(graph.blocks.size() == wide_.blocks.size() && graph.stages.size() == products_.size() &&
                       products_.size() == wide_products_.size(),
                   "a narrower model has the same blocks and stages");
    measured.identity = wide_.identity;
    measured.parameters = settings_.model->Layout().parameters();
    measured.layouts.clear();
    TakeBlocks(&measured);
    const auto addend =
        static_cast<int64_t>(kernels::BytesPerElement(setup.device->compute_type(setup.weights)));
    const bool casts = setup.device->compute_type(setup.weights) != setup.weights;
    for (size_t s = 0; s < products_.size(); ++s) Widen(s, addend, casts, &graph);
    graph.fixed_tensor_bytes *= by_;
    return measured;
  }

  absl::StatusOr<std::unique_ptr<zero::InitialReader>> Initial(tiering::BlockIndex, uint64_t) override {
    return PlansOnly();
  }
  absl::Status Begin(const zero::PassInfo&, std::vector<zero::Batch>) override { return PlansOnly(); }
  absl::Status Forward(const zero::StageUse&, std::span<const zero::Weights>) override { return PlansOnly(); }
  absl::Status Backward(const zero::StageUse&, std::span<const zero::Weights>) override {
    return PlansOnly();
  }
  absl::StatusOr<std::span<const zero::Gradient>> Gradients(const zero::StageUse&,
                                                            tiering::BlockIndex) override {
    return PlansOnly();
  }
  void Release(const zero::StageUse&) override {}
  absl::StatusOr<std::span<const zero::TensorView>> SavedInputs(tiering::Position, int) override {
    return PlansOnly();
  }
  void DropInputs(tiering::Position, int) override {}
  absl::StatusOr<std::span<const zero::TensorView>> RestoreInputs(tiering::Position, int) override {
    return PlansOnly();
  }
  absl::StatusOr<std::vector<double>> Losses() override { return PlansOnly(); }
  absl::StatusOr<std::vector<std::vector<zero::HostTensor>>> Outputs() override { return PlansOnly(); }

 private:
  static absl::Status PlansOnly() {
    return absl::UnimplementedError("a model that is planned computes nothing");
  }

  // Shapes without memory, one module of each kind at a time.
  void TakeBlocks(zero::Measured* measured) const {
    std::map<std::string, std::shared_ptr<const zero::FlatLayout>> of_kind;
    for (size_t b = 0; b < wide_.blocks.size(); ++b) {
      const zero::BlockSpec& spec = wide_.blocks[b];
      std::shared_ptr<const zero::FlatLayout> layout = spec.kind.empty() ? nullptr : of_kind[spec.kind];
      if (layout == nullptr) layout = zero::BlockModule(spec.build()).shared_layout();
      if (!spec.kind.empty()) of_kind[spec.kind] = layout;
      tiering::BlockShape& block = measured->graph.blocks[tiering::BlockIndex(static_cast<int>(b))];
      block.elements = layout->elements;
      block.trains = layout->Trains();
      block.trained_from = layout->trained_from;
      measured->layouts.push_back(std::move(layout));
    }
  }

  // `addend`: bytes of an element of a gradient as backward leaves it. `casts`: weights take that much, too,
  // while they are computed with.
  void Widen(size_t s, int64_t addend, bool casts, tiering::ModelGraph* graph) const {
    tiering::StageShape& stage = graph->stages[tiering::StageIndex(static_cast<int>(s))];
    const tiering::BlockShape& block = graph->blocks[stage.block];
    const int64_t weights = casts ? block.elements * addend : 0;
    const int64_t gradients = block.trains ? (block.elements - block.trained_from) * addend : 0;
    const auto all_but_a_part = [this](int64_t bytes) { return bytes - bytes / by_; };
    stage.input_bytes *= by_;
    stage.input_scratch_bytes *= by_;
    stage.forward_peak_bytes = by_ * stage.forward_peak_bytes + all_but_a_part(weights);
    if (stage.backward_peak_bytes > 0) {
      stage.backward_peak_bytes =
          by_ * stage.backward_peak_bytes + all_but_a_part(weights) + all_but_a_part(gradients);
    }
    const auto share = [this](double wide, double narrow) {
      return narrow > 0 ? wide / narrow : static_cast<double>(by_);
    };
    const int64_t n = settings_.batch, length = settings_.seq;
    const models::StageProducts &wide = wide_products_[s], &narrow = products_[s];
    const double forward = wide.ForwardFlops(n, length), narrow_forward = narrow.ForwardFlops(n, length);
    stage.forward_seconds *= share(forward, narrow_forward);
    // What is computed again is a part of backward.
    stage.backward_seconds *=
        share(forward + wide.BackwardFlops(n, length), narrow_forward + narrow.BackwardFlops(n, length));
  }

  const TrainSettings& settings_;
  const int64_t by_;
  const zero::Model wide_;
  const std::vector<models::StageProducts> wide_products_, products_;
  zero::LibTorchCompute narrow_;
};

// The least narrow that can be run in that time, or the narrowest there is; null: the model itself.
std::pair<std::shared_ptr<const LanguageModel>, int64_t> ToRun(const TrainSettings& settings,
                                                               const zero::EngineOptions& options,
                                                               double most_seconds) {
  if (options.device->has_own_memory()) return {nullptr, 1};
  const auto seconds = [&](const LanguageModel& model, double rate) {
    return SecondsToRun(model, settings.batch, settings.seq, rate);
  };
  // Nothing is measured for a model that is small on any processor.
  constexpr double kLeastFlopsPerSecond = 1e10;
  if (seconds(*settings.model, kLeastFlopsPerSecond) <= most_seconds) return {nullptr, 1};
  const double rate = MeasureProductRate(options.dtype).flops_per_second;
  if (seconds(*settings.model, rate) <= most_seconds) return {nullptr, 1};
  std::shared_ptr<const LanguageModel> narrowest;
  int64_t narrowest_by = 1;
  for (const int64_t by : models::Narrowings(*settings.model)) {
    const auto narrow = models::Narrower(*settings.model, by);
    if (narrow == nullptr || narrow->Products().size() != settings.model->Products().size()) continue;
    narrowest = narrow;
    narrowest_by = by;
    if (seconds(*narrow, rate) <= most_seconds) break;
  }
  return {narrowest, narrowest_by};
}

}  // namespace

std::string ModelPlan::EstimateText() const {
  if (narrower == 1) return "";
  return absl::StrCat(
      "compute: estimated, since a layer of this model would take long to run here: by the same model ",
      narrower, " times narrower, times by arithmetic, memory of computing as a bound\n");
}

absl::StatusOr<ModelPlan> PlanModel(const TrainSettings& settings, const zero::EngineOptions& options,
                                    double most_seconds) {
  ModelPlan planned;
  const auto [narrow, by] = ToRun(settings, options, most_seconds);
  if (narrow == nullptr) {
    ASSIGN_OR_RETURN(planned.plan, zero::PlanEngine(models::MakeModel(*settings.model), options));
    return planned;
  }
  planned.narrower = by;
  NarrowCompute compute(settings, *narrow, by);
  ASSIGN_OR_RETURN(planned.plan, zero::Engine::MakePlan(compute, options));
  return planned;
}

absl::Status NameTilesThatFit(absl::Status refused, const TrainSettings& settings,
                              const zero::EngineOptions& options) {
  if (!absl::IsFailedPrecondition(refused) || settings.resumes || options.world() > 1 ||
      options.device->has_own_memory() || options.memory.host_memory_budget_bytes == 0)
    return refused;
  TrainSettings other = settings;
  zero::EngineOptions plain = options;
  plain.hooks = {};
  plain.measures_time = false;
  const auto fits = [&](std::shared_ptr<const LanguageModel> model) {
    other.model = std::move(model);
    return PlanModel(other, plain).ok();
  };
  if (fits(settings.model)) return refused;  // for another reason
  const int64_t vocabulary = settings.model->vocabulary(), now = models::VocabularyTiles(*settings.model);
  for (const int64_t times : {2, 4, 8, 16, 32}) {
    const int64_t tiles = times * now;
    if (tiles > kMostVocabularyTiles || tiles > vocabulary) break;
    auto model = models::WithVocabularyTiles(settings.model, models::RowsOfTiles(vocabulary, tiles));
    if (!model.ok() || !fits(*std::move(model))) continue;
    return absl::FailedPreconditionError(absl::StrCat(std::string(refused.message()), "; --vocabulary-tiles ",
                                                      tiles, " fits (now ", now, ")"));
  }
  return refused;
}

absl::StatusOr<zero::EnginePlan> PlanMemory(TrainSettings settings,
                                            const std::function<void(const std::string&)>& preparing) {
  zero::EngineOptions& options = settings.engine;
  zero::SetIntraOpThreads(options.intra_op_threads);
  options.hooks.preparing = preparing;
  options.measures_time = false;
  absl::StatusOr<zero::EnginePlan> plan = zero::PlanEngine(models::MakeModel(*settings.model), options);
  if (!plan.ok()) return NameTilesThatFit(plan.status(), settings, options);
  RETURN_IF_ERROR(ProcessMemoryText(*plan, options, zero::FindHostMemory()).status());
  return plan;
}

}  // namespace penstock::tools
