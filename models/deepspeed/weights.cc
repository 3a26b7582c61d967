#include "models/deepspeed/weights.h"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/directory.h"
#include "base/status_macros.h"
#include "kernels/float16.h"
#include "models/weights/stored_type.h"

namespace penstock::models {
namespace {

constexpr int64_t kAtOnce = int64_t{1} << 20;  // 4 MiB of values

using Weight = DeepSpeedCheckpoint::Weight;

int64_t ElementsOf(const Weight& weight) {
  return weight.other.has_value() ? weight.other->elements : weight.values.elements();
}

swap::Dtype TypeOf(const Weight& weight, swap::Dtype wanted) {
  return weight.other.has_value() ? weight.other->dtype : wanted;
}

// Those of wide types first, so that each lies at a multiple of its width.
std::vector<const Weight*> InOrder(const DeepSpeedCheckpoint& checkpoint, swap::Dtype wanted) {
  std::vector<const Weight*> weights;
  for (const Weight& weight : checkpoint.weights()) weights.push_back(&weight);
  std::stable_sort(weights.begin(), weights.end(), [&](const Weight* a, const Weight* b) {
    return swap::DtypeBytes(TypeOf(*a, wanted)) > swap::DtypeBytes(TypeOf(*b, wanted));
  });
  return weights;
}

absl::Status WriteOther(const DeepSpeedCheckpoint& checkpoint, const TorchTensor& tensor,
                        swap::SafetensorsWriter* writer) {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.elements) * swap::DtypeBytes(tensor.dtype));
  RETURN_IF_ERROR(checkpoint.ReadModuleBuffer(tensor, bytes));
  return writer->Append(bytes);
}

}  // namespace

absl::StatusOr<int64_t> WriteDeepSpeedWeights(const DeepSpeedCheckpoint& checkpoint,
                                              const DeepSpeedWeightsOptions& options) {
  ASSIGN_OR_RETURN(const bool there, PathExists(options.path));
  if (there && !options.overwrite)
    return absl::AlreadyExistsError(
        absl::StrCat(options.path, " is there already (`overwrite` replaces it)"));
  const std::vector<const Weight*> weights = InOrder(checkpoint, options.dtype);
  std::vector<swap::TensorInfo> tensors;
  int64_t elements = 0;
  for (const Weight* weight : weights) {
    tensors.push_back(
        {weight->name, TypeOf(*weight, options.dtype), {weight->sizes.begin(), weight->sizes.end()}, 0});
    elements += ElementsOf(*weight);
  }
  ASSIGN_OR_RETURN(std::unique_ptr<swap::SafetensorsWriter> writer,
                   swap::SafetensorsWriter::Create(
                       options.path, std::move(tensors),
                       {{"format", "pt"}, {"deepspeed_step", absl::StrCat(checkpoint.progress().step)}},
                       options.overwrite));
  const kernels::DType type = StoredType(options.dtype);
  std::vector<float> values(static_cast<size_t>(kAtOnce));
  std::vector<std::byte> converted(static_cast<size_t>(kAtOnce) * swap::DtypeBytes(options.dtype));
  ReadBuffer buffer;
  uint64_t done = 0;
  for (const Weight* weight : weights) {
    if (weight->other.has_value()) {
      RETURN_IF_ERROR(WriteOther(checkpoint, *weight->other, writer.get()));
      done += static_cast<uint64_t>(weight->other->elements) * swap::DtypeBytes(weight->other->dtype);
      if (options.progress) options.progress(done, writer->data_bytes());
      continue;
    }
    for (int64_t from = 0; from < weight->values.elements(); from += kAtOnce) {
      const int64_t n = std::min(kAtOnce, weight->values.elements() - from);
      const auto count = static_cast<size_t>(n);
      RETURN_IF_ERROR(weight->values.Read(from, n, values.data(), &buffer));
      kernels::Convert(kernels::DType::kFp32, values.data(), type, converted.data(), count);
      const auto bytes = std::span(converted).first(count * swap::DtypeBytes(options.dtype));
      RETURN_IF_ERROR(writer->Append(bytes));
      done += bytes.size();
      if (options.progress) options.progress(done, writer->data_bytes());
    }
  }
  RETURN_IF_ERROR(checkpoint.CheckRead());
  RETURN_IF_ERROR(writer->Finish());
  return elements;
}

}  // namespace penstock::models
