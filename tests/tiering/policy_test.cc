// A grid of machines, models and budgets: no policy that a user can fix beats what `auto` chooses in any
// cell, but for the half percent that it gives for clipped steps and fewer bytes. Prints the table of
// tiering/README.md, each policy's step as a multiple of auto's.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tests/soak.h"
#include "tests/tiering/plans.h"
#include "tiering/plan/plan.h"
#include "tiering/simulate/simulate.h"

namespace penstock::tiering::policy_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

struct Policy {
  const char* name;
  PlanBounds bounds;
  UpdateOrder order = UpdateOrder::kAuto;
};

std::vector<Policy> Policies() {
  std::vector<Policy> policies = {{"cpu", {}},         {"cuda", {}},        {"const", {}},
                                  {"no prefetch", {}}, {"no pipeline", {}}, {"weights stream", {}}};
  policies[0].bounds.placement = Placement::kCpu;
  policies[1].bounds.placement = Placement::kCuda;
  policies[2].bounds.placement = Placement::kConst;
  policies[2].bounds.const_bytes = 16 * kMiB;
  policies[3].bounds.prefetch_elements = 0;
  policies[4].bounds.tile_slots = 1;
  policies[5].bounds.resident_elements = 0;
  policies.push_back({"in next forward", {}, UpdateOrder::kInNextForward});
  policies.push_back({"in backward", {}, UpdateOrder::kInBackward});
  return policies;
}

ModelGraph Model(int layers, int64_t elements, bool tied, double seconds) {
  ModelGraph graph;
  if (tied) graph.blocks.push_back({"embedding", 2 * elements, 8 * elements});
  for (int b = 0; b < layers; ++b) graph.blocks.push_back({"layer", elements, 4 * elements});
  const int first = tied ? 1 : 0;
  if (tied) graph.stages.push_back({"embed", BlockIndex(0), 0, kMiB, kMiB, seconds / 10, seconds / 10});
  for (int b = 0; b < layers; ++b) {
    graph.stages.push_back({"layer", BlockIndex(first + b), kMiB / 4, kMiB, 2 * kMiB, seconds, 3 * seconds});
  }
  if (tied) graph.stages.push_back({"loss", BlockIndex(0), kMiB / 4, kMiB, 2 * kMiB, seconds, 3 * seconds});
  return graph;
}

TEST(Policies, NoneBeatsAutoInAnyCell) {
  struct Named {
    const char* name;
    MachineModel machine;
  };
  std::vector<Named> machines = {
      {"shared 3/3 GB/s", {}}, {"duplex 7/5, mixed 10", {}}, {"2 cores, 2/4 GB/s", {}}};
  machines[1].machine.read_bytes_per_s = 7e9;
  machines[1].machine.write_bytes_per_s = 5e9;
  machines[1].machine.mixed_bytes_per_s = 10e9;
  machines[2].machine.read_bytes_per_s = 2e9;
  machines[2].machine.write_bytes_per_s = 4e9;
  machines[2].machine.cores = machines[2].machine.compute_threads = 2;
  machines.push_back({"2 cores, 2/4 GB/s, 1 ms", machines[2].machine});
  machines[3].machine.io_latency_seconds = 1e-3;  // saturated by 2.7 MB
  std::string header = "| machine | model | compute / drive | budget | auto |";
  for (const Policy& policy : Policies()) header += std::string(" ") + policy.name + " |";
  std::printf("%s\n", header.c_str());
  for (const Named& machine : machines) {
    for (const bool tied : {false, true}) {
      const int layers = 10;
      const int64_t elements = tied ? 3 << 18 : 1 << 20;
      for (const double ratio : {0.3, 1.0, 3.0}) {
        // `make soak` has every cell.
        const bool first = &machine == machines.data();
        if ((tied ? !first || ratio != 1.0 : !first && ratio != 1.0) && tests::Soak() == 1) continue;
        ModelGraph graph = Model(layers, elements, tied, 0);
        const auto parameters = static_cast<double>(graph.elements());
        const double drive = machine.machine.drive_seconds(14 * parameters, 12 * parameters);
        graph = Model(layers, elements, tied, ratio * drive / 4 / layers);
        PlanOptions options;
        options.machine = machine.machine;
        const int64_t least = LeastHostMemory(graph, options);
        for (const double share : {0.0, 0.3, 0.7}) {
          // Of the way from the least to everything.
          if (share == 0.3 && tests::Soak() == 1) continue;
          options = PlanOptions();
          options.machine = machine.machine;
          options.host_memory_budget_bytes =
              least + static_cast<int64_t>(share * 14 * parameters) + (share > 0 ? 0 : 4 * kMiB);
          auto seconds = [&](const Policy& policy, bool compares) {
            options.bounds = policy.bounds;
            options.update_order = policy.order;
            options.compares_policies = compares;
            const absl::StatusOr<Plan> plan = MakePlan(graph, options);
            if (!plan.ok()) return 0.0;  // does not fit
            return Simulate(graph, *plan, options.machine, /*steps=*/4)->step_seconds;
          };
          const double best = seconds({"auto", {}}, /*compares=*/true);
          std::string row = "| " + std::string(machine.name) + " | " + (tied ? "tied" : "chain") + " | ";
          char text[64];
          std::snprintf(text, sizeof(text), "%.1f | %lld MiB | %.1f ms |", ratio,
                        static_cast<long long>(options.host_memory_budget_bytes / kMiB), best * 1e3);
          row += text;
          for (const Policy& policy : Policies()) {
            const double other = seconds(policy, /*compares=*/false);
            if (other == 0) {
              row += " - |";
              continue;
            }
            std::snprintf(text, sizeof(text), " %.3f |", other / best);
            row += text;
            EXPECT_LE(best, other * 1.005) << row << " by " << policy.name;
          }
          std::printf("%s\n", row.c_str());
        }
      }
    }
  }
}

}  // namespace
}  // namespace penstock::tiering::policy_test
