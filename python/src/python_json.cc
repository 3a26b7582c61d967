#include "python_json.h"

#include <nanobind/stl/string.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "zero/config/config_json.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

using Json = nlohmann::ordered_json;

class Reader {
 public:
  Json Read(nb::handle value, const std::string& place, int depth) {
    constexpr int kMostValues = 400'000;
    if (depth > zero::kDeepestJson) Refuse(place, "is nested deeper than any configuration");
    if (++values_ > kMostValues) Refuse(place, "has more values than any configuration");
    if (value.is_none()) return nullptr;
    if (nb::isinstance<nb::bool_>(value)) return nb::cast<bool>(value);
    if (nb::isinstance<nb::int_>(value)) return Whole(value, place);
    if (nb::isinstance<nb::float_>(value)) return nb::cast<double>(value);
    if (nb::isinstance<nb::str>(value)) return Text(value, place);
    if (nb::hasattr(value, "__fspath__")) return Text(value.attr("__fspath__")(), place);
    if (nb::isinstance<nb::list>(value) || nb::isinstance<nb::tuple>(value)) {
      Json list = Json::array();
      for (const nb::handle each : value) list.push_back(Read(each, place, depth + 1));
      return list;
    }
    if (nb::isinstance<nb::mapping>(value) && nb::hasattr(value, "items")) return Object(value, place, depth);
    const std::string module = nb::cast<std::string>(nb::str(value.type().attr("__module__")));
    const std::string name = nb::cast<std::string>(nb::str(value.type().attr("__name__")));
    if (module == "torch" && name == "dtype") return ElementType(value);
    // numpy's and torch's. What is no scalar answers otherwise.
    if (nb::hasattr(value, "item")) {
      const nb::object item = nb::steal(PyObject_CallMethod(value.ptr(), "item", nullptr));
      if (item.is_valid()) {
        if (!nb::hasattr(item, "item")) return Read(item, place, depth + 1);
      } else {
        PyErr_Clear();
      }
    }
    Refuse(place, absl::StrCat("is of the type ", name, ", which no configuration has"));
  }

 private:
  [[noreturn]] static void Refuse(const std::string& place, const std::string& why) {
    throw nb::value_error(absl::StrCat(place.empty() ? "config" : place, " ", why).c_str());
  }

  static Json Whole(nb::handle value, const std::string& place) {
    int overflow = 0;
    const long long whole = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow == 0) return static_cast<int64_t>(whole);
    const unsigned long long positive = PyLong_AsUnsignedLongLong(value.ptr());
    if (PyErr_Occurred() == nullptr) return static_cast<uint64_t>(positive);
    PyErr_Clear();
    Refuse(place, "is a number of more than 64 bits");
  }

  static Json Text(nb::handle value, const std::string& place) {
    if (nb::isinstance<nb::bytes>(value)) Refuse(place, "is a path as bytes: give it as text");
    Py_ssize_t bytes = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(value.ptr(), &bytes);
    if (text == nullptr) {
      PyErr_Clear();
      Refuse(place, "is no text that UTF-8 can write");
    }
    return std::string(text, static_cast<size_t>(bytes));
  }

  Json Object(nb::handle value, const std::string& place, int depth) {
    Json object = Json::object();
    for (const nb::handle item : value.attr("items")()) {
      const nb::tuple pair = nb::cast<nb::tuple>(item);
      if (!nb::isinstance<nb::str>(pair[0]))
        Refuse(place, absl::StrCat("has a key that is no text: ", nb::cast<std::string>(nb::repr(pair[0]))));
      const std::string key = Text(pair[0], place).get<std::string>();
      object[key] = Read(pair[1], place.empty() ? key : absl::StrCat(place, ".", key), depth + 1);
    }
    return object;
  }

  static Json ElementType(nb::handle value) {
    std::string name = nb::cast<std::string>(nb::str(value));
    name = std::string(absl::StripPrefix(name, "torch."));
    if (name == "float32") return "fp32";
    if (name == "bfloat16") return "bf16";
    if (name == "float16") return "fp16";
    return name;
  }

  int values_ = 0;
};

}  // namespace

nlohmann::ordered_json FromPython(nb::handle value, const std::string& place) {
  return Reader().Read(value, place, 0);
}

nb::object ToPython(const nlohmann::ordered_json& value) {
  switch (value.type()) {
    case Json::value_t::boolean:
      return nb::bool_(value.get<bool>());
    case Json::value_t::number_integer:
      return nb::int_(value.get<int64_t>());
    case Json::value_t::number_unsigned:
      return nb::int_(value.get<uint64_t>());
    case Json::value_t::number_float:
      return nb::float_(value.get<double>());
    case Json::value_t::string:
      return nb::str(value.get_ref<const std::string&>().c_str(), value.get_ref<const std::string&>().size());
    case Json::value_t::array: {
      nb::list list;
      for (const Json& each : value) list.append(ToPython(each));
      return list;
    }
    case Json::value_t::object: {
      nb::dict dict;
      for (const auto& [key, each] : value.items()) dict[nb::str(key.c_str(), key.size())] = ToPython(each);
      return dict;
    }
    default:
      return nb::none();
  }
}

}  // namespace penstock::python
