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

namespace penstock::swap::sim_test {
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
      const int64_t acknowledged = world.acknowledged(), attempted = world.attempted();
      const absl::Status opened = world.Open();
      if (absl::IsNotFound(opened)) {
        ASSERT_LT(acknowledged, 0) << "seed " << seed << " event " << at << ": " << opened;
        continue;
      }
      ASSERT_TRUE(opened.ok()) << "seed " << seed << " event " << at << ": " << opened;
      const auto step = static_cast<int64_t>(world.store().committed_step());
      ASSERT_GE(step, acknowledged) << "seed " << seed << " event " << at;
      ASSERT_LE(step, attempted) << "seed " << seed << " event " << at;
      (step == acknowledged ? before : after) += 1;
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

// Runs to step 3, is killed at event `at`, goes on, and loses the disk's power at random within two steps.
// With one slot a state whose overwriting was announced may be refused. False: over before the kill.
class TwoEnds {
 public:
  TwoEnds(Sync sync, uint32_t slots) : sync_(sync), slots_(slots) {}

  bool Run(uint64_t seed, uint64_t at) {
    SCOPED_TRACE(absl::StrCat("slots ", slots_, " seed ", seed, " killed at event ", at));
    SimWorld world(seed, sync_, 2, slots_);
    world.at_event = [&](uint64_t event) {
      if (event < at) return false;
      world.EndProcess();
      return true;
    };
    absl::Status run = world.Create();
    if (run.ok()) run = world.RunTo(3);
    if (run.ok()) return false;
    if (world.Restart(); !Opens(world)) return true;
    std::mt19937_64 random(seed * 1000003 + at);
    const uint64_t cut = world.events() + 1 + random() % events_of_two_steps;
    world.at_event = [&](uint64_t event) {
      if (event < cut) return false;
      world.disk().Crash();
      return true;
    };
    cuts += world.RunTo(world.store().committed_step() + 2).ok() ? 0 : 1;
    if (world.Restart(); !Opens(world)) return true;
    const absl::Status on = world.RunTo(world.store().committed_step() + 1);
    EXPECT_TRUE(on.ok()) << on;
    EXPECT_TRUE(world.Check().ok());
    return true;
  }

  uint64_t events_of_two_steps = 1;
  int cuts = 0, refused = 0;

 private:
  // Opens, finds all that was acknowledged, and every byte of it; or was refused for a good reason.
  bool Opens(SimWorld& world) {
    const int64_t acknowledged = world.acknowledged();
    const absl::Status opened = world.Open();
    if (absl::IsNotFound(opened)) {
      EXPECT_LT(acknowledged, 0) << opened;
      return false;
    }
    if (slots_ == 1 && absl::IsDataLoss(opened) && world.marked() > acknowledged) {
      EXPECT_THAT(std::string(opened.message()), HasSubstr("one version"));
      ++refused;
      return false;
    }
    EXPECT_TRUE(opened.ok()) << opened;
    if (!opened.ok()) return false;
    EXPECT_GE(static_cast<int64_t>(world.store().committed_step()), acknowledged);
    const absl::Status checked = world.Check();
    EXPECT_TRUE(checked.ok()) << checked;
    return checked.ok();
  }

