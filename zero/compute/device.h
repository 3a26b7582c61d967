// What computes: the processor, or a device with memory of its own.
//
// The engine writes against this interface and never asks which device it has, only whether it
// has its own memory. Such a device gets its weights by CopyIn from the host's arena and
// gives gradients back by CopyOut, or keeps both, and optimizer state with them, which it updates itself
// (zero/compute/device_state.h); `cpu` computes where the weights lie and copies nothing. Three
// implementations:
//   CpuDevice   (device.cc)      the processor, in host memory
//   CUDA        (libtorch/cuda_device.h)  where LibTorch was built with CUDA
//   TestDevice  (test_device.h)  on the processor, with memory, copy engine and latency of its own: the logic
//                                of three tiers where there is no GPU
//
// Order: copies in one direction run one after the other, beside those in the other direction and beside
// compute. Nothing waits for anything else by itself: the caller of a copy has waited until its source is
// complete and its target free (the program's edges do that). Compute is what the Compute
// (zero/compute/compute.h) and the functions under "in the order of compute" enqueue, from any thread.
//
// Threads: copies and AfterCompute from any thread; `done` runs on a thread of the device's, or, where the
// device is the host, at once. SumInOrder, Clear, EncodeRow, DecodeRow, Connect and Checksum from any, beside
// compute. The rest one thread at a time. Errors of compute surface in AfterCompute.
#ifndef PENSTOCK_ZERO_COMPUTE_DEVICE_H_
#define PENSTOCK_ZERO_COMPUTE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/device_transfers.h"
#include "kernels/float16.h"
#include "kernels/weight_code.h"
#include "tiering/plan/device_plan.h"
#include "zero/compute/optimizer.h"
#include "zero/memory/tensor_memory.h"

namespace penstock::zero {

class Comm;

class Device {
 public:
  using Done = std::function<void(absl::Status)>;

  // Bytes copied so far, weights, gradients, inputs and batches together.
  struct Traffic {
    int64_t h2d_bytes = 0;
    int64_t d2h_bytes = 0;
  };

  Device() = default;
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual std::string_view name() const = 0;  // "cpu", "cuda", "test"
  virtual std::string Describe() const = 0;   // for people: model and memory
  // The same for all who share its memory, and for nobody else on any host; empty: nobody does.
  virtual std::string identity() const { return ""; }
  virtual bool has_own_memory() const = 0;
  // Its number among those of its kind; -1: it computes where the host does.
  virtual int ordinal() const { return -1; }
  // In what weights of this type are computed with, forward and backward.
  virtual kernels::DType compute_type(kernels::DType weights) const = 0;

  // Memory. Of a device that has its own: what there is in all, a budget's upper bound.
  virtual int64_t capacity_bytes() const = 0;
  // The plan's slots, in one piece, until the device is closed or asks again. kResourceExhausted.
  virtual absl::StatusOr<std::byte*> AllocateArena(int64_t bytes) = 0;
  // Of the tensors of who computes there. Where tensors_are_host() they come from the host's counting
  // allocator (zero/memory/tensor_memory.h), whose limit and peak are then the device's.
  virtual bool tensors_are_host() const = 0;
  virtual absl::Status LimitTensors(int64_t bytes) = 0;  // 0: no limit
  virtual TensorMemoryStats tensors() const = 0;
  virtual void ResetLivePeak() = 0;  // and
  virtual void ResetPeak() = 0;      // of tensors()
  virtual void TrimTensors() = 0;
  // What its allocator may hold beyond the tensors that there are: it counts against LimitTensors.
  virtual tiering::TensorSlack tensor_slack() const { return {}; }
  // The NUMA node that it is attached to, -1: any.
  virtual int numa_node() const { return -1; }
  // Host memory that is copied from and to: pinned for the device while it lives.
  virtual absl::Status RegisterHost(void* memory, int64_t bytes) = 0;
  virtual void UnregisterHost(void* memory) = 0;

  // `after_compute`: the copy waits for what has been enqueued to compute, because its target was a tensor's.
  virtual void CopyIn(void* to, const void* from, int64_t bytes, bool after_compute, Done done) = 0;
  virtual void CopyOut(void* to, const void* from, int64_t bytes, Done done) = 0;
  // When everything enqueued so far has been computed.
  virtual void AfterCompute(Done done) = 0;
  // For a Compute whose owner computes there on streams of its own (zero/compute/driven_compute.h): `stream`
  // is the order of compute from here on. What is enqueued in it runs on that stream, behind all that was
  // enqueued in it before, on whichever stream, and behind what has been enqueued on the streams of `after`.
  // A stream is of the device's own kind: a CUstream of its primary context, TestDevice::NewStream. Called
  // while nobody enqueues in the order of compute. kUnimplemented: the device computes in an order of its
  // own.
  virtual absl::Status ComputeOn(void* stream, std::span<void* const> after);
  virtual Traffic traffic() const = 0;
  // What the Compute has copied by itself: batches, outputs.
  virtual void CountCopied(const Traffic& copied) = 0;
  // Between files and its arena, past host memory (GPUDirect Storage); one and the same each time, and of the
  // arena that there is. kFailedPrecondition: it has none here, and why.
  virtual absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> OpenStorage() = 0;
  // kernels::Checksum of a range of its arena, 248 bytes and more, in whole words of 8; beside compute,
  // waits.
  virtual absl::StatusOr<uint64_t> Checksum(const void* data, size_t bytes, uint64_t seed) = 0;

