// The store on the real disk: what is committed comes back bit for bit, what is not is as if it never was,
// and whatever is wrong is named.
#include "swap/store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>

#include "tests/swap/count_allocations.h"
#include "tests/swap/store_fixture.h"

namespace penstock::swap::store_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(StoreTest, WhatIsCommittedComesBack) {
  FakeModel model(layout_, 1), read(layout_, 2);
  {
    auto store = CreateCommitted(&model);
    for (uint64_t step = 1; step <= 5; ++step) Step(*store, &model, step);
    EXPECT_EQ(store->committed_step(), 5u);
  }
  auto store = Open();
  EXPECT_EQ(store->recovered().step, 5u);
  EXPECT_EQ(store->recovered().updates, 5u);
  EXPECT_EQ(store->recovered().sequence, 6u);
  EXPECT_EQ(store->recovered().payload, "p5");
  EXPECT_THAT(store->recovered().damage, IsEmpty());
  EXPECT_EQ(store->identity(), "{}");
  const absl::Status read_back = read.ReadAll(*store);
  ASSERT_TRUE(read_back.ok()) << read_back;
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, EveryBackendKeepsTheSameBytes) {
  FakeModel model(layout_, 1), read(layout_, 2);
  uint64_t step = 0;
  const auto use = [&](aio::BackendKind backend) {
    aio::EngineOptions engine_options;
    engine_options.backend = backend;
    engine_options.log = [](std::string_view) {};
    auto engine = aio::Engine::Create(engine_options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  };
  CreateCommitted(&model).reset();
  for (auto backend : {aio::BackendKind::kLibaio, aio::BackendKind::kThreads, aio::BackendKind::kIoUring}) {
    use(backend);
    auto store = Open();
    ASSERT_TRUE(read.ReadAll(*store).ok());
    EXPECT_EQ(read.Difference(model), "") << aio::BackendName(backend);
    Step(*store, &model, ++step);
  }
  use(aio::BackendKind::kThreads);
  auto store = Open();
  EXPECT_EQ(store->recovered().step, 3u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, SegmentsThatLieApartInMemoryAreGathered) {
  FakeModel model(layout_, 1, /*adjacent=*/false), read(layout_, 2);
  CreateCommitted(&model).reset();
  auto store = Open();
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, ACommitThatNotAllRanksHaveIsTakenBackForGood) {
  FakeModel model(layout_, 1), before(layout_, 1), read(layout_, 2);
  before.Initialize();
  before.UpdateAll(1);
  {
    auto store = CreateCommitted(&model);
    Step(*store, &model, 1);
    Step(*store, &model, 2);
  }
  {
    auto store = Open();
    const uint64_t last = store->committed_sequence();
    EXPECT_TRUE(absl::IsDataLoss(store->GoBackTo(last - 2)))
        << "only the commit before the last is still there";
    EXPECT_TRUE(absl::IsDataLoss(store->GoBackTo(last + 1)));
    ASSERT_TRUE(store->GoBackTo(last).ok());
    EXPECT_EQ(store->committed_step(), 2u);
    ASSERT_TRUE(store->GoBackTo(last - 1).ok());
    EXPECT_EQ(store->committed_sequence(), last - 1);
    EXPECT_EQ(store->committed_step(), 1u);
    EXPECT_EQ(store->recovered().payload, "p1");
    ASSERT_TRUE(read.ReadAll(*store).ok());
    EXPECT_EQ(read.Difference(before), "");
  }
  {
    auto store = Open();
    EXPECT_EQ(store->recovered().step, 1u);
    Step(*store, &before, 2);
    EXPECT_TRUE(absl::IsDataLoss(store->GoBackTo(store->committed_sequence() - 2)));
  }
  auto store = Open();
  EXPECT_EQ(store->recovered().step, 2u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(before), "");
}

TEST_F(StoreTest, WhatIsNotCommittedIsAsIfItNeverWas) {
  FakeModel model(layout_, 1), committed(layout_, 1), read(layout_, 2);
  committed.Initialize();
  {
    auto store = CreateCommitted(&model);
    model.UpdateAll(1);
    ASSERT_TRUE(model.WriteAll(*store, 2).ok());
    // The newest version is the one just written; the committed one is still there.
    ASSERT_TRUE(read.ReadAll(*store, VersionChoice::kNewest).ok());
    EXPECT_EQ(read.Difference(model), "");
    ASSERT_TRUE(read.ReadAll(*store, VersionChoice::kCommitted).ok());
    EXPECT_EQ(read.Difference(committed), "");
  }
  auto store = Open();
  EXPECT_EQ(store->recovered().step, 0u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(committed), "");
}

TEST_F(StoreTest, TilesThatASkippedStepLeavesAloneStayWhereTheyAre) {
  FakeModel model(layout_, 1), read(layout_, 2);
  {
    auto store = CreateCommitted(&model);
    model.Update(2, 1);
    ASSERT_TRUE(model.WriteTile(*store, 2, 2).ok());
    ASSERT_TRUE(store->CommitNow({.step = 1, .updates = 1, .payload = ""}).ok());
    EXPECT_EQ(store->committed(2).version, 2u);
    EXPECT_EQ(store->committed(1).version, 1u);
    ASSERT_TRUE(store->CommitNow({.step = 2, .updates = 1, .payload = "skipped"}).ok());
  }
  auto store = Open();
  EXPECT_EQ(store->recovered().step, 2u);
  EXPECT_EQ(store->recovered().updates, 1u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, DroppedVersionsAreGoneAndRedoneFromTheOldOnes) {
  FakeModel model(layout_, 1), speculative(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  speculative.Initialize();
  speculative.UpdateAll(99);
  ASSERT_TRUE(speculative.WriteAll(*store, 2).ok());
  EXPECT_EQ(store->newest_version(0), 2u);
  ASSERT_TRUE(store->DropAllWritten().ok());
  EXPECT_EQ(store->newest_version(0), 1u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
  Step(*store, &model, 1);
  store.reset();
  store = Open();
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, AnyRunOfSegmentsIsOneTransferToAnyPlaces) {
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  const Geometry& g = store->geometry();
  for (uint32_t tile = 0; tile < g.tiles(); ++tile) {
    for (uint32_t first = 0; first < 4; ++first) {
      for (uint32_t count = 1; first + count <= 4; ++count) {
        for (bool adjacent : {true, false}) {
          AlignedBuffer memory(g.slot_bytes(tile) + 5 * kSectorBytes);
          std::vector<void*> places;
          uint64_t at = 0;
          for (uint32_t i = 0; i < count; ++i) {
            places.push_back(memory.data() + at);
            at += PaddedBytes(g.segment_bytes(tile, first + i)) + (adjacent ? 0 : kSectorBytes);
          }
          TileIo io;
          ASSERT_TRUE(store->ReadSegments(&io, tile, first, count, places, aio::Priority::kPrefetch).ok());
          ASSERT_TRUE(store->Wait(&io).ok());
          const absl::Status verified = store->VerifyRead(io);
          ASSERT_TRUE(verified.ok()) << verified;
          for (uint32_t i = 0; i < count; ++i) {
            ASSERT_EQ(0, std::memcmp(places[i], model.tile(tile)[first + i].data(),
                                     g.segment_bytes(tile, first + i)));
          }
        }
      }
    }
  }
}

TEST_F(StoreTest, ScratchIsThereAndTouchesNoVersion) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  const uint64_t bytes = store->geometry().scratch_bytes(2);
  ASSERT_GT(bytes, 0u);
  AlignedBuffer out(PaddedBytes(bytes)), in(PaddedBytes(bytes));
  for (uint64_t i = 0; i < bytes; ++i) out.data()[i] = static_cast<std::byte>(i * 7);
  TileIo io;
  ASSERT_TRUE(store->WriteScratch(&io, 2, 0, out.data(), bytes, aio::Priority::kWriteBehind).ok());
  ASSERT_TRUE(store->Wait(&io).ok());
  ASSERT_TRUE(store->ReadScratch(&io, 2, 0, in.data(), bytes, aio::Priority::kDemand).ok());
  ASSERT_TRUE(store->Wait(&io).ok());
  EXPECT_EQ(0, std::memcmp(in.data(), out.data(), bytes));
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
  EXPECT_TRUE(absl::IsInvalidArgument(
      store->WriteScratch(&io, 2, 1, out.data(), bytes, aio::Priority::kWriteBehind)));
  EXPECT_TRUE(absl::IsInvalidArgument(store->ReadScratch(&io, 1, 0, in.data(), 1, aio::Priority::kDemand)));
}

TEST_F(StoreTest, AVersionInPartsIsThereWhenTheLastPartIs) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  const uint32_t tile = 2, segments = store->geometry().segments(tile);
  ASSERT_GT(segments, 2u);
  TileIo io;
  const auto write = [&](uint64_t version, uint32_t first, uint32_t count) {
    std::vector<const void*> sources;
    std::vector<uint64_t> checksums;
    for (uint32_t s = first; s < first + count; ++s) {
      sources.push_back(model.tile(tile)[s].data());
      checksums.push_back(store->SegmentChecksum(tile, s, version, sources.back()));
    }
    absl::Status status =
        store->WriteSegments(&io, tile, version, first, sources, aio::Priority::kWriteBehind);
    if (!status.ok()) return status;
    EXPECT_TRUE(store->Wait(&io).ok());
    EXPECT_TRUE(absl::IsInvalidArgument(
        store->NoteWritten(&io, std::vector<uint64_t>(count + 1))));  // as many as were written
    return store->NoteWritten(&io, checksums);
  };
  // All but the first, then that; and the other way round, one by one.
  uint64_t version = 1;
  for (const bool first_comes_last : {true, false}) {
    model.Update(tile, ++version);
    ASSERT_TRUE(first_comes_last ? write(version, 1, segments - 1).ok() : write(version, 0, 1).ok());
    EXPECT_EQ(store->newest_version(tile), version - 1);
    ASSERT_TRUE(read.ReadTile(*store, tile).ok()) << "the one before is still the newest";
    EXPECT_THAT(std::string(store->CommitNow({.step = version, .updates = version, .payload = ""}).message()),
                HasSubstr("some segments were not written"));
    if (first_comes_last) {
      ASSERT_TRUE(write(version, 0, 1).ok());
    } else {
      for (uint32_t s = 1; s < segments; ++s) ASSERT_TRUE(write(version, s, 1).ok());
    }
    EXPECT_EQ(store->newest_version(tile), version);
    ASSERT_TRUE(store->CommitNow({.step = version, .updates = version, .payload = ""}).ok());
    ASSERT_TRUE(read.ReadAll(*store).ok());
    EXPECT_EQ(read.Difference(model), "");
  }
  // Given up, or begun again as another version, or forgotten by a kill: the committed one stands.
  FakeModel committed(layout_, 3);
  ASSERT_TRUE(committed.ReadAll(*store).ok());
  model.Update(tile, 9);
  ASSERT_TRUE(write(9, 1, segments - 1).ok());
  ASSERT_TRUE(store->DropWritten(tile).ok());
  ASSERT_TRUE(write(9, 0, 1).ok());
  ASSERT_TRUE(write(10, 1, segments - 1).ok());
  EXPECT_EQ(store->newest_version(tile), version) << "parts of two versions are none";
  const void* source = model.tile(tile)[0].data();
  EXPECT_TRUE(absl::IsInvalidArgument(
      store->WriteSegments(&io, tile, 11, segments, std::span(&source, 1), aio::Priority::kWriteBehind)));
  store.reset();
  store = Open();
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(committed), "");
}

TEST_F(StoreTest, MisuseIsRefusedWithItsReason) {
  FakeModel model(layout_, 1);
  model.Initialize();
  auto store = Create();
  void* place = model.tile(0)[0].data();
  TileIo io;
  EXPECT_TRUE(absl::IsFailedPrecondition(
      store->ReadSegments(&io, 0, 0, 1, std::span(&place, 1), aio::Priority::kDemand)));
  EXPECT_THAT(std::string(store->CommitNow({}).message()), HasSubstr("tile 0 was never written"));
  EXPECT_TRUE(absl::IsInvalidArgument(model.WriteTile(*store, 0, 0)));  // versions start with 1
  ASSERT_TRUE(model.WriteAll(*store, 1).ok());
  EXPECT_TRUE(
      absl::IsInvalidArgument(store->CommitNow({.payload = std::string(kDefaultPayloadCapacity + 1, 'x')})));
  ASSERT_TRUE(store->CommitNow({.step = 7, .updates = 7, .payload = ""}).ok());
  EXPECT_THAT(std::string(store->CommitNow({.step = 6, .updates = 7, .payload = ""}).message()),
              HasSubstr("commit of step 6"));
  EXPECT_THAT(std::string(model.WriteTile(*store, 0, 1).message()), HasSubstr("not above the committed 1"));
  EXPECT_TRUE(absl::IsInvalidArgument(
      store->ReadSegments(&io, 0, 3, 2, std::vector<void*>(2, place), aio::Priority::kDemand)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      store->ReadSegments(&io, 99, 0, 1, std::span(&place, 1), aio::Priority::kDemand)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->NoteWritten(&io, {})));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->VerifyRead(io)));

  // A write that nobody took notice of: nothing can be committed over its head.
  ASSERT_TRUE(model.Submit(*store, &io, 1, 2).ok());
  ASSERT_TRUE(store->Wait(&io).ok());
  EXPECT_THAT(std::string(store->CommitNow({.step = 8, .updates = 8, .payload = ""}).message()),
              HasSubstr("writes that were not noted"));
  EXPECT_TRUE(absl::IsFailedPrecondition(model.WriteTile(*store, 1, 3)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->DropWritten(1)));
  ASSERT_TRUE(model.Note(*store, &io).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(model.Note(*store, &io)));  // once
  ASSERT_TRUE(store->CommitNow({.step = 8, .updates = 8, .payload = ""}).ok());
}

