// Placement under hard budgets.
//
// The working set comes first: without run slots, tile slots and LibTorch's tensors nothing runs. It is tried
// from comfortable (three blocks and 48 MiB of tiles in flight) down to the least that works. What is left of
// the budget is spent where a byte of memory saves most bytes of traffic per step:
//   weights in host memory      save up to 4 bytes of traffic for 2 of memory (a read in forward and one in
//                               backward), and what they leave of a clipped step's forward can be written
//                               later
//   gradients in host memory    save 4 for 2 (a 16-bit write and a read)
//   state in host memory        saves 1 for 1 (its read; every step is durable, so the write stays)
// Which of these saves most time depends on the machine (where backward has the drive to itself, only
// what forward reads counts), so several orders of spending are compared as well.
#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/index.h"
#include "base/status_macros.h"
#include "tiering/plan/byte_size.h"
#include "tiering/plan/plan.h"
#include "tiering/plan/plan_layout.h"
#include "tiering/plan/resident_set.h"
#include "tiering/planner/update_order.h"
#include "tiering/program/step_ops.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

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

// Beside adapters, whose state is little: the memory of its tiles is worth more to gradients and weights.
constexpr Level kOfAdapters = {.runs = 3,
                               .tile_elements = 1 << 20,
                               .ring_bytes = 24 * kMiB,
                               .least_ring = 4,
                               .gradient_ring = 2,
                               .adapter_tile_elements = 1 << 18};

// And with less memory for the sums of blocks that several stages use: all levels with them on the drive are
// compared where they would take more than this share of the budget; else the likeliest (WithoutSums).
constexpr double kSumsShare = 0.5;

// What the memory beside the working set is spent on, in this order.
enum class SpendOn : uint8_t { kGradients, kWeights, kState, kBlocks };
struct Spending {
  std::array<SpendOn, 3> order;
  const char* words;
};
constexpr std::array<Spending, 3> kSpendings = {{
    {{SpendOn::kWeights, SpendOn::kGradients, SpendOn::kState}, "weights, then gradients, then state"},
    {{SpendOn::kGradients, SpendOn::kWeights, SpendOn::kState}, "gradients, then weights, then state"},
    {{SpendOn::kState, SpendOn::kWeights, SpendOn::kGradients}, "state, then weights, then gradients"},
}};
// Where what stays in host memory is not written every step: a byte of a whole block saves its reads and its
// write, 26 for 12.
constexpr std::array<Spending, 3> kLateSpendings = {{
    {{SpendOn::kBlocks, SpendOn::kGradients, SpendOn::kState}, "whole blocks, then gradients, then state"},
    {{SpendOn::kGradients, SpendOn::kBlocks, SpendOn::kState}, "gradients, then whole blocks, then state"},
    {{SpendOn::kBlocks, SpendOn::kState, SpendOn::kGradients}, "whole blocks, then state, then gradients"},
}};

// Plans are as fast as each other that differ by no more than this: machines drift by more. Of those fewer
// bytes count, which wear drives out and are certain; of those that move as many the step that is clipped,
// and then the first, which is the most comfortable.
constexpr double kAsFast = 1.005;
constexpr double kAsManyBytes = 1.05;

// And to hand the processor what would fit on a device: what it does beside is not disturbed in a simulation.
constexpr double kWorthTheProcessor = 0.99;

class Planner {
 public:
  Planner(const ModelGraph& graph, const PlanOptions& options, DevicePlan device)
      : graph_(graph),
        options_(options),
        layout_(graph, options, std::move(device)),
        resident_(graph, options) {}

