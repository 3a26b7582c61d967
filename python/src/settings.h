// The settings of a training, as Python gives them and reads them.
#ifndef PENSTOCK_PYTHON_SETTINGS_H_
#define PENSTOCK_PYTHON_SETTINGS_H_

#include <nanobind/nanobind.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "run/resolve.h"

namespace penstock::python {

// run::Resolve's, and the configuration that they are made of.
class PySettings {
 public:
  // config: what DeepSpeed takes for one, or None (ConfigFromPython). keywords: a dictionary, those of
  // penstock.initialize; None in it is not given. Throws ValueError, FileNotFoundError, TypeError.
  PySettings(nanobind::handle config, const nanobind::dict& keywords, int world, bool needs_place);

  const run::Resolved& resolved() const { return resolved_; }
  const std::optional<nlohmann::ordered_json>& config() const { return config_; }

 private:
  std::optional<nlohmann::ordered_json> config_;
  run::Resolved resolved_;
};

// A configuration: a dictionary, the path of a file of HJSON (zero/config/config_json.h), or such a text in
// base64. nullopt for None. Throws ValueError, also where a number in it is not finite; FileNotFoundError:
// text that is neither a path nor base64; TypeError: anything else.
std::optional<nlohmann::ordered_json> ConfigFromPython(nanobind::handle config);

// Adds Settings, and functions of configurations, to the module.
void BindSettings(nanobind::module_& module);

}  // namespace penstock::python

#endif  // PENSTOCK_PYTHON_SETTINGS_H_
