// Sweep files of ds_nvme_tune, and what is made of their points.
#include "tests/fuzz/fuzz.h"
#include "tools/ds/ds_io_tune.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const auto points = penstock::tools::ReadSweep(std::string(penstock::fuzz::TextOf(data, bytes)));
  if (!points.ok()) {
    FUZZ_CHECK(absl::IsInvalidArgument(points.status()));
    penstock::fuzz::Refused(points.status());
    return 0;
  }
  penstock::fuzz::Accepted();
  FUZZ_CHECK(!points->empty());
  for (const penstock::tools::TunePoint& point : *points) {
    FUZZ_CHECK(point.block_bytes > 0 && point.block_bytes % 4096 == 0);
    FUZZ_CHECK(point.queue_depth * point.parallel >= 1 && point.queue_depth * point.parallel <= 4096);
  }
  const penstock::tools::TunePoint& chosen = penstock::tools::Choose(*points);
  FUZZ_CHECK(penstock::tools::Recommend(chosen).in_flight_bytes() > 0);
  FUZZ_CHECK(!penstock::tools::AioBlock(chosen).empty());
  return 0;
}
