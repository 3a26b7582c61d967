// What nvcc's code for the host calls, over the driver alone: the registration of this room's fat binaries,
// and the launch of a kernel. CUDA's runtime is not linked. kernels/CMakeLists.txt gives the calls of the
// kernels' objects the names that these have, so that a runtime in the same process is none of theirs.
//
// A fat binary is loaded into the current context when a kernel of it is first launched there.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/cuda/driver.h"

namespace penstock::kernels::cuda {
namespace {

// As nvcc writes it.
struct FatBinary {
  int magic;
  int version;
  const void* data;
  void* more;
};

struct Kernel {
  const FatBinary* binary = nullptr;
  std::string name;  // on the device
};

class Kernels {
 public:
  void Add(const void* stub, const FatBinary* binary, const char* name) {
    const std::lock_guard lock(mutex_);
    kernels_[stub] = {binary, name};
  }
  // Of the current context.
  CUresult Find(const Driver& driver, const void* stub, CUfunction* function) {
    CUcontext context = nullptr;
    if (const CUresult error = driver.CtxGetCurrent(&context); error != CUDA_SUCCESS) return error;
    const std::lock_guard lock(mutex_);
    const auto known = functions_.find({context, stub});
    if (known != functions_.end()) {
      *function = known->second;
      return CUDA_SUCCESS;
    }
    const auto kernel = kernels_.find(stub);
    if (kernel == kernels_.end()) return CUDA_ERROR_NOT_FOUND;
    CUmodule& module = modules_[{context, kernel->second.binary}];
    CUresult error = CUDA_SUCCESS;
    if (module == nullptr) error = driver.ModuleLoadData(&module, kernel->second.binary->data);
    if (error == CUDA_SUCCESS)
      error = driver.ModuleGetFunction(function, module, kernel->second.name.c_str());
    if (error == CUDA_SUCCESS) functions_[{context, stub}] = *function;
    return error;
  }

 private:
  std::mutex mutex_;
  std::map<const void*, Kernel> kernels_;  // by the host's function of each
  std::map<std::pair<CUcontext, const FatBinary*>, CUmodule> modules_;
  std::map<std::pair<CUcontext, const void*>, CUfunction> functions_;
};

// Objects register before main.
Kernels& AllKernels() {
  static Kernels& kernels = *new Kernels();
  return kernels;
}

cudaError_t OfRuntime(CUresult error) { return static_cast<cudaError_t>(error); }

}  // namespace
}  // namespace penstock::kernels::cuda

using penstock::kernels::cuda::AllKernels;
using penstock::kernels::cuda::Driver;
using penstock::kernels::cuda::FatBinary;
using penstock::kernels::cuda::LoadDriver;
using penstock::kernels::cuda::OfRuntime;

// The names are the objects' after kernels/CMakeLists.txt.
extern "C" {

void** penstock_cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
void penstock_cudaRegisterFatBinaryEnd(void** /*binary*/) {}
void penstock_cudaUnregisterFatBinary(void** /*binary*/) {}

void penstock_cudaRegisterFunction(void** binary, const char* stub, char* /*function*/, const char* name,
                                   int /*threads*/, void* /*thread*/, void* /*block*/, void* /*block_size*/,
                                   void* /*grid_size*/, int* /*warp*/) {
  AllKernels().Add(stub, reinterpret_cast<const FatBinary*>(binary), name);
}

cudaError_t penstock_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub,
                                         void** arguments) {
  std::string why;
  const Driver* const driver = LoadDriver(&why);
  if (driver == nullptr) return cudaErrorInsufficientDriver;
  if (config->numAttrs != 0) return cudaErrorNotSupported;
  CUfunction function = nullptr;
  CUresult error = AllKernels().Find(*driver, stub, &function);
  if (error != CUDA_SUCCESS) return OfRuntime(error);
  const dim3 &grid = config->gridDim, &block = config->blockDim;
  error = driver->LaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                               static_cast<unsigned>(config->dynamicSmemBytes), config->stream, arguments,
                               nullptr);
  return OfRuntime(error);
}

// No error is kept from one call to the next.
cudaError_t penstock_cudaGetLastError() { return cudaSuccess; }

cudaError_t penstock_cudaGetDeviceCount(int* count) {
  std::string why;
  const Driver* const driver = LoadDriver(&why);
  return driver == nullptr ? cudaErrorNoDevice : OfRuntime(driver->DeviceGetCount(count));
}

cudaError_t penstock_cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  std::string why;
  const Driver* const driver = LoadDriver(&why);
  if (driver == nullptr) return cudaErrorNoDevice;
  return OfRuntime(driver->DeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), device));
}

const char* penstock_cudaGetErrorString(cudaError_t error) {
  std::string why;
  const Driver* const driver = LoadDriver(&why);
  const char* text = nullptr;
  if (driver != nullptr) (void)driver->GetErrorString(static_cast<CUresult>(error), &text);
  return text == nullptr ? "an error of CUDA" : text;
}

// Of stubs that nobody calls: kernels are launched by cudaLaunchKernelExC alone (kernels/cuda/launch.cuh).
cudaError_t penstock_cudaGetKernel(void** /*kernel*/, const void* /*stub*/) { return cudaErrorNotSupported; }
cudaError_t penstock_cudaLaunchKernel(void* /*kernel*/, dim3 /*grid*/, dim3 /*block*/, void** /*arguments*/,
                                      size_t /*shared*/, void* /*stream*/) {
  return cudaErrorNotSupported;
}
cudaError_t penstock_cudaPopCallConfiguration(dim3* /*grid*/, dim3* /*block*/, size_t* /*shared*/,
                                              void* /*stream*/) {
  return cudaErrorNotSupported;
}

}  // extern "C"
