// What the header of a safetensors file says about weights that `penstock pack` coded.
//
// The file's metadata have "penstock.packed" (version, now 1), "penstock.bits", "penstock.group" and
// "penstock.compute". A coded matrix is a U8 tensor under its own name, [rows, bytes of a row]: rows as
// kernels/weight_code.h lays them out, of [out, in] whatever the family publishes. Its row length says
// whether it has 8 or 4 bit. All other tensors are as they were.
#ifndef PENSTOCK_MODELS_WEIGHTS_PACKED_WEIGHTS_H_
#define PENSTOCK_MODELS_WEIGHTS_PACKED_WEIGHTS_H_

#include <cstddef>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/float16.h"

namespace penstock::models {

// In the header of a packed file: the directory that it was made of, where pack says so.
inline constexpr const char* kPackedSource = "penstock.source";

struct PackedWeights {
  int bits = 8;  // of the matrices of layers: 8 or 4
  size_t group = 64;
  kernels::DType compute = kernels::DType::kBf16;  // what products are computed in: kBf16 or kFp32

  bool operator==(const PackedWeights&) const = default;
  std::map<std::string, std::string> ToMetadata() const;
  // nullopt: not packed. kInvalidArgument: by a newer version, or with values that are none.
  static absl::StatusOr<std::optional<PackedWeights>> Of(const std::map<std::string, std::string>& metadata);
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_PACKED_WEIGHTS_H_
