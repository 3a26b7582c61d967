#include "kernels/cuda/driver.h"

#include <dlfcn.h>

#include <string_view>

namespace penstock::kernels::cuda {
namespace {

struct Loaded {
  Driver driver;
  std::string why;  // it cannot be used; empty: it can
};

constexpr char kHidden[] = ": none is there, or CUDA_VISIBLE_DEVICES hides it";

template <class Call>
void Find(void* library, const char* name, Call& call, std::string& missing) {
  call = reinterpret_cast<Call>(::dlsym(library, name));
  if (call == nullptr && missing.empty()) missing = name;
}

Loaded Load() {
  Loaded loaded;
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.why = "no CUDA driver (libcuda.so.1) is installed";
    return loaded;
  }
  std::string missing;
#define PENSTOCK_CUDA_DRIVER_TEXT(function) #function
#define PENSTOCK_CUDA_DRIVER_NAME(function) PENSTOCK_CUDA_DRIVER_TEXT(function)
#define PENSTOCK_CUDA_DRIVER_FIND(name, function) \
  Find(library, PENSTOCK_CUDA_DRIVER_NAME(function), loaded.driver.name, missing);
  PENSTOCK_CUDA_DRIVER_CALLS(PENSTOCK_CUDA_DRIVER_FIND)
#undef PENSTOCK_CUDA_DRIVER_FIND
#undef PENSTOCK_CUDA_DRIVER_NAME
#undef PENSTOCK_CUDA_DRIVER_TEXT
  if (!missing.empty()) {
    loaded.why = "the CUDA driver is too old: it has no " + missing + "; a newer one of NVIDIA's has";
    return loaded;
  }
  int count = 0;
  CUresult error = loaded.driver.Init(0);
  if (error == CUDA_SUCCESS) error = loaded.driver.DeviceGetCount(&count);
  if (error != CUDA_SUCCESS) {
    const char* text = nullptr;
    (void)loaded.driver.GetErrorString(error, &text);
    loaded.why = std::string("the CUDA driver does not start: ") + (text == nullptr ? "error" : text) + " (" +
                 std::to_string(error) + ")";
    if (error == CUDA_ERROR_NO_DEVICE) loaded.why += kHidden;
    if (error == CUDA_ERROR_NOT_INITIALIZED) {
      loaded.why +=
          ": CUDA has begun in the process that this one was forked from; a process that is started by "
          "spawn can begin it";
    }
  } else if (count == 0) {
    loaded.why = std::string("the CUDA driver finds no device") + kHidden;
  }
  return loaded;
}

const Loaded& TheDriver() {
  static const Loaded& loaded = *new Loaded(Load());
  return loaded;
}

}  // namespace

const Driver* LoadDriver(std::string* why) {
  const Loaded& loaded = TheDriver();
  if (loaded.why.empty()) return &loaded.driver;
  *why = loaded.why;
  return nullptr;
}

namespace {

std::string_view WayOut(CUresult error) {
  switch (error) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return "; other processes take the device's memory too: a smaller device memory budget may fit beside "
             "them";
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
      return "; the driver is older than the kernels: a newer one of NVIDIA's takes them";
    // After these no call of the process to the device comes to an end that is good.
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_UNKNOWN:
      return "; the device is lost to this process, and the last commit stands: another process can go on "
             "from it "
             "(resume), and the kernel's log has an Xid where the device itself failed";
    default:
      return "";
  }
}

}  // namespace

std::string DriverErrorText(int error) {
  const Loaded& loaded = TheDriver();
  const auto result = static_cast<CUresult>(error);
  const char* text = nullptr;
  if (loaded.driver.GetErrorString != nullptr) (void)loaded.driver.GetErrorString(result, &text);
  return std::string(text == nullptr ? "error" : text) + " (" + std::to_string(error) + ")" +
         std::string(WayOut(result));
}

}  // namespace penstock::kernels::cuda
