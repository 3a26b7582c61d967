#include "kernels/checksum.h"

#include <set>

#include "tests/kernels/kernel_testing.h"

namespace penstock::kernels::checksum_test {
namespace {

std::vector<unsigned char> Bytes(size_t n) {
  std::mt19937_64 random(n + 1);
  std::vector<unsigned char> bytes(n);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

// XXH3-64's published values (xxHash's own sanity checks: the empty input, seed 0 and PRIME64).
TEST(Checksum, IsXxh3) {
  for (const SimdLevel level : Levels()) {
    const AtLevel at(level);
    EXPECT_EQ(Checksum(nullptr, 0), 0x2D06800538D394C2u);
    EXPECT_EQ(Checksum(nullptr, 0, 0x9E3779B185EBCA8Du), 0xA8A6B918B2F0364Au);
    const unsigned char hello[] = {'x', 'x', 'h', 'a', 's', 'h'};
    EXPECT_EQ(Checksummer().Digest(), Checksum(nullptr, 0));
    EXPECT_NE(Checksum(hello, 6), Checksum(hello, 5));
  }
}

TEST(Checksum, EveryLevelAndCutGivesTheSameValue) {
  for (const size_t n : {0, 1, 3, 8, 16, 17, 128, 129, 240, 241, 256, 1023, 1024, 1025, 4096, 70001}) {
    const std::vector<unsigned char> bytes = Bytes(n);
    for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
      uint64_t expected = 0;
      {
        const AtLevel at(SimdLevel::kPortable);
        expected = Checksum(bytes.data(), n, seed);
      }
      for (const SimdLevel level : Levels()) {
        const AtLevel at(level);
        ASSERT_EQ(Checksum(bytes.data(), n, seed), expected) << SimdLevelName(level) << " n " << n;
        for (const size_t piece : {size_t{1}, size_t{7}, size_t{64}, size_t{1000}, n + 1}) {
          if (piece == 1 && n > 2000) continue;
          Checksummer sum(seed);
          for (size_t i = 0; i < n; i += piece) sum.Update(bytes.data() + i, std::min(piece, n - i));
          ASSERT_EQ(sum.Digest(), expected) << SimdLevelName(level) << " n " << n << " piece " << piece;
        }
      }
    }
  }
}

TEST(Checksum, ACopyGoesOnByItself) {
  const std::vector<unsigned char> bytes = Bytes(5000);
  Checksummer sum(9);
  sum.Update(bytes.data(), 3000);
  Checksummer copy = sum;
  copy.Update(bytes.data() + 3000, 2000);
  EXPECT_EQ(copy.Digest(), Checksum(bytes.data(), 5000, 9));
  EXPECT_EQ(sum.Digest(), Checksum(bytes.data(), 3000, 9));
  sum.Reset(4);
  sum.Update(bytes.data(), 10);
  EXPECT_EQ(sum.Digest(), Checksum(bytes.data(), 10, 4));
}

TEST(Checksum, FindsEverySingleFlippedBit) {
  std::vector<unsigned char> bytes = Bytes(512);
  std::set<uint64_t> seen = {Checksum(bytes.data(), bytes.size())};
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
    EXPECT_TRUE(seen.insert(Checksum(bytes.data(), bytes.size())).second) << bit;
    bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
  }
}

TEST(Checksum, AnyAlignment) {
  const std::vector<unsigned char> bytes = Bytes(3000);
  for (size_t offset = 0; offset < 64; ++offset) {
    Misaligned<unsigned char> moved(bytes, offset);
    ASSERT_EQ(Checksum(moved.data(), bytes.size(), 3), Checksum(bytes.data(), bytes.size(), 3));
  }
}

}  // namespace
}  // namespace penstock::kernels::checksum_test
