#include "zero/compute/libtorch/threads.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace penstock::zero {
namespace {

template <typename Function>
Function Symbol(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

void SetIntraOpThreads(int threads) {
  at::set_num_threads(threads);
  if (auto set = Symbol<void (*)(int)>("openblas_set_num_threads")) set(threads);
}

int IntraOpThreads() { return at::get_num_threads(); }

BlasInfo DescribeBlas() {
  auto config = Symbol<char* (*)()>("openblas_get_config");
  if (config == nullptr) {
    return {at::hasMKL() ? "MKL" : "reference BLAS (20 times slower: install libopenblas0-pthread)",
            at::hasMKL()};
  }
  BlasInfo info{config(), true};
  if (auto parallel = Symbol<int (*)()>("openblas_get_parallel")) {
    constexpr const char* kKinds[] = {"one thread", "pthreads", "OpenMP"};
    const int kind = parallel();
    if (kind >= 0 && kind < 3) absl::StrAppend(&info.name, " (", kKinds[kind], ")");
  }
  return info;
}

}  // namespace penstock::zero
