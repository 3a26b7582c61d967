// The order in which a run uses its blocks: recorded once, held against what happens from then on, and
// recorded anew where it deviates.
//
//   UseTrace trace;                            // or UseTrace(order) where it is known beforehand
//   for each pass:
//     for each use:   if (!trace.Use(block)) ...   // not what was planned for: fetch it on demand
//     if (trace.EndPass()) ...                     // the order to plan by is another now: plan again
//
// A deviation is a miss, never an error: the use is served late, said once, and from the next pass on the
// plan goes by the order that was seen. (DeepSpeed invalidates its trace and goes without prefetch for a
// whole iteration, and asserted on it before 0.9.)
#ifndef PENSTOCK_TIERING_USE_TRACE_H_
#define PENSTOCK_TIERING_USE_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace penstock::tiering {

class UseTrace {
 public:
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  UseTrace() = default;
  explicit UseTrace(std::vector<int> order) : order_(std::move(order)) {}

  // Notes a use. True where it is the one that the order has next. A use that was left out or put in does not
  // spoil the rest: the order is taken up again at the next place where it has what was used.
  bool Use(int item);

  // The pass is over. True where its uses were others than the order's: order() has become this pass's.
  bool EndPass();

  // What the next pass is expected to use; empty while the first one is being recorded.
  const std::vector<int>& order() const { return order_; }
  bool recording() const { return order_.empty(); }

  // Uses from here to the next one of `item`, this pass's rest first and then the passes that follow; 0: it
  // is the very next. kNever: the order does not have it.
  size_t DistanceTo(int item) const;

  int64_t deviations() const { return deviations_; }  // uses that were not the next of the order, in all

 private:
  std::vector<int> order_;
  std::vector<int> pass_;  // used so far in this pass
  size_t position_ = 0;    // in order_, of the use that is expected next
  int64_t deviations_ = 0;
};

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_USE_TRACE_H_