  absl::StatusOr<Plan> Make() {
    const int64_t budget = options_.host_memory_budget_bytes;
    if (!options_.on_nvme) {
      Plan plan = layout_.Build(kLevels[0], /*resident_gradients=*/Count(), /*budget=*/0);
      PlanLayout::MakeAllPrivate(&plan);
      layout_.LayOut(&plan);
      plan.least_host_memory_bytes = plan.host_bytes();
      plan.reasons = {"everything stays in memory: there is no drive"};
      if (budget > 0 && plan.host_bytes() > budget) return TooSmall(plan.host_bytes(), plan);
      KeepSecondVersions(&plan);
      if (options_.update_order == UpdateOrder::kInBackward && !plan.speculates && ProcessorUpdates(plan))
        plan.reasons.push_back(WhyNotInBackward(plan));
      CountBytes(&plan);
      return plan;
    }
    const int64_t least = Least();
    if (budget > 0 && least > budget)
      return TooSmall(least, layout_.Build(Levels(budget).back(), 0, /*budget=*/1));
    Choice choice = Best(budget);
    if (options_.compares_policies && options_.bounds.placement == Placement::kAuto && budget > 0)
      TryFixedPolicies(&choice);
    Plan plan = std::move(choice.plan);
    plan.least_host_memory_bytes = least;
    CountBytes(&plan);
    if (const int64_t once_more = plan.tensor_norms ? NormBytes(plan) : 0; once_more > 0) {
      plan.reasons.push_back(
          absl::StrCat("a step reads ", FormatBytes(once_more),
                       " of weights, state and gradients once more: LAMB's trust ratio of a parameter needs "
                       "the norms of all of it before any of it is updated"));
    }
    if (plan.input_scratch_bytes > 0) plan.reasons.push_back(SpilledInputs(plan));
    if (plan.previewed_share() > 0) plan.reasons.push_back(Previewed(plan));
    if (options_.prefer == Prefer::kTime && plan.trains && !MayPreview(options_)) {
      plan.reasons.push_back(
          "prefer time: a clipped step reads more to be shorter only of one rank, on the processor, where "
          "every "
          "step is durable, gradients are clipped and the optimizer is not LAMB");
    }
    return plan;
  }

 private:
  struct Choice {
    Plan plan;
    double seconds = 0;  // of a step; 0: nothing was simulated
  };

  int Count() const { return static_cast<int>(graph_.blocks.size()); }

  // `auto` is not slower than what a user could fix: under each of these bounds the search sizes the working
  // set with other room beside it, which now and then finds a better whole.
  void TryFixedPolicies(Choice* choice) const {
    if (!choice->plan.trains || !FewTilesToSimulate(choice->plan)) return;
    std::vector<PlanBounds> policies(2, options_.bounds);
    policies[0].placement = Placement::kCuda;
    policies[1].placement = Placement::kConst;
    policies[1].const_bytes = StayingBytes(choice->plan) / 2;
    if (options_.bounds.resident_elements != 0) {
      policies.push_back(options_.bounds);
      policies.back().resident_elements = 0;
    }
    for (const PlanBounds& policy : policies) {
      PlanOptions options = options_;
      options.bounds = policy;
      const Planner planner(graph_, options, layout_.device());
      if (planner.Least() > options_.host_memory_budget_bytes) continue;
      Choice other = planner.Best(options_.host_memory_budget_bytes);
      if (!FewTilesToSimulate(other.plan) || other.seconds * kAsFast >= choice->seconds) continue;
      // Weights that stream are read twice: not for many more bytes.
      if (policy.resident_elements == 0 && BytesMoved(other.plan) > BytesMoved(choice->plan) * kAsManyBytes)
        continue;
      *choice = std::move(other);
    }
  }

  // Of weights and state.
  static int64_t StayingBytes(const Plan& plan) {
    int64_t bytes = 0;
    for (const BlockPlan& block : plan.blocks) {
      if (block.private_weight_slot.valid()) bytes += plan.weight_slots[block.private_weight_slot].bytes;
      for (const TileSlot slot : block.private_tile_slot) {
        if (slot.valid()) bytes += plan.tile_slots[slot].bytes;
      }
    }
    return bytes;
  }

  // Those to choose from under a budget; 0: all. The last is the leanest.
  std::vector<Level> Levels(int64_t budget) const {
    std::vector<Level> levels(kLevels.begin(), kLevels.end());
    if (has_adapters() && options_.keeps_frozen_apart()) levels.insert(levels.begin() + 1, kOfAdapters);
    const int64_t sums = layout_.SumsThatMayLeave();
    const auto fits = [&] {
      return std::any_of(kLevels.begin(), kLevels.end(),
                         [&](const Level& level) { return budget > 0 && Fits(level, budget); });
    };
    if (sums > 0 && !(static_cast<double>(sums) <= kSumsShare * static_cast<double>(budget) && fits())) {
      for (Level level : kLevels) {
        level.sums_leave = true;
        levels.push_back(level);
      }
    }
    // Tiles that are given may be of a plan with one block of weights in flight, and go on in its budget.
    if (!options_.fixed_tiles.empty()) {
      levels.push_back(levels.back());
      levels.back().runs = 1;
    }
    return levels;
  }

