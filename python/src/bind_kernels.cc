// Optimizer updates over memory, by address: what DeepSpeed's CPU optimizers do.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "gil.h"
#include "hyperparameters.h"
#include "kernels/cpu_features.h"
#include "kernels/float16.h"
#include "kernels/optimizer.h"
#include "kernels/thread_pool.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

using kernels::DType;

// The pool of this process with so many threads. A forked child has the memory of its parent's pool and not
// its threads: it makes its own, and leaves the other alone.
std::shared_ptr<kernels::ThreadPool> PoolOf(int threads) {
  static std::mutex mutex;
  static std::shared_ptr<kernels::ThreadPool>* pool = nullptr;
  static pid_t process = 0;
  static int size = 0;
  if (threads <= 1) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (pool == nullptr || process != getpid()) {
    pool = new std::shared_ptr<kernels::ThreadPool>();  // the parent's is leaked on purpose
    process = getpid();
    size = 0;
  }
  if (size != threads) {
    *pool = std::make_shared<kernels::ThreadPool>(threads);
    size = threads;
  }
  return *pool;
}

template <class Options>
auto MakeStep(const Options& options, int64_t update, double scale) {
  if constexpr (std::is_same_v<Options, kernels::AdamOptions>) {
    return kernels::MakeAdamStep(options, update, scale);
  } else if constexpr (std::is_same_v<Options, kernels::AdagradOptions>) {
    return kernels::MakeAdagradStep(options, update, scale);
  } else if constexpr (std::is_same_v<Options, kernels::LionOptions>) {
    return kernels::MakeLionStep(options, scale);
  } else if constexpr (std::is_same_v<Options, kernels::SgdOptions>) {
    return kernels::MakeSgdStep(options, update, scale);
  } else {
    return kernels::MakeLambStep(options, update, scale);
  }
}

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// fp16 states, which the kernels do not know: a block at a time as fp32, rounded to nearest on the way back.
template <class Step>
void ApplyWithFp16States(const Step& step, const kernels::UpdateArrays& all, size_t param_width,
                         size_t grad_width, kernels::ThreadPool* pool) {
  constexpr size_t kBlock = 4096;
  const auto work = [&](size_t begin, size_t end) {
    alignas(64) float m[kBlock];
    alignas(64) float v[kBlock];
    for (size_t i = begin; i < end; i += kBlock) {
      kernels::UpdateArrays a = all;
      a.n = std::min(kBlock, end - i);
      a.param = static_cast<char*>(all.param) + i * param_width;
      a.grad = static_cast<const char*>(all.grad) + i * grad_width;
      a.state_type = kernels::StateType::kFp32;
      uint16_t* const stored_m = all.m == nullptr ? nullptr : static_cast<uint16_t*>(all.m) + i;
      uint16_t* const stored_v = all.v == nullptr ? nullptr : static_cast<uint16_t*>(all.v) + i;
      if (stored_m != nullptr) kernels::Fp16ToFp32(stored_m, m, a.n);
      if (stored_v != nullptr) kernels::Fp16ToFp32(stored_v, v, a.n);
      a.m = stored_m == nullptr ? nullptr : m;
      a.v = stored_v == nullptr ? nullptr : v;
      kernels::ApplyUpdate(step, a);
      if (stored_m != nullptr) kernels::Fp32ToFp16(m, stored_m, a.n);
      if (stored_v != nullptr) kernels::Fp32ToFp16(v, stored_v, a.n);
    }
  };
  if (pool == nullptr) {
    work(0, all.n);
  } else {
    pool->ParallelFor(all.n, 4 * kBlock, work);
  }
}

void Update(const std::string& optimizer, const std::vector<double>& numbers, int64_t update, double scale,
            uint64_t n, uint64_t param, const std::string& param_type, uint64_t grad,
            const std::string& grad_type, uint64_t m, uint64_t v, const std::string& state_type,
            uint64_t copy_out, const std::string& copy_type, int threads) {
  const Hyperparameters options = MakeHyperparameters(optimizer, numbers);
  const DType type = DTypeOf(param_type);
  const DType states = DTypeOf(state_type);
  kernels::UpdateArrays arrays;
  arrays.n = n;
  arrays.param_type = type == DType::kFp32   ? kernels::ParamType::kFp32
                      : type == DType::kBf16 ? kernels::ParamType::kBf16
                                             : kernels::ParamType::kFp16;
  arrays.param = Pointer(param);
  arrays.grad_type = DTypeOf(grad_type);
  arrays.grad = Pointer(grad);
  arrays.state_type = states == DType::kBf16 ? kernels::StateType::kBf16 : kernels::StateType::kFp32;
  arrays.m = Pointer(m);
  arrays.v = Pointer(v);
  arrays.seed = static_cast<uint64_t>(update);
  if (copy_out != 0) {
    arrays.copy_out = static_cast<uint16_t*>(Pointer(copy_out));
    arrays.copy_type = DTypeOf(copy_type);
    if (type != DType::kFp32 || arrays.copy_type == DType::kFp32) {
      throw nb::value_error("a copy in 16 bits is made of float32 parameters only");
    }
  }
  const GilReleased released;
  const std::shared_ptr<kernels::ThreadPool> pool = PoolOf(threads);
  std::visit(
      [&](const auto& given) {
        using Options = std::decay_t<decltype(given)>;
        if constexpr (!std::is_same_v<Options, kernels::LambOptions>) {
          const auto step = MakeStep(given, update, scale);
          if (states == DType::kFp16) {
            ApplyWithFp16States(step, arrays, kernels::BytesPerElement(type),
                                kernels::BytesPerElement(arrays.grad_type), pool.get());
          } else {
            kernels::ApplyUpdate(step, arrays, nullptr, pool.get());
          }
        }
      },
      options);
}

}  // namespace

void BindKernels(nb::module_& module) {
  module.def("update", &Update, nb::arg("optimizer"), nb::arg("numbers"), nb::arg("update"), nb::arg("scale"),
             nb::arg("n"), nb::arg("param"), nb::arg("param_type"), nb::arg("grad"), nb::arg("grad_type"),
             nb::arg("m"), nb::arg("v"), nb::arg("state_type"), nb::arg("copy_out") = 0,
             nb::arg("copy_type") = "bfloat16", nb::arg("threads") = 1,
             "One update of n elements at the given addresses; 0 for a state that the optimizer has not.");
  module.def(
      "simd", [] { return kernels::DescribeCpu(); }, "The instructions in use, in words.");
}

}  // namespace penstock::python
