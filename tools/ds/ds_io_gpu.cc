#include "tools/ds/ds_io_gpu.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/io_error.h"
#include "aio/loaded_library.h"
#include "base/status_macros.h"

namespace penstock::tools {
namespace {

// The few numbers of CUDA's interface that are needed; they are part of its ABI.
constexpr int kHostToDevice = 1;
constexpr int kDeviceToHost = 2;
constexpr int kOutOfMemory = 2;
constexpr unsigned kNonBlockingStream = 1;

}  // namespace

struct GpuBuffer::Cuda {
  int (*GetDeviceCount)(int*) = nullptr;
  int (*SetDevice)(int) = nullptr;
  int (*Malloc)(void**, size_t) = nullptr;
  int (*Free)(void*) = nullptr;
  int (*HostRegister)(void*, size_t, unsigned) = nullptr;
  int (*HostUnregister)(void*) = nullptr;
  int (*MemcpyAsync)(void*, const void*, size_t, int, void*) = nullptr;
  int (*StreamCreateWithFlags)(void**, unsigned) = nullptr;
  int (*StreamSynchronize)(void*) = nullptr;
  int (*StreamDestroy)(void*) = nullptr;
  const char* (*GetErrorString)(int) = nullptr;
};

GpuBuffer::GpuBuffer() : cuda_(std::make_unique<Cuda>()) {}

absl::StatusOr<std::unique_ptr<GpuBuffer>> GpuBuffer::Make(int device, GpuPath path,
                                                           std::span<std::byte> host) {
  std::unique_ptr<GpuBuffer> buffer(new GpuBuffer());
  Cuda& cuda = *buffer->cuda_;
  aio::LoadedLibrary runtime(aio::kCudaRuntime);
  if (!runtime.loaded()) {
    return absl::FailedPreconditionError(
        "--gpu: no CUDA runtime (libcudart.so) on this machine; leave out --gpu to measure the drive's side");
  }
  std::string missing;
  runtime.Find("cudaGetDeviceCount", cuda.GetDeviceCount, missing);
  runtime.Find("cudaSetDevice", cuda.SetDevice, missing);
  runtime.Find("cudaMalloc", cuda.Malloc, missing);
  runtime.Find("cudaFree", cuda.Free, missing);
  runtime.Find("cudaHostRegister", cuda.HostRegister, missing);
  runtime.Find("cudaHostUnregister", cuda.HostUnregister, missing);
  runtime.Find("cudaMemcpyAsync", cuda.MemcpyAsync, missing);
  runtime.Find("cudaStreamCreateWithFlags", cuda.StreamCreateWithFlags, missing);
  runtime.Find("cudaStreamSynchronize", cuda.StreamSynchronize, missing);
  runtime.Find("cudaStreamDestroy", cuda.StreamDestroy, missing);
  runtime.Find("cudaGetErrorString", cuda.GetErrorString, missing);
  if (!missing.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("--gpu: the CUDA runtime here has no ", missing, "; leave out --gpu"));
  }
  int devices = 0;
  if (const int error = cuda.GetDeviceCount(&devices); error != 0 || devices == 0) {
    return absl::FailedPreconditionError(absl::StrCat("--gpu: no CUDA device on this machine (",
                                                      error == 0 ? "0 found" : cuda.GetErrorString(error),
                                                      "); leave out --gpu to measure the drive's side"));
  }
  if (device >= devices) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--gpu: device ", device, " asked for, this machine has ", devices, ", numbered from 0"));
  }
  buffer->path_ = path;
  buffer->device_ = device;
  buffer->host_ = host;
  RETURN_IF_ERROR(buffer->Check(cuda.SetDevice(device), "cudaSetDevice"));
  RETURN_IF_ERROR(buffer->Check(cuda.Malloc(&buffer->memory_, host.size()), "cudaMalloc"));
  if (absl::Status status =
          buffer->Check(cuda.StreamCreateWithFlags(&buffer->stream_, kNonBlockingStream), "cudaStreamCreate");
      !status.ok()) {
    return status;
  }
  if (path == GpuPath::kBounce) {
    RETURN_IF_ERROR(buffer->Pin());
  }
  if (path != GpuPath::kGds) return buffer;

  absl::StatusOr<std::shared_ptr<aio::CuFile>> cufile = aio::CuFile::Load(
      [raw = buffer.get()] { return raw->Check(raw->cuda_->SetDevice(raw->device_), "cudaSetDevice"); },
      /*only_past_host=*/false);
  if (!cufile.ok()) {
    return absl::FailedPreconditionError(absl::StrCat("--use_gds: ", std::string(cufile.status().message()),
                                                      "; leave it out to go through pinned host memory"));
  }
  buffer->cufile_ = *std::move(cufile);
  buffer->cufile_->Cover(static_cast<std::byte*>(buffer->memory_), host.size());
  return buffer;
}

