// Seeds of generators, mixed from numbers.
#ifndef PENSTOCK_ZERO_COMPUTE_SEED_H_
#define PENSTOCK_ZERO_COMPUTE_SEED_H_

#include <cstdint>

namespace penstock::zero {

// Mixes numbers into a seed: the same on every machine.
inline uint64_t MixSeed(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0) {
  // splitmix64's finalizer over each number in turn.
  uint64_t mixed = seed;
  for (const uint64_t value : {a, b, c}) {
    mixed += 0x9e3779b97f4a7c15 + value;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    mixed ^= mixed >> 31;
  }
  return mixed;
}

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_SEED_H_
