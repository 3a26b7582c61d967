#include "kernels/checksum.h"

#define XXH_STATIC_LINKING_ONLY  // for XXH3_state_t's layout
#include <xxhash.h>

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

uint64_t Checksummer::Digest() const { return XXH3_64bits_digest(State(state_)); }

}  // namespace penstock::kernels
