// What the planner needs to know of a model: byte counts and times, no tensors.
//
// A *block* is one contiguous run of parameters that is fetched, computed with and released as one (a
// transformer layer, an embedding). A *stage* is one use of a block in the forward pass; stages run in order
// 0..S-1, and the backward pass runs them in reverse, down to the first one that trains. A block may be used
// by several stages (tied embeddings, repeated layers).
#ifndef PENSTOCK_TIERING_PLAN_MODEL_GRAPH_H_
#define PENSTOCK_TIERING_PLAN_MODEL_GRAPH_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tiering/plan/numbers.h"

namespace penstock::tiering {

// Runs are padded to whole pages of the smallest segment, so that every tile of every segment is page-aligned
// both in memory and in the file: 2048 elements of 2 bytes are 4096.
inline constexpr int64_t kElementAlignment = 2048;
inline constexpr int64_t kPage = 4096;

inline int64_t AlignUp(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Over several ranks a run is cut evenly, one part a rank, in whole units of this: a multiple of
// kElementAlignment and of the blocks in which squares are summed (kernels/reduce.h), so that no cut changes
// a norm. What the last parts have beyond the run's end is zero.
inline constexpr int64_t kPartAlignment = 4096;
inline int64_t ShardElements(int64_t flat_elements, int world) {
  return world == 1 ? flat_elements : AlignUp((flat_elements + world - 1) / world, kPartAlignment);
}

// The partial sums of a gradient's squares: a double for each block of kPartAlignment elements. Added up
// exactly on the host, in any order, they are the sum that a pass over the gradient there would give.
constexpr int64_t PartialSumBytes(int64_t elements) {
  return (elements + kPartAlignment - 1) / kPartAlignment * 8;
}

// Elements that share one fp32 scale in a block-wise 8-bit state.
inline constexpr int64_t kScaleBlock = 256;

// Bytes that parameters take in each of their forms. Weights are what forward and backward read; state is
// what the update needs beside them; a gradient waits in its own form between backward and update.
struct Precision {
  std::string name;
  // One tile segment each, in the order in which they lie in a slot: bytes per element. The first is the
  // weights. A segment of one byte per element is block-wise 8 bit: the codes of all elements, and behind
  // them an fp32 scale for every kScaleBlock elements.
  std::vector<int> segment_bytes;
  int gradient_bytes = 0;

  // Of an element as backward leaves it: bf16 computes in bf16, the others in fp32.
  int addend_bytes() const { return name == "bf16" ? 2 : 4; }
  int weight_bytes() const { return segment_bytes.front(); }
  // Of segment `segment` of a tile (or run) of that many elements, without padding.
  int64_t SegmentBytes(size_t segment, int64_t elements) const {
    const int bytes = segment_bytes[segment];
    return elements * bytes + (bytes == 1 ? (elements + kScaleBlock - 1) / kScaleBlock * 4 : 0);
  }
  // Elements of a tile whose segments are so long: one that has all of them, or its weights alone. 0: no tile
  // of this precision has such segments.
  int64_t ElementsOf(std::span<const uint64_t> segments) const {
    if (segments.size() != segment_bytes.size() && segments.size() != 1) return 0;
    const int64_t elements = static_cast<int64_t>(segments[0]) / weight_bytes();
    for (size_t s = 0; s < segments.size(); ++s) {
      if (static_cast<int64_t>(segments[s]) != SegmentBytes(s, elements)) return 0;
    }
    return elements;
  }
  // Of all segments, without padding.
  int64_t UnpaddedBytes(int64_t elements) const {
    int64_t sum = 0;
    for (size_t i = 0; i < segment_bytes.size(); ++i) sum += SegmentBytes(i, elements);
    return sum;
  }
  // As they lie in memory and on the drive: every segment in whole pages.
  int64_t StateBytes(int64_t elements) const {
    int64_t sum = 0;
    for (size_t i = 1; i < segment_bytes.size(); ++i) sum += AlignUp(SegmentBytes(i, elements), kPage);
    return sum;
  }
  int64_t TotalBytes(int64_t elements) const {
    return AlignUp(SegmentBytes(0, elements), kPage) + StateBytes(elements);
  }

  // bf16: the fp32 master is split into high (bf16, what compute reads) and low (int16); m and v are fp32. 12
  // bytes.
  static Precision Bf16() { return {"bf16", {2, 2, 4, 4}, 2}; }
  // fp16: the weights, the fp32 master, m, v. 14 bytes.
  static Precision Fp16() { return {"fp16", {2, 4, 4, 4}, 2}; }
  // fp32: p, m, v. 12 bytes.
  static Precision Fp32() { return {"fp32", {4, 4, 4}, 4}; }
  // The same with m and v in `moment_bytes` an element: 4, 2 (bf16), or 1 for block-wise 8 bit and its
  // scales.
  Precision WithMoments(int moment_bytes) const {
    Precision compact = *this;
    std::fill(compact.segment_bytes.end() - 2, compact.segment_bytes.end(), moment_bytes);
    return compact;
  }
};

struct BlockShape {
  std::string name;
  int64_t elements = 0;  // of the run, padding included (a multiple of kElementAlignment)
  int64_t init_bytes =
      0;  // tensor memory that building the block takes (fp32 parameters and what its factory needs)
  bool trains = true;  // false: all of it is frozen
  // Of a block that trains: its elements before this one are frozen. A multiple of kPartAlignment, so that no
  // cut there changes a norm; 0: none are.
  int64_t trained_from = 0;
  // What reading all that is frozen of it moves, where that is no part of the store
  // (PlanOptions::frozen_elsewhere).
  int64_t elsewhere_bytes = 0;
};

struct StageShape {
  std::string name;
  BlockIndex block;
  // Tensor memory, per micro-batch: the input that is kept from forward to backward, and the most that is
  // live beyond the saved activations while the stage computes (its output and the incoming gradient
  // included).
  int64_t input_bytes = 0;
  int64_t forward_peak_bytes = 0;
  int64_t backward_peak_bytes = 0;
  // Compute time per micro-batch on this machine, 0 where not measured.
  double forward_seconds = 0;
  double backward_seconds = 0;
  int64_t input_scratch_bytes = 0;  // the data of the saved activations, as it goes to the drive when it must
};

struct ModelGraph {
  PerBlock<BlockShape> blocks;
  PerStage<StageShape> stages;
  int64_t batch_bytes = 0;         // tensor memory of one micro-batch's inputs and targets
  int64_t fixed_tensor_bytes = 0;  // tensors that live as long as the run (buffers of modules)
  bool input_gradients = false;    // who computes wants gradients of what goes into the first stage
  // Who computes has a stage's input in memory of its own beside the budget while it is computed, comes or
  // goes: of the inputs that stay in memory, those of kInputRing positions take nothing of the budget.
  bool inputs_beside = false;

  int64_t elements() const {
    int64_t sum = 0;
    for (const BlockShape& block : blocks) sum += block.elements;
    return sum;
  }
  // Of blocks that are not frozen.
  int64_t trained_elements() const {
    int64_t sum = 0;
    for (const BlockShape& block : blocks) sum += block.trains ? block.elements : 0;
    return sum;
  }
  // Backward ends at the first stage whose block trains: to those before it no gradient leads, and forward is
  // all that is computed of them. The last one where nothing trains; where `input_gradients`, the first.
  StageIndex first_trained() const {
    StageIndex first(0);
    if (input_gradients) return first;
    while (first + 1 < stages.end_index() && !blocks[stages[first].block].trains) ++first;
    return first;
  }
  // By block: not 0 where backward comes to it.
  PerBlock<char> in_backward() const {
    PerBlock<char> comes(blocks.size(), 0);
    for (StageIndex s = first_trained(); s < stages.end_index(); ++s) comes[stages[s].block] = 1;
    return comes;
  }
  struct PassSeconds {
    double forward = 0, backward = 0;
  };
  // What computing a micro-batch takes.
  PassSeconds pass_seconds() const {
    PassSeconds sum;
    const StageIndex first = first_trained();
    for (const StageIndex s : stages.indices()) {
      sum.forward += stages[s].forward_seconds;
      if (s >= first) sum.backward += stages[s].backward_seconds;
    }
    return sum;
  }
  // Tensor memory, per micro-batch, that the inputs of any `stages_kept` stages take while they wait for
  // backward.
  int64_t saved_activation_bytes(int stages_kept) const {
    int64_t all = 0, largest = 0;
    for (const StageShape& stage : stages) {
      all += stage.input_bytes;
      largest = std::max(largest, stage.input_bytes);
    }
    return std::min(all, stages_kept * largest);
  }
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_MODEL_GRAPH_H_
