// The parts of a run replaced by those of another number of ranks: all of them or none, whenever a kill
// comes.
#include "swap/replace_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "tests/swap/store_fixture.h"

namespace penstock::swap::replace_parts_test {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class ReplacePartsTest : public ::testing::Test {
 protected:
  ReplacePartsTest() : directories_{scratch_.Sub("a"), scratch_.Sub("b")} {}

  // Directories of part `rank` of `ranks`.
  static std::vector<std::string> PartOf(std::vector<std::string> directories, int rank, int ranks) {
    if (ranks > 1) {
      for (std::string& directory : directories) directory = RankDirectory(directory, rank);
    }
    return directories;
  }

  static aio::EngineOptions Quiet() {
    aio::EngineOptions options;
    options.log = [](std::string_view) {};
    return options;
  }

  // All parts, one commit each.
  static absl::Status Make(const std::vector<std::string>& directories, int ranks,
                           const std::string& payload) {
    auto engine = aio::Engine::Create(Quiet());
    if (!engine.ok()) return engine.status();
    for (int rank = 0; rank < ranks; ++rank) {
      StoreOptions options;
      options.directories = PartOf(directories, rank, ranks);
      options.uuid = Uuid{static_cast<uint8_t>(payload.front())};  // of all parts of a run
      const Layout layout = SmallLayout();
      auto store = Store::Create(**engine, options, layout, absl::StrCat("{\"rank\": ", rank, "}"));
      if (!store.ok()) return store.status();
      FakeModel model(layout, static_cast<uint64_t>(rank));
      model.Initialize();
      if (absl::Status status = model.WriteAll(**store, 1); !status.ok()) return status;
      if (absl::Status status = (*store)->CommitNow({.payload = payload}); !status.ok()) return status;
    }
    std::ofstream(PartOf(directories, 0, ranks).front() + "/" + kDescriptionFile) << payload;
    return absl::OkStatus();
  }

  // In a process of its own, which has an engine's threads and locks: its exit code; -1: killed.
  template <typename Body>
  static int InAProcess(const Body& body) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(body());
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  std::vector<std::string> StoresThere() const {
    std::vector<std::string> paths;
    for (const std::string& directory : directories_) {
      for (const auto& entry : fs::recursive_directory_iterator(directory)) {
        if (entry.path().filename() == kStoreFileName) paths.push_back(entry.path());
      }
    }
    std::sort(paths.begin(), paths.end());
    return paths;
  }

  void ExpectParts(int ranks, const std::string& payload) const {
    std::vector<std::string> paths;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<std::string> part = PartOf(directories_, rank, ranks);
      for (const std::string& directory : part) paths.push_back(StorePath(directory));
      const auto inspection = Inspect(part);
      ASSERT_TRUE(inspection.ok()) << inspection.status();
      EXPECT_EQ(inspection->record.payload, payload);
    }
    std::sort(paths.begin(), paths.end());
    EXPECT_THAT(StoresThere(), ElementsAreArray(paths));
    for (const std::string& next : NextDirectories(directories_)) EXPECT_FALSE(fs::exists(next)) << next;
    EXPECT_FALSE(*IsReplacementCutShort(directories_));
    std::ifstream described(PartOf(directories_, 0, ranks).front() + "/" + kDescriptionFile);
    std::string text;
    described >> text;
    EXPECT_EQ(text, "old");  // it goes with the parts, whoever made them
  }

  // 2 parts are replaced by 3, and a kill comes before this change. Returns whether it came.
  bool CutShort(int before) const {
    for (const std::string& directory : directories_) fs::remove_all(directory);
    EXPECT_EQ(InAProcess([&] { return Make(directories_, 2, "old").ok() ? 0 : 1; }), 0);
    const int code = InAProcess([&] {
      const auto replacement = PartsReplacement::Begin(directories_);
      if (!replacement.ok() || !Make(NextDirectories(directories_), 3, "new").ok()) return 1;
      fs::remove(PartOf(NextDirectories(directories_), 0, 3).front() + "/" + kDescriptionFile);
      const absl::Status done = (*replacement)->Commit([left = before]() mutable {
        if (left-- == 0) ::kill(::getpid(), SIGKILL);
      });
      return done.ok() ? 0 : 2;
    });
    EXPECT_TRUE(code == -1 || code == 0) << code;
    return code == -1;
  }

  ScratchDirectory scratch_;
  const std::vector<std::string> directories_;
};

TEST_F(ReplacePartsTest, EveryKillLeavesAllOldPartsOrAllNewOnes) {
  for (const auto& [from, to] : {std::pair{2, 3}, {3, 2}, {1, 2}, {2, 1}}) {
    SCOPED_TRACE(testing::Message() << from << " to " << to);
    bool replaced = false, killed = true;
    int changes = 0;
    for (; killed; ++changes) {
      SCOPED_TRACE(changes);
      for (const std::string& directory : directories_) fs::remove_all(directory);
      ASSERT_EQ(InAProcess([&, from = from] { return Make(directories_, from, "old").ok() ? 0 : 1; }), 0);
      const int code = InAProcess([&, to = to] {
        const auto replacement = PartsReplacement::Begin(directories_);
        if (!replacement.ok() || !Make(NextDirectories(directories_), to, "new").ok()) return 1;
        fs::remove(PartOf(NextDirectories(directories_), 0, to).front() + "/" + kDescriptionFile);
        const absl::Status done = (*replacement)->Commit([left = changes]() mutable {
          if (left-- == 0) ::kill(::getpid(), SIGKILL);
        });
        return done.ok() ? 0 : 2;
      });
      killed = code == -1;
      ASSERT_TRUE(killed || code == 0) << code;
      EXPECT_EQ(InAProcess([&] { return FinishReplacement(directories_).ok() ? 0 : 1; }), 0);
      const auto there = Inspect(PartOf(directories_, 0, to));
      const bool now = there.ok() && there->record.payload == "new";
      EXPECT_TRUE(now || !replaced) << "new parts went back";
      replaced = now;
      ExpectParts(replaced ? to : from, replaced ? "new" : "old");
      EXPECT_EQ(replaced, changes > 0);
    }
    EXPECT_GT(changes, 6);
  }
}

