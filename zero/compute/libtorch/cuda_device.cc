#include "zero/compute/libtorch/cuda_device.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "aio/cufile.h"
#include "base/status_macros.h"
#include "kernels/cuda/cuda_kernels.h"
#include "zero/compute/device.h"
#include "zero/compute/libtorch/cuda_completions.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using kernels::DType;

// Code that is loaded when it is first used, and what libraries allocate past LibTorch.
constexpr int64_t kReserve = int64_t{512} << 20;
// LibTorch's allocator takes memory in pieces of 20 MiB for large tensors and 2 MiB for small ones, the last
// of each partly used and one more while it grows; and cuBLAS has a workspace from it, 32 MiB on Hopper.
// Between large tensors it leaves gaps. At its limit it gives back what it can, whole pieces: of each gap
// less than two stay. Some eight gaps are seen: gpt-3b at 4 x 1024 tokens held 157 MiB beside 1.32 GiB of
// tensors.
constexpr tiering::TensorSlack kTensorSlack = {.fixed_bytes = int64_t{2 * 20 + 2 * 2 + 32} << 20,
                                               .gap_bytes = int64_t{8 * 2 * 20} << 20};

// By the kernel's list of PCI devices; -1: not known.
int NodeOf(int device) {
  std::array<char, 32> name{};  // "0000:3B:00.0"; there it is in small letters
  if (!CheckCuda(cudaDeviceGetPCIBusId(name.data(), static_cast<int>(name.size()), device), "").ok())
    return -1;
  std::ifstream file(absl::StrCat("/sys/bus/pci/devices/", absl::AsciiStrToLower(name.data()), "/numa_node"));
  int node = -1;
  return file >> node ? node : -1;
}

