// Small files, directories and files that are replaced whole.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/atomic_file.h"
#include "base/directory.h"
#include "base/small_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace penstock {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FilesTest : public ::testing::Test {
 protected:
  FilesTest() {
    std::string pattern = std::filesystem::current_path().string() + "/base-files-XXXXXX";
    if (::mkdtemp(pattern.data()) != nullptr) directory_ = pattern;
  }
  ~FilesTest() override {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  std::string Put(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name), std::ios::binary) << text;
    return Path(name);
  }
  std::vector<std::string> Names() const { return ListDirectory(directory_).value(); }

  std::string directory_;
};

TEST_F(FilesTest, ASmallFileComesBackWhole) {
  const std::string text(100'000, 'x');
  EXPECT_EQ(ReadSmallFile(Put("a", text)).value(), text);
  EXPECT_EQ(ReadSmallFile(Put("b", "")).value(), "");
  EXPECT_EQ(ReadSmallFile(Path("a"), 100'000).value(), text);
}

TEST_F(FilesTest, TheKernelsOwnFilesHaveNoSizeAndAreRead) {
  EXPECT_THAT(ReadSmallFile("/proc/self/status").value(), HasSubstr("Pid:"));
}

TEST_F(FilesTest, WhatIsNoRegularFileIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(Path("pipe").c_str(), 0600), 0);
  for (const std::string& path : {Path("pipe"), directory_, std::string("/dev/zero")}) {
    const auto read = ReadSmallFile(path);
    EXPECT_TRUE(absl::IsFailedPrecondition(read.status())) << path << ": " << read.status();
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(path));
  }
  EXPECT_TRUE(absl::IsNotFound(ReadSmallFile(Path("none")).status()));
}

TEST_F(FilesTest, AFileBeyondTheLimitIsRefusedSparseOrNot) {
  Put("sparse", "");
  ASSERT_EQ(::truncate(Path("sparse").c_str(), off_t{1} << 40), 0);
  for (const uint64_t limit : {uint64_t{10}, kSmallFileBytes}) {
    const auto read = ReadSmallFile(Path("sparse"), limit);
    EXPECT_TRUE(absl::IsInvalidArgument(read.status())) << read.status();
    EXPECT_THAT(std::string(read.status().message()), HasSubstr("longer than"));
  }
  EXPECT_FALSE(ReadSmallFile(Put("eleven", "12345678901"), 10).ok());
}

TEST_F(FilesTest, WhatAPathNamesIsToldApartFromWhatCannotBeSeen) {
  Put("file", "x");
  ASSERT_EQ(::symlink("file", Path("link").c_str()), 0);
  ASSERT_EQ(::symlink("none", Path("broken").c_str()), 0);
  EXPECT_EQ(KindOf(Path("file")).value(), PathKind::kRegular);
  EXPECT_EQ(KindOf(Path("link")).value(), PathKind::kRegular);
  EXPECT_EQ(LinkKindOf(Path("link")).value(), PathKind::kLink);
  EXPECT_EQ(KindOf(Path("broken")).value(), PathKind::kMissing);
  EXPECT_EQ(KindOf(directory_).value(), PathKind::kDirectory);
  EXPECT_EQ(KindOf(Path("file/below")).value(), PathKind::kMissing);
  EXPECT_EQ(KindOf("/dev/null").value(), PathKind::kOther);
  EXPECT_FALSE(KindOf(Path(std::string(300, 'n'))).ok());  // ENAMETOOLONG is no absence
  EXPECT_FALSE(PathExists(Path(std::string(300, 'n'))).ok());
}

TEST_F(FilesTest, AListingIsSortedAndAMissingDirectoryIsSaid) {
  Put("b", "");
  Put("a", "");
  EXPECT_THAT(Names(), ElementsAre("a", "b"));
  EXPECT_TRUE(absl::IsNotFound(ListDirectory(Path("none")).status()));
  EXPECT_THAT(ListDirectoryIfThere(Path("none")).value(), IsEmpty());
  EXPECT_FALSE(ListDirectoryIfThere(Path("a")).ok());  // a file: ENOTDIR
}

TEST_F(FilesTest, TheDirectoryOfAPath) {
  EXPECT_EQ(DirectoryOf("a/b"), "a");
  EXPECT_EQ(DirectoryOf("b"), ".");
  EXPECT_EQ(DirectoryOf("/b"), "/");
  EXPECT_EQ(DirectoryOf("a/b/"), "a");
  EXPECT_EQ(DirectoryOf("a//b"), "a");
  EXPECT_EQ(DirectoryOf("/"), "/");
}

TEST_F(FilesTest, AReplacedFileHasTheNewTextTheOldModeAndNothingBesideIt) {
  ASSERT_TRUE(ReplaceFile(Path("f"), "one").ok());
  ASSERT_EQ(::chmod(Path("f").c_str(), 0640), 0);
  ASSERT_TRUE(ReplaceFile(Path("f"), "two").ok());
  EXPECT_EQ(ReadSmallFile(Path("f")).value(), "two");
  EXPECT_EQ(std::filesystem::status(Path("f")).permissions(), static_cast<std::filesystem::perms>(0640));
  EXPECT_THAT(Names(), ElementsAre("f"));
}

TEST_F(FilesTest, WithoutACommitNothingHasChanged) {
  Put("f", "old");
  {
    auto file = AtomicFile::Create(Path("f"));
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(file->Write("new").ok());
    AtomicFile moved = *std::move(file);
    EXPECT_EQ(Names().size(), 2U);
  }
  EXPECT_EQ(ReadSmallFile(Path("f")).value(), "old");
  EXPECT_THAT(Names(), ElementsAre("f"));
}

TEST_F(FilesTest, LinksAreReplacedAndNotFollowed) {
  Put("victim", "mine");
  ASSERT_EQ(::symlink("victim", Path("f").c_str()), 0);
  ASSERT_TRUE(ReplaceFile(Path("f"), "new").ok());
  EXPECT_EQ(ReadSmallFile(Path("victim")).value(), "mine");
  EXPECT_EQ(LinkKindOf(Path("f")).value(), PathKind::kRegular);
}

TEST_F(FilesTest, WhatMustNotBeReplacedIsNot) {
  Put("f", "old");
  EXPECT_TRUE(absl::IsAlreadyExists(ReplaceFile(Path("f"), "new", {.replace = false})));
  // Taken between Create and Commit.
  auto file = AtomicFile::Create(Path("g"), {.replace = false});
  ASSERT_TRUE(file.ok());
  Put("g", "theirs");
  EXPECT_TRUE(absl::IsAlreadyExists(file->Commit()));
  EXPECT_EQ(ReadSmallFile(Path("g")).value(), "theirs");
  EXPECT_FALSE(ReplaceFile(directory_, "new").ok());
  EXPECT_TRUE(absl::IsNotFound(ReplaceFile(Path("none/f"), "new")));
}

TEST_F(FilesTest, ManyAtOnceNeverMix) {
  std::vector<std::thread> threads;
  for (char c = 'a'; c < 'e'; ++c) {
    threads.emplace_back([&, c] {
      for (int i = 0; i < 50; ++i) EXPECT_TRUE(ReplaceFile(Path("f"), std::string(5000, c)).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string text = ReadSmallFile(Path("f")).value();
  EXPECT_EQ(text, std::string(5000, text[0]));
  EXPECT_THAT(Names(), ElementsAre("f"));
}

}  // namespace
}  // namespace penstock