GpuBuffer::~GpuBuffer() {
  cufile_.reset();  // before the memory that it has registered
  Unpin();
  if (stream_ != nullptr) cuda_->StreamDestroy(stream_);
  if (memory_ != nullptr) cuda_->Free(memory_);
}

absl::Status GpuBuffer::Check(int error, const char* call) const {
  if (error == 0) return absl::OkStatus();
  const std::string text = absl::StrCat(call, " on device ", device_, ", ", host_.size(),
                                        " bytes: ", cuda_->GetErrorString(error), " (error ", error, ")");
  return error == kOutOfMemory ? absl::ResourceExhaustedError(text) : absl::UnavailableError(text);
}

absl::Status GpuBuffer::Pin() {
  absl::Status status = Check(cuda_->HostRegister(host_.data(), host_.size(), 0), "cudaHostRegister");
  pinned_ = status.ok();
  return status;
}

void GpuBuffer::Unpin() {
  if (pinned_) cuda_->HostUnregister(host_.data());
  pinned_ = false;
}

absl::Status GpuBuffer::Copy(uint64_t bytes, bool to_device) {
  void* const to = to_device ? memory_ : host_.data();
  const void* const from = to_device ? host_.data() : memory_;
  absl::Status status =
      Check(cuda_->MemcpyAsync(to, from, bytes, to_device ? kHostToDevice : kDeviceToHost, stream_),
            "cudaMemcpyAsync");
  if (status.ok()) status = Check(cuda_->StreamSynchronize(stream_), "cudaStreamSynchronize");
  return status;
}

absl::Status GpuBuffer::CopyToHost(uint64_t bytes) { return Copy(bytes, false); }
absl::Status GpuBuffer::CopyToDevice(uint64_t bytes) { return Copy(bytes, true); }

absl::Status GpuBuffer::Run(Transfer& transfer, const TransferShape& shape, uint64_t threads,
                            aio::Engine& engine, aio::File& file, bool read) {
  if (shape.bytes > host_.size()) return absl::InternalError("gpu: the file is longer than the buffer");
  if (path_ == GpuPath::kGds) return RunGds(shape, threads, file, read);
  absl::Status status;
  if (path_ == GpuPath::kSlowBounce) status = Pin();
  if (status.ok() && !read) status = Copy(shape.bytes, false);
  if (status.ok()) status = transfer.Run(engine, file, read);
  if (status.ok() && read) status = Copy(shape.bytes, true);
  if (path_ == GpuPath::kSlowBounce) Unpin();
  return status;
}

// Each thread has a run of whole blocks of the file, and goes through it one block at a time: cuFile has no
// queue.
absl::Status GpuBuffer::RunGds(const TransferShape& shape, uint64_t threads, aio::File& file, bool read) {
  const uint64_t blocks = (shape.bytes + shape.block_bytes - 1) / shape.block_bytes;
  threads = std::clamp<uint64_t>(threads, 1, std::max<uint64_t>(1, blocks));
  std::mutex mutex;
  absl::Status first;
  const auto work = [&](uint64_t t) {
    absl::Status status;
    const uint64_t end = std::min(shape.bytes, blocks * (t + 1) / threads * shape.block_bytes);
    for (uint64_t at = blocks * t / threads * shape.block_bytes; status.ok() && at < end;) {
      const uint64_t bytes = std::min(shape.block_bytes, end - at);
      std::string why;
      const int64_t moved = cufile_->Transfer(read ? aio::Op::kRead : aio::Op::kWrite, file, at,
                                              static_cast<std::byte*>(memory_) + at, bytes, &why);
      if (moved == -EOPNOTSUPP) {
        status = absl::FailedPreconditionError(
            absl::StrCat("--use_gds: ", why, "; leave it out to go through pinned host memory"));
      } else if (!why.empty()) {
        status = absl::DataLossError(why);
      } else if (moved < 0) {
        status = aio::MakeIoError({.op = read ? "cuFileRead" : "cuFileWrite",
                                   .path = file.path(),
                                   .offset = at,
                                   .bytes = bytes,
                                   .error = static_cast<int>(-moved)});
      } else if (moved == 0) {
        status = absl::DataLossError(absl::StrCat(read ? "cuFileRead " : "cuFileWrite ", file.path(),
                                                  ": offset ", at, ", ", bytes, " bytes: nothing moved"));
      } else {
        at += static_cast<uint64_t>(moved);
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    first.Update(status);
  };
  std::vector<std::thread> others;
  for (uint64_t t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (std::thread& other : others) other.join();
  cufile_->Forget(file.fd());
  return first;
}

absl::StatusOr<int> GpuNumber(const std::string& label) {
  const std::string_view text = std::string_view(label).substr(label.rfind("cuda:", 0) == 0 ? 5 : 0);
  int number = -1;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || rest != text.data() + text.size() || number < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--gpu: device \"", aio::OneLine(label), "\" is not a number of a CUDA device, like 0"));
  }
  return number;
}

}  // namespace penstock::tools