TEST_F(StoreTest, ReadOnlyStoresCannotBeWritten) {
  FakeModel model(layout_, 1), read(layout_, 2);
  CreateCommitted(&model).reset();
  options_.read_only = true;
  auto store = Open();
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(model.WriteTile(*store, 0, 2)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->CommitNow({.step = 1, .updates = 1, .payload = ""})));
}

TEST_F(StoreTest, DamageIsNamedByRange) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  const Geometry& g = store->geometry();
  const uint64_t offset = g.segment_offset(3, store->committed(3).slot, 2);
  Flip(File(), offset + 77);
  const absl::Status status = read.ReadTile(*store, 3);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(HasSubstr(File()), HasSubstr(absl::StrCat("offset ", offset)),
                               HasSubstr("tile 3 segment 2"), HasSubstr("version 1")));
  EXPECT_TRUE(read.ReadTile(*store, 2).ok());
}

TEST_F(StoreTest, StaleAndMisdirectedTilesAreFound) {
  layout_.tiles.assign(3, layout_.tiles[0]);  // equal tiles, so that one fits into the place of another
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  Step(*store, &model, 1);
  const Geometry& g = store->geometry();
  const auto copy = [&](uint64_t from, uint64_t to) {
    std::vector<char> bytes(g.slot_bytes(0));
    const int fd = ::open(File().c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_EQ(::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(from)),
              static_cast<ssize_t>(bytes.size()));
    ASSERT_EQ(::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(to)),
              static_cast<ssize_t>(bytes.size()));
    ::fsync(fd);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  };
  // A write that was lost: the slot still holds what stood there two versions ago.
  copy(g.slot_offset(0, 1 - store->committed(0).slot), g.slot_offset(0, store->committed(0).slot));
  EXPECT_TRUE(absl::IsDataLoss(read.ReadTile(*store, 0)));
  // A write that landed on another tile.
  copy(g.slot_offset(2, store->committed(2).slot), g.slot_offset(1, store->committed(1).slot));
  EXPECT_TRUE(absl::IsDataLoss(read.ReadTile(*store, 1)));
  EXPECT_TRUE(read.ReadTile(*store, 2).ok());
}

