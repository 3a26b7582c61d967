#include "models/weights/packed_weights.h"

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/weight_code.h"

namespace penstock::models {
namespace {

constexpr const char* kVersionKey = "penstock.packed";
constexpr const char* kBits = "penstock.bits";
constexpr const char* kGroup = "penstock.group";
constexpr const char* kCompute = "penstock.compute";
constexpr const char* kVersion = "1";

}  // namespace

std::map<std::string, std::string> PackedWeights::ToMetadata() const {
  return {{kVersionKey, kVersion},
          {kBits, absl::StrCat(bits)},
          {kGroup, absl::StrCat(group)},
          {kCompute, compute == kernels::DType::kBf16 ? "bf16" : "fp32"}};
}

absl::StatusOr<std::optional<PackedWeights>> PackedWeights::Of(
    const std::map<std::string, std::string>& metadata) {
  const auto version = metadata.find(kVersionKey);
  if (version == metadata.end()) return std::nullopt;
  if (version->second != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat("packed by version \"", version->second,
                                                   "\" of the format; this Penstock knows ", kVersion));
  }
  const auto value = [&](const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? std::string() : found->second;
  };
  kernels::WeightCode code;
  uint64_t group = 0;
  const std::string compute = value(kCompute);
  const bool read = absl::SimpleAtoi(value(kBits), &code.bits) && absl::SimpleAtoi(value(kGroup), &group);
  code.group = group;
  if (!read || !code.valid() || (compute != "bf16" && compute != "fp32")) {
    return absl::InvalidArgumentError(absl::StrCat("packed with ", kBits, " \"", value(kBits), "\", ", kGroup,
                                                   " \"", value(kGroup), "\", ", kCompute, " \"", compute,
                                                   "\": not what `penstock pack` writes"));
  }
  return PackedWeights{code.bits, code.group,
                       compute == "bf16" ? kernels::DType::kBf16 : kernels::DType::kFp32};
}

}  // namespace penstock::models