// Who starts again may name the directories in another order, forget one, or have it not mounted.
TEST_F(ReplacePartsTest, ACutIsFinishedWithAllDirectoriesInAnyOrderAndWithNoneLess) {
  const std::vector<std::string> other = {directories_[1], directories_[0]};
  const std::vector<std::vector<std::string>> less = {{directories_[0]}, {directories_[1]}};
  for (int before = 0; CutShort(before); ++before) {
    SCOPED_TRACE(before);
    const bool counts = *IsReplacementCutShort(other);
    for (const std::vector<std::string>& directories : less) (void)FinishReplacement(directories);
    for (const std::string& missing : directories_) {
      fs::rename(missing, missing + "-elsewhere");
      fs::create_directory(missing);
      (void)FinishReplacement(directories_);
      (void)FinishReplacement(other);
      fs::remove_all(missing);
      fs::rename(missing + "-elsewhere", missing);
    }
    const absl::Status finished = FinishReplacement(other);
    EXPECT_TRUE(finished.ok()) << finished;
    ExpectParts(counts || before > 0 ? 3 : 2, counts || before > 0 ? "new" : "old");
  }
}

// What the new parts' moves would fail at is found while the old ones are the run.
TEST_F(ReplacePartsTest, WhatCannotBeMovedIsRefusedAndTheOldPartsStay) {
  ASSERT_TRUE(Make(directories_, 2, "old").ok());
  const std::string memory = absl::StrCat("/dev/shm/penstock-replace-", ::getpid());
  if (!fs::create_directory(memory)) GTEST_SKIP() << "no other file system";
  const std::string third = directories_[0] + "/rank-2";
  fs::create_directory_symlink(memory, third);
  EXPECT_THAT(std::string(PartsReplacement::Begin(directories_).status().message()),
              HasSubstr(third + " is on another file system"));
  fs::remove(third);
  {
    const auto replacement = PartsReplacement::Begin(directories_);
    ASSERT_TRUE(replacement.ok()) << replacement.status();
    ASSERT_TRUE(Make(NextDirectories(directories_), 3, "new").ok());
    fs::remove(PartOf(NextDirectories(directories_), 0, 3).front() + "/" + kDescriptionFile);
    fs::create_directory_symlink(memory, third);
    EXPECT_THAT(std::string((*replacement)->Commit().message()), HasSubstr("is on another file system"));
    fs::remove(third);
    std::ofstream(third) << "a file";
    EXPECT_THAT(std::string((*replacement)->Commit().message()), HasSubstr("Not a directory"));
    fs::remove(third);
    fs::remove_all(NextDirectories(directories_)[1] + "/rank-2");  // somebody has cleared it
    EXPECT_THAT(std::string((*replacement)->Commit().message()),
                HasSubstr(".penstock.next/rank-2/penstock.store"));
  }
  fs::remove_all(memory);
  EXPECT_TRUE(FinishReplacement(directories_).ok());
  fs::remove_all(NextDirectories(directories_)[0]);
  ExpectParts(2, "old");
}

TEST_F(ReplacePartsTest, APartOfAnotherRunIsNotRemoved) {
  ASSERT_TRUE(Make(directories_, 2, "old").ok());
  const std::string other = scratch_.Sub("c"), there = directories_[0] + "/rank-7";
  ASSERT_TRUE(Make({other}, 1, "another").ok());
  fs::rename(other, there);
  EXPECT_THAT(std::string(PartsReplacement::Begin(directories_).status().message()),
              HasSubstr(there + "/penstock.store is of another run"));
  fs::remove_all(there);
  fs::copy(directories_[0] + "/rank-1", there);
  EXPECT_THAT(std::string(PartsReplacement::Begin(directories_).status().message()),
              HasSubstr("/penstock.store is a copy of what is in "));
  EXPECT_TRUE(fs::exists(there + "/penstock.store"));
}

TEST_F(ReplacePartsTest, APartThatWasTrainedOnMeanwhileStays) {
  ASSERT_TRUE(Make(directories_, 2, "old").ok());
  {
    const auto replacement = PartsReplacement::Begin(directories_);
    ASSERT_TRUE(replacement.ok()) << replacement.status();
    EXPECT_THAT(std::string(PartsReplacement::Begin(directories_).status().message()),
                HasSubstr("another process changes its number of ranks"));
    ASSERT_TRUE(Make(NextDirectories(directories_), 3, "new").ok());
    auto engine = aio::Engine::Create(Quiet());
    ASSERT_TRUE(engine.ok());
    StoreOptions options;
    options.directories = PartOf(directories_, 1, 2);
    auto store = Store::Open(**engine, options);
    ASSERT_TRUE(store.ok()) << store.status();
    FakeModel model(SmallLayout(), 1);
    model.Initialize();
    model.UpdateAll(1);
    ASSERT_TRUE(model.WriteAll(**store, 2).ok());
    ASSERT_TRUE((*store)->CommitNow({.step = 1, .updates = 1, .payload = "old"}).ok());
    store->reset();
    EXPECT_THAT(std::string((*replacement)->Commit().message()), HasSubstr("has come to step 1"));
    fs::remove(PartOf(NextDirectories(directories_), 0, 3).front() + "/" + kDescriptionFile);
  }
  ExpectParts(2, "old");
}

}  // namespace
}  // namespace penstock::swap::replace_parts_test
