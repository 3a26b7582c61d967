#include "tools/state/inspect_weights.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "models/families/family.h"
#include "models/weights/packed_weights.h"
#include "models/weights/weight_files.h"
#include "swap/safetensors.h"
#include "tools/base/size.h"
#include "zero/config/json_field.h"

namespace penstock::tools {
namespace {

namespace fs = std::filesystem;

struct Kind {
  int64_t tensors = 0;
  uint64_t bytes = 0;
};

struct File {
  std::string path;
  uint64_t bytes = 0;  // of tensors
  int64_t tensors = 0;
};

// Of a mixture of experts, as config.json describes it.
struct Experts {
  int64_t layers = 0, each = 0,
          chosen = 0;      // layers with a mixture, experts of one, and of those for a token
  int64_t parameters = 0;  // of an expert
};

struct Weights {
  std::optional<models::PackedWeights> packed;
  std::string form;        // fp8 or mxfp4, of matrices with scales of their own; empty: there are none
  std::string source;      // of packed ones; empty: pack did not say
  std::string model_type;  // by config.json; empty: there is none
  std::optional<Experts> experts;
  std::vector<File> files;
  std::map<std::string, Kind> kinds;  // by type

  Kind All() const {
    Kind all;
    for (const auto& [type, kind] : kinds) {
      all.tensors += kind.tensors;
      all.bytes += kind.bytes;
    }
    return all;
  }
};

absl::Status Add(const std::string& path, Weights* weights) {
  const absl::StatusOr<std::unique_ptr<swap::SafetensorsReader>> reader = swap::SafetensorsReader::Open(path);
  if (absl::IsNotFound(reader.status())) {
    return absl::DataLossError(absl::StrCat(path, " is missing: the index of these weights names it"));
  }
  RETURN_IF_ERROR(reader.status());
  const auto& metadata = (*reader)->metadata();
  absl::StatusOr<std::optional<models::PackedWeights>> packed = models::PackedWeights::Of(metadata);
  if (!packed.ok()) return absl::DataLossError(absl::StrCat(path, ": ", packed.status().message()));
  if (!weights->files.empty() && weights->packed != *packed)
    return absl::DataLossError(absl::StrCat(path, " is packed in another way than the files before it"));
  weights->packed = *packed;
  if (const auto source = metadata.find(models::kPackedSource); source != metadata.end())
    weights->source = source->second;
  File& file = weights->files.emplace_back(File{.path = path});
  for (const swap::TensorInfo& tensor : (*reader)->tensors()) {
    ASSIGN_OR_RETURN(const uint64_t bytes, tensor.Bytes());
    if (tensor.dtype == swap::Dtype::kF8E4M3) weights->form = "fp8";
    if (tensor.dtype == swap::Dtype::kU8 && tensor.name.ends_with("_blocks")) weights->form = "mxfp4";
    Kind& kind = weights->kinds[std::string(swap::DtypeName(tensor.dtype))];
    ++kind.tensors;
    kind.bytes += bytes;
    ++file.tensors;
    file.bytes += bytes;
  }
  return absl::OkStatus();
}

// nullopt: not a model that is served, or one without mixtures.
std::optional<Experts> ExpertsOf(const nlohmann::json& config) {
  const auto model = models::ModelFromJson(config);
  if (!model.ok() || !(*model)->decoder().has_value()) return std::nullopt;
  const models::Decoder decoder = *(*model)->decoder();
  const models::MixtureShape& mixture = decoder.shape.mixture;
  if (mixture.experts == 0) return std::nullopt;
  const std::vector<bool>& layers = decoder.function.mixture.layers;
  return Experts{.layers = std::count(layers.begin(), layers.end(), true),
                 .each = mixture.experts,
                 .chosen = mixture.chosen,
                 .parameters = 3 * mixture.inner * decoder.shape.width};
}

nlohmann::ordered_json ToJson(const Weights& weights) {
  nlohmann::ordered_json types = nlohmann::ordered_json::array(), files = types, packed;
  for (const auto& [type, kind] : weights.kinds)
    types.push_back({{"type", type}, {"tensors", kind.tensors}, {"bytes", kind.bytes}});
  for (const File& file : weights.files)
    files.push_back({{"path", file.path}, {"tensors", file.tensors}, {"bytes", file.bytes}});
  nlohmann::ordered_json form;
  if (!weights.form.empty()) form = weights.form;
  if (weights.packed.has_value()) {
    packed = {{"bits", weights.packed->bits},
              {"group", weights.packed->group},
              {"compute", weights.packed->compute == kernels::DType::kBf16 ? "bf16" : "fp32"},
              {"source", nullptr}};
    if (!weights.source.empty()) packed["source"] = weights.source;
  }
  nlohmann::ordered_json json = {{"packed", std::move(packed)},      {"form", form},
                                 {"model_type", weights.model_type}, {"tensors", weights.All().tensors},
                                 {"bytes", weights.All().bytes},     {"types", std::move(types)},
                                 {"files", std::move(files)}};
  if (const auto& experts = weights.experts; experts.has_value()) {
    json["experts"] = {{"layers", experts->layers},
                       {"experts_per_layer", experts->each},
                       {"experts_per_token", experts->chosen},
                       {"parameters_per_expert", experts->parameters}};
  }
  return json;
}

std::string Text(const Weights& weights) {
  const auto bytes = [](uint64_t n) { return FormatBytes(static_cast<int64_t>(n)); };
  std::string text;
  if (weights.packed.has_value()) {
    const models::PackedWeights& packed = *weights.packed;
    absl::StrAppend(&text, "packed    matrices of layers in ", packed.bits,
                    " bit, embeddings and output in 8, a bf16 scale for each ", packed.group,
                    " of a row; products in ", packed.compute == kernels::DType::kBf16 ? "bf16" : "fp32",
                    "\nsource    ", weights.source.empty() ? "not recorded" : weights.source, "\n");
  } else {
    absl::StrAppend(&text, "packed    no\n");
  }
  if (!weights.form.empty()) {
    absl::StrAppend(&text, "form      ", weights.form, ", with scales in tensors of their own: ",
                    weights.form == "fp8" ? "F8_E4M3 numbers\n" : "E2M1 numbers, two to a byte of U8\n");
  }
  if (!weights.model_type.empty()) absl::StrAppend(&text, "model     ", weights.model_type, "\n");
  if (const auto& experts = weights.experts; experts.has_value()) {
    absl::StrAppend(&text, "experts   ", experts->layers, " layers of ", experts->each, ", ", experts->chosen,
                    " of them for a token; an expert has ", experts->parameters, " parameters\n");
  }
  const Kind all = weights.All();
  std::vector<std::string> kinds;
  for (const auto& [type, kind] : weights.kinds) {
    const bool coded = type == "U8" && weights.packed.has_value();
    kinds.push_back(
        absl::StrCat(kind.tensors, coded ? " coded, " : absl::StrCat(" ", type, ", "), bytes(kind.bytes)));
  }
  absl::StrAppend(&text, "tensors   ", all.tensors, ", ", bytes(all.bytes), ": ", absl::StrJoin(kinds, "; "),
                  "\n");
  for (const File& file : weights.files)
    absl::StrAppend(&text, "file      ", file.path, "  ", file.tensors, " tensors, ", bytes(file.bytes),
                    "\n");
  return text;
}

}  // namespace

absl::StatusOr<bool> HoldsWeights(const std::string& path) {
  ASSIGN_OR_RETURN(const PathKind kind, KindOf(path));
  if (kind == PathKind::kDirectory) return models::HasWeights(path);
  const fs::path file(path);
  const bool named = file.extension() == ".safetensors" || file.filename() == models::kWeightIndex;
  return named && kind != PathKind::kMissing;
}

absl::Status InspectWeights(const std::string& path, bool json, std::ostream& out) {
  Weights weights;
  ASSIGN_OR_RETURN(const std::string main, models::MainWeightFile(path, path));
  const absl::StatusOr<models::WeightFiles> files = models::WeightFilesOf(main, path);
  if (!files.ok()) return absl::DataLossError(files.status().message());
  for (const auto& [file, tensors] : *files) RETURN_IF_ERROR(Add(file, &weights));
  const std::string config = absl::StrCat(DirectoryOf(main), "/config.json");
  const absl::StatusOr<nlohmann::json> published = ReadJsonObject(config);
  if (!published.ok() && !absl::IsNotFound(published.status())) return published.status();
  if (published.ok())
    weights.model_type = zero::JsonField<std::string>(*published, "model_type").value_or("");
  if (published.ok()) weights.experts = ExpertsOf(*published);
  if (json) {
    out << ToJson(weights).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n";
  } else {
    out << Text(weights);
  }
  out << std::flush;
  return absl::OkStatus();
}

}  // namespace penstock::tools
