// Stores that keep one version of what they are trained on: half the space, and after a crash everything or
// nothing. What must never be is a store that opens and holds tiles of two steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "swap/inspect.h"
#include "swap/verify.h"
#include "tests/soak.h"
#include "tests/swap/no_leak.h"
#include "tests/swap/sim_world.h"
#include "tests/swap/store_fixture.h"

namespace penstock::swap::one_version_test {
namespace {

using ::testing::HasSubstr;

using tests::kStride;
const auto kSoak = static_cast<uint64_t>(tests::Soak());

class OneVersionTest : public StoreTest {
 protected:
  OneVersionTest() { options_.slots = 1; }
};

TEST_F(OneVersionTest, TakesHalfTheSpace) {
  const auto one = BytesOnDisk(options_, layout_, "{}");
  options_.slots = 2;
  const auto two = BytesOnDisk(options_, layout_, "{}");
  ASSERT_TRUE(one.ok() && two.ok());
  uint64_t slots = 0;
  for (const TileLayout& tile : layout_.tiles) {
    for (const uint64_t bytes : tile.segment_bytes) slots += PaddedBytes(bytes);
  }
  EXPECT_EQ(two->front() - one->front(), slots);
}

TEST_F(OneVersionTest, IsWholeBetweenACommitAndTheNextMark) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(store->OverwriteNow().ok());
    EXPECT_TRUE(store->overwriting());
    Step(*store, &model, step);
    EXPECT_FALSE(store->overwriting());
    store.reset();
    store = Open();
    ASSERT_NE(store, nullptr);
    EXPECT_EQ(store->committed_step(), step);
    ASSERT_TRUE(read.ReadAll(*store).ok());
    EXPECT_EQ(read.Difference(model), "");
  }
}

TEST_F(OneVersionTest, EndedWhileItIsOverwrittenItIsRefusedByAllWhoLook) {
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  ASSERT_TRUE(store->OverwriteNow().ok());
  model.UpdateAll(1);
  ASSERT_TRUE(model.WriteTile(*store, 2, 2).ok());
  store.reset();
  const auto opened = Store::Open(*engine_, options_);
  EXPECT_TRUE(absl::IsDataLoss(opened.status())) << opened.status();
  EXPECT_THAT(std::string(opened.status().message()),
              ::testing::AllOf(HasSubstr(File()), HasSubstr("step 0"), HasSubstr("checkpoint")));
  options_.read_only = true;
  EXPECT_TRUE(absl::IsDataLoss(Store::Open(*engine_, options_).status()));
  const Finding finding = Probe(options_.directories);
  EXPECT_EQ(finding.holding, Holding::kOverwritten) << finding.text;
  EXPECT_EQ(HoldingName(finding.holding), "overwritten");
  const auto inspection = Inspect(options_.directories);
  ASSERT_TRUE(inspection.ok()) << inspection.status();
  EXPECT_TRUE(inspection->record.overwriting);
  EXPECT_EQ(inspection->record.payload, "first");
  // Its place can be used again.
  options_.read_only = false;
  options_.overwrite = true;
  CreateCommitted(&model).reset();
  ASSERT_NE(Open(), nullptr);
}

TEST_F(OneVersionTest, NothingIsOverwrittenWithoutTheMark) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  EXPECT_TRUE(absl::IsFailedPrecondition(model.WriteTile(*store, 0, 2)));
  EXPECT_TRUE(read.ReadAll(*store).ok());
  // Nor while a checkpoint holds what would be overwritten.
  ASSERT_TRUE(store->Retain().ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store->OverwriteNow()));
  store->Release();
  ASSERT_TRUE(store->OverwriteNow().ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store->OverwriteNow()));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->Retain()));
  // What is not overwritten yet can be read; what is, only as it is now.
  model.UpdateAll(1);
  ASSERT_TRUE(model.WriteTile(*store, 0, 2).ok());
  EXPECT_TRUE(read.ReadTile(*store, 0).ok());
  EXPECT_TRUE(read.ReadTile(*store, 1, VersionChoice::kCommitted).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(read.ReadTile(*store, 0, VersionChoice::kCommitted)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->DropWritten(0)));
  EXPECT_TRUE(store->DropWritten(1).ok());
  // Half overwritten it is neither.
  TileIo io;
  const void* place = model.tile(1)[1].data();
  ASSERT_TRUE(store->WriteSegments(&io, 1, 2, 1, std::span(&place, 1), aio::Priority::kDemand).ok());
  ASSERT_TRUE(store->Wait(&io).ok());
  ASSERT_TRUE(store->NoteWritten(&io, std::vector{store->SegmentChecksum(1, 1, 2, place)}).ok());
  for (const VersionChoice choice : {VersionChoice::kNewest, VersionChoice::kCommitted}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(read.ReadTile(*store, 1, choice)));
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(store->DropWritten(1)));
}

