#include "tiering/plan/placement.h"

#include "absl/strings/str_cat.h"

namespace penstock::tiering {
namespace {

template <typename Holds>
int64_t CountBlocks(const Plan& plan, const Holds& holds) {
  int64_t count = 0;
  for (const BlockIndex b : plan.blocks.indices()) count += holds(b) ? 1 : 0;
  return count;
}

template <typename Holds>
int64_t CountTiles(const Plan& plan, const Holds& holds) {
  int64_t count = 0;
  for (const BlockPlan& block : plan.blocks) {
    for (const TileIndex t : block.tiles.indices()) count += holds(block, t) ? 1 : 0;
  }
  return count;
}

struct Count {
  const char* what;
  int64_t (*of)(const Plan& plan);
};
constexpr Count kCounts[] = {
    {"blocks whose weights stay in memory",
     [](const Plan& plan) {
       return CountBlocks(plan, [&](BlockIndex b) { return plan.blocks[b].private_weight_slot.valid(); });
     }},
    {"tiles whose state stays in memory",
     [](const Plan& plan) {
       return CountTiles(plan,
                         [](const BlockPlan& of, TileIndex t) { return of.private_tile_slot[t].valid(); });
     }},
    {"gradients that wait in memory",
     [](const Plan& plan) {
       return CountBlocks(plan, [&](BlockIndex b) { return plan.blocks[b].gradient_slot.valid(); });
     }},
    {"blocks on the device",
     [](const Plan& plan) { return CountBlocks(plan, [&](BlockIndex b) { return plan.on_device(b); }); }},
    {"tiles updated in backward",
     [](const Plan& plan) {
       return CountTiles(plan,
                         [](const BlockPlan& of, TileIndex t) { return of.speculative_update[t] != 0; });
     }},
    {"tiles previewed where a step is clipped",
     [](const Plan& plan) {
       return CountTiles(plan, [](const BlockPlan& of, TileIndex t) { return of.previews[t] != 0; });
     }},
    {"stages whose inputs leave memory", [](const Plan& plan) { return int64_t{plan.spilled_inputs()}; }},
    {"blocks in flight",
     [](const Plan& plan) {
       int64_t slots = 0;
       for (const WeightClass& each : plan.weight_classes) slots += each.slots;
       return slots;
     }},
    {"tiles in flight", [](const Plan& plan) { return int64_t{plan.tile_ring}; }},
    {"bytes of the arena", [](const Plan& plan) { return plan.arena_bytes; }},
};

}  // namespace

std::vector<int64_t> PlacementNumbers(const Plan& plan) {
  std::vector<int64_t> numbers = {plan.arena_bytes,
                                  plan.tensor_bytes,
                                  plan.tile_ring,
                                  plan.saved_activations,
                                  plan.input_ring,
                                  plan.speculates,
                                  plan.evaluate_micro_batches,
                                  plan.micro_batches,
                                  plan.on_nvme,
                                  plan.accumulator_ring,
                                  plan.codes.weights,
                                  plan.codes.gradients,
                                  plan.device.arena_bytes,
                                  plan.device.tensor_bytes,
                                  plan.device.saved_activations,
                                  plan.device.accumulator_ring,
                                  plan.device.collectives,
                                  plan.device.network_piece,
                                  plan.device.resident_elements};
  const auto add = [&numbers](const auto& slots) {
    for (const Slot& slot : slots) numbers.insert(numbers.end(), {slot.offset, slot.bytes});
  };
  add(plan.weight_slots);
  add(plan.tile_slots);
  add(plan.gradient_slots);
  add(plan.accumulator_slots);
  add(plan.input_slots);
  add(plan.device.weight_slots);
  add(plan.device.gradient_slots);
  add(plan.device.accumulator_slots);
  for (const BlockPlan& block : plan.blocks) {
    numbers.insert(numbers.end(),
                   {block.elements, block.trains, block.trained_from, block.private_weight_slot.value(),
                    block.gradient_slot.value(), block.accumulator_slot.value()});
    for (const TileIndex t : block.tiles.indices()) {
      numbers.insert(numbers.end(), {block.tiles[t].elements, block.private_tile_slot[t].value(),
                                     block.speculative_update[t], block.previews[t]});
    }
  }
  return numbers;
}

std::vector<std::string> WhatMoves(const Plan& from, const Plan& to) {
  if (PlacementNumbers(from) == PlacementNumbers(to)) return {};
  std::vector<std::string> lines;
  for (const Count& count : kCounts) {
    const int64_t before = count.of(from), after = count.of(to);
    if (before != after) lines.push_back(absl::StrCat(count.what, ": ", after, " (were ", before, ")"));
  }
  if (lines.empty()) lines.emplace_back("as many blocks and tiles, in other places");
  return lines;
}

}  // namespace penstock::tiering
