// The fault campaign, in virtual time: crashes at every event of a run, every kind of fault, a flipped bit in
// every structure. The oracle is the same training in memory. Silent damage is never accepted, whatever the
// disk does; and what a disk that tells the truth has been told to keep is never lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <random>

#include "swap/verify.h"
#include "tests/soak.h"
#include "tests/swap/no_leak.h"
#include "tests/swap/sim_world.h"

namespace penstock::swap {
namespace {

using ::testing::HasSubstr;

using tests::kStride;
const auto kSoak = static_cast<uint64_t>(tests::Soak());

class SimTest : public ::testing::TestWithParam<Sync> {};

TEST_P(SimTest, AQuietDiskKeepsEverything) {
  for (uint64_t steps = 1; steps <= 5; ++steps) {  // the newest record stands in either place
    SimWorld world(1, GetParam());
    ASSERT_TRUE(world.Create().ok());
    ASSERT_TRUE(world.RunTo(steps).ok());
    world.Restart();
    ASSERT_TRUE(world.Open().ok());
    EXPECT_EQ(world.store().committed_step(), steps);
    const absl::Status checked = world.Check();
    EXPECT_TRUE(checked.ok()) << checked;
  }
}

// Promise: killed (or without power) at any event, what was acknowledged is there, bit for bit.
TEST_P(SimTest, ACrashAtEveryEventLosesNothingAcknowledged) {
  uint64_t events = 0;
  {
    SimWorld world(7, GetParam());
    ASSERT_TRUE(world.Create().ok());
    ASSERT_TRUE(world.RunTo(3).ok());
    events = world.events();
  }
  ASSERT_GT(events, 100u);
  int crashes = 0, before = 0, after = 0;
  for (uint64_t seed = 7; seed < 7 + 3 * kSoak; ++seed) {
    for (uint64_t at = 1; at <= events; at += kStride) {
      SimWorld world(seed, GetParam());
      world.at_event = [&](uint64_t event) {
        if (event < at) return false;
        world.disk().Crash();
        return true;
      };
      absl::Status run = world.Create();
      if (run.ok()) run = world.RunTo(3);
      if (run.ok()) continue;  // over before the crash
      ++crashes;
      world.Restart();
      const absl::Status opened = world.Open();
      if (absl::IsNotFound(opened)) {
        ASSERT_LT(world.acknowledged(), 0) << "seed " << seed << " event " << at << ": " << opened;
        continue;
      }
      ASSERT_TRUE(opened.ok()) << "seed " << seed << " event " << at << ": " << opened;
      const auto step = static_cast<int64_t>(world.store().committed_step());
      ASSERT_GE(step, world.acknowledged()) << "seed " << seed << " event " << at;
      ASSERT_LE(step, world.attempted()) << "seed " << seed << " event " << at;
      (step == world.acknowledged() ? before : after) += 1;
      const absl::Status checked = world.Check();
      ASSERT_TRUE(checked.ok()) << "seed " << seed << " event " << at << ": " << checked;
      // And it goes on from there.
      if (at / kStride % 7 == 0) {
        const absl::Status on = world.RunTo(4);
        ASSERT_TRUE(on.ok()) << on;
        ASSERT_TRUE(world.Check().ok());
      }
    }
  }
  std::printf("%d crashes; recovery found the commit before %d times, the one in flight %d times\n", crashes,
              before, after);
  EXPECT_GT(before, 10);
  EXPECT_GT(after, 0);  // whole on the disk, not yet reported
}

// Promise: an error that the disk reports stops the run with a status, and after a restart nothing is lost.
TEST_P(SimTest, ReportedErrorsAtEveryRequestAreReportedAndLoseNothing) {
  int failures = 0, injected = 0;
  for (const auto& [op, error] : std::vector<std::pair<aio::Op, int>>{
           {aio::Op::kRead, EIO}, {aio::Op::kWrite, EIO}, {aio::Op::kWrite, ENOSPC}, {aio::Op::kSync, EIO}}) {
    if (op == aio::Op::kSync && GetParam() == Sync::kProcess) continue;  // there are none
    for (uint64_t at = 1; at <= 400; at += kStride) {
      SimWorld world(at, GetParam());
      ASSERT_TRUE(world.Create().ok());
      const uint64_t from = world.events() + at;
      bool placed = false;
      world.at_event = [&, op = op, error = error](uint64_t event) {
        if (event >= from && !placed) {
          world.disk().FailNext(op, error);
          placed = true;
        }
        return false;
      };
      const absl::Status run = world.RunTo(2);
      if (!placed) break;  // past the end of the run
      ++injected;
      if (!run.ok()) {
        ++failures;
        EXPECT_FALSE(absl::IsInternal(run)) << run;
        EXPECT_TRUE(error != ENOSPC || absl::IsResourceExhausted(run)) << run;
        EXPECT_THAT(std::string(run.message()), HasSubstr("/sim/"));
      } else {
        EXPECT_EQ(world.acknowledged(), 2);
      }
      world.Restart();
      ASSERT_TRUE(world.Open().ok());
      ASSERT_GE(static_cast<int64_t>(world.store().committed_step()), world.acknowledged());
      const absl::Status checked = world.Check();
      ASSERT_TRUE(checked.ok()) << "at " << at << ": " << checked;
      const absl::Status on = world.RunTo(3);
      ASSERT_TRUE(on.ok()) << on;
      ASSERT_TRUE(world.Check().ok());
    }
  }
  std::printf("%d errors placed, %d runs stopped by one\n", injected, failures);
  EXPECT_GT(failures, injected / 2);
}

// Promise: a disk that lies (torn, lost, misdirected writes that report success) is caught, never believed.
TEST_P(SimTest, SilentFaultsAreNeverAccepted) {
  int lies = 0, caught = 0, harmless = 0;
  for (uint64_t seed = 1; seed <= 400 * kSoak; seed += kStride) {
    SimWorld world(seed, GetParam());
    ASSERT_TRUE(world.Create().ok());
    aio::SimFaultRates rates;
    (seed % 3 == 0 ? rates.torn_write : seed % 3 == 1 ? rates.lost_write : rates.misdirected_write) = 0.01;
    rates.short_transfer = 0.05;
    rates.stall = 0.02;
    world.disk().set_rates(rates);
    const absl::Status run = world.RunTo(4);
    ASSERT_FALSE(absl::IsInternal(run)) << run;
    const aio::SimDiskStats stats = world.disk().stats();
    lies += static_cast<int>(stats.torn_writes + stats.lost_writes + stats.misdirected_writes);
    world.Restart();
    const absl::Status opened = world.Open();
    absl::Status checked = opened;
    if (opened.ok()) {
      checked = world.Check();
      // Verify sees what reading sees.
      AlignedBuffer memory(1 << 20);
      const auto report = VerifyAll(world.store(), memory.span());
      ASSERT_TRUE(report.ok());
      EXPECT_EQ(report->damaged.empty(), checked.ok()) << "seed " << seed << ": " << checked;
    }
    ASSERT_FALSE(absl::IsInternal(checked)) << "seed " << seed << ": " << checked;
    if (!run.ok() || !checked.ok()) {
      ++caught;
    } else {
      ++harmless;
    }
    // Without a lie there is no damage: short transfers and stalls are daily life.
    if (stats.torn_writes + stats.lost_writes + stats.misdirected_writes == 0) {
      ASSERT_TRUE(run.ok()) << run;
      ASSERT_TRUE(checked.ok()) << checked;
      EXPECT_EQ(world.store().committed_step(), 4u);
    }
  }
  std::printf("%d lies; %d runs in which one was caught, %d in which it was overwritten or did not matter\n",
              lies, caught, harmless);
  EXPECT_GT(lies, 200 / kStride);
  EXPECT_GT(caught, 100 / kStride);
}

// Where the superblock never arrived, all that is committed later would be taken for a run that never was.
TEST_P(SimTest, ALieAboutTheSuperblockIsFoundAtCreation) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SimWorld world(seed, GetParam());
    aio::SimFaultRates rates;
    (seed % 3 == 0 ? rates.torn_write : seed % 3 == 1 ? rates.lost_write : rates.misdirected_write) = 1;
    world.disk().set_rates(rates);
    const absl::Status created = world.Create();
    EXPECT_TRUE(absl::IsDataLoss(created)) << "seed " << seed << ": " << created;
    EXPECT_THAT(std::string(created.message()), HasSubstr("mistrust the drive"));
    // Nothing of it is left.
    world.Restart();
    EXPECT_TRUE(absl::IsNotFound(world.Open()));
  }
}

