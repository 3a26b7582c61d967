// Two plans of one model beside each other: whether everything has the same place, and what has another.
#ifndef PENSTOCK_TIERING_PLAN_PLACEMENT_H_
#define PENSTOCK_TIERING_PLAN_PLACEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tiering/plan/plan.h"

namespace penstock::tiering {

// Every place and every choice of a plan as numbers. Plans that have the same ones run the same program.
std::vector<int64_t> PlacementNumbers(const Plan& plan);

// What `to` has elsewhere than `from`, a line each, for people: "tiles updated in backward: 12 (were 0)".
// Empty: both have the same placement.
std::vector<std::string> WhatMoves(const Plan& from, const Plan& to);

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_PLACEMENT_H_
