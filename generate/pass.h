// One pass over the model: every layer once, for tokens of several sequences side by side, its weights taken
// from a stream as they come.
//
//   rows     the sequences that decode, one token each and those drafted behind it; then pieces of prompts
//   order    of the stream: the matrices of a layer, the records of its sequences (cache on a drive), the
//            rest of the layer; then the head. Experts that routers choose come beside it
//            (generate/expert_cache.h)
//
// What it computes is the function of models/families/decoder.h. There are two of it: generate/host_pass.h in
// host memory, and generate/device_pass.h on a device with memory of its own, with LibTorch.
//
// Threads: one. Errors: of the stream; kResourceExhausted: memory is at its limit.
#ifndef PENSTOCK_GENERATE_PASS_H_
#define PENSTOCK_GENERATE_PASS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "generate/host_rows.h"
#include "generate/kv_cache.h"
#include "generate/stored_matrix.h"
#include "generate/stream.h"
#include "generate/weight_source.h"
#include "models/families/decoder.h"
#include "models/families/family.h"
#include "models/weights/layout.h"
#include "zero/compute/device.h"

namespace penstock::generate {

class ExpertCache;

// What a sequence has in a pass.
struct Share {
  int slot = 0;      // of the cache
  int64_t past = 0;  // positions that are cached
  std::vector<int64_t>
      tokens;  // of the next positions; where it decodes the next, and those drafted behind it
  bool decodes = false;
  bool wants_logits = false;  // of its last position; where it decodes, of each
  bool far = false;           // its sequence is longer than DecoderFunction::NearPositions
};

// The matrices that a pass uses, in the order of use: numbers of layout.tensors.
struct MatrixOrder {
  std::vector<int> all;
  std::vector<size_t> before_attention;  // by layer: how many of `all` are used before it attends
  // Those that routers choose, which `all` has not: expert e of layer i is number i * experts + e. Empty: the
  // model has no mixtures.
  std::vector<ExpertMatrices> experts;
  std::vector<int> adapters;  // that stay in memory, which `all` has not either

  WeightUses uses() const { return {all, experts}; }
};
MatrixOrder OrderOf(const models::Decoder& decoder, const models::ModelLayout& layout);

// How a matrix of the layout is stored.
StoredMatrix StoredAs(const WeightSource& source, const models::ModelLayout& layout, int tensor);

// bf16 where all matrices and adapters that every pass uses are, else fp32, to which all types convert
// exactly.
kernels::DType ComputeType(const WeightSource& source, const MatrixOrder& order);

// What stays in host memory besides the resident units: vectors, routers, adapters and small tables, in the
// compute type, or in fp32 (MixtureFunction::IsWide).
class KeptTensors {
 public:
  // Tables of at most `table_bytes` are kept. `scratch`: source->scratch_bytes(), used here and in Rows. All
  // outlive it.
  static absl::StatusOr<std::unique_ptr<KeptTensors>> Load(const models::Decoder& decoder,
                                                           const models::ModelLayout& layout,
                                                           WeightSource* source, kernels::DType type,
                                                           uint64_t table_bytes,
                                                           std::span<std::byte> scratch);
  // What Load would keep, in bytes; and the most that it reads at once of what is kept in another form.
  struct Sizes {
    uint64_t kept_bytes = 0, loading_bytes = 0;
  };
  static Sizes SizesOf(const models::Decoder& decoder, const WeightSource& source, kernels::DType type,
                       uint64_t table_bytes);

  kernels::DType type() const { return type_; }
  int tensor(int block, std::string_view name) const;  // -1: the block has none of this name
  // NAME.weight, or NAME where the block calls it that. It must be there.
  int matrix(int block, std::string_view name) const;
  // By tensor; a vector is one row, a router as many as it has.
  const std::map<int, HostRows>& kept() const { return kept_; }
  const HostRows& vector(int tensor) const { return kept_.at(tensor); }
  // Rows of a table.
  absl::StatusOr<HostRows> Rows(int table, std::span<const int64_t> rows);

