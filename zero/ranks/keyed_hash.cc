#include "zero/ranks/keyed_hash.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"

namespace penstock::zero {
namespace {

constexpr size_t kBlakeBlock = 128;  // bytes that are compressed at once
constexpr size_t kBlakeKeyMost = 64;

using BlakeState = std::array<uint64_t, 8>;

constexpr BlakeState kBlakeStart = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                    0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                    0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
constexpr uint8_t kBlakeOrder[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                         {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                         {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                         {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                         {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                         {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                         {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                         {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                         {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                         {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

// `counted`: bytes so far, with those of this block.
void Compress(BlakeState* state, const uint8_t* block, uint64_t counted, bool last) {
  std::array<uint64_t, 16> m{}, v{};
  std::memcpy(m.data(), block, kBlakeBlock);  // little-endian, as the processors that Penstock runs on
  std::copy(state->begin(), state->end(), v.begin());
  std::copy(kBlakeStart.begin(), kBlakeStart.end(), v.begin() + 8);
  v[12] ^= counted;
  if (last) v[14] = ~v[14];
  const auto mix = [&v](size_t a, size_t b, size_t c, size_t d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = std::rotr(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = std::rotr(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 63);
  };
  for (size_t round = 0; round < 12; ++round) {
    const uint8_t* const order = kBlakeOrder[round % 10];
    for (size_t i = 0; i < 4; ++i) mix(i, i + 4, i + 8, i + 12, m[order[2 * i]], m[order[2 * i + 1]]);
    for (size_t i = 0; i < 4; ++i)
      mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[order[8 + 2 * i]], m[order[9 + 2 * i]]);
  }
  for (size_t i = 0; i < 8; ++i) (*state)[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

HashBytes KeyedHash(std::span<const uint8_t> key, std::string_view data) {
  static_assert(std::endian::native == std::endian::little);
  PENSTOCK_CHECK(key.size() <= kBlakeKeyMost, "a key of BLAKE2b has at most 64 bytes");
  BlakeState state = kBlakeStart;
  state[0] ^= 0x01010000 ^ (uint64_t{key.size()} << 8) ^ kHashBytes;
  std::array<uint8_t, kBlakeBlock> block{};
  uint64_t counted = 0;
  if (!key.empty()) {
    std::copy(key.begin(), key.end(), block.begin());
    counted = kBlakeBlock;
    Compress(&state, block.data(), counted, data.empty());
  }
  if (!data.empty() || key.empty()) {
    for (size_t done = 0;;) {
      const size_t bytes = std::min(kBlakeBlock, data.size() - done);
      block.fill(0);
      std::copy_n(data.data() + done, bytes, block.begin());
      done += bytes;
      counted += bytes;
      Compress(&state, block.data(), counted, done == data.size());
      if (done == data.size()) break;
    }
  }
  HashBytes result{};
  std::memcpy(result.data(), state.data(), result.size());
  return result;
}

bool SameInConstantTime(const HashBytes& a, const HashBytes& b) {
  volatile uint8_t differences = 0;
  for (size_t i = 0; i < a.size(); ++i) differences = static_cast<uint8_t>(differences | (a[i] ^ b[i]));
  return differences == 0;
}

}  // namespace penstock::zero
