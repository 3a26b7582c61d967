// What the fuzz targets share. A target is one file with LLVMFuzzerTestOneInput: it takes any bytes, hands
// them to a parser, and ends the process when a promise is broken. It is built twice:
//   with g++, in the normal suite: replay.cc feeds it its corpus and seeded mutations of that
//   with clang and libFuzzer, under the address and undefined-behaviour sanitizers: `make fuzz`
//
// A target says what became of each input, so that replaying can tell a corpus that reaches the parser from
// one that does not.
#ifndef PENSTOCK_TESTS_FUZZ_FUZZ_H_
#define PENSTOCK_TESTS_FUZZ_FUZZ_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "absl/status/status.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);

namespace penstock::fuzz {

// Inputs that were taken, and inputs that were refused, in this process.
struct Counts {
  uint64_t accepted = 0;
  uint64_t refused = 0;
};
inline Counts& GetCounts() {
  static Counts counts;
  return counts;
}

#define FUZZ_CHECK(condition)                                                              \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      std::fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                        \
    }                                                                                      \
  } while (false)

inline std::string_view TextOf(const uint8_t* data, size_t bytes) {
  return bytes == 0 ? std::string_view() : std::string_view(reinterpret_cast<const char*>(data), bytes);
}

// A refusal is one line that says something, whatever the input was.
inline void Refused(const absl::Status& status) {
  ++GetCounts().refused;
  const std::string message(status.message());
  FUZZ_CHECK(!message.empty());
  if (message.find('\n') != std::string::npos || message.size() > 4096) {
    std::fprintf(stderr, "a refusal of %zu bytes: %.500s\n", message.size(), message.c_str());
    std::abort();
  }
}
inline void Accepted() { ++GetCounts().accepted; }

}  // namespace penstock::fuzz

#endif  // PENSTOCK_TESTS_FUZZ_FUZZ_H_