// Promise: everything at once, with random seeds; noise that the disk admits never costs an acknowledged
// step.
TEST_P(SimTest, ARandomMixOfFaultsAndCrashes) {
  int injected = 0;
  for (uint64_t seed = 1000; seed < 1000 + 300 * kSoak; seed += kStride) {
    SimWorld world(seed, GetParam());
    ASSERT_TRUE(world.Create().ok());
    std::mt19937_64 random(seed);
    for (int life = 0; life < 4; ++life) {
      aio::SimFaultRates rates;
      rates.read_error = 0.002;
      rates.write_error = 0.002;
      rates.no_space = 0.001;
      rates.short_transfer = 0.1;
      rates.stall = 0.01;
      world.disk().set_rates(rates);
      const uint64_t death = world.events() + random() % 1500;
      world.at_event = [&](uint64_t event) { return event >= death; };
      const absl::Status run = world.RunTo(world.store().committed_step() + 5);
      ASSERT_FALSE(absl::IsInternal(run)) << "seed " << seed << ": " << run;
      ASSERT_FALSE(absl::IsDataLoss(run) && std::string(run.message()).find("checksum") != std::string::npos)
          << run;
      world.Restart();
      const absl::Status opened = world.Open();
      ASSERT_TRUE(opened.ok()) << "seed " << seed << ": " << opened;
      ASSERT_GE(static_cast<int64_t>(world.store().committed_step()), world.acknowledged())
          << "seed " << seed;
      const absl::Status checked = world.Check();
      ASSERT_TRUE(checked.ok()) << "seed " << seed << ": " << checked;
    }
    const aio::SimDiskStats stats = world.disk().stats();
    injected += static_cast<int>(stats.short_transfers + stats.read_errors + stats.write_errors +
                                 stats.no_space + stats.stalls + stats.crashes);
  }
  std::printf("%d faults\n", injected);
  EXPECT_GT(injected, 3000 / kStride);
}

