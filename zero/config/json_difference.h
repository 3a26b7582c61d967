// What differs between two JSON values, by name, down to the first leaf.
#ifndef PENSTOCK_ZERO_CONFIG_JSON_DIFFERENCE_H_
#define PENSTOCK_ZERO_CONFIG_JSON_DIFFERENCE_H_

#include <nlohmann/json.hpp>
#include <string>

namespace penstock::zero {

// "optimizer.lr is 1 there and 2 here"; empty where every key of `ours` has the same value in `theirs`, and
// the other way round.
std::string JsonDifference(const nlohmann::json& theirs, const nlohmann::json& ours,
                           const std::string& there = "there", const std::string& here = "here");

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_CONFIG_JSON_DIFFERENCE_H_