 private:
  absl::StatusOr<HostRows> Read(int tensor, std::span<const int64_t> rows, int64_t columns,
                                kernels::DType type);

  std::map<std::pair<int, std::string>, int, std::less<>> numbers_;  // of (block, name)
  std::map<int, HostRows> kept_;
  const models::ModelLayout* layout_ = nullptr;
  WeightSource* source_ = nullptr;
  kernels::DType type_ = kernels::DType::kBf16;
  std::span<std::byte> scratch_;
};

// What a pass is made with; all outlive it. `stream`: a DeviceStream where the device has its own memory.
struct PassParts {
  const models::LanguageModel* model = nullptr;
  const models::Decoder* decoder = nullptr;
  const models::ModelLayout* layout = nullptr;
  const MatrixOrder* order = nullptr;
  WeightSource* source = nullptr;
  KeptTensors* kept = nullptr;
  ItemStream* stream = nullptr;
  KvCache* cache = nullptr;
  ExpertCache* experts = nullptr;  // null: the model has no mixtures
  zero::Device* device = nullptr;
};

class PassRunner {
 public:
  virtual ~PassRunner() = default;

  // Tells the stream what the pass of `shares` reads. With the cache in memory that is the same for every
  // pass, so it may be passed on before the shares are known: AppendStart passes the units before the first
  // layer's records, AppendRest the others when they are known.
  void AppendStart();
  void AppendRest(const std::vector<Share>& shares);

  // Rows of a pass that so many tokens of a prompt take.
  virtual int64_t RowsOf(int64_t tokens) const = 0;

  // fp32 [wanted, vocab], in host memory, until the next Run: a row for each position that wants logits, in
  // order. The shares that decode come first.
  virtual absl::StatusOr<std::span<const float>> Run(const std::vector<Share>& shares) = 0;

 protected:
  explicit PassRunner(const PassParts& parts) : parts_(parts) {}

  // Hands over the parts of a matrix as the stream brings them, in order: `add` is given memory, first
  // element and elements, and is done with the memory when it returns.
  absl::Status ForParts(
      int tensor, const StoredMatrix& matrix,
      absl::FunctionRef<absl::Status(const std::byte* memory, int64_t first, int64_t elements)> add);

  // A layer's keys and values of a share: where the cache keeps them in memory, or as the stream brings them.
  struct Records {
    std::byte* memory = nullptr;
    int64_t first = 0;  // position that memory begins with
    StreamItem item;    // where the cache is on a drive
  };
  absl::StatusOr<Records> TakeRecords(const Share& share, int64_t layer);
  // After those of this pass's positions are in them.
  absl::Status KeepRecords(const Records& records);

  // Rows whose logits are wanted; `first`: of each share.
  static std::vector<int64_t> WantedRows(const std::vector<Share>& shares, const std::vector<int64_t>& first);

  const PassParts parts_;

 private:
  size_t UnitsBefore(size_t matrix) const;

  StreamItem unit_;  // whose parts are handed over
  bool held_ = false;
  size_t part_ = 0;
};

// Who computes on a device with memory of its own (generate/device_pass.h).
class DeviceCompute {
 public:
  virtual ~DeviceCompute() = default;
  virtual absl::StatusOr<std::unique_ptr<PassRunner>> MakePass(const PassParts& parts) = 0;
  // How long the products of `rows` rows, a multiple of kDeviceRows, with such a matrix take, in seconds.
  virtual absl::StatusOr<double> MeasureProduct(const StoredMatrix& matrix, int64_t rows,
                                                zero::Device* device) = 0;
};
// Whether a device needs one: what has the host's tensors is computed with as the host is.
inline bool NeedsDeviceCompute(const zero::Device& device) {
  return device.has_own_memory() && !device.tensors_are_host();
}

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_PASS_H_
