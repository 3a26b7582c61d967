// Programs are held against what they mean: lanes that keep, for every slot and every place on the drive,
// whose content of which version it holds, and fail the run when an operation would see anything else.
#include "tiering/program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "tests/tiering/plans.h"
#include "tiering/executor.h"
#include "tiering/plan.h"
#include "tiering/sim_lanes.h"
#include "tiering/simulate.h"

namespace penstock::tiering {
namespace {

// SGD without momentum in fp32: weights and nothing beside them.
const Precision kStateless = {"fp32", {4}, 4};

constexpr int64_t kMiB = int64_t{1} << 20;

// A GPT: the first block embeds and, as the last stage, gives the loss.
ModelGraph Tied(int layers, int64_t elements, int64_t embedding) {
  ModelGraph graph = Chain(layers, elements);
  graph.blocks.insert(graph.blocks.begin(), {"embedding", embedding, embedding * 4});
  for (StageShape& stage : graph.stages) ++stage.block;
  graph.stages.insert(graph.stages.begin(), {"embed", 0, 0, kMiB, kMiB, 1e-4, 1e-4});
  graph.stages.push_back({"loss", 0, kMiB / 4, kMiB, 2 * kMiB, 1e-3, 3e-3});
  for (StageShape& stage : graph.stages) stage.input_scratch_bytes = stage.input_bytes;
  return graph;
}

// Content of a slot: whose, and after how many updates; a slot being filled or changed has an owner in
// flight. A version is twice the number of updates, and one more where the last was made in backward on an
// assumption that will turn out wrong.
class MeaningLanes : public Lanes {
 public:
  using Redone = std::function<bool(int64_t step)>;

  MeaningLanes(const Plan& plan, const MachineModel& machine, Redone redone)
      : plan_(plan), sim_(plan, machine), redone_(redone) {
    sim_.set_redone(std::move(redone));
    for (size_t b = 0; b < plan.blocks.size(); ++b) {
      for (size_t t = 0; t < plan.blocks[b].tiles.size(); ++t) {
        const std::pair<int, int> tile{static_cast<int>(b), static_cast<int>(t)};
        drive_[tile] = 0;
        committed_[tile] = 0;
        if (plan.on_nvme) continue;
        run_[{plan.blocks[b].private_run_slot, tile.second}] = {tile.first, 0};
        if (plan.trains) state_[plan.blocks[b].private_tile_slot[t]] = {tile, 0};
      }
    }
  }

  bool HasRoom(Lane lane) const override { return sim_.HasRoom(lane); }
  bool Skips(const Op& op) const override {
    // Whether the assumption held is known when these operations can start, not before.
    EXPECT_TRUE(!op.redo || norms_ >= op.step);
    return sim_.Skips(op);
  }
  double Now() const override { return sim_.Now(); }

  void Start(OpId id, const Op& op) override {
    Check(op);
    in_flight_.emplace(id, op);
    if (op.kind == OpKind::kReadWeights) run_[{op.run_slot, op.tile}] = {-1, 0};
    if (op.kind == OpKind::kReadState) state_[op.tile_slot] = {{-1, -1}, 0};
    sim_.Start(id, op);
  }

  absl::Status Decide(const Op& op) override {
    if (op.kind == OpKind::kNorm) {
      EXPECT_EQ(finalized_, plan_.blocks.size()) << "norm before every gradient was final";
      finalized_ = 0;
      ++norms_;
    }
    return absl::OkStatus();
  }

  void Wait(std::vector<Completion>* completions) override {
    sim_.Wait(completions);
    for (const Completion& completion : *completions) {
      const Op op = in_flight_.at(completion.id);
      in_flight_.erase(completion.id);
      Apply(op);
    }
  }

  int64_t norms() const { return norms_; }
  int64_t commits() const { return commits_; }
  int64_t early_updates() const { return early_updates_; }
  int64_t redone_updates() const { return redone_updates_; }
  const std::map<std::pair<int, int>, int64_t>& drive() const { return drive_; }

 private:
  int64_t Elements(const Op& op) const { return plan_.blocks[op.block].tiles[op.tile].elements; }

