#include "settings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/status_macros.h"
#include "errors.h"
#include "python_json.h"
#include "run/elasticity.h"
#include "run/optimizer_options.h"
#include "run/settings.h"
#include "run/unused_keys.h"
#include "zero/compute/tile_format.h"
#include "zero/config/mode_names.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

using Json = nlohmann::ordered_json;

void CheckFinite(const Json& value, const std::string& place) {
  if (value.is_object()) {
    for (const auto& [key, each] : value.items())
      CheckFinite(each, place.empty() ? key : absl::StrCat(place, ".", key));
  } else if (value.is_array()) {
    for (const Json& each : value) CheckFinite(each, place);
  } else if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const run::Setting* const setting = run::FindKey(place);
    const std::string infinite(setting != nullptr ? setting->infinite : "");
    throw nb::value_error(absl::StrCat(place, " is ", value.get<double>(),
                                       ": a configuration has finite numbers",
                                       infinite.empty() ? "" : absl::StrCat(" (", infinite, " for no bound)"))
                              .c_str());
  }
}

[[noreturn]] void RaiseNotThere(const std::string& path) {
  const nb::object error = nb::handle(PyExc_FileNotFoundError)(
      ENOENT, "config is no file that is there, nor a configuration in base64", path);
  PyErr_SetObject(PyExc_FileNotFoundError, error.ptr());
  throw nb::python_error();
}

// The text of a configuration in base64, DeepSpeed's or the common one; nullopt: it is no such text.
std::optional<std::string> FromBase64(const std::string& given) {
  std::string text;
  if (!absl::WebSafeBase64Unescape(given, &text) && !absl::Base64Unescape(given, &text)) return std::nullopt;
  PyObject* const decoded = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
  if (decoded == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  Py_DECREF(decoded);
  return text;
}

// The keys of the ranks' common configuration are sorted.
std::string SharedConfig(const PySettings& settings) {
  if (!settings.config().has_value()) return "{}";
  Json config = *settings.config();
  run::RemoveWhatRanksMayDifferIn(&config);
  return nlohmann::json(config).dump();
}

nb::object Wandb(const run::Config& config) {
  if (!config.wandb.on()) return nb::none();
  nb::dict dict;
  for (const auto& [name, value] : {std::pair{"project", &config.wandb.project},
                                    {"group", &config.wandb.group},
                                    {"team", &config.wandb.team}}) {
    if (value->has_value()) dict[name] = nb::str((*value)->c_str());
  }
  return dict;
}

nb::dict MonitorDirectories(const run::Config& config) {
  nb::dict dict;
  for (const auto& [name, monitor] :
       {std::pair{"csv_monitor", &config.csv_monitor}, {"tensorboard", &config.tensorboard}}) {
    if (monitor->on() && !monitor->output_path.value_or("").empty())
      dict[name] = nb::str(monitor->output_path->c_str());
  }
  return dict;
}

nb::dict FlopsProfiler(const run::Config& config) {
  nb::dict dict;
  dict["enabled"] = config.flops_profiler.on();
  dict["profile_step"] = config.flops_profiler.profile_step.value_or(1);
  dict["output_file"] = nb::str(config.flops_profiler.output_file.value_or("").c_str());
  return dict;
}

// What a configuration's elasticity chooses: train_batch, the numbers of ranks that can share it, and for
// `world` of them (0: nobody asks) the micro_batch of each.
absl::StatusOr<Json> ElasticBatch(const Json& config, int world) {
  ASSIGN_OR_RETURN(const run::ParsedConfig parsed, run::ParseConfigJson(config));
  const run::ElasticityConfig& elasticity = parsed.config.elasticity;
  ASSIGN_OR_RETURN(const run::ElasticBatch batch, run::ComputeElasticBatch(elasticity));
  Json json = {{"train_batch", batch.train_batch}, {"ranks", batch.ranks}, {"micro_batch", nullptr}};
  if (world > 0) {
    ASSIGN_OR_RETURN(const int64_t micro, run::ElasticMicroBatch(elasticity, batch, world));
    json["micro_batch"] = micro;
  }
  return json;
}

}  // namespace