TEST_F(StoreTest, AFlippedBitInTheNewestRecordCostsNothing) {
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  Step(*store, &model, 1);
  const Geometry g = store->geometry();
  store.reset();
  const uint64_t place = 2 % kRecordPlaces;  // of the second commit
  Flip(File(), g.record_offset(place, 0) + kSectorBytes + 3);
  store = Open();
  EXPECT_EQ(store->recovered().step, 1u);
  ASSERT_EQ(store->recovered().damage.size(), 1u);
  EXPECT_THAT(store->recovered().damage[0], HasSubstr("place 0 copy 0"));
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, ARecordCutShortLeavesTheOneBefore) {
  FakeModel model(layout_, 1), before(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  before.Initialize();
  Step(*store, &model, 1);
  const Geometry g = store->geometry();
  store.reset();
  for (uint32_t copy = 0; copy < 2; ++copy) Flip(File(), g.record_offset(0, copy) + kSectorBytes + 3);
  store = Open();
  EXPECT_EQ(store->recovered().step, 0u);
  EXPECT_EQ(store->recovered().cut_short.size(), 2u);
  EXPECT_THAT(store->recovered().damage, IsEmpty());
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(before), "");
  // The next commit heals the place.
  Step(*store, &before, 1);
  store.reset();
  store = Open();
  EXPECT_THAT(store->recovered().cut_short, IsEmpty());
  EXPECT_EQ(store->recovered().step, 1u);
}

