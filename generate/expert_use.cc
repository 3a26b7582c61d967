#include "generate/expert_use.h"

#include <algorithm>
#include <cmath>

namespace penstock::generate {
namespace {

constexpr double kStep = 0.02;        // what a use adds to a frequency, and what a pass takes from it
constexpr double kHalves = 0.5;       // what a pass leaves of what the last use adds to the chance
constexpr double kOfUses = 0.99;      // and of the uses by which that is measured
constexpr double kLeast = 1e-4;       // of a chance: what was never used may be
constexpr int64_t kForgotten = 2000;  // passes after which a use does not count

}  // namespace

ExpertUse::ExpertUse(int64_t layers, int64_t experts)
    : layers_(layers), experts_(experts), used_(static_cast<size_t>(layers * experts)) {
  for (int64_t age = 0; age <= kForgotten; ++age) {
    kept_.push_back(std::pow(1 - kStep, static_cast<double>(age)));
    halved_.push_back(std::pow(kHalves, static_cast<double>(age)));
  }
}

size_t ExpertUse::AgeOf(const Used& used) const {
  return static_cast<size_t>(used.pass < 0 ? kForgotten : std::min(pass_ - used.pass, kForgotten));
}

void ExpertUse::EnterLayer(int64_t layer) {
  if (layer <= layer_) {
    ++pass_;
    for (double* const sum : {&uses_, &again_, &expected_again_}) *sum *= kOfUses;
  }
  layer_ = layer;
}

void ExpertUse::Touch(size_t expert) {
  Used& used = used_[expert];
  if (used.pass >= 0 && used.pass == pass_ - 1) ++again_;
  used.frequency = used.frequency * kept_[AgeOf(used)] + kStep;
  used.pass = pass_;
  ++uses_;
  expected_again_ += used.frequency;
}

double ExpertUse::Chance(size_t expert) const {
  const Used& used = used_[expert];
  const size_t age = AgeOf(used);
  const double recent = uses_ > 0 ? std::max(0.0, (again_ - expected_again_) / uses_) : 0;
  return std::clamp(used.frequency * kept_[age] + recent * halved_[age], kLeast, 1.0);
}

double ExpertUse::ExpectedWait(size_t expert) const {
  const int64_t layer = static_cast<int64_t>(expert) / experts_;
  int64_t turn = layer - layer_;
  if (turn <= 0) turn += layers_;
  return static_cast<double>(turn) + static_cast<double>(layers_) * (1 / Chance(expert) - 1);
}

}  // namespace penstock::generate
