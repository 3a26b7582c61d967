// The split master: an fp32 parameter kept as its bf16 copy and a 16-bit remainder, so that the copy which
// forward and backward use is stored once and the master costs 4 bytes, not 6.
//
//   split:  high = (bits + 0x8000) >> 16       the master rounded to nearest bf16 (ties away from zero)
//           low = int16(bits - (high << 16))   what the rounding took away, in units of the last fp32 place
//   join:   bits = (high << 16) + low          in 32-bit wrap-around arithmetic
//
// Exact: join(split(x)) has the bits of x for every x that is not a NaN (denormals, zeros of both signs and
// infinities too; masters within half a bf16 step of the largest value have high = infinity, and still join
// exactly). A NaN is the one exception: the formula would turn some payloads into high = infinity or zero and
// so hide it from forward, hence high = (bits >> 16) | 0x40 and low = 0: a NaN stays a quiet NaN in high and
// in the join. join(high, low) followed by split gives (high, low) back only for pairs that split made.
//
// Any n, any alignment; no overlap; thread-safe; no allocation; `pool` as in kernels/thread_pool.h.
#ifndef PENSTOCK_KERNELS_SPLIT_MASTER_H_
#define PENSTOCK_KERNELS_SPLIT_MASTER_H_

#include <bit>
#include <cstddef>
#include <cstdint>

namespace penstock::kernels {

class ThreadPool;

struct SplitValue {
  uint16_t master_high;
  int16_t master_low;
};

constexpr SplitValue SplitOne(float master) {
  const uint32_t bits = std::bit_cast<uint32_t>(master);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40u), 0};
  }
  const uint32_t master_high = (bits + 0x8000u) >> 16;
  return {static_cast<uint16_t>(master_high),
          static_cast<int16_t>(static_cast<uint16_t>(bits - (master_high << 16)))};
}

constexpr float JoinOne(uint16_t master_high, int16_t master_low) {
  return std::bit_cast<float>((static_cast<uint32_t>(master_high) << 16) +
                              static_cast<uint32_t>(static_cast<int32_t>(master_low)));
}

void SplitMaster(const float* master, uint16_t* master_high, int16_t* master_low, size_t n,
                 ThreadPool* pool = nullptr);
void JoinMaster(const uint16_t* master_high, const int16_t* master_low, float* master, size_t n,
                ThreadPool* pool = nullptr);

}  // namespace penstock::kernels

#endif  // PENSTOCK_KERNELS_SPLIT_MASTER_H_
