// A library that is looked for when it is needed, so that nothing links it. It stays loaded until the process
// ends: CUDA does not like to be unloaded.
#ifndef PENSTOCK_AIO_LOADED_LIBRARY_H_
#define PENSTOCK_AIO_LOADED_LIBRARY_H_

#include <dlfcn.h>

#include <initializer_list>
#include <string>

namespace penstock::aio {

// The CUDA runtime, by the names that it is installed under.
inline constexpr std::initializer_list<const char*> kCudaRuntime = {"libcudart.so", "libcudart.so.13",
                                                                    "libcudart.so.12", "libcudart.so.11.0"};

class LoadedLibrary {
 public:
  // The first of these names that is there; with RTLD_NOLOAD, that the process has already.
  explicit LoadedLibrary(std::initializer_list<const char*> names, int flags = 0) {
    for (const char* name : names) {
      if (handle_ == nullptr) handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL | flags);
    }
  }
  bool loaded() const { return handle_ != nullptr; }
  // Null: no such function, or no library.
  template <typename F>
  F* Get(const char* name) const {
    return handle_ == nullptr ? nullptr : reinterpret_cast<F*>(dlsym(handle_, name));
  }
  // False if there is no such function; `missing` then has the first such name.
  template <typename F>
  bool Find(const char* name, F*& function, std::string& missing) const {
    function = Get<F>(name);
    if (function == nullptr && missing.empty()) missing = name;
    return function != nullptr;
  }

 private:
  void* handle_ = nullptr;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_LOADED_LIBRARY_H_