  // Nothing in flight may touch what this operation changes, nor change what it reads.
  void Check(const Op& op) {
    for (const auto& [id, other] : in_flight_) {
      const bool same_tile = op.block == other.block && op.tile == other.tile;
      const bool changes_run = op.kind == OpKind::kReadWeights || op.kind == OpKind::kUpdate;
      const bool other_changes_run = other.kind == OpKind::kReadWeights || other.kind == OpKind::kUpdate;
      if (op.run_slot >= 0 && op.run_slot == other.run_slot && (changes_run || other_changes_run)) {
        // Two tiles of one block may be filled at once.
        EXPECT_TRUE(op.block == other.block && op.tile != other.tile && op.tile >= 0 && other.tile >= 0)
            << OpKindName(op.kind) << " against " << OpKindName(other.kind) << " on run slot " << op.run_slot;
      }
      if (op.tile_slot >= 0 && op.tile_slot == other.tile_slot) {
        const bool both_read_in =
            same_tile && op.kind != other.kind && op.lane == Lane::kRead && other.lane == Lane::kRead;
        EXPECT_TRUE(both_read_in) << OpKindName(op.kind) << " against " << OpKindName(other.kind)
                                  << " on tile slot";
      }
      // A spilled gradient has a place of its own beside the tile.
      if (op.lane == Lane::kRead && op.kind != OpKind::kReadGradient && other.kind == OpKind::kWriteTile) {
        EXPECT_FALSE(same_tile) << "read under a write";
      }
    }
    switch (op.kind) {
      case OpKind::kVerify:
      case OpKind::kUpdate: {
        const auto held = run_[{op.run_slot, op.tile}];
        EXPECT_EQ(held.first, op.block) << OpKindName(op.kind);
        if (op.kind == OpKind::kVerify) {
          // Possibly ahead of the norm, after an update in backward that may have to be made again.
          EXPECT_EQ(held.second / 2, op.step - 1) << OpKindName(op.kind);
          break;
        }
        EXPECT_EQ(held.second, 2 * (op.step - 1));
        if (plan_.precision.segment_bytes.size() > 1) {
          EXPECT_EQ(state_[op.tile_slot].first, (std::pair<int, int>{op.block, op.tile}));
          EXPECT_EQ(state_[op.tile_slot].second, 2 * (op.step - 1));
        }
        EXPECT_TRUE(op.in_backward || norms_ == op.step) << "update before the norm of its step";
        if (op.gradient_slot >= 0) {
          EXPECT_EQ(gradient_[op.gradient_slot], (std::pair<int, int64_t>{op.block, op.step}));
        } else {
          EXPECT_EQ(spilled_read_[op.tile_slot], (std::pair<int, int64_t>{op.block, op.step}));
        }
        break;
      }
      case OpKind::kForward:
      case OpKind::kBackward: {
        for (size_t t = 0; t < plan_.blocks[op.block].tiles.size(); ++t) {
          const auto held = run_[{op.run_slot, static_cast<int>(t)}];
          EXPECT_EQ(held.first, op.block) << OpKindName(op.kind);
          EXPECT_EQ(held.second, 2 * (op.kind == OpKind::kBackward ? op.step - 1 : Updates(op)))
              << OpKindName(op.kind);
        }
        break;
      }
      case OpKind::kTakeGradient: {
        if (op.accumulator_slot >= 0) {
          auto& sum = accumulator_[op.accumulator_slot];
          if (sum.first != op.block || sum.second != op.step) {
            EXPECT_EQ(adding_[op.accumulator_slot], 0) << "sums taken while another block still adds";
            sum = {op.block, op.step};
          }
          ++adding_[op.accumulator_slot];
        } else {
          gradient_[op.gradient_slot] = {op.block, op.step};
        }
        break;
      }
      case OpKind::kFinalize:
        if (op.accumulator_slot >= 0) {
          EXPECT_EQ(accumulator_[op.accumulator_slot], (std::pair<int, int64_t>{op.block, op.step}));
          EXPECT_EQ(adding_[op.accumulator_slot], plan_.blocks[op.block].uses * plan_.micro_batches);
        } else {
          EXPECT_EQ(gradient_[op.gradient_slot], (std::pair<int, int64_t>{op.block, op.step}));
        }
        break;
      case OpKind::kWriteInput:
        EXPECT_EQ(inputs_.count({op.position, op.micro_batch}), 1u);
        break;
      case OpKind::kReadInput:
        EXPECT_EQ(written_inputs_.count({op.position, op.micro_batch}), 1u) << "read before it was written";
        Keep(op.position, op.micro_batch);
        break;
      case OpKind::kWriteTile:
        EXPECT_EQ((run_[{op.run_slot, op.tile}]), (std::pair<int, int64_t>{op.block, VersionAfter(op)}));
        EXPECT_EQ(commits_, op.step - 1) << "a slot of the committed version overwritten";
        break;
      case OpKind::kWriteGradient:
        EXPECT_EQ(gradient_[op.gradient_slot], (std::pair<int, int64_t>{op.block, op.step}));
        break;
      default:
        break;
    }
  }

