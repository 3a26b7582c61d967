// The values that a block begins with, as one stream over its run: any range of it, in ascending order, from
// a buffer of half a megabyte.
//
// Where a block says what its parameters begin with (BlockSpec::initial), a tile needs no more memory than
// itself, however large the block. The bits are those of filling every parameter as a whole, one after the
// other, with torch::normal_: LibTorch draws a contiguous tensor in groups of 16 numbers, so pieces of a
// multiple of 16 continue one another, as long as the last has 16 or more.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_INITIAL_VALUES_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_INITIAL_VALUES_H_

#include <torch/types.h>

#include <cstdint>
#include <memory>

#include "zero/compute/libtorch/block.h"
#include "zero/compute/libtorch/model.h"

namespace penstock::zero {

class InitialStream {
 public:
  // `spec` says what its parameters begin with; it and `layout` outlive the stream. Throws where the two do
  // not belong together.
  InitialStream(const BlockSpec& spec, const FlatLayout& layout);

  // Elements [first, first + elements) of the run, zeros between parameters and beyond its end. Ranges come
  // in ascending order; what lies between them is drawn and dropped. Draws from LibTorch's CPU generator,
  // which nobody else uses until the last of them.
  void Read(int64_t first, int64_t elements, float* to);

 private:
  void DrawNext();

  const BlockSpec& spec_;
  const FlatLayout& layout_;
  torch::Tensor buffer_;
  const float* drawn_ = nullptr;
  int64_t drawn_first_ = 0, drawn_end_ = 0;  // of the run, in drawn_
  std::vector<size_t> order_;                // of the parameters in the run
  size_t next_ = 0;                          // in it, that the next piece is of,
  int64_t done_ = 0;                         // and how much of it has been drawn
};

// A parameter of these sizes without memory: what a factory gives a module whose block says what its
// parameters begin with.
torch::Tensor WithoutMemory(torch::IntArrayRef sizes);

// The block's module with all its values in memory, as plain LibTorch code uses it. Draws from LibTorch's CPU
// generator; throws as LibTorch does.
std::shared_ptr<torch::nn::Module> BuildWhole(const BlockSpec& spec);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_INITIAL_VALUES_H_
