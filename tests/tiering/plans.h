// Models and questions that several tests of plans share.
#ifndef PENSTOCK_TESTS_TIERING_PLANS_H_
#define PENSTOCK_TESTS_TIERING_PLANS_H_

#include <absl/status/status.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <random>
#include <string>

#include "tiering/plan/plan.h"

namespace penstock::tiering {

// The least budget, from the words of a refusal; -1: it names none.
inline int64_t LeastOf(const absl::Status& refused) {
  const std::string message(refused.message()), words = "least that works is ";
  const size_t at = message.find(words);
  return at == std::string::npos ? -1 : std::stoll(message.substr(at + words.size()));
}

// A refusal costs no plan.
inline int64_t LeastHostMemory(const ModelGraph& graph, PlanOptions options) {
  options.host_memory_budget_bytes = 1;
  return LeastOf(MakePlan(graph, options).status());
}

inline ModelGraph Chain(int layers, int64_t elements, double forward = 1e-3) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  ModelGraph graph;
  graph.batch_bytes = 1024;
  for (int b = 0; b < layers; ++b) graph.blocks.push_back({"layer", elements, elements * 4});
  for (int b = 0; b < layers; ++b) {
    graph.stages.push_back({"stage", BlockIndex(b), kMiB / 4, kMiB, 2 * kMiB, forward, 3 * forward});
    graph.stages.back().input_scratch_bytes = b == 0 ? 0 : kMiB / 4;
  }
  return graph;
}

// Llama 3 70 B by its shape: 80 layers, and a vocabulary whose embedding and head are two tiles of rows each.
inline ModelGraph Llama70B() {
  constexpr int64_t kLayer = 855'654'400, kTile = 525'336'576;
  ModelGraph graph = Chain(84, kLayer, 30);
  for (const int end : {0, 1, 82, 83}) graph.blocks[BlockIndex(end)].elements = kTile;
  for (StageShape& stage : graph.stages) {
    stage.input_bytes = stage.input_scratch_bytes = 32 << 20;
    stage.forward_peak_bytes = 1 << 29;
    stage.backward_peak_bytes = int64_t{2} << 30;
  }
  return graph;
}

// SGD without momentum in fp32: weights and nothing beside them.
inline const Precision kStateless = {"fp32", {4}, 4};

// A GPT: the first block embeds and, as the last stage, gives the loss.
inline ModelGraph Tied(int layers, int64_t elements, int64_t embedding) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  const ModelGraph chain = Chain(layers, elements);
  const BlockIndex both(0);
  ModelGraph graph;
  graph.batch_bytes = chain.batch_bytes;
  graph.blocks.push_back({"embedding", embedding, embedding * 4});
  for (const BlockShape& block : chain.blocks) graph.blocks.push_back(block);
  graph.stages.push_back({"embed", both, 0, kMiB, kMiB, 1e-4, 1e-4});
  for (StageShape stage : chain.stages) {
    ++stage.block;
    graph.stages.push_back(stage);
  }
  graph.stages.push_back({"loss", both, kMiB / 4, kMiB, 2 * kMiB, 1e-3, 3e-3});
  for (StageShape& stage : graph.stages) stage.input_scratch_bytes = stage.input_bytes;
  return graph;
}

// Of up to nine layers, with a tied vocabulary or without, now and then no two blocks alike.
inline ModelGraph RandomModel(std::mt19937_64* random) {
  const int layers = 1 + static_cast<int>((*random)() % 9);
  const auto size = [&](uint64_t most) {
    return kElementAlignment * (1 + static_cast<int64_t>((*random)() % most));
  };
  ModelGraph graph = (*random)() % 2 != 0 ? Tied(layers, size(200), size(400)) : Chain(layers, size(200));
  if ((*random)() % 3 == 0) {
    for (BlockShape& block : graph.blocks) block.elements = size(300);
  }
  return graph;
}

inline Precision RandomPrecision(std::mt19937_64* random) {
  const Precision precisions[] = {Precision::Bf16(), Precision::Fp32(), Precision::Fp16(),
                                  Precision::Bf16().WithMoments(1), kStateless};
  return precisions[(*random)() % std::size(precisions)];
}

// Freezes the block's first `elements`, or as many as leave something to train.
inline void FreezeFirst(int64_t elements, BlockShape* block) {
  const int64_t most = (block->elements - 1) / kPartAlignment * kPartAlignment;
  block->trained_from = std::min(elements / kPartAlignment * kPartAlignment, most);
}

// Now and then, some blocks and never all of them; and some of them in part.
inline void FreezeSome(uint64_t seed, ModelGraph* graph) {
  std::mt19937_64 random(seed);
  if (random() % 4 == 0) {
    for (BlockShape& block : graph->blocks) block.trains = random() % 2 != 0;
    graph->blocks[BlockIndex(random() % graph->blocks.size())].trains = true;
  }
  if (random() % 2 != 0) return;
  for (BlockShape& block : graph->blocks) {
    const auto part = static_cast<int64_t>(random() % static_cast<uint64_t>(block.elements));
    if (block.trains && random() % 3 != 0) FreezeFirst(part, &block);
  }
}

// Elements of the blocks whose weights have places of their own, and tiles whose state has.
inline int64_t ResidentElements(const Plan& plan) {
  int64_t elements = 0;
  for (const BlockPlan& block : plan.blocks)
    elements += block.private_weight_slot.valid() ? block.elements : 0;
  return elements;
}
inline int64_t ResidentTiles(const Plan& plan) {
  int64_t tiles = 0;
  for (const BlockPlan& block : plan.blocks) {
    tiles += std::count_if(block.private_tile_slot.begin(), block.private_tile_slot.end(),
                           [](TileSlot slot) { return slot.valid(); });
  }
  return tiles;
}

}  // namespace penstock::tiering

#endif  // PENSTOCK_TESTS_TIERING_PLANS_H_
