// What a configuration says about placement, as the planner's bounds. No LibTorch.
//
//   key (DeepSpeed's, ColossalAI's)              bound
//   stage3_max_live_parameters                   weights in flight, elements
//   stage3_prefetch_bucket_size                  weights read ahead of their use, elements
//   offload_param.buffer_count, buffer_size      blocks in flight; together, elements of weights in flight
//   offload_param.max_in_cpu                     weights that stay in host memory, elements
//   stage3_max_reuse_distance                    weights stay only where no more is used between two uses
//   stage3_param_persistence_threshold           blocks up to this size stay, before all others,
//   stage3_model_persistence_threshold             up to this many elements of them
//   offload_optimizer.buffer_count               state in flight: buffers of sub_group_size x 4 bytes
//   offload_optimizer.pipeline_read, _write      false: no tile ahead of, or behind, the updated one
//   offload_optimizer.ratio                      elements that the processor updates, at least: of the
//                                                others a device keeps what its own memory has room for
//   penstock.placement, placement_const_bytes    what stays at all: auto, cpu, cuda, const
//   penstock.gpu_margin_mem_ratio                of what is left then, the share for resident state
//   stage 1 and 2, over several ranks            all weights stay
// (sub_group_size bounds a tile: MemoryOptions::tile_bytes.)
#ifndef PENSTOCK_RUN_PLAN_BOUNDS_H_
#define PENSTOCK_RUN_PLAN_BOUNDS_H_

#include "run/config.h"
#include "tiering/plan/plan.h"

namespace penstock::run {

// `world`: over several ranks ZeRO's stages 1 and 2 keep all weights in memory, whole on every rank.
tiering::PlanBounds PlanBoundsOf(const Config& config, int world = 1);

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_PLAN_BOUNDS_H_
