#include "run/config_options.h"

#include <algorithm>
#include <cstdint>

#include "run/plan_bounds.h"
#include "run/settings.h"
#include "zero/compute/tile_format.h"
#include "zero/engine/prediction_check.h"

namespace penstock::run {

namespace {

// What ends the run is reported in half of its time at the latest.
zero::WatchOptions WatchOf(const PenstockConfig& config, Door door) {
  // Linux gives a request to a drive 30 seconds (nvme_core.io_timeout, SCSI the same) before it resets the
  // drive and tries again: what is named after a minute has outlived that. From Python nothing is watched
  // unasked: a stage lasts as long as its owner stops in a debugger.
  const double unasked = door == Door::kCommandLine ? 60 : 0;
  zero::WatchOptions watch;
  watch.hopeless_seconds = config.watchdog_abort_seconds.value_or(0);
  const double half = watch.hopeless_seconds / 2;
  watch.stuck_seconds =
      config.watchdog_seconds.value_or(half > 0 && (unasked == 0 || half < unasked) ? half : unasked);
  return watch;
}

}  // namespace

void ApplyConfig(const Config& config, Door door, zero::EngineOptions* options) {
  SetOptions(config, options);
  options->watch = WatchOf(config.penstock, door);
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

}  // namespace penstock::run
