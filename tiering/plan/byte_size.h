// Byte sizes and counts in words: "512MiB", "4GB", "1e9"; "7B" parameters.
#ifndef PENSTOCK_TIERING_PLAN_BYTE_SIZE_H_
#define PENSTOCK_TIERING_PLAN_BYTE_SIZE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace penstock::tiering {

// A decimal number (an exponent is allowed), then a unit in any case, with or without a blank between them:
//   KiB MiB GiB TiB PiB         powers of 1024
//   K M G T P, KB MB GB TB PB   powers of 1000
//   B or nothing                bytes
// ds_io's flags are DeepSpeed's, whose K, M and G are powers of 1024 (aio/bytes.h).
// The value is rounded to whole bytes; exact for everything that a double or int64 holds exactly. Refused
// with kInvalidArgument, one line: empty, no number, an unknown unit, negative, not finite, beyond 2^63 - 1.
absl::StatusOr<int64_t> ParseSize(std::string_view text);

// A count of parameters or tokens: a decimal number, then K, M, B or G, T in any case, powers of 1000: "7B",
// "350M", "2851e6". Refused as by ParseSize.
absl::StatusOr<int64_t> ParseCount(std::string_view text);

// For people: "0 B", "1023 B", "512.0 MiB", "1.5 GiB"; one decimal, powers of 1024. Negative values keep
// their sign.
std::string FormatBytes(int64_t bytes);

// "3.42 GB/s", in powers of 1000 as drives are rated: B/s, kB/s, MB/s, GB/s; two decimals from MB on. Not
// finite or negative: "-".
std::string FormatBandwidth(double bytes_per_second);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_BYTE_SIZE_H_
