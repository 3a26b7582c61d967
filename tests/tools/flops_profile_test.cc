// What a profile says of a step's times, whatever the machine was worth while it was measured.
#include "tools/penstock/flops_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace penstock::tools::flops_profile_test {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string TextAt(double product_flops_per_second) {
  const std::vector<models::StageProducts> products = {{.stage = "h.0", .parameters = 1000}};
  const FlopsProfile profile({}, products,
                             {.sequences = 1,
                              .length = 10,
                              .parameters = 1000,
                              .product_flops_per_second = product_flops_per_second,
                              .product = "1024 x 1024 in fp32, threads: 2"});
  zero::StepResult result;
  result.step = 1;
  result.seconds = 1;
  return profile.Text(result);
}

TEST(FlopsProfiles, AShareIsOfTheProductThatWasMeasured) {
  // 2 x 1000 x 10 forward and twice that backward, in a second.
  EXPECT_THAT(TextAt(120'000),
              HasSubstr("that is 50.0% of the 120 kFLOP/s that a product of matrices reaches"));
  EXPECT_THAT(TextAt(0), Not(HasSubstr("product of matrices reaches")));
}

TEST(FlopsProfiles, NothingIsFasterThanTheMachine) {
  const std::string text = TextAt(20'000);
  EXPECT_THAT(
      text, HasSubstr("other work disturbed the product of matrices that this is held against, which came to "
                      "20 kFLOP/s"));
  EXPECT_THAT(text, Not(HasSubstr("300")));
}

}  // namespace
}  // namespace penstock::tools::flops_profile_test
