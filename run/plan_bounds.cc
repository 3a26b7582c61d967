#include "run/plan_bounds.h"

#include <algorithm>

namespace penstock::run {
namespace {

constexpr int64_t kBuffers = 5;               // DeepSpeed's default of offload_param.buffer_count
constexpr int64_t kSubGroup = 1'000'000'000;  // and of sub_group_size

std::optional<int64_t> Least(std::optional<int64_t> a, std::optional<int64_t> b) {
  if (!a || !b) return a ? a : b;
  return std::min(*a, *b);
}

tiering::Placement PlacementOf(ConfigPlacement placement) {
  switch (placement) {
    case ConfigPlacement::kAuto:
      return tiering::Placement::kAuto;
    case ConfigPlacement::kCpu:
      return tiering::Placement::kCpu;
    case ConfigPlacement::kCuda:
      return tiering::Placement::kCuda;
    case ConfigPlacement::kConst:
      return tiering::Placement::kConst;
  }
  return tiering::Placement::kAuto;
}

}  // namespace

tiering::PlanBounds PlanBoundsOf(const Config& config, int world) {
  tiering::PlanBounds bounds;
  const ZeroConfig& zero = config.zero;
  bounds.live_elements = zero.max_live_parameters_elements;
  bounds.prefetch_elements = zero.prefetch_bucket_size_elements;
  bounds.weight_slots = zero.offload_param.buffer_count;
  if (zero.offload_param.buffer_size_elements) {
    int64_t pool = 0;
    // A pool beyond 63 bits bounds nothing.
    if (!__builtin_mul_overflow(*zero.offload_param.buffer_size_elements,
                                zero.offload_param.buffer_count.value_or(kBuffers), &pool)) {
      bounds.live_elements = Least(bounds.live_elements, pool);
    }
  }
  bounds.resident_elements = zero.offload_param.max_in_cpu_elements;
  bounds.reuse_elements = zero.max_reuse_distance_elements;
  bounds.persistent_block_elements = zero.param_persistence_elements;
  bounds.persistent_elements = zero.model_persistence_elements;

  const OffloadOptimizerConfig& optimizer = zero.offload_optimizer;
  if (optimizer.buffer_count) {
    int64_t pool = 0;
    const int64_t elements = zero.sub_group_size_elements.value_or(kSubGroup);
    if (!__builtin_mul_overflow(4 * *optimizer.buffer_count, elements, &pool)) bounds.state_bytes = pool;
  }
  bounds.processor_share = optimizer.ratio;
  const bool no_ahead = optimizer.pipeline_read == false, no_behind = optimizer.pipeline_write == false;
  if (no_ahead || no_behind) bounds.tile_slots = Least(bounds.tile_slots, no_ahead && no_behind ? 1 : 2);

  bounds.placement = PlacementOf(config.penstock.placement.value_or(ConfigPlacement::kAuto));
  const int64_t stage = zero.stage.value_or(3);
  if (world > 1 && (stage == 1 || stage == 2)) bounds.placement = tiering::Placement::kCuda;
  bounds.const_bytes = config.penstock.placement_const_bytes.value_or(bounds.const_bytes);
  bounds.state_fraction = config.penstock.state_fraction.value_or(1.0);
  return bounds;
}

}  // namespace penstock::run
