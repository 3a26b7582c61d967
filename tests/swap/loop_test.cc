// The store on a file system of its own. Where its device goes away, loses a part of itself, or runs out,
// every failure is a status, and what was acknowledged with `sync: power` is there when the device is back.
// Where the file system clones files, a clone is a state of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include <filesystem>
#include <functional>

#include "swap/verify.h"
#include "tests/aio/loop_device.h"
#include "tests/swap/no_leak.h"
#include "tests/swap/store_fixture.h"

namespace penstock::swap::loop_test {
namespace {

class LoopStoreTest : public StoreTest {
 protected:
  void On(const aio::LoopDevice& loop) {
    options_.directories = {loop.directory() + "/run"};
    options_.sync = Sync::kPower;
  }

  // Steps until one fails; returns the last that was acknowledged. At `doom_at`, with tiles on their way, the
  // doom comes.
  uint64_t TrainUntilItFails(Store& store, FakeModel* model, uint64_t doom_at,
                             const std::function<void()>& doom, absl::Status* failure) {
    for (uint64_t step = 1; step <= 100; ++step) {
      model->UpdateAll(step);
      std::vector<std::unique_ptr<TileIo>> ios;
      absl::Status status;
      for (uint32_t t = 0; t < model->tiles(); ++t) {
        if (step == doom_at && t == 2) doom();
        ios.push_back(std::make_unique<TileIo>());
        status.Update(model->Submit(store, ios.back().get(), t, step + 1));
      }
      for (auto& io : ios) {
        if (io->pending() || io->finished()) {
          (void)store.Wait(io.get());
          status.Update(model->Note(store, io.get()));
        }
      }
      const absl::Status commit = store.CommitNow({.step = step, .updates = step, .payload = ""});
      // A step whose tiles did not all arrive is never committed.
      EXPECT_TRUE(status.ok() || !commit.ok()) << status;
      status.Update(commit);
      if (!status.ok()) {
        *failure = status;
        return step - 1;
      }
    }
    return 100;
  }
};

TEST_F(LoopStoreTest, ADeviceThatGoesAwayLosesNothingAcknowledged) {
  for (const uint64_t doom_at : {1, 4}) {
    aio::LoopDevice loop({});
    if (!loop.skip().empty()) GTEST_SKIP() << loop.skip();
    On(loop);
    FakeModel model(layout_, 7);
    auto store = CreateCommitted(&model);
    ASSERT_NE(store, nullptr);
    bool gone = true;
    absl::Status failure;
    const uint64_t acknowledged = TrainUntilItFails(
        *store, &model, doom_at, [&] { gone = loop.GoAway(); }, &failure);
    if (!gone) GTEST_SKIP() << "this file system cannot be shut down";
    ASSERT_LE(acknowledged, doom_at);
    EXPECT_FALSE(failure.ok());
    EXPECT_NE(std::string(failure.message()).find(loop.directory()), std::string::npos) << failure;
    AlignedBuffer memory(1 << 20);
    const auto report = VerifyAll(*store, memory.span());
    EXPECT_TRUE(!report.ok() || !report->damaged.empty()) << "nothing can be read from a device that is gone";
    store.reset();
    ASSERT_TRUE(loop.Unmount());
    loop.Mount();
    ASSERT_EQ(loop.skip(), "");
    store = Open();
    ASSERT_NE(store, nullptr);
    EXPECT_GE(store->committed_step(), acknowledged);
    FakeModel oracle(layout_, 7), found(layout_, 7);
    oracle.Initialize();
    for (uint64_t u = 1; u <= store->committed_updates(); ++u) oracle.UpdateAll(u);
    ASSERT_TRUE(found.ReadAll(*store).ok());
    EXPECT_EQ(found.Difference(oracle), "");
    store.reset();
  }
}

TEST_F(LoopStoreTest, ADeviceThatLosesItsTailIsDamageByName) {
  aio::LoopDevice loop({});
  if (!loop.skip().empty()) GTEST_SKIP() << loop.skip();
  On(loop);
  layout_ = SmallLayout(24, 60'000);
  FakeModel model(layout_, 7);
  auto store = CreateCommitted(&model);
  ASSERT_NE(store, nullptr);
  ASSERT_TRUE(loop.LoseTail(20 << 20));
  AlignedBuffer memory(1 << 20);
  const auto report = VerifyAll(*store, memory.span());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_FALSE(report->damaged.empty());
  for (const DamagedRange& range : report->damaged) EXPECT_EQ(range.path, File());
  EXPECT_FALSE(model.ReadAll(*store).ok());
}

TEST_F(LoopStoreTest, ADeviceThatRunsOutStopsTheStepAndKeepsTheOneBefore) {
  aio::LoopDevice loop({.bytes = 256 << 20, .backing_bytes = 64 << 20});
  if (!loop.skip().empty()) GTEST_SKIP() << loop.skip();
  On(loop);
  layout_ = SmallLayout(24, 60'000);  // 20 MiB a version: behind the file system's 33 there is room for one
  FakeModel model(layout_, 7);
  auto store = CreateCommitted(&model);
  ASSERT_NE(store, nullptr);
  ASSERT_FALSE(HasFailure()) << "there is room for the first version";
  absl::Status failure;
  const uint64_t acknowledged = TrainUntilItFails(
      *store, &model, 0, [] {}, &failure);
  EXPECT_FALSE(failure.ok());
  EXPECT_LT(acknowledged, 100u);
  store.reset();
  // The device has room again; the file system recovers as after a crash.
  ASSERT_TRUE(loop.Unmount());
  const std::string backing = std::filesystem::path(loop.backing_file()).parent_path();
  ASSERT_EQ(::mount("tmpfs", backing.c_str(), nullptr, MS_REMOUNT, "size=256m"), 0);
  loop.Mount();
  ASSERT_EQ(loop.skip(), "");
  store = Open();
  ASSERT_NE(store, nullptr);
  EXPECT_GE(store->committed_step(), acknowledged);
  FakeModel oracle(layout_, 7), found(layout_, 7);
  oracle.Initialize();
  for (uint64_t u = 1; u <= store->committed_updates(); ++u) oracle.UpdateAll(u);
  const absl::Status read = found.ReadAll(*store);
  ASSERT_TRUE(read.ok()) << read;
  EXPECT_EQ(found.Difference(oracle), "");
  for (uint64_t step = store->committed_step() + 1, last = step + 3; step < last; ++step)
    Step(*store, &found, step);
}

// A snapshot as people take it: `cp --reflink` of the directory between two runs. Both go on, each
// overwriting what they share, and neither sees the other.
class CloneTest : public LoopStoreTest, public testing::WithParamInterface<const char*> {};

TEST_P(CloneTest, AClonedStateIsAStateOfItsOwn) {
  aio::LoopDevice loop({.type = GetParam(), .bytes = 400 << 20});
  if (!loop.skip().empty()) GTEST_SKIP() << loop.skip();
  On(loop);
  FakeModel model(layout_, 7);
  auto store = CreateCommitted(&model);
  ASSERT_NE(store, nullptr);
  for (uint64_t step = 1; step <= 3; ++step) Step(*store, &model, step);
  store.reset();
  const std::string original = options_.directories.front(), clone = loop.directory() + "/clone";
  ASSERT_EQ(std::system(("cp -a --reflink=always " + original + " " + clone).c_str()), 0);

  FakeModel other(layout_, 7);
  const auto first = Store::Open(*engine_, options_);
  options_.directories = {clone};
  const auto second = Store::Open(*engine_, options_);
  ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
  ASSERT_TRUE(other.ReadAll(**second).ok());
  EXPECT_EQ(other.Difference(model), "");
  other.set_updates(3);
  for (uint64_t step = 4; step <= 9; ++step) {
    Step(**first, &model, step);
    if (step <= 6) Step(**second, &other, step);
  }
  AlignedBuffer memory(1 << 20);
  for (const auto& [of, expected] : {std::pair{first->get(), &model}, std::pair{second->get(), &other}}) {
    const auto report = VerifyAll(*of, memory.span());
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(report->damaged.empty());
    FakeModel found(layout_, 7);
    ASSERT_TRUE(found.ReadAll(*of).ok());
    EXPECT_EQ(found.Difference(*expected), "");
  }
  EXPECT_NE(model.Difference(other), "") << "they have gone different ways";
}

INSTANTIATE_TEST_SUITE_P(FileSystems, CloneTest, testing::Values("xfs", "btrfs"),
                         [](const auto& suite) { return std::string(suite.param); });

}  // namespace
}  // namespace penstock::swap::loop_test
