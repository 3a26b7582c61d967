// penstock._core: the compiled half of the Python package. Everything here works on addresses and numbers;
// what a tensor is, only Python knows (penstock/_buffers.py).
#include <nanobind/nanobind.h>

#include "aio/program.h"
#include "errors.h"
#include "settings.h"

namespace nb = nanobind;

namespace penstock::python {
void BindAio(nb::module_& module);
void BindEngine(nb::module_& module);
void BindBaseWeights(nb::module_& module);
void BindKernels(nb::module_& module);
void BindLlm(nb::module_& module);
void BindOptim(nb::module_& module);
void BindPrograms(nb::module_& module);
void BindRanks(nb::module_& module);
void BindState(nb::module_& module);
void BindWatch(nb::module_& module);
}  // namespace penstock::python

NB_MODULE(_core, module) {
  // Objects that live until the interpreter ends are closed by penstock/__init__.py, and are no leak.
  nb::set_leak_warnings(false);
  module.attr("__version__") = PENSTOCK_VERSION;
  penstock::python::BindErrors(module);
  penstock::python::BindAio(module);
  penstock::python::BindRanks(module);
  penstock::python::BindSettings(module);
  penstock::python::BindEngine(module);
  penstock::python::BindBaseWeights(module);
  penstock::python::BindKernels(module);
  penstock::python::BindLlm(module);
  penstock::python::BindOptim(module);
  penstock::python::BindPrograms(module);
  penstock::python::BindState(module);
  penstock::python::BindWatch(module);
}
