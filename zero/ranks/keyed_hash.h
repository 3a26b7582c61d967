// BLAKE2b with 32 bytes of result (RFC 7693). Under a key it is a message authentication code: without the
// key nobody can make the result of a new message, nor learn the key from results.
#ifndef PENSTOCK_ZERO_RANKS_KEYED_HASH_H_
#define PENSTOCK_ZERO_RANKS_KEYED_HASH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace penstock::zero {

inline constexpr size_t kHashBytes = 32;
using HashBytes = std::array<uint8_t, kHashBytes>;

// Returns the hash of `data`. `key`: at most 64 bytes; none: a hash that anybody can compute.
HashBytes KeyedHash(std::span<const uint8_t> key, std::string_view data);

// Returns whether both are the same, in a time that does not depend on where they differ.
bool SameInConstantTime(const HashBytes& a, const HashBytes& b);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_RANKS_KEYED_HASH_H_
