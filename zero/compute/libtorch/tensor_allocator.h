// LibTorch's CPU tensors in counted, bounded and pooled memory (zero/memory/tensor_memory.h).
//
// LibTorch has one CPU allocator for the process. Where a limit refuses a tensor, LibTorch's call throws a
// c10::Error that says so, and Guarded (zero/memory/guarded.h) makes kResourceExhausted of it. Not counted,
// because LibTorch does not allocate it there: scratch inside oneDNN and OpenBLAS, autograd's graph nodes,
// code.
#ifndef PENSTOCK_ZERO_COMPUTE_LIBTORCH_TENSOR_ALLOCATOR_H_
#define PENSTOCK_ZERO_COMPUTE_LIBTORCH_TENSOR_ALLOCATOR_H_

namespace penstock::zero {

// From now on, for the process. Idempotent. Tensors made before keep their memory and are not counted.
void InstallTensorAllocator();

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_LIBTORCH_TENSOR_ALLOCATOR_H_
