#include "zero/compute/cuda/driver_device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "aio/cufile.h"
#include "base/process_mark.h"
#include "base/small_file.h"
#include "base/status_macros.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/driver.h"
#include "kernels/float16.h"
#include "kernels/reduce.h"
#include "zero/compute/cuda/driver_completions.h"

namespace penstock::zero {
namespace {

using kernels::DType;
using kernels::cuda::Driver;

std::byte* AddressOf(CUdeviceptr memory) {
  return reinterpret_cast<std::byte*>(memory);  // NOLINT(performance-no-int-to-ptr): the driver's own type
}

// Code that is loaded when it is first used, and what libraries allocate past PyTorch's allocator.
constexpr int64_t kReserve = int64_t{512} << 20;
// As of zero/compute/libtorch/cuda_device.cc: PyTorch's allocator is LibTorch's.
constexpr tiering::TensorSlack kTensorSlack = {.fixed_bytes = int64_t{2 * 20 + 2 * 2 + 32} << 20,
                                               .gap_bytes = int64_t{8 * 2 * 20} << 20};
constexpr int kLeastMajor = 8;  // compute capability of the kernels

class DriverDevice final : public Device {
 public:
  DriverDevice(const Driver& driver, int number) : driver_(driver), number_(number) {}
  ~DriverDevice() override;

  absl::Status Open();

  std::string_view name() const override { return "cuda"; }
  std::string Describe() const override { return description_; }
  std::string identity() const override { return identity_; }
  bool has_own_memory() const override { return true; }
  int ordinal() const override { return number_; }
  DType compute_type(DType weights) const override { return weights; }
  int64_t capacity_bytes() const override { return capacity_; }

  absl::StatusOr<std::byte*> AllocateArena(int64_t bytes) override;
  bool tensors_are_host() const override { return false; }
  // Tensors are another library's.
  absl::Status LimitTensors(int64_t) override { return absl::OkStatus(); }
  TensorMemoryStats tensors() const override { return {}; }
  void ResetLivePeak() override {}
  void ResetPeak() override {}
  void TrimTensors() override {}
  tiering::TensorSlack tensor_slack() const override { return kTensorSlack; }
  int numa_node() const override { return numa_node_; }
  absl::Status RegisterHost(void* memory, int64_t bytes) override;
  void UnregisterHost(void* memory) override;

  void CopyIn(void* to, const void* from, int64_t bytes, bool after_compute, Done done) override;
  void CopyOut(void* to, const void* from, int64_t bytes, Done done) override;
  void AfterCompute(Done done) override;
  absl::Status ComputeOn(void* stream, std::span<void* const> after) override;
  Traffic traffic() const override { return {bytes_in_.load(), bytes_out_.load()}; }
  void CountCopied(const Traffic& copied) override {
    bytes_in_ += copied.h2d_bytes;
    bytes_out_ += copied.d2h_bytes;
  }
  absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> OpenStorage() override;
  absl::StatusOr<uint64_t> Checksum(const void* data, size_t bytes, uint64_t seed) override;

  void Convert(DType from, const void* in, DType to, void* out, size_t n) override {
    Enqueue([&](CUstream stream) { return kernels::cuda::Convert(from, in, to, out, n, stream); });
  }
  void Accumulate(DType type, const void* in, float* sums, size_t n) override {
    Enqueue([&](CUstream stream) { return kernels::cuda::Accumulate(type, in, sums, n, stream); });
  }
  void SquarePartials(DType type, const void* in, size_t n, double* partials) override {
    Enqueue([&](CUstream stream) { return kernels::cuda::SquarePartials(type, in, n, partials, stream); });
  }
  void Update(const OptimizerStep& step, const std::vector<kernels::UpdateArrays>& arrays) override {
    std::visit(
        [&](const auto& constants) {
          if constexpr (std::is_same_v<std::decay_t<decltype(constants)>, kernels::LambStep>) {
            throw std::logic_error("no device updates by LAMB");
          } else {
            Enqueue([&](CUstream stream) {
              return kernels::cuda::ApplyUpdates(constants, arrays.data(), arrays.size(), {}, stream);
            });
          }
        },
        step);
  }
  void Zero(void* memory, size_t bytes) override {
    Enqueue([&](CUstream stream) {
      return static_cast<int>(driver_.MemsetD8Async(reinterpret_cast<CUdeviceptr>(memory), 0, bytes, stream));
    });
  }
  void DecodeWeights(const kernels::WeightCode& code, const std::byte* rows, int64_t count, int64_t columns,
                     DType to, void* out) override {
    Enqueue([&](CUstream stream) {
      return kernels::cuda::DecodeWeights(code, rows, static_cast<size_t>(count),
                                          static_cast<size_t>(columns), to, out, stream);
    });
  }
  absl::Status SumInOrder(DType type, std::span<const void* const> addends, float* sums, DType to, void* out,
                          size_t n, double* partials) override;
  absl::Status Clear(void* memory, size_t bytes) override;
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

