// Device profiles as they are stored: whoever plans with one divides by its numbers.
#include <cmath>

#include "aio/profile.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const auto profile = penstock::aio::ProfileFromJson(penstock::fuzz::TextOf(data, bytes));
  if (!profile.ok()) {
    penstock::fuzz::Refused(profile.status());
    return 0;
  }
  penstock::fuzz::Accepted();
  for (const double speed :
       {profile->read_bytes_per_s, profile->write_bytes_per_s, profile->mixed_bytes_per_s}) {
    FUZZ_CHECK(std::isfinite(speed) && speed >= 0);
  }
  // What was read is written the same again.
  const std::string text = penstock::aio::ProfileToJson(*profile);
  const auto again = penstock::aio::ProfileFromJson(text);
  FUZZ_CHECK(again.ok());
  FUZZ_CHECK(penstock::aio::ProfileToJson(*again) == text);
  return 0;
}
