#include "tiering/plan/device_plan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/index.h"
#include "tiering/plan/working_set.h"

namespace penstock::tiering {
namespace {

constexpr int64_t kGranule = int64_t{2} << 20;  // in which a device hands out memory

// Gradients that devices reduce among themselves go in pieces of so many elements: what it takes to start an
// exchange is then little beside it.
constexpr int64_t kDirectPiece = int64_t{1} << 20;

// How many blocks' weights and gradients are on the device at once, at the least. With one of each everything
// works and the lanes take turns.
struct InFlight {
  int runs;
  int gradients;
};
constexpr std::array<InFlight, 4> kInFlight = {{{3, 2}, {2, 2}, {2, 1}, {1, 1}}};

class DevicePlanner {
 public:
  DevicePlanner(const ModelGraph& graph, const Precision& precision, int micro_batches, int world,
                bool trains, bool frozen_apart, const DeviceOptions& options)
      : graph_(graph),
        precision_(precision),
        micro_batches_(micro_batches),
        world_(world),
        trains_(trains),
        frozen_apart_(frozen_apart),
        options_(options),
        collectives_(options.collectives && world > 1),
        positions_(static_cast<int>(graph.stages.size())),
        uses_(graph.blocks.size(), 0) {
    for (const StageShape& stage : graph.stages) ++uses_[stage.block];
  }

  absl::StatusOr<DevicePlan> Make() const {
    const int64_t budget = options_.budget_bytes;
    DevicePlan leanest;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const InFlight& in_flight : kInFlight) {
      DevicePlan plan = Build(in_flight, LeastKept());
      if (plan.bytes() >= least) continue;
      least = plan.bytes();
      leanest = std::move(plan);
    }
    if (budget > 0 && budget < least) {
      return absl::FailedPreconditionError(
          absl::StrCat("a device memory budget of ", budget, " bytes is too small: the least that works is ",
                       least, " bytes (", (least + (1 << 20) - 1) >> 20, "M; ", leanest.ledger().Listed(),
                       "); a smaller micro-batch or sequence takes less"));
    }
    const int64_t room = budget > 0 ? budget : std::numeric_limits<int64_t>::max();
    for (const InFlight& in_flight : kInFlight) {
      if (Build(in_flight, LeastKept()).bytes() > room) continue;
      int kept = MostKept();
      while (kept > LeastKept() && Build(in_flight, kept).bytes() > room) --kept;
      DevicePlan plan = Build(in_flight, kept, Residents(in_flight, kept, room));
      AddSlots(room, &plan);
      plan.least_bytes = least;
      return plan;
    }
    return absl::InternalError("no plan of the device's memory is as small as the least");
  }

 private:
  int LeastKept() const {
    const bool stay = !trains_ || options_.saved_activations == SavedActivations::kMemory;
    return stay ? positions_ : std::min(kInputRing, positions_);
  }
  int MostKept() const {
    const bool leave = options_.saved_activations == SavedActivations::kHost ||
                       options_.saved_activations == SavedActivations::kDrive;
    return leave ? LeastKept() : positions_;
  }

  // Blocks that live on the device: in the order of their use, those that fit. What is used first has the
  // least time for its update when it waits for the processor. Where all of it is written afterwards the
  // order is the other one: at the end of forward, and behind it, the drive has least to read.
  PerBlock<char> Residents(const InFlight& in_flight, int saved_activations, int64_t room) const {
    PerBlock<char> lives(graph_.blocks.size(), 0), seen(graph_.blocks.size(), 0);
    if (!trains_ || options_.state_share <= 0) return lives;
    auto left =
        static_cast<int64_t>(std::min(options_.state_share, 1.0) * static_cast<double>(graph_.elements()));
    for (int nth = 0; nth < positions_; ++nth) {
      const StageShape& stage = graph_.stages[StageIndex(options_.writes_state ? positions_ - 1 - nth : nth)];
      const BlockShape& block = graph_.blocks[stage.block];
      const int64_t elements = block.elements;
      if (std::exchange(seen[stage.block], 1) != 0 || elements > left) continue;
      // What is frozen has no state to live with, and the device updates whole blocks.
      if (!block.trains || (world_ == 1 && block.trained_from > 0)) continue;
      // Over several ranks what is summed in place from one use to the next has no place for the result.
      if (collectives_ && uses_[stage.block] > 1 && precision_.gradient_bytes == 4) continue;
      lives[stage.block] = 1;
      if (Build(in_flight, saved_activations, lives).bytes() <= room) {
        left -= elements;
      } else {
        lives[stage.block] = 0;
      }
    }
    return lives;
  }

  DevicePlan Build(const InFlight& in_flight, int saved_activations) const {
    return Build(in_flight, saved_activations, PerBlock<char>(graph_.blocks.size(), 0));
  }