  // Where the sums of blocks that several stages use take memory, they are worth it or not: with them on the
  // drive between uses the level that is the fastest otherwise, and the most comfortable that fits then.
  std::vector<Level> WithoutSums(Level fastest, int64_t budget) const {
    std::vector<Level> levels;
    if (fastest.sums_leave || layout_.SumsThatMayLeave() == 0) return levels;
    fastest.sums_leave = true;
    levels.push_back(fastest);
    for (Level level : kLevels) {
      level.sums_leave = true;
      if (!Fits(level, budget)) continue;
      levels.push_back(level);
      break;
    }
    return levels;
  }

  int64_t Least() const {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Level& level : Levels(/*budget=*/0)) {
      const Plan plan = layout_.Build(level, 0, /*budget=*/1);
      least = std::min(least, plan.host_bytes() + RequiredBytes(plan));
    }
    return least;
  }

  // What must stay by the user's word, beyond the working set.
  int64_t RequiredBytes(const Plan& plan) const {
    if (options_.bounds.placement != Placement::kCuda) return 0;
    return ResidentSet::BytesOf(plan, resident_.ChooseWeights(plan, std::numeric_limits<int64_t>::max())) +
           kHugePage;
  }

  // The working set of a level, with room in the budget for what must stay.
  Plan WorkingSet(const Level& level, int64_t budget) const {
    Plan plan = layout_.Build(level, 0, budget);
    const int64_t required = RequiredBytes(plan);
    return required == 0 ? plan : layout_.Build(level, 0, std::max<int64_t>(1, budget - required));
  }

  bool Fits(const Level& level, int64_t budget) const {
    const Plan plan = WorkingSet(level, budget);
    return plan.host_bytes() + RequiredBytes(plan) <= budget;
  }

  absl::Status TooSmall(int64_t least, const Plan& plan) const {
    return absl::FailedPreconditionError(
        absl::StrCat("a host memory budget of ", options_.host_memory_budget_bytes,
                     " bytes is too small: the least that works is ", least, " bytes (",
                     (least + kMiB - 1) / kMiB, "M; ", plan.ledger().Listed(), ")",
                     options_.on_nvme ? "; a smaller micro-batch or sequence takes less"
                                      : "; with `offload nvme` less would do"));
  }

  // A plan that is compared with others, and what came of it in virtual time.
  struct Candidate {
    Plan plan;
    Level level;
    const Spending* spending;
    OrderedStep step;
  };
  struct Compared {
    int64_t budget = 0;
    std::vector<Candidate> candidates;
    std::set<std::vector<int64_t>> seen;  // what differs between plans: the others are the same to the byte
    bool more = true;      // false: there are too many tiles to compare, the first one is taken
    size_t with_sums = 0;  // candidates before those that keep no sums
  };

  // Every level that fits, with the rest of the budget spent in every order; the one whose step is the
  // shortest in virtual time. More memory for the pipeline and more for residency compete, and what should
  // stay first depends on how compute, reads and writes compare.
  Choice Best(int64_t budget) const {
    if (budget == 0) {
      Plan plan = layout_.Build(kLevels[0], Count(), /*budget=*/0);
      const double seconds = Order(/*thorough=*/true, &plan).seconds;
      return {std::move(plan), seconds};
    }
    Compared compared;
    compared.budget = budget;
    CompareLevels(&compared);
    CompareSpendings(&compared);
    return FastestOf(std::move(compared));
  }

  // Compares one more plan; false where there is nothing to compare it with, and it is taken.
  bool Consider(const Level& level, const Spending& spending, Compared* compared) const {
    Plan plan = FillBudget(level, spending, compared->budget);
    if (!compared->seen.insert(Signature(plan)).second) return true;
    const bool simulated = plan.trains && !TooManyTilesToSimulate(plan);
    if (!simulated && !compared->candidates.empty()) return true;
    const OrderedStep step = Order(/*thorough=*/false, &plan);
    compared->candidates.push_back({std::move(plan), level, &spending, step});
    return simulated;
  }

  // Each level that fits, with the rest of the budget spent as it most often does best.
  void CompareLevels(Compared* compared) const {
    for (const Level& level : Levels(compared->budget)) {
      if (!compared->more) return;
      Level fitting = level;
      if (!Fits(level, compared->budget)) {
        fitting.runs = 1;
        if (!Fits(fitting, compared->budget)) continue;
      }
      compared->more = Consider(fitting, first_spending(), compared);
      if (!compared->more || !FewTilesToSimulate(compared->candidates.back().plan)) continue;
      Consider(fitting, spendings()[1], compared);
      fitting.runs = 1;
      Consider(fitting, spendings()[0], compared);
    }
  }

  // For the levels that do best with the first way to spend: the other ways, and one block of weights in
  // memory at a time, which leaves more for what stays.
  void CompareSpendings(Compared* compared) const {
    const std::vector<Candidate>& candidates = compared->candidates;
    std::vector<const Candidate*> fastest;
    fastest.reserve(candidates.size());
    for (const Candidate& candidate : candidates) fastest.push_back(&candidate);
    std::stable_sort(fastest.begin(), fastest.end(), [](const Candidate* x, const Candidate* y) {
      return x->step.seconds < y->step.seconds;
    });
    std::vector<Level> promising;
    for (size_t i = 0; compared->more && i < std::min<size_t>(2, fastest.size()); ++i) {
      promising.push_back(fastest[i]->level);
      if (!FewTilesToSimulate(fastest[i]->plan)) continue;
      promising.push_back(fastest[i]->level);
      promising.back().runs = 1;
    }
    for (const Level& level : promising) {
      for (const Spending& spending : spendings()) Consider(level, spending, compared);
    }
    compared->with_sums = candidates.size();
    if (!compared->more) return;
    for (const Level& level : WithoutSums(promising.front(), compared->budget)) {
      for (const Spending& spending : spendings()) {
        Consider(level, spending, compared);
        if (!FewTilesToSimulate(candidates.front().plan)) break;
      }
    }
  }

  Choice FastestOf(Compared compared) const {
    std::vector<Candidate>& candidates = compared.candidates;
    std::vector<size_t> order(candidates.size());
    double worst_seconds = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      order[i] = i;
      worst_seconds = std::max(worst_seconds, candidates[i].step.seconds);
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) {
      return candidates[x].step.seconds < candidates[y].step.seconds;
    });
    LeaveFew(compared, &order);
    // The fastest few with their tiles' orders chosen with care.
    for (const size_t i : order) candidates[i].step = Order(/*thorough=*/true, &candidates[i].plan);
    LeaveBest(compared, &order);
    const size_t best = order.front();
    Plan plan = std::move(candidates[best].plan);
    const double seconds = candidates[best].step.seconds;
    plan.reasons = {Chosen(plan, *candidates[best].spending, seconds)};
    if (candidates.size() > 1) {
      plan.reasons.push_back(absl::StrFormat(
          "compared: %d working sets and ways to spend the rest of the budget, from %.3g s to %.3g s a step",
          candidates.size(), seconds, worst_seconds));
    }
    return {std::move(plan), seconds};
  }

  // Leaves of `order` those whose value is within `tolerance` of the least.
  template <class Value>
  static void LeaveLeast(const Value& value, double tolerance, std::vector<size_t>* order) {
    double least = std::numeric_limits<double>::max();
    for (const size_t i : *order) least = std::min(least, value(i));
    std::erase_if(*order, [&](size_t i) { return value(i) > least * tolerance; });
  }

  // Of candidates from the fastest to the slowest those that are worth a thorough look, from comfortable to
  // lean.
  void LeaveFew(const Compared& compared, std::vector<size_t>* order) const {
    const std::vector<Candidate>& candidates = compared.candidates;
    if (FewTilesToSimulate(candidates[order->front()].plan)) {
      int kept = 4, leaving = 1;  // beside the former, not in their place
      std::erase_if(*order, [&](size_t i) { return (i < compared.with_sums ? kept : leaving)-- <= 0; });
    } else {
      // One, since that takes long: of those that are as fast one that wears the drives least.
      LeaveLeast([&](size_t i) { return candidates[i].step.seconds; }, kAsFast, order);
      LeaveLeast([&](size_t i) { return BytesMoved(candidates[i].plan); }, kAsManyBytes, order);
      LeaveLeast([&](size_t i) { return BytesWritten(candidates[i].plan); }, kAsFast, order);
      order->resize(1);
    }
    std::sort(order->begin(), order->end());
  }

  // Of those that are as fast the ones that move the fewest bytes, or whose clipped step is the shortest, as
  // is preferred.
  void LeaveBest(const Compared& compared, std::vector<size_t>* order) const {
    const std::vector<Candidate>& candidates = compared.candidates;
    LeaveLeast([&](size_t i) { return candidates[i].step.seconds; }, kAsFast, order);
    if (order->size() == 1) return;
    const auto clipped = [&](size_t i) { return candidates[i].step.clipped_seconds; };
    if (options_.prefer == Prefer::kTime) LeaveLeast(clipped, kAsFast, order);
    LeaveLeast([&](size_t i) { return BytesMoved(candidates[i].plan); }, kAsManyBytes, order);
    LeaveLeast(clipped, kAsFast, order);
  }

  // Some of what is trained; the rest lives on a device.
  static bool ProcessorUpdates(const Plan& plan) {
    for (const BlockIndex b : plan.blocks.indices())
      if (plan.trains && plan.blocks[b].trains && !plan.on_device(b)) return true;
    return false;
  }

  // Without a drive, of tiles that are asked to be.
  static std::string WhyNotInBackward(const Plan& plan) {
    if (!plan.keeps_second_versions()) {
      return "order in_backward: without a drive only where one rank computes on a device with its own "
             "memory, "
             "and not with LAMB; all tiles are updated in the next forward";
    }
    return "order in_backward: the host memory budget has no room for second versions of tiles; all are "
           "updated "
           "in the next forward";
  }

  // Without a drive, of tiles that are updated in backward.
  void KeepSecondVersions(Plan* plan) const {
    int64_t left = RoomForSecondVersions(options_, *plan);
    const OrderedStep step = Order(/*thorough=*/true, plan);
    for (BlockPlan& block : plan->blocks) {
      for (const TileIndex t : block.tiles.indices()) {
        if (block.speculative_update[t] == 0) continue;
        const int64_t bytes = AlignUp(plan->precision.TotalBytes(block.tiles[t].elements), kPage);
        block.speculative_update[t] = bytes <= left ? 1 : 0;
        if (bytes > left) continue;
        left -= bytes;
        block.second_slot[t] = TileSlot(0);  // numbered by LayOut
      }
    }
    layout_.LayOut(plan);
    plan->speculates = plan->second_versions > 0;
    if (!plan->speculates) return;
    plan->reasons.push_back(absl::StrFormat(
        "%.0f%% of the tiles are updated beside backward: host memory has second versions of them, %s%s",
        100 * plan->speculative_share(), FormatBytes(plan->second_version_bytes()),
        step.seconds > 0 ? absl::StrFormat("; a step of %.3g s, and of %.3g s while all are clipped",
                                           step.seconds, step.clipped_seconds)
                         : ""));
  }

  // Chooses which tiles are updated in backward.
  OrderedStep Order(bool thorough, Plan* plan) const {
    return ChooseUpdateOrder(graph_, options_, thorough, plan);
  }

  static std::vector<int64_t> Signature(const Plan& plan) {
    std::vector<int64_t> signature = {plan.tile_elements, plan.tile_ring, plan.saved_activations};
    for (const WeightClass& cls : plan.weight_classes)
      signature.insert(signature.end(), {cls.bytes, cls.slots});
    for (const BlockPlan& block : plan.blocks) {
      signature.push_back(block.private_weight_slot.valid());
      signature.push_back(block.gradient_slot.valid());
      signature.push_back(block.accumulator_slot.valid());
      signature.push_back(std::count_if(block.private_tile_slot.begin(), block.private_tile_slot.end(),
                                        [](TileSlot slot) { return slot.valid(); }));
    }
    return signature;
  }

  const std::array<Spending, 3>& spendings() const {
    return options_.commits_every_step ? kSpendings : kLateSpendings;
  }

  bool has_adapters() const {
    return std::any_of(graph_.blocks.begin(), graph_.blocks.end(), [](const BlockShape& block) {
      return block.trains && block.trained_from > block.elements / 2;
    });
  }

  // What is tried first, and taken where there are too many tiles to compare. Beside adapters weights are
  // nearly all that there is, and gradients, which would be written, nearly nothing.
  const Spending& first_spending() const { return spendings()[has_adapters() ? 1 : 0]; }

  // The working set of `level`, and the rest of the budget spent in the given order.
  Plan FillBudget(const Level& level, const Spending& spending, int64_t budget) const {
    const PlanBounds& bounds = options_.bounds;
    Plan plan = WorkingSet(level, budget);
    PerBlock<char> weights(plan.blocks.size(), 0), whole(plan.blocks.size(), 0);
    int64_t stay_bytes = 0;  // of weights and state, beyond what `plan` has
    int64_t tiles = 0, tile_bytes = 0;
    int64_t may_stay =
        bounds.placement == Placement::kConst ? bounds.const_bytes : std::numeric_limits<int64_t>::max();
    auto left = [&] { return budget - plan.host_bytes() - stay_bytes - kHugePage; };
    auto keep_weights = [&] {
      weights = resident_.ChooseWeights(plan, std::min(left(), may_stay));
      const int64_t bytes = ResidentSet::BytesOf(plan, weights);
      stay_bytes += bytes;
      may_stay -= bytes;
    };
    const bool all_weights = bounds.placement == Placement::kCuda;
    if (all_weights) keep_weights();
    for (const SpendOn kind : spending.order) {
      if (kind == SpendOn::kGradients && plan.trains) {
        // The bytes grow with the number of gradients that stay.
        int low = 0, high = Count();
        while (low < high) {
          const int middle = (low + high + 1) / 2;
          const int64_t more = stay_bytes > 0 ? stay_bytes + kHugePage : 0;
          if (layout_.Build(level, middle, budget).host_bytes() + more <= budget) {
            low = middle;
          } else {
            high = middle - 1;
          }
        }
        // Without any, the working set stays as it was cut to leave room for what must stay.
        if (low > 0) plan = layout_.Build(level, low, budget);
      } else if (kind == SpendOn::kWeights && !all_weights) {
        keep_weights();
      } else if (kind == SpendOn::kBlocks && plan.trains && bounds.placement != Placement::kCpu) {
        const int64_t bytes = resident_.KeepBlocks(plan, std::min(left(), may_stay), &weights, &whole);
        stay_bytes += bytes;
        may_stay -= bytes;
      } else if (kind == SpendOn::kState && plan.trains && bounds.placement != Placement::kCpu) {
        tile_bytes = plan.tile_slots.front().bytes + kPage;
        const auto share =
            static_cast<int64_t>(static_cast<double>(std::max<int64_t>(left(), 0)) * bounds.state_fraction);
        tiles = std::min(plan.trained_tiles(), std::min(share, std::max<int64_t>(may_stay, 0)) / tile_bytes);
        stay_bytes += tiles * tile_bytes;
        may_stay -= tiles * tile_bytes;
      }
    }
    for (const BlockIndex b : plan.blocks.indices()) {
      BlockPlan& block = plan.blocks[b];
      if (weights[b] != 0) block.private_weight_slot = WeightSlot(0);  // numbered by LayOut
      if (plan.on_device(b)) continue;
      for (const TileIndex t : block.tiles.indices()) {
        if (block.updates(t) && (whole[b] != 0 || tiles-- > 0)) block.private_tile_slot[t] = TileSlot(0);
      }
    }
    layout_.LayOut(&plan);
    return plan;
  }

  // One line about a candidate that was taken.
  std::string Chosen(const Plan& plan, const Spending& spending, double seconds) const {
    int gradients = 0, weights = 0;
    int64_t state = 0;
    for (const BlockPlan& block : plan.blocks) {
      gradients += block.gradient_slot.valid() ? 1 : 0;
      weights += block.private_weight_slot.valid() ? 1 : 0;
      for (const TileSlot slot : block.private_tile_slot) state += slot.valid() ? 1 : 0;
    }
    int runs = 0;
    for (const WeightClass& cls : plan.weight_classes) runs += cls.slots;
    const double early = plan.speculative_share();
    return absl::StrFormat(
        "placement %s: %d blocks of weights and %d tiles of %s in flight; of %d blocks the gradients of %d "
        "and the weights of %d stay in host memory, and the state of %d of %d tiles; memory goes to %s; "
        "%.0f%% of the tiles are updated in backward; a step of %.3g s",
        std::string(PlacementName(options_.bounds.placement)), runs, plan.tile_ring,
        FormatBytes(plan.tile_state_bytes), Count(), gradients, weights, state, plan.trained_tiles(),
        spending.words, 100 * early, seconds);
  }

  std::string SpilledInputs(const Plan& plan) const {
    int64_t bytes = 0;
    int spilled = 0;
    for (const Position position : plan.all_positions()) {
      if (position.value() < graph_.first_trained().value() || !plan.SpillsInput(position)) continue;
      bytes += plan.micro_batches * graph_.stages[StageIndex(position.value())].input_scratch_bytes;
      ++spilled;
    }
    return absl::StrFormat(
        "saved activations: the inputs of %d of %d stages wait for backward on the drive, %s written and "
        "read "
        "a step",
        spilled, plan.positions, FormatBytes(bytes));
  }

  static std::string Previewed(const Plan& plan) {
    return absl::StrFormat(
        "while every step is clipped, %.0f%% of the tiles are updated in forward for forward alone, and "
        "again "
        "in backward: a step reads %s and writes %s",
        100 * plan.previewed_share(), FormatBytes(plan.clipped_read_bytes),
        FormatBytes(plan.nvme_write_bytes));
  }

  // By the drive in a step, of a plan that is not counted yet.
  double BytesMoved(Plan plan) const {
    CountBytes(&plan);
    return static_cast<double>(plan.nvme_read_bytes + plan.nvme_write_bytes);
  }

  double BytesWritten(Plan plan) const {
    CountBytes(&plan);
    return static_cast<double>(plan.nvme_write_bytes);
  }

  // What a step reads more for norms of whole parameters.
  int64_t NormBytes(Plan plan) const {
    const int64_t with_norms = plan.nvme_read_bytes;
    plan.tensor_norms = false;
    plan.nvme_read_bytes = 0;
    CountBytes(&plan);
    return with_norms - plan.nvme_read_bytes;
  }

  // Counted from the program itself, in its steady state.
  void CountBytes(Plan* plan) const {
    if (!plan->trains) return;
    for (const BlockIndex b : plan->blocks.indices()) {
      for (const TileIndex t : plan->blocks[b].tiles.indices()) {
        if (plan->written_at_checkpoint(b, t))
          plan->late_write_bytes += plan->precision.TotalBytes(plan->blocks[b].tiles[t].elements);
      }
    }
    const CondensedPlan condensed(*plan);
    ForStepOps(graph_, condensed.plan(), /*speculative_update=*/true, [&](const Op& op) {
      const int64_t bytes = op.bytes * condensed.times(op);
      if (op.lane == Lane::kRead) plan->nvme_read_bytes += bytes;
      if (op.lane == Lane::kWrite) plan->nvme_write_bytes += bytes;
      if (op.lane == Lane::kCopyIn) plan->device.h2d_bytes += bytes;
      if (op.lane == Lane::kCopyOut) plan->device.d2h_bytes += bytes;
      if (op.kind == OpKind::kAllGather) {
        plan->gathered.bytes += bytes;
        plan->gathered.whole_bytes += condensed.plan().whole_gathered_bytes(op.block) * condensed.times(op);
      }
      if (op.kind == OpKind::kReduceScatter) {
        plan->reduced.bytes += bytes;
        plan->reduced.whole_bytes += condensed.plan().whole_reduced_bytes(op.block) * condensed.times(op);
      }
    });
    if (plan->speculative_share() == 0 &&
        plan->previewed_share() == 0) {  // clipped or not: the same operations
      plan->clipped_read_bytes = plan->nvme_read_bytes;
      return;
    }
    ForStepOps(graph_, condensed.plan(), /*speculative_update=*/false, [&](const Op& op) {
      if (op.lane == Lane::kRead) plan->clipped_read_bytes += op.bytes * condensed.times(op);
    });
  }

  const ModelGraph& graph_;
  const PlanOptions& options_;
  const PlanLayout layout_;
  const ResidentSet resident_;
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
  std::set<BlockIndex> used;
  for (const StageShape& stage : graph.stages) {
    if (!graph.blocks.contains(stage.block)) {
      return absl::InvalidArgumentError(absl::StrCat("stage ", stage.name, " names block ",
                                                     stage.block.value(), " of a model of ",
                                                     graph.blocks.size(), " blocks"));
    }
    used.insert(stage.block);
  }
  if (options.trains && std::none_of(graph.blocks.begin(), graph.blocks.end(),
                                     [](const BlockShape& block) { return block.trains; })) {
    return absl::InvalidArgumentError("every parameter of the model is frozen: there is nothing to train");
  }
  for (const BlockIndex b : graph.blocks.indices()) {
    const BlockShape& block = graph.blocks[b];
    if (block.elements <= 0 || block.elements % kElementAlignment != 0) {
      return absl::InvalidArgumentError(absl::StrCat("block ", block.name, " has ", block.elements,
                                                     " elements: not a positive multiple of ",
                                                     kElementAlignment));
    }
    if (block.trained_from < 0 || block.trained_from >= block.elements ||
        block.trained_from % kPartAlignment != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("block ", block.name, " trains from element ", block.trained_from, " of ",
                       block.elements, " on: not a multiple of ", kPartAlignment, " within it"));
    }
    const bool apart = block.trains && block.trained_from > 0 && options.keeps_frozen_apart();
    if (!options.fixed_tiles.empty()) {
      int64_t sum = 0;
      if (options.frozen_elsewhere) sum = block.trains ? block.trained_from : block.elements;
      bool cut = !apart || sum > 0;
      for (const int64_t elements : options.fixed_tiles[b]) {
        if (elements <= 0 || elements % kElementAlignment != 0) sum = -1;
        if (sum >= 0) sum += elements;
        cut |= sum == block.trained_from;
      }
      if (const int64_t part = ShardElements(block.elements, options.world); sum != part) {
        return absl::InvalidArgumentError(
            absl::StrCat("the tiles given for block ", block.name, " do not make its ", part, " elements"));
      }
      if (!cut) {
        return absl::InvalidArgumentError(absl::StrCat("the tiles given for block ", block.name,
                                                       " are not cut at element ", block.trained_from,
                                                       ", where what trains begins"));
      }
    }
    if (used.count(b) == 0) {
      return absl::InvalidArgumentError(absl::StrCat("block ", block.name, " is used by no stage"));
    }
  }
  return absl::OkStatus();
}

