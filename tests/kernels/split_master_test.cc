#include "kernels/split_master.h"

#include <atomic>
#include <thread>

#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::split_master_test {
namespace {

// Checks [first, first + n) bit patterns against the definition; returns the number that differ.
size_t CountWrong(uint64_t first, size_t n, std::vector<float>* in, std::vector<uint16_t>* master_high,
                  std::vector<int16_t>* master_low, std::vector<float>* back) {
  auto* bits = reinterpret_cast<unsigned char*>(in->data());
  for (size_t i = 0; i < n; ++i) {
    const uint32_t pattern = static_cast<uint32_t>(first + i);
    std::memcpy(bits + 4 * i, &pattern, 4);
  }
  SplitMaster(in->data(), master_high->data(), master_low->data(), n);
  JoinMaster(master_high->data(), master_low->data(), back->data(), n);
  const auto* joined = reinterpret_cast<const unsigned char*>(back->data());
  size_t wrong = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t pattern = static_cast<uint32_t>(first + i);
    uint32_t got;
    std::memcpy(&got, joined + 4 * i, 4);
    const bool nan = (pattern & 0x7FFFFFFFu) > 0x7F800000u;
    const uint32_t rounded = nan ? (pattern >> 16) | 0x40u : (pattern + 0x8000u) >> 16;
    const uint32_t rest = nan ? 0 : (pattern - (rounded << 16)) & 0xFFFFu;
    const uint32_t whole = nan ? rounded << 16 : pattern;
    const bool same =
        (*master_high)[i] == rounded && static_cast<uint16_t>((*master_low)[i]) == rest && got == whole;
    wrong += same ? 0 : 1;
  }
  return wrong;
}

#ifdef PENSTOCK_SANITIZED
constexpr uint64_t kStride =
    61;  // a sanitizer takes ten times as long: one chunk in so many, over all binades
#else
constexpr uint64_t kStride = 1;
#endif

TEST(SplitMaster, ExactForAllFourBillionFloats) {
  constexpr size_t kChunk = size_t{1} << 16;
  constexpr uint64_t kChunks = (uint64_t{1} << 32) / kChunk;
  std::atomic<uint64_t> next = 0;
  std::atomic<size_t> wrong = 0;
  const auto work = [&] {
    std::vector<float> in(kChunk), back(kChunk);
    std::vector<uint16_t> master_high(kChunk);
    std::vector<int16_t> master_low(kChunk);
    for (uint64_t chunk = next.fetch_add(kStride); chunk < kChunks; chunk = next.fetch_add(kStride)) {
      wrong += CountWrong(chunk * kChunk, kChunk, &in, &master_high, &master_low, &back);
    }
  };
  std::thread second(work);
  work();
  second.join();
  EXPECT_EQ(wrong.load(), 0u);
}

// The other levels on a part of each binade, and every length and alignment.
TEST(SplitMaster, EveryLevelLengthAndAlignment) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    constexpr size_t kChunk = 4099;
    std::vector<float> in(kChunk), back(kChunk);
    std::vector<uint16_t> master_high(kChunk);
    std::vector<int16_t> master_low(kChunk);
    for (uint64_t first = 0; first < uint64_t{1} << 32; first += (1u << 20) + 65537) {
      ASSERT_EQ(CountWrong(first, kChunk, &in, &master_high, &master_low, &back), 0u)
          << SimdLevelName(level) << " from " << first;
    }
    for (size_t n = 0; n <= 257; ++n) {
      const size_t offset = (n * 5) % 64;
      const std::vector<float> values = Random(n, Values::kAnyBits, n);
      Misaligned<float> master(values, offset), joined(n, offset + 3);
      Misaligned<uint16_t> high(n, offset + 1);
      Misaligned<int16_t> low(n, offset + 2);
      SplitMaster(master.data(), high.data(), low.data(), n);
      JoinMaster(high.data(), low.data(), joined.data(), n);
      ASSERT_TRUE(high.GuardsIntact() && low.GuardsIntact() && joined.GuardsIntact());
      const auto highs = high.Get();
      const auto lows = low.Get();
      const auto result = joined.Get();
      for (size_t i = 0; i < n; ++i) {
        const SplitValue expected = SplitOne(values[i]);
        ASSERT_EQ(highs[i], expected.master_high);
        ASSERT_EQ(lows[i], expected.master_low);
        ASSERT_TRUE(SameFloat(result[i], JoinOne(expected.master_high, expected.master_low)));
        ASSERT_TRUE(SameFloat(result[i], values[i]));
      }
    }
  }
}

TEST(SplitMaster, HighPartIsTheNearestBf16) {
  for (const float x : Random(100000, Values::kNormal, 5)) {
    const float high = Bf16ToFloat(SplitOne(x).master_high);
    const float other = Bf16ToFloat(FloatToBf16(x));
    // Nearest as well as round-to-even does it; the two differ on ties alone.
    EXPECT_EQ(std::fabs(static_cast<double>(high) - x), std::fabs(static_cast<double>(other) - x));
  }
}

}  // namespace
}  // namespace penstock::kernels::split_master_test