 private:
  // Enqueues on the stream of exchanges, and waits.
  absl::Status Exchange(const char* what, const std::function<int()>& enqueue) {
    Use();
    const std::lock_guard lock(exchange_mutex_);
    return WaitFor(Enqueued(enqueue(), what), exchange_, exchanged_, what);
  }
  // The engine's threads go to this device; they have no other.
  void Use() const { (void)driver_.CtxSetCurrent(context_); }
  absl::Status MakeStreams();
  // That the kernels which this library brings load and run here, and compute what the processor does.
  absl::Status TryKernels();
  absl::Status Describe(CUdevice device);
  // In the order of compute; throws.
  void Enqueue(const std::function<int(CUstream)>& kernel) {
    Use();
    const int error = kernel(compute_.load());
    if (error != 0) throw std::runtime_error(kernels::cuda::DriverErrorText(error));
  }
  static absl::Status Enqueued(int error, absl::string_view what) {
    if (error == 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(what, ": ", kernels::cuda::DriverErrorText(error)));
  }
  // Waits, asleep, for what is enqueued on `stream`. One thread at a time for each stream.
  absl::Status WaitFor(absl::Status enqueued, CUstream stream, CUevent event, absl::string_view what) const;
  // What is enqueued on `stream` from here on is behind what stands on `other`.
  absl::Status Order(CUstream stream, CUstream other);

