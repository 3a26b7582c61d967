// A block at run time: a module that parameters in one contiguous run (zero/compute/flat_layout.h) are lent
// to.
//
// Attach points the module's parameters into a run, Detach takes them away again; between the two lies one
// computation whose graph must be gone by Detach (re-pointing a tensor under a live graph gives silently
// wrong gradients). One thread at a time.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_BLOCK_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_BLOCK_H_

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/float16.h"
#include "zero/compute/device.h"
#include "zero/compute/flat_layout.h"

namespace penstock::zero {

// Of the module's parameters in the order of named_parameters(), a tensor with two names by its first.
FlatLayout LayoutOf(const torch::nn::Module& module);

// The module's parameters in the order of named_parameters(), each once.
std::vector<torch::Tensor> UniqueParameters(const torch::nn::Module& module);

class BlockModule {
 public:
  // Keeps the module's structure and lets go of its parameters' memory.
  explicit BlockModule(std::shared_ptr<torch::nn::Module> module);

  const FlatLayout& layout() const { return *layout_; }
  const std::shared_ptr<const FlatLayout>& shared_layout() const { return layout_; }
  torch::nn::Module& module() { return *module_; }
  const std::vector<torch::Tensor>& parameters() const { return parameters_; }
  const std::vector<torch::Tensor>& buffers() const { return buffers_; }
  const std::vector<std::string>& buffer_names() const { return buffer_names_; }
  // The module computes with this one's memory, and changes it: of the same type and sizes.
  void SetBuffer(size_t i, const torch::Tensor& value) { buffers_[i].set_data(value); }

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
  std::vector<torch::Tensor> buffers_;  // where it computes: constants, or lent to it
  std::vector<std::string> buffer_names_;
  std::shared_ptr<const FlatLayout> layout_;
};

// Copies the module's parameters, as fp32, into `elements` floats of its run from element `offset` on (a
// tile), with zeros between them.
void CopyParameters(const torch::nn::Module& module, const FlatLayout& layout, int64_t offset,
                    int64_t elements, float* to);

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_BLOCK_H_
