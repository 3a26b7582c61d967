// What adapters leave frozen, read where it lies: safetensors as they are published, or as `penstock pack`
// coded them. Nothing is converted beforehand, copied or written.
//
// A tile of a block's run has parts of tensors, which begin anywhere in their files: each part is one read,
// to where its weights go. What the files have in a narrower type, or coded, is read to the end of that place
// and made wider from its beginning on, so that it takes no memory of its own; only rows of codes that a tile
// has in part, and vectors in a wider type, take a buffer of their length while they are read.
//
// Not everything can be read so: Open says why not. Then the weights are copied into the state.
#ifndef PENSTOCK_MODELS_WEIGHTS_FROZEN_WEIGHTS_H_
#define PENSTOCK_MODELS_WEIGHTS_FROZEN_WEIGHTS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/file.h"
#include "kernels/float16.h"
#include "models/weights/layout.h"
#include "models/weights/weight_import.h"
#include "zero/compute/frozen_source.h"

namespace penstock::models {

class FrozenWeights : public zero::FrozenSource {
 public:
  // `layout`: of the adapted model, without its adapters. `type`: what the run computes with. kUnimplemented:
  // why these weights cannot be read in place; others as WeightImport::OpenAnyCode and aio::File::Open.
  static absl::StatusOr<std::unique_ptr<FrozenWeights>> Open(const std::string& path, ModelLayout layout,
                                                             kernels::DType type, const std::string& label);

  // The files, in the order of their names.
  std::vector<std::string> Paths() const;
  // Bits of its coded matrices; 0: none is.
  int bits() const { return bits_; }

  int64_t BytesOf(tiering::BlockIndex block, int64_t elements) const override;
  std::string PlaceOf(tiering::BlockIndex block) const override;
  std::unique_ptr<Read> MakeRead() const override;
  absl::Status Start(aio::Engine& io, Read* read, tiering::BlockIndex block, int64_t first, int64_t elements,
                     std::byte* to, Done done, void* context) override;
  absl::Status Finish(Read* read) override;

 private:
  struct Tensor {
    aio::File* file = nullptr;
    uint64_t offset = 0;
    kernels::DType type = kernels::DType::kBf16;  // of what is not coded
    std::optional<kernels::WeightCode> code;
  };
  struct Part;
  class TileRead;

  FrozenWeights(ModelLayout layout, kernels::DType type) : layout_(std::move(layout)), type_(type) {}
  absl::Status Take(const WeightImport& import, size_t tensor);
  Part PartOf(size_t tensor, const TensorPiece& piece) const;
  void Round(const float* values, size_t n, std::byte* to) const;
  void Widen(const Part& part) const;
  void Decode(const Part& part) const;

  const ModelLayout layout_;
  const kernels::DType type_;
  int bits_ = 0;
  std::map<std::string, std::unique_ptr<aio::File>> files_;
  std::vector<Tensor> tensors_;  // parallel to layout_.tensors
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_FROZEN_WEIGHTS_H_
