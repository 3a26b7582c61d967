// A block at run time: the layout of its parameters in one contiguous run, and the module they are lent to.
//
// The run has the parameters in the order of named_parameters(), a tensor with two names by its first, each
// at a multiple of kParameterAlignment elements, zeros between them, padded to tiering::kElementAlignment.
// Attach points the module's parameters into a run, Detach takes them away again; between the two lies one
// computation whose graph must be gone by Detach (re-pointing a tensor under a live graph gives silently
// wrong gradients). One thread at a time.
#ifndef PENSTOCK_ZERO_COMPUTE_BLOCK_H_
#define PENSTOCK_ZERO_COMPUTE_BLOCK_H_

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/float16.h"
#include "tiering/plan/plan.h"
#include "zero/compute/device.h"

namespace penstock::zero {

inline constexpr int64_t kParameterAlignment = 64;

// The same type by LibTorch's name.
torch::Dtype TorchDtype(kernels::DType type);

struct Parameter {
  std::string name;  // within the block
  std::vector<int64_t> sizes;
  int64_t offset = 0;  // in the run, in elements
  int64_t elements = 0;
  bool trains = true;
};

// Where a block's parameters lie. Blocks of one kind share it.
struct FlatLayout {
  std::vector<Parameter> parameters;
  int64_t elements = 0;            // of the run, padding included
  int64_t parameter_elements = 0;  // without padding
  // Ranges of the run that the optimizer updates, merged, ascending. Padding counts as trained: it stays
  // zero.
  std::vector<std::pair<int64_t, int64_t>> trained;

  static FlatLayout Of(const torch::nn::Module& module);
  bool Trains() const;  // false: every parameter is frozen
  bool SameShapes(const FlatLayout& other) const;
};

// The module's parameters in the order of named_parameters(), each once.
std::vector<torch::Tensor> UniqueParameters(const torch::nn::Module& module);

class BlockModule {
 public:
  // Keeps the module's structure and lets go of its parameters' memory.
  explicit BlockModule(std::shared_ptr<torch::nn::Module> module);

  const FlatLayout& layout() const { return layout_; }
  torch::nn::Module& module() { return *module_; }
  const std::vector<torch::Tensor>& parameters() const { return parameters_; }

  // Parameters become views of `run` (layout().elements of that type, in the device's memory), without
  // gradients. Where the device computes in another type (fp16 weights on the processor) they are cast,
  // exactly, to a tensor of fp32 that lives until Detach.
  void Attach(void* run, kernels::DType weights, Device& device);
  // Drops views and gradients.
  void Detach();
  // The gradient of parameter i after a backward pass, contiguous; undefined where it took no part.
  torch::Tensor Gradient(size_t i) const;

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<torch::Tensor> parameters_;
  std::vector<torch::Tensor> buffers_;  // the module's constants, where it computes
  FlatLayout layout_;
};

// Copies the module's parameters, as fp32, into `elements` floats of its run from element `offset` on (a
// tile), with zeros between them.
void CopyParameters(const torch::nn::Module& module, const FlatLayout& layout, int64_t offset,
                    int64_t elements, float* to);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_BLOCK_H_
