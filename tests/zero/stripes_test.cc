// The shares of state directories: as they are given, by the speed of their drives, and what they reach.
#include "zero/engine/stripes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/clock.h"
#include "aio/engine.h"
#include "aio/file.h"
#include "aio/profile.h"
#include "aio/sim_disk.h"
#include "swap/aligned_buffer.h"
#include "swap/store.h"

namespace penstock::zero::stripes_test {
namespace {

using testing::DoubleEq;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class StripesTest : public testing::Test {
 protected:
  StripesTest() {
    setenv("XDG_CACHE_HOME", dir_.c_str(), 1);
    std::filesystem::create_directories(dir_);
  }
  ~StripesTest() override {
    unsetenv("XDG_CACHE_HOME");
    std::filesystem::remove_all(dir_);
  }

  // As ds_nvme_tune stores it, of the drive that `directory` is on or, with `device`, of another.
  static void Store(const std::string& directory, double bytes_per_s, const std::string& device = "") {
    aio::DeviceProfile profile;
    profile.directory = directory;
    profile.device = device.empty() ? *aio::DeviceOfPath(directory) : device;
    profile.mixed_bytes_per_s = profile.read_bytes_per_s = profile.write_bytes_per_s = bytes_per_s;
    ASSERT_TRUE(aio::StoreProfile(profile, aio::DefaultProfilePath()).ok());
  }

  static StorageOptions In(std::vector<std::string> directories) {
    StorageOptions storage;
    storage.state_dirs = std::move(directories);
    return storage;
  }

  const std::string dir_ = absl::StrCat(std::filesystem::current_path().string(), "/stripes_test.", getpid());
  const std::string other_ = "/dev/shm";  // a device of its own on every Linux
};

TEST_F(StripesTest, SharesAreInProportionToSpeedsThatDiffer) {
  EXPECT_THAT(WeightsBySpeed({3e9, 1e9}), ElementsAre(3e9, 1e9));
  EXPECT_THAT(WeightsBySpeed({1.2e9, 1e9}), IsEmpty());  // drives drift by as much
  EXPECT_THAT(WeightsBySpeed({3e9, 0}), IsEmpty());
  EXPECT_THAT(WeightsBySpeed({3e9}), IsEmpty());
}

TEST_F(StripesTest, TheDirectoryThatTakesLongestForItsShareIsWaitedFor) {
  EXPECT_THAT(ReachedOf({3e9, 1e9}, {3, 1}), DoubleEq(1));
  EXPECT_THAT(ReachedOf({3e9, 1e9}, {}), DoubleEq(0.5));  // 2e9 of 4e9
  EXPECT_THAT(ReachedOf({3e9, 1e9}, {1, 1}), DoubleEq(0.5));
  EXPECT_THAT(ReachedOf({1e9, 1e9}, {9, 1}), DoubleEq(1 / 0.9 / 2));
  EXPECT_THAT(ReachedOf({}, {2, 1}), DoubleEq(1));
}

TEST_F(StripesTest, DrivesOfUnlikeSpeedGetUnlikeShares) {
  Store(dir_, 3e9);
  Store(other_, 1e9);
  const Stripes two = ChooseStripes(In({dir_ + "/a", other_ + "/b"}), 0);
  EXPECT_THAT(two.weights, ElementsAre(3e9, 1e9));
  EXPECT_THAT(two.line, HasSubstr("/a 75% (3.00 GB/s)"));
  EXPECT_THAT(two.line, HasSubstr("by measured speed"));
  // Two directories of one drive divide what it moves.
  const Stripes three = ChooseStripes(In({dir_ + "/a", dir_ + "/b", other_ + "/c"}), 0);
  EXPECT_THAT(three.bytes_per_s, ElementsAre(1.5e9, 1.5e9, 1e9));
  EXPECT_DOUBLE_EQ(three.share(2, 3), 0.25);
}

TEST_F(StripesTest, WeightsThatAreGivenWinAndSpeedsSayWhatTheyCost) {
  Store(dir_, 3e9);
  Store(other_, 1e9);
  StorageOptions storage = In({dir_ + "/a", other_ + "/b"});
  storage.state_dir_weights = {1, 1};
  const Stripes stripes = ChooseStripes(storage, 0);
  EXPECT_THAT(stripes.weights, ElementsAre(1, 1));
  EXPECT_DOUBLE_EQ(stripes.reached, 0.5);
  EXPECT_THAT(stripes.line, HasSubstr("50% (3.00 GB/s)"));
}

TEST_F(StripesTest, OneDriveOrOneDirectoryIsNotMeasured) {
  EXPECT_THAT(ChooseStripes(In({dir_ + "/a"}), 0).line, IsEmpty());
  const Stripes one_drive = ChooseStripes(In({dir_ + "/a", dir_ + "/b"}), 0);
  EXPECT_THAT(one_drive.weights, IsEmpty());
  EXPECT_THAT(one_drive.bytes_per_s, IsEmpty());
  EXPECT_FALSE(std::filesystem::exists(StripeCachePath()));
}

TEST_F(StripesTest, ADriveThatCannotBeMeasuredGetsAnEqualShareAndThatIsSaid) {
  Store(dir_, 3e9);
  Store(other_, 1e9, "another");                          // what is mounted there now was never measured
  StorageOptions storage = In({dir_ + "/a", "/proc/b"});  // no file can be made there
  const Stripes stripes = ChooseStripes(storage, 0);
  EXPECT_THAT(stripes.weights, IsEmpty());
  EXPECT_THAT(stripes.line, HasSubstr("could not be measured"));
  storage = In({dir_ + "/a", other_ + "/b"});
  storage.measures_drives = false;
  EXPECT_THAT(ChooseStripes(storage, 0).weights, IsEmpty());
}

// A store whose tiles are read and written in order, some of them ahead, as a step does it: bytes a second of
// virtual time.
double StreamedBytesPerS(const std::vector<double>& bytes_per_s, const std::vector<double>& weights) {
  constexpr uint32_t kTiles = 64, kAhead = 6;
  aio::VirtualClock clock;
  std::vector<std::unique_ptr<aio::SimDisk>> disks;
  swap::StoreOptions options;
  for (const double rate : bytes_per_s) {
    aio::SimDiskOptions disk;
    disk.clock = &clock;
    disk.read_bytes_per_s = disk.write_bytes_per_s = rate;
    disk.name = absl::StrCat("sim", disks.size());
    options.directories.push_back(absl::StrCat("/", disk.name));
    disks.push_back(std::make_unique<aio::SimDisk>(disk));
    if (disks.size() > 1) disks.front()->Mount(options.directories.back(), disks.back().get());
  }
  options.weights = weights;
  aio::EngineOptions engine_options;
  engine_options.backend = aio::BackendKind::kSim;
  engine_options.sim = disks.front().get();
  engine_options.log = [](std::string_view) {};
  const auto engine = aio::Engine::Create(engine_options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  swap::Layout layout;
  layout.tiles.assign(kTiles, {{512 << 10, 1536 << 10}});
  const auto made = swap::Store::Create(**engine, options, layout, "{}");
  EXPECT_TRUE(made.ok()) << made.status();
  swap::Store& store = **made;
  struct Slot {
    Slot() : memory(2 << 20) {}
    swap::AlignedBuffer memory;
    std::array<swap::TileIo, 2> ios;
    std::vector<uint64_t> checksums;
    std::vector<void*> places() const { return {memory.data(), memory.data() + (512 << 10)}; }
  };
  std::vector<std::unique_ptr<Slot>> slots(2 * kAhead);
  for (auto& slot : slots) slot = std::make_unique<Slot>();
  const auto settle = [&](Slot& slot) {
    if (slot.ios[1].kind() != swap::TileIo::Kind::kWrite || slot.checksums.empty()) return;
    EXPECT_TRUE(store.Wait(&slot.ios[1]).ok());
    EXPECT_TRUE(store.NoteWritten(&slot.ios[1], slot.checksums).ok());
    slot.checksums.clear();
  };
  const auto write = [&](uint32_t tile, uint64_t version) {
    Slot& slot = *slots[tile % slots.size()];
    const std::vector<void*> places = slot.places();
    for (uint32_t s = 0; s < 2; ++s)
      slot.checksums.push_back(store.SegmentChecksum(tile, s, version, places[s]));
    const std::vector<const void*> sources(places.begin(), places.end());
    EXPECT_TRUE(store.WriteTile(&slot.ios[1], tile, version, sources, aio::Priority::kWriteBehind).ok());
  };
  for (uint32_t tile = 0; tile < kTiles; ++tile) {
    settle(*slots[tile % slots.size()]);
    write(tile, 1);
  }
  for (const auto& slot : slots) settle(*slot);
  EXPECT_TRUE(store.CommitNow({.step = 0, .payload = ""}).ok());

  const int64_t begin = clock.NowNs();
  for (uint32_t tile = 0; tile < kTiles + kAhead; ++tile) {
    if (tile < kTiles) {
      Slot& slot = *slots[tile % slots.size()];
      settle(slot);
      const std::vector<void*> places = slot.places();
      EXPECT_TRUE(store.ReadSegments(&slot.ios[0], tile, 0, 2, places, aio::Priority::kPrefetch).ok());
    }
    if (tile < kAhead) continue;
    EXPECT_TRUE(store.Wait(&slots[(tile - kAhead) % slots.size()]->ios[0]).ok());
    write(tile - kAhead, 2);
  }
  for (const auto& slot : slots) settle(*slot);
  EXPECT_TRUE(store.CommitNow({.step = 1, .payload = ""}).ok());
  return 2.0 * kTiles * (2 << 20) / (static_cast<double>(clock.NowNs() - begin) * 1e-9);
}

// In virtual time: whatever is waited for, and the order of tiles, included.
TEST_F(StripesTest, ADriveOfAThirdOfTheSpeedOfAnotherAddsToIt) {
  const std::vector<double> speeds = {3e9, 1e9};
  EXPECT_GE(StreamedBytesPerS(speeds, WeightsBySpeed(speeds)), 0.9 * 4e9);
  // Equal shares wait for the slower one: half of the sum.
  EXPECT_LT(StreamedBytesPerS(speeds, {}), 0.52 * 4e9);
  EXPECT_GE(StreamedBytesPerS({1e9, 1e9}, {}), 0.9 * 2e9);
}

}  // namespace
}  // namespace penstock::zero::stripes_test
