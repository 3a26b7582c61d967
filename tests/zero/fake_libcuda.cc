// A stand-in for NVIDIA's driver (libcuda.so.1), for tests without a GPU: one device, on the processor, on
// which everything happens as late as CUDA may do it, and never earlier than asked for.
//
//   memory    allocations with 0xff in them, which no other allocation takes over until the process ends;
//   memory that
//             is given back has 0xee. A copy or a kernel whose memory is no device memory, or was given back,
//             is an error of the device, as is a copy that the host's memory was unregistered under
//   streams   each a thread, which runs what it was given one after the other, each some time after it was
//   enqueued events    of streams; waits for one that was recorded wait for that record, not for a later one
//   kernels   those of kernels/cuda that an engine of Python's enqueues, by their names, on the processor's
//   own; and
//             cuLaunchHostFunc, for tests' own work
//   faults    FAKE_LIBCUDA_FAULT=register|record|alloc|launch|copy|image: that call fails, as long as it is
//             there; hidden, forked: cuInit fails as where CUDA_VISIBLE_DEVICES is empty, and as in a
//             forked child
//
// FAKE_LIBCUDA_MEMORY is its memory in bytes [1 GiB], FAKE_LIBCUDA_CAPABILITY the major number of its compute
// capability [9]. Compiled with FAKE_LIBCUDA_IS_OLD it lacks a call that drivers have had since 11.4.
#include <cuda.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/adam.h"
#include "kernels/checksum.h"
#include "kernels/float16.h"
#include "kernels/optimizer.h"
#include "kernels/reduce.h"

namespace {

using penstock::kernels::DType;

bool Fails(const char* call) {
  const char* const fault = std::getenv("FAKE_LIBCUDA_FAULT");
  return fault != nullptr && std::strcmp(fault, call) == 0;
}

class FakeStream {
 public:
  explicit FakeStream(uint64_t seed) : random_(seed), thread_([this] { Work(); }) { thread_.detach(); }

  uint64_t Enqueue(std::function<void()> work) {
    std::unique_lock lock(mutex_);
    queue_.push_back(std::move(work));
    const uint64_t number = ++enqueued_;
    lock.unlock();
    changed_.notify_all();
    return number;
  }
  uint64_t enqueued() {
    const std::lock_guard lock(mutex_);
    return enqueued_;
  }
  void WaitUntil(uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }

 private:
  void Work() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 150));
      work();
      {
        const std::lock_guard lock(mutex_);
        ++done_;
      }
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t enqueued_ = 0, done_ = 0;
  std::minstd_rand random_;
  std::thread thread_;
};

struct FakeEvent {
  FakeStream* stream = nullptr;  // null: never recorded
  uint64_t number = 0;
};

struct FakeFunction {
  std::string name;
  int life;  // of the primary context: with it goes what was loaded there
};
std::atomic<int> retained{0}, lives{0};

class FakeDevice {
 public:
  FakeStream& Of(CUstream stream) {
    return stream == nullptr ? *default_ : *reinterpret_cast<FakeStream*>(stream);
  }
  CUstream NewStream() {
    const std::lock_guard lock(mutex_);
    return reinterpret_cast<CUstream>(new FakeStream(++streams_));  // until the process ends
  }

