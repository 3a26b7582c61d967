#include "aio/clock.h"

#include <ctime>

namespace penstock::aio {

int64_t SteadyClock::NowNs() const {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

const SteadyClock& SteadyClock::Get() {
  static const SteadyClock clock;
  return clock;
}

}  // namespace penstock::aio