  const Driver& driver_;
  const int number_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;  // the primary one, which is retained
  std::string description_, identity_;
  int numa_node_ = -1;
  int64_t capacity_ = 0;
  CUdeviceptr arena_ = 0;
  size_t arena_bytes_ = 0;
  std::shared_ptr<aio::CuFile> cufile_;  // null: not asked for, or not here
  std::mutex check_mutex_;               // of the three:
  CUstream check_ = nullptr;
  CUevent checked_ = nullptr;
  uint64_t* checksum_ = nullptr;  // in pinned host memory
  CUstream in_ = nullptr, out_ = nullptr, exchange_ = nullptr, own_ = nullptr;
  std::mutex exchange_mutex_;  // of exchange_ and
  CUevent exchanged_ = nullptr;
  std::mutex order_mutex_;  // of ordered_
  CUevent ordered_ = nullptr;
  std::atomic<CUstream> compute_{nullptr};  // own_, until the owner computes on another
  std::atomic<int64_t> bytes_in_{0}, bytes_out_{0};
  std::optional<DriverCompletions> copied_in_, copied_out_, computed_all_;  // until it goes
};

DriverDevice::~DriverDevice() {
  if (context_ == nullptr) return;
  Use();
  for (std::optional<DriverCompletions>* each : {&copied_in_, &copied_out_, &computed_all_}) each->reset();
  for (CUstream stream : {in_, out_, exchange_, check_, own_}) {
    if (stream == nullptr) continue;
    (void)driver_.StreamSynchronize(stream);
    (void)driver_.StreamDestroy(stream);
  }
  for (CUevent event : {ordered_, exchanged_, checked_}) {
    if (event != nullptr) (void)driver_.EventDestroy(event);
  }
  if (cufile_ != nullptr) cufile_->Cover(nullptr, 0);
  if (checksum_ != nullptr) (void)driver_.MemFreeHost(checksum_);
  if (arena_ != 0) (void)driver_.MemFree(arena_);
  // The primary context stays: kernels that were loaded there are known by it as long as the process lasts
  // (kernels/cuda/driver_launch.cc).
  (void)driver_.CtxSetCurrent(nullptr);
}

absl::Status DriverDevice::Open() {
  int count = 0;
  RETURN_IF_ERROR(CheckDriver(driver_.DeviceGetCount(&count), "cuDeviceGetCount"));
  if (number_ < 0 || number_ >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no CUDA device ", number_, ": the driver finds ", count));
  }
  RETURN_IF_ERROR(CheckDriver(driver_.DeviceGet(&device_, number_), "cuDeviceGet"));
  RETURN_IF_ERROR(
      CheckDriver(driver_.DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain"));
  Use();
  RETURN_IF_ERROR(MakeStreams());
  RETURN_IF_ERROR(CheckDriver(
      driver_.MemHostAlloc(reinterpret_cast<void**>(&checksum_), sizeof(uint64_t), CU_MEMHOSTALLOC_PORTABLE),
      "cuMemHostAlloc"));
  RETURN_IF_ERROR(Describe(device_));
  for (std::optional<DriverCompletions>* each : {&copied_in_, &copied_out_, &computed_all_})
    each->emplace(driver_, context_);
  return TryKernels();
}

absl::Status DriverDevice::TryKernels() {
  constexpr size_t kValues = 5000;
  constexpr size_t kBytes = kValues * sizeof(float), kHalf = kValues * sizeof(uint16_t),
                   kSums = 2 * sizeof(double);
  std::vector<float> values(kValues);
  for (size_t i = 0; i < kValues; ++i) values[i] = 0.37F * static_cast<float>(i) - 700;
  std::vector<uint16_t> expected(kValues), computed(kValues);
  kernels::Convert(DType::kFp32, values.data(), DType::kBf16, expected.data(), kValues);
  kernels::SumOfSquares squares, partial_sum;
  kernels::AddSquares(DType::kBf16, expected.data(), kValues, &squares);
  std::array<double, 2> partials{};
  CUdeviceptr memory = 0;
  const size_t at_half = kBytes, at_sums = (kBytes + kHalf + 7) / 8 * 8;
  RETURN_IF_ERROR(CheckDriver(driver_.MemAlloc(&memory, at_sums + kSums), "cuMemAlloc"));
  auto* const in = AddressOf(memory);
  absl::Status status =
      CheckDriver(driver_.MemcpyHtoDAsync(memory, values.data(), kBytes, own_), "cuMemcpyHtoDAsync");
  if (status.ok())
    status = Enqueued(kernels::cuda::Convert(DType::kFp32, in, DType::kBf16, in + at_half, kValues, own_),
                      "a kernel");
  if (status.ok()) {
    status = Enqueued(kernels::cuda::SquarePartials(DType::kBf16, in + at_half, kValues,
                                                    reinterpret_cast<double*>(in + at_sums), own_),
                      "a kernel");
  }
  if (status.ok())
    status = CheckDriver(driver_.MemcpyDtoHAsync(computed.data(), memory + at_half, kHalf, own_),
                         "cuMemcpyDtoHAsync");
  if (status.ok())
    status = CheckDriver(driver_.MemcpyDtoHAsync(partials.data(), memory + at_sums, kSums, own_),
                         "cuMemcpyDtoHAsync");
  status.Update(CheckDriver(driver_.StreamSynchronize(own_), "kernels on the device"));
  status.Update(CheckDriver(driver_.MemFree(memory), "cuMemFree"));
  RETURN_IF_ERROR(status);
  for (const double partial : partials) partial_sum.Add(partial);
  if (computed == expected && partial_sum.Value() == squares.Value()) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      description_, " computes other values with the kernels of this library than the processor does"));
}

absl::Status DriverDevice::MakeStreams() {
  int least = 0, greatest = 0;
  RETURN_IF_ERROR(
      CheckDriver(driver_.CtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange"));
  for (CUstream* stream : {&in_, &out_, &exchange_, &own_, &check_}) {
    // Checks are short and waited for: before what computes.
    const int priority = stream == &check_ ? greatest : least;
    RETURN_IF_ERROR(CheckDriver(driver_.StreamCreateWithPriority(stream, CU_STREAM_NON_BLOCKING, priority),
                                "cuStreamCreate"));
  }
  compute_ = own_;
  RETURN_IF_ERROR(CheckDriver(driver_.EventCreate(&ordered_, CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
  for (CUevent* event : {&exchanged_, &checked_}) {
    RETURN_IF_ERROR(CheckDriver(driver_.EventCreate(event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
                                "cuEventCreate"));
  }
  return absl::OkStatus();
}

absl::Status DriverDevice::Describe(CUdevice device) {
  std::array<char, 256> name{};
  int major = 0, minor = 0;
  CUuuid uuid{};
  RETURN_IF_ERROR(CheckDriver(driver_.DeviceGetName(name.data(), static_cast<int>(name.size()), device),
                              "cuDeviceGetName"));
  for (const auto& [value, attribute] : {std::pair{&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
                                         {&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR}}) {
    RETURN_IF_ERROR(
        CheckDriver(driver_.DeviceGetAttribute(value, attribute, device), "cuDeviceGetAttribute"));
  }
  if (major < kLeastMajor) {
    return absl::FailedPreconditionError(absl::StrCat("CUDA device ", number_, " (", name.data(),
                                                      ") has compute capability ", major, ".", minor,
                                                      ", and the kernels need ", kLeastMajor, ".0"));
  }
  RETURN_IF_ERROR(CheckDriver(driver_.DeviceGetUuid(&uuid, device), "cuDeviceGetUuid"));
  size_t free = 0, total = 0;
  RETURN_IF_ERROR(CheckDriver(driver_.MemGetInfo(&free, &total), "cuMemGetInfo"));
  identity_ = absl::BytesToHexString(absl::string_view(uuid.bytes, sizeof(uuid.bytes)));
  capacity_ = std::max<int64_t>(0, static_cast<int64_t>(free) - kReserve);
  description_ = absl::StrCat(name.data(), ", ", total >> 20, " MiB, ", free >> 20, " MiB free");
  std::array<char, 32> bus{};  // "0000:3B:00.0"; the kernel's list has it in small letters
  if (driver_.DeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device) == CUDA_SUCCESS) {
    const absl::StatusOr<std::string> text =
        ReadSmallFile(absl::StrCat("/sys/bus/pci/devices/", absl::AsciiStrToLower(bus.data()), "/numa_node"));
    int node = -1;
    if (text.ok() && absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &node)) numa_node_ = node;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> DriverDevice::OpenStorage() {
  if (cufile_ == nullptr) {
    const auto use = [&driver = driver_, context = context_] {
      return CheckDriver(driver.CtxSetCurrent(context), "cuCtxSetCurrent");
    };
    ASSIGN_OR_RETURN(std::shared_ptr<aio::CuFile> loaded, aio::CuFile::Load(use, /*only_past_host=*/true));
    cufile_ = std::move(loaded);
    if (arena_ != 0) {
      cufile_->Cover(AddressOf(arena_), arena_bytes_);
      return cufile_;
    }
    size_t free = 0, total = 0;  // less what it took
    RETURN_IF_ERROR(CheckDriver(driver_.MemGetInfo(&free, &total), "cuMemGetInfo"));
    capacity_ = std::clamp<int64_t>(static_cast<int64_t>(free) - kReserve, 0, capacity_);
  }
  return cufile_;
}

absl::StatusOr<std::byte*> DriverDevice::AllocateArena(int64_t bytes) {
  Use();
  if (cufile_ != nullptr) cufile_->Cover(nullptr, 0);
  if (arena_ != 0) RETURN_IF_ERROR(CheckDriver(driver_.MemFree(std::exchange(arena_, 0)), "cuMemFree"));
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  RETURN_IF_ERROR(CheckDriver(driver_.MemAlloc(&arena_, size),
                              absl::StrCat("cuMemAlloc of ", bytes, " bytes on ", description_)));
  // Padding between parameters is computed with like everything else: it must be numbers. Copies do not wait
  // for it.
  RETURN_IF_ERROR(CheckDriver(driver_.MemsetD8Async(arena_, 0, size, own_), "cuMemsetD8Async"));
  RETURN_IF_ERROR(CheckDriver(driver_.StreamSynchronize(own_), "cuStreamSynchronize"));
  arena_bytes_ = size;
  if (cufile_ != nullptr) cufile_->Cover(AddressOf(arena_), arena_bytes_);
  return AddressOf(arena_);
}

absl::Status DriverDevice::RegisterHost(void* memory, int64_t bytes) {
  Use();
  return CheckDriver(driver_.MemHostRegister(memory, static_cast<size_t>(bytes), CU_MEMHOSTREGISTER_PORTABLE),
                     absl::StrCat("cuMemHostRegister of ", bytes, " bytes"));
}

void DriverDevice::UnregisterHost(void* memory) {
  Use();
  (void)driver_.MemHostUnregister(memory);
}

absl::Status DriverDevice::Order(CUstream stream, CUstream other) {
  if (stream == other) return absl::OkStatus();
  const std::lock_guard lock(order_mutex_);
  RETURN_IF_ERROR(CheckDriver(driver_.EventRecord(ordered_, other), "cuEventRecord"));
  return CheckDriver(driver_.StreamWaitEvent(stream, ordered_, 0), "cuStreamWaitEvent");
}

void DriverDevice::CopyIn(void* to, const void* from, int64_t bytes, bool after_compute, Done done) {
  Use();
  if (after_compute) {
    if (absl::Status status = Order(in_, compute_.load()); !status.ok()) return done(std::move(status));
  }
  absl::Status status = CheckDriver(
      driver_.MemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, static_cast<size_t>(bytes), in_),
      absl::StrCat("copy of ", bytes, " bytes to the device"));
  if (status.ok()) bytes_in_ += bytes;
  copied_in_->Add(std::move(status), in_, std::move(done));
}

void DriverDevice::CopyOut(void* to, const void* from, int64_t bytes, Done done) {
  Use();
  absl::Status status = CheckDriver(
      driver_.MemcpyDtoHAsync(to, reinterpret_cast<CUdeviceptr>(from), static_cast<size_t>(bytes), out_),
      absl::StrCat("copy of ", bytes, " bytes from the device"));
  if (status.ok()) bytes_out_ += bytes;
  copied_out_->Add(std::move(status), out_, std::move(done));
}

void DriverDevice::AfterCompute(Done done) {
  Use();
  computed_all_->Add(absl::OkStatus(), compute_.load(), std::move(done));
}

// On its owner's thread, whose device is as it was.
absl::Status DriverDevice::ComputeOn(void* stream, std::span<void* const> after) {
  CUcontext callers = nullptr;
  RETURN_IF_ERROR(CheckDriver(driver_.CtxGetCurrent(&callers), "cuCtxGetCurrent"));
  if (callers != context_) Use();
  auto* const next = static_cast<CUstream>(stream);
  absl::Status status = Order(next, compute_.load());
  for (void* each : after) status.Update(Order(next, static_cast<CUstream>(each)));
  if (status.ok()) compute_ = next;
  if (callers != context_) (void)driver_.CtxSetCurrent(callers);
  return status;
}

absl::Status DriverDevice::WaitFor(absl::Status enqueued, CUstream stream, CUevent event,
                                   absl::string_view what) const {
  if (enqueued.ok()) enqueued = CheckDriver(driver_.EventRecord(event, stream), "cuEventRecord");
  if (enqueued.ok()) return CheckDriver(driver_.EventSynchronize(event), what);
  enqueued.Update(CheckDriver(driver_.StreamSynchronize(stream), what));
  return enqueued;
}

absl::StatusOr<uint64_t> DriverDevice::Checksum(const void* data, size_t bytes, uint64_t seed) {
  Use();
  const std::lock_guard lock(check_mutex_);
  const absl::Status enqueued =
      Enqueued(kernels::cuda::Checksum(data, bytes, seed, checksum_, check_), "checksum");
  RETURN_IF_ERROR(WaitFor(enqueued, check_, checked_, "checksum"));
  return *checksum_;
}

absl::Status DriverDevice::SumInOrder(DType type, std::span<const void* const> addends, float* sums, DType to,
                                      void* out, size_t n, double* partials) {
  return Exchange("summing gradients", [&] {
    return kernels::cuda::SumInOrder(type, addends.data(), addends.size(), sums, to, out, n, partials,
                                     exchange_);
  });
}

absl::Status DriverDevice::Clear(void* memory, size_t bytes) {
  Use();
  if (bytes == 0) return absl::OkStatus();
  const std::lock_guard lock(exchange_mutex_);
  return WaitFor(
      CheckDriver(driver_.MemsetD8Async(reinterpret_cast<CUdeviceptr>(memory), 0, bytes, exchange_),
                  "cuMemsetD8Async"),
      exchange_, exchanged_, "cuMemsetD8Async");
}

}  // namespace

absl::StatusOr<std::shared_ptr<Device>> OpenDriverDevice(int number) {
  std::string why;
  static const ProcessMark began_in;
  const Driver* const driver = kernels::cuda::LoadDriver(&why);
  if (driver == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(why, "; `device cpu` computes on the processor"));
  }
  if (!began_in.here()) {
    return absl::FailedPreconditionError(
        "CUDA has begun in the process that this one was forked from, and cannot begin here: a process that "
        "is started "
        "by spawn can begin it");
  }
  auto device = std::make_shared<DriverDevice>(*driver, number);
  RETURN_IF_ERROR(device->Open());
  return device;
}

}  // namespace penstock::zero