  const Sync sync_;
  const uint32_t slots_;
};

// Promise: a process that dies and power that fails soon afterwards lose no more than either alone, with any
// number of versions. What recovery found is acknowledged: the next process goes on from there.
TEST_P(SimTest, AKillAndThenAPowerCutLoseNothingAcknowledged) {
  for (const uint32_t slots : {2u, 3u, 1u}) {
    TwoEnds ends(GetParam(), slots);
    uint64_t events = 0;
    {
      SimWorld world(7, GetParam(), 2, slots);
      ASSERT_TRUE(world.Create().ok());
      const uint64_t begin = world.events();
      ASSERT_TRUE(world.RunTo(3).ok());
      events = world.events();
      ends.events_of_two_steps = (events - begin) * 2 / 3;
    }
    int kills = 0;
    for (uint64_t seed = 7; seed < 7 + (slots == 2 ? 3 : 1) * kSoak; ++seed) {
      for (uint64_t at = 1; at <= events && !HasFailure(); at += kStride) kills += ends.Run(seed, at) ? 1 : 0;
    }
    ASSERT_FALSE(HasFailure());
    std::printf("%u slots: %d kills, %d power cuts after them, %d times the only version was gone\n", slots,
                kills, ends.cuts, ends.refused);
    EXPECT_GT(kills, 100 / kStride);
    EXPECT_GT(ends.cuts, kills / 4);
  }
}

// Promise: a creation that is cut short, by whatever, is a run that never was, and not one that was damaged.
TEST_P(SimTest, ACutInTheMidstOfCreationIsARunThatNeverWas) {
  struct Cut {
    SimWorld* world;
    int left;
    bool power;
  };
  int cuts = 0;
  for (uint64_t seed = 1; seed <= 40 * kSoak; ++seed) {
    for (int nth = 1; nth <= 12; ++nth) {
      SCOPED_TRACE(absl::StrCat("seed ", seed, " stage ", nth));
      SimWorld world(seed, GetParam());
      Cut cut{&world, nth, seed % 4 != 0};
      world.options().stage_context = &cut;
      world.options().at_crash_point = [](CrashPoint stage, void* context) {
        auto* c = static_cast<Cut*>(context);
        if (stage > CrashPoint::kCreateDone || --c->left != 0) return;
        if (c->power) {
          c->world->disk().Crash();
        } else {
          c->world->EndProcess();
        }
      };
      if (world.Create().ok()) continue;
      ++cuts;
      world.options().at_crash_point = nullptr;
      world.Restart();
      const absl::Status opened = world.Open();
      ASSERT_TRUE(absl::IsNotFound(opened)) << opened;
    }
  }
  EXPECT_GT(cuts, 300);
}

// The bodies of a superblock may be longer than what tells a creation from a run. What is behind that is not
// written before what is in it: else a creation that was cut short would pass for a run that was overwritten.
TEST_P(SimTest, ALongSuperblockThatWasCutShortIsARunThatNeverWas) {
  SimWorld world(1, GetParam(), /*directories=*/1);
  const std::string path = world.Path(0), aside = "/sim/aside";
  world.options().stage_context = &world;
  // From the first write on, what it makes is beside its name, where nobody clears it away.
  world.options().at_crash_point = [](CrashPoint stage, void* context) {
    auto* in = static_cast<SimWorld*>(context);
    if (stage == CrashPoint::kCreateReserved) (void)in->disk().Rename(in->Path(0), "/sim/aside");
  };
  // The first block fails, as if it had not come to its end when the process was killed.
  for (const std::string& name : {path, aside}) world.disk().MarkBad(name, 2 * kSectorBytes, kSectorBytes);
  const std::string identity = "{" + std::string(kMaxIdentityBytes - 2, ' ') + "}";
  ASSERT_FALSE(Store::Create(world.engine(), world.options(), world.layout(), identity).ok());
  world.disk().ClearBadRanges();
  ASSERT_TRUE(world.disk().Rename(aside, path).ok());
  // Nor had those that wait in the drive's queue with it.
  const std::string zeros((uint64_t{1} << 20) - 2 * kSectorBytes, '\0');
  ASSERT_TRUE(world.disk().Write(path, 2 * kSectorBytes, zeros).ok());
  world.options().at_crash_point = nullptr;
  const absl::Status opened = world.Open();
  EXPECT_TRUE(absl::IsNotFound(opened)) << opened;
}

// Ranks that did not all commit take the last one back. Where the sync of that failed, whoever opens the
// store next makes good for it before the slots of what was taken back are written to: else a power cut would
// bring the record back, over tiles of another step.
TEST_P(SimTest, ACommitThatWasTakenBackStaysSoWhereItsSyncFailed) {
  if (GetParam() == Sync::kProcess) return;  // has none
  for (uint64_t seed = 1; seed <= 60 * kSoak; seed += kStride) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    SimWorld world(seed, GetParam());
    ASSERT_TRUE(world.Create().ok());
    ASSERT_TRUE(world.RunTo(2).ok());
    world.Close();
    ASSERT_TRUE(world.Open().ok());
    const uint64_t last = world.store().committed_sequence();
    world.disk().FailNext(aio::Op::kSync, EIO);
    ASSERT_FALSE(world.store().GoBackTo(last - 1).ok());
    world.EndProcess();
    world.Restart();
    ASSERT_TRUE(world.Open().ok());
    ASSERT_EQ(world.store().committed_sequence(), last - 1);
    // On with another step than the one that was taken back.
    FakeModel model(world.layout(), seed);
    model.Initialize();
    model.UpdateAll(1);
    model.UpdateAll(77);
    std::mt19937_64 random(seed);
    const auto written = static_cast<uint32_t>(1 + random() % model.tiles());
    for (uint32_t tile = 0; tile < written; ++tile) {
      ASSERT_TRUE(model.WriteTile(world.store(), tile, 3).ok());
    }
    world.disk().Crash();
    world.Restart();
    const absl::Status opened = world.Open();
    ASSERT_TRUE(opened.ok()) << opened;
    FakeModel found(world.layout(), seed);
    const absl::Status read = found.ReadAll(world.store());
    EXPECT_TRUE(read.ok()) << read;
  }
}