  void Apply(const Op& op) {
    switch (op.kind) {
      case OpKind::kReadWeights:
        run_[{op.run_slot, op.tile}] = {op.block, OnDrive(op)};
        break;
      case OpKind::kReadState:
        state_[op.tile_slot] = {{op.block, op.tile}, OnDrive(op)};
        break;
      case OpKind::kReadGradient:
        spilled_read_[op.tile_slot] = {op.block, spilled_.at(op.block)};
        break;
      case OpKind::kUpdate:
        run_[{op.run_slot, op.tile}].second = VersionAfter(op);
        state_[op.tile_slot].second = VersionAfter(op);
        if (!plan_.on_nvme) drive_.at({op.block, op.tile}) = VersionAfter(op);
        early_updates_ += op.in_backward ? 1 : 0;
        redone_updates_ += op.redo ? 1 : 0;
        break;
      case OpKind::kWriteTile:
        drive_.at({op.block, op.tile}) = VersionAfter(op);
        break;
      case OpKind::kWriteGradient:
        spilled_[op.block] = op.step;
        break;
      case OpKind::kForward:
        if (op.evaluates) break;
        EXPECT_TRUE(op.position == 0 || inputs_.count({op.position, op.micro_batch}) == 1) << op.position;
        Keep(op.position + 1, op.micro_batch);
        break;
      case OpKind::kBackward:
        EXPECT_TRUE(op.position == 0 || inputs_.count({op.position, op.micro_batch}) == 1) << op.position;
        inputs_.erase({op.position, op.micro_batch});
        break;
      case OpKind::kWriteInput:
        written_inputs_.insert({op.position, op.micro_batch});
        inputs_.erase({op.position, op.micro_batch});
        break;
      case OpKind::kReadInput:
        written_inputs_.erase({op.position, op.micro_batch});
        break;
      case OpKind::kFinalize:
        if (op.accumulator_slot >= 0) {
          adding_[op.accumulator_slot] = 0;
          gradient_[op.gradient_slot] = {op.block, op.step};
        }
        ++finalized_;
        break;
      case OpKind::kCommit:
        for (const auto& [tile, version] : drive_)
          EXPECT_EQ(version, 2 * op.step) << "commit of a partial step";
        committed_ = drive_;
        EXPECT_EQ(commits_, op.step - 1);
        ++commits_;
        break;
      default:
        break;
    }
  }

  void Keep(int position, int micro_batch) {
    inputs_.insert({position, micro_batch});
    std::set<int> positions;
    for (const auto& [at, m] : inputs_) positions.insert(at);
    EXPECT_LE(static_cast<int>(positions.size()), plan_.kept_inputs) << "more inputs in memory than planned";
  }

  int64_t VersionAfter(const Op& op) const {
    return 2 * op.step + (op.in_backward && redone_ && redone_(op.step) ? 1 : 0);
  }
  // An update that is made again starts from what is committed.
  int64_t OnDrive(const Op& op) const { return (op.redo ? committed_ : drive_).at({op.block, op.tile}); }

  // Updates that weights must have seen when a forward of this pass uses them.
  int64_t Updates(const Op& op) const {
    return op.kind == OpKind::kForward && norms_ < op.step ? op.step - 1 : norms_;
  }

