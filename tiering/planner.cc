// Placement under hard budgets.
//
// The working set comes first: without run slots, tile slots and LibTorch's tensors nothing runs. It is tried
// from comfortable (three blocks and 48 MiB of tiles in flight) down to the least that works. What is left of
// the budget is spent where a byte of memory saves most bytes of traffic per step:
//   gradients in host memory    save 4 bytes of traffic for 2 of memory (a 16-bit write and a read)
//   weights in host memory      save up to 4 for 2 (a read in forward and one in backward)
//   state in host memory        saves 1 for 1 (its read; every step is durable, so the write stays)
// Which of these saves most time depends on the machine (where backward has the drive to itself, only what
// forward reads counts), so several orders of spending are compared as well.
#include <algorithm>
#include <array>
#include <limits>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tiering/belady.h"
#include "tiering/byte_size.h"
#include "tiering/plan.h"
#include "tiering/program.h"
#include "tiering/update_order.h"
#include "tiering/working_set.h"

namespace penstock::tiering {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kHugePage = 2 * kMiB;

size_t At(int index) { return static_cast<size_t>(index); }

// One size of working set: how many blocks' weights are in memory at once, how large a tile, how many bytes
// of tiles.
struct Level {
  int runs;
  int64_t tile_elements;
  int64_t ring_bytes;
  int least_ring;
  int gradient_ring;
};

// The last is the least with which everything still overlaps: one block computes while the next is read, one
// tile is updated while others are read and written.
constexpr std::array<Level, 6> kLevels = {{
    {3, 1 << 20, 48 * kMiB, 4, 2},
    {3, 1 << 19, 24 * kMiB, 4, 2},
    {2, 1 << 19, 24 * kMiB, 4, 1},
    {2, 1 << 18, 12 * kMiB, 4, 1},
    {2, 1 << 17, 6 * kMiB, 4, 1},
    {2, 1 << 16, 3 * kMiB, 4, 1},
}};

// What the memory beside the working set is spent on, in this order.
enum class Kind : uint8_t { kGradients, kWeights, kState, kBlocks };
struct Spending {
  std::array<Kind, 3> order;
  const char* words;
};
constexpr std::array<Spending, 3> kSpendings = {{
    {{Kind::kGradients, Kind::kWeights, Kind::kState}, "gradients, then weights, then state"},
    {{Kind::kWeights, Kind::kGradients, Kind::kState}, "weights, then gradients, then state"},
    {{Kind::kState, Kind::kWeights, Kind::kGradients}, "state, then weights, then gradients"},
}};
// Where what stays in host memory is not written every step: a byte of a whole block saves its reads and its
// write, 26 for 12.
constexpr std::array<Spending, 3> kLateSpendings = {{
    {{Kind::kBlocks, Kind::kGradients, Kind::kState}, "whole blocks, then gradients, then state"},
    {{Kind::kGradients, Kind::kBlocks, Kind::kState}, "gradients, then whole blocks, then state"},
    {{Kind::kBlocks, Kind::kState, Kind::kGradients}, "whole blocks, then state, then gradients"},
}};

std::vector<Tile> FixedTiles(const std::vector<int64_t>& elements) {
  std::vector<Tile> tiles;
  int64_t offset = 0;
  for (const int64_t each : elements) {
    tiles.push_back({offset, each});
    offset += each;
  }
  return tiles;
}

// A less comfortable plan, or another placement, must make a step shorter than this share of the best so far.
constexpr double kWorthwhile = 0.999;

class Planner {
 public:
  Planner(const ModelGraph& graph, const PlanOptions& options, DevicePlan device)
      : graph_(graph), options_(options), device_(std::move(device)) {
    uses_.resize(graph.blocks.size(), 0);
    for (const StageShape& stage : graph.stages) ++uses_[At(stage.block)];
    for (const StageShape& stage : graph.stages) walk_.push_back(stage.block);
    // The last stage runs forward and backward in one go: one use.
    for (size_t s = graph.stages.size() - 1; options.trains && s-- > 0;)
      walk_.push_back(graph.stages[s].block);
  }

  absl::StatusOr<Plan> Make() {
    const int64_t budget = options_.host_budget_bytes;
    if (!options_.on_nvme) {
      Plan plan = Build(kLevels[0], /*resident_gradients=*/Count(), /*budget=*/0);
      MakeAllPrivate(&plan);
      LayOut(&plan);
      plan.least_host_memory_bytes = plan.host_bytes();
      plan.reasons = {"everything stays in memory: there is no drive"};
      CountBytes(&plan);
      if (budget > 0 && plan.host_bytes() > budget) return TooSmall(plan.host_bytes(), plan);
      return plan;
    }
    const int64_t least = Least();
    if (budget > 0 && least > budget) return TooSmall(least, Build(kLevels.back(), 0, /*budget=*/1));
    Choice choice = Best(budget);
    if (options_.bounds.placement == Placement::kAuto && budget > 0) TryFixedPlacements(&choice);
    Plan plan = std::move(choice.plan);
    plan.least_host_memory_bytes = least;
    CountBytes(&plan);
    return plan;
  }