  DevicePlan Build(const InFlight& in_flight, int saved_activations, const PerBlock<char>& lives_here) const {
    DevicePlan plan;
    plan.has_own_memory = true;
    plan.collectives = collectives_;
    plan.gds = options_.gds && (world_ == 1 || collectives_);
    plan.budget_bytes = options_.budget_bytes;
    plan.saved_activations = saved_activations;
    plan.tensor_bytes =
        ComputeTensorBytes(graph_, micro_batches_, trains_, saved_activations, &plan.evaluate_micro_batches);
    plan.tensor_bytes += options_.tensor_slack.Beside(plan.tensor_bytes);
    PerBlock<int64_t> sizes;
    std::vector<int64_t> come_and_go;
    for (const BlockIndex b : graph_.blocks.indices()) {
      sizes.push_back(Elements(b));
      // Over several ranks all gradients come and go: what stays is the part that they are reduced to.
      if (lives_here[b] == 0 || collectives_) come_and_go.push_back(sizes[b]);
    }
    const std::vector<int64_t> classes =
        come_and_go.empty() ? std::vector<int64_t>() : ClassSizes(come_and_go, in_flight.runs);
    std::vector<int> in_ring(classes.size(), 0);
    std::vector<int64_t> largest_in_ring(classes.size(), 0);
    int64_t largest_sum = 0;
    for (const BlockIndex b : sizes.indices()) {
      DevicePlan::Block& block = plan.blocks.emplace_back();
      if (lives_here[b] != 0) {
        block.weight_slot = DeviceWeightSlot(0);  // numbered by LayOut
        block.state_slot = DeviceStateSlot(0);
        plan.resident_elements += PartOf(b);
      }
      if (lives_here[b] != 0 && !collectives_) {
        block.weight_class = -1;
      } else {
        while (classes[At(block.weight_class)] < sizes[b]) ++block.weight_class;
      }
      if (!trains_ || !graph_.blocks[b].trains) continue;
      const bool leaves_in_fp32 = world_ > 1 && precision_.addend_bytes() == 4;
      block.sums_apart =
          precision_.gradient_bytes < 4 && (micro_batches_ > 1 || uses_[b] > 1 || leaves_in_fp32);
      if (lives_here[b] != 0 || (uses_[b] > 1 && !block.sums_apart)) {
        block.gradient_slot = DeviceGradientSlot(0);  // numbered by LayOut
      }
      const bool passes = !block.gradient_slot.valid() || (collectives_ && lives_here[b] != 0);
      const bool leaves_as_sums = world_ > 1 && block.sums_apart;
      const int64_t of_gradient = GradientElements(b);
      if (passes && !leaves_as_sums) {
        ++in_ring[At(block.weight_class)];
        int64_t& largest = largest_in_ring[At(block.weight_class)];
        largest = std::max(largest, of_gradient);
      }
      if (block.sums_apart && uses_[b] == 1) largest_sum = std::max(largest_sum, of_gradient);
    }
    for (size_t c = 0; c < classes.size(); ++c) {
      const int members = Members(plan, c);
      plan.weight_classes.push_back(
          {.bytes = classes[c] * precision_.weight_bytes(), .slots = std::min(in_flight.runs, members)});
      plan.gradient_rings.push_back({.bytes = GradientPlaceBytes(largest_in_ring[c]),
                                     .slots = std::min(in_flight.gradients, in_ring[c])});
    }
    if (largest_sum > 0) {
      plan.accumulator_ring = std::min(in_flight.gradients, static_cast<int>(sizes.size()));
      plan.accumulator_slots.assign(At(plan.accumulator_ring), {0, largest_sum * 4});
    }
    for (const BlockIndex b : sizes.indices()) {
      if (!plan.blocks[b].sums_apart || uses_[b] == 1) continue;
      plan.blocks[b].accumulator_slot = plan.accumulator_slots.end_index();
      plan.accumulator_slots.push_back({0, GradientElements(b) * 4});
    }
    if (collectives_) {
      const int64_t largest_part = *std::max_element(sizes.begin(), sizes.end()) / world_;
      plan.network_piece = std::min(kDirectPiece, largest_part);
      plan.network.bytes = trains_ ? plan.reduce_bytes(world_) : 0;
      if (options_.codes.weights) plan.network.bytes += GatherBytes(world_, plan.network_piece);
    }
    LayOut(&plan);
    return plan;
  }

  // What one rank updates of a block.
  int64_t PartOf(BlockIndex block) const { return ShardElements(graph_.blocks[block].elements, world_); }
  // Of a block's run, with what its parts have beyond its end where they lie here one after the other.
  int64_t Elements(BlockIndex block) const {
    const int64_t elements = graph_.blocks[block].elements;
    return collectives_ ? ShardElements(elements, world_) * world_ : elements;
  }
  // Of what backward leaves of a block that trains: what is frozen apart has no gradient.
  int64_t GradientElements(BlockIndex block) const {
    return Elements(block) - (frozen_apart_ ? graph_.blocks[block].trained_from : 0);
  }