TEST_F(OneVersionTest, StoresOfTwoVersionsAreNeverMarked) {
  options_.slots = 2;
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  EXPECT_TRUE(absl::IsFailedPrecondition(store->OverwriteNow()));
}

// A mark of both copies of which nothing is left: the tiles' checksums still tell.
TEST_F(OneVersionTest, WithoutItsMarkWhatWasOverwrittenIsStillFound) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  ASSERT_TRUE(store->OverwriteNow().ok());
  model.UpdateAll(1);
  ASSERT_TRUE(model.WriteTile(*store, 2, 2).ok());
  const Geometry& g = store->geometry();
  const uint32_t place = static_cast<uint32_t>(store->committed_sequence() % kRecordPlaces);
  const uint64_t copies[] = {g.record_offset(place, 0), g.record_offset(place, 1)};
  store.reset();
  for (const uint64_t offset : copies) Flip(File(), offset + 40);
  store = Open();
  ASSERT_NE(store, nullptr);
  EXPECT_FALSE(store->recovered().cut_short.empty());
  EXPECT_TRUE(read.ReadTile(*store, 1).ok());
  EXPECT_TRUE(absl::IsDataLoss(read.ReadTile(*store, 2)));
}

class OneVersionSimTest : public ::testing::TestWithParam<Sync> {};

// Crashed at any event, it opens with everything of the last commit, or says that this is gone: the latter
// only where the next step's writes had been announced.
TEST_P(OneVersionSimTest, ACrashAtEveryEventIsAllOrNothing) {
  uint64_t events = 0;
  {
    SimWorld world(7, GetParam(), 2, 1);
    ASSERT_TRUE(world.Create().ok());
    ASSERT_TRUE(world.RunTo(3).ok());
    events = world.events();
  }
  ASSERT_GT(events, 100u);
  int whole = 0, refused = 0;
  for (uint64_t seed = 7; seed < 7 + 2 * kSoak; ++seed) {
    for (uint64_t at = 1; at <= events; at += kStride) {
      SimWorld world(seed, GetParam(), 2, 1);
      world.at_event = [&](uint64_t event) {
        if (event < at) return false;
        world.disk().Crash();
        return true;
      };
      absl::Status run = world.Create();
      if (run.ok()) run = world.RunTo(3);
      if (run.ok()) continue;  // over before the crash
      world.Restart();
      const int64_t acknowledged = world.acknowledged();
      const absl::Status opened = world.Open();
      if (absl::IsNotFound(opened)) {
        ASSERT_LT(acknowledged, 0) << "seed " << seed << " event " << at << ": " << opened;
        continue;
      }
      if (!opened.ok()) {
        ASSERT_TRUE(absl::IsDataLoss(opened)) << "seed " << seed << " event " << at << ": " << opened;
        ASSERT_THAT(std::string(opened.message()), HasSubstr("one version"));
        ASSERT_GT(world.marked(), acknowledged) << "seed " << seed << " event " << at;
        ++refused;
        continue;
      }
      ++whole;
      ASSERT_GE(static_cast<int64_t>(world.store().committed_step()), acknowledged);
      const absl::Status checked = world.Check();
      ASSERT_TRUE(checked.ok()) << "seed " << seed << " event " << at << ": " << checked;
      const absl::Status on = world.RunTo(4);
      ASSERT_TRUE(on.ok()) << on;
      ASSERT_TRUE(world.Check().ok());
    }
  }
  std::printf("%d crashes left it whole, %d cost the state\n", whole, refused);
  EXPECT_GT(whole, 10);
  EXPECT_GT(refused, 10);
}