 private:
  struct Choice {
    Plan plan;
    double seconds = 0;  // of a step; 0: nothing was simulated
  };

  int Count() const { return static_cast<int>(graph_.blocks.size()); }

  // `auto` is never slower than what a user could fix: the search for each of the other placements leaves
  // room for what it keeps before it sizes the working set, which now and then finds a better whole.
  void TryFixedPlacements(Choice* choice) const {
    if (!choice->plan.trains || !FewTilesToSimulate(choice->plan)) return;
    for (const Placement placement : {Placement::kCuda, Placement::kConst}) {
      PlanOptions options = options_;
      options.bounds.placement = placement;
      const Planner planner(graph_, options, device_);
      if (planner.Least() > options_.host_budget_bytes) continue;
      Choice other = planner.Best(options_.host_budget_bytes);
      if (FewTilesToSimulate(other.plan) && other.seconds < choice->seconds * kWorthwhile)
        *choice = std::move(other);
    }
  }

  int64_t Least() const {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Level& level : kLevels) {
      const Plan plan = Build(level, 0, /*budget=*/1);
      least = std::min(least, plan.host_bytes() + RequiredBytes(plan));
    }
    return least;
  }

  // What must stay by the user's word, beyond the working set.
  int64_t RequiredBytes(const Plan& plan) const {
    if (options_.bounds.placement != Placement::kCuda) return 0;
    return BytesOf(plan, ChooseWeights(plan, std::numeric_limits<int64_t>::max())) + kHugePage;
  }

  // The working set of a level, with room in the budget for what must stay.
  Plan WorkingSet(const Level& level, int64_t budget) const {
    Plan plan = Build(level, 0, budget);
    const int64_t required = RequiredBytes(plan);
    return required == 0 ? plan : Build(level, 0, std::max<int64_t>(1, budget - required));
  }

  bool Fits(const Level& level, int64_t budget) const {
    const Plan plan = WorkingSet(level, budget);
    return plan.host_bytes() + RequiredBytes(plan) <= budget;
  }

  absl::Status TooSmall(int64_t least, const Plan& plan) const {
    std::string parts;
    const Ledger ledger = plan.ledger();
    for (const Ledger::Line& line : ledger.lines()) {
      absl::StrAppend(&parts, parts.empty() ? "" : ", ", line.what, " ", line.bytes);
    }
    return absl::FailedPreconditionError(
        absl::StrCat("a host memory budget of ", options_.host_budget_bytes,
                     " bytes is too small: the least that works is ", least, " bytes (",
                     (least + kMiB - 1) / kMiB, "M; ", parts, ")",
                     options_.on_nvme ? "; a smaller micro-batch or sequence takes less"
                                      : "; with --offload nvme less would do"));
  }

