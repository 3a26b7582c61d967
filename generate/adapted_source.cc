// Weights of a run that trains adapters beside weights which it reads where they lie: those from their files,
// the adapters from its state.
#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "generate/weight_source.h"
#include "models/families/lora.h"

namespace penstock::generate {
namespace {

class AdaptedSource : public WeightSource {
 public:
  AdaptedSource(aio::Engine* engine, const models::LanguageModel& model)
      : WeightSource(engine),
        layout_(model.Layout()),
        frozen_layout_(models::WithoutAdapters(layout_)),
        adapters_layout_(models::KeptApart(model, models::AdaptersOf(layout_))) {}

  absl::Status Open(const zero::ShardDirectories& parts, uint64_t sequence, kernels::DType type,
                    const std::string& path, const WeightUses& uses, const std::string& label) {
    std::vector<int> of_layout;  // by tensor of the frozen weights
    for (size_t i = 0; i < layout_.tensors.size(); ++i) {
      const auto next = of_layout.size();
      const bool frozen = next < frozen_layout_.tensors.size() &&
                          frozen_layout_.tensors[next].name == layout_.tensors[i].name;
      places_.push_back({frozen, static_cast<int>(frozen ? next : i - next)});
      if (frozen) of_layout.push_back(static_cast<int>(i));
    }
    std::vector<int> in_order;
    for (const int tensor : uses.in_order) in_order.push_back(places_[static_cast<size_t>(tensor)].tensor);
    ASSIGN_OR_RETURN(frozen_, OpenSafetensors(&engine_, path, frozen_layout_, {in_order, {}}, label));
    ASSIGN_OR_RETURN(adapters_, OpenState(&engine_, parts, sequence, type, adapters_layout_, {}));
    units_ = frozen_->units();
    for (WeightUnit& unit : units_) {
      for (WeightPart& part : unit.parts) part.tensor = of_layout[static_cast<size_t>(part.tensor)];
    }
    for (const Place& place : places_) {
      const WeightSource& of = *(place.frozen ? frozen_ : adapters_);
      tensors_.push_back(
          {of.type(place.tensor), of.turned(place.tensor), of.code(place.tensor), of.scaled(place.tensor)});
    }
    return absl::OkStatus();
  }

  absl::Status Start(size_t unit, std::byte* memory, UnitRead* read) override {
    return frozen_->Start(unit, memory, read);
  }

  uint64_t scratch_bytes() const override {
    return std::max(frozen_->scratch_bytes(), adapters_->scratch_bytes());
  }

  absl::Status ReadRows(int tensor, std::span<const int64_t> rows, std::span<std::byte> memory,
                        std::byte* to) override {
    const Place& place = places_[static_cast<size_t>(tensor)];
    WeightSource& of = *(place.frozen ? frozen_ : adapters_);
    absl::Status status = of.ReadRows(place.tensor, rows, memory, to);
    rows_bytes_ = frozen_->rows_bytes() + adapters_->rows_bytes();
    return status;
  }

 private:
  struct Place {
    bool frozen = false;
    int tensor = 0;  // its number there
  };
  const models::ModelLayout layout_, frozen_layout_, adapters_layout_;
  std::unique_ptr<WeightSource> frozen_, adapters_;
  std::vector<Place> places_;  // by tensor of the layout
};

}  // namespace

absl::StatusOr<std::unique_ptr<WeightSource>> OpenAdapted(aio::Engine* engine,
                                                          const zero::ShardDirectories& parts,
                                                          uint64_t sequence, kernels::DType type,
                                                          const std::string& path,
                                                          const models::LanguageModel& model,
                                                          const WeightUses& uses, const std::string& label) {
  auto source = std::make_unique<AdaptedSource>(engine, model);
  RETURN_IF_ERROR(source->Open(parts, sequence, type, path, uses, label));
  return source;
}

}  // namespace penstock::generate