// A sync that failed has not happened, and no later one makes up for it: neither the next process, which
// finds the record that was not made durable, nor the one after a failed opening may build on it.
TEST_P(SimTest, AFailedSyncIsNotMadeUpForByALaterOne) {
  if (GetParam() == Sync::kProcess) return;  // has none
  int failed = 0, failed_openings = 0;
  for (uint64_t seed = 1; seed <= 300 * kSoak; seed += kStride) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    SimWorld world(seed, GetParam());
    ASSERT_TRUE(world.Create().ok());
    ASSERT_TRUE(world.RunTo(1 + seed % 2).ok());
    std::mt19937_64 random(seed);
    const uint64_t from = world.events() + random() % 100;
    bool placed = false;
    world.at_event = [&](uint64_t event) {
      if (event >= from && !placed) world.disk().FailNext(aio::Op::kSync, EIO);
      placed = placed || event >= from;
      return false;
    };
    const absl::Status run = world.RunTo(world.store().committed_step() + 1);
    if (run.ok()) continue;  // past the step's syncs
    ++failed;
    EXPECT_THAT(std::string(run.message()), HasSubstr("sync"));
    world.EndProcess();
    world.Restart();
    if (seed % 3 == 0) {
      world.disk().FailNext(aio::Op::kSync, EIO);
      EXPECT_FALSE(world.Open().ok());
      ++failed_openings;
      world.EndProcess();
      world.Restart();
    }
    const absl::Status opened = world.Open();
    ASSERT_TRUE(opened.ok()) << opened;
    const uint64_t cut = world.events() + random() % 100;
    world.at_event = [&](uint64_t event) {
      if (event < cut) return false;
      world.disk().Crash();
      return true;
    };
    (void)world.RunTo(world.store().committed_step() + 1);
    world.Restart();
    const int64_t acknowledged = world.acknowledged();
    const absl::Status again = world.Open();
    ASSERT_TRUE(again.ok()) << again;
    ASSERT_GE(static_cast<int64_t>(world.store().committed_step()), acknowledged);
    const absl::Status checked = world.Check();
    ASSERT_TRUE(checked.ok()) << checked;
  }
  std::printf("%d failed syncs, %d of them while opening\n", failed + failed_openings, failed_openings);
  EXPECT_GT(failed, 50 / kStride);
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
          // The disk fails from here on; once would be made up for. A sync is not tried again.
          world.disk().FailNext(op, error, op == aio::Op::kSync ? 1 : 1000);
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
      const int64_t acknowledged = world.acknowledged();
      ASSERT_TRUE(world.Open().ok());
      ASSERT_GE(static_cast<int64_t>(world.store().committed_step()), acknowledged);
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
      const int64_t acknowledged = world.acknowledged();
      const absl::Status opened = world.Open();
      ASSERT_TRUE(opened.ok()) << "seed " << seed << ": " << opened;
      ASSERT_GE(static_cast<int64_t>(world.store().committed_step()), acknowledged) << "seed " << seed;
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
  // `tile` >= 0: the bit belongs to that tile's live version; -1: to the metadata; -2: it means nothing.
  const auto expect = [&](uint32_t directory, uint64_t offset, int tile) {
    SCOPED_TRACE(absl::StrCat("directory ", directory, " offset ", offset));
    const auto whole = world.disk().Read(world.Path(directory), offset, 1);
    ASSERT_TRUE(whole.ok());
    const std::string flipped(1, static_cast<char>(whole->front() ^ (1 << (random() % 8))));
    ASSERT_TRUE(world.disk().Write(world.Path(directory), offset, flipped).ok());
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
    ASSERT_TRUE(world.disk().Write(world.Path(directory), offset, *whole).ok());
  };

  const uint64_t body = (g.superblock_bytes() - 2 * kSectorBytes) / 2;
  for (uint32_t d = 0; d < 2; ++d) {
    for (uint32_t copy = 0; copy < 2; ++copy) {
      for (uint64_t at :
           {0u, 7u, 8u, 12u, 16u, 31u, 32u, 36u, 40u, 44u, 48u, 56u, 64u, 1000u, 4088u, 4095u}) {
        expect(d, copy * kSectorBytes + at, -1);
      }
      for (uint64_t at : {0u, 3u, 4u, 20u, 30u, 60u}) expect(d, 2 * kSectorBytes + copy * body + at, -1);
    }
  }
  const uint64_t record = RecordBytes(g, 6) - kSectorBytes;
  ASSERT_LT(record, g.record_capacity());
  for (uint32_t place = 0; place < 2; ++place) {
    for (uint32_t copy = 0; copy < 2; ++copy) {
      const uint64_t start = g.record_offset(place, copy);
      for (uint64_t at : {0u, 8u, 12u, 16u, 32u, 40u, 48u, 56u, 64u, 72u, 80u, 500u, 4088u})
        expect(0, start + at, -1);
      const uint64_t table = 16 * g.tiles() + 8 * g.total_segments();
      for (uint64_t at = 0; at < table + 6; at += 11) expect(0, start + kSectorBytes + at, -1);
    }
  }
  for (uint32_t t = 0; t < g.tiles(); ++t) {
    for (uint32_t s = 0; s < g.segments(t); ++s) {
      const uint64_t bytes = g.segment_bytes(t, s);
      const uint64_t start = g.segment_offset(t, live[t].slot, s);
      for (uint64_t at : {uint64_t{0}, bytes / 2, bytes - 1, random() % bytes}) {
        expect(g.directory(t), start + at, static_cast<int>(t));
      }
      if (bytes % kSectorBytes != 0) expect(g.directory(t), start + bytes, -2);  // padding
      expect(g.directory(t), g.segment_offset(t, 1 - live[t].slot, s), -2);      // the older version
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
  world.disk().set_rates({.write_error = 1});
  const absl::Status failed = world.store().CommitNow({.step = 1, .updates = 1, .payload = ""});
  world.disk().set_rates({});
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
    world.disk().set_rates({.write_error = t == 2 ? 1.0 : 0.0});
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
  for (const uint32_t segment : {1u, 0u}) {
    world.disk().set_rates({.write_error = segment == 1 ? 1.0 : 0.0});
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
  world.disk().set_rates({.write_error = 1});
  EXPECT_FALSE(model.WriteAll(world.store(), 3).ok());
  world.disk().set_rates({});
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
}  // namespace penstock::swap::sim_test
