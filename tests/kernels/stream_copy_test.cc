// Every byte is copied, and none beside.
#include "kernels/stream_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace penstock::kernels::stream_copy_test {
namespace {

TEST(StreamCopy, CopiesAnyLengthToAnyAlignmentAndNothingElse) {
  constexpr size_t kMost = 257, kGuard = 64;
  alignas(64) std::array<uint8_t, kMost + 16> from;
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 7 + 1);
  for (size_t bytes = 0; bytes <= kMost; ++bytes) {
    for (const size_t of_source : {0, 3}) {
      for (const size_t of_target : {0, 1, 8, 16, 48}) {
        alignas(64) std::array<uint8_t, kMost + 2 * kGuard> to;
        to.fill(0xA5);
        uint8_t* const place = to.data() + kGuard + of_target;
        StreamCopy(from.data() + of_source, place, bytes);
        StreamCopyFence();
        ASSERT_TRUE(std::equal(place, place + bytes, from.data() + of_source)) << bytes;
        const auto untouched = [](uint8_t byte) { return byte == 0xA5; };
        ASSERT_TRUE(std::all_of(to.data(), place, untouched)) << bytes;
        ASSERT_TRUE(std::all_of(place + bytes, to.data() + to.size(), untouched)) << bytes;
      }
    }
  }
}

}  // namespace
}  // namespace penstock::kernels::stream_copy_test