// Promise: one flipped bit in any structure is healed or named with its place; never believed, never a crash.
TEST_P(SimTest, AFlippedBitInEveryStructure) {
  SimWorld world(3, GetParam());
  ASSERT_TRUE(world.Create().ok());
  ASSERT_TRUE(world.RunTo(3).ok());
  const Geometry g = world.store().geometry();
  std::vector<TileVersion> live;
  for (uint32_t t = 0; t < g.tiles(); ++t) live.push_back(world.store().committed(t));
  world.Close();
  std::mt19937_64 random(3);
  AlignedBuffer memory(1 << 20);
  int healed = 0, named = 0, meaningless = 0;
  const auto flip = [&](uint32_t directory, uint64_t offset, uint8_t mask) {
    auto byte = world.disk().Read(world.Path(directory), offset, 1);
    ASSERT_TRUE(byte.ok());
    (*byte)[0] = static_cast<char>((*byte)[0] ^ mask);
    ASSERT_TRUE(world.disk().Write(world.Path(directory), offset, *byte).ok());
  };
  // `tile` >= 0: the bit belongs to that tile's live version; -1: to the metadata; -2: it means nothing.
  const auto expect = [&](uint32_t directory, uint64_t offset, int tile) {
    SCOPED_TRACE(absl::StrCat("directory ", directory, " offset ", offset));
    const auto mask = static_cast<uint8_t>(1u << (random() % 8));
    flip(directory, offset, mask);
    const absl::Status opened = world.Open();
    ASSERT_TRUE(opened.ok()) << opened;
    EXPECT_EQ(world.store().committed_step(), 3u);
    const absl::Status checked = world.Check();
    const auto report = VerifyAll(world.store(), memory.span());
    ASSERT_TRUE(report.ok());
    if (tile >= 0) {
      EXPECT_TRUE(absl::IsDataLoss(checked)) << checked;
      ASSERT_EQ(report->damaged.size(), 1u);
      const DamagedRange& range = report->damaged[0];
      EXPECT_EQ(range.tile, static_cast<uint32_t>(tile));
      EXPECT_LE(range.offset, offset);
      EXPECT_GT(range.offset + range.bytes, offset);
      EXPECT_EQ(range.path, world.Path(directory));
      ++named;
    } else {
      EXPECT_TRUE(checked.ok()) << checked;
      EXPECT_TRUE(report->damaged.empty());
      EXPECT_EQ(report->notes.size(), tile == -1 ? 1u : 0u) << report->notes.size();
      ++(tile == -1 ? healed : meaningless);
    }
    world.Close();
    flip(directory, offset, mask);
  };

  const uint64_t body = (g.superblock_bytes() - 2 * kBlockBytes) / 2;
  for (uint32_t d = 0; d < 2; ++d) {
    for (uint32_t copy = 0; copy < 2; ++copy) {
      for (uint64_t at :
           {0u, 7u, 8u, 12u, 16u, 31u, 32u, 36u, 40u, 44u, 48u, 56u, 64u, 1000u, 4088u, 4095u}) {
        expect(d, copy * kBlockBytes + at, -1);
      }
      for (uint64_t at : {0u, 3u, 4u, 20u, 30u, 60u}) expect(d, 2 * kBlockBytes + copy * body + at, -1);
    }
  }
  const uint64_t record = RecordBytes(g, 6) - kBlockBytes;
  ASSERT_LT(record, g.record_capacity());
  for (uint32_t place = 0; place < 2; ++place) {
    for (uint32_t copy = 0; copy < 2; ++copy) {
      const uint64_t start = g.record_offset(place, copy);
      for (uint64_t at : {0u, 8u, 12u, 16u, 32u, 40u, 48u, 56u, 64u, 72u, 80u, 500u, 4088u})
        expect(0, start + at, -1);
      const uint64_t table = 16 * g.tiles() + 8 * g.total_segments();
      for (uint64_t at = 0; at < table + 6; at += 11) expect(0, start + kBlockBytes + at, -1);
    }
  }
  for (uint32_t t = 0; t < g.tiles(); ++t) {
    for (uint32_t s = 0; s < g.segments(t); ++s) {
      const uint64_t bytes = g.segment_bytes(t, s);
      const uint64_t start = g.segment_offset(t, live[t].slot, s);
      for (uint64_t at : {uint64_t{0}, bytes / 2, bytes - 1, random() % bytes}) {
        expect(g.directory(t), start + at, static_cast<int>(t));
      }
      if (bytes % kBlockBytes != 0) expect(g.directory(t), start + bytes, -2);  // padding
      expect(g.directory(t), g.segment_offset(t, 1 - live[t].slot, s), -2);     // the older version
    }
  }
  std::printf("%d flips healed, %d named, %d without meaning\n", healed, named, meaningless);
  EXPECT_GT(healed, 150);
  EXPECT_GT(named, 50);
}