// Shares of the elements whose state may live on a device with its own memory, from the largest on, and what
// the choice goes by, in words that end a sentence.
struct DeviceShares {
  std::vector<double> of_state;
  std::string why;
};
DeviceShares SharesToTry(const PlanOptions& options) {
  if (!options.device.has_own_memory || !options.trains) return {{0}, ""};
  if (options.tensor_norms) return {{0}, ": LAMB's updates are the processor's"};
  if (options.updates_within_scales)
    return {{0}, ": parameters that share a scale of 8-bit states are the processor's (missing_gradients)"};
  if (options.world > 1 && !options.device.collectives) {
    return {{0}, ": ranks that exchange through host memory keep their state there"};
  }
  if (options.bounds.processor_share) {
    const double share = *options.bounds.processor_share;
    return {{1 - share}, absl::StrFormat(": ratio %g leaves it %.0f%% at most", share, 100 * (1 - share))};
  }
  // Without a drive a plan is cheap.
  if (!options.on_nvme) return {{1, 0.75, 0.5, 0.25, 0}, ": as many as make a step the shortest"};
  return {{1, 0.5, 0}, ": as many as make a step the shortest"};
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const ModelGraph& graph, const PlanOptions& options) {
  RETURN_IF_ERROR(Validate(graph, options));
  const DeviceShares shares = SharesToTry(options);
  std::optional<Plan> best;
  double best_seconds = 0;
  absl::Status refused;
  std::set<int64_t> tried;  // elements that live on the device: their blocks follow from it
  for (const double share : shares.of_state) {
    DeviceOptions device_options = options.device;
    device_options.state_share = share;
    if (options.trains) device_options.codes = options.codes;
    device_options.writes_state = options.on_nvme && options.commits_every_step;
    ASSIGN_OR_RETURN(DevicePlan device,
                     PlanDevice(graph, options.precision, options.micro_batches, options.world,
                                options.trains, options.keeps_frozen_apart(), device_options));
    if (!tried.insert(device.resident_elements).second) continue;
    absl::StatusOr<Plan> plan = Planner(graph, options, std::move(device)).Make();
    if (!plan.ok()) {
      refused.Update(plan.status());  // the first, with most on the device, takes least host memory
      continue;
    }
    if (shares.of_state.size() == 1 || TooManyTilesToSimulate(*plan)) {
      best = *std::move(plan);
      break;
    }
    ASSIGN_OR_RETURN(const Prediction prediction,
                     Simulate(graph, *plan, options.machine, FewTilesToSimulate(*plan) ? 4 : 1));
    if (best.has_value() && prediction.step_seconds >= best_seconds * kWorthTheProcessor) continue;
    best_seconds = prediction.step_seconds;
    best = *std::move(plan);
  }
  if (!best.has_value()) return refused;
  if (options.device.has_own_memory && options.trains) {
    const int64_t lives = std::count_if(best->device.blocks.begin(), best->device.blocks.end(),
                                        [](const auto& block) { return block.state_slot.valid(); });
    best->reasons.push_back(
        absl::StrFormat("of %d blocks %d live on the device with their state, %.0f%% of the elements, and "
                        "are updated there%s",
                        best->blocks.size(), lives, 100 * best->on_device_share(), shares.why));
  }
  if (best->codes.any()) {
    const ExchangedBytes all = best->gathered + best->reduced;
    best->reasons.push_back(
        absl::StrFormat("ranks exchange %s%s%s: a rank receives %s in a step instead of %s",
                        best->codes.weights ? "weights in 8 bits" : "",
                        best->codes.weights && best->codes.gradients ? " and " : "",
                        best->codes.gradients ? "gradients in 4 bits" : "", FormatBytes(all.bytes),
                        FormatBytes(all.whole_bytes)));
  }
  return *std::move(best);
}

}  // namespace penstock::tiering
