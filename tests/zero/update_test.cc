// An update from one place to another has the bits of one in place, and leaves what it was made from.
#include "zero/compute/update.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "zero/compute/tile_format.h"

namespace penstock::zero::update_test {
namespace {

// A tile's segments and its gradient, each on pages of its own.
class OfTile {
 public:
  OfTile(const TileFormat& format, int64_t elements) : precision_(format.precision()) {
    memory_.elements = elements;
    int64_t bytes = tiering::kPage;
    for (size_t s = 0; s < precision_.segment_bytes.size(); ++s) bytes += Padded(s, elements);
    bytes += tiering::AlignUp(elements * precision_.gradient_bytes, tiering::kPage);
    bytes_.resize(static_cast<size_t>(bytes));
    Point();
  }
  OfTile(const OfTile& other) : precision_(other.precision_), bytes_(other.bytes_) {
    memory_.elements = other.memory_.elements;
    std::memcpy(Aligned(bytes_), Aligned(other.bytes_), bytes_.size() - tiering::kPage);
    Point();
  }
  OfTile& operator=(const OfTile&) = delete;

  const TileMemory& memory() const { return memory_; }
  // Weights and state, without what pads them.
  std::vector<std::byte> state() const {
    std::vector<std::byte> state;
    for (size_t s = 0; s < precision_.segment_bytes.size(); ++s) {
      const auto* const from = static_cast<const std::byte*>(s == 0 ? memory_.weights : memory_.state[s - 1]);
      state.insert(state.end(), from, from + precision_.SegmentBytes(s, memory_.elements));
    }
    return state;
  }

 private:
  static std::byte* Aligned(const std::vector<std::byte>& bytes) {
    const auto at = reinterpret_cast<uintptr_t>(bytes.data());
    const auto page = static_cast<uintptr_t>(tiering::kPage);
    return reinterpret_cast<std::byte*>((at + page - 1) / page * page);
  }
  int64_t Padded(size_t segment, int64_t elements) const {
    return tiering::AlignUp(precision_.SegmentBytes(segment, elements), tiering::kPage);
  }
  void Point() {
    std::byte* place = Aligned(bytes_);
    for (size_t s = 0; s < precision_.segment_bytes.size(); ++s) {
      (s == 0 ? memory_.weights : memory_.state.emplace_back()) = place;
      place += Padded(s, memory_.elements);
    }
    memory_.gradient = place;
  }

  const tiering::Precision precision_;
  std::vector<std::byte> bytes_;
  TileMemory memory_;
};

TEST(UpdateTileInto, HasTheBitsOfAnUpdateInPlaceAndLeavesTheVersionBefore) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const kernels::DType weights : {kernels::DType::kBf16, kernels::DType::kFp32, kernels::DType::kFp16}) {
    for (const kernels::StateType states :
         {kernels::StateType::kFp32, kernels::StateType::kBf16, kernels::StateType::k8Bit}) {
      for (const OptimizerOptions& optimizer :
           {OptimizerOptions(kernels::AdamOptions{}), OptimizerOptions(kernels::SgdOptions{})}) {
        for (const int64_t elements : {2048, 3 * 2048, 6 * 2048}) {
          TileFormat format;
          format.weights = weights;
          format.states = states;
          format.moments = MomentsOf(optimizer);
          FlatLayout layout;
          layout.elements = 10 * elements;
          // Two parameters that train with a frozen one between them, cut in the midst of a scale.
          layout.trained = {{.from = 0, .to = elements + 1536},
                            {.from = elements + 1792, .to = 10 * elements}};
          UpdateDecision decision;
          decision.groups = {MakeOptimizerStep(optimizer, {{.lr = 1e-2}}, 1, 1.0)};
          const tiering::Tile tile{elements, elements};
          OfTile in_place(format, elements);
          std::vector<float> values(static_cast<size_t>(elements));
          for (float& value : values) value = normal(random);
          FillTile(format, values.data(), in_place.memory());
          for (float& value : values) value = normal(random);
          kernels::Convert(kernels::DType::kFp32, values.data(), weights, in_place.memory().gradient,
                           values.size());
          // With moments that are not zero.
          UpdateTile(format, {decision, layout}, 7, tile, in_place.memory());
          const OfTile before(in_place);
          const std::vector<std::byte> was = before.state();
          ASSERT_EQ(was, in_place.state());
          const OfTile after(format, elements);
          UpdateTileInto(format, {decision, layout}, 8, tile, before.memory(), after.memory());
          UpdateTile(format, {decision, layout}, 8, tile, in_place.memory());
          EXPECT_NE(was, in_place.state());
          EXPECT_EQ(after.state(), in_place.state())
              << DTypeName(weights) << ", states " << StateTypeName(states) << ", " << elements;
          EXPECT_EQ(before.state(), was);
        }
      }
    }
  }
}

}  // namespace
}  // namespace penstock::zero::update_test