TEST_F(StoreTest, PowerSyncCommitsToo) {
  options_.sync = Sync::kPower;
  options_.directories = {scratch_.Sub("a"), scratch_.Sub("b")};
  FakeModel model(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  for (uint64_t step = 1; step <= 3; ++step) Step(*store, &model, step);
  EXPECT_GE(engine_->stats().Total(aio::Op::kSync).requests,
            4u * 3u);  // two files before the record, one after it
  store.reset();
  store = Open();
  EXPECT_EQ(store->recovered().step, 3u);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, ARetainedVersionStaysWhileTrainingGoesOn) {
  options_.slots = 3;
  FakeModel model(layout_, 1), kept(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  Step(*store, &model, 1);
  ASSERT_TRUE(store->Retain().ok());
  ASSERT_NE(store->retained(), nullptr);
  EXPECT_EQ(store->retained()->step, 1u);
  kept.Initialize();
  kept.UpdateAll(1);
  for (uint64_t step = 2; step <= 6; ++step) {
    Step(*store, &model, step);
    ASSERT_TRUE(read.ReadAll(*store, VersionChoice::kRetained).ok());
    EXPECT_EQ(read.Difference(kept), "");
    ASSERT_TRUE(read.ReadAll(*store).ok());
    EXPECT_EQ(read.Difference(model), "");
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(store->Retain()));  // one at a time
  store->Release();
  EXPECT_EQ(store->retained(), nullptr);
  EXPECT_TRUE(absl::IsFailedPrecondition(read.ReadTile(*store, 0, VersionChoice::kRetained)));
}

TEST_F(StoreTest, WithTwoSlotsARetainedVersionOutlivesOneStepAndIsNeverOverwritten) {
  options_.slots = 2;
  FakeModel model(layout_, 1), kept(layout_, 1), read(layout_, 2);
  auto store = CreateCommitted(&model);
  Step(*store, &model, 1);
  ASSERT_TRUE(store->Retain().ok());
  Step(*store, &model, 2);
  EXPECT_THAT(std::string(model.WriteTile(*store, 0, 4).message()), HasSubstr("a checkpoint still holds"));
  kept.Initialize();
  kept.UpdateAll(1);
  ASSERT_TRUE(read.ReadAll(*store, VersionChoice::kRetained).ok());
  EXPECT_EQ(read.Difference(kept), "");
  store->Release();
  Step(*store, &model, 3);
  ASSERT_TRUE(read.ReadAll(*store).ok());
  EXPECT_EQ(read.Difference(model), "");
}

TEST_F(StoreTest, CallbacksReportCompletions) {
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  std::atomic<int> tiles{0}, commits{0};
  TileIo io;
  io.set_on_complete([](TileIo&, void* context) { ++*static_cast<std::atomic<int>*>(context); }, &tiles);
  model.Update(0, 1);
  ASSERT_TRUE(model.Submit(*store, &io, 0, 2).ok());
  ASSERT_TRUE(store->Wait(&io).ok());
  EXPECT_EQ(tiles.load(), 1);
  ASSERT_TRUE(model.Note(*store, &io).ok());
  CommitIo commit;
  commit.set_on_complete([](CommitIo&, void* context) { ++*static_cast<std::atomic<int>*>(context); },
                         &commits);
  ASSERT_TRUE(store->Commit(&commit, {.step = 1, .updates = 1, .payload = ""}).ok());
  while (!commit.finished()) ASSERT_TRUE(engine_->Drain().ok());
  ASSERT_TRUE(engine_->Drain().ok());
  EXPECT_EQ(commits.load(), 1);
  ASSERT_TRUE(store->FinishCommit(&commit).ok());
  EXPECT_GT(commit.duration_ns(), 0);
  EXPECT_EQ(commit.sequence(), 2u);
}

// Promise: reading, writing and committing allocate nothing once every object has been used.
TEST_F(StoreTest, TheSteadyStateAllocatesNothing) {
  if (!CountsAllocations()) GTEST_SKIP() << "allocations are not counted in this build";
  FakeModel model(layout_, 1);
  auto store = CreateCommitted(&model);
  std::vector<TileIo> ios(layout_.tiles.size());
  std::vector<std::vector<const void*>> sources(ios.size());
  std::vector<std::vector<void*>> places(ios.size());
  for (uint32_t t = 0; t < ios.size(); ++t) {
    for (const FakeModel::Segment& segment : model.tile(t)) {
      sources[t].push_back(segment.data());
      places[t].push_back(segment.data());
    }
  }
  CommitIo commit;
  const std::string payload(1000, 'x');
  uint64_t before = 0;
  for (uint64_t step = 1; step <= 6; ++step) {
    if (step == 3) before = AllocationsOfThisThread();
    for (uint32_t t = 0; t < ios.size(); ++t) {
      ASSERT_TRUE(store->ReadSegments(&ios[t], t, 0, 4, places[t], aio::Priority::kPrefetch).ok());
    }
    for (uint32_t t = 0; t < ios.size(); ++t) {
      ASSERT_TRUE(store->Wait(&ios[t]).ok());
      ASSERT_TRUE(store->VerifyRead(ios[t]).ok());
      ASSERT_TRUE(store->WriteTile(&ios[t], t, step + 1, sources[t], aio::Priority::kWriteBehind).ok());
    }
    for (uint32_t t = 0; t < ios.size(); ++t) {
      ASSERT_TRUE(store->Wait(&ios[t]).ok());
      uint64_t checksums[4];
      for (uint32_t s = 0; s < 4; ++s) checksums[s] = store->SegmentChecksum(t, s, step + 1, sources[t][s]);
      ASSERT_TRUE(store->NoteWritten(&ios[t], checksums).ok());
    }
    ASSERT_TRUE(store->Commit(&commit, {.step = step, .updates = step, .payload = payload}).ok());
    while (!commit.finished()) ASSERT_TRUE(engine_->Drain().ok());
    ASSERT_TRUE(store->FinishCommit(&commit).ok());
  }
  EXPECT_EQ(AllocationsOfThisThread() - before, 0u);
}

}  // namespace
}  // namespace penstock::swap::store_test
