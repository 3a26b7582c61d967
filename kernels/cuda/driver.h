// NVIDIA's driver (libcuda), which a machine has or has not: looked up when it is first asked for, by no
// linker.
//
// With kernels/cuda/driver_launch.cc it is all that the kernels need: no CUDA runtime. Contexts are the
// devices' primary ones, which PyTorch and everybody else in the process shares. Errors are CUresult's
// numbers, which CUDA's runtime has as well.
#ifndef PENSTOCK_KERNELS_CUDA_DRIVER_H_
#define PENSTOCK_KERNELS_CUDA_DRIVER_H_

#include <cuda.h>

#include <string>

namespace penstock::kernels::cuda {

// Of the driver's interface, what is used; each by the name and version that the header has.
#define PENSTOCK_CUDA_DRIVER_CALLS(CALL)                       \
  CALL(Init, cuInit)                                           \
  CALL(DriverGetVersion, cuDriverGetVersion)                   \
  CALL(GetErrorString, cuGetErrorString)                       \
  CALL(DeviceGetCount, cuDeviceGetCount)                       \
  CALL(DeviceGet, cuDeviceGet)                                 \
  CALL(DeviceGetName, cuDeviceGetName)                         \
  CALL(DeviceGetAttribute, cuDeviceGetAttribute)               \
  CALL(DeviceGetUuid, cuDeviceGetUuid)                         \
  CALL(DeviceGetPCIBusId, cuDeviceGetPCIBusId)                 \
  CALL(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)       \
  CALL(CtxSetCurrent, cuCtxSetCurrent)                         \
  CALL(CtxGetCurrent, cuCtxGetCurrent)                         \
  CALL(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange) \
  CALL(MemGetInfo, cuMemGetInfo)                               \
  CALL(MemAlloc, cuMemAlloc)                                   \
  CALL(MemFree, cuMemFree)                                     \
  CALL(MemHostAlloc, cuMemHostAlloc)                           \
  CALL(MemFreeHost, cuMemFreeHost)                             \
  CALL(MemHostRegister, cuMemHostRegister)                     \
  CALL(MemHostUnregister, cuMemHostUnregister)                 \
  CALL(MemsetD8Async, cuMemsetD8Async)                         \
  CALL(MemcpyHtoDAsync, cuMemcpyHtoDAsync)                     \
  CALL(MemcpyDtoHAsync, cuMemcpyDtoHAsync)                     \
  CALL(StreamCreateWithPriority, cuStreamCreateWithPriority)   \
  CALL(StreamDestroy, cuStreamDestroy)                         \
  CALL(StreamSynchronize, cuStreamSynchronize)                 \
  CALL(StreamWaitEvent, cuStreamWaitEvent)                     \
  CALL(EventCreate, cuEventCreate)                             \
  CALL(EventDestroy, cuEventDestroy)                           \
  CALL(EventRecord, cuEventRecord)                             \
  CALL(EventSynchronize, cuEventSynchronize)                   \
  CALL(ModuleLoadData, cuModuleLoadData)                       \
  CALL(ModuleGetFunction, cuModuleGetFunction)                 \
  CALL(LaunchKernel, cuLaunchKernel)

struct Driver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): the name of a member
#define PENSTOCK_CUDA_DRIVER_MEMBER(name, function) decltype(&::function) name = nullptr;
  PENSTOCK_CUDA_DRIVER_CALLS(PENSTOCK_CUDA_DRIVER_MEMBER)
#undef PENSTOCK_CUDA_DRIVER_MEMBER
};

// The driver, initialised; one and the same each time. Null: there is none, it lacks a call, or finds no
// device; *why says which. Thread-safe.
const Driver* LoadDriver(std::string* why);

// "out of memory (2)", and what its user can do about it.
std::string DriverErrorText(int error);

}  // namespace penstock::kernels::cuda

#endif  // PENSTOCK_KERNELS_CUDA_DRIVER_H_
