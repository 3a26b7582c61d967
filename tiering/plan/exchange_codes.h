// What ranks hand each other in fewer bits: ZeRO++'s quantized weights and gradients.
//
// A group of kCodeGroup elements goes as whole numbers with one bf16 scale (kernels/weight_code.h): weights
// in 8 bits each, the addends of gradients in 4. With A the largest magnitude of a group, a weight that
// another rank sends is off by at most A / 254 (1 + 2^-7), and rounded to its type once more; an addend by at
// most A / 14 (1 + 2^-7). What a rank has itself, its own part and its own addend, it uses as it is.
#ifndef PENSTOCK_TIERING_PLAN_EXCHANGE_CODES_H_
#define PENSTOCK_TIERING_PLAN_EXCHANGE_CODES_H_

#include <cstdint>

namespace penstock::tiering {

struct ExchangeCodes {
  bool weights = false;
  bool gradients = false;
  bool any() const { return weights || gradients; }
};

inline constexpr int64_t kCodeGroup = 128;
inline constexpr int kWeightCodeBits = 8;
inline constexpr int kGradientCodeBits = 4;

// What a rank receives from the others, and what that would be with all its bits.
struct ExchangedBytes {
  int64_t bytes = 0;
  int64_t whole_bytes = 0;
  ExchangedBytes operator+(const ExchangedBytes& other) const {
    return {bytes + other.bytes, whole_bytes + other.whole_bytes};
  }
};

// Of `elements`, a multiple of kCodeGroup.
constexpr int64_t CodedBytes(int bits, int64_t elements) {
  return elements * bits / 8 + elements / kCodeGroup * 2;
}

// What weights arrive in that are gathered in pieces of `piece` elements, two of each rank's at a time.
constexpr int64_t GatherBytes(int world, int64_t piece) {
  return world == 1 ? 0 : 2 * int64_t{world} * CodedBytes(kWeightCodeBits, piece);
}

}  // namespace penstock::tiering

#endif  // PENSTOCK_TIERING_PLAN_EXCHANGE_CODES_H_