  // Every level that fits, with the rest of the budget spent in every order; the one whose step is the
  // shortest in virtual time. More memory for the pipeline and more for residency compete, and what should
  // stay first depends on how compute, reads and writes compare.
  Choice Best(int64_t budget) const {
    if (budget == 0) {
      Plan plan = Build(kLevels[0], Count(), /*budget=*/0);
      const double seconds = Order(/*thorough=*/true, &plan);
      return {std::move(plan), seconds};
    }
    struct Candidate {
      Plan plan;
      Level level;
      const Spending* spending;
      double seconds;
    };
    std::vector<Candidate> candidates;
    std::set<std::vector<int64_t>> seen;  // what differs between plans: the others are the same to the byte
    // Compares one more plan; false where there is nothing to compare it with, and it is taken.
    auto consider = [&](const Level& level, const Spending& spending) {
      Plan plan = Spent(level, spending, budget);
      if (!seen.insert(Signature(plan)).second) return true;
      const bool simulated = plan.trains && !TooManyTilesToSimulate(plan);
      if (!simulated && !candidates.empty()) return true;
      const double seconds = Order(/*thorough=*/false, &plan);
      candidates.push_back({std::move(plan), level, &spending, seconds});
      return simulated;
    };
    bool more = true;
    for (const Level& level : kLevels) {
      Level fitting = level;
      if (!Fits(level, budget)) fitting.runs = 1;
      if (!more || !Fits(fitting, budget)) continue;
      more = consider(fitting, spendings()[0]);
      if (more && FewTilesToSimulate(candidates.back().plan)) consider(fitting, spendings()[1]);
    }
    // For the levels that do best with the first way to spend: the other ways, and one block of weights in
    // memory at a time, which leaves more for what stays.
    std::vector<const Candidate*> fastest;
    for (const Candidate& candidate : candidates) fastest.push_back(&candidate);
    std::stable_sort(fastest.begin(), fastest.end(),
                     [](const Candidate* x, const Candidate* y) { return x->seconds < y->seconds; });
    std::vector<Level> promising;
    for (size_t i = 0; more && i < std::min<size_t>(2, fastest.size()); ++i) {
      promising.push_back(fastest[i]->level);
      if (!FewTilesToSimulate(fastest[i]->plan)) continue;
      promising.push_back(fastest[i]->level);
      promising.back().runs = 1;
    }
    for (const Level& level : promising) {
      for (const Spending& spending : spendings()) consider(level, spending);
    }
    // The fastest few with their tiles' orders chosen with care. A less comfortable level must be worth it:
    // it is more easily disturbed than a simulation shows.
    std::vector<size_t> order(candidates.size());
    double worst_seconds = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      order[i] = i;
      worst_seconds = std::max(worst_seconds, candidates[i].seconds);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t x, size_t y) { return candidates[x].seconds < candidates[y].seconds; });
    order.resize(std::min<size_t>(order.size(), FewTilesToSimulate(candidates[order.front()].plan) ? 4 : 1));
    std::sort(order.begin(), order.end());  // from comfortable to lean
    size_t best = order.front();
    for (const size_t i : order) {
      candidates[i].seconds = Order(/*thorough=*/true, &candidates[i].plan);
      if (candidates[i].seconds < candidates[best].seconds * kWorthwhile) best = i;
    }
    Plan plan = std::move(candidates[best].plan);
    const double seconds = candidates[best].seconds;
    plan.reasons = {Chosen(plan, *candidates[best].spending, seconds)};
    if (candidates.size() > 1) {
      plan.reasons.push_back(absl::StrFormat(
          "compared: %d working sets and ways to spend the rest of the budget, from %.3g s to %.3g s a step",
          candidates.size(), candidates[best].seconds, worst_seconds));
    }
    return {std::move(plan), seconds};
  }

  // Chooses which tiles are updated in backward; the step's seconds.
  double Order(bool thorough, Plan* plan) const {
    return ChooseUpdateOrder(graph_, options_.machine, options_.update_order, thorough, plan);
  }

  static std::vector<int64_t> Signature(const Plan& plan) {
    std::vector<int64_t> signature = {plan.tile_elements, plan.tile_ring, plan.kept_inputs};
    for (const RunClass& cls : plan.run_classes) signature.insert(signature.end(), {cls.bytes, cls.slots});
    for (const BlockPlan& block : plan.blocks) {
      signature.push_back(block.private_run_slot >= 0);
      signature.push_back(block.gradient_slot >= 0);
      signature.push_back(std::count_if(block.private_tile_slot.begin(), block.private_tile_slot.end(),
                                        [](int slot) { return slot >= 0; }));
    }
    return signature;
  }

  // The level within the user's bounds; one block in flight is the least.
  Level Bounded(Level level) const {
    int64_t largest = 1;
    for (const BlockShape& block : graph_.blocks) largest = std::max(largest, block.elements);
    int64_t runs = level.runs;
    const PlanBounds& bounds = options_.bounds;
    if (bounds.live_elements) runs = std::min(runs, *bounds.live_elements / largest);
    if (bounds.prefetch_elements) runs = std::min(runs, 1 + *bounds.prefetch_elements / largest);
    if (bounds.run_slots) runs = std::min(runs, *bounds.run_slots);
    level.runs = static_cast<int>(std::max<int64_t>(runs, 1));
    return level;
  }

  // Within `budget` as far as inputs can go to the drive; 0: they stay.
  Plan Build(const Level& wanted, int resident_gradients, int64_t budget) const {
    const Level level = Bounded(wanted);
    Plan plan;
    plan.precision = options_.precision;
    plan.world = options_.world;
    plan.micro_batches = options_.micro_batches;
    plan.on_nvme = options_.on_nvme;
    plan.trains = options_.trains;
    plan.commits_every_step = options_.commits_every_step;
    plan.clips = options_.clips;
    plan.host_budget_bytes = options_.host_budget_bytes;

    int64_t tile_elements = level.tile_elements;
    if (options_.tile_bytes > 0) {
      // The bytes are nearly proportional; only the padding of a segment to pages is not.
      tile_elements = std::min(tile_elements, options_.tile_bytes * kElementAlignment /
                                                  plan.precision.UnpaddedBytes(kElementAlignment));
    }
    tile_elements = std::max(tile_elements / kElementAlignment * kElementAlignment, kElementAlignment);
    while (options_.tile_bytes > 0 && tile_elements > kElementAlignment &&
           plan.precision.TotalBytes(tile_elements) > options_.tile_bytes) {
      tile_elements -= kElementAlignment;
    }

    std::vector<int64_t> sizes;
    for (const BlockShape& block : graph_.blocks)
      sizes.push_back(PartElements(block.elements, options_.world));
    const std::vector<int64_t> classes = ClassSizes(sizes, level.runs);
    std::vector<int> members(classes.size(), 0);
    int64_t tiles = 0;
    for (size_t b = 0; b < graph_.blocks.size(); ++b) {
      BlockPlan& block = plan.blocks.emplace_back();
      block.elements = sizes[b];
      block.tiles = options_.fixed_tiles.empty() ? CutTiles(block.elements, tile_elements)
                                                 : FixedTiles(options_.fixed_tiles[b]);
      block.private_tile_slot.assign(block.tiles.size(), -1);
      block.in_backward.assign(block.tiles.size(), 0);
      block.uses = uses_[b];
      while (classes[At(block.run_class)] < block.elements) ++block.run_class;
      ++members[At(block.run_class)];
      tiles += static_cast<int64_t>(block.tiles.size());
      for (const Tile& tile : block.tiles) plan.tile_elements = std::max(plan.tile_elements, tile.elements);
    }
    plan.positions = static_cast<int>(graph_.stages.size());
    plan.device = device_;
    KeepInputs(&plan, device_.apart ? device_.kept_inputs : plan.positions);
    for (size_t c = 0; c < classes.size(); ++c) {
      RunClass cls;
      cls.bytes = classes[c] * plan.world * plan.precision.weight_bytes();
      cls.slots = std::min(level.runs, members[c]);
      plan.run_classes.push_back(cls);
    }
    if (plan.trains) {
      // SGD without momentum has no state beside fp32 weights.
      const int64_t tile_bytes = std::max(plan.precision.StateBytes(plan.tile_elements), kPage);
      plan.tile_ring =
          static_cast<int>(std::clamp<int64_t>(level.ring_bytes / tile_bytes, level.least_ring, 64));
      plan.tile_ring = static_cast<int>(std::min<int64_t>(plan.tile_ring, tiles));
      int64_t most = options_.bounds.tile_slots.value_or(plan.tile_ring);
      if (options_.bounds.state_bytes) most = std::min(most, *options_.bounds.state_bytes / tile_bytes);
      plan.tile_ring = static_cast<int>(std::clamp<int64_t>(most, 1, plan.tile_ring));
    }
    PlaceGradients(&plan, level, resident_gradients);
    LayOut(&plan);
    if (plan.trains && options_.on_nvme && !device_.apart && resident_gradients == 0 && budget > 0) {
      SpillInputs(&plan, budget);
    }
    return plan;
  }

  // Inputs of the last `kept` stages stay where they are made.
  void KeepInputs(Plan* plan, int kept) const {
    plan->kept_inputs = kept;
    plan->input_ring = kInputRing;
    int64_t largest = 0, scratch = 0;
    for (const StageShape& stage : graph_.stages) largest = std::max(largest, stage.input_scratch_bytes);
    plan->input_slots.clear();
    for (int position = 0; position < plan->positions; ++position) {
      if (!plan->SpillsInput(position)) continue;
      scratch += AlignUp(largest, kPage) * plan->micro_batches;
      if (device_.apart)
        plan->input_slots.insert(plan->input_slots.end(), At(plan->micro_batches), {0, largest});
    }
    const int64_t initial = plan->trains ? InitialTensorBytes(graph_, plan->tile_elements) : 0;
    if (device_.apart) {
      // What the host holds for the device: a pass's batch, as its caller made it.
      plan->evaluate_micro_batches = device_.evaluate_micro_batches;
      plan->tensor_bytes = std::max(initial, HostTensorBytes(graph_, plan->micro_batches));
      return;
    }
    plan->input_scratch_bytes = scratch;
    plan->tensor_bytes = std::max(initial, ComputeTensorBytes(graph_, plan->micro_batches, plan->trains, kept,
                                                              &plan->evaluate_micro_batches));
  }

  // Sends as few inputs to the drive as the budget asks for: like a gradient, one costs a write and a read of
  // itself, and gradients go first.
  void SpillInputs(Plan* plan, int64_t budget) const {
    for (int kept = plan->positions - 1; kept >= kInputRing && plan->host_bytes() > budget; --kept)
      KeepInputs(plan, kept);
  }

  void PlaceGradients(Plan* plan, const Level& level, int resident_gradients) const {
    plan->gradient_rings.resize(plan->run_classes.size());
    if (!plan->trains) return;
    int resident = 0;
    std::vector<int> spilled(plan->run_classes.size(), 0);
    bool shares_accumulator = false;
    for (size_t b = 0; b < plan->blocks.size(); ++b) {
      BlockPlan& block = plan->blocks[b];
      // fp32 gradients are summed where they wait; one that several stages add to must stay in its place.
      const bool must_stay =
          !device_.apart && block.uses > 1 && !plan->needs_accumulator(static_cast<int>(b));
      if (must_stay || resident < resident_gradients) {
        block.gradient_slot = static_cast<int>(plan->gradient_slots.size());
        plan->gradient_slots.push_back({0, block.elements * plan->precision.gradient_bytes});
        ++resident;
      } else {
        ++spilled[At(block.run_class)];
      }
      if (!plan->needs_accumulator(static_cast<int>(b))) continue;
      if (block.uses == 1) shares_accumulator = true;
    }
    for (size_t c = 0; c < spilled.size(); ++c) {
      RunClass& ring = plan->gradient_rings[c];
      ring.bytes = plan->run_classes[c].bytes / plan->world / plan->precision.weight_bytes() *
                   plan->precision.gradient_bytes;
      ring.slots = std::min(level.gradient_ring, spilled[c]);
      ring.first_slot = static_cast<int>(plan->gradient_slots.size());
      for (int i = 0; i < ring.slots; ++i) plan->gradient_slots.push_back({0, ring.bytes});
    }
    if (shares_accumulator) {
      int64_t largest = 0;
      for (int b = 0; b < Count(); ++b) {
        if (plan->blocks[At(b)].uses == 1) largest = std::max(largest, AccumulatorBytes(*plan, b));
      }
      plan->accumulator_ring = std::min(level.gradient_ring, Count());
      for (int i = 0; i < plan->accumulator_ring; ++i) plan->accumulator_slots.push_back({0, largest});
    }
    for (size_t b = 0; b < plan->blocks.size(); ++b) {
      BlockPlan& block = plan->blocks[b];
      if (block.uses > 1 && plan->needs_accumulator(static_cast<int>(b))) {
        block.accumulator_slot = static_cast<int>(plan->accumulator_slots.size());
        plan->accumulator_slots.push_back({0, AccumulatorBytes(*plan, static_cast<int>(b))});
      }
    }
  }

  static int64_t AccumulatorBytes(const Plan& plan, int block) {
    return plan.run_elements(block) * plan.accumulator_bytes(block);
  }

  // Numbers the slots and gives each its place: shared runs by class, private runs, tiles, gradients,
  // accumulators.
  void LayOut(Plan* plan) const {
    plan->run_slots.clear();
    for (RunClass& cls : plan->run_classes) {
      cls.first_slot = static_cast<int>(plan->run_slots.size());
      for (int i = 0; i < cls.slots; ++i) plan->run_slots.push_back({0, cls.bytes});
    }
    for (BlockPlan& block : plan->blocks) {
      if (block.private_run_slot < 0) continue;
      block.private_run_slot = static_cast<int>(plan->run_slots.size());
      plan->run_slots.push_back({0, block.elements * plan->world * plan->precision.weight_bytes()});
    }
    plan->tile_slots.clear();
    bool spills = false;
    for (const RunClass& ring : plan->gradient_rings) spills |= ring.slots > 0;
    plan->tile_state_bytes = StateBytes(*plan, plan->tile_elements);
    plan->tile_gradient_offset = plan->tile_state_bytes;
    const int64_t ring_bytes =
        plan->tile_state_bytes +
        (spills ? AlignUp(plan->tile_elements * plan->precision.gradient_bytes, kPage) : 0);
    for (int i = 0; i < plan->tile_ring; ++i) plan->tile_slots.push_back({0, ring_bytes});
    for (BlockPlan& block : plan->blocks) {
      for (size_t t = 0; t < block.tiles.size(); ++t) {
        if (block.private_tile_slot[t] < 0) continue;
        block.private_tile_slot[t] = static_cast<int>(plan->tile_slots.size());
        // A spilled gradient is read beside the state, also where the state stays.
        const int64_t extra = block.gradient_slot < 0 ? ring_bytes - plan->tile_state_bytes : 0;
        plan->tile_slots.push_back({0, extra > 0 ? ring_bytes : StateBytes(*plan, block.tiles[t].elements)});
      }
    }
    int64_t offset = 0;
    for (std::vector<Slot>* slots : {&plan->run_slots, &plan->tile_slots, &plan->gradient_slots,
                                     &plan->accumulator_slots, &plan->input_slots}) {
      for (Slot& slot : *slots) {
        slot.offset = offset;
        offset += AlignUp(slot.bytes, kPage);
      }
    }
    plan->slot_bytes = offset;
    if (options_.copies_checkpoints && plan->on_nvme) {
      plan->checkpoint_bytes =
          AlignUp(plan->tile_elements * plan->precision.weight_bytes(), kPage) + plan->tile_state_bytes;
    }
    plan->network_bytes = plan->trains ? NetworkBytes(plan->world) : 0;
    plan->arena_bytes = AlignUp(offset + plan->checkpoint_bytes + plan->network_bytes, kHugePage);
  }

  static int64_t StateBytes(const Plan& plan, int64_t elements) {
    return plan.state_segment_offset(static_cast<int>(plan.precision.segment_bytes.size()), elements);
  }

  void MakeAllPrivate(Plan* plan) const {
    for (BlockPlan& block : plan->blocks) {
      block.private_run_slot = 0;  // numbered by LayOut
      if (plan->trains) std::fill(block.private_tile_slot.begin(), block.private_tile_slot.end(), 0);
    }
    for (RunClass& cls : plan->run_classes) cls.slots = 0;
    plan->tile_ring = 0;
  }

  static int64_t WeightBytes(const Plan& plan, const BlockPlan& block) {
    return AlignUp(block.elements * plan.world * plan.precision.weight_bytes(), kPage);
  }
  static int64_t BytesOf(const Plan& plan, const std::vector<char>& stays) {
    int64_t bytes = 0;
    for (size_t b = 0; b < stays.size(); ++b) bytes += stays[b] != 0 ? WeightBytes(plan, plan.blocks[b]) : 0;
    return bytes;
  }

  // Most elements that are used between two uses of the block that follow each other, from step to step.
  int64_t LongestGap(int block) const {
    int64_t since = 0, longest = 0;
    bool seen = false;
    for (size_t i = 0; i < 2 * walk_.size(); ++i) {
      const int used = walk_[i % walk_.size()];
      if (used == block) {
        if (seen) longest = std::max(longest, since);
        seen = true;
        since = 0;
      } else {
        since += graph_.blocks[At(used)].elements;
      }
    }
    return longest;
  }

  // Blocks whose weights stay, within `free` bytes and the user's bounds: those whose reads they save are
  // worth most for their memory. Small ones that the user wants to persist come first.
  std::vector<char> ChooseWeights(const Plan& plan, int64_t free) const {
    const PlanBounds& bounds = options_.bounds;
    std::vector<char> stays(plan.blocks.size(), 0);
    if (bounds.persistent_block_elements || bounds.persistent_elements) {
      int64_t may_persist = bounds.persistent_elements.value_or(std::numeric_limits<int64_t>::max());
      for (size_t b = 0; b < plan.blocks.size(); ++b) {
        const BlockPlan& block = plan.blocks[b];
        if (block.elements > bounds.persistent_block_elements.value_or(100'000)) continue;  // DeepSpeed's
        if (block.elements > may_persist || WeightBytes(plan, block) > free) continue;
        stays[b] = 1;
        may_persist -= block.elements;
        free -= WeightBytes(plan, block);
      }
    }
    if (bounds.placement == Placement::kCpu) return stays;
    if (bounds.resident_elements) {
      free = std::min(free, *bounds.resident_elements * plan.precision.weight_bytes());
    }
    // What the shared slots save by themselves is not saved again by staying.
    std::vector<std::vector<int>> uses(plan.run_classes.size());
    std::vector<int> members(plan.run_classes.size(), 0);
    for (const int block : walk_) uses[At(plan.blocks[At(block)].run_class)].push_back(block);
    for (const BlockPlan& block : plan.blocks) ++members[At(block.run_class)];
    std::vector<Keepable> items(plan.blocks.size());
    for (size_t c = 0; c < uses.size(); ++c) {
      const RunClass& cls = plan.run_classes[c];
      if (members[c] <= cls.slots) continue;  // the class keeps all its blocks anyway
      const Replacement replacement = BeladyMisses(uses[c], Count(), std::max(1, cls.slots), 3);
      for (size_t b = 0; b < items.size(); ++b) {
        if (At(plan.blocks[b].run_class) != c || stays[b] != 0) continue;
        if (bounds.reuse_elements && LongestGap(static_cast<int>(b)) > *bounds.reuse_elements) continue;
        // A block that its class happens to keep has nothing to save now, but has once others stay.
        const int64_t bytes = WeightBytes(plan, plan.blocks[b]);
        items[b] = {
            bytes, static_cast<double>(bytes) * std::max(0.5, static_cast<double>(replacement.misses_of[b]))};
      }
    }
    const std::vector<char> chosen = ChooseResident(items, free);
    for (size_t b = 0; b < stays.size(); ++b) {
      if (chosen[b] != 0) stays[b] = 1;
    }
    // As many as a class has shared slots need none of their own once the others have.
    std::vector<int> shared = members;
    for (size_t b = 0; b < stays.size(); ++b) shared[At(plan.blocks[b].run_class)] -= stays[b];
    for (size_t b = 0; b < stays.size(); ++b) {
      const auto c = At(plan.blocks[b].run_class);
      if (stays[b] == 0 || shared[c] >= plan.run_classes[c].slots) continue;
      stays[b] = 0;
      ++shared[c];
    }
    return stays;
  }

  const std::array<Spending, 3>& spendings() const {
    return options_.commits_every_step ? kSpendings : kLateSpendings;
  }

  // Blocks that stay with all their state, first come, first served: each saves as much for a byte as any
  // other. Adds them to those whose weights stay; returns the bytes that this takes.
  int64_t KeepBlocks(const Plan& plan, int64_t free, std::vector<char>* weights,
                     std::vector<char>* whole) const {
    const int64_t ring = plan.tile_slots.empty() ? 0 : plan.tile_slots.front().bytes;
    const bool spills = ring > plan.tile_state_bytes;  // a gradient is read beside the state
    int64_t elements = options_.bounds.resident_elements.value_or(std::numeric_limits<int64_t>::max());
    int64_t taken = 0;
    for (size_t b = 0; b < plan.blocks.size(); ++b) {
      const BlockPlan& block = plan.blocks[b];
      int64_t bytes = (*weights)[b] != 0 ? 0 : WeightBytes(plan, block);
      for (const Tile& tile : block.tiles) {
        bytes += AlignUp(spills ? ring : StateBytes(plan, tile.elements), kPage);
      }
      if (bytes > free - taken || block.elements > elements) continue;
      taken += bytes;
      elements -= block.elements;
      (*weights)[b] = (*whole)[b] = 1;
    }
    return taken;
  }

  // The working set of `level`, and the rest of the budget spent in the given order.
  Plan Spent(const Level& level, const Spending& spending, int64_t budget) const {
    const PlanBounds& bounds = options_.bounds;
    Plan plan = WorkingSet(level, budget);
    std::vector<char> weights(plan.blocks.size(), 0), whole(plan.blocks.size(), 0);
    int64_t stay_bytes = 0;  // of weights and state, beyond what `plan` has
    int64_t tiles = 0, tile_bytes = 0;
    int64_t may_stay =
        bounds.placement == Placement::kConst ? bounds.const_bytes : std::numeric_limits<int64_t>::max();
    auto left = [&] { return budget - plan.host_bytes() - stay_bytes - kHugePage; };
    auto keep_weights = [&] {
      weights = ChooseWeights(plan, std::min(left(), may_stay));
      const int64_t bytes = BytesOf(plan, weights);
      stay_bytes += bytes;
      may_stay -= bytes;
    };
    const bool all_weights = bounds.placement == Placement::kCuda;
    if (all_weights) keep_weights();
    for (const Kind kind : spending.order) {
      if (kind == Kind::kGradients && plan.trains) {
        // The bytes grow with the number of gradients that stay.
        int low = 0, high = Count();
        while (low < high) {
          const int middle = (low + high + 1) / 2;
          const int64_t more = stay_bytes > 0 ? stay_bytes + kHugePage : 0;
          if (Build(level, middle, budget).host_bytes() + more <= budget) {
            low = middle;
          } else {
            high = middle - 1;
          }
        }
        // Without any, the working set stays as it was cut to leave room for what must stay.
        if (low > 0) plan = Build(level, low, budget);
      } else if (kind == Kind::kWeights && !all_weights) {
        keep_weights();
      } else if (kind == Kind::kBlocks && plan.trains && bounds.placement != Placement::kCpu) {
        const int64_t bytes = KeepBlocks(plan, std::min(left(), may_stay), &weights, &whole);
        stay_bytes += bytes;
        may_stay -= bytes;
      } else if (kind == Kind::kState && plan.trains && bounds.placement != Placement::kCpu) {
        tile_bytes = plan.tile_slots.front().bytes + kPage;
        const auto share =
            static_cast<int64_t>(static_cast<double>(std::max<int64_t>(left(), 0)) * bounds.state_fraction);
        tiles = std::min(plan.tile_count(), std::min(share, std::max<int64_t>(may_stay, 0)) / tile_bytes);
        stay_bytes += tiles * tile_bytes;
        may_stay -= tiles * tile_bytes;
      }
    }
    for (size_t b = 0; b < plan.blocks.size(); ++b) {
      BlockPlan& block = plan.blocks[b];
      if (weights[b] != 0) block.private_run_slot = 0;  // numbered by LayOut
      for (int& slot : block.private_tile_slot) {
        if (whole[b] != 0 || tiles-- > 0) slot = 0;
      }
    }
    LayOut(&plan);
    return plan;
  }

  // One line about a candidate that was taken.
  std::string Chosen(const Plan& plan, const Spending& spending, double seconds) const {
    int gradients = 0, weights = 0;
    int64_t state = 0;
    for (const BlockPlan& block : plan.blocks) {
      gradients += block.gradient_slot >= 0 ? 1 : 0;
      weights += block.private_run_slot >= 0 ? 1 : 0;
      for (const int slot : block.private_tile_slot) state += slot >= 0 ? 1 : 0;
    }
    int runs = 0;
    for (const RunClass& cls : plan.run_classes) runs += cls.slots;
    const double early = plan.in_backward_share();
    return absl::StrFormat(
        "placement %s: %d blocks of weights and %d tiles of %s in flight; of %d blocks the gradients of %d "
        "and the weights of %d stay in host memory, and the state of %d of %d tiles; memory goes to %s; "
        "%.0f%% of the tiles are updated in backward; a step of %.3g s",
        std::string(PlacementName(options_.bounds.placement)), runs, plan.tile_ring,
        FormatBytes(plan.tile_state_bytes), Count(), gradients, weights, state, plan.tile_count(),
        spending.words, 100 * early, seconds);
  }

  // Counted from the program itself, in its steady state.
  void CountBytes(Plan* plan) const {
    if (!plan->trains) return;
    for (size_t b = 0; b < plan->blocks.size(); ++b) {
      for (size_t t = 0; t < plan->blocks[b].tiles.size(); ++t) {
        if (plan->written_late(static_cast<int>(b), static_cast<int>(t)))
          plan->late_write_bytes += plan->precision.TotalBytes(plan->blocks[b].tiles[t].elements);
      }
    }
    ProgramBuilder builder(graph_, *plan, 1);
    builder.Append(Pass::kTrain);
    builder.Append(Pass::kTrain);
    for (const Op& op : builder.Append(Pass::kTrain)) {
      if (op.redo) continue;
      if (op.lane == Lane::kRead) plan->nvme_read_bytes += op.bytes;
      if (op.lane == Lane::kWrite) plan->nvme_write_bytes += op.bytes;
      if (op.lane == Lane::kCopyIn) plan->device.h2d_bytes += op.bytes;
      if (op.lane == Lane::kCopyOut) plan->device.d2h_bytes += op.bytes;
    }
  }

  const ModelGraph& graph_;
  const PlanOptions& options_;
  const DevicePlan device_;
  std::vector<int> uses_;
  std::vector<int> walk_;  // blocks in the order of their uses in a step
};

absl::Status Validate(const ModelGraph& graph, const PlanOptions& options) {
  if (graph.blocks.empty() || graph.stages.empty()) {
    return absl::InvalidArgumentError("a model needs at least one block and one stage");
  }
  if (options.micro_batches < 1)
    return absl::InvalidArgumentError("at least one micro-batch a step is needed");
  if (options.world < 1) return absl::InvalidArgumentError("at least one rank is needed");
  if (!options.fixed_tiles.empty() && options.fixed_tiles.size() != graph.blocks.size()) {
    return absl::InvalidArgumentError(absl::StrCat("tiles of ", options.fixed_tiles.size(),
                                                   " blocks for a model of ", graph.blocks.size()));
  }
  std::set<int> used;
  for (const StageShape& stage : graph.stages) {
    if (stage.block < 0 || At(stage.block) >= graph.blocks.size()) {
      return absl::InvalidArgumentError(absl::StrCat("stage ", stage.name, " names block ", stage.block,
                                                     " of a model of ", graph.blocks.size(), " blocks"));
    }
    used.insert(stage.block);
  }
  for (size_t b = 0; b < graph.blocks.size(); ++b) {
    const BlockShape& block = graph.blocks[b];
    if (block.elements <= 0 || block.elements % kElementAlignment != 0) {
      return absl::InvalidArgumentError(absl::StrCat("block ", block.name, " has ", block.elements,
                                                     " elements: not a positive multiple of ",
                                                     kElementAlignment));
    }
    if (!options.fixed_tiles.empty()) {
      int64_t sum = 0;
      for (const int64_t elements : options.fixed_tiles[b]) {
        if (elements <= 0 || elements % kElementAlignment != 0) sum = -1;
        if (sum >= 0) sum += elements;
      }
      if (const int64_t part = PartElements(block.elements, options.world); sum != part) {
        return absl::InvalidArgumentError(
            absl::StrCat("the tiles given for block ", block.name, " do not make its ", part, " elements"));
      }
    }
    if (used.count(static_cast<int>(b)) == 0) {
      return absl::InvalidArgumentError(absl::StrCat("block ", block.name, " is used by no stage"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<Tile> CutTiles(int64_t elements, int64_t tile_elements) {
  const int64_t count = (elements + tile_elements - 1) / tile_elements;
  const int64_t each = AlignUp((elements + count - 1) / count, kElementAlignment);
  std::vector<Tile> tiles;
  for (int64_t offset = 0; offset < elements; offset += each) {
    tiles.push_back({offset, std::min(each, elements - offset)});
  }
  return tiles;
}

absl::StatusOr<Plan> MakePlan(const ModelGraph& graph, const PlanOptions& options) {
  if (absl::Status status = Validate(graph, options); !status.ok()) return status;
  absl::StatusOr<DevicePlan> device =
      PlanDevice(graph, options.precision, options.micro_batches, options.trains, options.device);
  if (!device.ok()) return device.status();
  if (device->apart && options.world > 1) {
    return absl::InvalidArgumentError("a device apart under several ranks is not there yet: use the cpu");
  }
  return Planner(graph, options, *std::move(device)).Make();
}

}  // namespace penstock::tiering
