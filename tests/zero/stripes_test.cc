// The shares of state directories: as they are given, by the speed of their drives, and what they reach.
#include "zero/engine/stripes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/file.h"
#include "aio/profile.h"

namespace penstock::zero {
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

}  // namespace
}  // namespace penstock::zero
