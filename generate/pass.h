// One pass over the model: every layer once, for tokens of several sequences side by side, its weights taken
// from a stream as they come.
//
//   rows     the sequences that decode, one token each and those drafted behind it; then pieces of prompts
//   order    of the stream: the matrices of a layer, the records of its sequences (cache on a drive), the
//            rest of the layer; then the head
//
// A sequence's values depend on its own tokens alone, to the bit: a row that decodes is multiplied by
// kernels/product.h and attends by kernels/attention.h, pieces of prompts are cut alike whatever else is in
// the pass, and attend for each sequence by itself.
//
// On a device with memory of its own, all but tables of rows is there: vectors, units as a DeviceStream
// brings them, what a layer computes. Keys and values are there too, or are copied there and back for each
// layer. Where LibTorch's libraries multiply, a pass has a multiple of kDeviceRows rows, some of which are
// nobody's: how those libraries sum a row depends on how many there are.
//
// Threads: one. Errors: of the stream; kResourceExhausted: LibTorch's memory is at its limit.
#ifndef PENSTOCK_GENERATE_PASS_H_
#define PENSTOCK_GENERATE_PASS_H_

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "generate/kv_cache.h"
#include "generate/matrix_product.h"
#include "generate/memory_plan.h"
#include "generate/stream.h"
#include "generate/weight_source.h"
#include "models/decoder.h"
#include "models/layout.h"
#include "zero/compute/device.h"

namespace penstock::generate {

// What LibTorch has thrown: its memory is at its limit.
absl::Status OutOfMemory(const c10::Error& error);

// What a sequence has in a pass.
struct Share {
  int slot = 0;      // of the cache
  int64_t past = 0;  // positions that are cached
  std::vector<int64_t>
      tokens;  // of the next positions; where it decodes the next, and those drafted behind it
  bool decodes = false;
  bool wants_logits = false;  // of its last position; where it decodes, of each
};

// The matrices that a pass uses, in the order of use: numbers of layout.tensors.
struct MatrixOrder {
  std::vector<int> all;
  std::vector<size_t> before_attention;  // by layer: how many of `all` are used before it attends
};
MatrixOrder OrderOf(const models::Decoder& decoder, const models::ModelLayout& layout);

// How a matrix of the layout is stored.
StoredMatrix StoredAs(const WeightSource& source, const models::ModelLayout& layout, int tensor);

// bf16 where all matrices are, else fp32, to which all types convert exactly.
kernels::DType ComputeType(const WeightSource& source, std::span<const int> uses);

// What stays in memory besides the resident units: vectors and small tables, in the compute type.
class KeptTensors {
 public:
  // Tables of at most `table_bytes` are kept, in host memory; vectors are on the device. `scratch`:
  // source->scratch_bytes(), used here and in Rows. All outlive it.
  static absl::StatusOr<std::unique_ptr<KeptTensors>> Load(const models::Decoder& decoder,
                                                           const models::ModelLayout& layout,
                                                           WeightSource* source, kernels::DType type,
                                                           uint64_t table_bytes, std::span<std::byte> scratch,
                                                           zero::Device* device);
  // What Load would keep, in bytes; and the most that it reads at once of what is kept in another form.
  struct Sizes {
    uint64_t kept_bytes = 0, loading_bytes = 0;
  };
  static Sizes SizesOf(const models::Decoder& decoder, const WeightSource& source, kernels::DType type,
                       uint64_t table_bytes);

  int tensor(int block, std::string_view name) const;  // -1: the block has none of this name
  at::Tensor vector(int tensor) const { return kept_.at(tensor); }
  // Rows of a table: [rows, columns], in host memory.
  absl::StatusOr<at::Tensor> Rows(int table, std::span<const int64_t> rows);

 private:
  absl::StatusOr<at::Tensor> Read(int tensor, std::span<const int64_t> rows, std::vector<int64_t> sizes);

  std::map<std::pair<int, std::string>, int, std::less<>> numbers_;  // of (block, name)
  std::map<int, at::Tensor> kept_;
  const models::ModelLayout* layout_ = nullptr;
  WeightSource* source_ = nullptr;
  kernels::DType type_ = kernels::DType::kBf16;
  std::span<std::byte> scratch_;
};

// Who multiplies: kernels/product.h, or LibTorch alone, as it must on a device of its own.
enum class Products : uint8_t { kOwn, kLibTorch };
Products ProductsOf(const zero::Device& device);

class PassRunner {
 public:
  // All outlive it. `stream`: a DeviceStream where the device has its own memory. `threads`: of products.
  PassRunner(const models::Decoder* decoder, const models::ModelLayout* layout, const MatrixOrder* order,
             WeightSource* source, KeptTensors* kept, ItemStream* stream, KvCache* cache,
             zero::Device* device, Products products, int threads);
  ~PassRunner();

  // Tells the stream what the pass of `shares` reads. With the cache in memory that is the same for every
  // pass, so it may be told before the shares are known; `known` 0: the units before the first layer's
  // records, the rest when they are known.
  void AppendStart();
  void AppendRest(const std::vector<Share>& shares);

  // Rows of a pass that so many tokens of a prompt take.
  int64_t RowsOf(int64_t tokens) const;

  // fp32 [wanted, vocab], in host memory: a row for each position that wants logits, in order. The shares
  // that decode come first.
  absl::StatusOr<at::Tensor> Run(const std::vector<Share>& shares);

 private:
  class Block;
  struct Rows;
  std::unique_ptr<Product> MakeProduct(const at::Tensor& x, const ProductRows& rows,
                                       const StoredMatrix& matrix);
  size_t UnitsBefore(size_t matrix) const;
  absl::StatusOr<at::Tensor> Embed(const std::vector<Share>& shares, const Rows& rows);
  absl::StatusOr<at::Tensor> Compute(const std::vector<Share>& shares);

  const models::Decoder& decoder_;
  const models::DecoderShape shape_;
  const models::ModelLayout& layout_;
  const MatrixOrder& order_;
  WeightSource& source_;
  KeptTensors& kept_;
  ItemStream& stream_;
  KvCache& cache_;
  zero::Device& device_;
  const Products products_;
  ProductScratch scratch_;
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_PASS_H_
