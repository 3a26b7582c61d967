// How long the tests that draw at random go on.
#ifndef PENSTOCK_TESTS_SOAK_H_
#define PENSTOCK_TESTS_SOAK_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace penstock::tests {

// PENSTOCK_SOAK=N in the environment (make soak): N times as many kills, faults and seeds.
inline int Soak() {
  const char* const soak = std::getenv("PENSTOCK_SOAK");
  return std::max(1, soak == nullptr ? 1 : std::atoi(soak));
}

// Sanitizers cost ten to fifty times the time: there, every n-th of the places is enough.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kStride = 9;
#else
inline constexpr int kStride = 1;
#endif

}  // namespace penstock::tests

#endif  // PENSTOCK_TESTS_SOAK_H_
