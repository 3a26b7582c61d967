// Tensors' memory against brute force: buffers never overlap and keep what is written, memory never exceeds
// the bound as the kernel counts it, and whatever fits in the bound is served, however it is fragmented.
#include "zero/memory/tensor_region.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <random>
#include <vector>

namespace penstock::zero::tensor_region_test {
namespace {

constexpr int64_t kGranule = TensorRegion::kGranule;

struct Buffer {
  void* base;
  int64_t granules;
  unsigned char fill;
  bool written;
};

void Write(Buffer& buffer) {
  std::memset(buffer.base, buffer.fill, static_cast<size_t>(buffer.granules * kGranule));
  buffer.written = true;
}

// Pages of the first `bytes` after `base` that have memory.
int64_t ResidentBytes(void* base, int64_t bytes) {
  std::vector<unsigned char> pages(static_cast<size_t>(bytes / 4096));
  EXPECT_EQ(mincore(base, static_cast<size_t>(bytes), pages.data()), 0);
  int64_t resident = 0;
  for (const unsigned char page : pages) resident += page & 1;
  return resident * 4096;
}

TEST(TensorRegion, WhateverFitsInTheBoundIsServedAndMemoryNeverExceedsIt) {
  for (const uint64_t seed : {1, 2, 3, 4}) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    TensorRegion region;
    const int64_t most = 700 + static_cast<int64_t>(random() % 500);  // granules: 11 to 19 MiB
    region.UseHugePages(seed % 2 == 0 ? most * kGranule : 0);
    const TensorRegion::Place first = region.Find(1);
    ASSERT_EQ(first.at, 0);
    void* const begin = region.Take(first);
    region.GiveBack(begin, 1);
    std::vector<Buffer> live;
    int64_t used = 0;
    for (int i = 0; i < 6000; ++i) {
      // Now more comes, now more goes.
      const bool take = live.empty() || random() % 100 < (i / 500 % 2 == 0 ? 65U : 35U);
      int64_t granules = 1 + static_cast<int64_t>(random() % (random() % 8 == 0 ? 300 : 30));
      if (take) granules = std::min(granules, most - used);
      if (take && granules > 0) {
        TensorRegion::Place place = region.Find(granules);
        ASSERT_GE(place.at, 0);
        region.Fit(most - used, &place);
        void* base = region.Take(place);
        used += granules;
        EXPECT_LE(used + region.kept(), most);
        EXPECT_TRUE(region.Owns(base));
        live.push_back({base, granules, static_cast<unsigned char>(random()), random() % 2 == 0});
        if (live.back().written) Write(live.back());
      } else if (!live.empty()) {
        const size_t k = random() % live.size();
        Buffer& buffer = live[k];
        if (!buffer.written) Write(buffer);  // now: others came and went meanwhile
        const auto* bytes = static_cast<const unsigned char*>(buffer.base);
        for (int64_t g = 0; g < buffer.granules * 4; ++g) ASSERT_EQ(bytes[g * 4096 + 17], buffer.fill);
        region.GiveBack(buffer.base, buffer.granules);
        used -= buffer.granules;
        live[k] = live.back();
        live.pop_back();
      }
      if (i % 200 == 0) {
        ASSERT_LE(ResidentBytes(begin, 6 * most * kGranule), (used + region.kept()) * kGranule);
      }
    }
    for (const Buffer& buffer : live) region.GiveBack(buffer.base, buffer.granules);
    region.Release(region.kept());
    EXPECT_EQ(region.kept(), 0);
    EXPECT_EQ(ResidentBytes(begin, 6 * most * kGranule), 0);
  }
}

// Layer after layer: buffers of several sizes come and go like a stack, then one large one for the loss. From
// the second step on none needs fresh memory, in a bound of a tenth more than is ever in use at once.
TEST(TensorRegion, AStepLikeTheLastTakesNoFreshMemory) {
  TensorRegion region;
  region.UseHugePages(int64_t{64} << 20);
  int64_t used = 0, peak = 0, fresh = 0;
  const auto step = [&](int64_t most) {
    fresh = 0;
    const auto take = [&](int64_t granules) {
      TensorRegion::Place place = region.Find(granules);
      if (most > 0) region.Fit(most - used, &place);
      fresh += place.fresh;
      used += granules;
      peak = std::max(peak, used);
      return Buffer{region.Take(place), granules, 0, true};
    };
    const auto give = [&](const Buffer& buffer) {
      region.GiveBack(buffer.base, buffer.granules);
      used -= buffer.granules;
    };
    for (int layer = 0; layer < 12; ++layer) {
      const Buffer hidden = take(64), wide = take(256), attention = take(190);
      const Buffer narrow = take(71);
      give(wide);
      const Buffer out = take(129);
      give(hidden);
      give(narrow);
      give(attention);
      give(out);
    }
    const Buffer logits = take(430), gradient = take(144);
    give(logits);
    give(gradient);
  };
  step(0);
  const int64_t most = peak * 11 / 10;
  region.Release(region.kept());
  step(most);
  EXPECT_GT(fresh, 0);
  for (int i = 0; i < 3; ++i) {
    step(most);
    EXPECT_EQ(fresh, 0) << "step " << i;
  }
}

}  // namespace
}  // namespace penstock::zero::tensor_region_test
