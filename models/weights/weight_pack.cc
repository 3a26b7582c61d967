#include "models/weights/weight_pack.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/atomic_file.h"
#include "base/status_macros.h"
#include "kernels/float16.h"
#include "kernels/weight_code.h"
#include "models/weights/packed_weights.h"
#include "swap/safetensors.h"

namespace penstock::models {
namespace {

constexpr int64_t kPieceElements = 4 << 20;  // 16 MiB of fp32: rows that are coded at once

bool IsMatrix(const PublishedTensor& tensor) { return tensor.columns > 0; }

struct Planned {
  size_t index = 0;  // of layout.tensors
  swap::TensorInfo info;
  std::optional<kernels::WeightCode> code;
  uint64_t bytes = 0;
};

class Packer {
 public:
  Packer(WeightImport* import, const ModelLayout& layout, const std::string& directory,
         const PackOptions& options)
      : import_(*import), layout_(layout), directory_(directory), options_(options) {}

  absl::StatusOr<PackResult> Run() {
    if (import_.packed().has_value()) return absl::FailedPreconditionError("packed already");
    packed_ = {options_.bits, options_.group, ComputeType()};
    RETURN_IF_ERROR(Plan());
    for (size_t i = 0; i < shards_.size(); ++i) RETURN_IF_ERROR(WriteShard(i));
    if (shards_.size() > 1) RETURN_IF_ERROR(WriteIndex());
    result_.files = static_cast<int>(shards_.size());
    result_.mean_error = squares_ == 0 ? 0 : std::sqrt(errors_ / squares_);
    return result_;
  }

 private:
  // As generation computes with what was not coded: bf16 where all matrices are.
  kernels::DType ComputeType() const {
    for (size_t i = 0; i < layout_.tensors.size(); ++i) {
      if (IsMatrix(layout_.tensors[i]) && options_.whole.count(layout_.tensors[i].name) == 0 &&
          import_.PlaceOf(i).dtype != swap::Dtype::kBf16)
        return kernels::DType::kFp32;
    }
    return kernels::DType::kBf16;
  }

  int BitsOf(const PublishedTensor& tensor) const {
    return tensor.block == 0 || tensor.rows == options_.vocabulary ? 8 : options_.bits;
  }

  absl::Status Plan() {
    uint64_t in_shard = 0;
    for (size_t i = 0; i < layout_.tensors.size(); ++i) {
      const PublishedTensor& tensor = layout_.tensors[i];
      Planned planned;
      planned.index = i;
      planned.info = {tensor.name, import_.PlaceOf(i).dtype, tensor.published_shape(), 0};
      if (IsMatrix(tensor) && options_.whole.count(tensor.name) == 0) {
        planned.code = {BitsOf(tensor), options_.group};
        planned.info.dtype = swap::Dtype::kU8;
        planned.info.shape = {static_cast<uint64_t>(tensor.rows),
                              planned.code->row_bytes(static_cast<size_t>(tensor.columns))};
      }
      ASSIGN_OR_RETURN(planned.bytes, planned.info.Bytes());
      result_.bytes += planned.bytes;
      if (shards_.empty() || (in_shard > 0 && in_shard + planned.bytes > options_.max_shard_bytes)) {
        shards_.emplace_back();
        in_shard = 0;
      }
      in_shard += planned.bytes;
      shards_.back().push_back(std::move(planned));
    }
    return absl::OkStatus();
  }

  std::string NameOf(size_t shard) const {
    if (shards_.size() == 1) return "model.safetensors";
    return absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1, shards_.size());
  }

  absl::Status WriteShard(size_t number) {
    std::vector<swap::TensorInfo> infos;
    for (const Planned& planned : shards_[number]) infos.push_back(planned.info);
    std::map<std::string, std::string> metadata = packed_.ToMetadata();
    metadata["format"] = "pt";
    if (!options_.source.empty()) metadata[kPackedSource] = options_.source;
    ASSIGN_OR_RETURN(const std::unique_ptr<swap::SafetensorsWriter> writer,
                     swap::SafetensorsWriter::Create(absl::StrCat(directory_, "/", NameOf(number)),
                                                     std::move(infos), metadata));
    for (const Planned& planned : shards_[number]) {
      RETURN_IF_ERROR(planned.code.has_value() ? WriteCoded(planned, writer.get())
                                               : WritePlain(planned, writer.get()));
    }
    return writer->Finish();
  }

