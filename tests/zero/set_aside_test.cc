// A run of another number of ranks waits aside until these have made theirs of it: whatever is killed, one of
// the two is whole.
#include "zero/ranks/set_aside.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "aio/engine.h"
#include "swap/checkpoint.h"
#include "swap/inspect.h"
#include "swap/store.h"
#include "tests/swap/scratch_directory.h"
#include "zero/ranks/sharded_state.h"

namespace penstock::zero {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class SetAsideTest : public testing::Test {
 protected:
  SetAsideTest() {
    absl::StatusOr<std::unique_ptr<aio::Engine>> io = aio::Engine::Create({});
    EXPECT_TRUE(io.ok());
    io_ = *std::move(io);
  }

  // The part of a rank of so many, of one tile, at that step; of one rank in `directory` itself.
  std::unique_ptr<swap::Store> Part(const std::string& directory, int rank, int ranks, uint64_t step) {
    json identity = {{"model", "made up"}};
    if (ranks > 1) identity.update({{"ranks", ranks}, {"rank", rank}});
    swap::StoreOptions options;
    options.directories = {ranks == 1 ? directory : swap::RankDirectory(directory, rank)};
    options.overwrite = true;
    options.uuid = swap::Uuid{static_cast<uint8_t>(ranks)};
    swap::Layout layout;
    layout.tiles.push_back({.segment_bytes = {4096}});
    absl::StatusOr<std::unique_ptr<swap::Store>> store =
        swap::Store::Create(*io_, options, layout, identity.dump());
    EXPECT_TRUE(store.ok()) << store.status();
    if (!store.ok()) return nullptr;
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(4096, 4096), &std::free);
    std::memset(memory.get(), ranks, 4096);
    const std::array<const void*, 1> sources = {memory.get()};
    swap::TileIo io_of_tile;
    EXPECT_TRUE((*store)->WriteTileNow(&io_of_tile, 0, 1, sources, aio::Priority::kWriteBehind).ok());
    EXPECT_TRUE((*store)->CommitNow({.step = step, .updates = step, .payload = "{}"}).ok());
    return *std::move(store);
  }
  void MakeRun(int ranks, uint64_t step) {
    for (int rank = 0; rank < ranks; ++rank) Part(dir_, rank, ranks, step);
  }
  absl::StatusOr<OtherRanks> Find(const std::string& checkpoint = "") {
    return SetOtherRanksAside({dir_}, checkpoint, /*comm=*/nullptr);
  }
  static uint64_t StepOf(const std::vector<std::string>& directories) {
    const absl::StatusOr<ShardDirectories> parts = FindShards(directories);
    EXPECT_TRUE(parts.ok()) << parts.status();
    if (!parts.ok()) return 0;
    const auto inspections = InspectShards(*parts);
    EXPECT_TRUE(inspections.ok()) << inspections.status();
    return inspections.ok() ? inspections->front().record.step : 0;
  }
  bool There(const std::string& name) const { return std::filesystem::exists(dir_ + "/" + name); }

  const swap::ScratchDirectory scratch_;
  const std::string dir_ = scratch_.path() + "/state";
  std::unique_ptr<aio::Engine> io_;
};

TEST_F(SetAsideTest, ARunOfAsManyRanksAndNoneStayWhereTheyAre) {
  absl::StatusOr<OtherRanks> found = Find();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->ranks, 0);
  MakeRun(1, 5);
  found = Find();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->ranks, 0);
  EXPECT_EQ(StepOf({dir_}), 5U);
}

