#include "kernels/cuda/driver.h"

#include <dlfcn.h>

namespace penstock::kernels::cuda {
namespace {

struct Loaded {
  Driver driver;
  std::string why;  // it cannot be used; empty: it can
};

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
    loaded.why = "the CUDA driver is too old: it has no " + missing;
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
  } else if (count == 0) {
    loaded.why = "the CUDA driver finds no device: CUDA_VISIBLE_DEVICES may hide it";
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

std::string DriverErrorText(int error) {
  const Loaded& loaded = TheDriver();
  const char* text = nullptr;
  if (loaded.driver.GetErrorString != nullptr)
    (void)loaded.driver.GetErrorString(static_cast<CUresult>(error), &text);
  return std::string(text == nullptr ? "error" : text) + " (" + std::to_string(error) + ")";
}

}  // namespace penstock::kernels::cuda