  // Of a gradient that leaves: behind it are the partial sums of its squares (Plan::squares_on_device).
  int64_t GradientPlaceBytes(int64_t elements) const {
    return elements * precision_.gradient_bytes + (world_ == 1 ? PartialSumBytes(elements) : 0);
  }

  static int Members(const DevicePlan& plan, size_t weight_class) {
    return static_cast<int>(std::count_if(plan.blocks.begin(), plan.blocks.end(), [&](const auto& block) {
      return block.weight_class == static_cast<int>(weight_class) && !block.state_slot.valid();
    }));
  }

  void LayOut(DevicePlan* plan) const {
    plan->weight_slots.clear();
    plan->gradient_slots.clear();
    plan->state_slots.clear();
    auto add_rings = [](auto& rings, auto* slots) {
      for (auto& ring : rings) {
        ring.first_slot = slots->end_index();
        for (int i = 0; i < ring.slots; ++i) slots->push_back({0, ring.bytes});
      }
    };
    add_rings(plan->weight_classes, &plan->weight_slots);
    add_rings(plan->gradient_rings, &plan->gradient_slots);
    auto add = [](auto* number, auto* slots, int64_t bytes) {
      if (!number->valid()) return;
      *number = slots->end_index();
      slots->push_back({0, bytes});
    };
    for (const BlockIndex b : plan->blocks.indices()) {
      DevicePlan::Block& block = plan->blocks[b];
      const int64_t part = PartOf(b);
      add(&block.weight_slot, &plan->weight_slots, Elements(b) * precision_.weight_bytes());
      add(&block.gradient_slot, &plan->gradient_slots,
          block.state_slot.valid() ? part * precision_.gradient_bytes
                                   : GradientPlaceBytes(GradientElements(b)));
      add(&block.state_slot, &plan->state_slots, precision_.StateBytes(part) + PartialSumBytes(part));
    }
    int64_t offset = 0;
    const auto place = [&offset](auto& slots) {
      for (Slot& slot : slots) {
        slot.offset = offset;
        offset += AlignUp(slot.bytes, kPage);
      }
    };
    place(plan->weight_slots);
    place(plan->gradient_slots);
    place(plan->accumulator_slots);
    place(plan->state_slots);
    plan->network.offset = offset;
    plan->arena_bytes = AlignUp(offset + AlignUp(plan->network.bytes, kPage), kGranule);
  }

  // Every class one more in turn, until nothing fits or every block has one.
  void AddSlots(int64_t room, DevicePlan* plan) const {
    for (bool added = true; added;) {
      added = false;
      for (size_t c = 0; c < plan->weight_classes.size(); ++c) {
        DeviceWeightClass& cls = plan->weight_classes[c];
        if (cls.slots >= Members(*plan, c)) continue;
        ++cls.slots;
        LayOut(plan);
        if (plan->bytes() <= room) {
          added = true;
        } else {
          --cls.slots;
          LayOut(plan);
        }
      }
    }
  }

  const ModelGraph& graph_;
  const Precision& precision_;
  const int micro_batches_;
  const int world_;
  const bool trains_;
  const bool frozen_apart_;
  const DeviceOptions& options_;
  const bool collectives_;
  const int positions_;
  PerBlock<int> uses_;
};

}  // namespace

Ledger DevicePlan::ledger() const {
  Ledger ledger;
  int64_t slots = 0;
  auto add = [&](const char* what, const auto& of) {
    int64_t bytes = 0;
    for (const Slot& slot : of) bytes += AlignUp(slot.bytes, kPage);
    ledger.Add(what, bytes, static_cast<int64_t>(of.size()));
    slots += bytes;
  };
  add("weights on the device", weight_slots);
  add("gradients on the device", gradient_slots);
  add("fp32 gradient sums on the device", accumulator_slots);
  add("optimizer state on the device", state_slots);
  if (network.bytes > 0) add("gradients of other ranks on the device", std::array{network});
  ledger.Add("rounding", arena_bytes - slots);
  ledger.Add("tensors on the device", tensor_bytes);
  return ledger;
}

absl::StatusOr<DevicePlan> PlanDevice(const ModelGraph& graph, const Precision& precision, int micro_batches,
                                      int world, bool trains, bool frozen_apart,
                                      const DeviceOptions& options) {
  if (!options.has_own_memory) return DevicePlan();
  return DevicePlanner(graph, precision, micro_batches, world, trains, frozen_apart, options).Make();
}

}  // namespace penstock::tiering
