#include "zero/config/nearest_name.h"

#include <gtest/gtest.h>

namespace penstock::zero::nearest_name_test {
namespace {

TEST(EditDistance, CountsEditsAndSwaps) {
  EXPECT_EQ(EditDistance("", ""), 0u);
  EXPECT_EQ(EditDistance("abc", ""), 3u);
  EXPECT_EQ(EditDistance("", "abc"), 3u);
  EXPECT_EQ(EditDistance("device", "device"), 0u);
  EXPECT_EQ(EditDistance("device", "Device"), 0u);
  EXPECT_EQ(EditDistance("devise", "device"), 1u);
  EXPECT_EQ(EditDistance("deivce", "device"), 1u);  // a swap is one edit
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3u);
  EXPECT_EQ(EditDistance("ca", "abc"), 3u);  // optimal string alignment: a swapped pair is not edited again
  EXPECT_EQ(EditDistance(std::string(1000, 'a'), std::string(1000, 'b')), 128u);
}

TEST(NearestName, FindsTheMeantOne) {
  const std::vector<std::string_view> names = {"device", "nvme_path", "buffer_count", "buffer_size",
                                               "max_in_cpu"};
  EXPECT_EQ(NearestName("devise", names), "device");
  EXPECT_EQ(NearestName("nvmepath", names), "nvme_path");
  EXPECT_EQ(NearestName("buffer_sise", names), "buffer_size");
  EXPECT_EQ(NearestName("buff", names), "buffer_count");
  EXPECT_EQ(NearestName("zebra", names), std::nullopt);
  EXPECT_EQ(NearestName("x", names), std::nullopt);
  EXPECT_EQ(NearestName("path_nvme", names), "nvme_path");
  EXPECT_EQ(NearestName("device", {}), std::nullopt);
}

TEST(DidYouMean, IsEmptyOrASuggestion) {
  EXPECT_EQ(DidYouMean("stpes", {"steps", "seq"}, "--"), " (did you mean \"--steps\"?)");
  EXPECT_EQ(DidYouMean("qqqqqq", {"steps", "seq"}), "");
}

}  // namespace
}  // namespace penstock::zero::nearest_name_test
