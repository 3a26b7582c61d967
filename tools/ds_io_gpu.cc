#include "tools/ds_io_gpu.h"

#include <dlfcn.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "aio/io_error.h"

namespace penstock::tools {
namespace {

// The few numbers of CUDA's and cuFile's interfaces that are needed; they are part of their ABI.
constexpr int kHostToDevice = 1;
constexpr int kDeviceToHost = 2;
constexpr int kOutOfMemory = 2;
constexpr unsigned kNonBlockingStream = 1;

struct CuFileError {
  int error = 0;  // 0: done
  int cuda_error = 0;
};
struct CuFileDescriptor {
  int type = 1;  // a file descriptor
  union {
    int fd;
    void* handle = nullptr;
  };
  const void* operations = nullptr;
};

// A library that stays loaded until the process ends: CUDA does not like to be unloaded.
class Library {
 public:
  explicit Library(std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (handle_ == nullptr) handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
  }
  bool loaded() const { return handle_ != nullptr; }
  // False if there is no such function; `missing` then has its name.
  template <typename F>
  bool Find(const char* name, F*& function, std::string& missing) {
    function = reinterpret_cast<F*>(dlsym(handle_, name));
    if (function == nullptr && missing.empty()) missing = name;
    return function != nullptr;
  }

 private:
  void* handle_ = nullptr;
};

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

struct GpuBuffer::CuFile {
  CuFileError (*DriverOpen)() = nullptr;
  CuFileError (*DriverClose)() = nullptr;
  CuFileError (*HandleRegister)(void**, CuFileDescriptor*) = nullptr;
  void (*HandleDeregister)(void*) = nullptr;
  CuFileError (*BufRegister)(const void*, size_t, int) = nullptr;
  CuFileError (*BufDeregister)(const void*) = nullptr;
  ssize_t (*Read)(void*, void*, size_t, off_t, off_t) = nullptr;
  ssize_t (*Write)(void*, const void*, size_t, off_t, off_t) = nullptr;
  bool open = false;
  bool registered = false;
};

GpuBuffer::GpuBuffer() : cuda_(std::make_unique<Cuda>()) {}

absl::StatusOr<std::unique_ptr<GpuBuffer>> GpuBuffer::Make(int device, GpuPath path,
                                                           std::span<std::byte> host) {
  std::unique_ptr<GpuBuffer> buffer(new GpuBuffer());
  Cuda& cuda = *buffer->cuda_;
  Library runtime({"libcudart.so", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"});
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
  if (absl::Status status = buffer->Check(cuda.SetDevice(device), "cudaSetDevice"); !status.ok())
    return status;
  if (absl::Status status = buffer->Check(cuda.Malloc(&buffer->memory_, host.size()), "cudaMalloc");
      !status.ok())
    return status;
  if (absl::Status status =
          buffer->Check(cuda.StreamCreateWithFlags(&buffer->stream_, kNonBlockingStream), "cudaStreamCreate");
      !status.ok()) {
    return status;
  }
  if (path == GpuPath::kBounce) {
    if (absl::Status status = buffer->Pin(); !status.ok()) return status;
  }
  if (path != GpuPath::kGds) return buffer;

  Library library({"libcufile.so", "libcufile.so.0"});
  if (!library.loaded()) {
    return absl::FailedPreconditionError(
        "--use_gds: no libcufile.so on this machine; leave it out to go through pinned host memory");
  }
  buffer->cufile_ = std::make_unique<CuFile>();
  CuFile& cufile = *buffer->cufile_;
  library.Find("cuFileDriverOpen", cufile.DriverOpen, missing);
  library.Find("cuFileDriverClose", cufile.DriverClose, missing);
  library.Find("cuFileHandleRegister", cufile.HandleRegister, missing);
  library.Find("cuFileHandleDeregister", cufile.HandleDeregister, missing);
  library.Find("cuFileBufRegister", cufile.BufRegister, missing);
  library.Find("cuFileBufDeregister", cufile.BufDeregister, missing);
  library.Find("cuFileRead", cufile.Read, missing);
  library.Find("cuFileWrite", cufile.Write, missing);
  if (!missing.empty())
    return absl::FailedPreconditionError(absl::StrCat("--use_gds: libcufile.so here has no ", missing));
  if (const CuFileError opened = cufile.DriverOpen(); opened.error != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("--use_gds: cuFileDriverOpen gave error ", opened.error,
                     "; leave out --use_gds to go through pinned host memory"));
  }
  cufile.open = true;
  // Where it cannot be registered, cuFile goes through buffers of its own.
  cufile.registered = cufile.BufRegister(buffer->memory_, host.size(), 0).error == 0;
  return buffer;
}

GpuBuffer::~GpuBuffer() {
  if (cufile_ != nullptr && cufile_->registered) cufile_->BufDeregister(memory_);
  if (cufile_ != nullptr && cufile_->open) cufile_->DriverClose();
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
  CuFileDescriptor descriptor;
  descriptor.fd = file.fd();
  void* handle = nullptr;
  if (const CuFileError error = cufile_->HandleRegister(&handle, &descriptor); error.error != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("--use_gds: ", file.path(), " cannot be used with cuFile (error ", error.error,
                     "); leave out --use_gds to go through pinned host memory"));
  }
  const uint64_t blocks = (shape.bytes + shape.block_bytes - 1) / shape.block_bytes;
  threads = std::clamp<uint64_t>(threads, 1, std::max<uint64_t>(1, blocks));
  std::mutex mutex;
  absl::Status first;
  const auto work = [&](uint64_t t) {
    // The device is chosen thread by thread.
    absl::Status status = Check(cuda_->SetDevice(device_), "cudaSetDevice");
    const uint64_t end = std::min(shape.bytes, blocks * (t + 1) / threads * shape.block_bytes);
    for (uint64_t at = blocks * t / threads * shape.block_bytes; status.ok() && at < end;) {
      const uint64_t bytes = std::min(shape.block_bytes, end - at);
      const auto offset = static_cast<off_t>(at);
      const ssize_t moved = read ? cufile_->Read(handle, memory_, bytes, offset, offset)
                                 : cufile_->Write(handle, memory_, bytes, offset, offset);
      if (moved <= 0) {
        status = moved == -1 ? aio::MakeIoError({.op = read ? "cuFileRead" : "cuFileWrite",
                                                 .path = file.path(),
                                                 .offset = at,
                                                 .bytes = bytes,
                                                 .error = errno})
                             : absl::DataLossError(absl::StrCat(
                                   read ? "cuFileRead " : "cuFileWrite ", file.path(), ": offset ", at, ", ",
                                   bytes, " bytes: ", moved == 0 ? "nothing moved" : "cuFile error ",
                                   moved == 0 ? "" : absl::StrCat(-moved)));
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
  cufile_->HandleDeregister(handle);
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
