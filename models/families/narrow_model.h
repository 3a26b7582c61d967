// The same model, several times narrower: what is measured in place of one that is too large to be run.
//
// Width, inner width, heads and rows of the vocabulary are divided; layers, depth of a head, and blocks and
// stages one for one stay. So what flows from stage to stage, and logits, are so many times smaller, and
// matrices the square of that.
#ifndef PENSTOCK_MODELS_FAMILIES_NARROW_MODEL_H_
#define PENSTOCK_MODELS_FAMILIES_NARROW_MODEL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "models/families/family.h"

namespace penstock::models {

// By how much it can be made narrower: what divides all of them, ascending, from 2 on.
std::vector<int64_t> Narrowings(const LanguageModel& model);

// `by`: one of those. Null: its blocks are not one for one then (a vocabulary cut into other tiles).
std::shared_ptr<const LanguageModel> Narrower(const LanguageModel& model, int64_t by);

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_FAMILIES_NARROW_MODEL_H_