// Promise: a mark that could not be written changed nothing, and may be tried again; nothing is overwritten
// before that. After a failed sync only opening again helps, for marks as for commits.
TEST_P(OneVersionSimTest, AFailedMarkCanBeTriedAgainAndAFailedSyncCannot) {
  SimWorld world(5, GetParam(), 2, 1);
  ASSERT_TRUE(world.Create().ok());
  FakeModel model(world.layout(), 5);
  model.Initialize();
  model.UpdateAll(1);
  world.disk().set_rates({.write_error = 1});
  const absl::Status failed = world.store().OverwriteNow();
  EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
  EXPECT_THAT(std::string(failed.message()), HasSubstr("mark of the overwriting of step 0"));
  EXPECT_FALSE(world.store().overwriting());
  EXPECT_TRUE(absl::IsFailedPrecondition(model.WriteTile(world.store(), 0, 2)));
  EXPECT_FALSE(world.store().OverwriteNow().ok());
  world.disk().set_rates({});
  EXPECT_TRUE(world.Check().ok());
  // Nor is a mark that failed made up for by a commit.
  EXPECT_TRUE(absl::IsFailedPrecondition(world.store().CommitNow({.step = 1, .updates = 1, .payload = ""})));
  const absl::Status again = world.store().OverwriteNow();
  ASSERT_TRUE(again.ok()) << again;
  ASSERT_TRUE(model.WriteAll(world.store(), 2).ok());
  // A commit that failed is made up for by a commit, not by a mark.
  world.disk().set_rates({.write_error = 1});
  EXPECT_FALSE(world.store().CommitNow({.step = 1, .updates = 1, .payload = ""}).ok());
  world.disk().set_rates({});
  EXPECT_TRUE(absl::IsFailedPrecondition(world.store().OverwriteNow()));
  ASSERT_TRUE(world.store().CommitNow({.step = 1, .updates = 1, .payload = ""}).ok());
  EXPECT_TRUE(world.Check().ok());
  if (GetParam() == Sync::kProcess) return;
  world.disk().FailNext(aio::Op::kSync, EIO);
  EXPECT_FALSE(world.store().OverwriteNow().ok());
  EXPECT_THAT(std::string(world.store().OverwriteNow().message()), HasSubstr("open the store again"));
  world.EndProcess();
  world.Restart();
  ASSERT_TRUE(world.Open().ok());
  EXPECT_TRUE(world.store().OverwriteNow().ok());
}

// A disk that lies, about the mark too: damage is named, never taken for a run.
TEST_P(OneVersionSimTest, SilentFaultsAreNeverAccepted) {
  int lies = 0, caught = 0;
  for (uint64_t seed = 1; seed <= 300 * kSoak; seed += kStride) {
    SimWorld world(seed, GetParam(), 2, 1);
    ASSERT_TRUE(world.Create().ok());
    aio::SimFaultRates rates;
    (seed % 3 == 0 ? rates.torn_write : seed % 3 == 1 ? rates.lost_write : rates.misdirected_write) = 0.01;
    world.disk().set_rates(rates);
    const uint64_t death = world.events() + seed * 7 % 1200;
    world.at_event = [&](uint64_t event) { return event >= death; };
    const absl::Status run = world.RunTo(4);
    ASSERT_FALSE(absl::IsInternal(run)) << run;
    const aio::SimDiskStats stats = world.disk().stats();
    lies += static_cast<int>(stats.torn_writes + stats.lost_writes + stats.misdirected_writes);
    world.Restart();
    absl::Status checked = world.Open();
    if (checked.ok()) checked = world.Check();
    ASSERT_FALSE(absl::IsInternal(checked)) << "seed " << seed << ": " << checked;
    caught += checked.ok() ? 0 : 1;
  }
  std::printf("%d lies, %d lives that ended with a refusal\n", lies, caught);
  EXPECT_GT(lies, 50 / kStride);
  EXPECT_GT(caught, 50 / kStride);
}

INSTANTIATE_TEST_SUITE_P(Sync, OneVersionSimTest, ::testing::Values(Sync::kProcess, Sync::kPower),
                         [](const auto& kind) { return kind.param == Sync::kPower ? "power" : "process"; });

// Of several that commit together one may be ahead: with one version there is no way back.
TEST_F(OneVersionTest, ACommitCannotBeTakenBack) {
  FakeModel model(layout_, 7);
  auto store = CreateCommitted(&model);
  ASSERT_NE(store, nullptr);
  for (uint64_t step = 1; step <= 2; ++step) {
    ASSERT_TRUE(store->OverwriteNow().ok());
    Step(*store, &model, step);
  }
  store.reset();
  store = Open();
  ASSERT_NE(store, nullptr);
  const absl::Status back = store->GoBackTo(store->committed_sequence() - 1);
  EXPECT_EQ(back.code(), absl::StatusCode::kDataLoss) << back;
  EXPECT_EQ(store->committed_step(), 2u);
  options_.read_only = true;
  const uint64_t before = store->committed_sequence() - 1;
  options_.sequence = before;
  store.reset();
  EXPECT_EQ(Store::Open(*engine_, options_).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Inspect(options_.directories, before).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace penstock::swap::one_version_test
