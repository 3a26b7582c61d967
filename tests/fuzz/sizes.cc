// Sizes and counts in words, as flags and configs have them: both parsers.
#include "aio/bytes.h"
#include "tests/fuzz/fuzz.h"
#include "tiering/plan/byte_size.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using penstock::fuzz::Accepted;
  using penstock::fuzz::Refused;
  const std::string_view text = penstock::fuzz::TextOf(data, bytes);
  const auto io = penstock::aio::ParseBytes(text);
  const auto size = penstock::tiering::ParseSize(text);
  const auto count = penstock::tiering::ParseCount(text);
  if (io.ok()) {
    Accepted();
    FUZZ_CHECK(*io < uint64_t{1} << 63);
    FUZZ_CHECK(!penstock::aio::FormatBytes(*io).empty());
    // What both take, both understand alike, but for "K" and "KB" and their kin: powers of 1024 to
    // DeepSpeed's flags, and of 1000 elsewhere.
    const bool decimal = text.find_first_of("KMGTkmgt") != std::string_view::npos &&
                         text.find_first_of("iI") == std::string_view::npos;
    if (size.ok() && !decimal) FUZZ_CHECK(static_cast<uint64_t>(*size) == *io);
  } else {
    Refused(io.status());
  }
  if (size.ok()) {
    Accepted();
    FUZZ_CHECK(*size >= 0);
    FUZZ_CHECK(!penstock::tiering::FormatBytes(*size).empty());
  } else {
    Refused(size.status());
  }
  if (count.ok()) {
    FUZZ_CHECK(*count >= 0);
  } else {
    Refused(count.status());
  }
  return 0;
}
