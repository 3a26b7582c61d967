// The secret of a run's ranks in a directory that they share: one, whoever makes it, and nobody else's.
#include "zero/ranks/secret_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/swap/scratch_directory.h"

namespace penstock::zero::secret_file_test {
namespace {

class SecretFile : public testing::Test {
 protected:
  std::string Path() const { return dir_ + "/" + kSecretFile; }
  void Write(const std::string& text, mode_t mode) const {
    std::filesystem::create_directories(dir_);
    std::ofstream(Path()) << text;
    chmod(Path().c_str(), mode);
  }
  const swap::ScratchDirectory scratch_;
  const std::string dir_ = scratch_.path() + "/state/of a run";
};

TEST_F(SecretFile, IsMadeOnceForItsOwnerAlone) {
  std::vector<std::future<absl::StatusOr<std::string>>> ranks;
  for (int i = 0; i < 16; ++i) {
    ranks.push_back(std::async(std::launch::async, [&] { return SecretIn(dir_); }));
  }
  std::set<std::string> secrets;
  for (auto& rank : ranks) {
    const auto secret = rank.get();
    ASSERT_TRUE(secret.ok()) << secret.status();
    secrets.insert(*secret);
  }
  ASSERT_EQ(secrets.size(), 1u) << "all ranks have one";
  EXPECT_EQ(secrets.begin()->size(), 64u);
  struct stat info {};
  ASSERT_EQ(stat(Path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir_), {}), 1) << "nothing else is left";
  EXPECT_EQ(*SecretIn(dir_), *secrets.begin());
}

TEST_F(SecretFile, OneThatOthersMayReadIsRefused) {
  Write(std::string(64, 'a') + "\n", 0640);
  const auto secret = SecretIn(dir_);
  EXPECT_EQ(secret.status().code(), absl::StatusCode::kPermissionDenied) << secret.status();
  EXPECT_TRUE(absl::StrContains(secret.status().message(), "chmod 600")) << secret.status();
  chmod(Path().c_str(), 0600);
  EXPECT_TRUE(SecretIn(dir_).ok());
  if (geteuid() != 0) return;
  ASSERT_EQ(chown(Path().c_str(), 12345, 12345), 0);
  EXPECT_EQ(SecretIn(dir_).status().code(), absl::StatusCode::kPermissionDenied) << "another user's";
}

TEST_F(SecretFile, WhatIsNoSecretIsRefusedInWords) {
  for (const std::string& text : {std::string(), std::string(64, 'z'), std::string(63, 'a'),
                                  std::string(65, 'a'), std::string(100000, 'a')}) {
    Write(text, 0600);
    const auto secret = SecretIn(dir_);
    EXPECT_EQ(secret.status().code(), absl::StatusCode::kFailedPrecondition) << secret.status();
    EXPECT_TRUE(absl::StrContains(secret.status().message(), Path())) << secret.status();
  }
  // Nothing that blocks, and no link to somewhere else.
  unlink(Path().c_str());
  ASSERT_EQ(mkfifo(Path().c_str(), 0600), 0);
  EXPECT_FALSE(SecretIn(dir_).ok());
  unlink(Path().c_str());
  std::ofstream(scratch_.path() + "/elsewhere") << std::string(64, 'a');
  ASSERT_EQ(symlink((scratch_.path() + "/elsewhere").c_str(), Path().c_str()), 0);
  EXPECT_FALSE(SecretIn(dir_).ok());
}

}  // namespace
}  // namespace penstock::zero::secret_file_test