std::optional<nlohmann::ordered_json> ConfigFromPython(nb::handle config) {
  if (config.is_none()) return std::nullopt;
  if (nb::isinstance<nb::str>(config) || nb::hasattr(config, "__fspath__")) {
    const std::string path = FromPython(config, "config").get<std::string>();
    const absl::StatusOr<bool> there = PathExists(path);
    if (there.ok() && *there) return ValueOrRaise(run::ReadConfig(path));
    const std::optional<std::string> text = FromBase64(path);
    if (text.has_value()) return ValueOrRaise(run::ConfigObject(*text));
    RaiseUnlessOk(there.status(), {.path = path});
    RaiseNotThere(path);
  }
  if (!nb::isinstance<nb::mapping>(config) || !nb::hasattr(config, "items")) {
    throw nb::type_error(
        absl::StrCat("config is a dictionary, the path of a JSON file or such a text in base64, not ",
                     nb::cast<std::string>(nb::str(config.type().attr("__name__"))))
            .c_str());
  }
  Json given = FromPython(config, "");
  // accelerate gives steps_per_print as inf.
  if (const auto found = given.find("steps_per_print");
      found != given.end() && found->is_number_float() && std::isinf(found->get<double>()))
    given.erase(found);
  CheckFinite(given, "");
  return given;
}

PySettings::PySettings(nb::handle config, const nb::dict& keywords, int world, bool needs_place)
    : config_(ConfigFromPython(config)) {
  run::Keywords given;
  for (const auto& [keyword, value] : keywords) {
    const std::string name = nb::cast<std::string>(nb::str(keyword));
    given[name] = FromPython(value, name);
  }
  resolved_ =
      ValueOrRaise(run::Resolve(config_.has_value() ? &*config_ : nullptr, given, world, needs_place));
}

