// Guesses the next tokens from earlier text: the text after an earlier place that reads like the
// end. Where a text repeats its prompt (summaries, corrections, code) many guesses are right, and a pass that
// verifies several of them reads the weights once. See "Prompt Lookup Decoding", A. Saxena, 2023.
//
// Pure.
#ifndef PENSTOCK_GENERATE_PROMPT_LOOKUP_H_
#define PENSTOCK_GENERATE_PROMPT_LOOKUP_H_

#include <cstdint>
#include <span>
#include <vector>

namespace penstock::generate {

// At most `most` tokens that may follow `tokens` (prompt, then text): those after an earlier occurrence of
// its last three, else two, else one. Of several occurrences, the latest that `most` tokens follow; else the
// one that most follow. Empty: there is none.
std::vector<int64_t> LookUp(std::span<const int64_t> tokens, int64_t most);

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_PROMPT_LOOKUP_H_
