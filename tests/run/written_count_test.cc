// A refused start leaves the file of a budget of wear, and its directories, as they were.
#include "run/watch/written_count.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace penstock::run::written_count_test {
namespace {

namespace fs = std::filesystem;

class WrittenCountTest : public testing::Test {
 protected:
  WrittenCountTest() {
    std::string name = (fs::current_path() / "written-XXXXXX").string();
    root_ = ::mkdtemp(name.data());
  }
  ~WrittenCountTest() override { fs::remove_all(root_); }
  std::string root_;
};

TEST_F(WrittenCountTest, DirectoriesAreTheStoresAndGoAgain) {
  const std::string directory = root_ + "/s/rank-0";
  WrittenCount count(directory);
  ASSERT_TRUE(count.Save("run", 5).ok());
  for (const std::string& made : {root_ + "/s", directory}) {
    struct stat info {};
    ASSERT_EQ(::stat(made.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0700u) << made;
  }
  ASSERT_TRUE(count.Revert().ok());
  EXPECT_TRUE(fs::is_empty(root_));
}

TEST_F(WrittenCountTest, WhatOthersMadeStays) {
  const std::string directory = root_ + "/s/rank-0";
  WrittenCount count(directory);
  ASSERT_TRUE(count.Save("run", 5).ok());
  std::ofstream(root_ + "/s/another") << "1";
  ASSERT_TRUE(count.Revert().ok());
  EXPECT_FALSE(fs::exists(directory));
  EXPECT_TRUE(fs::exists(root_ + "/s/another"));
  // The count of the run that was to be replaced is back.
  WrittenCount old(root_ + "/s"), refused(root_ + "/s");
  ASSERT_TRUE(old.Save("old", 7).ok());
  ASSERT_TRUE(refused.Save("new", 9).ok());
  ASSERT_TRUE(refused.Revert().ok());
  const auto found = WrittenCount::Read(root_ + "/s", {{"run_id", "old"}, {"written_bytes", 3}});
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->before(), 7);
}

}  // namespace
}  // namespace penstock::run::written_count_test