TEST_F(SetAsideTest, WhateverWasMovedWhenTheProcessesWereKilledTheRunIsWholeAside) {
  for (int moved = 0; moved <= 3; ++moved) {
    std::filesystem::remove_all(dir_);
    MakeRun(3, 7);
    const std::string aside = dir_ + "/.penstock.of-3-ranks";
    for (int rank = 0; rank < moved; ++rank) {
      std::filesystem::create_directories(aside);
      std::filesystem::rename(swap::RankDirectory(dir_, rank), swap::RankDirectory(aside, rank));
    }
    for (int attempt = 0; attempt < 2; ++attempt) {
      const absl::StatusOr<OtherRanks> found = Find();
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(found->ranks, 3);
      EXPECT_EQ(found->step, 7);
      EXPECT_EQ(found->from, std::vector<std::string>{aside});
      EXPECT_EQ(StepOf(found->from), 7U);
      EXPECT_FALSE(There("rank-0"));
      // What was being made of it when they were killed again is no part of it, and does not stand in for it.
      if (attempt == 0) Part(dir_, 0, 1, 99);
    }
    // Of one rank, and a part of two: the old one still counts.
    Part(dir_, 0, 2, 99);
    EXPECT_EQ(Find()->step, 7);
    ASSERT_TRUE(DropSetAside({dir_}, nullptr).ok());
    EXPECT_FALSE(There(".penstock.of-3-ranks"));
  }
}

TEST_F(SetAsideTest, ARunOfOneRankMovesItsFilesAndNoOthers) {
  MakeRun(1, 4);
  std::filesystem::create_directories(dir_ + "/checkpoints");
  const std::unique_ptr<swap::Store> checkpoint = Part(scratch_.path() + "/kept", 0, 1, 3);
  // Two ranks' share of the work, one after the other.
  Part(dir_ + "/elsewhere", 0, 2, 9);
  EXPECT_EQ(*RanksOf({dir_}), 1);
  EXPECT_EQ(*RanksOf({dir_ + "/elsewhere"}), 2);
  std::filesystem::create_directories(dir_ + "/.penstock.of-1-ranks");
  const absl::StatusOr<OtherRanks> found = Find();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->from, std::vector<std::string>{dir_ + "/.penstock.of-1-ranks"});
  EXPECT_EQ(StepOf(found->from), 4U);
  EXPECT_FALSE(There("penstock.store"));
  EXPECT_TRUE(There("checkpoints"));
}

TEST_F(SetAsideTest, TheNewestCountsAndWithoutAPartTheCheckpoint) {
  const std::string kept = scratch_.path() + "/kept";
  Part(kept, 0, 1, 6);
  MakeRun(2, 8);
  absl::StatusOr<OtherRanks> found = Find(kept);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->step, 8);
  ASSERT_TRUE(DropSetAside({dir_}, nullptr).ok());
  MakeRun(2, 5);
  found = Find(kept);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->step, 6);
  EXPECT_EQ(found->from, std::vector<std::string>{kept});
  ASSERT_TRUE(DropSetAside({dir_}, nullptr).ok());
  MakeRun(3, 8);
  std::filesystem::remove_all(dir_ + "/rank-0");
  found = Find(kept);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->ranks, 3);
  EXPECT_EQ(found->from, std::vector<std::string>{kept});
}

TEST_F(SetAsideTest, WithoutAPartAndACheckpointNothingIsMoved) {
  MakeRun(3, 8);
  std::filesystem::remove_all(dir_ + "/rank-1");
  const absl::Status refused = Find().status();
  EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("held a run of 3 ranks"));
  EXPECT_TRUE(There("rank-0") && There("rank-2"));
}

TEST_F(SetAsideTest, APartThatIsTrainedOnIsNotMoved) {
  MakeRun(2, 8);
  const std::unique_ptr<swap::Store> trains = Part(dir_, 0, 2, 8);
  const absl::Status refused = Find().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("in use"));
  EXPECT_TRUE(There("rank-0") && There("rank-1"));
}

TEST_F(SetAsideTest, WhatAKillLeftOfWhatWasDroppedIsRemovedAndIsNoRun) {
  MakeRun(2, 8);
  ASSERT_TRUE(Find().ok());
  std::filesystem::rename(dir_ + "/.penstock.of-2-ranks", dir_ + "/.penstock.dropped-2-17");
  MakeRun(1, 9);
  EXPECT_EQ(*RanksOf({dir_}), 1);
  EXPECT_EQ(Find()->ranks, 0);
  ASSERT_TRUE(DropSetAside({dir_}, nullptr).ok());
  EXPECT_FALSE(There(".penstock.dropped-2-17"));
  EXPECT_EQ(StepOf({dir_}), 9U);
}

}  // namespace
}  // namespace penstock::zero