class CudaDevice : public Device {
 public:
  static absl::StatusOr<std::shared_ptr<Device>> Open(int local_rank) {
    int devices = 0;
    absl::Status status = CheckCuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    RETURN_IF_ERROR(status);
    if (devices < 1) return absl::FailedPreconditionError("no CUDA device");
    auto device = std::make_shared<CudaDevice>(static_cast<c10::DeviceIndex>(local_rank % devices));
    status = CheckCuda(cudaSetDevice(device->index_), "cudaSetDevice");
    RETURN_IF_ERROR(status);
    cudaDeviceProp properties{};
    status = CheckCuda(cudaGetDeviceProperties(&properties, device->index_), "cudaGetDeviceProperties");
    RETURN_IF_ERROR(status);
    if (properties.major < 8) {  // DeviceAvailable has looked at the first one
      return absl::FailedPreconditionError(
          absl::StrCat("CUDA device ", static_cast<int>(device->index_), " (", properties.name,
                       ") has compute capability ", properties.major, ".", properties.minor,
                       ", these kernels need 8.0: choose others with CUDA_VISIBLE_DEVICES"));
    }
    // Its allocator is there from now on: it is asked for limits and peaks before there is a tensor.
    try {
      at::globalContext().lazyInitDevice(at::kCUDA);
    } catch (const c10::Error& error) {
      return absl::InternalError(
          absl::StrCat("LibTorch's CUDA does not start: ", error.what_without_backtrace()));
    }
    for (cudaStream_t* stream : {&device->in_, &device->out_, &device->exchange_}) {
      if (status.ok())
        status = CheckCuda(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    // Short, and waited for: before what computes.
    int least = 0, greatest = 0;
    if (status.ok()) {
      status =
          CheckCuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    }
    if (status.ok()) {
      status = CheckCuda(cudaStreamCreateWithPriority(&device->check_, cudaStreamNonBlocking, greatest),
                         "cudaStreamCreate");
    }
    if (status.ok()) {
      status =
          CheckCuda(cudaEventCreateWithFlags(&device->computed_, cudaEventDisableTiming), "cudaEventCreate");
    }
    for (cudaEvent_t* event : {&device->exchanged_, &device->checked_}) {
      if (!status.ok()) break;
      status = CheckCuda(cudaEventCreateWithFlags(event, cudaEventBlockingSync | cudaEventDisableTiming),
                         "cudaEventCreate");
    }
    if (status.ok()) {
      status = CheckCuda(cudaMallocHost(reinterpret_cast<void**>(&device->checksum_), sizeof(uint64_t)),
                         "cudaMallocHost");
    }
    size_t free = 0, total = 0;
    if (status.ok()) status = CheckCuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    RETURN_IF_ERROR(status);
    device->total_ = static_cast<int64_t>(total);
    device->capacity_ = std::max<int64_t>(0, static_cast<int64_t>(free) - kReserve);
    device->description_ =
        absl::StrCat(properties.name, ", ", total >> 20, " MiB, ", free >> 20, " MiB free");
    if (devices > 1) {
      absl::StrAppend(&device->description_, ", number ", static_cast<int>(device->index_), " of ", devices);
    }
    device->numa_node_ = NodeOf(device->index_);
    device->identity_ =
        absl::BytesToHexString(absl::string_view(properties.uuid.bytes, sizeof(properties.uuid.bytes)));
    return device;
  }

  explicit CudaDevice(c10::DeviceIndex index)
      : index_(index),
        copied_in_(std::in_place, index),
        copied_out_(std::in_place, index),
        computed_all_(std::in_place, index) {}
  ~CudaDevice() override {
    Use();
    for (std::optional<CudaCompletions>* each : {&copied_in_, &copied_out_, &computed_all_}) each->reset();
    for (cudaStream_t stream : {in_, out_, exchange_, check_}) {
      if (stream == nullptr) continue;
      (void)cudaStreamSynchronize(stream);
      (void)cudaStreamDestroy(stream);
    }
    for (cudaEvent_t event : {computed_, exchanged_, checked_}) {
      if (event != nullptr) (void)cudaEventDestroy(event);
    }
    if (cufile_ != nullptr) cufile_->Cover(nullptr, 0);  // who else has it may keep it longer
    (void)cudaFreeHost(checksum_);
    (void)cudaFree(arena_);
  }

  std::string_view name() const override { return "cuda"; }
  std::string Describe() const override { return description_; }
  std::string identity() const override { return identity_; }
  bool has_own_memory() const override { return true; }
  int ordinal() const override { return index_; }
  DType compute_type(DType weights) const override { return weights; }
  int64_t capacity_bytes() const override { return capacity_; }

  absl::StatusOr<std::byte*> AllocateArena(int64_t bytes) override {
    Use();
    if (cufile_ != nullptr) cufile_->Cover(nullptr, 0);
    RETURN_IF_ERROR(CheckCuda(cudaFree(std::exchange(arena_, nullptr)), "cudaFree"));
    absl::Status status = CheckCuda(cudaMalloc(&arena_, static_cast<size_t>(std::max<int64_t>(bytes, 1))),
                                    absl::StrCat("cudaMalloc of ", bytes, " bytes"));
    // Padding between parameters is computed with like everything else: it must be numbers.
    if (status.ok()) status = CheckCuda(cudaMemset(arena_, 0, static_cast<size_t>(bytes)), "cudaMemset");
    // Copies do not wait for it.
    if (status.ok()) status = CheckCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    RETURN_IF_ERROR(status);
    if (cufile_ != nullptr) cufile_->Cover(static_cast<std::byte*>(arena_), static_cast<uint64_t>(bytes));
    arena_bytes_ = static_cast<uint64_t>(bytes);
    return static_cast<std::byte*>(arena_);
  }

  bool tensors_are_host() const override { return false; }
  absl::Status LimitTensors(int64_t bytes) override {
    const double fraction = bytes > 0 ? static_cast<double>(bytes) / static_cast<double>(total_) : 1.0;
    try {
      allocator::setMemoryFraction(std::min(fraction, 1.0), index_);
    } catch (const c10::Error& error) {
      return absl::InternalError(
          absl::StrCat("limit of LibTorch's memory on the device: ", error.what_without_backtrace()));
    }
    return absl::OkStatus();
  }
  // Of its peak: what the allocator has of the device, tensors and what it keeps for the next ones. That is
  // what others lack.
  TensorMemoryStats tensors() const override {
    const auto stats = allocator::getDeviceStats(index_);
    const auto& reserved = stats.reserved_bytes[0];
    const auto& allocated = stats.allocated_bytes[0];
    TensorMemoryStats result;
    result.live_bytes = allocated.current;
    result.peak_live_bytes = allocated.peak;
    result.peak_bytes = reserved.peak;
    return result;
  }
  void ResetLivePeak() override { allocator::resetPeakStats(index_); }
  void ResetPeak() override { allocator::resetPeakStats(index_); }
  void TrimTensors() override { allocator::emptyCache(); }
  tiering::TensorSlack tensor_slack() const override { return kTensorSlack; }
  int numa_node() const override { return numa_node_; }

  absl::Status RegisterHost(void* memory, int64_t bytes) override {
    Use();
    return CheckCuda(cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterPortable),
                     absl::StrCat("cudaHostRegister of ", bytes, " bytes"));
  }
  void UnregisterHost(void* memory) override {
    Use();
    if (cudaHostUnregister(memory) != cudaSuccess) (void)cudaGetLastError();  // it was not registered
  }

  void CopyIn(void* to, const void* from, int64_t bytes, bool after_compute, Done done) override {
    Use();
    absl::Status status;
    if (after_compute) {
      std::lock_guard lock(mutex_);
      status = CheckCuda(cudaEventRecord(computed_, ComputeStream()), "cudaEventRecord");
      if (status.ok()) status = CheckCuda(cudaStreamWaitEvent(in_, computed_), "cudaStreamWaitEvent");
    }
    if (!status.ok()) return done(std::move(status));
    Copy(to, from, bytes, cudaMemcpyHostToDevice, in_, &*copied_in_, &bytes_in_, std::move(done));
  }
  void CopyOut(void* to, const void* from, int64_t bytes, Done done) override {
    Use();
    Copy(to, from, bytes, cudaMemcpyDeviceToHost, out_, &*copied_out_, &bytes_out_, std::move(done));
  }
  void AfterCompute(Done done) override {
    Use();
    computed_all_->Add(absl::OkStatus(), ComputeStream(), std::move(done));
  }
  Traffic traffic() const override { return {bytes_in_.load(), bytes_out_.load()}; }
  void CountCopied(const Traffic& copied) override {
    bytes_in_ += copied.h2d_bytes;
    bytes_out_ += copied.d2h_bytes;
  }

  absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> OpenStorage() override {
    if (cufile_ == nullptr) {
      absl::StatusOr<std::shared_ptr<aio::CuFile>> loaded =
          aio::CuFile::Load([index = index_] { return CheckCuda(cudaSetDevice(index), "cudaSetDevice"); },
                            /*only_past_host=*/true);
      RETURN_IF_ERROR(loaded.status());
      LessWhatOthersTook();
      cufile_ = *std::move(loaded);
      if (arena_ != nullptr) cufile_->Cover(static_cast<std::byte*>(arena_), arena_bytes_);
    }
    return cufile_;
  }
  absl::StatusOr<uint64_t> Checksum(const void* data, size_t bytes, uint64_t seed) override {
    Use();
    std::lock_guard lock(check_mutex_);
    const absl::Status enqueued =
        Enqueued(kernels::cuda::Checksum(data, bytes, seed, checksum_, check_), "checksum");
    RETURN_IF_ERROR(WaitForStream(enqueued, check_, checked_, "checksum"));
    return *checksum_;
  }

  void Convert(DType from, const void* in, DType to, void* out, size_t n) override {
    Use();
    Throw(kernels::cuda::Convert(from, in, to, out, n, ComputeStream()));
  }
  void Accumulate(DType type, const void* in, float* sums, size_t n) override {
    Use();
    Throw(kernels::cuda::Accumulate(type, in, sums, n, ComputeStream()));
  }
  void SquarePartials(DType type, const void* in, size_t n, double* partials) override {
    Use();
    Throw(kernels::cuda::SquarePartials(type, in, n, partials, ComputeStream()));
  }
  void Update(const OptimizerStep& step, const std::vector<kernels::UpdateArrays>& arrays) override {
    Use();
    std::visit(
        [&](const auto& constants) {
          if constexpr (std::is_same_v<std::decay_t<decltype(constants)>, kernels::LambStep>) {
            throw std::logic_error("no device updates by LAMB");
          } else {
            Throw(kernels::cuda::ApplyUpdates(constants, arrays.data(), arrays.size(), {}, ComputeStream()));
          }
        },
        step);
  }
  void Zero(void* memory, size_t bytes) override {
    Use();
    Throw(static_cast<int>(cudaMemsetAsync(memory, 0, bytes, ComputeStream())));
  }
  void DecodeWeights(const kernels::WeightCode& code, const std::byte* rows, int64_t count, int64_t columns,
                     DType to, void* out) override {
    Use();
    Throw(kernels::cuda::DecodeWeights(code, rows, static_cast<size_t>(count), static_cast<size_t>(columns),
                                       to, out, ComputeStream()));
  }

  absl::Status SumInOrder(DType type, std::span<const void* const> addends, float* sums, DType to, void* out,
                          size_t n, double* partials) override {
    return Exchange("summing gradients", [&] {
      return kernels::cuda::SumInOrder(type, addends.data(), addends.size(), sums, to, out, n, partials,
                                       exchange_);
    });
  }
  absl::Status EncodeRow(const kernels::WeightCode& code, DType from, const void* row, size_t n,
                         std::byte* out) override {
    return Exchange("coding a row",
                    [&] { return kernels::cuda::EncodeWeights(code, from, row, n, out, exchange_); });
  }
  absl::Status DecodeRow(const kernels::WeightCode& code, const std::byte* row, size_t n, DType to,
                         void* out) override {
    return Exchange("decoding a row",
                    [&] { return kernels::cuda::DecodeWeights(code, row, 1, n, to, out, exchange_); });
  }
  absl::Status Clear(void* memory, size_t bytes) override {
    Use();
    if (bytes == 0) return absl::OkStatus();
    const std::lock_guard lock(exchange_mutex_);
    return WaitForStream(CheckCuda(cudaMemsetAsync(memory, 0, bytes, exchange_), "cudaMemset"), exchange_,
                         exchanged_, "cudaMemset");
  }
  std::string link() const override { return NcclThere().ok() ? "NCCL" : ""; }
  absl::StatusOr<std::shared_ptr<Comm>> Connect(const std::shared_ptr<Comm>& host) override {
    Use();
    absl::StatusOr<std::shared_ptr<Comm>> connected = ConnectNccl(host);
    LessWhatOthersTook();
    return connected;
  }

 private:
  // A thread's calls go to the device that it has chosen, at first number 0: streams and events are this
  // one's.
  void Use() const { (void)cudaSetDevice(index_); }
  // Libraries that have just been loaded take memory of their own.
  void LessWhatOthersTook() {
    size_t free = 0, total = 0;
    if (arena_ != nullptr || !CheckCuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo").ok()) return;
    capacity_ = std::clamp<int64_t>(static_cast<int64_t>(free) - kReserve, 0, capacity_);
  }
  cudaStream_t ComputeStream() const { return c10::cuda::getDefaultCUDAStream(index_).stream(); }
  // Of kernels, one after the other: of the first that could not be enqueued.
  static absl::Status Enqueued(int error, absl::string_view what) {
    if (error == 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(what, ": ", kernels::cuda::ErrorText(error)));
  }
  // Enqueues on the stream of exchanges, and waits, asleep.
  absl::Status Exchange(absl::string_view what, const std::function<int()>& enqueue) {
    Use();
    const std::lock_guard lock(exchange_mutex_);
    return WaitForStream(Enqueued(enqueue(), what), exchange_, exchanged_, what);
  }
  static void Throw(int error) { TORCH_CHECK(error == 0, kernels::cuda::ErrorText(error)); }

  static void Copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                   CudaCompletions* completions, std::atomic<int64_t>* counter, Done done) {
    absl::Status status = CheckCuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream),
                                    absl::StrCat("copy of ", bytes, " bytes"));
    if (status.ok()) *counter += bytes;
    completions->Add(std::move(status), stream, std::move(done));
  }

  const c10::DeviceIndex index_;
  std::string description_, identity_;
  int numa_node_ = -1;
  int64_t total_ = 0, capacity_ = 0;
  void* arena_ = nullptr;
  uint64_t arena_bytes_ = 0;
  std::shared_ptr<aio::CuFile> cufile_;  // null: not asked for
  std::mutex check_mutex_;               // of all of this:
  cudaStream_t check_ = nullptr;
  cudaEvent_t checked_ = nullptr;
  uint64_t* checksum_ = nullptr;  // in pinned host memory
  cudaStream_t in_ = nullptr, out_ = nullptr, exchange_ = nullptr;
  std::mutex exchange_mutex_;  // of exchange_ and exchanged_
  std::mutex mutex_;           // of computed_
  cudaEvent_t computed_ = nullptr, exchanged_ = nullptr;
  std::atomic<int64_t> bytes_in_{0}, bytes_out_{0};
  std::optional<CudaCompletions> copied_in_, copied_out_, computed_all_;  // until it goes
};

}  // namespace

absl::StatusOr<std::shared_ptr<Device>> OpenCudaDevice(int local_rank) {
  std::string why;
  if (!kernels::cuda::DeviceAvailable(&why)) {
    return absl::FailedPreconditionError(absl::StrCat(why, "; see penstock env, or use `device cpu`"));
  }
  // Read when LibTorch first allocates: blocks of any size share the device's memory, none is stranded in a
  // segment of its own. The user's own word stands.
  setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", /*overwrite=*/0);
  return CudaDevice::Open(local_rank);
}

}  // namespace penstock::zero
