#include "zero/compute/device.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "kernels/checksum.h"
#include "kernels/reduce.h"
#include "zero/ranks/comm.h"

namespace penstock::zero {

using kernels::DType;

absl::StatusOr<std::shared_ptr<Comm>> Device::Connect(const std::shared_ptr<Comm>&) {
  return absl::UnimplementedError(absl::StrCat(Describe(), " exchanges with others through host memory"));
}

absl::Status Device::ComputeOn(void*, std::span<void* const>) {
  return absl::UnimplementedError(
      absl::StrCat(Describe(), " computes in an order of its own, not on a stream that is given"));
}

absl::StatusOr<std::byte*> CpuDevice::AllocateArena(int64_t) {
  return absl::FailedPreconditionError("the processor has no memory apart from the host's");
}

absl::Status CpuDevice::LimitTensors(int64_t bytes) {
  TensorMemory::SetLimit(bytes);
  return absl::OkStatus();
}

void CpuDevice::CopyIn(void* to, const void* from, int64_t bytes, bool, Done done) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  done(absl::OkStatus());
}

void CpuDevice::CopyOut(void* to, const void* from, int64_t bytes, Done done) {
  CopyIn(to, from, bytes, /*after_compute=*/false, std::move(done));
}

void CpuDevice::Convert(DType from, const void* in, DType to, void* out, size_t n) {
  kernels::Convert(from, in, to, out, n);
}

void CpuDevice::Accumulate(DType type, const void* in, float* sums, size_t n) {
  switch (type) {
    case DType::kFp32:
      return kernels::AccumulateFp32(static_cast<const float*>(in), sums, n);
    case DType::kBf16:
      return kernels::AccumulateBf16(static_cast<const uint16_t*>(in), sums, n);
    case DType::kFp16:
      return kernels::AccumulateFp16(static_cast<const uint16_t*>(in), sums, n);
  }
}

void CpuDevice::SquarePartials(DType type, const void* in, size_t n, double* partials) {
  for (size_t begin = 0; begin < n; begin += kernels::kReduceBlock) {
    kernels::SumOfSquares sum;
    kernels::AddSquares(type, static_cast<const std::byte*>(in) + begin * kernels::BytesPerElement(type),
                        std::min(kernels::kReduceBlock, n - begin), &sum);
    *partials++ = sum.Value();  // of one block: its partial sum, as it is
  }
}

void CpuDevice::Update(const OptimizerStep& step, const std::vector<kernels::UpdateArrays>& arrays) {
  for (const kernels::UpdateArrays& each : arrays) {
    std::visit(
        [&](const auto& constants) {
          if constexpr (std::is_same_v<std::decay_t<decltype(constants)>, kernels::LambStep>) {
            throw std::logic_error("no device updates by LAMB");
          } else {
            kernels::ApplyUpdate(constants, each);
          }
        },
        step);
  }
}

absl::StatusOr<std::shared_ptr<aio::DeviceTransfers>> CpuDevice::OpenStorage() {
  return absl::FailedPreconditionError(absl::StrCat(Describe(), " has no memory past the host's"));
}

absl::StatusOr<uint64_t> CpuDevice::Checksum(const void* data, size_t bytes, uint64_t seed) {
  return kernels::Checksum(data, bytes, seed);
}

void CpuDevice::Zero(void* memory, size_t bytes) { std::memset(memory, 0, bytes); }

void CpuDevice::DecodeWeights(const kernels::WeightCode& code, const std::byte* rows, int64_t count,
                              int64_t columns, kernels::DType to, void* out) {
  const auto width = static_cast<size_t>(columns);
  const size_t row_bytes = code.row_bytes(width), out_bytes = width * kernels::BytesPerElement(to);
  for (size_t row = 0; row < static_cast<size_t>(count); ++row) {
    kernels::DecodeWeights(code, reinterpret_cast<const uint8_t*>(rows + row * row_bytes), width, to,
                           static_cast<std::byte*>(out) + row * out_bytes);
  }
}

absl::Status CpuDevice::EncodeRow(const kernels::WeightCode& code, DType from, const void* row, size_t n,
                                  std::byte* out) {
  // What is not finite is NaN in the codes.
  (void)kernels::EncodeWeights(code, from, row, n, reinterpret_cast<uint8_t*>(out));
  return absl::OkStatus();
}

absl::Status CpuDevice::DecodeRow(const kernels::WeightCode& code, const std::byte* row, size_t n, DType to,
                                  void* out) {
  kernels::DecodeWeights(code, reinterpret_cast<const uint8_t*>(row), n, to, out);
  return absl::OkStatus();
}

absl::Status CpuDevice::SumInOrder(DType type, std::span<const void* const> addends, float* sums, DType to,
                                   void* out, size_t n, double* partials) {
  Convert(type, addends.front(), DType::kFp32, sums, n);
  for (const void* addend : addends.subspan(1)) Accumulate(type, addend, sums, n);
  Convert(DType::kFp32, sums, to, out, n);
  if (partials != nullptr) SquarePartials(to, out, n, partials);
  return absl::OkStatus();
}

absl::Status CpuDevice::Clear(void* memory, size_t bytes) {
  Zero(memory, bytes);
  return absl::OkStatus();
}

const std::shared_ptr<Device>& HostDevice() {
  static const auto& device = *new std::shared_ptr<Device>(std::make_shared<CpuDevice>());
  return device;
}

}  // namespace penstock::zero
