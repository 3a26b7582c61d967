// The `penstock` program in a control group that is smaller than the machine: it takes what the group leaves,
// says what it takes in all, and is refused, not killed, where that does not fit.
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <optional>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/tools/penstock_program.h"

namespace penstock::tools::penstock_cgroup_test {
namespace {

using testing::HasSubstr;
using namespace testing_support;

// A group of its own with a limit, of either version, at the root of its hierarchy; gone afterwards.
class Group {
 public:
  static std::optional<Group> Make(int64_t bytes) {
    const std::string name = absl::StrCat("/penstock-test-", getpid());
    for (const auto& [root, limit] :
         {std::pair{"/sys/fs/cgroup/memory", "/memory.limit_in_bytes"}, {"/sys/fs/cgroup", "/memory.max"}}) {
      const std::string path = root + name;
      if (mkdir(path.c_str(), 0755) != 0) continue;
      Group group(path);
      if (access((path + limit).c_str(), W_OK) != 0) continue;
      std::ofstream file(path + limit);
      file << bytes << std::flush;
      if (file.good()) return group;
    }
    return std::nullopt;
  }
  explicit Group(std::string path) : path_(std::move(path)) {}
  Group(Group&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  Group& operator=(Group&&) = delete;
  ~Group() {
    // A process that has just ended may still be counted for a moment.
    for (int i = 0; !path_.empty() && rmdir(path_.c_str()) != 0 && errno == EBUSY && i < 100; ++i)
      usleep(20'000);
  }
  // Arguments before a program that make it one of the group.
  Arguments launcher() const {
    return {"/bin/sh", "-c", "echo $$ > " + path_ + "/cgroup.procs; exec \"$@\"", "sh"};
  }

 private:
  std::string path_;
};

constexpr int64_t kMiB = 1 << 20;

class CgroupTest : public ProgramTest {
 protected:
  static constexpr int64_t kLimit = 320 * kMiB;
  void SetUp() override {
    if (std::optional<Group> made = Group::Make(kLimit); made.has_value()) group_.emplace(*std::move(made));
    if (!group_.has_value()) GTEST_SKIP() << "no control group can be made here";
  }
  Ran RunInGroup(const Arguments& arguments) { return Program(dir_, arguments, group_->launcher()).Wait(); }
  std::optional<Group> group_;
};

TEST_F(CgroupTest, TheDefaultBudgetIsThatOfTheGroup) {
  const Ran ran = RunInGroup({"train", "--model", "gpt-tiny", "--data", text_, "--steps", "2", "--threads",
                              "1", "--seq", "32", "--state-dir", dir_ + "/state"});
  ASSERT_EQ(ran.code, 0) << ran.err << ran.out;
  EXPECT_THAT(ran.out, HasSubstr("process: "));
  const size_t at = ran.out.find("half of what is free, ");
  ASSERT_NE(at, std::string::npos) << ran.out;
  const double mib = std::stod(ran.out.substr(at + 22));
  EXPECT_LT(mib, static_cast<double>(kLimit) / kMiB / 2) << ran.out;
}

TEST_F(CgroupTest, WhatDoesNotFitIsRefusedWithTheWayOut) {
  const Ran large = RunInGroup({"plan", "--model", "gpt-7b", "--seq", "16", "--batch", "1", "--threads", "1",
                                "--state-dir", dir_ + "/state", "--host-memory", "1GiB", "--no-probe"});
  EXPECT_EQ(large.code, 2) << large.err;
  EXPECT_THAT(large.err, HasSubstr("bytes are free here"));
  // A budget that the plan fits in, and the group does not hold.
  const Ran train =
      RunInGroup({"train", "--model", "gpt-125m", "--data", text_, "--steps", "1", "--threads", "1", "--seq",
                  "32", "--state-dir", dir_ + "/state", "--host-memory", "310MiB"});
  EXPECT_EQ(train.code, 2) << train.err << train.out;
  EXPECT_THAT(train.err, testing::AllOf(HasSubstr("memory in all"), HasSubstr("--host-memory ")));
}

}  // namespace
}  // namespace penstock::tools::penstock_cgroup_test