  CUresult Allocate(CUdeviceptr* at, size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (Fails("alloc") || used_ + bytes > total()) return CUDA_ERROR_OUT_OF_MEMORY;
    void* const memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    std::memset(memory, 0xff, bytes);
    used_ += bytes;
    *at = reinterpret_cast<CUdeviceptr>(memory);
    memory_[*at] = bytes;
    return CUDA_SUCCESS;
  }
  CUresult Free(CUdeviceptr at) {
    const std::lock_guard lock(mutex_);
    const auto found = memory_.find(at);
    if (found == memory_.end()) return CUDA_ERROR_INVALID_VALUE;
    std::memset(reinterpret_cast<void*>(at), 0xee, found->second);
    used_ -= found->second;
    memory_.erase(found);  // and leaked: nobody else gets it
    return CUDA_SUCCESS;
  }
  bool Owns(const void* data, size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto at = reinterpret_cast<CUdeviceptr>(data);
    auto found = memory_.upper_bound(at);
    if (found == memory_.begin()) return false;
    --found;
    return at >= found->first && at + bytes <= found->first + found->second;
  }
  // Reads or writes of memory that is none of the device's end everything on it.
  bool Check(std::initializer_list<std::pair<const void*, size_t>> ranges) {
    for (const auto& [data, bytes] : ranges) {
      if (bytes > 0 && !Owns(data, bytes)) error_ = CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    return error_ == CUDA_SUCCESS;
  }
  CUresult error() const { return error_; }
  void Lose() { error_ = CUDA_ERROR_UNKNOWN; }

  CUresult Register(void* memory, size_t bytes) {
    if (Fails("register")) return CUDA_ERROR_OUT_OF_MEMORY;
    const std::lock_guard lock(mutex_);
    registered_[memory] = bytes;
    return CUDA_SUCCESS;
  }
  CUresult Unregister(void* memory) {
    const std::lock_guard lock(mutex_);
    return registered_.erase(memory) == 1 ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  bool IsRegistered(const void* data, size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto found = registered_.upper_bound(const_cast<void*>(data));
    if (found == registered_.begin()) return false;
    --found;
    const auto* const from = static_cast<const char*>(found->first);
    return static_cast<const char*>(data) + bytes <= from + found->second;
  }
  static size_t total() {
    const char* const given = std::getenv("FAKE_LIBCUDA_MEMORY");
    return given == nullptr ? size_t{1} << 30 : std::strtoull(given, nullptr, 10);
  }
  size_t used() {
    const std::lock_guard lock(mutex_);
    return used_;
  }

 private:
  std::mutex mutex_;
  std::map<CUdeviceptr, size_t> memory_;
  std::map<void*, size_t> registered_;
  size_t used_ = 0;
  uint64_t streams_ = 1;
  std::atomic<CUresult> error_{CUDA_SUCCESS};
  FakeStream* const default_ = new FakeStream(1);
};

FakeDevice& Device() {
  static FakeDevice& device = *new FakeDevice();
  return device;
}

// The context is a number: there is one.
CUcontext ThePrimary() { return reinterpret_cast<CUcontext>(uintptr_t{0x10}); }
thread_local CUcontext current = nullptr;

template <class T>
T Argument(void** arguments, size_t which) {
  T value;
  std::memcpy(static_cast<void*>(&value), arguments[which], sizeof(T));
  return value;
}

// As kernels/cuda/optimizers.cu hands them over.
struct Tensor {
  void* param;
  int16_t* master_low;
  uint16_t* copy_out;
  const void* grad;
  void *m, *v;
  float *m_scales, *v_scales;
  uint64_t n, first_element;
  uint32_t key;
  penstock::kernels::ParamType param_type;
  DType grad_type, copy_type;
  penstock::kernels::StateType state_type;
  bool vector;
};
struct Batch {
  Tensor tensors[32];
  uint32_t first_chunk[33];
  int count;
};

std::function<void()> Kernel(const std::string& name, void** arguments) {
  namespace kernels = penstock::kernels;
  const auto has = [&name](const char* part) { return name.find(part) != std::string::npos; };
  const auto bytes = [](DType type, uint64_t n) { return n * kernels::BytesPerElement(type); };
  if (has("ConvertKernel")) {
    const auto from = Argument<DType>(arguments, 0), to = Argument<DType>(arguments, 2);
    const auto* const in = Argument<const void*>(arguments, 1);
    auto* const out = Argument<void*>(arguments, 3);
    const auto n = Argument<uint64_t>(arguments, 4);
    return [=] {
      // Gradients are another library's memory, of which this device knows nothing.
      if (Device().Check({{out, bytes(to, n)}})) kernels::Convert(from, in, to, out, n);
    };
  }
  if (has("AccumulateKernel")) {
    const auto type = Argument<DType>(arguments, 0);
    const auto* const in = Argument<const void*>(arguments, 1);
    auto* const sums = Argument<float*>(arguments, 2);
    const auto n = Argument<uint64_t>(arguments, 3);
    return [=] {
      if (!Device().Check({{sums, 4 * n}})) return;
      if (type == DType::kFp32) kernels::AccumulateFp32(static_cast<const float*>(in), sums, n);
      if (type == DType::kBf16) kernels::AccumulateBf16(static_cast<const uint16_t*>(in), sums, n);
      if (type == DType::kFp16) kernels::AccumulateFp16(static_cast<const uint16_t*>(in), sums, n);
    };
  }
  if (has("SquaresKernel")) {
    const auto type = Argument<DType>(arguments, 0);
    const auto* const in = Argument<const std::byte*>(arguments, 1);
    const auto n = Argument<uint64_t>(arguments, 2);
    auto* const partials = Argument<double*>(arguments, 3);
    return [=] {
      if (!Device().Check({{in, bytes(type, n)}, {partials, (n + 4095) / 4096 * 8}})) return;
      for (uint64_t begin = 0; begin < n; begin += kernels::kReduceBlock) {
        kernels::SumOfSquares sum;
        kernels::AddSquares(type, in + bytes(type, begin),
                            std::min<uint64_t>(kernels::kReduceBlock, n - begin), &sum);
        partials[begin / kernels::kReduceBlock] = sum.Value();
      }
    };
  }
  if (has("ChecksumKernel")) {
    const auto* const in = Argument<const void*>(arguments, 0);
    const auto n = Argument<uint64_t>(arguments, 1);
    // XXH3 adds its seed to the first word of its secret.
    const uint64_t seed =
        Argument<kernels::ChecksumKeys>(arguments, 2).words[0] - kernels::MakeChecksumKeys(0).words[0];
    auto* const out = Argument<uint64_t*>(arguments, 3);
    return [=] {
      if (Device().Check({{in, n}})) *out = kernels::Checksum(in, n, seed);
    };
  }
  if (has("UpdateKernel") && has("AdamElement")) {
    const auto batch = std::make_shared<Batch>(Argument<Batch>(arguments, 0));
    const auto step = Argument<kernels::AdamStep>(arguments, 1);
    return [=] {
      for (int i = 0; i < batch->count; ++i) {
        const Tensor& t = batch->tensors[i];
        if (!Device().Check(
                {{t.param, 2 * t.n}, {t.grad, bytes(t.grad_type, t.n)}, {t.m, 4 * t.n}, {t.v, 4 * t.n}}))
          return;
        kernels::UpdateArrays arrays;
        arrays.n = t.n;
        arrays.param_type = t.param_type;
        arrays.param = t.param;
        arrays.master_low = t.master_low;
        arrays.copy_out = t.copy_out;
        arrays.copy_type = t.copy_type;
        arrays.grad_type = t.grad_type;
        arrays.grad = t.grad;
        arrays.state_type = t.state_type;
        arrays.m = t.m;
        arrays.v = t.v;
        arrays.first_element = t.first_element;
        kernels::ApplyUpdate(step, arrays);
      }
    };
  }
  return nullptr;
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT CUresult cuInit(unsigned) {
  if (Fails("hidden")) return CUDA_ERROR_NO_DEVICE;
  return Fails("forked") ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}
EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY     ? "out of memory"
          : error == CUDA_ERROR_ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
                                                : "unknown error";
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* name, int room, CUdevice) {
  std::strncpy(name, "Fake device", static_cast<size_t>(room));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const char* const given = std::getenv("FAKE_LIBCUDA_CAPABILITY");
  const int major = given == nullptr ? 9 : std::atoi(given);
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? major : 0;
  return CUDA_SUCCESS;
}
#ifndef FAKE_LIBCUDA_IS_OLD
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice) {
  std::memset(uuid, 7, sizeof(*uuid));
  return CUDA_SUCCESS;
}
#endif
EXPORT CUresult cuDeviceGetPCIBusId(char*, int, CUdevice) { return CUDA_ERROR_INVALID_VALUE; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  ++retained;
  *context = ThePrimary();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  if (--retained == 0) ++lives;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *total = FakeDevice::total() + (size_t{512} << 20);  // what an engine leaves
  *free = *total - Device().used();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* at, size_t bytes) {
  return current == nullptr ? CUDA_ERROR_INVALID_CONTEXT : Device().Allocate(at, bytes);
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr at) { return Device().Free(at); }
EXPORT CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemFreeHost(void* memory) {
  std::free(memory);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
  return Device().Register(memory, bytes);
}
EXPORT CUresult cuMemHostUnregister(void* memory) { return Device().Unregister(memory); }
EXPORT CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream) {
  auto* const to = reinterpret_cast<void*>(at);
  Device().Of(stream).Enqueue([=] {
    if (Device().Check({{to, bytes}})) std::memset(to, value, bytes);
  });
  return Device().error();
}
// Memory that is not registered is copied before the call returns, as the driver does it.
static CUresult Copy(void* to, const void* from, const void* host, const void* there, size_t bytes,
                     CUstream stream) {
  if (Fails("copy")) return CUDA_ERROR_UNKNOWN;
  const bool registered = Device().IsRegistered(host, bytes);
  FakeStream& on = Device().Of(stream);
  const uint64_t number = on.Enqueue([=] {
    if (!Device().Check({{there, bytes}})) return;
    if (registered && !Device().IsRegistered(host, bytes)) return Device().Lose();
    std::memcpy(to, from, bytes);
  });
  if (!registered) on.WaitUntil(number);
  return Device().error();
}
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr at, const void* from, size_t bytes, CUstream stream) {
  return Copy(reinterpret_cast<void*>(at), from, from, reinterpret_cast<void*>(at), bytes, stream);
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr at, size_t bytes, CUstream stream) {
  return Copy(to, reinterpret_cast<void*>(at), to, reinterpret_cast<void*>(at), bytes, stream);
}
EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  *stream = Device().NewStream();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamDestroy_v2(CUstream) { return CUDA_SUCCESS; }
EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  FakeStream& of = Device().Of(stream);
  of.WaitUntil(of.enqueued());
  return Device().error();
}
EXPORT CUresult cuEventCreate(CUevent* event, unsigned) {
  *event = reinterpret_cast<CUevent>(new FakeEvent());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventDestroy_v2(CUevent event) {
  delete reinterpret_cast<FakeEvent*>(event);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
  if (Fails("record")) return CUDA_ERROR_UNKNOWN;
  FakeStream& of = Device().Of(stream);
  *reinterpret_cast<FakeEvent*>(event) = {&of, of.Enqueue([] {})};
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventSynchronize(CUevent event) {
  const FakeEvent recorded = *reinterpret_cast<FakeEvent*>(event);
  if (recorded.stream != nullptr) recorded.stream->WaitUntil(recorded.number);
  return Device().error();
}
EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  const FakeEvent recorded = *reinterpret_cast<FakeEvent*>(event);
  if (recorded.stream == nullptr || recorded.stream == &Device().Of(stream)) return CUDA_SUCCESS;
  Device().Of(stream).Enqueue([recorded] { recorded.stream->WaitUntil(recorded.number); });
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  if (Fails("image")) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  // As nvcc writes fat binaries.
  if (*static_cast<const uint32_t*>(image) != 0xBA55ED50U) return CUDA_ERROR_INVALID_IMAGE;
  *module = reinterpret_cast<CUmodule>(const_cast<void*>(image));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(new FakeFunction{name, lives});
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                               unsigned, unsigned, CUstream stream, void** arguments, void**) {
  if (Fails("launch")) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  if (reinterpret_cast<FakeFunction*>(function)->life != lives) return CUDA_ERROR_INVALID_HANDLE;
  std::function<void()> kernel = Kernel(reinterpret_cast<FakeFunction*>(function)->name, arguments);
  if (kernel == nullptr) return CUDA_ERROR_NOT_FOUND;
  Device().Of(stream).Enqueue(std::move(kernel));
  return Device().error();
}
EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  Device().Of(stream).Enqueue([=] { function(data); });
  return CUDA_SUCCESS;
}
// For tests: the device is lost, as with an Xid. Nothing on it works any more.
EXPORT void fake_libcuda_lose_device() { Device().Lose(); }

}  // extern "C"
