// `penstock train` where the first steps take much longer than was predicted: it is planned once more, and
// goes on with the same bits. The clock runs faster from the moment that the run's state is made, so that all
// that was measured before is wrong by the same factor, however long anything takes.
#include <string>
#include <vector>

#include "tests/tools/penstock_state.h"

namespace penstock::tools::penstock_replan_test {
namespace {

using testing::HasSubstr;
using testing::Not;
using namespace testing_support;

class ReplanCliTest : public CliTest {
 protected:
  static Arguments Loud(Arguments arguments) {
    std::erase(arguments, "--quiet");
    return arguments;
  }
  Ran TrainFast(const std::string& state, const Arguments& more) {
    return Program(
               dir_,
               Loud(Train(state, Arguments{"--steps", "8", "--batch", "1", "--seq", "64", "--host-memory",
                                           "64MiB", "--log", state + ".log", "--report", state + ".json"} +
                                     more)),
               {"env", "LD_PRELOAD=" PENSTOCK_FAST_CLOCK, "FAST_CLOCK_FACTOR=40",
                "FAST_CLOCK_FROM=" + state + "/penstock.store"})
        .Wait();
  }
  static json Report(const std::string& state) { return json::parse(ReadFile(state + ".json")); }
};

TEST_F(ReplanCliTest, ARunWhoseStepsTakeMuchLongerIsPlannedOnceMoreWithTheSameBits) {
  const std::string replans = dir_ + "/replans", stays = dir_ + "/stays";
  const Ran again = TrainFast(replans, {}), off = TrainFast(stays, {"--replan", "off"});
  ASSERT_EQ(again.code, 0) << again.err;
  ASSERT_EQ(off.code, 0) << off.err;
  EXPECT_EQ(Losses(replans + ".log"), Losses(stays + ".log"));
  EXPECT_EQ(Losses(replans + ".log").size(), 8u);
  EXPECT_THAT(again.err, HasSubstr("planned again after step 3: a step was predicted to take "));
  EXPECT_THAT(off.err, Not(HasSubstr("planned again")));
  const json report = Report(replans), told = report["replanned"];
  EXPECT_EQ(told["after_step"], 3);
  EXPECT_GE(told["measured_step_seconds"].get<double>(), 1.5 * told["predicted_step_seconds"].get<double>());
  EXPECT_THAT(told["outcome"].get<std::string>(), testing::AnyOf("moved", "stays", "unexplained"));
  EXPECT_EQ(told["moved"].empty(), told["outcome"] != "moved");
  EXPECT_LE(report["peak_managed_bytes"], report["host_memory_budget_bytes"]);
  EXPECT_TRUE(Report(stays)["replanned"].is_null());
  // It goes on wherever it was left, and may be planned once more by its own first steps.
  const Ran resumed = Run(Train(replans, {"--resume", "--steps", "9", "--log", replans + ".log"}));
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(Losses(replans + ".log").size(), 9u);
}

TEST_F(ReplanCliTest, WhereItHasNoEffectALineSaysSoToWhoAsksForIt) {
  const Arguments in_memory = {"--offload", "cpu", "--steps", "2", "--batch", "1", "--seq", "32"};
  const Arguments asked = Loud(Train(dir_ + "/a", in_memory + Arguments{"--replan", "auto"}));
  const Arguments unasked = Loud(Train(dir_ + "/b", in_memory));
  const std::string line = "penstock.replan \"auto\": of no effect without offload to nvme";
  EXPECT_THAT(Run(asked).out, HasSubstr(line));
  EXPECT_THAT(Run(unasked).out, Not(HasSubstr(line)));
}

}  // namespace
}  // namespace penstock::tools::penstock_replan_test
