// The name that a mistyped one most likely meant.
#ifndef PENSTOCK_ZERO_CONFIG_NEAREST_NAME_H_
#define PENSTOCK_ZERO_CONFIG_NEAREST_NAME_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::zero {

// Edits between two words, ignoring case: insertions, deletions, replacements, and swaps of neighbours (the
// optimal string alignment distance). Words beyond 128 bytes are compared by their first 128.
size_t EditDistance(std::string_view a, std::string_view b);

// The candidate nearest to `word`: the first of the least distance, if that is at most a third of the longer
// of the two (and at least one edit is always allowed); else one of the same words in another
// order ("comm_overlap", "overlap_comm"); else a candidate that begins with `word` or that
// `word` begins with, from four letters on; else nothing.
std::optional<std::string> NearestName(std::string_view word,
                                       const std::vector<std::string_view>& candidates);

// " (did you mean \"device\"?)" or "": to end an error line with. `prefix` goes before the name ("--" for
// flags).
std::string DidYouMean(std::string_view word, const std::vector<std::string_view>& candidates,
                       std::string_view prefix = "");

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_CONFIG_NEAREST_NAME_H_
