// State directories as flags and configurations name them.
#include "run/state_directories.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "run/config.h"

namespace penstock::run::state_directories_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(StateDirectories, AWeightFollowsTheLastEqualsSign) {
  const auto parsed = ParseStateDirectories({"/a=3", "/b", "/c=x=0.5"});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_THAT(parsed->paths, ElementsAre("/a", "/b", "/c=x"));
  EXPECT_THAT(parsed->weights, ElementsAre(3, 1, 0.5));
  EXPECT_THAT(ParseStateDirectories({"/a", "/b=c"})->weights, IsEmpty());
  EXPECT_THAT(ParseStateDirectories({"/a", "/b=c"})->paths, ElementsAre("/a", "/b=c"));
  // A directory that has the whole name is meant by it.
  const std::string literal = absl::StrCat(testing::TempDir(), "state_directories.", getpid(), "=2");
  std::filesystem::create_directory(literal);
  EXPECT_THAT(ParseStateDirectories({literal})->paths, ElementsAre(literal));
  std::filesystem::remove(literal);
  for (const char* wrong : {"/a=0", "/a=-1", "/a=inf", "/a=nan", "/a=1e7", "=2", ""})
    EXPECT_EQ(ParseStateDirectories({wrong}).status().code(), absl::StatusCode::kInvalidArgument) << wrong;
}

TEST(StateDirectories, TheConfigurationNamesThemToo) {
  const auto parsed = ParseConfig(
      R"({"penstock": {"state_dirs": ["/a=2", "/b"]},
          "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/c"}}})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const auto directories = StateDirectoriesOf(parsed->config);
  ASSERT_TRUE(directories.ok()) << directories.status();
  EXPECT_THAT(directories->paths, ElementsAre("/a", "/b"));
  EXPECT_THAT(directories->weights, ElementsAre(2, 1));
  for (const char* wrong : {"[]", "\"/a\"", "[\"\"]", "[3]", "{}"}) {
    const auto refused = ParseConfig(absl::StrCat(R"({"penstock": {"state_dirs": )", wrong, "}}"));
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("penstock.state_dirs: ")) << wrong;
  }
  const auto weight = ParseConfig(R"({"penstock": {"state_dirs": ["/a=0"]}})");
  ASSERT_TRUE(weight.ok());
  EXPECT_THAT(std::string(StateDirectoriesOf(weight->config).status().message()),
              HasSubstr("penstock.state_dirs: /a=0: the weight"));
}

}  // namespace
}  // namespace penstock::run::state_directories_test
