// Every key of DeepSpeed's that says where something lives or moves is obeyed by a plan, or named with a
// reason.
#include "run/plan_bounds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "run/settings.h"
#include "tests/tiering/plans.h"
#include "tiering/program/program.h"

namespace penstock::run::plan_bounds_test {
namespace {

using tiering::BlockPlan;
using tiering::Plan;
using tiering::ResidentElements;
using tiering::ResidentTiles;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kElements = 1 << 20;  // of a layer
constexpr int64_t kSmall = 20 * tiering::kElementAlignment;

// Twelve layers, two of them small.
tiering::ModelGraph Graph() {
  tiering::ModelGraph graph;
  for (int b = 0; b < 12; ++b) {
    graph.blocks.push_back({"layer", b == 3 || b == 7 ? kSmall : kElements, 4 * kElements});
    graph.stages.push_back({"stage", tiering::BlockIndex(b), kMiB / 4, kMiB, 2 * kMiB, 1e-4, 3e-4});
  }
  return graph;
}

Plan PlanOf(const std::string& json) {
  const absl::StatusOr<ParsedConfig> parsed = ParseConfig(json);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  tiering::PlanOptions options;
  options.host_memory_budget_bytes = int64_t{1} << 30;  // all would fit
  options.bounds = PlanBoundsOf(parsed->config);
  absl::StatusOr<Plan> plan = tiering::MakePlan(Graph(), options);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

int64_t LiveElements(const Plan& plan) {
  int64_t bytes = 0;
  for (const tiering::WeightClass& cls : plan.weight_classes) bytes += cls.slots * cls.bytes;
  return bytes / 2;
}

std::string Zero(const std::string& inner) { return "{\"zero_optimization\": {" + inner + "}}"; }
std::string Param(const std::string& inner) {
  return Zero(R"("offload_param": {"device": "nvme", "nvme_path": "/n", )" + inner + "}");
}
std::string Optimizer(const std::string& inner, const std::string& more = "") {
  return Zero(R"("offload_optimizer": {"device": "nvme", "nvme_path": "/n", )" + inner + "}" + more);
}
std::string Own(const std::string& inner) { return "{\"penstock\": {" + inner + "}}"; }

// Key, by its canonical path -> what obeying it looks like.
const std::map<std::string, std::function<void()>>& Obeyed() {
  static const std::map<std::string, std::function<void()>> checks = {
      {"zero_optimization.stage3_max_live_parameters",
       [] {
         EXPECT_GT(LiveElements(PlanOf("{}")), 2 * kElements);
         EXPECT_LE(LiveElements(PlanOf(Zero(R"("stage3_max_live_parameters": 2200000)"))), 2'200'000);
       }},
      {"zero_optimization.stage3_prefetch_bucket_size",
       [] { EXPECT_EQ(PlanOf(Zero(R"("stage3_prefetch_bucket_size": 0)")).weight_classes.back().slots, 1); }},
      {"zero_optimization.stage3_max_reuse_distance",
       [] {
         const int64_t all = ResidentElements(PlanOf("{}"));
         EXPECT_EQ(ResidentElements(PlanOf(Zero(R"("stage3_max_reuse_distance": 0)"))), 0);
         const int64_t some = ResidentElements(PlanOf(Zero(R"("stage3_max_reuse_distance": 12000000)")));
         EXPECT_GT(some, 0);
         EXPECT_LT(some, all);
       }},
      {"zero_optimization.stage3_param_persistence_threshold",
       [] {
         // What persists does so even where nothing else may stay.
         const std::string rest =
             R"(, "offload_param": {"device": "nvme", "nvme_path": "/n", "max_in_cpu": 0})";
         EXPECT_EQ(ResidentElements(PlanOf(Zero(R"("stage3_param_persistence_threshold": 100000)" + rest))),
                   2 * kSmall);
         EXPECT_EQ(ResidentElements(PlanOf(Zero(R"("stage3_param_persistence_threshold": 1000)" + rest))), 0);
       }},
      {"zero_optimization.stage3_model_persistence_threshold",
       [] {
         EXPECT_EQ(
             ResidentElements(PlanOf(Zero(
                 R"("stage3_param_persistence_threshold": 1e5, "stage3_model_persistence_threshold": 60000,
                     "offload_param": {"device": "nvme", "nvme_path": "/n", "max_in_cpu": 0})"))),
             kSmall);
         // The largest number that DeepSpeed's users write bounds nothing.
         PlanOf(Zero(R"("stage3_model_persistence_threshold": 9223372036854775807)"));
       }},
      {"zero_optimization.sub_group_size",
       [] {
         // A tile's bound: tools/penstock/resource_flags.cc gives it to the planner as tile_bytes.
         tiering::PlanOptions options;
         options.tile_bytes = 100'000 * 12;
         EXPECT_LE(tiering::MakePlan(Graph(), options)->tile_elements, 100'000);
       }},
      {"zero_optimization.offload_param.buffer_count",
       [] { EXPECT_EQ(PlanOf(Param(R"("buffer_count": 2)")).weight_classes.back().slots, 2); }},
      {"zero_optimization.offload_param.buffer_size",
       [] {
         EXPECT_LE(LiveElements(PlanOf(Param(R"("buffer_count": 2, "buffer_size": 550000)"))), 1'100'000);
         EXPECT_LE(LiveElements(PlanOf(Param(R"("buffer_size": 450000)"))), 5 * 450'000) << "five by default";
       }},
      {"zero_optimization.offload_param.max_in_cpu",
       [] {
         EXPECT_EQ(ResidentElements(PlanOf(Param(R"("max_in_cpu": 0)"))), 0);
         const int64_t some = ResidentElements(PlanOf(Param(R"("max_in_cpu": 3200000)")));
         EXPECT_GT(some, 2'000'000);
         EXPECT_LE(some, 3'200'000);
       }},
      {"zero_optimization.offload_optimizer.buffer_count",
       [] {
         const Plan plan = PlanOf(Optimizer(R"("buffer_count": 4)", R"(, "sub_group_size": 2000000)"));
         EXPECT_LE(plan.tile_ring * plan.tile_state_bytes, 4 * 2'000'000 * 4);
         EXPECT_GT(PlanOf("{}").tile_ring, plan.tile_ring);
       }},
      {"zero_optimization.offload_optimizer.pipeline_read",
       [] {
         EXPECT_EQ(PlanOf(Optimizer(R"("pipeline_read": false)")).tile_ring, 2);
         EXPECT_GT(PlanOf(Optimizer(R"("pipeline_read": true)")).tile_ring, 2);
       }},
      {"zero_optimization.offload_optimizer.pipeline_write",
       [] {
         EXPECT_EQ(PlanOf(Optimizer(R"("pipeline_write": false)")).tile_ring, 2);
         EXPECT_EQ(PlanOf(Optimizer(R"("pipeline_read": false, "pipeline_write": false)")).tile_ring, 1);
       }},
      {"zero_optimization.offload_optimizer.ratio",
       [] {
         // Of a device that has room for everything.
         const auto share = [](const std::string& json) {
           const absl::StatusOr<ParsedConfig> parsed = ParseConfig(json);
           EXPECT_TRUE(parsed.ok()) << parsed.status();
           tiering::PlanOptions options;
           options.on_nvme = false;
           options.device.has_own_memory = true;
           options.bounds = PlanBoundsOf(parsed->config);
           return tiering::MakePlan(Graph(), options)->on_device_share();
         };
         EXPECT_EQ(share(Optimizer(R"("ratio": 0)")), 1);
         EXPECT_EQ(share(Optimizer(R"("ratio": 1)")), 0);
         EXPECT_GT(share(Optimizer(R"("ratio": 0.25)")), 0.6);
         EXPECT_LE(share(Optimizer(R"("ratio": 0.25)")), 0.75);
         EXPECT_GT(share(Optimizer(R"("ratio": "auto")")), 0.2);
         EXPECT_FALSE(ParseConfig(Optimizer(R"("ratio": 1.5)")).ok());
       }},
      {"penstock.placement",
       [] {
         EXPECT_EQ(ResidentElements(PlanOf(Own(R"("placement": "cpu")"))), 0);
         EXPECT_EQ(ResidentTiles(PlanOf(Own(R"("placement": "cpu")"))), 0);
         EXPECT_GT(ResidentElements(PlanOf(Own(R"("placement": "cuda")"))), 0);
         EXPECT_EQ(PlanOf(Own(R"("placement": "auto")")).host_bytes(), PlanOf("{}").host_bytes());
       }},
      {"penstock.placement_const_bytes",
       [] {
         const Plan plan = PlanOf(Own(R"("placement": "const", "placement_const_bytes": "6MiB")"));
         EXPECT_LE(2 * ResidentElements(plan) + ResidentTiles(plan) * plan.tile_state_bytes, 6 * kMiB);
         EXPECT_EQ(ParseConfig(Own(R"("placement_const_bytes": "6MiB")"))->notes.size(), 1u)
             << "of const alone";
       }},
      {"penstock.gpu_margin_mem_ratio",
       [] {
         EXPECT_EQ(ResidentTiles(PlanOf(Own(R"("gpu_margin_mem_ratio": 0)"))), 0);
         EXPECT_FALSE(ParseConfig(Own(R"("gpu_margin_mem_ratio": 1.5)")).ok());
       }},
  };
  return checks;
}

TEST(PlanBounds, EveryKeyOfPlacementIsObeyed) {
  for (const auto& [key, check] : Obeyed()) {
    SCOPED_TRACE(key);
    check();
  }
}

// Where the keys below are obeyed: stage means 3 at any value (a note says so), device and nvme_path choose
// the offload and its directory, cpu_offload* are their old names, and buckets of collectives bound nothing
// on one rank (a note of tools/penstock/resource_flags.cc says so). zero_quantized_* are of what several
// ranks exchange (CodedExchangeTest of tests/zero/tcp_ranks_test.cc).
TEST(PlanBounds, EveryKeyOfZeroIsObeyedHereOrElsewhereOrNamedWithAReason) {
  const std::set<std::string> elsewhere = {"stage",
                                           "offload_param",
                                           "offload_optimizer",
                                           "device",
                                           "nvme_path",
                                           "reduce_bucket_size",
                                           "cpu_offload",
                                           "cpu_offload_param",
                                           "allgather_bucket_size",
                                           "zero_quantized_weights",
                                           "zero_quantized_gradients"};
  int obeyed = 0, named = 0;
  for (const std::string section :
       {"zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"}) {
    for (const Setting& spec : SectionKeys(section)) {
      const std::string name(spec.canonical.empty() ? spec.name : spec.canonical);
      if (spec.use != KeyUse::kServed) {
        EXPECT_GT(spec.why.size(), 10u) << section << "." << name << " is not served and gives no reason";
        EXPECT_EQ(spec.why.find('\n'), std::string_view::npos);
        ++named;
      } else if (!elsewhere.contains(name)) {
        EXPECT_TRUE(Obeyed().contains(section + "." + name)) << section << "." << name;
        ++obeyed;
      }
    }
  }
  EXPECT_GE(obeyed, 12);
  EXPECT_GE(named, 30);
  // And the other sections: nothing is silent.
  for (const std::string_view section : SectionPaths()) {
    for (const Setting& spec : SectionKeys(section)) {
      if (spec.use != KeyUse::kServed && spec.canonical.empty()) {
        EXPECT_GT(spec.why.size(), 10u) << section << "." << spec.name;
      }
    }
  }
}

TEST(PlanBounds, NothingSaidBoundsNothing) {
  const tiering::PlanBounds bounds = PlanBoundsOf(Config());
  EXPECT_FALSE(bounds.live_elements || bounds.prefetch_elements || bounds.weight_slots ||
               bounds.resident_elements || bounds.reuse_elements || bounds.persistent_block_elements ||
               bounds.persistent_elements || bounds.tile_slots || bounds.state_bytes);
  EXPECT_EQ(bounds.placement, tiering::Placement::kAuto);
  EXPECT_EQ(bounds.state_fraction, 1);
}

}  // namespace
}  // namespace penstock::run::plan_bounds_test
