// Values of Python as JSON, and back.
#ifndef PENSTOCK_PYTHON_PYTHON_JSON_H_
#define PENSTOCK_PYTHON_PYTHON_JSON_H_

#include <nanobind/nanobind.h>

#include <nlohmann/json.hpp>
#include <string>

namespace penstock::python {

// None, booleans, numbers, text, paths, lists, tuples and mappings; of numpy and torch scalars and tensors of
// one element, and types of elements ("fp32", "bf16", "fp16", or torch's own name). `place` names the value
// in errors, and members follow it: "optimizer.params.lr".
//
// ValueError: anything else, a key that is no text, a whole number of more than 64 bits, half of a surrogate
// pair, more than 64 levels or 400,000 values. Numbers may be infinite or NaN. With the GIL held, as the
// other one.
nlohmann::ordered_json FromPython(nanobind::handle value, const std::string& place);

nanobind::object ToPython(const nlohmann::ordered_json& value);

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_PYTHON_JSON_H_