TEST_P(SimTest, WritesWaitForACommitAndReadsDoNot) {
  SimWorld world(5, GetParam());
  ASSERT_TRUE(world.Create().ok());
  FakeModel model(world.layout(), 5);
  model.Initialize();
  CommitIo commit;
  ASSERT_TRUE(world.store().Commit(&commit, {.step = 1, .updates = 0, .payload = ""}).ok());
  ASSERT_FALSE(commit.finished());  // no time has passed
  TileIo write, read;
  EXPECT_THAT(std::string(model.Submit(world.store(), &write, 0, 2).message()),
              HasSubstr("a commit is in flight"));
  EXPECT_TRUE(absl::IsFailedPrecondition(world.store().DropAllWritten()));
  EXPECT_TRUE(absl::IsFailedPrecondition(world.store().FinishCommit(&commit)));
  CommitIo second;
  EXPECT_TRUE(
      absl::IsFailedPrecondition(world.store().Commit(&second, {.step = 1, .updates = 0, .payload = ""})));
  void* place = model.tile(0)[0].data();
  ASSERT_TRUE(world.store().ReadSegments(&read, 0, 0, 1, std::span(&place, 1), aio::Priority::kDemand).ok());
  ASSERT_TRUE(world.Pump([&] { return read.finished() && commit.finished(); }).ok());
  EXPECT_TRUE(world.store().VerifyRead(read).ok());
  ASSERT_TRUE(world.store().FinishCommit(&commit).ok());
  EXPECT_TRUE(model.WriteTile(world.store(), 0, 2).ok());
}

TEST_P(SimTest, AFailedRecordCanBeTriedAgainAndAFailedSyncCannot) {
  SimWorld world(5, GetParam());
  ASSERT_TRUE(world.Create().ok());
  FakeModel model(world.layout(), 5);
  model.Initialize();
  model.UpdateAll(1);
  ASSERT_TRUE(model.WriteAll(world.store(), 2).ok());
  world.disk().FailNext(aio::Op::kWrite, EIO);
  const absl::Status failed = world.store().CommitNow({.step = 1, .updates = 1, .payload = ""});
  EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
  EXPECT_THAT(std::string(failed.message()), HasSubstr("commit of step 1"));
  EXPECT_TRUE(absl::IsFailedPrecondition(model.WriteTile(world.store(), 0, 3)));
  EXPECT_TRUE(absl::IsFailedPrecondition(world.store().DropAllWritten()));
  ASSERT_TRUE(world.store().CommitNow({.step = 1, .updates = 1, .payload = ""}).ok());
  EXPECT_TRUE(world.Check().ok());
  if (GetParam() == Sync::kPower) {
    model.UpdateAll(2);
    ASSERT_TRUE(model.WriteAll(world.store(), 3).ok());
    world.disk().FailNext(aio::Op::kSync, EIO);
    EXPECT_FALSE(world.store().CommitNow({.step = 2, .updates = 2, .payload = ""}).ok());
    const absl::Status again = world.store().CommitNow({.step = 2, .updates = 2, .payload = ""});
    EXPECT_THAT(std::string(again.message()), HasSubstr("open the store again"));
    world.Restart();
    ASSERT_TRUE(world.Open().ok());
    EXPECT_TRUE(world.Check().ok());
  }
}

