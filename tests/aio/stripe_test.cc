// Striping: where bytes go, that they come back, and that fast and slow drives share the work.
#include "aio/stripe.h"

#include <random>

#include "tests/aio/test_support.h"

namespace penstock::aio::stripe_test {
namespace {

TEST(StripeLayoutTest, EveryByteHasOnePlaceAndFilesHaveNoHoles) {
  for (const std::vector<double>& weights :
       {std::vector<double>{1}, {1, 1}, {7, 3.5}, {3, 2, 1}, {1, 100}, {5.1, 4.9, 5.0, 0.2}}) {
    const auto layout = StripeLayout::Make(4096, weights);
    ASSERT_OK(layout.status());
    std::vector<uint64_t> filled(weights.size(), 0);
    for (uint64_t unit = 0; unit < 500; ++unit) {
      const auto extent = layout->At(unit * 4096, UINT64_MAX);
      ASSERT_EQ(extent.bytes, 4096u);
      ASSERT_EQ(extent.offset, filled[extent.file]);  // one after another, without gap or overlap
      filled[extent.file] += 4096;
      const auto within = layout->At(unit * 4096 + 1000, 50);
      ASSERT_EQ(within.offset, extent.offset + 1000);
      ASSERT_EQ(within.bytes, 50u);
      for (uint32_t f = 0; f < layout->files(); ++f)
        ASSERT_EQ(layout->FileBytes(f, (unit + 1) * 4096), filled[f]);
    }
  }
}

TEST(StripeLayoutTest, SharesFollowTheWeights) {
  const auto layout = StripeLayout::Make(4096, {7.0e9, 3.5e9});
  EXPECT_EQ(layout->units_a_round(0), 2u);
  EXPECT_EQ(layout->units_a_round(1), 1u);
  const auto odd = StripeLayout::Make(4096, {3.17e9, 7.1e9, 5.03e9});
  const double all = static_cast<double>(1000 * 4096);
  EXPECT_NEAR(static_cast<double>(odd->FileBytes(0, 1000 * 4096)) / all, 3.17 / 15.3, 0.02);
  EXPECT_NEAR(static_cast<double>(odd->FileBytes(1, 1000 * 4096)) / all, 7.1 / 15.3, 0.02);
  for (const std::vector<double>& bad : {std::vector<double>{}, {0.0}, {1, -1}, {NAN}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(StripeLayout::Make(4096, bad).status()));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(StripeLayout::Make(1000, {1}).status()));
}

TEST(StripedFileTest, ComesBackOnARealDisk) {
  World w(BackendKind::kAuto);
  ASSERT_EQ(w.skip, "");
  StripedFileOptions options;
  for (const char* name : {"a", "b", "c"}) {
    options.directories.push_back(w.directory / name);
    std::filesystem::create_directory(options.directories.back());
  }
  options.weights = {3, 2, 1};
  options.name = "state";
  options.unit_bytes = 256 * kKiB;
  options.size = 12 * kMiB;
  options.file.create = true;
  auto file = StripedFile::Open(options);
  ASSERT_OK(file.status());
  EXPECT_EQ(*(*file)->files()[0]->Size(), 6 * kMiB);
  Region out = w.Allocate(12 * kMiB), in = w.Allocate(12 * kMiB);
  FillPattern(1, 0, out.data(), out.bytes());
  StripedTransfer transfer;
  transfer.PrepareWrite(**file, 0, out.data(), out.bytes());
  ASSERT_OK(transfer.Submit(*w.engine));
  ASSERT_OK(transfer.Wait(*w.engine));
  ASSERT_OK((*file)->SyncData());
  std::mt19937_64 random(2);
  for (int i = 0; i < 50; ++i) {  // any part, ragged or not
    const uint64_t offset = random() % (8 * kMiB), bytes = 1 + random() % (4 * kMiB);
    std::memset(in.data(), 0, bytes);
    transfer.PrepareRead(**file, offset, in.data(), bytes);
    ASSERT_OK(transfer.Submit(*w.engine));
    ASSERT_OK(transfer.Wait(*w.engine));
    ASSERT_EQ(Mismatch(1, offset, in.data(), bytes), bytes);
  }
  transfer.PrepareRead(**file, 11 * kMiB, in.data(), 2 * kMiB);
  ASSERT_OK(transfer.Submit(*w.engine));
  const absl::Status beyond = transfer.Wait(*w.engine);
  EXPECT_TRUE(absl::IsOutOfRange(beyond)) << beyond;
  EXPECT_THAT(std::string(beyond.message()), testing::HasSubstr("/state"));
  options.directories[1] = "/nonexistent";
  const auto missing = StripedFile::Open(options);
  EXPECT_THAT(std::string(missing.status().message()), testing::HasSubstr("/nonexistent/state"));
  options.weights = {1};
  EXPECT_TRUE(absl::IsInvalidArgument(StripedFile::Open(options).status()));
}

TEST(StripedFileTest, AFailingDriveIsNamed) {
  World w(BackendKind::kSim);
  StripedFileOptions options;
  options.directories = {"/sim/d0", "/sim/d1"};
  options.name = "state";
  options.size = 16 * kMiB;
  options.unit_bytes = kMiB;
  options.file.create = true;
  options.file.sim = w.disk.get();
  auto file = StripedFile::Open(options);
  ASSERT_OK(file.status());
  w.disk->MarkBad("/sim/d1/state", 0, 64 * kMiB);
  Region region = w.Allocate(16 * kMiB);
  StripedTransfer transfer;
  transfer.PrepareRead(**file, 0, region.data(), 16 * kMiB);
  ASSERT_OK(transfer.Submit(*w.engine));
  const absl::Status status = transfer.Wait(*w.engine);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("/sim/d1/state"));
}

}  // namespace
}  // namespace penstock::aio::stripe_test
