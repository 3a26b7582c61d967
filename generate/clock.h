// The clock that waits and rates are measured by.
#ifndef PENSTOCK_GENERATE_CLOCK_H_
#define PENSTOCK_GENERATE_CLOCK_H_

#include <chrono>

namespace penstock::generate {

// Seconds since some moment; never goes back.
inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_CLOCK_H_
