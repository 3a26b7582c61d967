#include "run/config_options.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "run/plan_bounds.h"
#include "run/settings.h"
#include "zero/compute/tile_format.h"
#include "zero/engine/prediction_check.h"

namespace penstock::run {

void ApplyConfig(const Config& config, zero::EngineOptions* options) {
  SetOptions(config, options);
  zero::MemoryOptions& memory = options->memory;
  memory.bounds = PlanBoundsOf(config, options->world());
  memory.saved_activations = config.penstock.saved_activations.value_or(
      config.cpu_checkpointing.value_or(false) ? SavedActivations::kHost : SavedActivations::kAuto);
  if (config.zero.sub_group_size_elements.value_or(0) > 0) {
    // DeepSpeed's unit of an optimizer step is our tile.
    const int64_t bytes =
        zero::FormatOf(*options).precision().UnpaddedBytes(*config.zero.sub_group_size_elements);
    memory.tile_bytes = memory.tile_bytes > 0 ? std::min(memory.tile_bytes, bytes) : bytes;
  }
  aio::EngineOptions& io = options->storage.io;
  if (config.aio.block_size_bytes.has_value())
    io.block_bytes = static_cast<uint64_t>(*config.aio.block_size_bytes);
  if (config.aio.queue_depth.has_value()) {
    const auto depth = static_cast<uint64_t>(*config.aio.queue_depth);
    // DeepSpeed's depth is per thread, for reads and for writes apart.
    const auto threads = static_cast<uint64_t>(config.aio.intra_op_parallelism.value_or(1));
    const uint64_t bytes = std::max(depth * threads * io.block_bytes, io.block_bytes);
    io.max_read_bytes_in_flight = std::min(io.max_read_bytes_in_flight, bytes);
    io.max_write_bytes_in_flight = std::min(io.max_write_bytes_in_flight, bytes);
    options->storage.io_depth_is_limit = true;
  }
}

bool PlansAgain(const PenstockConfig& config, int world, OffloadDevice offload) {
  return config.replan.value_or("auto") == "auto" && zero::CanPlanAgain(world, offload).ok();
}

void NotePlansAgain(const PenstockConfig& config, int world, OffloadDevice offload,
                    std::vector<std::string>* notes) {
  if (config.replan != "auto") return;
  if (const absl::Status can = zero::CanPlanAgain(world, offload); !can.ok())
    notes->push_back(absl::StrCat("penstock.replan \"auto\": ", can.message()));
}

zero::WatchOptions WatchOf(const PenstockConfig& config, double unasked) {
  zero::WatchOptions watch;
  watch.hopeless_seconds = config.watchdog_abort_seconds.value_or(0);
  const double half = watch.hopeless_seconds / 2;
  if (half > 0) unasked = unasked > 0 ? std::min(unasked, half) : half;
  watch.stuck_seconds = config.watchdog_seconds.value_or(unasked);
  return watch;
}

}  // namespace penstock::run
