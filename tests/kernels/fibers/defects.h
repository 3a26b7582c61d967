// Kernels with a defect each, and the same ones without it.
#ifndef PENSTOCK_TESTS_KERNELS_FIBERS_DEFECTS_H_
#define PENSTOCK_TESTS_KERNELS_FIBERS_DEFECTS_H_

#include <cstddef>

namespace penstock::fibers {

enum class Defect {
  kNone,
  kNoBarrier,            // between the writes and the reads of shared memory
  kNoBarrierAtTurn,      // between the reads of one turn and the writes of the next
  kHalfABarrier,         // half of the block passes by it
  kTwoBarriers,          // each half has one of its own
  kLeavesBeforeBarrier,  // a thread ends first
  kHalfAShuffle,         // half of a warp passes by it
  kLeavesBeforeShuffle,
  kForeignMask,      // a mask that does not name its lane
  kForeignSource,    // a lane that the mask does not name
  kShuffleForOrder,  // where __syncwarp belongs
  kWritesPastTheEnd,
  kReadsPastTheEnd,
  kReadsBeforeTheStart,
  kReadsUnwrittenShared,
  kBlocksRace,   // all blocks write to the same place
  kReaderRaces,  // one thread writes what all of another block read
  kMisaligned,   // a vector of four at an odd place
};

// Reverses `n` numbers within pieces of 64, over two blocks of 64 threads or more; an error code.
int Reverse(Defect defect, const float* in, float* out, size_t n);

}  // namespace penstock::fibers

#endif  // PENSTOCK_TESTS_KERNELS_FIBERS_DEFECTS_H_
