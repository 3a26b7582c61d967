// CUDA kernels on the processor: what is left of a device when it is played by fibers.
//
// A kernel's source is compiled by the C++ compiler as it is; <cuda_runtime.h> and <cuda_fp16.h> are the ones
// beside this header. Each thread of a block is a fiber, blocks run one after another in a shuffled order,
// and at every barrier, shuffle and warp synchronisation the next thread to run is drawn at random: a seed is
// a schedule. A launch fails, and says why, where on a device the result would be undefined:
//
//   barriers    __syncthreads that not every thread of the block reaches, at the same place of the source
//   warps       a shuffle or __syncwarp whose mask names a lane that does not come, at the same place, with
//   the
//               same mask, or does not name the caller; a shuffle from a lane that is not in the mask
//   memory      accesses outside of every allocation, or of one that is freed; reads of what nobody wrote;
//               misaligned vectors
//   races       two threads of one launch at the same byte, one of them writing, with neither __syncthreads
//   nor
//               __syncwarp between them (shuffles order no memory), in whatever order they happen to run
//
// Memory is watched by what the compiler inserts for ThreadSanitizer and the alignment check, with functions
// of our own behind it: for that, kernels are compiled with the flags of CMakeLists.txt. Without them (under
// another sanitizer) the rest holds. Not there: atomics, dynamic shared memory, more than one stream at a
// time.
#ifndef PENSTOCK_TESTS_KERNELS_FIBERS_FIBERS_H_
#define PENSTOCK_TESTS_KERNELS_FIBERS_FIBERS_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace penstock::fibers {

// The schedule of the launches from now on. Google Test's repetitions (GTEST_REPEAT) have one each: the
// number of the repetition, added to $PENSTOCK_FIBERS_SEED.
void SetSeed(uint64_t seed);
// What was wrong with the last launch that failed, once; empty: none did.
std::string TakeReport();
// Whether accesses to memory are watched.
bool WatchesMemory();

// For <cuda_runtime.h>, beside this.
struct Site {
  const char* file;
  unsigned line;
};
struct Index {
  unsigned x, y, z;
};
void Barrier(Site site);
void SyncWarp(unsigned mask, Site site);
// The value of lane `source`.
uint64_t Shuffle(unsigned mask, uint64_t value, unsigned source, Site site);

using Body = void (*)(void* context);  // of one thread
// False: the launch failed, and there is a report.
bool RunThreads(unsigned blocks, unsigned threads, size_t parameter_bytes, Body body, void* context);

// Device memory; null: there is no more. What is copied there by the host counts as written.
void* Allocate(size_t bytes);
bool Free(void* memory);
bool Owns(const void* memory, size_t bytes);
void NoteWritten(void* memory, size_t bytes);

}  // namespace penstock::fibers

// Of the thread that runs.
extern penstock::fibers::Index threadIdx, blockIdx, blockDim, gridDim;

#endif  // PENSTOCK_TESTS_KERNELS_FIBERS_FIBERS_H_