  const Plan& plan_;
  SimLanes sim_;
  const Redone redone_;
  std::map<OpId, Op> in_flight_;
  std::map<std::pair<int, int>, std::pair<int, int64_t>> run_;    // {slot, tile} -> {block, version}
  std::map<int, std::pair<std::pair<int, int>, int64_t>> state_;  // slot -> {tile, version}
  std::map<int, std::pair<int, int64_t>> gradient_, accumulator_, spilled_read_;  // slot -> {block, step}
  std::map<int, int> adding_;
  std::map<int, int64_t> spilled_;
  std::map<std::pair<int, int>, int64_t> drive_, committed_;
  std::set<std::pair<int, int>> inputs_, written_inputs_;  // {position, micro-batch} in memory, on the drive
  int64_t early_updates_ = 0, redone_updates_ = 0;
  size_t finalized_ = 0;
  int64_t norms_ = 0;
  int64_t commits_ = 0;
};

struct Counted {
  int64_t early = 0;
  int64_t redone = 0;
};

Counted RunPasses(const ModelGraph& graph, const Plan& plan, const MachineModel& machine,
                  std::mt19937_64* random) {
  ProgramBuilder builder(graph, plan, 1);
  // Without clipping an update is made again only to leave its tile as it was; the engine's tests do that.
  const uint64_t failures = random == nullptr || !plan.clips ? 0 : (*random)();
  auto redone = [failures](int64_t step) { return (failures >> step & 1) != 0; };
  MeaningLanes lanes(plan, machine, redone);
  Executor executor(&lanes);
  int gates = 0;
  int64_t steps = 0;
  for (int pass = 0; pass < 8; ++pass) {
    if (random != nullptr && (*random)() % 3 == 0) {
      std::vector<int> order(graph.stages.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end() - 1, *random);
      builder.SetOrder(order);
    }
    const int kind = pass == 7 ? 2 : (random == nullptr ? 0 : static_cast<int>((*random)() % 4));
    if (kind == 1) {
      executor.Append(builder.Append(Pass::kEvaluate, 1 + pass % 3));
      ++gates;
    } else if (kind == 2) {
      executor.Append(builder.Append(Pass::kFlush));
    } else {
      const bool in_backward = random == nullptr || (*random)() % 4 != 0;
      executor.Append(builder.Append(Pass::kTrain, 0, in_backward));
      ++gates;
      ++steps;
    }
    executor.OpenGate(gates);
    // Sometimes the next pass is appended while this one runs.
    if (random != nullptr && (*random)() % 2 == 0) continue;
    EXPECT_TRUE(executor.RunUntil(builder.next_id() - 1).ok());
    if (steps > 0 && !redone(steps) && failures % 3 == 0) builder.AssumptionHeld();
  }
  EXPECT_TRUE(executor.RunUntilIdle().ok());
  EXPECT_TRUE(executor.complete(builder.next_id() - 1));
  EXPECT_EQ(lanes.norms(), steps);
  EXPECT_EQ(lanes.commits(), steps);
  for (const auto& [tile, version] : lanes.drive()) EXPECT_EQ(version, 2 * steps);
  return {lanes.early_updates(), lanes.redone_updates()};
}

TEST(Program, EveryOperationSeesWhatItShouldOverRandomModelsBudgetsAndMachines) {
  Counted counted;
  for (uint64_t seed = 1; seed <= 250; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const int layers = 1 + static_cast<int>(random() % 9);
    ModelGraph graph = random() % 2 != 0
                           ? Tied(layers, kElementAlignment * (1 + static_cast<int64_t>(random() % 200)),
                                  kElementAlignment * (1 + static_cast<int64_t>(random() % 400)))
                           : Chain(layers, kElementAlignment * (1 + static_cast<int64_t>(random() % 200)));
    if (random() % 3 == 0) {
      for (BlockShape& block : graph.blocks)
        block.elements = kElementAlignment * (1 + static_cast<int64_t>(random() % 300));
    }
    if (random() % 4 == 0) graph.stages.push_back(graph.stages[random() % graph.stages.size()]);
    PlanOptions options;
    const Precision precisions[] = {Precision::Bf16(), Precision::Fp32(), Precision::Fp16(),
                                    Precision::Bf16().WithMoments(1), kStateless};
    options.precision = precisions[random() % std::size(precisions)];
    options.micro_batches = 1 + static_cast<int>(random() % 3);
    options.on_nvme = random() % 8 != 0;
    if (random() % 2 != 0) options.tile_bytes = 64 << 10;
    options.clips = random() % 4 != 0;
    options.update_order = static_cast<UpdateOrder>(random() % 3);
    absl::StatusOr<Plan> roomy = MakePlan(graph, options);
    ASSERT_TRUE(roomy.ok()) << roomy.status();
    if (options.on_nvme) {
      const int64_t least = roomy->least_host_memory_bytes;
      options.host_budget_bytes =
          least + static_cast<int64_t>(random() % static_cast<uint64_t>(graph.elements() * 20));
    }
    absl::StatusOr<Plan> plan = MakePlan(graph, options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    MachineModel machine;
    machine.read_bytes_per_s = 1e8 * static_cast<double>(1 + random() % 100);
    machine.write_bytes_per_s = 1e8 * static_cast<double>(1 + random() % 100);
    machine.update_parameters_per_s = 1e7 * static_cast<double>(1 + random() % 100);
    machine.update_workers = 1 + static_cast<int>(random() % 3);
    if (plan->speculates && random() % 2 != 0) {
      // Any tile of any block may be the one that is updated in backward.
      for (BlockPlan& block : plan->blocks) {
        for (char& early : block.in_backward) early = random() % 2 != 0 ? 1 : 0;
      }
    }
    const Counted run = RunPasses(graph, *plan, machine, &random);
    counted.early += run.early;
    counted.redone += run.redone;
    if (HasFailure()) return;
  }
  EXPECT_GT(counted.early, 5'000);
  EXPECT_GT(counted.redone, 2'000);
}

TEST(Planner, LeastBudgetWorksAndOneByteLessIsRefusedWithIt) {
  for (const ModelGraph& graph : {Chain(6, 1 << 20), Tied(12, 1 << 19, 1 << 22), Tied(1, 2048, 2048)}) {
    for (const Precision& precision : {Precision::Bf16(), Precision::Fp32(), Precision::Fp16(),
                                       Precision::Bf16().WithMoments(1), kStateless}) {
      PlanOptions options;
      options.precision = precision;
      options.host_budget_bytes = 1;
      absl::StatusOr<Plan> refused = MakePlan(graph, options);
      ASSERT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
      options.host_budget_bytes = int64_t{1} << 40;
      const int64_t least = MakePlan(graph, options)->least_host_memory_bytes;
      EXPECT_NE(std::string(refused.status().message()).find(std::to_string(least)), std::string::npos)
          << refused.status();
      options.host_budget_bytes = least;
      absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_LE(plan->host_bytes(), least);
      RunPasses(graph, *plan, MachineModel(), nullptr);
      options.host_budget_bytes = least - 1;
      EXPECT_FALSE(MakePlan(graph, options).ok());
    }
  }
}

TEST(Planner, NeverExceedsTheBudgetAndIsNoSlowerWithMoreMemory) {
  for (const double forward : {1e-4, 1e-3, 1e-2}) {
    ModelGraph graph = Tied(16, 1 << 20, 1 << 20);
    for (StageShape& stage : graph.stages) {
      stage.forward_seconds = forward;
      stage.backward_seconds = 3 * forward;
    }
    PlanOptions options;
    options.host_budget_bytes = int64_t{1} << 40;
    const int64_t least = MakePlan(graph, options)->least_host_memory_bytes;
    double fastest = 1e9;
    int64_t bytes = 0;
    for (int64_t budget = least; budget < 400 * kMiB; budget += 5 * kMiB) {
      options.host_budget_bytes = budget;
      absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok());
      EXPECT_LE(plan->host_bytes(), budget);
      EXPECT_EQ(plan->ledger().total(), plan->host_bytes());
      absl::StatusOr<Prediction> prediction = Simulate(graph, *plan, MachineModel());
      ASSERT_TRUE(prediction.ok());
      EXPECT_LE(prediction->step_seconds, fastest * 1.05) << "budget " << budget << ", forward " << forward;
      fastest = std::min(fastest, prediction->step_seconds);
      bytes = plan->nvme_read_bytes + plan->nvme_write_bytes;
    }
    EXPECT_EQ(bytes, 12 * graph.elements()) << "with everything resident only the durable writes are left";
  }
}

TEST(Planner, ObeysTheUsersUpperBounds) {
  const ModelGraph graph = Chain(12, 1 << 20);
  PlanOptions options;
  options.host_budget_bytes = int64_t{1} << 30;
  auto shared_slots = [](const Plan& plan) { return plan.run_classes.front().slots; };
  const Plan free = *MakePlan(graph, options);
  EXPECT_EQ(shared_slots(free), 3);
  EXPECT_GT(ResidentElements(free), 0);
  options.bounds.live_elements = 2 << 20;
  EXPECT_EQ(shared_slots(*MakePlan(graph, options)), 2);
  options.bounds = {};
  options.bounds.prefetch_elements = 0;
  EXPECT_EQ(shared_slots(*MakePlan(graph, options)), 1);
  options.bounds = {};
  options.bounds.run_slots = 2;
  EXPECT_EQ(shared_slots(*MakePlan(graph, options)), 2);
  options.bounds = {};
  options.bounds.resident_elements = 3 << 20;
  EXPECT_EQ(ResidentElements(*MakePlan(graph, options)), 3 << 20);
  options.bounds.resident_elements = 0;
  EXPECT_EQ(ResidentElements(*MakePlan(graph, options)), 0);
}

TEST(Planner, SlotsDoNotOverlapAndLieInTheArena) {
  const ModelGraph graph = Tied(8, 3 * kElementAlignment * 50, 1 << 20);
  PlanOptions options;
  options.micro_batches = 2;
  options.host_budget_bytes = 64 * kMiB;
  absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  int64_t end = 0;
  for (const auto* slots :
       {&plan->run_slots, &plan->tile_slots, &plan->gradient_slots, &plan->accumulator_slots}) {
    for (const Slot& slot : *slots) {
      EXPECT_GE(slot.offset, end);
      EXPECT_EQ(slot.offset % kPage, 0);
      end = slot.offset + slot.bytes;
    }
  }
  EXPECT_LE(end, plan->arena_bytes);
}

TEST(Program, BytesPerParameterAreThoseOfThePrecision) {
  ModelGraph graph = Chain(64, 1 << 20);
  for (StageShape& stage : graph.stages) stage.input_bytes = stage.input_scratch_bytes = 0;
  for (const auto& [precision, floor] : {std::pair{Precision::Bf16(), 26.0},
                                         {Precision::Fp32(), 28.0},
                                         {Precision::Fp16(), 30.0},
                                         {Precision::Bf16().WithMoments(1), 14.25}}) {
    PlanOptions options;
    options.precision = precision;
    // Enough for every gradient and the comfortable working set; weights and state stream.
    options.bounds.resident_elements = 0;
    options.bounds.state_fraction = 0;
    const int64_t gradients = graph.elements() * precision.gradient_bytes;
    options.host_budget_bytes = gradients + 128 * kMiB;
    auto per_parameter = [&] {
      absl::StatusOr<Plan> plan = MakePlan(graph, options);
      EXPECT_TRUE(plan.ok()) << plan.status();
      return static_cast<double>(plan->nvme_read_bytes + plan->nvme_write_bytes) /
             static_cast<double>(graph.elements());
    };
    for (const UpdateOrder order : {UpdateOrder::kInNextForward, UpdateOrder::kInBackward}) {
      options.update_order = order;
      EXPECT_LE(per_parameter(), floor);
      EXPECT_GT(per_parameter(), floor - 2.1);  // the ends of the walk are read once less
    }
    // Gradients on the drive cost one write and one read of them; one that is used in backward is read again
    // only when clipping asks for it, and without clipping it is never needed again.
    options.host_budget_bytes = MakePlan(graph, options)->least_host_memory_bytes + 8 * kMiB;
    const double bytes = precision.gradient_bytes;
    for (const auto& [order, clips, spilled] : {std::tuple{UpdateOrder::kInNextForward, true, 2 * bytes},
                                                {UpdateOrder::kInBackward, true, bytes},
                                                {UpdateOrder::kInBackward, false, 0.0}}) {
      options.update_order = order;
      options.clips = clips;
      EXPECT_LE(per_parameter(), floor + spilled);
      EXPECT_GT(per_parameter(), floor + spilled - 2.1);
    }
  }
}

// From the least budget with which two blocks fit to one that keeps everything.
TEST(Planner, InputsGoToTheDriveWhereTheBudgetAsksForIt) {
  ModelGraph graph = Chain(32, 1 << 18);
  for (StageShape& stage : graph.stages) {
    stage.input_bytes = 8 * kMiB;
    stage.input_scratch_bytes = 8 * kMiB;
  }
  PlanOptions options;
  options.host_budget_bytes = int64_t{1} << 40;
  const Plan roomy = *MakePlan(graph, options);
  EXPECT_EQ(roomy.input_scratch_bytes, 0);
  EXPECT_LT(roomy.least_host_memory_bytes, 32 * 8 * kMiB / 4) << "a fraction of the inputs alone";
  int64_t moved = std::numeric_limits<int64_t>::max();
  for (int64_t budget = roomy.least_host_memory_bytes; budget < 400 * kMiB; budget += 24 * kMiB) {
    options.host_budget_bytes = budget;
    const Plan plan = *MakePlan(graph, options);
    EXPECT_LE(plan.host_bytes(), budget);
    EXPECT_LE(plan.nvme_read_bytes + plan.nvme_write_bytes, moved);
    moved = plan.nvme_read_bytes + plan.nvme_write_bytes;
    RunPasses(graph, plan, MachineModel(), nullptr);
  }
}

TEST(Simulate, StepIsWithinFivePercentOfItsFloor) {
  const ModelGraph base = Chain(24, 3 << 20);
  double worst = 1;
  for (const double ratio : {0.1, 0.3, 0.6, 1.0, 1.5, 3.0, 10.0}) {
    ModelGraph graph = base;
    const double drive_seconds = 26.0 * static_cast<double>(graph.elements()) / 3e9;
    for (StageShape& stage : graph.stages) {
      stage.forward_seconds = ratio * drive_seconds / 24 / 4;
      stage.backward_seconds = ratio * drive_seconds / 24 * 3 / 4;
    }
    PlanOptions options;
    options.host_budget_bytes = int64_t{1} << 40;
    const int64_t least = MakePlan(graph, options)->least_host_memory_bytes;
    for (const double share : {0.02, 0.05, 0.15, 0.3, 0.6, 1.2}) {
      const int64_t state = graph.elements() * 14;
      options.host_budget_bytes = least + static_cast<int64_t>(share * static_cast<double>(state));
      absl::StatusOr<Plan> plan = MakePlan(graph, options);
      ASSERT_TRUE(plan.ok()) << plan.status();
      absl::StatusOr<Prediction> prediction = Simulate(graph, *plan, MachineModel(), /*steps=*/6);
      ASSERT_TRUE(prediction.ok());
      EXPECT_LE(prediction->step_seconds, prediction->floor_seconds * 1.05)
          << "compute to drive " << ratio << ", memory beyond the least " << share << " of the state";
      worst = std::max(worst, prediction->step_seconds / prediction->floor_seconds);
    }
  }
  RecordProperty("worst", std::to_string(worst));
}

TEST(Executor, AnErrorEndsTheRunWithNothingInFlight) {
  const ModelGraph graph = Chain(4, 1 << 18);
  PlanOptions options;
  options.host_budget_bytes = 16 * kMiB;
  absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (int fail_at = 0; fail_at < 50; fail_at += 7) {
    ProgramBuilder builder(graph, *plan, 1);
    SimLanes lanes(*plan, MachineModel());
    int started = 0;
    lanes.set_fault(
        [&](const Op&) { return started++ == fail_at ? absl::DataLossError("injected") : absl::OkStatus(); });
    Executor executor(&lanes);
    executor.Append(builder.Append(Pass::kTrain));
    executor.Append(builder.Append(Pass::kFlush));
    executor.OpenGate(1);
    EXPECT_EQ(executor.RunUntilIdle().code(), absl::StatusCode::kDataLoss) << fail_at;
    EXPECT_EQ(executor.in_flight(), 0u);
    EXPECT_EQ(executor.RunUntil(builder.next_id() - 1).code(), absl::StatusCode::kDataLoss);
  }
}

TEST(Executor, StallsAreNamedByCause) {
  const ModelGraph graph = Chain(12, 1 << 20, 1e-5);
  PlanOptions options;
  options.host_budget_bytes = graph.elements() * 2 + 90 * kMiB;
  absl::StatusOr<Plan> plan = MakePlan(graph, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  MachineModel slow_reads;
  slow_reads.read_bytes_per_s = 1e8;
  absl::StatusOr<Prediction> prediction = Simulate(graph, *plan, slow_reads);
  ASSERT_TRUE(prediction.ok());
  const auto& stalls = prediction->usage.stall_seconds;
  EXPECT_GT(stalls[static_cast<size_t>(Stall::kRead)], 0.8 * 2 * prediction->step_seconds);
  EXPECT_EQ(prediction->bound_by, "read");
  MachineModel slow_update;
  slow_update.update_parameters_per_s = 1e6;
  prediction = Simulate(graph, *plan, slow_update);
  ASSERT_TRUE(prediction.ok());
  EXPECT_GT(prediction->usage.stall_seconds[static_cast<size_t>(Stall::kUpdate)],
            0.8 * 2 * prediction->step_seconds);
  EXPECT_EQ(prediction->bound_by, "optimizer");
}

}  // namespace
}  // namespace penstock::tiering
