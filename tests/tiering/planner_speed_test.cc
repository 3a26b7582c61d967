// How long planning takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <limits>
#include <string>

#include "tests/tiering/plans.h"

namespace penstock::tiering {
namespace {

TEST(Planner, AThousandBlocksArePlannedWithinSeconds) {
  const ModelGraph graph = Chain(1000, 3 << 18, 1e-3);
  PlanOptions options;
  options.host_memory_budget_bytes = int64_t{2} << 30;
  // The processor's time, as the machine may have other work; the best of three, as that makes it slower too.
  double seconds = std::numeric_limits<double>::max();
  for (int attempt = 0; attempt < 3 && seconds >= 1.0; ++attempt) {
    const std::clock_t begin = std::clock();
    const absl::StatusOr<Plan> plan = MakePlan(graph, options);
    seconds = std::min(seconds, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
    ASSERT_TRUE(plan.ok()) << plan.status();
  }
  RecordProperty("seconds", std::to_string(seconds));
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(seconds, 2.0) << "a second where it was measured; a processor may be half as fast";
#endif
}

}  // namespace
}  // namespace penstock::tiering