// Promise: a step is committed as a whole or not at all: a tile whose write failed stops it.
TEST_P(SimTest, NothingIsCommittedOverAFailedWrite) {
  SimWorld world(5, GetParam());
  ASSERT_TRUE(world.Create().ok());
  FakeModel model(world.layout(), 5);
  model.Initialize();
  model.UpdateAll(1);
  for (uint32_t t = 0; t < model.tiles(); ++t) {
    if (t == 2) world.disk().FailNext(aio::Op::kWrite, EIO);
    EXPECT_EQ(model.WriteTile(world.store(), t, 2).ok(), t != 2);
  }
  const CommitInfo info{.step = 1, .updates = 1, .payload = ""};
  EXPECT_THAT(std::string(world.store().CommitNow(info).message()),
              HasSubstr("the last write of tile 2 failed"));
  EXPECT_EQ(world.store().newest_version(2), 1u);
  ASSERT_TRUE(model.WriteTile(world.store(), 2, 2).ok());
  ASSERT_TRUE(world.store().CommitNow(info).ok());
  EXPECT_TRUE(world.Check().ok());
  // What is left of a version whose first part failed is not the version.
  TileIo io;
  const void* place = model.tile(2)[1].data();
  world.disk().FailNext(aio::Op::kWrite, EIO);
  for (const uint32_t segment : {1u, 0u}) {
    place = model.tile(2)[segment].data();
    const uint64_t checksum = world.store().SegmentChecksum(2, segment, 3, place);
    ASSERT_TRUE(world.store()
                    .WriteSegments(&io, 2, 3, segment, std::span(&place, 1), aio::Priority::kWriteBehind)
                    .ok());
    (void)world.store().Wait(&io);
    EXPECT_EQ(world.store().NoteWritten(&io, std::span(&checksum, 1)).ok(), segment == 0);
  }
  EXPECT_EQ(world.store().newest_version(2), 2u);
  EXPECT_THAT(std::string(world.store().CommitNow({.step = 2, .updates = 1, .payload = ""}).message()),
              HasSubstr("some segments were not written"));
  // Or the whole step is given up.
  world.disk().FailNext(aio::Op::kWrite, EIO);
  EXPECT_FALSE(model.WriteAll(world.store(), 3).ok());
  ASSERT_TRUE(world.store().DropAllWritten().ok());
  ASSERT_TRUE(world.store().CommitNow({.step = 2, .updates = 1, .payload = ""}).ok());
  EXPECT_TRUE(world.Check().ok());
}

TEST_P(SimTest, AFullDiskIsRefusedAtCreation) {
  aio::VirtualClock clock;
  aio::SimDiskOptions disk_options;
  disk_options.clock = &clock;
  disk_options.capacity_bytes = 1 << 20;
  aio::SimDisk disk(disk_options);
  aio::EngineOptions engine_options;
  engine_options.backend = aio::BackendKind::kSim;
  engine_options.sim = &disk;
  auto engine = aio::Engine::Create(engine_options);
  ASSERT_TRUE(engine.ok());
  StoreOptions options;
  options.sync = GetParam();
  options.directories = {"/sim/0"};
  const auto store = Store::Create(**engine, options, SmallLayout(40, 6000), "{}");
  EXPECT_TRUE(absl::IsResourceExhausted(store.status())) << store.status();
  EXPECT_THAT(disk.ListFiles(), ::testing::IsEmpty());  // nothing is left behind
}

INSTANTIATE_TEST_SUITE_P(Sync, SimTest, ::testing::Values(Sync::kProcess, Sync::kPower),
                         [](const auto& kind) { return kind.param == Sync::kPower ? "power" : "process"; });

}  // namespace
}  // namespace penstock::swap
