// Byte arithmetic shared by everything that talks to a device: sizes, alignment, and how a size is written
// for people.
//
//   AlignUp(5000, 4096) == 8192      AlignDown(5000, 4096) == 4096      IsAligned(8192, 4096)
//   FormatBytes(3221225472) == "3.00 GiB"
#ifndef PENSTOCK_AIO_BYTES_H_
#define PENSTOCK_AIO_BYTES_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace penstock::aio {

inline constexpr uint64_t kKiB = 1024;
inline constexpr uint64_t kMiB = 1024 * kKiB;
inline constexpr uint64_t kGiB = 1024 * kMiB;

// The smallest unit that the engine ever transfers to or from a device. Drives with 512-byte sectors are
// driven with 4096 as well: it is what the page cache, 4Kn drives and every file system's block size agree
// on.
inline constexpr uint64_t kSectorBytes = 4096;
inline constexpr uint64_t kHugePageBytes = 2 * kMiB;

// `alignment` is a power of two in all three.
constexpr bool IsAligned(uint64_t value, uint64_t alignment) { return (value & (alignment - 1)) == 0; }
constexpr uint64_t AlignDown(uint64_t value, uint64_t alignment) { return value & ~(alignment - 1); }
constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return AlignDown(value + (alignment - 1), alignment);
}
constexpr bool IsPowerOfTwo(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

// "512 B", "64.0 KiB", "3.00 GiB": three significant digits, powers of 1024.
std::string FormatBytes(uint64_t bytes);

// Reads "4096", "64K", "512M", "4GiB", "1.5G", "1e9": a number with an optional suffix K, M, G or T (powers
// of 1024), optionally followed by "iB" or "B"; case does not matter. kInvalidArgument quotes the text and
// says what is allowed.
absl::StatusOr<uint64_t> ParseBytes(std::string_view text);

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_BYTES_H_