  absl::Status WriteCoded(const Planned& planned, swap::SafetensorsWriter* writer) {
    const PublishedTensor& tensor = layout_.tensors[planned.index];
    const auto columns = static_cast<size_t>(tensor.columns);
    const size_t row_bytes = planned.code->row_bytes(columns);
    const int64_t at_once = std::clamp<int64_t>(kPieceElements / tensor.columns, 1, tensor.rows);
    values_.resize(static_cast<size_t>(at_once * tensor.columns));
    coded_.resize(static_cast<size_t>(at_once) * row_bytes);
    back_.resize(columns);
    for (int64_t row = 0; row < tensor.rows; row += at_once) {
      const int64_t rows = std::min(at_once, tensor.rows - row);
      RETURN_IF_ERROR(import_.ReadTensor(planned.index, row * tensor.columns, (row + rows) * tensor.columns,
                                         values_.data()));
      for (int64_t r = 0; r < rows; ++r) {
        const float* from = values_.data() + static_cast<size_t>(r) * columns;
        uint8_t* const to = coded_.data() + static_cast<size_t>(r) * row_bytes;
        if (!kernels::EncodeWeights(*planned.code, from, columns, to)) {
          return absl::DataLossError(absl::StrCat(tensor.name, ": row ", row + r,
                                                  " has a value that is not finite: it cannot be coded"));
        }
        Compare(*planned.code, from, to, columns);
      }
      RETURN_IF_ERROR(
          Append(writer, std::as_bytes(std::span(coded_)).first(static_cast<size_t>(rows) * row_bytes)));
    }
    return absl::OkStatus();
  }

  void Compare(const kernels::WeightCode& code, const float* row, const uint8_t* coded, size_t columns) {
    kernels::DecodeWeights(code, coded, columns, kernels::DType::kFp32, back_.data());
    double errors = 0, squares = 0;
    for (size_t i = 0; i < columns; ++i) {
      const double value = row[i], error = static_cast<double>(back_[i]) - value;
      errors += error * error;
      squares += value * value;
    }
    errors_ += errors;
    squares_ += squares;
  }

  // Exact: fp32 holds all types, and converts back.
  absl::Status WritePlain(const Planned& planned, swap::SafetensorsWriter* writer) {
    const PublishedTensor& tensor = layout_.tensors[planned.index];
    const auto n = static_cast<size_t>(tensor.elements());
    values_.resize(n);
    RETURN_IF_ERROR(import_.ReadTensor(planned.index, 0, tensor.elements(), values_.data()));
    if (planned.info.dtype == swap::Dtype::kF32) return Append(writer, std::as_bytes(std::span(values_)));
    std::vector<uint16_t> narrow(n);
    kernels::Convert(kernels::DType::kFp32, values_.data(),
                     planned.info.dtype == swap::Dtype::kBf16 ? kernels::DType::kBf16 : kernels::DType::kFp16,
                     narrow.data(), n);
    return Append(writer, std::as_bytes(std::span(narrow)));
  }

  absl::Status Append(swap::SafetensorsWriter* writer, std::span<const std::byte> bytes) {
    RETURN_IF_ERROR(writer->Append(bytes));
    done_ += bytes.size();
    if (options_.progress) options_.progress(done_, result_.bytes);
    return absl::OkStatus();
  }

  absl::Status WriteIndex() const {
    nlohmann::ordered_json map = nlohmann::ordered_json::object();
    for (size_t i = 0; i < shards_.size(); ++i) {
      for (const Planned& planned : shards_[i]) map[planned.info.name] = NameOf(i);
    }
    const nlohmann::ordered_json index = {{"metadata", {{"total_size", result_.bytes}}},
                                          {"weight_map", std::move(map)}};
    return ReplaceFile(absl::StrCat(directory_, "/model.safetensors.index.json"), index.dump(2) + "\n",
                       {.replace = false});
  }

  WeightImport& import_;
  const ModelLayout& layout_;
  const std::string directory_;
  const PackOptions& options_;
  PackedWeights packed_;
  std::vector<std::vector<Planned>> shards_;
  std::vector<float> values_, back_;
  std::vector<uint8_t> coded_;
  double errors_ = 0, squares_ = 0;
  uint64_t done_ = 0;
  PackResult result_;
};

}  // namespace

absl::StatusOr<PackResult> PackWeights(WeightImport* import, const ModelLayout& layout,
                                       const std::string& directory, const PackOptions& options) {
  return Packer(import, layout, directory, options).Run();
}

}  // namespace penstock::models
