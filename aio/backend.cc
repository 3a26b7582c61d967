#include "aio/backend.h"

#include <unistd.h>

#include <algorithm>

#include "aio/clock.h"

namespace penstock::aio {
namespace {

constexpr int64_t kPatienceNs = 2'000'000'000;
constexpr int64_t kPauseUs = 100, kLongestPauseUs = 6'400;

}  // namespace

bool Refusals::Last() {
  const int64_t now_ns = SteadyClock::Get().NowNs();
  if (since_ns_ == 0) {
    since_ns_ = now_ns;
    pause_us_ = kPauseUs;
  }
  if (now_ns - since_ns_ > kPatienceNs) return true;
  usleep(static_cast<useconds_t>(pause_us_));
  pause_us_ = std::min(2 * pause_us_, kLongestPauseUs);
  return false;
}

}  // namespace penstock::aio
