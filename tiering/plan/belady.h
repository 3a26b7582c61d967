// Which content to give up, and which to keep for good, when the order of use is known.
//
// Two problems, both solved exactly:
//   * a cache that everything passes through: the content that is needed furthest in the future goes (Belady,
//     "A study of replacement algorithms for a virtual-storage computer", 1966);
//   * a resident set beside a stream that passes it by (a step of training: the same walk over the blocks
//     again and again): on a cyclic trace where everything is used equally often no replacement beats a fixed
//     set, and LRU hits nothing. Which set, with sizes and worths that differ, is a knapsack.
// Tested against brute force over thousands of small cases (tests/tiering/belady_test.cc). Pure functions.
#ifndef PENSTOCK_TIERING_PLAN_BELADY_H_
#define PENSTOCK_TIERING_PLAN_BELADY_H_

#include <cstdint>
#include <vector>

namespace penstock::tiering {

struct Replacement {
  int64_t misses = 0;              // in the counted pass
  std::vector<int64_t> misses_of;  // [item]
};

// Items of one size in a cache of `capacity` >= 1 of them, starting empty. The trace is walked `passes`
// times, as one long trace with its future known, and the misses of the last pass are counted: 1 is a trace
// that stands alone, 3 or more the steady state of a cyclic one (a further pass is looked ahead to but not
// counted). `keeps_previous`: what is used just before a miss is not given up for it, where there is anything
// else to give up, so that it may still be in use while the other comes.
Replacement BeladyMisses(const std::vector<int>& trace, int items, int capacity, int passes = 1,
                         bool keeps_previous = false);

// Something that may stay: what it takes, and what keeping it saves in each cycle (bytes of traffic, or
// seconds; any unit, 0 or more).
struct Keepable {
  int64_t bytes = 0;
  double saves = 0;
};

// The set that saves most within `budget` bytes: flags, by item. Of alike items those that stay are `spread`
// evenly, so that what streams comes in an even flow, or are the last ones. Exact, by branch and bound over
// kinds of alike items; a model has few kinds, and where there are many the search ends after `kMostNodes`
// nodes with the best set found, which is never worse than the greedy one.
std::vector<char> ChooseResident(const std::vector<Keepable>& items, int64_t budget, bool spread = true);

inline constexpr int64_t kMostNodes = 200'000;

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_BELADY_H_
