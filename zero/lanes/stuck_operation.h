// The report of an operation that is stuck (zero/lanes/watchdog.h).
#ifndef PENSTOCK_ZERO_LANES_STUCK_OPERATION_H_
#define PENSTOCK_ZERO_LANES_STUCK_OPERATION_H_

#include <cstdint>
#include <string>

namespace penstock::zero {

struct StuckOperation {
  enum class News : uint8_t {
    kStuck,     // no sign of life for WatchOptions::stuck_seconds; reported once
    kHopeless,  // for WatchOptions::hopeless_seconds; reported once
    kEnded,     // one that was reported as stuck has ended after all
  };
  News news = News::kStuck;
  std::string what;    // "read weights of block 3 (layer.2), tile 1, step 17"
  std::string where;   // "/nvme/run/penstock.store", "the processor"
  double seconds = 0;  // since it was started
  int others = 0;      // in flight on the same lane, behind it
  int64_t step = 0;
};
// "stuck: read weights of block 3 ...: 61 s on /nvme/run/penstock.store without a sign of life".
std::string StuckText(const StuckOperation& operation);

// Which operations are reported as stuck, and when.
struct WatchOptions {
  // Default 0: none is watched.
  double stuck_seconds = 0;
  // Default 0: none is ever hopeless.
  double hopeless_seconds = 0;
  bool any() const { return stuck_seconds > 0 || hopeless_seconds > 0; }
};

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_LANES_STUCK_OPERATION_H_