void BindSettings(nb::module_& module) {
  module.def(
      "config_of",
      [](nb::handle config) -> nb::object {
        return ToPython(ConfigFromPython(config).value_or(Json::object()));
      },
      nb::arg("config").none(), nb::sig("def config_of(config: object) -> dict[str, typing.Any]"),
      "A configuration (a dictionary, a path, base64, None) as plain values.");
  module.def(
      "elastic_batch",
      [](nb::handle config, int world) {
        return ToPython(ValueOrRaise(ElasticBatch(ConfigFromPython(config).value_or(Json::object()), world)));
      },
      nb::arg("config"), nb::arg("world") = 0,
      nb::sig("def elastic_batch(config: object, world: int = 0) -> dict[str, typing.Any]"),
      "What a configuration's elasticity chooses: train_batch, ranks, and micro_batch of a world.");
  module.def(
      "deepspeed_answers", [] { return ToPython(Json(run::DeepSpeedAnswers())); },
      nb::sig("def deepspeed_answers() -> dict[str, dict[str, typing.Any]]"),
      "What DeepSpeed's engine answers of its configuration, by call: the paths of the key, and a default.");
  using Self = const PySettings&;
  nb::class_<PySettings>(
      module, "Settings",
      "What a training is made with: a configuration, and keywords of initialize, which win. "
      "Sizes in bytes.")
      .def(nb::init<nb::handle, const nb::dict&, int, bool>(), nb::arg("config").none(), nb::arg("keywords"),
           nb::arg("world") = 1, nb::arg("needs_place") = true,
           nb::sig("def __init__(self, config: object, keywords: dict[str, typing.Any], world: int = 1, "
                   "needs_place: bool = True) -> None"))
      .def_prop_ro("notes", [](Self self) { return self.resolved().notes; })
      .def(
          "unused_device_keys",
          [](Self self, const std::string& where) {
            return run::UnusedDeviceKeys(self.resolved().config, where);
          },
          nb::arg("where"),
          "A line for each setting of a device's memory, which has no effect `where` the engine uses none.")
      .def_prop_ro(
          "config", [](Self self) -> nb::object { return ToPython(self.config().value_or(Json::object())); },
          nb::sig("def config(self) -> dict[str, typing.Any]"))
      .def("shared_config", &SharedConfig, "What ranks must agree in of the configuration, with sorted keys.")
      .def_prop_ro("dtype", [](Self self) { return std::string(zero::DTypeName(self.resolved().dtype)); })
      .def_prop_ro("offload", [](Self self) { return std::string(zero::Name(self.resolved().offload)); })
      .def_prop_ro("state_dirs", [](Self self) { return self.resolved().directories.paths; })
      .def_prop_ro(
          "host_memory",
          [](Self self) { return self.resolved().config.penstock.host_memory_budget_bytes.value_or(0); })
      .def_prop_ro(
          "device_memory",
          [](Self self) { return self.resolved().config.penstock.device_memory_budget_bytes.value_or(0); })
      .def_prop_ro(
          "saved_activations",
          [](Self self) {
            const auto& said = self.resolved().config.penstock.saved_activations;
            return std::string(said.has_value() ? zero::NameIn(zero::NamesOf(*said), *said) : "auto");
          })
      .def_prop_ro("micro_batches", [](Self self) { return self.resolved().micro_batches; })
      .def_prop_ro("forwards", [](Self self) { return self.resolved().forwards; })
      .def_prop_ro("train_batch_size",
                   [](Self self) { return self.resolved().config.train_batch_size.value_or(0); })
      .def_prop_ro("micro_batch_size", [](Self self) { return self.resolved().micro_batch_size.value_or(0); })
      .def_prop_ro("blocks", [](Self self) { return self.resolved().config.penstock.blocks; })
      .def_prop_ro("seed", [](Self self) { return self.resolved().config.penstock.seed; })
      .def_prop_ro("chosen_device", [](Self self) { return self.resolved().config.penstock.device; })
      .def_prop_ro("draws_progress", [](Self self) { return self.resolved().config.penstock.progress; })
      .def_prop_ro("chosen_rank_timeout",
                   [](Self self) { return self.resolved().config.penstock.rank_timeout; })
      .def_prop_ro("resumes_any_ranks",
                   [](Self self) { return self.resolved().config.penstock.resume_ranks == "any"; })
      .def_prop_ro("logits_chunk_size",
                   [](Self self) { return self.resolved().config.penstock.logits_chunk_size; })
      .def_prop_ro(
          "chunked_modules",
          [](Self self) {
            return self.resolved().config.penstock.chunked_modules.value_or(std::vector<std::string>());
          })
      .def_prop_ro("chunk_size", [](Self self) { return self.resolved().config.penstock.chunk_size; })
      .def_prop_ro("base_weights",
                   [](Self self) { return self.resolved().config.penstock.base_weights.value_or(""); })
      .def_prop_ro(
          "managed",
          [](Self self) { return self.resolved().config.managed_gradient_accumulation.value_or(true); })
      .def_prop_ro(
          "kept", [](Self self) { return ToPython(Json(run::KeptFromPython(self.resolved().config))); },
          nb::sig("def kept(self) -> dict[str, typing.Any]"),
          "What a resumed run may be given another value of, by key.")
      .def_prop_ro(
          "optimizer",
          [](Self self) { return ToPython(Json(run::DescribeOptimizer(self.resolved().config.optimizer))); },
          nb::sig("def optimizer(self) -> dict[str, typing.Any] | None"))
      .def_prop_ro(
          "optimizer_states",
          [](Self self) { return self.resolved().config.penstock.optimizer_states.value_or("fp32"); })
      .def_prop_ro("missing_gradients",
                   [](Self self) {
                     return std::string(zero::Name(self.resolved().config.penstock.missing_gradients.value_or(
                         zero::MissingGradients::kSkip)));
                   })
      .def_prop_ro(
          "schedule",
          [](Self self) {
            const auto& schedule = self.resolved().schedule;
            return schedule.has_value() ? ToPython(Json(schedule->ToJson())) : nb::none();
          },
          nb::sig("def schedule(self) -> dict[str, typing.Any] | None"))
      .def_prop_ro(
          "wear_budget",
          [](Self self) { return self.resolved().config.penstock.wear_budget_tb.value_or(0) * 1e12; })
      .def_prop_ro("monitors",
                   [](Self self) {
                     const run::Config& config = self.resolved().config;
                     return config.csv_monitor.on() || config.tensorboard.on();
                   })
      .def_prop_ro(
          "monitor_directories", [](Self self) { return MonitorDirectories(self.resolved().config); },
          nb::sig("def monitor_directories(self) -> dict[str, str]"))
      .def_prop_ro(
          "wandb", [](Self self) { return Wandb(self.resolved().config); },
          nb::sig("def wandb(self) -> dict[str, str] | None"))
      .def_prop_ro(
          "flops_profiler", [](Self self) { return FlopsProfiler(self.resolved().config); },
          nb::sig("def flops_profiler(self) -> dict[str, typing.Any]"));
}

}  // namespace penstock::python
