#include "kernels/checksum.h"

#define XXH_STATIC_LINKING_ONLY  // for XXH3_state_t's layout
#include <xxhash.h>

#include <cstring>

#include "kernels/simd/table.h"

namespace penstock::kernels {

static_assert(sizeof(XXH3_state_t) <= 640 && alignof(XXH3_state_t) <= 64);

namespace {
XXH3_state_t* State(unsigned char* bytes) { return reinterpret_cast<XXH3_state_t*>(bytes); }
const XXH3_state_t* State(const unsigned char* bytes) { return reinterpret_cast<const XXH3_state_t*>(bytes); }
}  // namespace

uint64_t Checksum(const void* data, size_t bytes, uint64_t seed) {
  static const unsigned char nothing = 0;
  return Kernels().checksum(bytes == 0 ? &nothing : data, bytes, seed);
}

void Checksummer::Reset(uint64_t seed) {
  XXH3_INITSTATE(State(state_));  // so that the library compares the seed with something defined
  XXH3_64bits_reset_withSeed(State(state_), seed);
}

void Checksummer::Update(const void* data, size_t bytes) {
  if (bytes != 0) Kernels().checksum_update(state_, data, bytes);
}

ChecksumKeys MakeChecksumKeys(uint64_t seed) {
  alignas(64) XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_64bits_reset_withSeed(&state, seed);
  const unsigned char* const secret = state.extSecret != nullptr ? state.extSecret : state.customSecret;
  ChecksumKeys keys;
  const auto read = [&](uint64_t* to, size_t count, size_t offset) {
    std::memcpy(to, secret + offset, count * sizeof(uint64_t));
  };
  read(keys.words, 24, 0);
  read(keys.last, 8, 121);
  read(keys.merge, 8, 11);
  return keys;
}

uint64_t Checksummer::Digest() const { return XXH3_64bits_digest(State(state_)); }

}  // namespace penstock::kernels
