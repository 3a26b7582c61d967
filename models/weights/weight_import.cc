#include "models/weights/weight_import.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "kernels/float16.h"
#include "models/weights/stored_type.h"
#include "models/weights/weight_files.h"

namespace penstock::models {
namespace {

constexpr const char* kOutput = "lm_head.weight";

std::string Given(const std::string& label, const std::string& path) {
  return absl::StrCat(label, " ", path);
}

std::string ShapeText(const std::vector<uint64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// Scales for what is computed in few bits too, elsewhere: here it is computed in the type of the rest.
bool IsOfActivations(const std::string& name) {
  constexpr std::string_view kEndings[] = {".input_scale", ".input_scale_ub", ".output_scale",
                                           ".q_scale",     ".k_scale",        ".v_scale"};
  return std::any_of(std::begin(kEndings), std::end(kEndings),
                     [&](std::string_view ending) { return std::string_view(name).ends_with(ending); });
}

}  // namespace

absl::StatusOr<nlohmann::json> ConfigOfWeights(const std::string& path) {
  const std::string given = Given("`init_from`", path);
  ASSIGN_OR_RETURN(std::string file, MainWeightFile(path, given));
  absl::StatusOr<nlohmann::json> published = ReadJsonObject(absl::StrCat(DirectoryOf(file), "/config.json"));
  if (published.ok()) return published;
  if (!absl::IsNotFound(published.status()))
    return WrongWeights(given, std::string(published.status().message()));
  if (absl::EndsWith(file, ".json")) return nlohmann::json();
  ASSIGN_OR_RETURN(std::unique_ptr<swap::SafetensorsReader> reader, swap::SafetensorsReader::Open(file));
  const auto config = reader->metadata().find("config");
  if (config == reader->metadata().end()) return nlohmann::json();
  return ParseJsonObject(config->second, "").value_or(nlohmann::json());
}

absl::StatusOr<std::optional<PackedWeights>> PackingOf(const std::string& path) {
  ASSIGN_OR_RETURN(const PathKind kind, KindOf(path));
  if (kind == PathKind::kMissing || (kind == PathKind::kDirectory && !HasWeights(path))) return std::nullopt;
  ASSIGN_OR_RETURN(const std::string main, MainWeightFile(path, path));
  ASSIGN_OR_RETURN(const WeightFiles files, WeightFilesOf(main, path));
  ASSIGN_OR_RETURN(const auto reader, swap::SafetensorsReader::Open(files.begin()->first));
  absl::StatusOr<std::optional<PackedWeights>> packed = PackedWeights::Of(reader->metadata());
  if (!packed.ok()) return WrongWeights(path, absl::StrCat(reader->path(), ": ", packed.status().message()));
  return packed;
}

absl::StatusOr<std::unique_ptr<WeightImport>> WeightImport::Open(const std::string& path,
                                                                 ModelLayout layout) {
  return Open(path, std::move(layout), "`init_from`");
}

absl::StatusOr<std::unique_ptr<WeightImport>> WeightImport::Open(const std::string& path, ModelLayout layout,
                                                                 const std::string& label) {
  const std::string given = Given(label, path);
  std::unique_ptr<WeightImport> import(new WeightImport(given, std::move(layout)));
  RETURN_IF_ERROR(import->OpenFiles(path, given, /*coded=*/false));
  return import;
}

absl::StatusOr<std::unique_ptr<WeightImport>> WeightImport::OpenAnyCode(const std::string& path,
                                                                        ModelLayout layout,
                                                                        const std::string& label) {
  const std::string given = Given(label, path);
  std::unique_ptr<WeightImport> import(new WeightImport(given, std::move(layout)));
  RETURN_IF_ERROR(import->OpenFiles(path, given, /*coded=*/true));
  return import;
}

absl::Status WeightImport::OpenFiles(const std::string& path, const std::string& given, bool coded) {
  ASSIGN_OR_RETURN(std::string main, MainWeightFile(path, given));
  ASSIGN_OR_RETURN(const WeightFiles names, WeightFilesOf(main, given));
  takes_scaled_ = coded;
  if (coded) {
    // Weights by themselves have none; where it cannot be read, how they are coded is not guessed.
    const absl::StatusOr<nlohmann::json> config =
        ReadJsonObject(absl::StrCat(DirectoryOf(main), "/config.json"));
    if (!config.ok() && !absl::IsNotFound(config.status())) return config.status();
    if (config.ok()) RETURN_IF_ERROR(ReadQuantization(*config, &quantization_));
  }
  Sources there;
  for (const auto& [file, wanted] : names) {
    absl::StatusOr<std::unique_ptr<swap::SafetensorsReader>> reader = swap::SafetensorsReader::Open(file);
    if (absl::IsNotFound(reader.status())) return WrongWeights(given, absl::StrCat(file, " is missing"));
    RETURN_IF_ERROR(reader.status());
    for (const swap::TensorInfo& info : (*reader)->tensors()) {
      if (!wanted.empty() && wanted.count(info.name) == 0) continue;
      const bool added =
          there.emplace(WithoutPrefix(info.name), Source{.file = reader->get(), .info = &info}).second;
      if (!added) return WrongWeights(given, absl::StrCat("two tensors of the name ", info.name));
    }
    for (const std::string& name : wanted) {
      if ((*reader)->Find(name) == nullptr)
        return WrongWeights(given, absl::StrCat(file, " has no tensor ", name));
    }
    RETURN_IF_ERROR(TakePacked(**reader, coded));
    files_.push_back(std::move(*reader));
  }
  return Find(there);
}

// All files of packed weights say the same.
absl::Status WeightImport::TakePacked(const swap::SafetensorsReader& file, bool coded) {
  absl::StatusOr<std::optional<PackedWeights>> packed = PackedWeights::Of(file.metadata());
  if (!packed.ok()) return WrongWeights(path_, absl::StrCat(file.path(), ": ", packed.status().message()));
  if (packed->has_value() && !coded) {
    return WrongWeights(
        path_, absl::StrCat(file.path(), " is packed in ", (*packed)->bits,
                            " bit, which `penstock generate` reads, and training with `lora_rank` and "
                            "its state on a drive: give the directory that it was made of"));
  }
  if (!files_.empty() && packed_ != *packed)
    return WrongWeights(path_,
                        absl::StrCat(file.path(), " is packed in another way than the files before it"));
  packed_ = *packed;
  return absl::OkStatus();
}

// A coded matrix is rows of bytes, whose number tells its code.
absl::Status WeightImport::CheckCoded(const PublishedTensor& tensor, const swap::TensorInfo& info) const {
  const auto rows = static_cast<uint64_t>(tensor.rows), columns = static_cast<uint64_t>(tensor.columns);
  for (const int bits : {8, 4}) {
    const kernels::WeightCode code{bits, packed_->group};
    if (info.shape == std::vector<uint64_t>{rows, code.row_bytes(columns)}) return absl::OkStatus();
  }
  return WrongWeights(
      path_, absl::StrCat(info.name, " is ", ShapeText(info.shape), " bytes there: no code of this model's [",
                          rows, ", ", columns, "] in groups of ", packed_->group));
}

std::optional<kernels::WeightCode> WeightImport::CodeOf(size_t i) const {
  const swap::TensorInfo& info = *sources_[i].info;
  if (!packed_.has_value() || info.dtype != swap::Dtype::kU8 || sources_[i].scaled != nullptr)
    return std::nullopt;
  const kernels::WeightCode eight{8, packed_->group};
  return info.shape[1] == eight.row_bytes(static_cast<uint64_t>(layout_.tensors[i].columns))
             ? eight
             : kernels::WeightCode{4, packed_->group};
}

std::string WeightImport::WithoutPrefix(const std::string& name) const {
  for (const std::string& prefix : layout_.wrapped_prefixes) {
    if (absl::StartsWith(name, prefix)) return name.substr(prefix.size());
  }
  return std::string(absl::StripPrefix(name, layout_.prefix));
}

bool WeightImport::IsPassedOver(const std::string& name) const {
  return std::any_of(layout_.passed_over.begin(), layout_.passed_over.end(),
                     [&](const std::string& ending) { return absl::EndsWith(name, ending); }) ||
         std::any_of(layout_.other_parts.begin(), layout_.other_parts.end(),
                     [&](const std::string& part) { return absl::StartsWith(name, part); });
}

absl::Status WeightImport::TakeFp8(const PublishedTensor& tensor, const Sources& there, Source* source,
                                   std::set<std::string>* known) const {
  const std::string name = WithoutPrefix(tensor.name);
  const auto wrong = [&](const std::string& why) {
    return WrongWeights(path_, absl::StrCat(source->info->name, " is of type F8_E4M3", why));
  };
  if (tensor.transposed) return wrong(" and published turned, which is not read");
  auto scale = there.find(name + "_scale_inv");
  if (scale == there.end()) scale = there.find(name + "_scale");
  if (scale == there.end())
    return wrong(
        absl::StrCat(", without a scale: neither ", name, "_scale_inv nor ", name, "_scale is there"));
  const swap::TensorInfo& info = *scale->second.info;
  const auto block = ScaleBlock(info.shape, tensor.rows, tensor.columns, quantization_.block);
  if (!block.has_value() || !IsFloat(info.dtype)) {
    return WrongWeights(path_,
                        absl::StrCat(info.name, " is ", ShapeText(info.shape), " of ",
                                     std::string(swap::DtypeName(info.dtype)), ": no scales of a matrix of [",
                                     tensor.rows, ", ", tensor.columns, "]"));
  }
  ASSIGN_OR_RETURN(const uint64_t bytes, info.Bytes());
  std::vector<std::byte> raw(bytes);
  RETURN_IF_ERROR(scale->second.file->Read(info, 0, raw));
  std::vector<float> scales(bytes / swap::DtypeBytes(info.dtype));
  kernels::Convert(StoredType(info.dtype), raw.data(), kernels::DType::kFp32, scales.data(), scales.size());
  source->scaled =
      std::make_shared<const ScaledMatrix>(tensor.columns, block->first, block->second, std::move(scales));
  known->insert(scale->first);
  return absl::OkStatus();
}

absl::StatusOr<WeightImport::Source> WeightImport::TakeMxfp4(const PublishedTensor& tensor,
                                                             const std::string& name, uint64_t matrices,
                                                             uint64_t index, const Sources& there,
                                                             std::set<std::string>* known) const {
  const auto blocks = there.find(name + "_blocks"), scales = there.find(name + "_scales");
  if (blocks == there.end()) return Source{};
  const auto rows = static_cast<uint64_t>(tensor.rows);
  const auto groups = static_cast<uint64_t>(tensor.columns / kMxfp4Block);
  const auto is = [&](const Sources::const_iterator& at, const std::vector<uint64_t>& shape) {
    return at != there.end() && at->second.info->dtype == swap::Dtype::kU8 && at->second.info->shape == shape;
  };
  std::vector<uint64_t> of_scales = {rows, groups};
  if (matrices > 0) of_scales.insert(of_scales.begin(), matrices);
  std::vector<uint64_t> of_blocks = of_scales;
  of_blocks.push_back(kMxfp4Block / 2);
  if (tensor.transposed || tensor.columns % kMxfp4Block != 0 || !is(blocks, of_blocks) ||
      !is(scales, of_scales)) {
    return WrongWeights(path_, absl::StrCat(blocks->second.info->name, " and ", name, "_scales are not ",
                                            ShapeText(of_blocks), " and ", ShapeText(of_scales),
                                            " of U8, as this model has them in mxfp4"));
  }
  std::vector<uint8_t> exponents;
  if (matrices == 0) {
    exponents.resize(rows * groups);
    RETURN_IF_ERROR(
        scales->second.file->Read(*scales->second.info, 0, std::as_writable_bytes(std::span(exponents))));
  }
  Source source = blocks->second;
  if (matrices > 0) {
    source.first = static_cast<int64_t>(index * rows * groups * (kMxfp4Block / 2));
    source.scales_file = scales->second.file;
    source.scales_offset = scales->second.info->offset + index * rows * groups;
    source.scales_bytes = rows * groups;
  }
  source.scaled = std::make_shared<const ScaledMatrix>(tensor.columns, std::move(exponents));
  known->insert({blocks->first, scales->first});
  return source;
}

absl::StatusOr<WeightImport::Source> WeightImport::TakeOtherPlace(const PublishedTensor& tensor,
                                                                  const Sources& there,
                                                                  std::set<std::string>* known) const {
  for (const OtherPlace& place : tensor.other_places) {
    const std::string name = WithoutPrefix(place.name);
    const auto found = there.find(name);
    // Of a tensor that has whole matrices alone.
    const bool whole = tensor.columns > 0 && place.shape.size() == 3 &&
                       place.shape[1] * place.shape[2] == static_cast<uint64_t>(tensor.elements());
    if (found == there.end() && takes_scaled_ && whole) {
      const auto index = static_cast<uint64_t>(place.first / tensor.elements());
      ASSIGN_OR_RETURN(Source source, TakeMxfp4(tensor, name, place.shape.front(), index, there, known));
      if (source.file != nullptr) return source;
    }
    if (found == there.end()) continue;
    const swap::TensorInfo& info = *found->second.info;
    if (info.shape != place.shape) {
      return WrongWeights(
          path_, absl::StrCat(info.name, " is ", ShapeText(info.shape), " there and ", ShapeText(place.shape),
                              " in this model, which has ", tensor.name,
                              " in it: give the `model` that the weights were made for"));
    }
    if (!IsFloat(info.dtype)) {
      return WrongWeights(path_,
                          absl::StrCat(info.name, " is of type ", std::string(swap::DtypeName(info.dtype)),
                                       ": F32, BF16 or F16 can be taken of a tensor that holds several "
                                       "matrices"));
    }
    known->insert(name);
    Source source = found->second;
    source.first = place.first;
    source.turned = place.transposed;
    return source;
  }
  return Source{};
}

absl::Status WeightImport::Find(const Sources& there) {
  std::set<std::string> known;
  bool scaled = false;
  for (const PublishedTensor& tensor : layout_.tensors) {
    const std::string name = WithoutPrefix(tensor.name);
    known.insert(name);
    const auto found = there.find(name);
    if (found == there.end() && takes_scaled_ && tensor.columns > 0) {
      ASSIGN_OR_RETURN(Source source, TakeMxfp4(tensor, name, /*matrices=*/0, /*index=*/0, there, &known));
      if (source.scaled != nullptr) {
        scaled = true;
        sources_.push_back(std::move(source));
        continue;
      }
    }
    if (found == there.end() && !tensor.other_places.empty()) {
      ASSIGN_OR_RETURN(Source source, TakeOtherPlace(tensor, there, &known));
      if (source.file != nullptr) {
        scaled |= source.scaled != nullptr;
        sources_.push_back(std::move(source));
        continue;
      }
    }
    if (found == there.end()) {
      std::string nor = name == tensor.name ? "" : absl::StrCat(" (nor ", name, ")");
      for (const OtherPlace& place : tensor.other_places) absl::StrAppend(&nor, ", nor ", place.name);
      return WrongWeights(path_, absl::StrCat("no tensor ", tensor.name, nor, ": not weights of this model"));
    }
    const swap::TensorInfo& info = *found->second.info;
    if (packed_.has_value() && tensor.columns > 0 && info.dtype == swap::Dtype::kU8) {
      RETURN_IF_ERROR(CheckCoded(tensor, info));
      sources_.push_back(found->second);
      continue;
    }
    if (info.shape != tensor.published_shape()) {
      return WrongWeights(path_,
                          absl::StrCat(info.name, " is ", ShapeText(info.shape), " there and ",
                                       ShapeText(tensor.published_shape()),
                                       " in this model: give the `model` that the weights were made for"));
    }
    if (takes_scaled_ && tensor.columns > 0 && info.dtype == swap::Dtype::kF8E4M3) {
      Source source = found->second;
      RETURN_IF_ERROR(TakeFp8(tensor, there, &source, &known));
      scaled = true;
      sources_.push_back(std::move(source));
      continue;
    }
    if (!IsFloat(info.dtype)) {
      return WrongWeights(path_,
                          absl::StrCat(info.name, " is of type ", std::string(swap::DtypeName(info.dtype)),
                                       ": F32, BF16 or F16 can be taken",
                                       info.dtype == swap::Dtype::kF8E4M3
                                           ? ", and `penstock generate` takes F8_E4M3 with scales"
                                           : ""));
    }
    sources_.push_back(found->second);
    sources_.back().turned = tensor.transposed;
  }
  for (const auto& [name, source] : there) {
    if (known.count(name) > 0 || IsPassedOver(name)) continue;
    if (scaled && IsOfActivations(name)) continue;
    if (name != kOutput) {
      return WrongWeights(path_,
                          absl::StrCat(source.info->name,
                                       " has no place in this model: give the `model` that the weights were "
                                       "made for"));
    }
    RETURN_IF_ERROR(CheckTied(source));
  }
  return absl::OkStatus();
}

absl::Status WeightImport::CheckTied(const Source& output) {
  const Source& input = sources_.front();  // the embedding
  const auto differs = [&] {
    return WrongWeights(path_,
                        absl::StrCat(kOutput, " is not the input embedding: this model has one for both"));
  };
  if (output.info->shape != input.info->shape || !IsFloat(output.info->dtype)) return differs();
  const int64_t elements = layout_.tensors.front().elements();
  for (int64_t from = 0; from < elements; from += kBufferElements) {
    const int64_t n = std::min(kBufferElements, elements - from);
    RETURN_IF_ERROR(Load(input, from, n));
    const std::vector<float> kept(values_.begin(), values_.begin() + n);
    RETURN_IF_ERROR(Load(output, from, n));
    if (std::memcmp(kept.data(), values_.data(), static_cast<size_t>(n) * sizeof(float)) != 0)
      return differs();
  }
  return absl::OkStatus();
}

absl::Status WeightImport::Load(const Source& source, int64_t from, int64_t n) {
  const swap::Dtype dtype = source.info->dtype;
  const uint64_t width = swap::DtypeBytes(dtype);
  const auto count = static_cast<size_t>(n);
  values_.resize(std::max(values_.size(), count));
  raw_.resize(std::max<size_t>(raw_.size(), count * width));
  const std::span<std::byte> bytes(raw_.data(), count * width);
  const auto begin = static_cast<uint64_t>(source.first + from);
  absl::Status status = source.file->Read(*source.info, begin * width, bytes);
  RETURN_IF_ERROR(status);
  kernels::Convert(StoredType(dtype), bytes.data(), kernels::DType::kFp32, values_.data(), count);
  return status;
}

absl::Status WeightImport::Read(int block, int64_t first, int64_t elements, float* to) {
  std::memset(to, 0, static_cast<size_t>(elements) * sizeof(float));
  return ForTensorsIn(layout_, block, first, elements, [&](size_t i, const TensorPiece& piece) {
    return ReadTensor(i, piece.from, piece.to, to + piece.at);
  });
}

absl::Status WeightImport::ReadPlain(const Source& source, int64_t from, int64_t to, float* out) {
  while (from < to) {
    const int64_t n = std::min(kBufferElements, to - from);
    RETURN_IF_ERROR(Load(source, from, n));
    std::memcpy(out, values_.data(), static_cast<size_t>(n) * sizeof(float));
    from += n;
    out += n;
  }
  return absl::OkStatus();
}

// Elements [from, to) of the tensor as it is stored here, row by row: [rows, columns]. In the file a column
// is a row, so that a run of rows is a piece of every line there.
absl::Status WeightImport::ReadTurned(const PublishedTensor& tensor, const Source& source, int64_t from,
                                      int64_t to, float* out) {
  const int64_t columns = tensor.columns, end_row = (to + columns - 1) / columns;
  for (int64_t row = from / columns; row < end_row; row += kBufferElements) {
    const int64_t rows = std::min(kBufferElements, end_row - row);
    for (int64_t column = 0; column < columns; ++column) {
      RETURN_IF_ERROR(Load(source, column * tensor.rows + row, rows));
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (row + r) * columns + column;
        if (at >= from && at < to) out[at - from] = values_[static_cast<size_t>(r)];
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace penstock::models
