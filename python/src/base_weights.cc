#include "base_weights.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "errors.h"
#include "gil.h"
#include "models/weights/frozen_weights.h"
#include "models/weights/layout.h"
#include "models/weights/packed_weights.h"
#include "models/weights/weight_files.h"
#include "models/weights/weight_import.h"
#include "swap/safetensors.h"
#include "tiering/plan/byte_size.h"
#include "tools/state/base_files.h"
#include "zero/config/json_field.h"

namespace nb = nanobind;

namespace penstock::python {
namespace {

constexpr const char* kLabel = "base_weights";

models::ModelLayout LayoutOf(const GivenBase& base, const zero::Measured& model) {
  models::ModelLayout layout;
  layout.passed_over = base.passed_over;
  for (size_t b = 0; b < model.layouts.size(); ++b) {
    const zero::FlatLayout& of_block = *model.layouts[tiering::BlockIndex(b)];
    layout.block_elements.push_back(of_block.elements);
    for (const size_t p : of_block.InOrder()) {
      const zero::Parameter& parameter = of_block.parameters[p];
      if (parameter.trains || parameter.elements == 0) continue;
      models::PublishedTensor tensor = {.name = base.names.at(b).at(p),
                                        .block = static_cast<int>(b),
                                        .offset = parameter.offset,
                                        .rows = parameter.elements};
      if (parameter.sizes.size() == 2) {
        tensor.rows = parameter.sizes[0];
        tensor.columns = parameter.sizes[1];
      } else if (parameter.sizes.size() != 1) {
        tensor.shape.emplace(parameter.sizes.begin(), parameter.sizes.end());
      }
      layout.tensors.push_back(std::move(tensor));
    }
  }
  return layout;
}

absl::StatusOr<std::string> Take(const GivenBase& base, const zero::Measured& model,
                                 zero::EngineOptions* options) {
  nlohmann::json record = base.record;
  std::string path = base.path;
  if (!record.is_null()) {
    ASSIGN_OR_RETURN(record, tools::CompareBase(base.record, path, tools::BaseCheck::kTimes, /*quiet=*/true));
    path = tools::PathOfBase(record);
  }
  absl::StatusOr<std::unique_ptr<models::FrozenWeights>> weights =
      models::FrozenWeights::Open(path, LayoutOf(base, model), options->dtype, kLabel);
  if (absl::IsUnimplemented(weights.status())) {
    return absl::InvalidArgumentError(
        absl::StrCat(kLabel, " ", path, " cannot be read where it lies: ", weights.status().message(),
                     ": save the model in the type that it is trained in, or pack it (penstock pack)"));
  }
  RETURN_IF_ERROR(weights.status());
  if (record.is_null()) {
    ASSIGN_OR_RETURN(
        record, tools::RecordBase(path, (*weights)->Paths(), /*checks=*/!base.is_planned, /*quiet=*/true));
    options->resume.run[tools::kBaseKey] = record;
  } else {
    RETURN_IF_ERROR(tools::CheckSameFiles((*weights)->Paths(), record));
    if (record != base.record) options->resume.run_changes[tools::kBaseKey] = record;
  }
  const int bits = (*weights)->bits();
  std::string line =
      absl::StrCat("the weights of frozen parameters, ", tiering::FormatBytes(tools::BaseBytes(record)),
                   bits > 0 ? absl::StrCat(" in ", bits, " bit") : "", ", are read where they lie, in ",
                   tools::PathOfBase(record), ", and copied nowhere");
  options->frozen = *std::move(weights);
  return line;
}

// And in how many bits they are packed; 0: they are not.
absl::StatusOr<std::pair<std::vector<std::string>, int>> NamesIn(const std::string& path) {
  const std::string given = absl::StrCat(kLabel, " ", path);
  ASSIGN_OR_RETURN(const std::string main, models::MainWeightFile(path, given));
  ASSIGN_OR_RETURN(const models::WeightFiles files, models::WeightFilesOf(main, given));
  std::vector<std::string> names;
  for (const auto& [file, wanted] : files) {
    names.insert(names.end(), wanted.begin(), wanted.end());
    if (!wanted.empty()) continue;
    ASSIGN_OR_RETURN(const auto reader, swap::SafetensorsReader::Open(file));
    for (const swap::TensorInfo& info : reader->tensors()) names.push_back(info.name);
  }
  ASSIGN_OR_RETURN(const std::optional<models::PackedWeights> packed, models::PackingOf(path));
  return std::pair(std::move(names), packed.has_value() ? packed->bits : 0);
}

}  // namespace

absl::Status BaseInPython(const absl::Status& status) {
  return {status.code(), absl::StrReplaceAll(std::string(status.message()),
                                             {{tools::kBaseWayOut, "say where they are (base_weights=DIR)"},
                                              {"give the `model` that the weights were made for",
                                               "give the directory that has this model's weights"},
                                              {"--model ", "base_weights "},
                                              {"leave the flag out", "leave it out"}})};
}

GivenBase MakeBase(const nlohmann::json& base) {
  GivenBase made;
  if (!base.is_object()) return made;
  try {
    made.given = true;
    made.path = base.at("path").get<std::string>();
    made.names = base.at("names").get<std::vector<std::vector<std::string>>>();
    made.passed_over = base.at("passed_over").get<std::vector<std::string>>();
    made.record = base.at("record");
    made.is_planned = base.at("is_planned").get<bool>();
  } catch (const nlohmann::json::exception& error) {
    throw nb::value_error(absl::StrCat("base: ", error.what()).c_str());
  }
  return made;
}

absl::StatusOr<std::string> TakeBase(const GivenBase& base, const zero::Measured& model,
                                     zero::EngineOptions* options) {
  absl::StatusOr<std::string> line = Take(base, model, options);
  if (!line.ok()) return BaseInPython(line.status());
  return line;
}

void BindBaseWeights(nb::module_& module) {
  module.def(
      "names_of_weights",
      [](const std::string& path) {
        absl::StatusOr<std::pair<std::vector<std::string>, int>> names;
        {
          const GilReleased released;
          names = NamesIn(path);
        }
        if (!names.ok()) Raise(BaseInPython(names.status()), {.path = path});
        return *std::move(names);
      },
      nb::arg("path"),
      "The names of the tensors in a directory of safetensors, and the bits that matrices are packed in; 0: "
      "they are not packed.");
}

}  // namespace penstock::python