  // In the order of compute; errors are thrown as a std::exception. As kernels/float16.h, reduce.h and
  // optimizer.h; `partials`: a double for each kernels::kReduceBlock elements. No device updates by LAMB.
  virtual void Convert(kernels::DType from, const void* in, kernels::DType to, void* out, size_t n) = 0;
  virtual void Accumulate(kernels::DType type, const void* in, float* sums, size_t n) = 0;
  virtual void SquarePartials(kernels::DType type, const void* in, size_t n, double* partials) = 0;
  virtual void Update(const OptimizerStep& step, const std::vector<kernels::UpdateArrays>& arrays) = 0;
  virtual void Zero(void* memory, size_t bytes) = 0;
  // `count` coded rows (kernels/weight_code.h), one behind the other, to fp32 or bf16 [count, columns].
  virtual void DecodeWeights(const kernels::WeightCode& code, const std::byte* rows, int64_t count,
                             int64_t columns, kernels::DType to, void* out) = 0;

  // For several ranks. Beside compute, in an order of its own; waits. `n` elements: the sum of `addends` in
  // fp32, the first one first, in `sums`, and rounded once to `out`, which may lie before or on one of them.
  // `partials` as in SquarePartials, of `out`; null: not wanted.
  virtual absl::Status SumInOrder(kernels::DType type, std::span<const void* const> addends, float* sums,
                                  kernels::DType to, void* out, size_t n, double* partials) = 0;
  virtual absl::Status Clear(void* memory, size_t bytes) = 0;
  // A row of `n` elements to codes and back (kernels/weight_code.h), likewise beside compute.
  virtual absl::Status EncodeRow(const kernels::WeightCode& code, kernels::DType from, const void* row,
                                 size_t n, std::byte* out) = 0;
  virtual absl::Status DecodeRow(const kernels::WeightCode& code, const std::byte* row, size_t n,
                                 kernels::DType to, void* out) = 0;
  // How it exchanges with devices like it, without the host ("NCCL"); empty: it cannot.
  virtual std::string link() const { return ""; }
  // A comm whose memory is the devices'. All ranks of `host` call it together.
  virtual absl::StatusOr<std::shared_ptr<Comm>> Connect(const std::shared_ptr<Comm>& host);
};

// The processor. Also the base of what computes there: its tensors are the host's.
class CpuDevice : public Device {
 public:
  std::string_view name() const override { return "cpu"; }
  std::string Describe() const override { return "the processor"; }
  bool has_own_memory() const override { return false; }
  // LibTorch 1.13 has no fp16 products on the CPU: fp16 weights compute in fp32, and their gradients are
  // rounded to fp16 once they are summed.
  kernels::DType compute_type(kernels::DType weights) const override {
    return weights == kernels::DType::kBf16 ? weights : kernels::DType::kFp32;
  }
  int64_t capacity_bytes() const override { return 0; }
  absl::StatusOr<std::byte*> AllocateArena(int64_t bytes) override;
  bool tensors_are_host() const override { return true; }
  absl::Status LimitTensors(int64_t bytes) override;
  TensorMemoryStats tensors() const override { return TensorMemory::Stats(); }
  void ResetLivePeak() override { TensorMemory::ResetLivePeak(); }
  void ResetPeak() override { TensorMemory::ResetPeak(); }
  void TrimTensors() override { TensorMemory::Trim(); }
  absl::Status RegisterHost(void*, int64_t) override { return absl::OkStatus(); }
  void UnregisterHost(void*) override {}
  void CopyIn(void* to, const void* from, int64_t bytes, bool after_compute, Done done) override;
  void CopyOut(void* to, const void* from, int64_t bytes, Done done) override;
  void AfterCompute(Done done) override { done(absl::OkStatus()); }
  // It has computed when a call returns: whatever was computed before is over.
  absl::Status ComputeOn(void*, std::span<void* const>) override { return absl::OkStatus(); }
  Traffic traffic() const override { return {}; }
  void CountCopied(const Traffic&) override {}
  absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> OpenStorage() override;
  absl::StatusOr<uint64_t> Checksum(const void* data, size_t bytes, uint64_t seed) override;
  void Convert(kernels::DType from, const void* in, kernels::DType to, void* out, size_t n) override;
  void Accumulate(kernels::DType type, const void* in, float* sums, size_t n) override;
  void SquarePartials(kernels::DType type, const void* in, size_t n, double* partials) override;
  void Update(const OptimizerStep& step, const std::vector<kernels::UpdateArrays>& arrays) override;
  void Zero(void* memory, size_t bytes) override;
  void DecodeWeights(const kernels::WeightCode& code, const std::byte* rows, int64_t count, int64_t columns,
                     kernels::DType to, void* out) override;
  absl::Status SumInOrder(kernels::DType type, std::span<const void* const> addends, float* sums,
                          kernels::DType to, void* out, size_t n, double* partials) override;
  absl::Status Clear(void* memory, size_t bytes) override;
  absl::Status EncodeRow(const kernels::WeightCode& code, kernels::DType from, const void* row, size_t n,
                         std::byte* out) override;
  absl::Status DecodeRow(const kernels::WeightCode& code, const std::byte* row, size_t n, kernels::DType to,
                         void* out) override;
};

// The processor, which everybody shares.
const std::shared_ptr<Device>& HostDevice();

}  // namespace penstock::zero

#endif  // PENSTOCK_ZERO_COMPUTE_DEVICE_H_
