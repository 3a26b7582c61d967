// A test program that ends with more open descriptors than it began with has failed, whatever its tests say.
#ifndef PENSTOCK_TESTS_SWAP_NO_LEAK_H_
#define PENSTOCK_TESTS_SWAP_NO_LEAK_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

namespace penstock::swap {

class NoLeakedDescriptors : public ::testing::Environment {
 public:
  void SetUp() override { before_ = Open(); }
  void TearDown() override { EXPECT_EQ(Open(), before_) << "descriptors were left open"; }

 private:
  static ptrdiff_t Open() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  }
  ptrdiff_t before_ = 0;
};

inline const ::testing::Environment* const kNoLeakedDescriptors =
    ::testing::AddGlobalTestEnvironment(new NoLeakedDescriptors);

}  // namespace penstock::swap

#endif  // PENSTOCK_TESTS_SWAP_NO_LEAK_H_
