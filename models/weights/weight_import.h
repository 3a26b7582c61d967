// Initial weights from safetensors, in Hugging Face's names and shapes: what `penstock export` writes, and
// what is published under those names (with the family's prefix, as "transformer." or "model.", or without).
//
// A path is as in models/weights/weight_files.h. Values may be fp32, bf16 or fp16; they become the fp32
// masters exactly. Matrices that Conv1D keeps as [in, out] are turned on the way. Memory: a buffer of 256
// KiB, whatever the model.
//
// Nothing is guessed: a tensor that is missing, of another shape, or without a place in the model is an error
// that names it. Masks and other constants that old files carry are passed over, and an output embedding is,
// if it is the tied one.
//
// What `penstock pack` wrote (models/weights/weight_pack.h), and matrices in fp8 or mxfp4
// (models/weights/scaled_weights.h), are taken where the caller asks for them, and read in place.
//
// Threads: one. Errors: kInvalidArgument: not the weights of this model; kDataLoss: not what it says it is;
// others as the operating system says.
#ifndef PENSTOCK_MODELS_WEIGHTS_WEIGHT_IMPORT_H_
#define PENSTOCK_MODELS_WEIGHTS_WEIGHT_IMPORT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/weight_code.h"
#include "models/weights/layout.h"
#include "models/weights/packed_weights.h"
#include "models/weights/scaled_weights.h"
#include "swap/safetensors.h"

namespace penstock::models {

// The model that the weights at `path` were made for: config.json beside them, or what `penstock export` put
// into the file's header. Null where neither is there.
absl::StatusOr<nlohmann::json> ConfigOfWeights(const std::string& path);

// How the weights at `path` are packed, by the header of one of its files; nullopt: they are not, or there
// are none.
absl::StatusOr<std::optional<PackedWeights>> PackingOf(const std::string& path);

class WeightImport {
 public:
  // Opens every file and finds every tensor of the model; reads no weights but to compare a tied embedding.
  static absl::StatusOr<std::unique_ptr<WeightImport>> Open(const std::string& path, ModelLayout layout);
  // `label`: the words that errors begin with, instead of --init-from.
  static absl::StatusOr<std::unique_ptr<WeightImport>> Open(const std::string& path, ModelLayout layout,
                                                            const std::string& label);

  // The same, but the weights may be packed: packed() says so. Coded tensors are read in place, by PlaceOf
  // alone.
  static absl::StatusOr<std::unique_ptr<WeightImport>> OpenAnyCode(const std::string& path,
                                                                   ModelLayout layout,
                                                                   const std::string& label);

  // Elements [first, first + elements) of a block's run, as fp32; zeros between the parameters. Not of coded
  // weights.
  absl::Status Read(int block, int64_t first, int64_t elements, float* to);

  // Elements [from, to) of tensor `i` of the layout, likewise.
  absl::Status ReadTensor(size_t i, int64_t from, int64_t to, float* out) {
    const PublishedTensor& tensor = layout_.tensors[i];
    return sources_[i].turned ? ReadTurned(tensor, sources_[i], from, to, out)
                              : ReadPlain(sources_[i], from, to, out);
  }

  // Where tensor `i` of the layout lies, for who reads it in place.
  struct Place {
    std::string path;
    uint64_t offset = 0;  // in the file
    swap::Dtype dtype = swap::Dtype::kF32;
    // Of a coded matrix, which is row by row as kept, even where it is published turned.
    std::optional<kernels::WeightCode> code;
    std::shared_ptr<const ScaledMatrix> scaled;  // of a matrix with scales of its own; else null
    bool turned = false;                         // a matrix that lies there as [columns, rows]
    // Of an expert's matrix in mxfp4, whose `scaled` has no scales: where the exponents are. 0 bytes: it has.
    std::string scales_path = {};
    uint64_t scales_offset = 0, scales_bytes = 0;
  };
  Place PlaceOf(size_t i) const {
    const Source& source = sources_[i];
    const uint64_t before = static_cast<uint64_t>(source.first) * swap::DtypeBytes(source.info->dtype);
    Place place = {source.file->path(), source.file->data_start() + source.info->offset + before,
                   source.info->dtype,  CodeOf(i),
                   source.scaled,       source.turned && !CodeOf(i).has_value()};
    if (source.scales_bytes > 0) {
      place.scales_path = source.scales_file->path();
      place.scales_offset = source.scales_file->data_start() + source.scales_offset;
      place.scales_bytes = source.scales_bytes;
    }
    return place;
  }
  // Null: not packed.
  const std::optional<PackedWeights>& packed() const { return packed_; }

 private:
  struct Source {
    const swap::SafetensorsReader* file = nullptr;
    const swap::TensorInfo* info = nullptr;
    std::shared_ptr<const ScaledMatrix> scaled = nullptr;
    int64_t first = 0;    // element of the file's tensor that the model's begins with
    bool turned = false;  // the model's lies there as [columns, rows]
    // Place::scales_bytes, and where they begin in that file's data.
    const swap::SafetensorsReader* scales_file = nullptr;
    uint64_t scales_offset = 0, scales_bytes = 0;
  };
  using Sources = std::map<std::string, Source>;  // by name, without the prefix
  WeightImport(std::string path, ModelLayout layout) : path_(std::move(path)), layout_(std::move(layout)) {}
  absl::Status OpenFiles(const std::string& path, const std::string& given, bool coded);
  absl::Status TakePacked(const swap::SafetensorsReader& file, bool coded);
  absl::Status CheckCoded(const PublishedTensor& tensor, const swap::TensorInfo& info) const;
  std::optional<kernels::WeightCode> CodeOf(size_t i) const;
  std::string WithoutPrefix(const std::string& name) const;
  bool IsPassedOver(const std::string& name) const;
  // Sets `scaled` of a source whose matrix has scales of its own, and adds their names to `known`.
  absl::Status TakeFp8(const PublishedTensor& tensor, const Sources& there, Source* source,
                       std::set<std::string>* known) const;
  // Of the matrices of this shape that lie under `name`, one behind the other: number `index` of `matrices`;
  // 0: it is a matrix. Without a file: it is not there in mxfp4.
  absl::StatusOr<Source> TakeMxfp4(const PublishedTensor& tensor, const std::string& name, uint64_t matrices,
                                   uint64_t index, const Sources& there, std::set<std::string>* known) const;
  // Where a tensor that has not its own name there has another place. Without a file: it has none.
  absl::StatusOr<Source> TakeOtherPlace(const PublishedTensor& tensor, const Sources& there,
                                        std::set<std::string>* known) const;
  absl::Status Find(const Sources& there);
  absl::Status CheckTied(const Source& output);
  absl::Status ReadPlain(const Source& source, int64_t from, int64_t to, float* out);
  absl::Status ReadTurned(const PublishedTensor& tensor, const Source& source, int64_t from, int64_t to,
                          float* out);
  // Elements [from, from + n) of the file's tensor into values().
  absl::Status Load(const Source& source, int64_t from, int64_t n);

  const std::string path_;  // with the label before it
  const ModelLayout layout_;
  std::vector<std::unique_ptr<swap::SafetensorsReader>> files_;
  std::vector<Source> sources_;  // parallel to layout_.tensors
  std::optional<PackedWeights> packed_;
  bool takes_scaled_ = false;
  Quantization quantization_;
  std::vector<std::byte> raw_;
  std::vector<float> values_;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_WEIGHT_IMPORT_H_
